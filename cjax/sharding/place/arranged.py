"""The batch's own numbers, arranged anew: pixels in patches.

A device has its examples whole, so that whatever part of a patch it needs is there. But XLA takes the split of what
reads patches back through reshapes and transposes as far as they let it, and exchanges pixels where they do not.
"""

import jax.numpy as jnp

from cjax.jax_compat.core import Var
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.reading import Trace


def arranged(trace: Trace) -> frozenset[Var]:
    """The batch's floats, and what is made of them, as long as it is read by equations that only move or round numbers.

    What other equations read is placed as they need it.
    """
    top = trace.closed.jaxpr
    leaves = {top.invars[i] for i in trace.leaves_of("batch")}
    given = {var for var in leaves if jnp.issubdtype(var.aval.dtype, jnp.floating)}
    found = dict.fromkeys(given, False)
    for eqn in top.eqns:
        if facts_of(eqn).view and isinstance(eqn.invars[0], Var) and eqn.invars[0] in found:
            found[eqn.invars[0]] = True
            found |= dict.fromkeys(eqn.outvars, False)
    return frozenset(var for var, is_arranged in found.items() if is_arranged)
