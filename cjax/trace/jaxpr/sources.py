"""What a value is made of, where the batch has no part in it: how a function of a weight is told from an activation.

A weight that its layer scales, standardises, normalises, rounds or masks is still a weight to the matmul behind: its
dims are those of the weight (`cjax.trace.dims.find`), and splitting them splits the weight. What a matmul made of
weights is not: learned queries, projected, meet keys as activations do.
"""

from collections.abc import MutableMapping

import numpy as np

from cjax.jax_compat.core import Equation, Literal, Var
from cjax.trace.jaxpr.primitives import having, name_of, named

WEIGHT = "weight"  # a weight, or numbers of one that went through a function
GIVEN = "given"  # constants, random keys, the state that a model carries
MADE = "made"  # anything else without the batch

_ENDS = having("product") | having("loop") | having("branches") | named("gather")  # no weights come out
_JOINS = having("joins")
_PARTS = having("takes") | (having("reduces") - having("tells_place"))


def follow(eqn: Equation, source: MutableMapping[Var, str]) -> None:
    """Say of what the results of an equation are made, given its operands.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda w, x: x @ (w / jnp.linalg.norm(w)))(jnp.ones((3, 5)), jnp.ones((2, 3))).jaxpr
    >>> found = {jaxpr.invars[0]: WEIGHT}
    >>> for eqn in jaxpr.eqns:
    ...     follow(eqn, found)
    >>> found[jaxpr.eqns[-1].invars[1]], jaxpr.outvars[0] in found
    ('weight', False)
    """
    ins = [GIVEN if isinstance(v, Literal) else source.get(v) for v in eqn.invars]
    if None in ins:
        return
    for out in eqn.outvars:
        source[out] = _source(eqn, ins, out)


def _source(eqn: Equation, ins: list[str | None], out: Var) -> str:
    if set(ins) <= {GIVEN}:
        return GIVEN
    name = name_of(eqn)
    if name in _ENDS:
        return MADE
    if name in _PARTS and ins[0] == WEIGHT:
        return WEIGHT
    if name in _JOINS:
        return WEIGHT if MADE not in ins else MADE
    # Of a sum of a weight and a bias that is spread over it, the weight decides: the one with as many numbers.
    sizes = [int(np.prod(getattr(v.aval, "shape", ()), dtype=np.int64)) for v in eqn.invars]
    size = int(np.prod(getattr(out.aval, "shape", ()), dtype=np.int64))
    return WEIGHT if any(s == WEIGHT and n == size for s, n in zip(ins, sizes, strict=True)) else MADE
