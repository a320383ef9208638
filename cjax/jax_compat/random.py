"""What JAX's generators of random bits promise no one: which of them a key is of, and how the usual one counts."""

from typing import Any

import jax
from jax.extend.random import threefry2x32_p


def is_threefry(dtype: Any) -> bool:
    """Whether keys of this dtype are JAX's usual ones, of Threefry.

    Private: the name of the dtype. `jax.random.key_impl` says it of an array, and there is none yet in a trace.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: `jax.random.key_impl` of a dtype.

    >>> is_threefry(jax.random.key(0).dtype), is_threefry(jax.random.key(0, impl="rbg").dtype)
    (True, False)
    """
    return dtype.name == "key<fry>"


def counts_by_index(key: jax.Array) -> bool:
    """Whether a key makes each number from its flat index alone, as Threefry does unless told otherwise.

    Private: what the flag `jax_threefry_partitionable` means, and that JAX may take it away when there is no other way.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a function of JAX's for the random bits of a block.
    """
    plain = key.ndim == 0 and str(jax.random.key_impl(key)) == "threefry2x32"
    return plain and bool(getattr(jax.config, "jax_threefry_partitionable", True))


def threefry_words(key: jax.Array, high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two random words for each counter of two words, under one key: of which, for index i, `jax.random.bits` makes
    its number i, as their XOR for 32 bits or fewer and side by side for 64.

    Private: the primitive, and that formula.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a function of JAX's for the random bits of a block.
    """
    words = jax.random.key_data(key)
    return threefry2x32_p.bind(words[0], words[1], high, low)
