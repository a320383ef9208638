"""The order of a ring's positions, kept from a trace's first equation to its last.

In a causal ring each device has an early and a late chunk of the sequence (`zigzag.py`). Made anew in each attention,
that order moves queries, keys, values and the result there and back, in both passes. But no other equation of most
models looks at positions across each other: tokens put in that order once stay in it, through norms, products, lookups
and loops, and masks go by the number of a position wherever it is.

So every variable with the ring's positions in one of its dims is held in the ring's order along it, but for a set of
*natural* ones: parameters, constants, and what comes behind the last attention where that moves less (a loss that cuts
positions into chunks). An equation that looks across positions gets its operands in the sequence's own order, and its
result is put in the ring's again; where all of that would move more than the attentions do, nothing is kept.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import Atom, Equation, Jaxpr, Literal, Var
from cjax.mesh import SEQUENCE
from cjax.sharding.attention.ring import MARGIN
from cjax.sharding.layout.layout import Layout
from cjax.sharding.storage.storage import axes_of_entry, filled_up
from cjax.trace.attention.bounds import bounds
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Node
from cjax.trace.attention.positions import EquationList, attention_groups, evaluated, in_parts
from cjax.trace.dims.find import Scope
from cjax.trace.jaxpr.along import along, goes_by_elements, is_made_by_number, summed
from cjax.trace.jaxpr.groups import Group
from cjax.trace.jaxpr.own_derivative import backward
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.jaxpr.view import is_scan, open_bodies, opened, scan_of
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.trace.reading import Trace, once

Dim = int | None  # the dim along which a value is in the ring's order; None: in none


@dataclass(frozen=True)
class Turned:
    """A value that changes its order: of which variable, along which dim it is in the ring's before and after."""

    atom: Atom
    before: Dim
    after: Dim

    @property
    def has_gradient(self) -> bool:
        """Whether it is turned back in the backward pass."""
        return jnp.issubdtype(self.atom.aval.dtype, jnp.inexact)


class _Mixed(Exception):
    """A loop hands on what is in one order as if it were in the other."""


