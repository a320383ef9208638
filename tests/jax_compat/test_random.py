"""Random bits by index, beside those that JAX draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.jax_compat.random import counts_by_index, is_threefry, threefry_words


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_words_by_index_are_the_bits_that_jax_draws(bits: int) -> None:
    dtype, key = f"uint{bits}", jax.random.key(3)
    with jax.enable_x64(True):
        index = jnp.arange(7, 20, dtype=jnp.uint32)
        high, low = threefry_words(key, jnp.zeros_like(index), index)
        made = (high.astype(jnp.uint64) << 32) | low if bits == 64 else (high ^ low).astype(dtype)
        np.testing.assert_array_equal(made, jax.random.bits(key, (4, 5), dtype).reshape(-1)[7:])


def test_keys_of_threefry_are_known_by_their_dtype() -> None:
    assert is_threefry(jax.random.key(0).dtype) and is_threefry(jax.random.split(jax.random.key(0)).dtype)
    closed = jax.make_jaxpr(lambda key: jax.random.fold_in(key, 1))(jax.random.key(0))
    assert is_threefry(closed.jaxpr.invars[0].aval.dtype)
    for impl in ("rbg", "unsafe_rbg"):
        assert not is_threefry(jax.random.key(0, impl=impl).dtype)
    assert not is_threefry(jnp.ones(1).dtype)


def test_only_one_key_of_threefry_counts_by_index_unless_told_otherwise() -> None:
    key = jax.random.key(0)
    assert counts_by_index(key) and jax.jit(lambda key: counts_by_index(key))(key)
    assert not counts_by_index(jax.random.split(key)) and not counts_by_index(jax.random.key(0, impl="rbg"))
    with jax.threefry_partitionable(False):
        assert not counts_by_index(key)
    assert counts_by_index(key)
