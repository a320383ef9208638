"""The one seam between a model and its training: parameters and a batch in, loss and gradients out.

`plain` differentiates the whole batch at once. `micro_batched` runs it in parts, one after the other, and adds up the
gradients; a part takes every m-th row, so that each device's rows of a part are rows it already has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

PyTree = Any
Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Evaluated:
    """What one pass over (a part of) a batch gives; `weight` is None where parts simply average."""

    total: jax.Array
    weight: jax.Array | None
    aux: list[tuple[jax.Array, jax.Array | None]]
    carried: Arrays


jax.tree_util.register_dataclass(Evaluated, ["total", "weight", "aux", "carried"], [])

Loss = Callable[[Arrays, Arrays, Arrays, PyTree, jax.Array, jax.Array], Evaluated]
Gradients = Callable[[Arrays, Arrays, Arrays, PyTree, jax.Array], tuple[Evaluated, Arrays]]


def mean(total: jax.Array, weight: jax.Array | None) -> jax.Array:
    """total / weight; the total where there is no weight. Nothing counted is a mean of zero, not NaN."""
    if weight is None:
        return total
    return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))


def plain(loss: Loss) -> Gradients:
    """Gradients of the loss of a whole batch."""

    def gradients(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: jax.Array) -> Any:
        def scalar(params: Arrays) -> tuple[jax.Array, Evaluated]:
            out = loss(params, frozen, carried, batch, key, jnp.int32(0))
            weight = None if out.weight is None else lax.stop_gradient(out.weight)
            return mean(out.total, weight), out

        (_, out), grads = jax.value_and_grad(scalar, has_aux=True)(params)
        return out, grads

    return gradients


def micro_batched(loss: Loss, num_microbatches: int, constrain: Callable[[PyTree], PyTree]) -> Gradients:
    """Gradients of a batch run in parts.

    Args:
      loss: of one part; its last argument is the part's index.
      num_microbatches: how many parts.
      constrain: placement of the batch after it was cut, part index first.
    """

    def cut(leaf: jax.Array) -> jax.Array:
        rows = leaf.reshape(leaf.shape[0] // num_microbatches, num_microbatches, *leaf.shape[1:])
        return jnp.moveaxis(rows, 1, 0)

    def gradients(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: jax.Array) -> Any:
        leaves, treedef = jax.tree.flatten(batch)
        parts = constrain([cut(leaf) for leaf in leaves if leaf.ndim])

        def one(sums: Any, x: Any) -> Any:
            index, rows = x
            old_grads, old, carried = sums
            rows = iter(rows)
            part = jax.tree.unflatten(treedef, [next(rows) if leaf.ndim else leaf for leaf in leaves])

            def scalar(params: Arrays) -> tuple[jax.Array, Evaluated]:
                out = loss(params, frozen, carried, part, key, index)
                return out.total, out

            (_, out), grads = jax.value_and_grad(scalar, has_aux=True)(params)
            new = (out.total, out.weight, out.aux)
            grads, new = jax.tree.map(jnp.add, (old_grads, old), (grads, new))
            return (grads, new, out.carried), None

        shape = jax.eval_shape(loss, params, frozen, carried, _first(leaves, parts, treedef), key, jnp.int32(0))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (params, (shape.total, shape.weight, shape.aux)))
        (grads, (total, weight, aux), carried), _ = lax.scan(
            one, (zeros[0], zeros[1], carried), (jnp.arange(num_microbatches, dtype=jnp.int32), parts)
        )
        # Without a weight each part is a mean over equally many rows: their sum is over their number.
        divisor = num_microbatches if weight is None else jnp.where(weight == 0, 1, weight)
        grads = jax.tree.map(lambda g: g / jnp.asarray(divisor, g.dtype), grads)
        total = total / num_microbatches if weight is None else total
        aux = [(t / num_microbatches if w is None else t, w) for t, w in aux]
        return Evaluated(total, weight, aux, carried), grads

    return gradients


def _first(leaves: list[jax.Array], parts: list[jax.Array], treedef: Any) -> PyTree:
    shapes = iter([jax.ShapeDtypeStruct(p.shape[1:], p.dtype) for p in parts])
    return jax.tree.unflatten(treedef, [next(shapes) if leaf.ndim else leaf for leaf in leaves])
