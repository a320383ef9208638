"""Weights whose gradients are reduced in the backward pass that makes the last of them, with all earlier ones.

Of micro-batches, devices add up gradients of their own, and reduce the sums once. Behind the last micro-batch there is
nothing left to compute meanwhile. So each layer reduces its sum in the last one's backward pass, beside the layers in
front of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class WithSums:
    """Weights of a stack of layers, or of one of them, and what their gradient is added to before it is reduced.

    Args:
      reduced: zeros of the shape and dtype of the reduced gradient, which is its own.
      whole: the weights, as a pass is given them. They have no gradient.
      sums: of earlier gradients, on each device its own; None if there were none.
      reduce: from one layer's sum on each device to what a device gets of the sum over all.
    """

    reduced: jax.Array
    whole: jax.Array
    sums: jax.Array | None
    reduce: Callable[[jax.Array], jax.Array]

    def taken(self) -> jax.Array:
        """The weights of a layer, about to be used."""
        dtype, reduce = self.reduced.dtype, self.reduce

        def forward(_: jax.Array, whole: jax.Array, sums: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
            return whole, sums

        def backward(sums: jax.Array | None, gradient: jax.Array) -> tuple[jax.Array, None, None]:
            gradient = gradient.astype(dtype)
            return reduce(gradient if sums is None else sums + gradient), None, None

        take = jax.custom_vjp(lambda _, whole, sums: whole)
        take.defvjp(forward, backward)
        return take(self.reduced, self.whole, self.sums)


jax.tree_util.register_dataclass(WithSums, ["reduced", "whole", "sums"], ["reduce"])
