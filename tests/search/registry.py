"""What random models are made of: each block a function of activations [rows, positions, width] and of its parameters.

A block knows neither Linen nor NNX: `m` makes its parameters, state and random keys (models.py). What it is given
beside `x` is plain data, which its sampler draws, so that a model can be kept as a row. Blocks are grouped by what they
are there for: a family of primitives with gradients.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Random = np.random.Generator
Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Block:
    """One kind. `run(m, x, **config)` gives activations of x's shape; `sample` draws a config."""

    run: Callable[..., jax.Array]
    choices: Config  # for each argument, what it may be
    couples: bool = False  # rows meet: micro-batches make other numbers
    random: bool = False
    state: bool = False
    packs: bool = False  # has weights whose last dim is several tensors beside each other
    integer: bool = False  # has a parameter of integers, which no gradient reaches
    only: str = ""  # "linen" or "nnx", where one of them alone has it

    def sample(self, rng: Random) -> Config:
        return {name: values[int(rng.integers(len(values)))] for name, values in self.choices.items()}


BLOCKS: dict[str, Block] = {}


def block(**choices: Any) -> Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]:
    """Puts a function into the table. Of each of `choices` its sampler draws one; traits of `Block` go by."""
    traits = {field.name for field in dataclasses.fields(Block)} & choices.keys()
    kept = {name: choices.pop(name) for name in traits}

    def register(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        BLOCKS[run.__name__] = Block(run, choices, **kept)
        return run

    return register


def act(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) + 0.1 * x


def index_of(ids: jax.Array, size: int) -> jax.Array:
    return ids % size


SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16)
AXES = (-1, -2)  # the width, the positions
YES_NO = (False, True)
