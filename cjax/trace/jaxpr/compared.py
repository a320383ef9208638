"""Largest and smallest elements whose derivative goes to whichever element equals the result.

A compiler may compute the elements twice, for the result and for the comparison, and round them otherwise: then none
equals it, and JAX's derivative divides zero by zero. XLA does so on CPUs, whatever barrier stands in between, and a
layer that saves the result and makes the elements again invites it. So where none is equal, the first of the largest is
meant. Where some are, the derivative is JAX's own: ties share it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

COMPARED = frozenset(["reduce_max", "reduce_min"])


def compared(jaxpr: Any) -> frozenset[int]:
    """Ids of the equations, those within others included, that take such an element and whose derivative is read.

    >>> import jax
    >>> len(compared(jax.make_jaxpr(lambda x: x.max() ** 2)(jnp.ones(3)).jaxpr))
    1
    >>> len(compared(jax.make_jaxpr(jax.nn.softmax)(jnp.ones(3)).jaxpr))  # its derivative stops at the largest
    0
    """
    found: set[int] = set()
    read = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)}  # variables that a derivative may pass through
    for eqn in reversed(jaxpr.eqns):
        for body in jex.jaxprs_in_params(eqn.params):
            found |= compared(getattr(body, "jaxpr", body))
        outs = [v for v in eqn.outvars if jnp.issubdtype(getattr(v.aval, "dtype", jnp.int32), jnp.inexact)]
        if eqn.primitive.name == "stop_gradient" or read.isdisjoint(outs):
            continue
        read.update(v for v in eqn.invars if not isinstance(v, jex.Literal))
        if eqn.primitive.name in COMPARED:
            found.add(id(eqn))
    return frozenset(found)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def extreme(x: jax.Array, axes: Sequence[int], name: str) -> jax.Array:
    """`reduce_max` or `reduce_min` along `axes`, whose derivative always has somewhere to go."""
    return (jnp.max if name == "reduce_max" else jnp.min)(x, axes)


@extreme.defjvp
def _extreme_jvp(axes: Sequence[int], name: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    out = extreme(x, axes, name)
    equal = x == jnp.expand_dims(out, axes)
    meant = equal | (~equal.any(axes, keepdims=True) & _first(x, axes, name)) if axes else equal
    share = meant.astype(t.dtype)
    return out, (t * share).sum(axes) / share.sum(axes)


def _first(x: jax.Array, axes: Sequence[int], name: str) -> jax.Array:
    """Whether an element is the one that counts for largest, or smallest, along `axes`."""
    *others, axis = sorted(axes)
    index = jnp.expand_dims((jnp.argmax if name == "reduce_max" else jnp.argmin)(x, axis), axis)
    is_it = jax.lax.broadcasted_iota(index.dtype, x.shape, axis) == index
    if not others:
        return is_it
    return is_it & jnp.expand_dims(_first(extreme(x, (axis,), name), others, name), axis)
