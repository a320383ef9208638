"""The collectives that a layout brings into one pass over a stretch, as XLA makes them of its constraints.

A product whose operands are split along what it sums over gives parts of a sum: all-reduced in the forward pass. One
that makes a split dim gives its activation's gradient in parts: all-reduced in the backward pass, once for all products
that read the same activation. A lookup in a split table, and a
reduction over a split dim, add up what devices find; a value that is repeated along a split dim gets its gradient from
all of them. What is sent to experts that data-parallel devices share out, and what comes back, is exchanged in both
passes; along that axis examples differ, so that nothing else is summed but gradients of weights.
"""

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from jax.sharding import PartitionSpec

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.mesh import EXPERT, SEQUENCE, TENSOR
from cjax.plan import Sequence as SequencePlan
from cjax.planner.reading.attended import held_by_leaf, of_few_heads, over_positions, ring_of, turned
from cjax.planner.reading.derived import Derived, derived
from cjax.planner.reading.partial import PartialGradient, merged
from cjax.planner.reading.placed import Axes, PlacedTrace
from cjax.planner.reading.products import is_weight, operands_of
from cjax.planner.reading.stretches import Body, Operation, Spot, Stretch
from cjax.planner.reading.told import own_rows
from cjax.planner.reading.traffic import forms_of
from cjax.planner.work import AxisMove, Kind, RingWork
from cjax.sharding.layout.copied_rows import CopiedRows, RowsToCopy
from cjax.sharding.layout.grid import Grid, crosses
from cjax.sharding.layout.late import Late, LateSums
from cjax.sharding.layout.rows import adds_among_rows, is_among_rows
from cjax.sharding.layout.shards import looked_up_dim
from cjax.sharding.layout.spreads import Spreads, weight_at
from cjax.sharding.place.concatenated import neighbours_of
from cjax.sharding.place.exchanged import Sends
from cjax.sharding.place.order import Order
from cjax.sharding.products.lookup import is_lookup
from cjax.sharding.products.matmul import Spread
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.attention.find import Attention
from cjax.trace.dims.find import Scope
from cjax.trace.jaxpr.groups import Group
from cjax.trace.jaxpr.primitives import facts_of, goes_by_element, name_of
from cjax.trace.jaxpr.view import is_by_rows, variable_of
from cjax.trace.layers.repeats import RepeatedLayers


def received(kind: Kind, held: float, size: int) -> float:
    """Numbers that a device receives in a collective of `size` devices.

    Args:
      kind: of the collective.
      held: of an all-reduce or a permute what each device has; of a gather or a scatter the whole that is gathered to
        or scattered from; of an all-to-all what each device has.
      size: devices in a group.
    """
    share = (size - 1) / size
    return held * {"all-reduce": 2 * share, "collective-permute": 1.0}.get(kind, share)


