"""Micro-batches on rows of one's own: each device adds up gradients alone, and all reduce them once, at the end.

Under GSPMD the gradient of a micro-batch is a sum over all devices, made anew for each micro-batch. In a region that is
manual over the batch axes a device sees the loss of its own rows alone. That is the same thing only where examples meet
in nothing but sums that the results are; `local_rows` finds out, and says why not where it is not.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from jax import lax
from jax.sharding import Mesh

from cjax.jax_compat.core import ClosedJaxpr, Equation
from cjax.mesh import BATCH_AXES
from cjax.plan import Plan
from cjax.sharding.attention.random import draw_block
from cjax.sharding.layout.layout import Layout
from cjax.sharding.place.model import ModelStorage
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.examples.values import Value
from cjax.trace.microbatches.combine import share_alike
from cjax.trace.microbatches.mirror import Draw, Mirror, Unlike, counterparts, drawing
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource, first_line


@dataclass(frozen=True)
class LocalRows:
    """A loss on a device's own rows of a micro-batch: its trace, its layout, and what it draws at random.

    `axes` are the mesh axes over which the region is manual. Random numbers are drawn by their index among all rows, so
    that a dropout mask is the same under every plan: `draws` says, by the id of an equation, of how many.
    """

    trace: Trace
    layout: Layout
    axes: tuple[str, ...]
    draws: Mapping[int, Draw]

    def draw(self, eqn: Equation, ins: list[Any]) -> list[Any] | None:
        """The results of an equation that draws for the rows of all devices: those of this device's rows."""
        draw = self.draws.get(id(eqn))
        if draw is None:
            return None
        (key,) = ins
        shape = eqn.outvars[0].aval.shape
        dim = len(shape) - len(draw.shape) + draw.dim
        first = lax.axis_index(self.axes) * shape[dim]
        starts = [first if at == dim else 0 for at in range(len(shape))]
        return [draw_block(eqn, key, draw.shape, shape, starts)]


