"""Cross-entropy of labels, without ever holding the logits of all positions."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

IGNORED = -100  # the label of positions that don't count, as in PyTorch and so in most prepared data
CHUNK = 128  # positions of a row: at batch 8 enough rows of a matmul for a GPU, and an eighth of 1024 positions' logits


def cross_entropy(
    hidden: jax.Array, labels: jax.Array, classify: Callable[[jax.Array], jax.Array], *, chunk: int | None = CHUNK
) -> jax.Array:
    """Mean cross-entropy in nats over the labels that aren't `IGNORED`; 0 if there are none.

    Logits are the largest array of a language model: at batch 8, sequence 1024 and GPT-2's vocabulary 1.6 GB, several
    times over. With `chunk`, so many positions of each row are classified at a time, and again in the backward pass.

    Args:
        hidden: [batch, sequence, embed], what the classifier sees.
        labels: int[batch, sequence], from 0 to the number of classes - 1, or `IGNORED`. Others give NaN.
        classify: maps hidden [batch, positions, embed] to logits [batch, positions, classes].
        chunk: at most this many positions of a row at a time; None keeps all logits, and saves classifying them again.

    Raises:
        ValueError: labels of another shape than [batch, sequence], or a chunk below 1.

    >>> table = jnp.eye(4, 7)
    >>> loss = jax.jit(lambda hidden, labels: cross_entropy(hidden, labels, lambda some: some @ table, chunk=2))
    >>> round(float(loss(jnp.zeros([2, 5, 4]), jnp.ones([2, 5], int))), 4)  # log(7)
    1.9459
    """
    if chunk is not None and chunk < 1:
        raise ValueError(f"cross_entropy got chunk={chunk}; it needs at least 1 position at a time, such as chunk=256")
    if hidden.shape[:2] != labels.shape:
        raise ValueError(
            f"cross_entropy needs one label for each position: hidden is {list(hidden.shape)}, so labels must be "
            f"{list(hidden.shape[:2])}, not {list(labels.shape)}"
        )
    count = jnp.sum(labels != IGNORED)
    length = labels.shape[1]
    num_chunks = 1 if chunk is None else -(-length // chunk)
    if num_chunks <= 1:
        total = _total(hidden, labels, classify)
    else:
        total = _scanned(hidden, labels, classify, num_chunks)
    return total / jnp.maximum(count, 1).astype(total.dtype)


def classification(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy in nats of one label for each example, and how often the likeliest class is the label.

    Args:
        logits: [batch, classes].
        labels: int[batch], from 0 to classes - 1. Others give NaN.
    """
    if logits.shape[:1] != labels.shape:
        raise ValueError(
            f"classification needs one label for each example: logits are {list(logits.shape)}, so labels must be "
            f"{list(logits.shape[:1])}, not {list(labels.shape)}"
        )
    logits = logits.astype(_total_dtype(logits))
    losses = jax.nn.logsumexp(logits, axis=-1) - _chosen(logits, labels)
    return jnp.mean(losses), {"accuracy": jnp.mean((jnp.argmax(logits, axis=-1) == labels).astype(logits.dtype))}


def _scanned(
    hidden: jax.Array, labels: jax.Array, classify: Callable[[jax.Array], jax.Array], num_chunks: int
) -> jax.Array:
    batch, length = labels.shape
    positions = -(-length // num_chunks)
    room = positions * num_chunks - length
    hidden = jnp.pad(hidden, ((0, 0), (0, room), (0, 0)))
    labels = jnp.pad(labels, ((0, 0), (0, room)), constant_values=IGNORED)
    # Chunk i is positions i, i + n, i + 2n, ...: if the sequence is split over devices, each has its part of any chunk.
    hidden = jnp.moveaxis(hidden.reshape(batch, positions, num_chunks, -1), 2, 0)
    labels = jnp.moveaxis(labels.reshape(batch, positions, num_chunks), 2, 0)

    @jax.checkpoint
    def add(total: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _total(*piece, classify), None

    zero = jnp.zeros([], _total_dtype(hidden))
    return jax.lax.scan(add, zero, (hidden, labels))[0]


def _total_dtype(hidden: jax.Array) -> jnp.dtype:
    return jnp.promote_types(hidden.dtype, jnp.float32)  # bfloat16 would lose small terms of a long sum


def _total(hidden: jax.Array, labels: jax.Array, classify: Callable[[jax.Array], jax.Array]) -> jax.Array:
    logits = classify(hidden).astype(_total_dtype(hidden))
    counts = labels != IGNORED
    # Not optax's form: its one-hot or gather over log-probabilities keeps a second array of the size of the logits.
    losses = jax.nn.logsumexp(logits, axis=-1) - _chosen(logits, jnp.where(counts, labels, 0))
    return jnp.sum(jnp.where(counts, losses, 0))


def _chosen(logits: jax.Array, labels: jax.Array) -> jax.Array:
    # A lookup outside of the logits gives NaN, which is seen; left negative, a label would count from the end.
    safe = jnp.where(labels < 0, logits.shape[-1], labels)
    return jnp.take_along_axis(logits, safe[..., None], axis=-1)[..., 0]