class Order:
    """Which values of a trace are in the ring's order, and along which of their dims.

    Args:
      trace: whose values.
      layout: where their dims are.
      lengths: of each class of positions that is kept in the ring's order.
      tail: equations of the top level from which on everything is natural; None: nothing is.
    """

    def __init__(self, trace: Trace, layout: Layout, lengths: Mapping[int, int], tail: int | None) -> None:
        self._dims, self._layout, self._lengths = trace.dims, layout, lengths
        top = trace.closed.jaxpr
        batch = {top.invars[i] for i in trace.leaves_of("batch")}
        self._by_element: dict[int, bool] = {}
        self.turns: tuple[tuple[int, Turned, Scope], ...] = ()  # how often a value is turned, as `order_of` found
        self._natural: set[tuple[Var, int]] = set()  # by scope: equal loops may share the variables of their bodies
        self._leave((*(var for var in top.invars if var not in batch), *top.constvars), trace.dims.top)
        if tail is not None:
            self._leave(_only_behind(trace, tail), trace.dims.top)
            self._leave_written(top.eqns[tail:], trace.dims.top)
        self._enter(top, trace.dims.top)
        for run in trace.runs:
            self._check_stack(run, trace.dims.top)

    # --- what is known of a variable ---

    def place(self, atom: Atom, scope: Scope) -> Dim:
        """The dim of a variable that has the ring's positions, if one has."""
        if isinstance(atom, Literal):
            return None
        dims = zip(self._dims.of(atom, scope), getattr(atom.aval, "shape", ()), strict=False)
        found = [d for d, (c, size) in enumerate(dims) if self._lengths.get(c) == size]
        return found[0] if len(found) == 1 else None

    def dim(self, atom: Atom, scope: Scope) -> Dim:
        """The dim along which a variable is in the ring's order."""
        if isinstance(atom, Literal) or (atom, id(scope)) in self._natural:
            return None
        return self.place(atom, scope)

    def _leave(self, variables: Iterable[Var], scope: Scope) -> None:
        """Variables that stay natural."""
        self._natural.update((var, id(scope)) for var in variables)

    def _leave_written(self, eqns: Sequence[Equation], scope: Scope) -> None:
        """All that equations write, and what is inside of them."""
        for eqn in eqns:
            self._leave(eqn.outvars, scope)
            inner = scope.inner.get(id(eqn))
            for body in open_bodies(eqn) if inner is not None else ():
                assert inner is not None
                self._leave(body.invars, inner)
                self._leave_written(body.eqns, inner)

    # --- equations ---

    def asked(self, eqn: Equation, scope: Scope) -> tuple[list[Dim], list[Dim]]:
        """Along which dim an equation is given its operands in the ring's order, and gives its results.

        Of what it can do, that which turns the fewest numbers from what variables are held in.
        """
        nothing: tuple[list[Dim], list[Dim]] = [None] * len(eqn.invars), [None] * len(eqn.outvars)
        here = [self.place(atom, scope) for atom in (*eqn.invars, *eqn.outvars)]
        if all(dim is None for dim in here):
            return nothing
        found = [self._with_sums(eqn, nothing, scope)]
        wanted = next((dim for dim in here[len(eqn.invars) :] if dim is not None), None)
        ins = None if wanted is None else along(eqn, wanted)
        if ins is not None:
            found.append(self._with_sums(eqn, (ins, [wanted] * len(eqn.outvars)), scope))
        if self._keeps_inside(eqn, scope):
            found.append(([self.dim(v, scope) for v in eqn.invars], [self.dim(v, scope) for v in eqn.outvars]))
        return min(reversed(found), key=lambda each: sum(self.moved(t, scope) for t in self._turns(eqn, each, scope)))

    def turned(self, eqn: Equation, scope: Scope) -> list[Turned]:
        """The operands and results of an equation that change their order for it."""
        return list(self._turns(eqn, self.asked(eqn, scope), scope))

    def turned_at(self, eqn: Equation, scope: Scope) -> list[Turned]:
        """The same where an equation is evaluated: a loop hands values in as they are, and may hand them out turned."""
        if is_scan(eqn):
            return [turned for turned in self.left(eqn, scope) if turned.before != turned.after]
        return [] if facts_of(eqn).remat else self.turned(eqn, scope)

    def left(self, eqn: Equation, scope: Scope) -> list[Turned]:
        """The results of a loop that change their order behind it: as its body gives them, and as they are held."""
        loop, inner = scan_of(eqn), scope.inner[id(eqn)]
        own = [self.dim(var, inner) for var in loop.last(loop.body.outvars)]
        for var in loop.ys(loop.body.outvars):
            dim = self.dim(var, inner)
            own.append(None if dim is None else dim + 1)
        return [Turned(var, dim, self.dim(var, scope)) for var, dim in zip(eqn.outvars, own, strict=True)]

    def ends(self, trace: Trace) -> list[Turned]:
        """What changes its order where it comes into the trace, or leaves a stack of layers."""
        top, scope = trace.closed.jaxpr, trace.dims.top
        found = [Turned(var, None, self.dim(var, scope)) for var in top.invars]
        for run in trace.runs:
            lasts = [(new, last) for _, _, new, last in run.carries]
            lasts += [(group[run.template], group[-1]) for group in run.last_only]
            found += [Turned(last, self.dim(new, scope), self.dim(last, scope)) for new, last in lasts]
        return [turned for turned in found if turned.before != turned.after]

    def _turns(self, eqn: Equation, asked: tuple[list[Dim], list[Dim]], scope: Scope) -> Iterator[Turned]:
        ins, outs = asked
        for atom, wanted in zip(eqn.invars, ins, strict=True):
            if self.dim(atom, scope) != wanted:
                yield Turned(atom, self.dim(atom, scope), wanted)
        for atom, given in zip(eqn.outvars, outs, strict=True):
            if self.dim(atom, scope) != given:
                yield Turned(atom, given, self.dim(atom, scope))

    def _with_sums(
        self, eqn: Equation, asked: tuple[list[Dim], list[Dim]], scope: Scope
    ) -> tuple[list[Dim], list[Dim]]:
        """Operands stay in the ring's order along a dim that is summed over."""
        ins, outs = asked
        for places in summed(eqn):
            pairs = [(i, dim) for i, dim in enumerate(places) if dim is not None]
            held = any(self.dim(eqn.invars[i], scope) == dim for i, dim in pairs)
            if held and all(ins[i] is None for i, _ in pairs):
                ins = [dict(pairs).get(i, dim) for i, dim in enumerate(ins)]
        return ins, outs

    def _keeps_inside(self, eqn: Equation, scope: Scope) -> bool:
        """Whether nothing inside of an equation with jaxprs of its own changes its order."""
        inner = scope.inner.get(id(eqn))
        facts = facts_of(eqn)
        body = eqn.params.get(facts.body) if facts.body else None
        if inner is None or body is None or facts.remat:
            return False
        if facts.own_derivative and not self._derives_by_element(eqn):
            return False
        jaxpr = opened(body)
        atoms = [*zip(eqn.invars, jaxpr.invars, strict=True), *zip(eqn.outvars, jaxpr.outvars, strict=True)]
        if any(self.dim(outer, scope) != self.dim(own, inner) for outer, own in atoms):
            return False
        return not any(is_scan(one) or self.is_numbered(one, inner) or self.turned(one, inner) for one in jaxpr.eqns)

    def _derives_by_element(self, eqn: Equation) -> bool:
        """Whether a derivative by hand, which no hook sees, makes each element of those at its place."""
        if id(eqn) not in self._by_element:
            derivative = backward(eqn)
            self._by_element[id(eqn)] = derivative is None or goes_by_elements(derivative)
        return self._by_element[id(eqn)]

    def is_numbered(self, eqn: Equation, scope: Scope) -> bool:
        """Whether a result is made of the numbers of positions."""
        place = self.place(eqn.outvars[0], scope)
        return place is not None and is_made_by_number(eqn, place)

    # --- attentions ---

    def asked_of(self, attention: Attention, size: int) -> tuple[dict[Var, Dim], Dim]:
        """The same for the variables that an attention reads, and its result: in the ring's order in a ring that has
        it, but for the inputs of its masks."""
        ins: dict[Var, Dim] = dict.fromkeys(attention.group.ins)
        operands = (attention.query, attention.key, attention.value)
        if not in_zigzag(attention, size) or {node.var for node in operands} & {one.var for one in attention.leaves}:
            return ins, None
        wanted = [(node.var, _place(attention, node, role)) for node, role in zip(operands, ROLES, strict=True)]
        if any(dim is None or dict(wanted)[var] != dim for var, dim in wanted):
            return ins, None
        return ins | dict(wanted), _place(attention, attention.out, "query")

    def turned_by(self, attention: Attention, size: int, scope: Scope) -> list[Turned]:
        ins, out = self.asked_of(attention, size)
        (made,) = attention.group.outs
        found = [Turned(var, self.dim(var, scope), dim) for var, dim in ins.items()]
        return [each for each in (*found, Turned(made, out, self.dim(made, scope))) if each.before != each.after]

    # --- what moves ---

    def held(self, atom: Atom, scope: Scope) -> float:
        """How many numbers of a value a device has."""
        sizes = self._layout.axis_sizes
        spec = self._layout.spec(self._dims.of(atom, scope), atom.aval.shape) if isinstance(atom, Var) else ()
        axes = [a for entry in spec for a in axes_of_entry(entry)]
        return float(np.prod(atom.aval.shape)) / float(np.prod([sizes[a] for a in axes]))

    def moved(self, turned: Turned, scope: Scope) -> float:
        """Bytes that change places, in both passes."""
        dtype = turned.atom.aval.dtype
        times = (turned.before is not None) + (turned.after is not None)
        return self.held(turned.atom, scope) * dtype.itemsize * times * (2 if turned.has_gradient else 1)

    # --- loops ---

    def _enter(self, jaxpr: Jaxpr, scope: Scope) -> None:
        """Finds what is natural inside of loops and checkpoints, which hand values in and out as they are."""
        for eqn in jaxpr.eqns:
            if is_scan(eqn):
                self._enter_scan(eqn, scope)
                continue
            inner = scope.inner.get(id(eqn))
            for body in open_bodies(eqn) if inner is not None else ():
                assert inner is not None
                self._leave(body.constvars, inner)
                if facts_of(eqn).remat:
                    for outer, own in zip(eqn.invars, body.invars, strict=True):
                        self._hand_in(outer, own, scope, inner)
                self._enter(body, inner)
                if facts_of(eqn).remat:
                    for outer, own in zip(eqn.outvars, body.outvars, strict=True):
                        _same(self.dim(own, inner), self.dim(outer, scope))

    def _enter_scan(self, eqn: Equation, scope: Scope) -> None:
        loop, inner = scan_of(eqn), scope.inner[id(eqn)]
        self._leave(loop.body.constvars, inner)
        for outer, own in zip(loop.consts(eqn.invars), loop.consts(loop.body.invars), strict=True):
            self._hand_in(outer, own, scope, inner)
        for outer, own in zip(loop.xs(eqn.invars), loop.xs(loop.body.invars), strict=True):
            self._hand_in(outer, own, scope, inner, 1)
        self._enter(loop.body, inner)
        handed = (loop.carries(eqn.invars), loop.carries(loop.body.invars), loop.last(loop.body.outvars))
        for outer, own, new in zip(*handed, strict=True):
            _same(self.dim(outer, scope), self.dim(own, inner), self.dim(new, inner))
        if any(self.dim(outer, scope) == 0 for outer in loop.ys(eqn.outvars)):
            raise _Mixed

    def _hand_in(self, outer: Atom, own: Var, scope: Scope, inner: Scope, lead: int = 0) -> None:
        """A value goes into a body, without its first dims: natural there if it is outside."""
        dim, wanted = self.dim(outer, scope), self.dim(own, inner)
        if dim is None and wanted is not None:
            self._leave([own], inner)
        elif dim is not None:
            _same(dim - lead, wanted)

    def _check_stack(self, run: RepeatedLayers, scope: Scope) -> None:
        """What goes into the layers of a stack, from one to the next, and out of them, is in one order in each."""
        for first, own, new, _ in run.carries:
            _same(*(self.dim(var, scope) for var in (first, own, new)))
        for group in (*run.stacked, *run.outputs):
            _same(*(self.dim(var, scope) for var in group))


