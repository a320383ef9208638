"""The noise scale, on gradients whose true one is known."""

import jax.numpy as jnp
import numpy as np
import pytest

from cjax.optim import init_noise, measure_noise, noise_scale


@pytest.mark.full("16-48", "8-64")
@pytest.mark.parametrize(("num_parts", "num_examples"), [(2, 8), (8, 64), (16, 48)])
def test_finds_signal_and_noise(num_parts: int, num_examples: int) -> None:
    """Gradients of examples are drawn around a known mean, with a known covariance."""
    rng = np.random.default_rng(0)
    size, deviation = 50, rng.uniform(0.5, 2.0, 50)
    true = 0.3 * rng.standard_normal(size)
    state = init_noise()
    for _ in range(1500):
        examples = true + deviation * rng.standard_normal((num_examples, size))
        parts = examples.reshape(num_parts, -1, size).mean(1)
        square = np.mean(np.sum(parts**2, 1)), np.sum(examples.mean(0) ** 2)
        state = measure_noise(state, jnp.float32(square[0]), jnp.float32(square[1]), num_parts, num_examples)
    wanted = np.sum(deviation**2) / np.sum(true**2)
    np.testing.assert_allclose(noise_scale(state), wanted, rtol=0.15)


def test_is_debiased_from_the_first_step_on() -> None:
    state = measure_noise(init_noise(), jnp.float32(5.0), jnp.float32(3.0), 2, 8)
    np.testing.assert_allclose(noise_scale(state), 16, rtol=1e-6)


def test_before_and_beyond_measuring() -> None:
    assert np.isnan(noise_scale(init_noise()))
    drowned = measure_noise(init_noise(), jnp.float32(5.0), jnp.float32(1.0), 2, 8)
    assert np.isposinf(noise_scale(drowned))
