"""Weights that layers gather in the first micro-batch, and gradients that they reduce in the last, in their turn.

Of micro-batches, devices add up gradients of their own. They reduce the sums once, and under ZeRO-1 and -2 gather the
weights once. In front of the first micro-batch and behind the last there is nothing to compute meanwhile. So each layer
gathers its weights in the forward pass of the first, which hands them on to the others, and reduces its sum in the
backward pass of the last: beside the layers in front of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax

OfLayer = Callable[[jax.Array], jax.Array]


@dataclass(frozen=True)
class InTurn:
    """Weights of a stack of layers, or of one of them, in the first micro-batch or in the last, or in the only one.

    Args:
      graded: zeros, as large as the gradient that comes back, which is theirs; in its dtype.
      weights: as they are kept, of which there is no gradient: a device's part of them, or all.
      sums: earlier gradients, on each device its own; None where there were none, or where they are added elsewhere.
      gather: from a device's part of a layer's weights to all of them; None where they are there.
      reduce: from a layer's sum on each device to a device's part of the sum over all; None where that is later.
    """

    graded: jax.Array
    weights: jax.Array
    sums: jax.Array | None
    gather: OfLayer | None
    reduce: OfLayer | None

    def taken(self) -> jax.Array:
        """The weights of a layer, about to be used."""
        dtype, gather, reduce = self.graded.dtype, self.gather, self.reduce

        def whole(_: jax.Array, weights: jax.Array, sums: jax.Array | None) -> jax.Array:
            return weights if gather is None else gather(weights)

        def forward(_: jax.Array, weights: jax.Array, sums: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
            return whole(_, weights, sums), sums

        def backward(sums: jax.Array | None, gradient: jax.Array) -> tuple[jax.Array, None, None]:
            gradient = gradient.astype(dtype)
            gradient = gradient if sums is None else sums + gradient
            return gradient if reduce is None else reduce(gradient), None, None

        take = jax.custom_vjp(whole)
        take.defvjp(forward, backward)
        return take(self.graded, self.weights, self.sums)


jax.tree_util.register_dataclass(InTurn, ["graded", "weights", "sums"], ["gather", "reduce"])
