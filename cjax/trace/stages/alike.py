"""Stacks of layers whose weights are trained alike.

Where the first layers of a model are frozen and the last ones fine-tuned, the layers still compute the same, but what
belongs to them differs: some have gradients and an optimizer's state, others have neither.
"""

import itertools
from collections.abc import Iterator

from cjax.trace.layers.repeats import RepeatedLayers, part_of
from cjax.trace.reading import Trace
from cjax.trace.stages.stacks import LEAST_SHARE, LayerStack, find_stacks, stack_of_run


def find_alike_stacks(trace: Trace, least: float = LEAST_SHARE) -> tuple[LayerStack, ...]:
    """The stacks of `find_stacks`, each cut where layers begin to be trained otherwise. A layer that is like neither
    neighbour belongs to no stack; a stack of nothing else is left as it is, and shares the weights that differ."""
    return tuple(part for stack in find_stacks(trace, least) for part in _parts(trace, stack))


def _parts(trace: Trace, stack: LayerStack) -> list[LayerStack]:
    if not isinstance(stack.of, RepeatedLayers):
        return [stack]  # a loop of the author's has one leaf for all of its layers
    stretches = list(_stretches(trace, stack.of))
    if len(stretches) == 1:
        return [stack]
    # A stack's weights are stored as one array, with one state of the optimizer or none: layers that are trained and
    # such that are not can't share it. A single layer has nobody to be stacked with.
    runs = [part_of(trace.closed, stack.of, first, count) for first, count in stretches if count > 1]
    parts = [stack_of_run(trace, run) for run in runs if run is not None]
    return [part for part in parts if part.layered and part.initial] or [stack]


def _stretches(trace: Trace, run: RepeatedLayers) -> Iterator[tuple[int, int]]:
    """(first layer, how many) of each stretch of layers that have the same weights trained."""
    weights = {trace.closed.jaxpr.invars[i]: kind for kind in ("params", "frozen") for i in trace.leaves_of(kind)}
    kinds = list(zip(*([weights.get(var) for var in group] for group in run.stacked), strict=True))
    first = 0
    for _, layers in itertools.groupby(kinds):
        count = len(list(layers))
        yield first, count
        first += count
