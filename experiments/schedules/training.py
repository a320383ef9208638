"""The job of the live run, and of tests, that trains with cjax: least squares by two layers.

A step waits, as one of larger devices does.
"""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Waves:
    """Samples by their position."""

    batch_size: int = 32
    shard: tuple[int, int] = (0, 1)
    pause: float = 0.0
    identity = {"made": "of waves"}

    def batches(self, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        index, count = self.shard
        while True:
            rows = np.arange(start, start + self.batch_size)
            mine = rows[index * len(rows) // count : (index + 1) * len(rows) // count]
            x = np.stack([np.sin(mine * (k + 1.3)) for k in range(8)], axis=1).astype(np.float32)
            time.sleep(self.pause)
            yield {"x": x, "y": x[:, :1] * x[:, 1:2]}
            start += self.batch_size


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.tanh(nn.Dense(64)(x)))


def loss(model: Perceptron, batch: dict[str, jax.Array]) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make(pause: str = "0") -> Any:
    return Perceptron(), loss, optax.adam(1e-2), Waves(pause=float(pause))
