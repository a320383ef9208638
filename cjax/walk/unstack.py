"""A trace in which each layer of an author's own stack has variables of its own.

A leaf that holds all layers along dim 0 (`nn.scan`, `nnx.vmap`) becomes a variable for each layer, of the same rank,
its dim 0 of size 1; and so does what is made of it, as long as layers do not meet: elementwise work, reductions along
other dims. A sum over all layers becomes a sum of each layer's, and a chain of additions. Whatever else brings layers
together reads them put together again, and is as it was.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax import lax

from cjax.jax_compat.core import Atom, Aval, ClosedJaxpr, Equation, Literal, Params, Var, make_jaxpr
from cjax.jax_compat.jaxprs import new_literal, new_var, place_of
from cjax.trace.jaxpr.evaluate import put_in_place
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.simplify import replaced
from cjax.trace.jaxpr.view import is_scan, scan_of
from cjax.walk.through import operand_dims, params_of_part

Layers = tuple[Atom, ...]
_TOGETHER: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "reduce_sum": lax.add, "reduce_max": lax.max, "reduce_min": lax.min, "reduce_prod": lax.mul,
    "reduce_and": lax.bitwise_and, "reduce_or": lax.bitwise_or, "reduce_xor": lax.bitwise_xor,
    "dot_general": lax.add,
}  # fmt: skip


@dataclass(frozen=True)
class Unstacked:
    """A flat trace, and for each input and result of the one before: itself, or one for each layer."""

    closed: ClosedJaxpr
    ins: tuple[tuple[Var, ...], ...]
    outs: tuple[tuple[Atom, ...], ...]


def unstack(closed: ClosedJaxpr, ins: Mapping[int, int], outs: Mapping[int, int]) -> Unstacked:
    """Take stacks apart.

    Args:
      closed: a flat trace.
      ins: inputs whose dim 0 are layers, by position: their number.
      outs: the same of results.

    >>> import jax.numpy as jnp
    >>> apart = unstack(make_jaxpr(lambda w: (w * 2.0, w.sum()))(jnp.ones((2, 3))), {0: 2}, {0: 2})
    >>> [len(vars) for vars in (*apart.ins, *apart.outs)]
    [2, 2, 1]
    >>> [eqn.primitive.name for eqn in apart.closed.eqns]
    ['mul', 'mul', 'reduce_sum', 'reduce_sum', 'add']
    """
    jaxpr = closed.jaxpr
    apart = _Apart()
    new_ins: list[tuple[Var, ...]] = []
    for position, var in enumerate(jaxpr.invars):
        num = ins.get(position, 0)
        new_ins.append(tuple(new_var(_part(var.aval, 0, num)) for _ in range(num)) if num else (var,))
        if num:
            apart.layers[var] = 0, new_ins[-1]
    for eqn in jaxpr.eqns:
        apart.add(eqn)
    new_outs = [
        apart.parts(atom, 0, outs[position]) if position in outs else (apart.whole(atom),)
        for position, atom in enumerate(jaxpr.outvars)
    ]
    invars = [var for group in new_ins for var in group]
    outvars = [atom for group in new_outs for atom in group]
    flat = jaxpr.replace(invars=invars, outvars=outvars, eqns=needed(apart.eqns, outvars))
    return Unstacked(ClosedJaxpr(flat, closed.consts), tuple(new_ins), tuple(new_outs))


def needed(eqns: Sequence[Equation], outs: Sequence[Atom]) -> list[Equation]:
    """The equations that results are made of."""
    live = {atom for atom in outs if type(atom) is not Literal}
    kept = []
    for eqn in reversed(eqns):
        if not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(atom for atom in eqn.invars if type(atom) is not Literal)
    return kept[::-1]


def _part(aval: Aval, dim: int, num: int) -> Aval:
    shape = tuple(n // num if i == dim else n for i, n in enumerate(aval.shape))
    return Aval(shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


class _Apart:
    """Collects equations. `layers` are variables that are apart: along which dim, and the part of each layer."""

    def __init__(self) -> None:
        self.eqns: list[Equation] = []
        self.layers: dict[Var, tuple[int, Layers]] = {}
        self._env: dict[Var, Atom] = {}
        self._made: dict[Var, Equation] = {}
        self._parts: dict[tuple[Var, int, int], Layers] = {}
        self._turns: dict[int, list[list[Atom]]] = {}
        self._traced: dict[Hashable, ClosedJaxpr] = {}

    def add(self, eqn: Equation) -> None:
        """Append what an equation becomes."""
        apart = {i: self.layers[v] for i, v in enumerate(eqn.invars) if type(v) is not Literal and v in self.layers}
        if not apart:
            self._append(eqn.replace(invars=[self.whole(atom) for atom in eqn.invars]))
            return
        nums = {len(layers) for _, layers in apart.values()}
        if len(nums) == 1:
            (num,) = nums
            for dim in range(len(eqn.outvars[0].aval.shape)):
                dims = operand_dims(eqn, dim, num)
                if dims is not None and all(dims[i] == own for i, (own, _) in apart.items()):
                    for var, layers in zip(eqn.outvars, self._emit(eqn, dim, num, dims), strict=True):
                        self.layers[var] = dim, layers
                    return
            if self._add_up(eqn, {i: dim for i, (dim, _) in apart.items()}, num):
                return
        self._append(eqn.replace(invars=[self.whole(atom) for atom in eqn.invars]))

    def _append(self, eqn: Equation) -> None:
        self.eqns.append(eqn)
        self._made.update((var, eqn) for var in eqn.outvars)

    def _trace(
        self, key: Hashable, function: Callable[..., object], atoms: Sequence[Atom], near: Equation | None
    ) -> Atom:
        """The result of a small function of ours, as if it stood where `near` does."""
        avals = tuple((v.aval.shape, v.aval.dtype) for v in atoms)
        if (key, avals) not in self._traced:
            self._traced[key, avals] = make_jaxpr(function)(*(jax.ShapeDtypeStruct(*aval) for aval in avals))
        place, start = {} if near is None else place_of(near), len(self.eqns)
        (out,) = put_in_place(self._traced[key, avals], atoms, self.eqns, lambda eqn: place)
        self._made.update((var, eqn) for eqn in self.eqns[start:] for var in eqn.outvars)
        return out

    def whole(self, atom: Atom) -> Atom:
        """An atom with all layers in it."""
        if type(atom) is Literal or atom not in self.layers:
            return replaced(self._env, atom)
        if atom not in self._env:
            dim, layers = self.layers[atom]
            near = self.eqns[-1] if self.eqns else None
            join = lambda *parts: lax.concatenate(parts, dim)  # noqa: E731
            self._env[atom] = self._trace(("whole", dim, len(layers)), join, layers, near)
        return self._env[atom]

    def parts(self, atom: Atom, dim: int, num: int) -> Layers:
        """An atom's equal parts along a dim, one for each layer."""
        assert type(atom) is not Literal and atom.aval.shape[dim] % num == 0, (atom, dim, num)
        if atom in self.layers and (self.layers[atom][0], len(self.layers[atom][1])) == (dim, num):
            return self.layers[atom][1]
        var = self.whole(atom)
        assert type(var) is not Literal
        if (var, dim, num) not in self._parts:
            self._parts[var, dim, num] = self._parts_of(var, dim, num)
        return self._parts[var, dim, num]

    def _parts_of(self, var: Var, dim: int, num: int) -> Layers:
        eqn = self._made.get(var)
        if eqn is not None and is_scan(eqn):
            loop = scan_of(eqn)
            place = list(eqn.outvars).index(var)
            if dim == 0 and loop.length == num and place >= loop.num_carry and not loop.closed.consts:
                return tuple(turn[place - loop.num_carry] for turn in self._turns_of(eqn))
        dims = None if eqn is None else operand_dims(eqn, dim, num)
        if eqn is not None and dims is not None:
            for out, layers in zip(eqn.outvars, self._emit(eqn, dim, num, dims), strict=True):
                self._parts[out, dim, num] = layers
            return self._parts[var, dim, num]
        size = var.aval.shape[dim] // num
        cut = lambda x, start: lax.dynamic_slice_in_dim(x, start, size, dim)  # noqa: E731
        # Where it starts is an operand, so that layers are alike but for a number.
        starts = [new_literal(np.int32(layer * size), Aval((), np.dtype(np.int32))) for layer in range(num)]
        return tuple(self._trace(("cut", dim, num), cut, [var, start], eqn) for start in starts)

    def _emit(self, eqn: Equation, dim: int, num: int, dims: Sequence[int | None]) -> list[Layers]:
        """An equation for each layer; of each result, the part of each layer."""
        params = params_of_part(eqn, dim, num)
        ins = [
            (self.whole(atom),) * num if own is None else self.parts(atom, own, num)
            for atom, own in zip(eqn.invars, dims, strict=True)
        ]
        outs: list[list[Var]] = [[] for _ in eqn.outvars]
        for layer in range(num):
            made = [new_var(_part(var.aval, dim, num)) for var in eqn.outvars]
            operands = [atoms[layer] for atoms in ins]
            self._append(eqn.replace(invars=operands, outvars=made, params=params))
            for result, var in zip(outs, made, strict=True):
                result.append(var)
        return [tuple(result) for result in outs]

    def _add_up(self, eqn: Equation, apart: Mapping[int, int], num: int) -> bool:
        """What sums over all layers: each layer's own, added up. Whether it is such an equation."""
        name = name_of(eqn)
        if name not in _TOGETHER:
            return False
        if name == "dot_general":
            contracted = eqn.params["dimension_numbers"][0]
            places = {
                dims.index(apart[i]) if apart[i] in dims else -1 for i, dims in enumerate(contracted) if i in apart
            }
            if len(places) != 1 or -1 in places:
                return False
            (place,) = places
            own = [dims[place] for dims in contracted]
        else:
            own = [apart[0]]
            if apart[0] not in eqn.params["axes"]:
                return False
        params: Params = dict(eqn.params)
        ins = [self.parts(atom, dim, num) for atom, dim in zip(eqn.invars, own, strict=True)]
        total: Atom | None = None
        for operands in zip(*ins, strict=True):
            term = new_var(eqn.outvars[0].aval)
            self._append(eqn.replace(invars=list(operands), outvars=[term], params=params))
            total = term if total is None else self._trace(name, _TOGETHER[name], [total, term], eqn)
        assert total is not None
        self._env[eqn.outvars[0]] = total
        return True

    def _turns_of(self, eqn: Equation) -> list[list[Atom]]:
        """For each turn of a loop, what it gives, with the loop's dim in front."""
        if id(eqn) in self._turns:
            return self._turns[id(eqn)]
        loop = scan_of(eqn)
        xs = [self.parts(atom, 0, loop.length) for atom in loop.xs(eqn.invars)]
        carries = loop.carries(eqn.invars)
        place = place_of(eqn)
        turns: dict[int, list[Atom]] = {}
        for turn in reversed(range(loop.length)) if loop.reverse else range(loop.length):
            own = [self._trace("squeeze", lambda x: lax.squeeze(x, (0,)), [x[turn]], eqn) for x in xs]
            start = len(self.eqns)
            outs = put_in_place(loop.closed, [*loop.consts(eqn.invars), *carries, *own], self.eqns, lambda _: place)
            self._made.update((var, made) for made in self.eqns[start:] for var in made.outvars)
            carries = loop.last(outs)
            expand = lambda x: lax.expand_dims(x, (0,))  # noqa: E731
            turns[turn] = [self._trace("expand", expand, [y], eqn) for y in loop.ys(outs)]
        self._turns[id(eqn)] = [turns[turn] for turn in range(loop.length)]
        return self._turns[id(eqn)]


def size_of(atom: Atom) -> int:
    """Bytes of a value; a random key counts as what it is made of."""
    dtype = getattr(atom.aval, "dtype", None)
    return 0 if dtype is None else math.prod(atom.aval.shape) * dtype.itemsize
