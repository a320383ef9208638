"""Weights kept in fewer bytes than a model computes with, and made whole in the program that reads them.

What Qwix quantizes is a matrix: the dims that a product sums over, and the others. With 8 bits each column has a scale;
with 4 each block of 128 rows of it has, and two numbers share a byte, on whatever device.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

Bits = Literal["int8", "int4"]
_BLOCK = 128  # rows with a scale of their own, of 4 bits
_LEAST = 32  # beneath it a scale costs more than it is worth: a column then has one


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scales"], meta_fields=["kind", "shape"])
@dataclass(frozen=True)
class Quantized:
    """A quantized weight.

    Args:
      values: int8[inputs, outputs]; of 4 bits uint8[inputs / 2, outputs], the first half of the inputs in the low bits.
      scales: float32[blocks, outputs].
      kind: which.
      shape: of the weight.
    """

    values: Any
    scales: Any
    kind: Bits
    shape: tuple[int, ...]

    def whole(self) -> jax.Array:
        """The weight as it is computed with."""
        qwix, values = library(), self.values
        if self.kind == "int4":
            low, high = values & 15, values >> 4
            values = (jnp.concatenate([low, high]).astype(jnp.int8) ^ 8) - 8  # of two's complement
        array = qwix.QArray(values.astype(self.kind), self.scales)
        return qwix.dequantize(array).reshape(self.shape)


def as_computed(x: Any, dtype: Any) -> jax.Array:
    """What is kept of a weight, as a model of such weights computes with it."""
    x = x.whole() if isinstance(x, Quantized) else x
    return x if x.dtype == dtype else x.astype(dtype)


def structs_of(shape: tuple[int, ...], num_inputs: int, kind: Bits) -> tuple[jax.ShapeDtypeStruct, ...] | None:
    """What is kept of a weight of this shape; None if its size does not allow it."""
    inputs, outputs = math.prod(shape[:num_inputs]), math.prod(shape[num_inputs:])
    if kind == "int8":
        return jax.ShapeDtypeStruct((inputs, outputs), np.int8), jax.ShapeDtypeStruct((1, outputs), np.float32)
    if inputs % 2:
        return None
    blocks = inputs // _block(inputs)
    return jax.ShapeDtypeStruct((inputs // 2, outputs), np.uint8), jax.ShapeDtypeStruct((blocks, outputs), np.float32)


def _block(inputs: int) -> int:
    block = math.gcd(inputs, _BLOCK)
    return block if block >= _LEAST else inputs


def quantize(weight: np.ndarray, num_inputs: int, kind: Bits) -> tuple[np.ndarray, np.ndarray]:
    """Values and scales of a weight, made by the host's cores."""
    inputs = math.prod(weight.shape[:num_inputs])
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        values, scales = _quantize(weight.reshape(inputs, -1).astype(np.float32), kind)
        # Copies: NumPy would else look into memory of the CPU's, which is what a device has where that is the CPU.
        return np.array(values), np.array(scales)


@functools.partial(jax.jit, static_argnums=1)
def _quantize(matrix: Any, kind: Bits) -> tuple[jax.Array, jax.Array]:
    blocks = {0: _block(len(matrix))} if kind == "int4" else {}
    found = library().quantize(matrix, kind, channelwise_axes=[1], tiled_axes=blocks)
    if kind == "int8":
        return found.qvalue, found.scale
    values = found.qvalue.astype(jnp.int8).astype(jnp.uint8) & 15
    low, high = jnp.split(values, 2)
    return low | (high << 4), found.scale


def library() -> Any:
    """Qwix.

    Raises:
      ImportError: it is not installed, with what to type.
    """
    try:
        import qwix
    except ImportError as error:
        raise ImportError("weights of 8 and 4 bits are made by Qwix: pip install 'cjax[quantize]'") from error
    return qwix
