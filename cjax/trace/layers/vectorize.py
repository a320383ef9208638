"""Rolled evaluation: a trace on the user's leaves, evaluated once for each group of corresponding leaves.

A model's init and an optimizer's update are written for one leaf per layer; cjax stores corresponding leaves stacked.
Unstacking, updating and restacking would take twice the memory, and compile time would grow with depth.
"""

import functools
import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import ClosedJaxpr, Equation, Literal, Var
from cjax.jax_compat.jaxprs import in_context, name_stack
from cjax.jax_compat.random import is_threefry
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import cond_of
from cjax.trace.layers.grouping import CHAINED, Atom, Grouping, Node, One, Operand, Source, StackedLeaves, Take, Whole


@dataclass(frozen=True)
class SpreadRows:
    """Members of a stack that lie among more rows: a stage of a pipeline that has fewer layers than others keeps rows
    for as many. What the other rows hold is read by nobody; of an output it is 0.

    Args:
      num_rows: of the stack.
      places: for each member, its row.
    """

    num_rows: int
    places: tuple[int, ...]

    @property
    def sources(self) -> np.ndarray:
        """For each row the member in it; where none is, the first."""
        found = np.zeros(self.num_rows, int)
        found[list(self.places)] = np.arange(len(self.places))
        return found

    def mask(self, ndim: int) -> np.ndarray:
        """Which rows have a member, to be broadcast over an array of `ndim` dims."""
        found = np.zeros(self.num_rows, bool)
        found[list(self.places)] = True
        return found.reshape(-1, *[1] * (ndim - 1))


def vectorize(
    closed: ClosedJaxpr,
    in_groups: Sequence[tuple[int, ...]],
    out_groups: Sequence[tuple[int, ...]],
    in_spreads: Sequence[SpreadRows | None] | None = None,
    out_spreads: Sequence[SpreadRows | None] | None = None,
) -> Callable[[Sequence[jax.Array]], list[jax.Array]]:
    """A function of stored inputs that returns stored outputs, from a flat trace of the function on single leaves.

    `in_groups` and `out_groups` are partitions of the positions of inputs and outputs. A group of one is stored as it
    is, a larger one as one array with its members, in the order given, along a new dim 0. The function can be traced;
    how many equations that gives does not depend on the sizes of the groups, but for what the trace does with members
    one by one. Sums over all leaves (a global norm) are reductions of stacks, which round in another order.

    Where a group has a spread, its array has rows between those of its members: work is done on all rows where they
    are, since to bring members together would be to send them from stage to stage.

    >>> import jax
    >>> from cjax.trace.jaxpr.simplify import simplify
    >>> closed = simplify(jax.make_jaxpr(lambda a, b: (a + 1, b + 1))(1.0, 2.0))
    >>> vectorize(closed, [(0, 1)], [(0, 1)])([jax.numpy.array([1.0, 2.0])])
    [Array([2., 3.], dtype=float32)]
    """
    jaxpr = closed.jaxpr
    assert sorted(i for group in in_groups for i in group) == list(range(len(jaxpr.invars))), in_groups
    assert sorted(i for group in out_groups for i in group) == list(range(len(jaxpr.outvars))), out_groups
    grouping = Grouping(jaxpr, in_groups, out_groups)
    steps = _schedule(grouping)
    invars: list[Var] = list(jaxpr.invars)
    given = in_spreads or [None] * len(in_groups)
    wanted = out_spreads or [None] * len(out_groups)

    def evaluate(stored: Sequence[jax.Array]) -> list[jax.Array]:
        values = _Values(grouping)
        values.one.update(zip(jaxpr.constvars, closed.consts, strict=True))
        for slot, (group, value, spread) in enumerate(zip(in_groups, stored, given, strict=True)):
            first, *others = group
            if others:
                values.add(("input", slot, 0), value, spread)
            else:
                values.one[invars[first]] = value
        for node, operands in steps:
            _evaluate(node, operands, values)
        return [values.out(atoms, spread) for atoms, spread in zip(grouping.outs, wanted, strict=True)]

    return evaluate


