"""Which inputs of a trace index a table, and how large it is: so that a token outside the vocabulary is named before
it turns into NaN or a wrong row on the devices."""

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

PASSES = frozenset(["convert_element_type", "reshape", "broadcast_in_dim", "slice", "squeeze", "transpose", "copy"])


def index_limits(closed: jex.ClosedJaxpr, inputs: Sequence[int]) -> dict[int, int]:
    """For each of `inputs` that is looked up unchanged, the size of the smallest table it is looked up in.

    Args:
      closed: a flat trace.
      inputs: positions among its inputs, of integer arrays.

    >>> import jax, jax.numpy as jnp
    >>> index_limits(jax.make_jaxpr(lambda t, i: t[i])(jnp.ones(7), jnp.zeros(3, int)), [1])
    {1: 7}
    """
    source: dict[Any, int] = {closed.jaxpr.invars[i]: i for i in inputs}
    limits: dict[int, int] = {}
    for eqn in closed.jaxpr.eqns:
        name = eqn.primitive.name
        atoms = [None if isinstance(v, jex.Literal) else source.get(v) for v in eqn.invars]
        if name in PASSES and atoms[0] is not None:
            source[eqn.outvars[0]] = atoms[0]
        elif name == "select_n" and atoms[1] is not None and all(a == atoms[1] for a in atoms[1:]):
            source[eqn.outvars[0]] = atoms[1]  # i < 0 ? i + size : i, NumPy's negative index
        elif name == "add" and atoms[0] is not None and not eqn.invars[1].aval.shape:
            source[eqn.outvars[0]] = atoms[0]
        elif name == "gather" and atoms[1] is not None:
            dims = eqn.params["dimension_numbers"].collapsed_slice_dims
            if len(dims) == 1:
                size = eqn.invars[0].aval.shape[dims[0]]
                limits[atoms[1]] = min(limits.get(atoms[1], size), size)
    return limits
