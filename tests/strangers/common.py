"""What a stranger is, and the losses and batches that several share."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

ROWS, LENGTH, VOCAB, CLASSES = 16, 12, 70, 6


@dataclasses.dataclass(frozen=True)
class Stranger:
    """A model as its author made it, the loss one would train it with, and a batch."""

    model: Any
    loss: Callable[[Any, Any], Any]
    batch: Any
    apart: bool = False  # examples meet inside the model: micro-batches are batches of their own (design.md)


def wide(model: nnx.Module) -> nnx.Module:
    """The module with weights in float64, so that it computes in float64 wherever its author let the weights decide."""

    def widen(leaf: Any) -> Any:
        is_float = isinstance(leaf, jax.Array) and leaf.dtype in (jnp.float32, jnp.bfloat16)
        return leaf.astype(jnp.float64) if is_float else leaf

    graph, state = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(widen, state))


def random() -> np.random.Generator:
    return np.random.default_rng(0)


def tokens(length: int = LENGTH, vocab: int = VOCAB) -> dict[str, np.ndarray]:
    """Sentences of different lengths: ids, and 1 where there is a word. No sentence is shorter than a third."""
    rng = random()
    lengths = rng.integers(length // 3, length + 1, (ROWS, 1))
    return {
        "ids": rng.integers(3, vocab, (ROWS, length)).astype("int32"),
        "mask": (np.arange(length) < lengths).astype("int32"),
    }


def masked_words(length: int = LENGTH) -> dict[str, np.ndarray]:
    """The same, a fifth of the words hidden, which is where the loss looks."""
    batch, rng = tokens(length), random()
    hidden = (rng.random(batch["ids"].shape) < 0.2) & (batch["mask"] > 0)
    hidden[:, 0] = True
    return {**batch, "ids": np.where(hidden, 2, batch["ids"]), "labels": batch["ids"], "hidden": hidden}


def sentence_pairs() -> dict[str, np.ndarray]:
    target = tokens(LENGTH - 2)
    labels = np.roll(target["ids"], -1, 1)
    return {**tokens(), "target": target["ids"], "target_mask": target["mask"], "labels": labels}


def pictures(size: int = 16, channels: int = 3) -> dict[str, np.ndarray]:
    rng = random()
    images = rng.normal(size=(ROWS, size, size, channels)).astype("float32")
    return {"images": images, "labels": rng.integers(0, CLASSES, ROWS).astype("int32")}


def cross_entropy(logits: Any, labels: Any, where: Any = None) -> Any:
    """The mean over all labels, or over those where it counts."""
    each = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if where is None:
        return each.mean()
    return jnp.sum(each * where) / jnp.sum(where)


def next_words(logits: Any, batch: Any) -> Any:
    """Each word from those in front of it, padding left out."""
    return cross_entropy(logits[:, :-1], batch["ids"][:, 1:], batch["mask"][:, 1:])
