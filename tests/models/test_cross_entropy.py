import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from cjax.models.cross_entropy import IGNORED, cross_entropy

BATCH, LENGTH, EMBED, CLASSES = 3, 11, 5, 17


def make(seed: int = 0, ignored: float = 0.3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    hidden, table = rng.normal(size=(BATCH, LENGTH, EMBED)), rng.normal(size=(EMBED, CLASSES))
    labels = rng.integers(0, CLASSES, (BATCH, LENGTH))
    labels[rng.random(labels.shape) < ignored] = IGNORED
    return hidden.astype(np.float32), labels, table.astype(np.float32)


def by_hand(hidden: np.ndarray, labels: np.ndarray, table: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss and its gradients for hidden states and table, in float64, from the textbook's formulas."""
    hidden, table = hidden.astype(np.float64), table.astype(np.float64)
    scores = np.exp(hidden @ table)
    probabilities = scores / scores.sum(-1, keepdims=True)
    counts = labels != IGNORED
    true = np.eye(CLASSES)[np.where(counts, labels, 0)]
    number = max(counts.sum(), 1)
    loss = -(np.log((probabilities * true).sum(-1)) * counts).sum() / number
    slope = (probabilities - true) * counts[..., None] / number
    return loss, slope @ table.T, np.einsum("bse,bsc->ec", hidden, slope)


def loss_of(hidden: jax.Array, table: jax.Array, labels: np.ndarray, chunk: int) -> jax.Array:
    return cross_entropy(hidden, jnp.asarray(labels), lambda x: x @ table, chunk=chunk)


@pytest.mark.parametrize("ignored", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("chunk", [1, 4, 10, LENGTH, 20])
def test_any_chunk_gives_the_loss_and_gradients_of_the_formula(chunk: int, ignored: float):
    hidden, labels, table = make(chunk, ignored)
    slope_of = jax.jit(jax.value_and_grad(loss_of, (0, 1)), static_argnums=3)
    loss, slopes = slope_of(hidden, table, labels, chunk)
    expected, *expected_slopes = by_hand(hidden, labels, table)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for slope, wanted in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(slope, wanted, rtol=1e-4, atol=1e-6)


def largest_array(chunk: int) -> int:
    """Elements of the largest array that loss and gradients compute, inside loops too."""
    hidden, labels, table = make()
    traced = jax.make_jaxpr(jax.grad(loss_of, (0, 1)), static_argnums=3)(hidden, table, labels, chunk)

    def sizes(jaxpr) -> list[int]:
        inner = [sub for eqn in jaxpr.eqns for sub in jaxprs_in_params(eqn.params)]
        return [v.aval.size for eqn in jaxpr.eqns for v in eqn.outvars] + [s for sub in inner for s in sizes(sub)]

    return max(sizes(traced.jaxpr))


def test_logits_are_never_whole():
    assert largest_array(chunk=LENGTH) >= BATCH * LENGTH * CLASSES
    assert largest_array(chunk=3) < BATCH * LENGTH * CLASSES


def test_bfloat16_is_summed_in_float32():
    hidden, labels, table = make()
    loss = loss_of(jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(table, jnp.bfloat16), labels, 2)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, by_hand(hidden, labels, table)[0], rtol=2e-2)


@pytest.mark.parametrize("label", [CLASSES, -1])
@pytest.mark.parametrize("chunk", [4, LENGTH])
def test_a_label_out_of_range_gives_nan(label: int, chunk: int):
    hidden, labels, table = make()
    labels[1, 2] = label
    assert np.isnan(loss_of(jnp.asarray(hidden), jnp.asarray(table), labels, chunk))


def test_bad_arguments_say_what_is_needed():
    hidden, labels, table = make()
    with pytest.raises(ValueError, match="chunk=256"):
        loss_of(jnp.asarray(hidden), jnp.asarray(table), labels, 0)
    with pytest.raises(ValueError, match=r"must be \[3, 11\], not \[3, 10\]"):
        loss_of(jnp.asarray(hidden), jnp.asarray(table), labels[:, 1:], 4)
