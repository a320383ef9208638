"""Memory of a plan by arithmetic, before anything is compiled.

What an optimizer and a model keep follows from shapes. What the forward pass saves for the backward pass is read off
the trace: everything its derivative needs, or with remat what one layer hands to the next. The compiled program's own
figure, known before the first step, has the last word.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cjax.plan import Plan
from cjax.sharding.place.saved import checkpointed, has_complex
from cjax.trace.emit.emit import Hooks, emit
from cjax.trace.reading import Trace

SLACK = 1.15  # buffers of the compiler beside what the arithmetic sees: seen between 1.02 and 1.12 on the GPU compile


def state_bytes(param_bytes: int, optimizer_bytes: int, plan: Plan, num_devices: int) -> int:
    """Bytes a device of parameters, gradients and optimizer state under pure data parallelism."""
    stage = plan.zero_stage
    return sum(
        size // (num_devices if stage >= least else 1)
        for size, least in ((param_bytes, 3), (param_bytes, 2), (optimizer_bytes, 1))
    )


class Activations:
    """What the forward pass of one trace keeps, by remat; each figure is worked out once, when asked for."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._kept: dict[str, int] = {}

    def bytes(self, plan: Plan, num_devices: int) -> int:
        """Bytes a device, the batch split over the devices and the micro-batches."""
        if plan.remat not in self._kept:
            self._kept[plan.remat] = self._work_out(plan.remat)
        half = 1 if plan.precision == "float32" else 2
        return self._kept[plan.remat] // (num_devices * plan.microbatches * half)

    def _work_out(self, remat: str) -> int:
        kept = _residual_bytes(self._trace, remat)
        layers = sum(run.repeats for run in self._trace.runs)
        if not layers:
            return kept
        # While a layer's derivative is taken, all that it needs is there again.
        covered = sum(run.repeats * run.period for run in self._trace.runs) / max(1, len(self._trace.closed.jaxpr.eqns))
        return kept + int(_residual_bytes(self._trace, None) * covered) // layers


class _Remat(Hooks):
    """A trace whose layers save what they do under a plan; everything if `remat` is None."""

    def __init__(self, remat: str | None, complexes: bool) -> None:
        self._remat, self._complexes = remat, complexes

    def layer(self, body: Any) -> Any:
        return body if self._remat is None else checkpointed(body, self._remat, self._complexes)


def _residual_bytes(trace: Trace, remat: str | None) -> int:
    """What is saved for the derivative of the trace, weights and inputs aside; stacks of layers are traced once."""
    closed, weights = trace.closed, set(trace.leaves_of("params"))
    place = {var: i for i, var in enumerate(closed.jaxpr.invars)}
    stacks = [tuple(place.get(var, -1) for var in group) for run in trace.runs for group in run.stacked]
    stacks = [group for group in stacks if weights.issuperset(group)]
    alone = set(range(len(trace.leaves))).difference(*stacks)
    groups = sorted([*stacks, *((i,) for i in alone)])
    function = emit(closed, trace.runs, trace.dims.top, groups, [(0,)], _Remat(remat, has_complex(closed.jaxpr)))
    lead = [(len(group),) if len(group) > 1 else () for group in groups]
    leaves = [trace.leaves[group[0]] for group in groups]
    shapes = [jax.ShapeDtypeStruct((*n, *leaf.shape), leaf.dtype) for n, leaf in zip(lead, leaves, strict=True)]
    num_weights = sum(group[0] in weights for group in groups)

    def saved(*args: Any) -> list[Any]:
        def loss(*weights_: Any) -> Any:
            return function([*weights_, *args[num_weights:]])[0]

        _, derivative = jax.vjp(loss, *args[:num_weights])
        return [x for x in jax.tree.leaves(derivative) if not any(x is arg for arg in args)]

    return sum(math.prod(x.shape) * _itemsize(x.dtype) for x in jax.eval_shape(saved, *shapes))


def _itemsize(dtype: Any) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else np.dtype(dtype).itemsize
