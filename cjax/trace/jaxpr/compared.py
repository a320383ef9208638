"""Largest and smallest elements whose derivative goes to whichever element equals the result.

A compiler may compute the elements twice, for the result and for the comparison, and round them otherwise: then none
equals it, and JAX's derivative divides zero by zero. XLA does so on CPUs, whatever barrier stands in between, and a
layer that saves the result and makes the elements again invites it. So the first of the largest is meant, whether it is
equal or not; with others that are equal it shares the derivative, as JAX has ties do.

Scattered extremes have the same fault, and worse: a derivative that finds no equal is lost in silence. What is as large
as the result but for rounding counts as equal there.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from cjax.jax_compat.core import Equation, Jaxpr, Literal, Params
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.primitives import having, name_of
from cjax.trace.jaxpr.view import open_bodies

Arrays = tuple[jax.Array, ...]

COMPARED = having("extreme") & having("reduces")
SCATTERED = having("extreme") & having("scatter")
ROUNDING = 16  # units in the last place by which two ways to the same number differ, and a tie seldom does


def compared(jaxpr: Jaxpr) -> frozenset[int]:
    """Ids of the equations, those within others included, that take such an element and whose derivative is read.

    >>> import jax
    >>> len(compared(jax.make_jaxpr(lambda x: x.max() ** 2)(jnp.ones(3)).jaxpr))
    1
    >>> len(compared(jax.make_jaxpr(jax.nn.softmax)(jnp.ones(3)).jaxpr))  # its derivative stops at the largest
    0
    """
    found: set[int] = set()
    read = {v for v in jaxpr.outvars if not isinstance(v, Literal)}  # variables that a derivative may pass through
    for eqn in reversed(jaxpr.eqns):
        for body in open_bodies(eqn):
            found |= compared(body)
        outs = [v for v in eqn.outvars if jnp.issubdtype(getattr(v.aval, "dtype", jnp.int32), jnp.inexact)]
        if name_of(eqn) == "stop_gradient" or read.isdisjoint(outs):
            continue
        read.update(v for v in eqn.invars if not isinstance(v, Literal))
        if name_of(eqn) in COMPARED:
            found.add(id(eqn))
    return frozenset(found)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def extreme(x: jax.Array, axes: Sequence[int], name: str) -> jax.Array:
    """`reduce_max` or `reduce_min` along `axes`, whose derivative always has somewhere to go."""
    return (jnp.max if name == "reduce_max" else jnp.min)(x, axes)


@extreme.defjvp
def _extreme_jvp(axes: Sequence[int], name: str, primals: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
    (x,), (t,) = primals, tangents
    out = extreme(x, axes, name)
    # Whether any is equal may be asked of elements made once more, so that the first is always among those meant.
    meant = (x == jnp.expand_dims(out, axes)) | (_first(x, axes, name) if axes else True)
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


def scattered(eqn: Equation, params: Params, operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
    """`scatter_max` or `scatter_min`, whose derivative always has somewhere to go.

    Args:
      eqn: which of the two.
      params: its parameters, as they stand or others.
      operand, indices, updates: as it takes them.
    """
    numbers, mode = params["dimension_numbers"], params["mode"]

    def plain(operand: jax.Array, indices: jax.Array, updates: jax.Array) -> jax.Array:
        return bind_as_is(eqn, (operand, indices, updates), params)[0]

    if not jnp.issubdtype(operand.dtype, jnp.floating):
        return plain(operand, indices, updates)
    scatter = jax.custom_jvp(plain)

    @scatter.defjvp
    def _(primals: Arrays, tangents: Arrays) -> tuple[jax.Array, jax.Array]:
        operand, indices, new = primals
        out = scatter(operand, indices, new)
        numbers_of_gather, sizes = _inverse(numbers, operand.shape, new.shape)

        def at_indices(array: jax.Array) -> jax.Array:
            # An update that is dropped is no share of anything: 0 in its place, where JAX would read NaN.
            return lax.gather(array, indices, numbers_of_gather, sizes, mode=mode, fill_value=0)

        def added(array: jax.Array, values: jax.Array) -> jax.Array:
            return lax.scatter_add(array, indices, values, numbers, mode=mode)

        before, result, zeros = at_indices(operand), at_indices(out), jnp.zeros_like(operand)
        stays, wins = (_equals(x, result).astype(out.dtype) for x in (before, new))
        number = jnp.maximum(at_indices(added(zeros, wins)) + stays, 1)  # that share it, for each update
        asked = jnp.maximum(at_indices(added(zeros, jnp.ones_like(wins))), 1)  # each takes its part of what goes
        change = at_indices(tangents[0]) * (stays / number - 1) / asked + tangents[2] * wins / number
        return out, added(tangents[0], change)

    return scatter(operand, indices, updates)


def _equals(x: jax.Array, result: jax.Array) -> jax.Array:
    """Whether elements are the result, but for rounding; infinite ones are themselves alone."""
    near = jnp.abs(x - result) <= ROUNDING * jnp.finfo(x.dtype).eps * jnp.abs(result)
    return (x == result) | (near & jnp.isfinite(result))


def _inverse(
    numbers: lax.ScatterDimensionNumbers, shape: tuple[int, ...], updates: tuple[int, ...]
) -> tuple[lax.GatherDimensionNumbers, tuple[int, ...]]:
    """The gather that reads where a scatter writes."""
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    windows = iter(numbers.update_window_dims)
    sizes = tuple(1 if dim in gone else updates[next(windows)] for dim in range(len(shape)))
    dims = lax.GatherDimensionNumbers(
        offset_dims=tuple(numbers.update_window_dims),
        collapsed_slice_dims=tuple(numbers.inserted_window_dims),
        start_index_map=tuple(numbers.scatter_dims_to_operand_dims),
        operand_batching_dims=tuple(numbers.operand_batching_dims),
        start_indices_batching_dims=tuple(numbers.scatter_indices_batching_dims),
    )
    return dims, sizes
