"""What is joined to be summed up and cut apart again is never joined: scores, say, and one more number to each row.

An attention with a sink writes `softmax(concatenate([scores, sink]))[..., :-1]`. As written, its rows are one longer
than there are keys, which no axis divides, and the numbers in the last place see no key. Kept apart, the sink is a term
of the maximum and one of the sum, and all else is a softmax of scores.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import jax
import numpy as np
from jax import lax

from cjax.jax_compat.core import Atom, Aval, Equation, Literal, Var, make_jaxpr
from cjax.jax_compat.jaxprs import new_var, place_of
from cjax.trace.jaxpr.evaluate import put_in_place
from cjax.trace.jaxpr.primitives import goes_by_element, name_of
from cjax.trace.jaxpr.view import standing_for, variable_of

Parts = tuple[Atom, Atom]
_TOGETHER: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {"reduce_max": lax.max, "reduce_sum": lax.add}


def kept_apart(eqns: Sequence[Equation], results: Iterable[Atom]) -> tuple[list[Equation], dict[Var, Atom]]:
    """Flat equations without such joins, and what stands for variables that are gone.

    Args:
      eqns: in order.
      results: what is read of them.

    >>> import jax.numpy as jnp
    >>> def weights(x, sink):
    ...     return jax.nn.softmax(jnp.concatenate([x, sink], 1))[:, :-1]
    >>> from cjax.trace.jaxpr.simplify import simplify
    >>> flat = simplify(jax.make_jaxpr(weights)(jnp.ones((2, 3)), jnp.ones((2, 1))))  # which asks for it
    >>> {"concatenate", "slice"} & {name_of(eqn) for eqn in flat.eqns}
    set()
    """
    if not any(_adds_a_place(eqn) for eqn in eqns):
        return list(eqns), {}
    env = _shifted_once(eqns)
    eqns = [_renamed(eqn, env) for eqn in eqns]
    kept = {standing_for(atom, env) for atom in results if not isinstance(atom, Literal)}
    readers: dict[Var, list[Equation]] = {}
    for eqn in eqns:
        for atom in eqn.invars:
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(eqn)
    regions = [_Region(eqn) for eqn in eqns if _adds_a_place(eqn)]
    regions = [region for region in regions if region.closes(readers, kept)]
    # What reads two joins at once is left as it is, and both with it.
    held = Counter(number for region in regions for number in region.members)
    alone = [region for region in regions if all(held[number] == 1 for number in region.members)]
    closed = {number: region for region in alone for number in region.members}
    found: list[Equation] = []
    for eqn in eqns:
        if id(eqn) in closed:
            closed[id(eqn)].write(eqn, env, found)
        else:
            found.append(_renamed(eqn, env))
    return found, env


def _renamed(eqn: Equation, env: Mapping[Var, Atom]) -> Equation:
    if not any(not isinstance(atom, Literal) and atom in env for atom in eqn.invars):
        return eqn
    return eqn.replace(invars=[standing_for(atom, env) for atom in eqn.invars])


def _adds_a_place(eqn: Equation) -> bool:
    """Whether two arrays are joined, one of them one place long."""
    if name_of(eqn) != "concatenate" or len(eqn.invars) != 2 or any(isinstance(atom, Literal) for atom in eqn.invars):
        return False
    dim = eqn.params["dimension"]
    return sorted(atom.aval.shape[dim] > 1 for atom in eqn.invars) == [False, True]


class _Region:
    """The equations between a join and the sums and slices that end it; their results have its shape."""

    def __init__(self, join: Equation) -> None:
        self._join = join
        self._dim: int = join.params["dimension"]
        self._shape = tuple(join.outvars[0].aval.shape)
        self._sizes = [atom.aval.shape[self._dim] for atom in join.invars]
        self._parts: dict[Var, Parts] = {}
        self.members: set[int] = {id(join)}

    def closes(self, readers: Mapping[Var, Sequence[Equation]], kept: Container[Atom]) -> bool:
        """Finds the members, and whether nothing else reads what they make."""
        waiting, ends = [self._join.outvars[0]], set[str]()
        while waiting:
            var = waiting.pop()
            if var in kept:
                return False
            for eqn in readers.get(var, ()):
                name = name_of(eqn)
                if id(eqn) in self.members:
                    continue
                if name in _TOGETHER and tuple(eqn.params["axes"]) == (self._dim,) or self._cut(eqn) is not None:
                    ends.add(name)
                elif goes_by_element(eqn) and [tuple(out.aval.shape) for out in eqn.outvars] == [self._shape]:
                    waiting.append(eqn.outvars[0])
                else:
                    return False
                self.members.add(id(eqn))
        return ends >= {"reduce_sum", "slice"}

    def _cut(self, eqn: Equation) -> int | None:
        """Which part a slice is of, if it is all of one."""
        if name_of(eqn) != "slice" or set(eqn.params["strides"] or {1}) != {1}:
            return None
        first, last, dim = eqn.params["start_indices"], eqn.params["limit_indices"], self._dim
        stretches = [(0, self._sizes[0]), (self._sizes[0], self._shape[dim])]
        wanted = [(0, size) for size in self._shape]
        for part, stretch in enumerate(stretches):
            wanted[dim] = stretch
            if list(zip(first, last, strict=True)) == wanted:
                return part
        return None

    def write(self, eqn: Equation, env: dict[Var, Atom], eqns: list[Equation]) -> None:
        """Appends what a member is of the parts; notes in `env` what stands for a result that is no longer joined."""
        (out,), name = eqn.outvars, name_of(eqn)
        if eqn is self._join:
            left, right = (standing_for(atom, env) for atom in eqn.invars)
            self._parts[out] = left, right
        elif name in _TOGETHER:
            env[out] = self._reduced(eqn, eqns)
        elif name == "slice":
            part = self._cut(eqn)
            assert part is not None
            env[out] = self._parts[variable_of(eqn, 0)][part]
        else:
            left, right = (self._by_element(eqn, part, env, eqns) for part in (0, 1))
            self._parts[out] = left, right

    def _reduced(self, eqn: Equation, eqns: list[Equation]) -> Atom:
        parts, out, dim = self._parts[variable_of(eqn, 0)], eqn.outvars[0], self._dim
        wide = self._sizes.index(max(self._sizes))
        of_wide = new_var(out.aval)
        eqns.append(eqn.replace(invars=[parts[wide]], outvars=[of_wide]))

        def together(many: jax.Array, one: jax.Array) -> jax.Array:
            return _TOGETHER[name_of(eqn)](many, lax.squeeze(one, [dim]))

        return _written(together, [of_wide, parts[1 - wide]], eqn, eqns)

    def _by_element(self, eqn: Equation, part: int, env: Mapping[Var, Atom], eqns: list[Equation]) -> Var:
        ins = [self._part_of(atom, part, eqn, env, eqns) for atom in eqn.invars]
        shape, aval = list(self._shape), eqn.outvars[0].aval
        shape[self._dim] = self._sizes[part]
        out = new_var(Aval(tuple(shape), aval.dtype, getattr(aval, "weak_type", False)))
        eqns.append(eqn.replace(invars=ins, outvars=[out]))
        return out

    def _part_of(self, atom: Atom, part: int, eqn: Equation, env: Mapping[Var, Atom], eqns: list[Equation]) -> Atom:
        if not isinstance(atom, Literal) and atom in self._parts:
            return self._parts[atom][part]
        atom = standing_for(atom, env)
        shape = np.shape(atom.val) if isinstance(atom, Literal) else atom.aval.shape
        if len(shape) <= self._dim or shape[self._dim] == 1:
            return atom
        first = part * self._sizes[0]

        def cut(whole: jax.Array) -> jax.Array:
            return lax.slice_in_dim(whole, first, first + self._sizes[part], axis=self._dim)

        return _written(cut, [atom], eqn, eqns)


def _written(function: Callable[..., jax.Array], atoms: Sequence[Atom], near: Equation, eqns: list[Equation]) -> Atom:
    """Appends the equations of `function`, as written where `near` was."""
    shapes = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
    (out,) = put_in_place(make_jaxpr(function)(*shapes), atoms, eqns, lambda eqn: place_of(near))
    return out


# --- a maximum that is taken off twice ---


def _shifted_once(eqns: Sequence[Equation]) -> dict[Var, Atom]:
    """What `x - max(x)` less its own maximum is: itself, since that is 0 in every row that has one, gradient and all.

    Authors take it off before a softmax that does so too.
    """
    writer = {eqn.outvars[0]: eqn for eqn in eqns if len(eqn.outvars) == 1}
    off: dict[Var, tuple[int, ...]] = {}  # what has had its maximum taken off, and over which dims
    env: dict[Var, Atom] = {}
    for eqn in eqns:
        if name_of(eqn) != "sub" or any(isinstance(atom, Literal) for atom in eqn.invars):
            continue
        of, axes = variable_of(eqn, 0), _maximum_over(eqn, writer)
        if axes is not None and off.get(of) == axes:
            env[eqn.outvars[0]] = of
        elif axes is not None:
            off[eqn.outvars[0]] = axes
    return env


def _maximum_over(eqn: Equation, writer: Mapping[Var, Equation]) -> tuple[int, ...] | None:
    """Over which dims the maximum was taken that a subtraction takes off its own left side."""
    of, var = variable_of(eqn, 0), variable_of(eqn, 1)
    every = list(range(len(of.aval.shape)))
    places = every
    while (made := writer.get(var)) is not None:
        name, side = name_of(made), 0
        if name == "reduce_max":
            axes = tuple(made.params["axes"])
            is_own = made.invars[0] is of and places == [dim for dim in every if dim not in axes]
            return axes if is_own else None
        if name == "broadcast_in_dim":
            dims = list(made.params["broadcast_dimensions"])
            if len(made.outvars[0].aval.shape) != len(every) or (dims != every and places != every):
                return None
            places = dims if dims != every else places
        elif name == "max":  # of -inf and the maximum, as `jax.nn.softmax` has it
            numbers = [isinstance(atom, Literal) and atom.val == -np.inf for atom in made.invars]
            if not any(numbers):
                return None
            side = numbers.index(False)
        elif name != "stop_gradient":
            return None
        if isinstance(made.invars[side], Literal):
            return None
        var = variable_of(made, side)
    return None
