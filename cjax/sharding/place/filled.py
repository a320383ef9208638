"""Weights filled up to sizes that matmuls of GPUs are fast for: a vocabulary of 50,257 to 50,304.

Tensor cores read rows whose bytes are a multiple of 16. For others XLA fills up the weight, or the logits, in each
matmul, or takes a kernel of its own at a third of the rate (an H100, JAX 0.11.2: 0.64 ms for [2048, 768] by
[768, 50257], of which the arithmetic is 0.16). Filled up once, where it is made ready for use, a weight is multiplied
as it is: in a loop over the positions too, which adds up its gradient in that form. What the rest gives is cut off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation, Params
from cjax.mesh import on_gpus
from cjax.sharding.place.beside import Beside
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.reading import Trace

Placing = Callable[[jax.Array, PartitionSpec], jax.Array]
Returned = Callable[[jax.Array], jax.Array]

_WHOLE = PartitionSpec()
_READ, _TILE, _LEAST = 8, 64, 1024  # elements of 16 bits that are read at once, and of a tile; smaller dims stay


@dataclass(frozen=True)
class _Full:
    """`filled` along `dim`, of which `value` is cut out."""

    value: Any
    filled: jax.Array
    dim: int


def uneven_dims(shape: Sequence[int]) -> list[int]:
    """The dims that GPUs read slowly in 16 bits, of those that are large enough to matter.

    >>> uneven_dims((768, 50257)), uneven_dims((4096, 32000))
    ([1], [])
    """
    return [d for d, size in enumerate(shape) if size % _READ and size >= _LEAST]


class Filled(Beside[_Full]):
    """The weights that are filled up, while a trace is evaluated: known by the arrays that they stand for."""

    def __init__(self, trace: Trace, mesh: Mesh) -> None:
        super().__init__()
        products = trace.dims.matmuls if on_gpus(mesh) else ()
        self._multiplied = {leaf for m in products for leaf in (m.lhs_origin, m.rhs_origin)}

    def ready(
        self, leaf: int, value: jax.Array, gradient: PartitionSpec = _WHOLE, place: Placing = lambda value, spec: value
    ) -> jax.Array:
        """A weight of two dims in 16 bits as it is read: the same, or cut out of what products read instead of it.

        Args:
          leaf: the weight.
          value: as it is used, whole on every device.
          gradient: where its gradient goes. Before what fills it up is cut off: behind that, XLA would not see that of
            the sum over all devices each needs a part alone, and reduce it to all.
          place: places an array.
        """
        dims = uneven_dims(value.shape)
        is_pair = value.ndim == 2 and value.dtype.itemsize == 2 and len(dims) == 1
        if self._made is None or not is_pair or leaf not in self._multiplied:
            return value
        (dim,) = dims
        room = [(0, -size % _TILE if d == dim else 0) for d, size in enumerate(value.shape)]
        fill = _fill(room, dim, value.shape[dim], lambda got: place(place(got, _WHOLE), gradient))
        return self._cut(fill(value), dim, value.shape[dim])

    def _cut(self, filled: jax.Array, dim: int, size: int) -> jax.Array:
        cut = lax.slice_in_dim(filled, 0, size, axis=dim)
        assert self._made is not None
        self._made[id(cut)] = _Full(cut, filled, dim)
        return cut

    def handed(self, values: list[Any]) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
        """Values as they are handed to a function, filled up, and from there back to what stands for them."""
        known = [self._of(value) for value in values]

        def back(given: list[Any]) -> list[Any]:
            return [
                x if of is None else self._cut(x, of.dim, of.value.shape[of.dim])
                for x, of in zip(given, known, strict=True)
            ]

        return [value if of is None else of.filled for value, of in zip(values, known, strict=True)], back

    def transposed(self, eqn: Equation, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        """Remembers what a transpose makes of such a weight."""
        if self._made is None or name_of(eqn) != "transpose" or (of := self._of(ins[0])) is None:
            return
        order = tuple(eqn.params["permutation"])
        self._made[id(outs[0])] = _Full(outs[0], lax.transpose(of.filled, order), order.index(of.dim))

    def product(
        self, eqn: Equation, ins: Sequence[Any], given: Callable[[list[Any]], tuple[list[Any], Params]]
    ) -> jax.Array | None:
        """The result of a product with such a weight along whose filled dim nothing is summed; None for all others.

        Args:
          eqn: the equation.
          ins: its operands.
          given: from operands to what they are computed with, and by which parameters.
        """
        known = [self._of(value) for value in ins] if name_of(eqn) == "dot_general" else []
        places = [place for place, of in enumerate(known) if of is not None]
        if len(places) != 1:
            return None
        (place,) = places
        of = known[place]
        assert of is not None
        filled, dim = of.filled, of.dim
        contracting, batch = eqn.params["dimension_numbers"]
        if dim in contracting[place] or dim in batch[place]:
            return None
        operands, params = given([filled if i == place else x for i, x in enumerate(ins)])
        shared = (*contracting[place], *batch[place])
        free = [d for d in range(filled.ndim) if d not in shared]
        (out,) = eqn.outvars
        at = len(batch[0]) + free.index(dim) if place == 0 else out.aval.ndim - len(free) + free.index(dim)
        (found,) = bind(eqn, operands, params)
        return lax.slice_in_dim(found, 0, out.aval.shape[at], axis=at)


def _fill(room: Sequence[tuple[int, int]], dim: int, size: int, back: Returned) -> Returned:
    """Fills up a weight, whose gradient is placed before it is cut."""

    def make(value: jax.Array) -> jax.Array:
        return jnp.pad(value, room)

    fill = jax.custom_vjp(make)
    fill.defvjp(lambda value: (make(value), None), lambda _, got: (lax.slice_in_dim(back(got), 0, size, axis=dim),))
    return fill
