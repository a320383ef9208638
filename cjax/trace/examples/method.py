"""Whether a loss is a method of its model, as in `lambda model, batch: model.loss(batch)`.

What a model's methods do with a batch, micro-batches may do each by itself: that is BatchNorm. A loss may not. Where a
method computes the loss, what it does itself is the loss, and what it calls of other modules is the model.
"""

from cjax.jax_compat.core import Equation, Jaxpr, Literal, Var
from cjax.jax_compat.jaxprs import traceback_of
from cjax.trace.jaxpr.tracebacks import called_by_loss, in_model


def is_method(jaxpr: Jaxpr, batch: set[int]) -> bool:
    """Whether a module that the loss calls brings the examples together in what the loss is, and the loss does not.

    Args:
      jaxpr: a flat trace, whose first result is the loss.
      batch: positions of its inputs that are the batch.
    """
    depends: set[Var] = {jaxpr.invars[i] for i in batch}
    writers: dict[Var, Equation] = {}
    for eqn in jaxpr.eqns:
        if not depends.isdisjoint(v for v in eqn.invars if not isinstance(v, Literal)):
            depends.update(eqn.outvars)
        writers.update((var, eqn) for var in eqn.outvars)
    left, ends = [jaxpr.outvars[0]], dict[int, Equation]()
    seen: set[Var] = set()
    while left:
        var = left.pop()
        if isinstance(var, Literal) or var in seen or var not in writers:
            continue
        seen.add(var)
        read = [v for v in writers[var].invars if not isinstance(v, Literal) and v in depends]
        if any(v.aval.shape for v in read):
            ends[id(writers[var])] = writers[var]
        left += [v for v in read if not v.aval.shape]
    told = [traceback_of(eqn) for eqn in ends.values()]
    return all(map(in_model, told)) and any(map(called_by_loss, told))
