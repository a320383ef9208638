"""A model's work and its splits, as each plan has the trace read."""

from typing import NamedTuple

from cjax.plan import Plan
from cjax.planner.reading.split import Splits
from cjax.planner.reading.work import work_of
from cjax.planner.work import Work, WorkSplit
from cjax.trace.source import TraceSource


class HowRead(NamedTuple):
    """How a plan has a trace read: see `cjax.trace.reading.read`."""

    pairs: bool
    at_once: bool


def how_read(plan: Plan) -> HowRead:
    """How a plan has a trace read."""
    is_grid = plan.tensor.mode != "1d"
    return HowRead(
        # Stages of a pipeline are made of whole layers; a grid splits both sides of a weight as it is.
        pairs=not is_grid and plan.tensor.size > 1 and plan.pipeline.size == 1,
        # A grid splits the products of such a loop both ways already, and each turn would send their weights again.
        at_once=is_grid,
    )


class Readings:
    """The work of a model and its splits: traced once, read once for each way that plans have it read.

    Args:
      source: the user's model, loss and batch.
      optimizer_bytes: bytes of optimizer state for each byte of trained parameters.

    >>> import flax.linen as nn, jax, jax.numpy as jnp
    >>> from cjax.trace.author.capture import capture
    >>> batch = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    >>> model = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(1)])
    >>> source = TraceSource(capture(model, lambda model, x: model(x).mean(), batch), batch)
    >>> plan = Plan.parse("tensor=2")
    >>> Readings(source).work(plan).model_flops == 3 * 2 * 8 * (3 * 8 + 8)
    True
    >>> [move.elements for move in Readings(source).split(plan).moves[0]]  # of the result, [8, 1]
    [8.0]
    """

    def __init__(self, source: TraceSource, optimizer_bytes: float = 2.0) -> None:
        self._source, self._optimizer_bytes = source, optimizer_bytes
        self._known: dict[int, tuple[Work, Splits]] = {}

    def work(self, plan: Plan) -> Work:
        """The work that a plan divides: the same in numbers for all, but for layers that some plans take in pairs."""
        return self._of(plan)[0]

    def split(self, plan: Plan) -> WorkSplit:
        """What the tensor and sequence words of a plan make of it.

        Raises:
          ValueError: the layout can't split this model so; why, and what can be written instead.
        """
        return self._of(plan)[1](plan)

    def _of(self, plan: Plan) -> tuple[Work, Splits]:
        how = how_read(plan)
        trace = self._source.read(pairs=how.pairs, at_once=how.at_once)
        # A trace that has no such layers or loops is the same one, read either way.
        if id(trace) not in self._known:
            work = work_of(trace, self._optimizer_bytes)
            self._known[id(trace)] = work, Splits(work, trace)
        return self._known[id(trace)]
