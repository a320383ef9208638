"""The gradient noise scale: how large a batch pays, estimated from gradients of two batch sizes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

DECAY = 0.99  # of both averages: single steps are far too noisy, the signal more so than the noise


class NoiseState(NamedTuple):
    """Averages over the steps so far, from which `noise_scale` is read; not debiased.

    Attributes:
      count: int32[], steps that were measured.
      noise: float32[], the trace of the covariance of one example's gradient.
      signal: float32[], the squared norm of the true gradient.

    >>> init_noise()._fields
    ('count', 'noise', 'signal')
    """

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  # as optax names its own
    noise: jax.Array
    signal: jax.Array


def init_noise() -> NoiseState:
    """Averages before the first step.

    >>> int(init_noise().count)
    0
    """
    return NoiseState(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32))


def measure_noise(
    state: NoiseState, part_square: jax.Array, whole_square: jax.Array, num_parts: int, num_examples: int
) -> NoiseState:
    r"""The averages after one more step.

    For a batch of B examples in P parts, E|G_part|^2 = |G|^2 + P tr(S) / B and E|G_whole|^2 = |G|^2 + tr(S) / B, so
    |G|^2 = (P |G_whole|^2 - |G_part|^2) / (P - 1) and tr(S) = B (|G_part|^2 - |G_whole|^2) / (P - 1), without bias.

    Args:
      state: of the steps before.
      part_square: float32[], mean squared norm of the parts' gradients.
      whole_square: float32[], squared norm of their mean.
      num_parts: P, at least 2.
      num_examples: B.

    McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162, appendix A.

    >>> state = measure_noise(init_noise(), jnp.float32(5.0), jnp.float32(3.0), num_parts=2, num_examples=8)
    >>> float(noise_scale(state))  # tr(S) is 16, |G|^2 is 1
    16.0
    """
    signal = (num_parts * whole_square - part_square) / (num_parts - 1)
    noise = num_examples * (part_square - whole_square) / (num_parts - 1)
    return NoiseState(
        state.count + 1,
        DECAY * state.noise + (1 - DECAY) * noise.astype(jnp.float32),
        DECAY * state.signal + (1 - DECAY) * signal.astype(jnp.float32),
    )


def noise_scale(state: NoiseState) -> jax.Array:
    """tr(S) / |G|^2 in examples: below it larger batches train in fewer steps in proportion, above it they are wasted.

    Infinite where noise drowns the signal, NaN before the first step.

    Args:
      state: from `init_noise` and `measure_noise`.

    McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, arXiv:1812.06162.

    >>> float(noise_scale(NoiseState(jnp.int32(9), noise=jnp.float32(16.0), signal=jnp.float32(0.5))))
    32.0
    """
    ratio = state.noise / jnp.where(state.signal > 0, state.signal, 1)
    return jnp.where(state.count == 0, jnp.nan, jnp.where(state.signal > 0, ratio, jnp.inf))
