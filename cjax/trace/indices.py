"""Which inputs of a trace index a table, and how large it is: so that a token outside the vocabulary is named before
it turns into NaN or a wrong row on the devices."""

from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.extend import core as jex

PASSES = frozenset(["convert_element_type", "reshape", "broadcast_in_dim", "slice", "squeeze", "transpose", "copy"])


def index_limits(closed: jex.ClosedJaxpr, inputs: Sequence[int]) -> dict[int, int]:
    """For each of `inputs` that is looked up unchanged, the size of the smallest table it is looked up in.

    A lookup whose author asks for indices to be clipped takes any.

    Args:
      closed: a flat trace.
      inputs: positions among its inputs, of integer arrays.

    >>> import jax, jax.numpy as jnp
    >>> index_limits(jax.make_jaxpr(lambda t, i: t[i])(jnp.ones(7), jnp.zeros(3, int)), [1])
    {1: 7}
    """
    source: dict[Any, tuple[int, bool]] = {closed.jaxpr.invars[i]: (i, False) for i in inputs}
    limits: dict[int, int] = {}
    for eqn in closed.jaxpr.eqns:
        name = eqn.primitive.name
        found = [None if isinstance(v, jex.Literal) else source.get(v) for v in eqn.invars]
        if name in PASSES and found[0] is not None:
            source[eqn.outvars[0]] = found[0]
        elif name == "add" and found[0] is not None and not eqn.invars[1].aval.shape:
            source[eqn.outvars[0]] = (found[0][0], True)
        elif name == "select_n":
            # i < 0 ? i + size : i is NumPy's negative index; a sum alone is another index, with limits of its own
            cases = {case for case in found[1:] if case is not None}
            if None not in found[1:] and len({i for i, _ in cases}) == 1:
                source[eqn.outvars[0]] = min(cases)
        elif name == "gather" and found[1] is not None and not found[1][1]:
            dims = eqn.params["dimension_numbers"].collapsed_slice_dims
            if len(dims) == 1 and eqn.params["mode"] != lax.GatherScatterMode.CLIP:
                size = eqn.invars[0].aval.shape[dims[0]]
                limits[found[1][0]] = min(limits.get(found[1][0], size), size)
    return limits