ROLES = ("query", "key", "key")
MOST_BLOCKS = 32  # of queries and of keys, by which a mask is looked at
Bodies = list[tuple[EquationList, list[Group[Attention]]]]


def in_zigzag(attention: Attention, size: int) -> bool:
    """Whether each device of a ring takes an early and a late chunk, as a mask leaves late keys out for early
    queries. Of a ring of more than `MOST_BLOCKS`, not all that do are told."""
    lengths = [attention.sizes[attention.label(role)] for role in ("query", "key")]
    even = all(filled_up(length, size) % (2 * size) == 0 for length in lengths)
    return even and not blocks_left(attention, size).all()


def blocks_left(attention: Attention, blocks: int) -> np.ndarray:
    """Which blocks of the scores, [queries, keys], a mask leaves anything of: everybody's, and not to be changed."""
    # What is asked of each pair of blocks takes long for thousands of them, and larger blocks tell the same of a mask
    # that leaves out a part of the keys at all.
    few = math.gcd(blocks, MOST_BLOCKS) if blocks > MOST_BLOCKS else blocks
    known: dict[int, np.ndarray] = vars(attention).setdefault("_blocks_left", {})  # a search asks for hundreds of rings
    if few not in known:
        known[few] = bounds(attention, few, few, []) >= -MARGIN
        known[few].flags.writeable = False
    return known[few]


