"""What the tensor, sequence and expert words of a plan make of a work: where dims go, what devices hold and receive."""

import math
from collections.abc import Collection
from dataclasses import replace

from cjax.mesh import DATA, EXPERT, SEQUENCE
from cjax.plan import Plan
from cjax.planner.reading.derived import learned_of
from cjax.planner.reading.moves import Moves
from cjax.planner.reading.naming import Naming
from cjax.planner.reading.placed import PlacedTrace
from cjax.planner.reading.stretches import Stretch, stretches
from cjax.planner.reading.weights import leaves_of
from cjax.planner.work import BATCH, AxisMove, HeldWeight, Work, WorkSplit
from cjax.sharding.layout.layout import Layout, make_layout
from cjax.sharding.place.order import order_of
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.reading import Trace


class Splits:
    """The splits of one work, each made once for a tensor and sequence word: what a search asks again and again.

    Args:
      work: of the trace.
      trace: that it was read off.
    """

    def __init__(self, work: Work, trace: Trace) -> None:
        self._trace = trace
        self._stretches, self._naming = stretches(trace), Naming(trace)
        self._leaves = leaves_of(trace, self._stretches)
        self._learned, self._uses = learned_of(trace), _uses(trace)
        # By leaf of any layer, that of the first.
        stacks = [stretch.stack for stretch in self._stretches if stretch.stack]
        self._first = {i: group[0] for stack in stacks for group in stack.weights for i in group}
        self._made: dict[tuple[object, ...], WorkSplit | ValueError] = {}
        rows = max((trace.leaves[i].shape[0] for i in trace.leaves_of("batch") if trace.leaves[i].shape), default=1)
        self._num_microbatches = work.num_rows // rows
        assert len(work.parts) == len(self._stretches), "a split is of the work that was read off this trace"

    def __call__(self, plan: Plan) -> WorkSplit:
        """The split of a plan.

        Raises:
          ValueError: the layout can't split this model so; why, and what can be written instead.
        """
        key = (
            plan.tensor,
            plan.sequence,
            plan.expert,
            _keeps_order(plan),
            tuple(sorted((name, str(axes)) for name, axes in plan.rules.items())),
        )
        if key not in self._made:
            try:
                self._made[key] = self._split(plan)
            except ValueError as error:
                self._made[key] = error
        found = self._made[key]
        if isinstance(found, ValueError):
            raise found
        return found

    def _split(self, plan: Plan) -> WorkSplit:
        sizes = {DATA: 1} | ({EXPERT: plan.expert} if plan.expert > 1 else {})
        sizes |= {SEQUENCE: plan.sequence.size} if plan.sequence.size > 1 else {}
        sizes |= plan.tensor.axis_sizes()
        layout = make_layout(self._trace, sizes, plan.rules, sequence=plan.sequence)
        placed = PlacedTrace(self._trace, layout)
        gathered: set[int] = set()
        order = order_of(self._trace, layout) if _keeps_order(plan) else None
        given = (plan.sequence, self._learned, gathered, order)
        moves = [Moves(placed, each, *given).read() for each in self._stretches]
        moves[0].turn()
        sums = [{self._first.get(i, i): axes for i, axes in each.sums.items()} for each in moves]
        summed = {i: set().union(*(each.get(i, ()) for each in sums)) for i in {i for each in sums for i in each}}
        parts = {self._first.get(i, i): size for each in moves for i, size in each.parts.items()}
        weights = tuple(
            tuple(self._held(layout, i, stretch, summed.get(i, ()), parts.get(i, 1)) for i in leaves)
            for stretch, leaves in zip(self._stretches, self._leaves, strict=True)
        )
        # Of what all layers of a stack read, the gradient is reduced once, where it was made: in front of them.
        more = [each.outside for each in moves[1:]] + [[]]
        every = [(*each.found, *outside) for each, outside in zip(moves, more, strict=True)]
        return WorkSplit(
            self._axes_of(layout),
            {axis: size for axis, size in sizes.items() if size > 1},
            tuple(tuple(self._of_batch(move) for move in moves) for moves in every),
            tuple(sum(weight.elements for weight in some) for some in weights),
            layout.notes,
            weights,
            tuple(tuple(each.rings) for each in moves),
            plan.in_lockstep,
        )

    def _of_batch(self, move: AxisMove) -> AxisMove:
        """A collective of one micro-batch's trace, for the whole batch."""
        if move.looked_up is not None:
            share, of_few = move.looked_up
            move = replace(move, looked_up=(share * self._num_microbatches, of_few))
        return move if move.of_weights else replace(move, elements=move.elements * self._num_microbatches)

    def _held(self, layout: Layout, leaf: int, stretch: Stretch, sums: Collection[str], parts: int) -> HeldWeight:
        """What a device keeps of a parameter of one layer."""
        whole = self._trace.leaves[leaf]
        first = 1 if stretch.stack and not stretch.stack.is_run and (leaf,) in stretch.stack.weights else 0
        spec = layout.weight_spec(leaf, self._trace.classes_of(leaf), whole.shape)
        shards = [math.prod(layout.axis_sizes[a] for a in axes_of_entry(entry)) for entry in spec]
        named = tuple(a for a in layout.axis_sizes if a in sums)
        uses, joint = self._uses.get(leaf, 1), layout.grid is None
        return HeldWeight(whole.shape[first:], tuple(shards[first:]), named, uses, joint, parts)

    def _axes_of(self, layout: Layout) -> dict[str, tuple[str, ...]]:
        """The axes by name of a dim."""
        found = {}
        for name, (c, size) in self._naming.classes.items():
            axes = tuple(a for a in layout.axes_of.get(c, ()) if layout.axis_sizes.get(a, 1) > 1)
            if axes and (c, size) not in layout.whole:
                found[name] = axes
        grid = layout.grid
        if grid is not None and BATCH in found:
            # Where features are on an axis of the batch, the batch is on its partner: all axes are in use either way.
            found[BATCH] = tuple(dict.fromkeys((*found[BATCH], *grid.features)))
        return found


def split_of(work: Work, trace: Trace, plan: Plan) -> WorkSplit:
    """What the tensor and sequence words of a plan make of a work. `Splits` keeps what it needs for many plans.

    Args:
      work: of the trace.
      trace: that it was read off.
      plan: of which all other words only divide.

    Raises:
      ValueError: the layout can't split this model so; why, and what can be written instead.
    """
    return Splits(work, trace)(plan)


def _keeps_order(plan: Plan) -> bool:
    """Whether a ring's positions may be kept in its order: stages of a pipeline make it in each attention."""
    return plan.sequence.mode == "ring" and plan.sequence.size > 1 and plan.pipeline.size == 1


def _uses(trace: Trace) -> dict[int, int]:
    """How often the gradient of each parameter is summed: products with it together, each lookup in it on its own, as
    what a lookup adds to is summed by then."""
    found = {leaf: 0 for leaf, _, _ in trace.dims.tables}
    for leaf, _, _ in trace.dims.tables:
        found[leaf] += 1
    multiplied = {origin for m in trace.dims.matmuls for origin in (m.lhs_origin, m.rhs_origin)}
    for leaf in found:
        found[leaf] += leaf in multiplied
    return found