def local_rows(source: TraceSource, trace: Trace, storage: ModelStorage, plan: Plan, mesh: Mesh) -> LocalRows | str:
    """The loss of `trace` on each device's own rows of a micro-batch, or the reason why gradients can't wait.

    Args:
      source: the user's model and loss.
      trace: of a micro-batch, lifted (`cjax.trace.microbatches.combine.lift`).
      storage: where the model's arrays are kept.
      plan: with micro-batches.
      mesh: the mesh.
    """
    axes = tuple(a for a in BATCH_AXES if mesh.shape.get(a, 1) > 1)
    num_shards = math.prod(mesh.shape[a] for a in axes)
    stored = [slot.spec for part in (storage.given, storage.frozen, storage.model_state) for slot in part.slots]
    if any(set(axes) & set(axes_of_entry(entry)) for spec in stored for entry in spec):
        return "a part of the model is split over the devices that share a batch"
    if not trace.results:
        return "the batch has no rows"
    if coupled := _meetings(trace):
        return f"{_listed(coupled)} {'looks' if len(coupled) == 1 else 'look'} at the whole micro-batch"
    (rows,) = {trace.leaves[i].shape[0] for i in trace.leaves_of("batch") if trace.leaves[i].shape}
    try:
        if rows > num_shards:
            fewer = share_alike(_read_rows(source, plan, rows // num_shards, trace), trace)
            mirror = Mirror(trace, fewer.closed, num_shards)
            found, layout, draws = mirror.trace, storage.layout, mirror.draws
        else:
            mirror, found, draws = _one_row(source, plan, trace, rows)
            layout = _like_weights(trace, storage.layout, found)
        _require_sums(trace, mirror)
    except Unlike as difference:
        return str(difference)
    kept = {c: tuple(a for a in of if a not in axes) for c, of in layout.axes_of.items()}
    return LocalRows(found, replace(layout, axes_of=kept), axes, draws)


def batches_of_their_own(trace: Trace, plan: Plan) -> tuple[str, ...]:
    """A note of where examples meet inside the model, if micro-batches make fewer of them meet."""
    coupled = _meetings(trace)
    if plan.microbatches == 1 or not coupled:
        return ()
    return (
        f"to {_listed(coupled)} each of {plan.microbatches} micro-batches is a batch of its own: the loss is another "
        "than with microbatches=1",
    )


def _meetings(trace: Trace) -> list[str]:
    """Where examples meet."""
    return sorted({place.text.partition(" (")[0] for value in trace.results for place in value.couplings})


def _listed(places: list[str]) -> str:
    return ", ".join(places[:2]) + (f" and {len(places) - 2} more places" if len(places) > 2 else "")


def _read_rows(source: TraceSource, plan: Plan, rows: int, like: Trace) -> Trace:
    """The loss on so many rows of a micro-batch."""
    try:
        source.run(plan.microbatches, rows, like.counters)
    except Exception as error:  # from the author's own code, which may know the number of rows by heart
        raise Unlike(f"the model can't be traced on {rows} rows ({first_line(error)})") from error
    return source.read(
        plan.microbatches, rows, forms=like.forms, counters=like.counters, pairs=like.pairs, at_once=like.at_once
    )


def _one_row(source: TraceSource, plan: Plan, trace: Trace, num_shards: int) -> tuple[Mirror, Trace, dict[int, Draw]]:
    """The loss on one row. JAX takes short cuts past dims of size 1, so this trace matches no other; what the loss does
    with rows is read off a trace of two instead."""
    if num_shards % 2:
        raise Unlike(f"one row on each of {num_shards} devices can't be compared with two")
    if trace.shared is not None:
        raise Unlike("the loss divides by weights of the whole batch, and each device has one row of a micro-batch")
    two = _read_rows(source, plan, 2, trace)
    mirror = Mirror(trace, two.closed, num_shards // 2)
    found = replace(_read_rows(source, plan, 1, trace), aux_sums=trace.aux_sums)
    if trace.ratio is not None:
        jaxpr = found.closed.jaxpr
        sums = counterparts(mirror.trace.closed.jaxpr.outvars[:2], two.closed.jaxpr, jaxpr)
        closed = ClosedJaxpr(jaxpr.replace(outvars=[*sums, *jaxpr.outvars[1:]]), found.closed.consts)
        found = replace(found, closed=closed, num_loss=2, ratio=trace.ratio)
    draws = {}
    for eqn, other in zip_longest(drawing(found.closed.jaxpr), drawing(two.closed.jaxpr)):
        if eqn is None or other is None or eqn.primitive is not other.primitive:
            raise Unlike("random numbers are drawn otherwise for one row")
        draw = mirror.draws.get(id(other))
        shape = list(other.params.get("shape", ()))
        if draw is not None:
            shape[draw.dim] //= 2
            draws[id(eqn)] = draw
        if tuple(shape) != tuple(eqn.params.get("shape", ())):
            raise Unlike("random numbers are drawn otherwise for one row")
    return mirror, found, draws


def _like_weights(trace: Trace, layout: Layout, found: Trace) -> Layout:
    """`layout` (of `trace`) for another trace of the same model, whose classes are others: what is split is a dim of a
    weight. Positions are left to the compiler there."""
    axes_of = {}
    for leaf in (*trace.leaves_of("params"), *trace.leaves_of("frozen")):
        for c, other in zip(trace.classes_of(leaf), found.classes_of(leaf), strict=True):
            if c in layout.axes_of:
                axes_of.setdefault(other, layout.axes_of[c])
    return replace(layout, axes_of=axes_of, batch=found.batch_class, positions=frozenset())


def _require_sums(trace: Trace, mirror: Mirror) -> None:
    """Each result must be a sum or a mean over examples, or have nothing to do with them."""
    results = iter(enumerate(trace.results))
    pairs = [("the loss", trace.has_weight)] if trace.num_loss else []
    pairs += [("a value of aux", is_mean) for is_mean in trace.aux_is_mean]
    sums = {i + bool(trace.num_loss) for i in trace.aux_sums}
    for i, (what, has_weight) in enumerate(pairs):
        total = _growth(what, *next(results), mirror)
        weight = _growth(what, *next(results), mirror) if has_weight else int(i in sums)
        if trace.ratio is not None and trace.ratio.total is None and what == "the loss":
            # Such a total is the ratio itself, to be multiplied by its weight: 0/0 where a device's rows count nothing.
            raise Unlike("the loss adds more to its ratio, whose weight may be zero on one device's rows")
        if total != weight:
            raise Unlike(
                f"{what} grows with the number of rows and " + ("its weight does not" if has_weight else "is no mean")
            )
    for index, value in results:
        if value.kind != "fixed" or mirror.growth(index) is not None:
            raise Unlike("state that the model carries depends on the examples")


def _growth(what: str, index: int, value: Value, mirror: Mirror) -> int:
    if value.kind == "unknown":
        raise Unlike(f"{what} can't be followed beyond {value.origin}")
    if value.kind not in ("sum", "mean", "fixed"):
        raise Unlike(f"{what} is neither a sum nor a mean over the examples")
    return mirror.growth(index) or 0