def order_of(trace: Trace, layout: Layout) -> Order | None:
    """The order that a trace's values are best kept in; None where it is no other than the sequence's own.

    Args:
      trace: whose values; its attentions are computed in rings over the sequence's axis.
      layout: where its dims are.
    """
    size = layout.axis_sizes.get(SEQUENCE, 1)
    if size == 1 or layout.grid is not None:
        return None
    bodies = _attentions(trace)
    pairs = [(body, group.of) for body, groups in bodies for group in groups if in_zigzag(group.of, size)]
    lengths: dict[int, int] = {}
    for body, attention in pairs:
        for node, role in ((attention.query, "query"), (attention.key, "key")):
            place, sizes = _place(attention, node, role), node.var.aval.shape
            c = None if place is None else trace.dims.of(node.var, body.scope)[place]
            # Filled up behind their end, positions have no order that is one of them alone.
            if c is not None and place is not None and _is_split(layout, c) and sizes[place] % (2 * size) == 0:
                lengths[c] = sizes[place]
    if not lengths:
        return None
    found = [Priced(trace, layout, lengths, tail, bodies, size) for tail in {None: 0, behind(trace, bodies): 0}]
    best = min(found, key=lambda each: each.bytes)
    if best.order is None or best.bytes >= best.made_anew(pairs):
        return None
    # Losses and what is beside them are numbers; state that has positions is nobody's but one's own.
    held = any(best.order.dim(atom, trace.dims.top) is not None for atom in trace.closed.jaxpr.outvars)
    return None if held else best.order