class _Values:
    """What has been evaluated: single values, and stacks with their spreads."""

    def __init__(self, grouping: Grouping):
        self.grouping = grouping
        self.one: dict[Var, jax.Array | np.ndarray] = {}
        self.stacked: dict[Source, jax.Array] = {}
        self.spreads: dict[Source, SpreadRows] = {}

    def add(self, source: Source, value: jax.Array, spread: SpreadRows | None) -> None:
        self.stacked[source] = value
        if spread is not None:
            self.spreads[source] = spread

    def spread(self, operands: Sequence[Operand]) -> SpreadRows | None:
        """The spread that whole stacks among `operands` have, if they agree."""
        found = {self.spreads.get(operand.source) for operand in operands if isinstance(operand, Whole)} - {None}
        return found.pop() if len(found) == 1 else None

    def read(self, operand: Operand, spread: SpreadRows | None = None) -> jax.Array | np.ndarray:
        """A single value, or a stack with this spread."""
        match operand:
            case One(atom):
                return self.single(atom)
            case Whole(source) if self.spreads.get(source) == spread:
                return self.stacked[source]
            case Whole(source) | Take(source, _):
                indices = operand.indices if isinstance(operand, Take) else tuple(range(self.grouping.size[source]))
                own = self.spreads.get(source)
                value = self.stacked[source][np.array([own.places[i] for i in indices] if own else indices)]
            case StackedLeaves(atoms):
                numbers = [np.asarray(atom.val) for atom in atoms if type(atom) is Literal]
                if len(numbers) == len(atoms):
                    value = np.array(numbers, dtype=atoms[0].aval.dtype)
                else:
                    value = jnp.stack([self.single(atom) for atom in atoms])
        return value if spread is None else value[spread.sources]

    def single(self, atom: Atom) -> jax.Array | np.ndarray:
        if type(atom) is Literal:
            return atom.val
        if atom not in self.one:
            source, position = self.grouping.member[atom]
            spread = self.spreads.get(source)
            row = position if spread is None else spread.places[position]
            self.one[atom] = jax.lax.index_in_dim(self.stacked[source], row, keepdims=False)
        return self.one[atom]

    def out(self, atoms: tuple[Atom, ...], spread: SpreadRows | None) -> jax.Array:
        operand = self.grouping.resolve(atoms)
        value = self.read(operand, spread)
        if not isinstance(value, jax.Array):
            value = jnp.asarray(value, dtype=atoms[0].aval.dtype)
        if isinstance(operand, One) and len(atoms) > 1:
            value = jnp.broadcast_to(value, (spread.num_rows if spread else len(atoms), *value.shape))
        # What an optimizer makes of rows of zeros may be no number; a norm over all rows, taken by whoever, is one.
        return value if spread is None else jnp.where(spread.mask(value.ndim), value, jnp.zeros_like(value))


def _operands(grouping: Grouping, node: Node) -> list[Operand]:
    kind, number = node
    if kind == "group":
        rows = [grouping.operands(index) for index in grouping.groups[number]]
        return [grouping.resolve(atoms) for atoms in zip(*rows, strict=True)]
    atoms = grouping.chains.get(number, grouping.operands(number))
    alone = 0 if number in grouping.chains else 1 if name_of(grouping.eqns[number]) == "cond" else len(atoms)
    stacks = grouping.together(atoms[alone:])
    return [
        *(One(atom) for atom in atoms[:alone]),
        *(grouping.resolve(tuple(atoms[alone:][position] for position in group)) for group in stacks),
    ]


def _needs(grouping: Grouping, operand: Operand) -> set[Node]:
    match operand:
        case One(atom):
            nodes = {grouping.node(atom)}
        case Whole(source) | Take(source, _):
            nodes = {grouping.node_of(source)}
        case StackedLeaves(atoms):
            nodes = {grouping.node(atom) for atom in atoms}
    return {node for node in nodes if node is not None}


def _schedule(grouping: Grouping) -> list[tuple[Node, list[Operand]]]:
    """The order of evaluation, that of the program as far as groups allow.

    Members that depend on each other (a chain of keys) cannot be evaluated at once: their groups are dissolved.
    """
    while True:
        operands: dict[Node, list[Operand]] = {}
        needs: dict[Node, set[Node]] = {}
        wanted = [node for atoms in grouping.outs for node in _needs(grouping, grouping.resolve(atoms))]
        wanted += [("equation", index) for index, eqn in enumerate(grouping.eqns) if eqn.effects]
        while wanted:
            node = wanted.pop()
            if node not in needs:
                operands[node] = _operands(grouping, node)
                needs[node] = {need for operand in operands[node] for need in _needs(grouping, operand)}
                wanted.extend(needs[node])
        order = _order(grouping, needs)
        if len(order) == len(needs):
            return [(node, operands[node]) for node in order]
        for kind, number in _cycle(needs, set(order)):
            if kind == "group":
                grouping.dissolve(number)


def _order(grouping: Grouping, needs: dict[Node, set[Node]]) -> list[Node]:
    users: dict[Node, list[Node]] = {}
    for node, before in needs.items():
        for need in before:
            users.setdefault(need, []).append(node)
    # A group can start when its last member could.
    place = {node: max(grouping.groups[node[1]]) if node[0] == "group" else node[1] for node in needs}
    missing = {node: len(before) for node, before in needs.items()}
    ready = [(place[node], node) for node, count in missing.items() if count == 0]
    heapq.heapify(ready)
    order = []
    while ready:
        _, node = heapq.heappop(ready)
        order.append(node)
        for user in users.get(node, ()):
            missing[user] -= 1
            if missing[user] == 0:
                heapq.heappush(ready, (place[user], user))
    return order