@dataclass
class Moves:
    """The moves of one stretch: see the module.

    Args:
      placed: the layout.
      stretch: the stretch.
      sequence: how positions are split.
      gathered: tables of a grid that an earlier lookup has gathered: XLA finds that both are one.
      learned: top-level variables whose gradient anybody wants; of what a loop is given, all floats count as such.
      order: in which a ring's positions are kept, where they are.
    """

    placed: PlacedTrace
    stretch: Stretch
    sequence: SequencePlan
    learned: frozenset[Var]
    gathered: set[int]
    order: Order | None
    found: list[AxisMove] = field(default_factory=list)
    outside: list[AxisMove] = field(default_factory=list)  # of what all layers share: once, and not in each
    sums: dict[int, set[str]] = field(default_factory=dict)  # by leaf, axes along which its gradient is summed
    parts: dict[int, int] = field(default_factory=dict)  # by leaf, in how many its gradient is made, where not whole
    rings: list[RingWork] = field(default_factory=list)  # of the attentions
    _derived: Derived = field(init=False)
    _spread: dict[int, Group[dict[int, Spread]]] = field(default_factory=dict)
    _late: dict[int, Group[Late]] = field(default_factory=dict)
    _copied: dict[int, Group[CopiedRows]] = field(default_factory=dict)
    _own: set[int] = field(default_factory=set)  # lookups of rows that devices sort by themselves
    _made: set[Spot] = field(default_factory=set)  # in the body that is read
    _all: set[Spot] = field(default_factory=set)  # what all examples share, whose gradient is counted

    def read(self) -> "Moves":
        for body in self.stretch.bodies:
            self._body(body)
        return self

    def turn(self) -> None:
        """What is put in a ring's order, or back, anywhere in the trace."""
        if self.order is not None:
            for kind, held, forward, wide, times in turned(self.order, self.sequence.size):
                self._add(kind, (SEQUENCE,), held, times, forward=forward, wide=wide, remade=False)

    # --- one body ---

    def _body(self, body: Body) -> None:
        roots = forms_of(body)
        self._derived = derived(body, self.learned)
        spreads = Spreads(self.placed.trace.dims, self.placed.layout)
        groups = [group for some in body.lists for group in spreads.find(*some)]
        self._spread = {id(eqn): group for group in groups for eqn in group.eqns}
        late = LateSums(self.placed.trace.dims, self.placed.layout)
        summed = [group for some in body.lists for group in late.find(*some, groups)]
        self._late = {id(eqn): group for group in summed for eqn in group.eqns}
        copied = RowsToCopy(self.placed.trace, self.placed.layout)
        found = [group for some in body.lists for group in copied.find(*some, [*groups, *summed])]
        self._copied = {id(eqn): group for group in found for eqn in group.eqns}
        self._own = own_rows(body)
        self._made = {spot for step in body.steps for spot in step.writes}
        partial: dict[Spot, list[PartialGradient]] = {}
        readers: dict[Spot, list[int]] = {}
        for at, step in enumerate(body.steps):
            for node in dict.fromkeys(node for node in step.reads if node is not None):
                if self._has_gradient(node) and any(map(self._has_gradient, step.writes)) and not _is_form(step):
                    readers.setdefault(roots.get(node, node), []).append(at)
            for index, part in self._step(step, body, at):
                node = step.reads[index]
                assert node is not None
                partial.setdefault(roots.get(node, node), []).append(part)
        for root, parts in partial.items():
            for part, count in merged(parts, readers.get(root, ())):
                shared = self._is_shared(root, body)
                self._add("all-reduce", part.axes, part.held, body.times, forward=False, wide=count > 1, outside=shared)

    def _step(self, step: Operation, body: Body, at: int) -> Iterator[tuple[int, PartialGradient]]:
        """Adds the collectives of a step's forward pass; gives what its backward pass leaves in parts, by operand."""
        if isinstance(step.of, Attention):
            if self.sequence.size > 1:
                axis = SEQUENCE
                for kind, held, forward, wide in over_positions(
                    step.of, self.sequence, self.placed, step.scope, self.order
                ):
                    self._add(kind, (axis,), held, body.times, forward=forward, wide=wide)
                if self.sequence.mode == "ring":
                    self.rings.append(ring_of(step.of, self.sequence.size))
                    self._leaves_turned(step, step.of, body.times)
                return
            for kind, elements, forward, is_kept in of_few_heads(step.of, self.placed, step.scope):
                amount = elements * body.times
                self.found.append(AxisMove(kind, (TENSOR,), amount, forward, count=body.times, is_kept=is_kept))
            yield from self._gradients(step, step.of.group.ins, step.of.group.outs[0], at, True)
            return
        eqn, scope = step.of, step.scope
        group = self._spread.get(id(eqn))
        if group is not None:
            if eqn is group.eqns[0]:
                self._spread_out(group, step, body)
            return
        if id(eqn) in self._late:
            yield from self._summed_late(step, eqn, self._late[id(eqn)], body, at)
            return
        self._exchanged(step, eqn, body)
        how, facts = operands_of(eqn, scope), facts_of(eqn)
        if how is not None:
            summed = self._summed(eqn, scope, how.inner)
            self._reduced(step.writes[0], scope, summed, body.times, scatters=not is_by_rows(eqn))
            parts = self._gradients(step, eqn.invars[:2], eqn.outvars[0], at, True)
            # The gradient of copies of rows goes back to what was looked up, and is reduced there.
            yield from (part for part in parts if part[0] != 0 or id(eqn) not in self._copied)
        elif name_of(eqn) == "gather":
            numbers = eqn.params["dimension_numbers"]
            entries = self.placed.entries(eqn.invars[0], scope)
            summed = {a for d in numbers.collapsed_slice_dims for a in entries[d]}
            if self.placed.layout.grid is not None and is_among_rows(eqn, self.placed.trace, scope):
                self._ordered(eqn, step, summed, body)
            else:
                self._looked_up(step, eqn, summed, body)
            if id(eqn) in self._copied and step.reads[0] is not None and self._has_gradient(step.reads[0]):
                held = self.placed.local(eqn.invars[0], scope)
                yield 0, PartialGradient(frozenset({TENSOR}), held, at, True)
        elif self.placed.layout.grid is not None and adds_among_rows(eqn, self.placed.trace, scope):
            split = self.placed.entries(eqn.outvars[0], scope)[looked_up_dim(eqn)]
            self._ordered(eqn, step, {*split}, body)
        elif (found := neighbours_of(eqn, self.placed.layout, self.placed.trace.dims, scope)) is not None:
            row = self.placed.local(eqn.outvars[0], scope) / found.rows.shape[1]
            ways = (True, False) if any(n is not None and self._has_gradient(n) for n in step.reads) else (True,)
            for sent, forward in itertools.product(found.sent, ways):
                self._add("collective-permute", (found.axis,), sent.rows * row, body.times, forward=forward)
        elif facts.reduces and "axes" in eqn.params:
            entries = self.placed.entries(eqn.invars[0], scope)
            summed = {a for d in eqn.params["axes"] for a in entries[d]}
            for out in step.writes:
                self._reduced(out, scope, summed, body.times, wide=True)
        elif name_of(eqn) == "reshape" and self.placed.layout.positions:
            self._put_together(step, eqn, body)
        elif goes_by_element(eqn) or name_of(eqn) == "broadcast_in_dim":
            yield from self._gradients(step, eqn.invars, eqn.outvars[0], at, False)

    def _ordered(self, eqn: Equation, step: Operation, axes: set[str], body: Body) -> None:
        """Rows of the batch in another order, along a grid's batch axes and those of other copies: gathered in the
        forward pass, and their gradient scattered, which together is what a sum of them would be."""
        if id(eqn) in self._own:
            return
        held = self.placed.local(eqn.invars[0], step.scope) * self.placed.size(axes)
        ways = 2 if self._has_gradient(step.writes[0]) else 1
        named = tuple(a for a in self.placed.layout.axis_sizes if a in axes)
        self.found.append(
            AxisMove("all-reduce", named, 0.0, False, count=body.times, held=body.times * held * ways / 2)
        )

    def _put_together(self, step: Operation, eqn: Equation, body: Body) -> None:
        """Positions that are put in one dim with the batch's rows, as tokens for experts: no axis splits them there, so
        that they are gathered, and in a layer again where its backward pass needs them, as what is saved is split. The
        gradient is gathered where they are taken apart again."""
        read, made = variable_of(eqn, 0), eqn.outvars[0]
        ways = ((read, made, True), (made, read, False))
        for before, behind, forward in ways:
            classes, entries = self.placed.trace.dims.of(before, step.scope), self.placed.entries(before, step.scope)
            pairs = zip(classes, entries, strict=True)
            split = {a for c, axes in pairs if c in self.placed.layout.positions for a in axes}
            gone = split - self.placed.axes(behind, step.scope)
            if not gone or not (forward or self._has_gradient(step.writes[0])):
                continue
            held, again = self.placed.local(behind, step.scope), step.writes[0] in self._derived.needed
            self._add("all-gather", gone, held, body.times, forward=forward, remade=False)
            if forward and again and self.stretch.stack is not None:
                self._add("all-gather", gone, held, body.times, forward=False)

    def _exchanged(self, step: Operation, eqn: Equation, body: Body) -> None:
        """What goes to experts and comes back from them, in both passes."""
        sends, scope = Sends(self.placed.trace.dims, self.placed.layout), step.scope
        values = [(eqn.invars[at], step.reads[at]) for at in sends.fetched(eqn, scope)]
        values += [(eqn.outvars[at], step.writes[at]) for at in sends.sent(eqn, scope)]
        for atom, node in values:
            for forward in (True, False) if node is not None and self._has_gradient(node) else (True,):
                held = self.placed.local(atom, scope)
                self._add("all-to-all", (EXPERT,), held, body.times, forward=forward)

    def _leaves_turned(self, step: Operation, attention: Attention, times: int) -> None:
        """Biases and masks of a ring with an order of its own: put in it in both passes, and the gradient back."""
        for var, read in zip(attention.group.ins, step.reads, strict=True):
            held = held_by_leaf(attention, var, self.placed, step.scope)
            if held:
                alike = not self._has_rows(var, step.scope)
                ways = (True, False, False) if read is not None and self._has_gradient(read) else (True, False)
                for forward in ways:
                    self._add(
                        "collective-permute", (SEQUENCE,), held, times, forward=forward, wide=True, of_weights=alike
                    )

    def _summed_late(
        self, step: Operation, eqn: Equation, group: Group[Late], body: Body, at: int
    ) -> Iterator[tuple[int, PartialGradient]]:
        """Of products that are added up before they are reduced, only what leaves the group is; and the gradient of
        what they are weighed with, which each device has a part of."""
        if eqn.outvars[0] in group.outs:
            self._reduced(step.writes[0], step.scope, {TENSOR}, body.times)
        is_product = operands_of(eqn, step.scope) is not None
        yield from self._gradients(step, eqn.invars, eqn.outvars[0], at, is_product)
        if group.of.sums:
            return
        if eqn.outvars[0] in group.of.fed:
            self._sum(eqn.invars[0], step.scope, {TENSOR})
        whole = [v for v in eqn.invars if not isinstance(v, Literal) and v not in group.of.fed]
        weighed = [i for i, v in enumerate(eqn.invars) if v in whole and v not in group.of.parts]
        for index in weighed if len(weighed) < len(eqn.invars) else ():
            atom, node = eqn.invars[index], step.reads[index]
            if is_weight(atom, step.scope):
                self._sum(atom, step.scope, {TENSOR})
            elif node is not None and self._has_gradient(node):
                yield index, PartialGradient(frozenset({TENSOR}), self.placed.local(atom, step.scope), at, is_product)

    def _looked_up(self, step: Operation, eqn: Equation, summed: set[str], body: Body) -> None:
        """A lookup of what is split along the dim looked up: devices add up what they find, of which each keeps its
        positions where the same axis splits these; it gathers their gradient then. Of a grid's table the parts are
        gathered, moved first where the classifier has it otherwise; its gradient takes the same way back."""
        table, out, scope = eqn.invars[0], eqn.outvars[0], step.scope
        layout = self.placed.layout
        leaf = None if isinstance(table, Literal) else scope.origin.get(table)
        if layout.grid is None or leaf not in layout.weights or not is_lookup(eqn):
            self._reduced(step.writes[0], scope, summed, body.times)
            pairs = zip(self.placed.trace.dims.of(out, scope), self.placed.entries(out, scope), strict=True)
            kept, read = (
                summed.intersection(a for c, axes in pairs if c in layout.positions for a in axes),
                step.reads[0],
            )
            if kept and read is not None and self._has_gradient(read):
                held = self.placed.local(out, scope) * self.placed.size(kept)
                self._add("all-gather", kept, held, body.times, forward=False)
            self._sum(table, scope, self.placed.axes(out, scope) - self.placed.axes(table, scope))
            return
        assert isinstance(table, Var)
        (dim,) = eqn.params["dimension_numbers"].collapsed_slice_dims
        before, rows = self.placed.entries(table, scope), self.placed.entries(eqn.invars[1], scope)
        few = None
        if crosses(layout.grid, before, rows, dim):
            apart = self.placed.size(a for axes in rows for a in axes if a != layout.grid.weight)
            few = math.prod(eqn.invars[1].aval.shape[:-1]) / (apart * table.aval.shape[dim])
            self._across(out, scope, before[dim], layout.grid, body.times, (few, True))
        split = self._of_grid(table, dim, scope, layout.grid, body.times, None if few is None else (few, False))
        self._sum(table, scope, self.placed.axes(out, scope) - split)

    def _across(
        self, out: Var, scope: Scope, across: Axes, grid: Grid, times: int, looked_up: tuple[float, bool]
    ) -> None:
        """A lookup whose result changes places across the grid, where each device has a part of what is looked up."""
        held = self.placed.local(out, scope)
        ways: tuple[tuple[bool, Kind], ...] = ((True, "reduce-scatter"), (False, "all-gather"))
        for forward, kind in ways:
            self._add(kind, across, held * grid.size, times, forward=forward, looked_up=looked_up)
            self._add("collective-permute", (*across, grid.weight), held, times, forward=forward, looked_up=looked_up)

    def _of_grid(
        self, table: Var, dim: int, scope: Scope, grid: Grid, times: int, looked_up: tuple[float, bool] | None
    ) -> set[str]:
        """A lookup for which the parts of a table are gathered, and their gradient scattered; the axes that split it,
        before or behind that."""
        before, leaf = self.placed.entries(table, scope), scope.origin[table]
        whole = [-1 if d == dim else c for d, c in enumerate(self.placed.trace.dims.of(table, scope))]
        rest = self.placed.layout.spec(whole, table.aval.shape)
        wanted = tuple((grid.weight,) if d == dim else axes_of_entry(entry) for d, entry in enumerate(rest))
        held = self._held(table.aval.shape, PartitionSpec(*(axes or None for axes in wanted)))
        moved = {a for old, new in zip(before, wanted, strict=True) for a in (*old, *new) if (a in old) != (a in new)}
        gone = {a for axes in before for a in axes} - {a for axes in wanted for a in axes}
        again = leaf in self.gathered
        self.gathered.add(leaf)
        add = functools.partial(self._add, times=times, of_weights=True, looked_up=looked_up)
        if moved:
            # Each device's part changes places with another's; what splits it no longer is gathered behind that.
            part = held / self.placed.size(gone)
            for forward in (False, *(() if again else (True,))):
                add("collective-permute", moved, part, forward=forward)
            if gone and not again:
                add("all-gather", gone, held, forward=True)
            if gone:
                add("reduce-scatter", gone, held, forward=False)
        held *= grid.size
        if not again:
            add("all-gather", (grid.weight,), held, forward=True)
        add("reduce-scatter", (grid.weight,), held, forward=False)
        return {a for entry in (*before, *wanted) for a in entry}

    def _spread_out(self, group: Group[dict[int, Spread]], step: Operation, body: Body) -> None:
        """What `cjax.sharding.products.matmul` moves: it gathers operands in both passes, and scatters results in the
        one and gradients in the other."""
        scope, read = step.scope, step.reads[1 - weight_at(group.eqns[0], step.scope)]
        is_learned = read is not None and self._has_gradient(read)
        first, times = group.eqns[0], body.times
        made = {spot.var: spot for step in body.steps for spot in step.writes}
        spread = group.of[id(first)]
        x = first.invars[1 - weight_at(first, scope)]
        if spread.gather_x is not None:
            held = self._held(x.aval.shape, spread.x) * self.placed.size((spread.gather_x.axis,))
            outer, shared = spread.gather_x.dim == 0, read is not None and self._is_shared(read, body)
            self._gathered(spread.gather_x.axis, held, body, outer=outer, shared=shared)
            if is_learned:
                self._add("reduce-scatter", (spread.gather_x.axis,), held, times, forward=False, outer=outer)
        for eqn in group.eqns:
            spread, w = group.of[id(eqn)], eqn.invars[weight_at(eqn, scope)]
            beside = {a for entry in (*spread.x, *spread.y) for a in axes_of_entry(entry)}
            moved = {a for entry in spread.w for a in axes_of_entry(entry)}
            self._sum(w, scope, beside - moved)
            if spread.gather_w is not None:
                held = self._held(w.aval.shape, spread.w) * self.placed.size((spread.gather_w.axis,))
                self._gathered(spread.gather_w.axis, held, body, of_weights=True, outer=spread.gather_w.dim == 0)
                self._add(
                    "reduce-scatter", (spread.gather_w.axis,), held, times, forward=False, of_weights=True,
                    outer=spread.gather_w.dim == 0,
                )  # fmt: skip
            if spread.scatter_y is not None:
                shape = [n for d, n in enumerate(x.aval.shape) if d not in spread.contracted[0]]
                shape += [n for d, n in enumerate(w.aval.shape) if d not in spread.contracted[1]]
                held = self._held(shape, spread.y) * self.placed.size((spread.scatter_y.axis,))
                needed = not self._derived.needed.isdisjoint(made[out] for out in eqn.outvars)
                axes, outer = (spread.scatter_y.axis,), spread.scatter_y.dim == 0
                self._add("reduce-scatter", axes, held, times, forward=True, remade=needed, outer=outer)
                self._add("all-gather", axes, held, times, forward=False, outer=outer)

    def _sum(self, weight: Atom, scope: Scope, axes: Iterable[str]) -> None:
        leaf = None if isinstance(weight, Literal) else scope.origin.get(weight)
        if leaf is not None:
            real = {a for a in axes if self.placed.layout.axis_sizes.get(a, 1) > 1}
            self.sums.setdefault(leaf, set()).update(real)

    def _held(self, shape: Sequence[int], spec: PartitionSpec) -> float:
        """How many numbers a device has of a tensor that is placed so."""
        pairs = zip(shape, spec, strict=True)
        return math.prod(math.ceil(n / self.placed.size(axes_of_entry(entry))) for n, entry in pairs)

    def _gathered(
        self, axis: str, held: float, body: Body, of_weights: bool = False, outer: bool = False, shared: bool = False
    ) -> None:  # fmt: skip
        """In the forward pass, and again in the backward pass; outside of loops XLA finds that both are one. A layer
        that is made again gathers what its backward pass does. What all layers share XLA gathers in front of them."""
        self._add(
            "all-gather", (axis,), held, body.times, forward=True, of_weights=of_weights, outside=shared, remade=False,
            outer=outer,
        )  # fmt: skip
        if self.stretch.stack is not None or body.is_loop:
            self._add("all-gather", (axis,), held, body.times, forward=False, of_weights=of_weights, outer=outer)

    def _summed(self, eqn: Equation, scope: Scope, inner: tuple[tuple[int, ...], tuple[int, ...]]) -> set[str]:
        """Axes along which a product sums: an operand that is whole there is cut where it stands."""
        sides = [self.placed.entries(atom, scope) for atom in eqn.invars[:2]]
        return {a for entries, dims in zip(sides, inner, strict=True) for d in dims for a in entries[d]}

    def _reduced(
        self, made: Spot, scope: Scope, axes: Iterable[str], times: int, wide: bool = False, scatters: bool = True
    ) -> None:  # fmt: skip
        """A result that devices have parts of is added up; along axes that split it, each keeps its own, of what is
        scattered, or takes it from the whole."""
        out, remade = made.var, made in self._derived.needed
        of_out = self.placed.axes(out, scope)
        axes = frozenset(axes) - {EXPERT}  # as over copies of the model: scalars alone
        kept, whole = axes & of_out if scatters else frozenset[str](), axes - (of_out if scatters else set())
        local = self.placed.local(out, scope) * (1 if scatters else self.placed.size(axes & of_out))
        if kept:
            self._add(
                "reduce-scatter", kept, local * self.placed.size(kept), times, forward=True, wide=wide, remade=remade
            )
        if whole:
            self._add("all-reduce", whole, local, times, forward=True, wide=wide, remade=remade)

    def _gradients(
        self, step: Operation, ins: Sequence[Atom], out: Var, at: int, is_product: bool
    ) -> Iterator[tuple[int, PartialGradient]]:
        """Operands whose gradient is left in parts: along axes that split the result and not them."""
        scope = step.scope
        of_out = self.placed.axes(out, scope)
        if not of_out:
            return
        for index, atom in enumerate(ins):
            node = step.reads[index]
            if isinstance(atom, Literal) or node is None or not self._has_gradient(node):
                continue
            axes = of_out - self.placed.axes(atom, scope)
            if not is_weight(atom, scope) and self._has_rows(out, scope) and not self._has_rows(atom, scope):
                self._of_all(node, atom, scope, axes)
                continue
            if is_weight(atom, scope):
                own = self._own_positions(atom, scope) & axes
                if own and (leaf := scope.origin.get(atom)) is not None:
                    self.parts[leaf] = size = self.placed.size(own)
                    held = size * math.ceil(self.placed.local(atom, scope) / size)
                    self._add("all-gather", own, held, 1, forward=False, of_weights=True)
                self._sum(atom, scope, axes - own)
                continue
            if axes := axes - {EXPERT}:
                yield index, PartialGradient(axes, self.placed.local(atom, scope), at, is_product)

    def _of_all(self, node: Spot, atom: Var, scope: Scope, axes: frozenset[str]) -> None:
        """The gradient of what all examples share, a bias of scores. In a grid it is summed at its size, behind
        the last layer to read it; elsewhere by way of what it was made of, which is small."""
        if self.placed.layout.grid is None or self.stretch.stack is None or node in self._made or node in self._all:
            return
        self._all.add(node)
        named = tuple(a for a in self.placed.layout.axis_sizes if a in axes)
        held = self.placed.local(atom, scope)
        self.outside.append(AxisMove("all-reduce", named, 0.0, False, True, of_weights=True, held=held))

    # --- what is known of a value ---

    def _own_positions(self, weight: Var, scope: Scope) -> frozenset[str]:
        """Axes along which devices need other positions of a weight, of which each has the gradient alone."""
        layout = self.placed.layout
        dims = zip(self.placed.trace.dims.of(weight, scope), weight.aval.shape, strict=True)
        return frozenset(a for c, n in dims if c in layout.positions and n > 1 for a in layout.axes_of.get(c, ()))

    def _has_rows(self, var: Var, scope: Scope) -> bool:
        return self.placed.trace.batch_class in self.placed.trace.dims.of(var, scope)

    def _has_gradient(self, node: Spot) -> bool:
        return self._derived.has_gradient(node)

    def _is_shared(self, node: Spot, body: Body) -> bool:
        """Whether all layers of a stack read the same value, so that its gradient is reduced behind the last."""
        stack = self.stretch.stack
        if stack is None or not isinstance(stack.of, RepeatedLayers):
            return False
        return (node.var,) in stack.reads

    def _add(
        self, kind: Kind, axes: Iterable[str], held: float, times: int, *, forward: bool, wide: bool = False,
        of_weights: bool = False, outside: bool = False, remade: bool = True, outer: bool = False,
        looked_up: tuple[float, bool] | None = None,
    ) -> None:  # fmt: skip
        named = tuple(a for a in self.placed.layout.axis_sizes if a in set(axes))
        elements = times * received(kind, held, self.placed.size(named))
        move = AxisMove(
            kind, named, elements, forward, wide, times, of_weights, remade, outer, looked_up=looked_up
        )  # fmt: skip
        (self.outside if outside else self.found).append(move)


def _is_form(step: Operation) -> bool:
    return step.eqn is not None and bool(facts_of(step.eqn).view)