class Priced:
    """An order, the values that it turns, and the bytes that these are; None where loops mix what it keeps apart."""

    def __init__(
        self, trace: Trace, layout: Layout, lengths: Mapping[int, int], tail: int | None, bodies: Bodies, size: int
    ) -> None:
        self.order: Order | None = None
        self.bytes = math.inf
        try:
            order = Order(trace, layout, lengths, tail)
        except _Mixed:
            return
        self.order, top = order, trace.dims.top
        turns = [(1, turned, top) for turned in order.ends(trace)]
        for body, groups in bodies:
            grouped = {id(eqn) for group in groups for eqn in group.eqns}
            turned = [t for group in groups for t in order.turned_by(group.of, size, body.scope)]
            turned += [t for eqn in body.eqns if id(eqn) not in grouped for t in order.turned_at(eqn, body.scope)]
            turns += [(body.times, t, body.scope) for t in turned]
        order.turns = tuple(turns)
        self.bytes = sum(times * order.moved(turned, scope) for times, turned, scope in turns)

    def made_anew(self, pairs: Sequence[tuple[EquationList, Attention]]) -> float:
        """Bytes that attentions move if each makes the order for itself."""
        total = 0.0
        for body, attention in pairs if self.order else ():
            assert self.order is not None
            for node in (attention.query, attention.key, attention.value, attention.out):
                total += body.times * self.order.moved(Turned(node.var, None, 0), body.scope)
        return total


@once
def _attentions(trace: Trace) -> Bodies:
    bodies = list(evaluated(trace))
    found = [attention_groups(trace, body.eqns, body.results, body.scope) for body in bodies]
    return [(body, in_parts(trace, groups, body.scope)) for body, groups in zip(bodies, found, strict=True)]


def _is_split(layout: Layout, c: int) -> bool:
    return c in layout.positions and tuple(layout.axes_of.get(c, ())) == (SEQUENCE,)


def _place(attention: Attention, node: Node, role: str) -> Dim:
    label = (attention.label(role),)
    return node.labels.index(label) if label in node.labels else None


def behind(trace: Trace, bodies: Bodies) -> int:
    """The first equation of the top level behind all attentions."""
    inside = {id(eqn) for _, groups in bodies for group in groups for eqn in group.eqns}

    def attends(eqn: Equation) -> bool:
        return id(eqn) in inside or any(attends(one) for body in open_bodies(eqn) for one in body.eqns)

    last = max((at for at, eqn in enumerate(trace.closed.jaxpr.eqns) if attends(eqn)), default=-1)
    return next((run.stop for run in trace.runs if run.start <= last < run.stop), last + 1)


def _only_behind(trace: Trace, tail: int) -> Iterator[Var]:
    """Variables that nobody in front of `tail` reads."""
    top = trace.closed.jaxpr
    read = {var for eqn in top.eqns[:tail] for var in eqn.invars if isinstance(var, Var)}
    # What a layer writes for all layers alike is in their order.
    for run in trace.runs:
        of_all = top.eqns[run.start + run.template * run.period : run.start + (run.template + 1) * run.period]
        read.update(var for eqn in of_all for var in eqn.outvars)
        read.update(var for group in run.outputs for var in group)
    found = dict.fromkeys(v for eqn in top.eqns[tail:] for v in eqn.invars if isinstance(v, Var))
    found |= dict.fromkeys(v for v in top.outvars if isinstance(v, Var))
    yield from (var for var in found if var not in read)


def _same(*dims: Dim) -> None:
    if len(set(dims)) > 1:
        raise _Mixed
