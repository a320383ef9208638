"""How the results of parts of a batch make up those of the whole: a traced loss lifted to sums that can be added."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from cjax.trace.examples import Value
from cjax.trace.mirror import Unlike, counterparts
from cjax.trace.patterns import Lifted, follow, verdict
from cjax.trace.reading import Trace


def lift(trace: Trace, again: Callable[[int], Trace] | None = None) -> Trace:
    """`trace` with a loss that can be added up over parts of the batch, and what each result has to do with examples.

    A scalar that is a ratio with a denominator that depends on the batch becomes its total and weight; a part's total
    is then `loss_total(...)` and the weight of the whole `denominator(trace, weight)`.

    Args:
      trace: of a loss.
      again: rows -> the trace of the same loss on so many. JAX takes short cuts past dims of size 1, so what a loss
        does with examples is read off a trace of two where there is one.

    Raises:
      ValueError: the loss is no mean, or its examples meet each other; the message says where, and what to write.
    """
    batch = [i for i in trace.leaves_of("batch") if trace.leaves[i].shape]
    if not batch or not trace.num_loss:
        return trace
    if again is not None and trace.leaves[batch[0]].shape[0] == 1:
        return _lift_one(trace, again(2))
    results = follow(trace.closed, set(batch), len(trace.leaves_of("params")))
    found = verdict(results[0])
    # The author of a `Mean` has said what its total is; only examples that meet can't be cut apart.
    refused = results[0].kind == "pairs" if trace.has_weight else found.refused
    if refused:
        raise ValueError(found.reason)
    if trace.has_weight or found.kind != "ratio":
        return replace(trace, results=tuple(results))
    jaxpr: Any = trace.closed.jaxpr
    loss, *rest = jaxpr.outvars
    total = loss if found.total is None else found.total
    sums = [replace(results[0], kind="sum"), Value("sum")]
    return replace(
        trace,
        closed=jex.ClosedJaxpr(jaxpr.replace(outvars=[total, found.weight, *rest]), trace.closed.consts),
        num_loss=2,
        ratio=found,
        results=(*sums, *results[1:]),
    )


def _lift_one(trace: Trace, two: Trace) -> Trace:
    """`trace`, of one row, lifted as that of two rows is."""
    lifted = lift(two)
    if lifted.ratio is None:
        return replace(trace, results=lifted.results)
    jaxpr, other, wanted = trace.closed.jaxpr, two.closed.jaxpr, lifted.closed.jaxpr.outvars[:2]
    try:
        sums = counterparts(wanted, other, jaxpr)
    except Unlike as difference:
        raise ValueError(f"With one row in a micro-batch, {difference}. Use fewer micro-batches.") from None
    closed = jex.ClosedJaxpr(jaxpr.replace(outvars=[*sums, *jaxpr.outvars[1:]]), trace.closed.consts)
    return replace(trace, closed=closed, num_loss=2, ratio=lifted.ratio, results=lifted.results)


def loss_size(trace: Trace) -> int:
    """How many numbers the total of a lifted loss adds up, by the shapes of the trace; 1 for a mean."""
    if not trace.has_weight:
        return 1
    jaxpr: Any = trace.closed.jaxpr
    wanted, largest = {jaxpr.outvars[0]}, 1
    for eqn in reversed(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        inputs = [v for v in eqn.invars if not isinstance(v, jex.Literal)]
        if eqn.primitive.name == "reduce_sum":
            largest = max([largest, *(v.aval.size for v in inputs)])
        elif all(v.aval.size == 1 for v in inputs):
            wanted.update(inputs)
        else:  # a loop, say, that adds up as it goes: over labels, which are whole numbers
            labels = [trace.leaves[i] for i in trace.leaves_of("batch")]
            sizes = [math.prod(x.shape) for x in labels if jnp.issubdtype(x.dtype, jnp.integer)]
            largest = max([largest, *sizes])
    return largest


def loss_total(ratio: Lifted | None, total: jax.Array, weight: jax.Array) -> jax.Array:
    """The total of one part, from the results of a lifted trace."""
    if ratio is None or ratio.total is not None:
        return total
    return total * denominator(ratio, weight)


def denominator(ratio: Lifted | None, weight: jax.Array) -> jax.Array:
    """What a sum of totals is divided by, from the sum of the weights."""
    return weight if ratio is None else jnp.maximum(weight, ratio.floor) + ratio.offset
