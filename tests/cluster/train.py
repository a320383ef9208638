"""A job of these tests that trains with cjax: least squares by two layers, on numbers made by their position."""

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Each sample once."""

    batch_size: int = 8
    shard: tuple[int, int] = (0, 1)
    pause: float = 0.0
    identity = {"made": "of numbers"}

    def batches(self, start: int = 0) -> Iterator[dict[str, np.ndarray]]:
        index, count = self.shard
        while True:
            rows = np.arange(start, start + self.batch_size)
            mine = rows[index * len(rows) // count : (index + 1) * len(rows) // count]
            x = np.stack([np.sin(mine + 1.0), np.cos(mine * 1.7)], axis=1).astype(np.float32)
            time.sleep(self.pause)
            yield {"x": x, "y": (x @ np.array([1.0, -2.0], np.float32))[:, None]}
            start += self.batch_size


class TwoLayers(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(1)(nn.tanh(nn.Dense(8)(x)))


def loss(model: TwoLayers, batch: dict[str, jax.Array]) -> jax.Array:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def make(pause: str = "0") -> Any:
    return TwoLayers(), loss, optax.adam(1e-2), Numbers(pause=float(pause))


def wrong() -> Any:
    return TwoLayers(), loss