def _cycle(needs: dict[Node, set[Node]], done: set[Node]) -> list[Node]:
    """Some cycle among the nodes that could not be ordered: each waits for another of them."""
    path: list[Node] = [next(node for node in needs if node not in done)]
    visited = {path[0]: 0}
    while True:
        node = min(need for need in needs[path[-1]] if need not in done)
        if node in visited:
            return path[visited[node] :]
        visited[node] = len(path)
        path.append(node)


def _evaluate(node: Node, operands: list[Operand], values: _Values) -> None:
    kind, number = node
    grouping = values.grouping
    eqn = grouping.eqns[number]
    # A loop that ends by what it computes might not end in rows that nobody has filled.
    is_lone = kind != "group" or name_of(eqn) == "while"
    spread = None if is_lone else values.spread(operands)
    with jax.named_scope(str(name_stack(eqn)) or "update"), in_context(eqn):
        if kind == "group":
            args = [values.read(operand, spread) for operand in operands]
            batched = [not isinstance(operand, One) for operand in operands]
            for result, value in enumerate(_map_members(eqn, args, batched)):
                values.add(("group", number, result), value, spread)
        elif name_of(eqn) == "cond":
            _evaluate_cond(number, operands, values)
        elif number in grouping.chains:
            _evaluate_chain(number, operands, values)
        else:
            args = [values.read(operand) for operand in operands]
            values.one.update(zip(eqn.outvars, bind_as_is(eqn, args), strict=True))


def _map_members(eqn: Equation, args: list[jax.Array | np.ndarray], batched: list[bool]) -> list[jax.Array]:
    if not _same_bits_batched(eqn):
        mapped = [arg for arg, is_batched in zip(args, batched, strict=True) if is_batched]

        def member(row: list[jax.Array]) -> list[jax.Array]:
            rows = iter(row)
            return bind_as_is(eqn, [next(rows) if b else arg for arg, b in zip(args, batched, strict=True)])

        return jax.lax.map(member, [jnp.asarray(arg) if isinstance(arg, np.ndarray) else arg for arg in mapped])
    return jax.vmap(lambda *row: bind_as_is(eqn, row), in_axes=[0 if b else None for b in batched])(*args)


def _same_bits_batched(eqn: Equation) -> bool:
    """Only threefry draws the same bits for a batch of keys as for each of them; JAX's rbg uses the first key."""
    dtypes = [getattr(atom.aval, "dtype", None) for atom in eqn.invars]
    keys = [dtype for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)]
    return all(map(is_threefry, keys))


def _evaluate_cond(number: int, operands: list[Operand], values: _Values) -> None:
    grouping = values.grouping
    eqn = grouping.eqns[number]
    in_groups = grouping.together(grouping.operands(number)[1:])
    stacked = grouping.branch_outs.get(number, [])
    rest = [i for i in range(len(eqn.outvars)) if all(i not in group for group in stacked)]
    out_groups = [*stacked, *((i,) for i in rest)]
    spreads = [values.spread([operand]) for operand in operands[1:]]
    by_size = {len(spread.places): spread for spread in spreads if spread is not None}
    out_spreads = [by_size.get(len(group)) if len(group) > 1 else None for group in out_groups]
    branches = [vectorize(branch, in_groups, out_groups, spreads, out_spreads) for branch in cond_of(eqn).branches]
    which, *args = [values.read(operand, spread) for operand, spread in zip(operands, [None, *spreads], strict=True)]
    results = jax.lax.switch(which, branches, args)
    for n in range(len(stacked)):
        values.add(("branch", number, n), results[n], out_spreads[n])
    values.one.update(zip([eqn.outvars[i] for i in rest], results[len(stacked) :], strict=True))


def _evaluate_chain(number: int, operands: list[Operand], values: _Values) -> None:
    """Adds up all terms of a chain; the members of a stack in one reduction."""
    eqn = values.grouping.eqns[number]
    reduce = CHAINED[name_of(eqn)].reduce

    def term(operand: Operand) -> jax.Array | np.ndarray:
        spread = values.spread([operand])
        value = values.read(operand, spread)
        if spread is not None:
            # Rows without a member add nothing; to the largest of all, a member that is there twice is nothing new.
            other = np.zeros((), value.dtype) if reduce is jnp.sum else value[spread.places[0]]
            value = jnp.where(spread.mask(value.ndim), value, other)
        return reduce(value, axis=0) if isinstance(operand, Whole) else value

    terms = [term(operand) for operand in operands]
    total = functools.reduce(lambda total, term: bind_as_is(eqn, [*total, term]), terms[1:], terms[:1])
    values.one.update(zip(eqn.outvars, total, strict=True))
