"""Losses that a rule of one primitive could take for what they are not: refused, or right in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from example_losses import DATA, MICRO, PARAMS, combined, cross_entropies, half, logits, mse, pooled, trace

from cjax.trace.examples.verdict import lift_mean
from cjax.trace.jaxpr.simplify import simplify


def shifted_by_padding(p, b):
    return ((pooled(p, b) - jax.lax.pad(b["target"], np.float32(0), [(1, -1, 0)])) ** 2).mean()


def in_turn(p, b):
    """One and the other, as of pairs that lie side by side."""
    return (pooled(p, b) * jnp.tile(jnp.array([1.0, -1.0]), len(b["target"]) // 2)).mean()


def two_views_in_turn(p, b):
    """Signs of pairs that lie side by side, for views that lie behind each other."""
    views = jnp.concatenate([b["x"][:, 0] @ p["v"], b["x"][:, 1] @ p["v"]])
    return (views * jnp.broadcast_to(jnp.array([1.0, -1.0]), (len(b["x"]), 2)).reshape(-1)).mean()


def chosen_by_row_number(p, b):
    rows = jnp.arange(len(b["target"]))
    return logits(p, b)[rows, 0, rows % 3].mean()


def on_the_diagonal(p, b):
    rows = jnp.arange(len(b["target"]))
    return jnp.tile(logits(p, b)[:, 0], (1, 2))[rows, rows].mean()


def chosen_by_a_table_of_the_first_rows(p, b):
    return logits(p, b)[jnp.arange(len(b["target"])), 0, jnp.array([2, 0, 1, 1, 0, 2, 0, 1])[: len(b["target"])]].mean()


def as_often_as_there_are_rows(p, b):
    return jnp.broadcast_to(pooled(p, b), (len(b["target"]), len(b["target"]))).sum(0).mean()


def first_row_marked(p, b):
    return (pooled(p, b) * jnp.zeros_like(b["target"]).at[0].set(1.0)).mean()


def added_up_with_one_row_marked(p, b):
    groups = jnp.zeros(7).at[b["labels"][:, 0]].add(pooled(p, b).at[0].set(1.0))
    return groups @ jnp.arange(7.0) / len(b["target"])


def added_up_where_one_row_is_told(p, b):
    groups = jnp.zeros(7).at[b["labels"][:, 0].at[0].set(3)].add(pooled(p, b))
    return groups @ jnp.arange(7.0) / len(b["target"])


def largest_eigenvalue(p, b):
    y = jnp.tanh(b["x"][:, 0])
    return jnp.linalg.eigvalsh(y.T @ y / len(y) + jnp.diag(p["v"]))[-1]


def by_triangles(p, b):
    y = b["x"][:, 0] * p["v"]
    return jnp.abs(jnp.diagonal(jnp.linalg.qr(y.T @ y / len(y), mode="r"))).sum()


def over_whole_weights(p, b):
    return (cross_entropies(p, b) * b["mask"]).sum() / (0.7 * b["mask"].sum()).astype(jnp.int32)


def over_half_a_count(p, b):
    return (cross_entropies(p, b) * b["mask"]).sum() / jax.lax.div((b["mask"] > 0).sum(), 2)


def whole_shares(p, b):
    return mse(p, b) + (100 * b["target"] / len(b["target"])).astype(jnp.int32).sum()


def rounded(p, b):
    return mse(p, b) + jax.lax.reduce_precision(b["target"].mean(), 8, 2)


def bags(p, b):
    """Of as many as there are bags, here, in a micro-batch."""
    return pooled(p, b).reshape(MICRO, -1).max(1).sum() / len(b["target"])


def the_first_ones(p, b):
    return pooled(p, b)[jnp.arange(MICRO)].sum() / len(b["target"])


def above_a_negative_floor(p, b):
    return (pooled(p, b) * b["target"]).sum() / jnp.maximum(b["target"].sum(), -5.0)


def noise_of_a_fixed_key(p, b):
    return ((pooled(p, b) + jax.random.normal(jax.random.key(0), b["target"].shape)) ** 2).mean()


def noise_of_a_key_of_the_batch(p, b):
    return ((pooled(p, b) + jax.random.normal(jax.random.key(b["step"].astype(int)), b["target"].shape)) ** 2).mean()


SEEING = [
    in_turn,
    two_views_in_turn,
    shifted_by_padding,
    chosen_by_row_number,
    on_the_diagonal,
    chosen_by_a_table_of_the_first_rows,
]
SEEING += [as_often_as_there_are_rows, first_row_marked, largest_eigenvalue, by_triangles, over_whole_weights]
SEEING += [over_half_a_count, whole_shares, rounded, above_a_negative_floor, noise_of_a_fixed_key]
SEEING += [noise_of_a_key_of_the_batch, added_up_with_one_row_marked, added_up_where_one_row_is_told]


@pytest.mark.parametrize("loss", SEEING, ids=lambda loss: loss.__name__)
def test_what_parts_would_change_is_refused(loss):
    _, lifted = trace(loss)
    assert lifted.refused, lifted
    assert "loss=microbatch" in lifted.reason


def test_weights_of_positions_may_be_merged_as_the_rows_are():
    def loss(p, b):
        weights = jnp.broadcast_to(jnp.linspace(0.0, 1.0, 6), b["labels"].shape)
        return (cross_entropies(p, b).reshape(-1) * (1 + weights).reshape(-1)).mean()

    assert trace(loss)[1].kind == "mean"
    np.testing.assert_allclose(combined(loss, DATA), loss(PARAMS, DATA), rtol=2e-5)


@pytest.mark.parametrize("loss", [bags, the_first_ones], ids=lambda loss: loss.__name__)
def test_what_is_as_long_as_a_micro_batch_by_chance_is_no_batch(loss):
    assert trace(loss, half(DATA), DATA)[1].refused


def test_a_weight_below_zero_is_guarded_as_its_author_says():
    """Weights with signs, as advantages are: 1 where the sum is not above 0, and not only where it is 0."""

    def loss(p, b):
        total = b["target"].sum()
        return (pooled(p, b) * b["target"]).sum() / jnp.where(total > 0, total, 1.0)

    for sign in (1, -1):
        data = {**DATA, "target": sign * np.abs(DATA["target"])}
        np.testing.assert_allclose(combined(loss, data), loss(PARAMS, data), rtol=2e-5)


def test_a_mean_of_complex_numbers_is_one():
    def loss(p, b):
        return jnp.real((pooled(p, b) * jnp.exp(1j * b["target"])).mean())

    assert trace(loss)[1].kind == "mean"
    np.testing.assert_allclose(combined(loss, DATA), loss(PARAMS, DATA), rtol=2e-5)


def test_noise_of_what_is_another_in_each_micro_batch_is_each_rows_own():
    """The program's key, which is behind the batch."""

    def of(rows):
        shapes = [jax.ShapeDtypeStruct((rows,), jnp.float32), jax.eval_shape(lambda: jax.random.key(0))]
        noisy = jax.make_jaxpr(lambda x, key: ((x + jax.random.normal(key, x.shape)) ** 2).mean())
        return simplify(noisy(*shapes))

    assert lift_mean(of(8), of(4), {0}, 0).kind == "mean"
