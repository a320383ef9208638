"""How micro-batches combine, for losses of many kinds; checked against the numbers they give."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import zoo
from contract import RATIOS as RATIOS_OF_THE_ZOO
from contract import subject
from example_losses import (
    BATCH,
    DATA,
    DIM,
    MICRO,
    PARAMS,
    SEQ,
    VOCAB,
    combined,
    cross_entropies,
    logits,
    mse,
    pooled,
    trace,
)
from flax import linen as nn

from cjax.trace.examples.verdict import lift_mean
from cjax.trace.jaxpr.simplify import simplify


def masked_by_where(p, b):
    return jnp.mean(cross_entropies(p, b), where=b["mask"] > 0)


def masked_and_guarded(p, b):
    return (cross_entropies(p, b) * b["mask"]).sum() / jnp.maximum(b["mask"].sum(), 1.0)


def masked_with_epsilon(p, b):
    return (cross_entropies(p, b) * b["mask"]).sum() / (b["mask"].sum() + 0.5)


def normalised_weights(p, b):
    return (cross_entropies(p, b) * (b["mask"] / b["mask"].sum())).sum()


def where_guard(p, b):
    total = b["mask"].sum()
    return (cross_entropies(p, b) * b["mask"]).sum() / jnp.where(total == 0, 1.0, total)


def ratio_and_decay(p, b):
    return 0.5 * masked_by_where(p, b) + 1e-2 * sum(jnp.sum(leaf**2) for leaf in p.values())


def indexed(p, b):
    logp = jax.nn.log_softmax(logits(p, b)[:, 0])
    return -logp[jnp.arange(BATCH if b["x"].shape[0] == BATCH else MICRO), b["labels"][:, 0]].mean()


def per_example_then_mean(p, b):
    return ((cross_entropies(p, b) * b["mask"]).sum(1) / (b["mask"].sum(1) + 1)).mean()


def flattened(p, b):
    rows = b["x"].reshape(-1, DIM) @ p["w"]
    return optax.softmax_cross_entropy(rows, jax.nn.one_hot(b["labels"].reshape(-1), VOCAB)).mean()


def time_major(p, b):
    def cell(carry, x):
        carry = jnp.tanh(carry + x @ p["w"])
        return carry, carry.sum(-1)

    rows = b["x"].shape[0]
    _, sums = jax.lax.scan(cell, jnp.zeros((rows, VOCAB)), jnp.swapaxes(b["x"], 0, 1))
    return sums.reshape(-1).mean()


def accumulated_over_chunks(p, b):
    def chunk(total, x):
        return total + (x @ p["v"]).sum(), None

    total, _ = jax.lax.scan(chunk, 0.0, jnp.swapaxes(b["x"], 0, 1))
    return total / (b["x"].shape[0] * SEQ)


def vmapped(p, b):
    return jax.vmap(lambda x, y: optax.huber_loss(x.mean(0) @ p["v"], y))(b["x"], b["target"]).mean()


def two_views(p, b):
    views = jnp.concatenate([b["x"][:, 0] * p["v"], b["x"][:, 1] * p["v"]]).reshape(2, -1, DIM)
    return ((views[0] - views[1]) ** 2).sum(-1).mean()


def in_remat(p, b):
    return jax.checkpoint(mse)(p, b)


def scaled_by_a_scalar(p, b):
    return mse(p, b) * b["step"] / 2 - 0.1


def weighted_ones(p, b):
    ones = jnp.ones_like(b["mask"])
    return (cross_entropies(p, b) * ones).sum() / ones.sum()


def by_rank_within_a_row(p, b):
    ranks = jnp.argsort(jnp.argsort(b["x"][..., 0], axis=1), axis=1)
    return jnp.mean(cross_entropies(p, b) * (1 + ranks))


def hidden_by_rank_within_a_row(p, b):
    hidden = jnp.argsort(b["x"][..., 0], axis=1) >= 2
    return (cross_entropies(p, b) * hidden).sum() / hidden.sum()


def mean_of_sums(p, b):
    return cross_entropies(p, b).sum(1).mean()


def sum_then_mean(p, b):
    return cross_entropies(p, b).sum() / b["x"].shape[0]


def clip_pairs(p, b):
    rows, others = b["x"][:, 0] * p["v"], b["x"][:, 1]
    return optax.softmax_cross_entropy_with_integer_labels(rows @ others.T, jnp.arange(rows.shape[0])).mean()


def distances(p, b):
    rows = b["x"][:, 0] * p["v"]
    return ((rows[:, None] - rows[None]) ** 2).mean()


def simclr(p, b):
    views = jnp.concatenate([b["x"][:, 0] * p["v"], b["x"][:, 1] * p["v"]])
    return jax.nn.logsumexp(views @ views.T, axis=1).mean()


def statistics(p, b):
    h = b["x"].reshape(b["x"].shape[0], -1)[:, :DIM] * p["v"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return (jnp.tanh(h).sum(1) - b["target"]).mean()


def balanced(p, b):
    probabilities = jax.nn.softmax(logits(p, b))
    chosen = jax.nn.one_hot(probabilities.argmax(-1), VOCAB)
    balance = (probabilities.mean((0, 1)) * chosen.mean((0, 1))).sum()
    return mse(p, b) + 0.01 * balance


def root_mean_square(p, b):
    return jnp.sqrt(mse(p, b))


def worst(p, b):
    return cross_entropies(p, b).max()


def trained_weights(p, b):
    weights = jax.nn.sigmoid(pooled(p, b))
    return (weights * b["target"]).sum() / weights.sum()


def along_one_input(p, b):
    """The derivative along one input, as of physics: its direction is made for the rows that are there."""
    direction = jnp.zeros_like(b["x"]).at[:, 0].set(1.0)
    _, slope = jax.jvp(lambda x: jnp.tanh(x @ p["v"]), (b["x"],), (direction,))
    return (slope**2).mean()


def written_beside_the_rows(p, b):
    marks = jnp.ones_like(b["x"]).at[:, jnp.array([1, 3])].multiply(2.0)[:, :4]
    return ((marks * b["x"][:, :4]) @ p["v"]).mean()


def volume(p, b):
    """As of a flow: how a square of weights stretches space."""
    return mse(p, b) - jnp.linalg.slogdet(p["w"] @ p["w"].T + jnp.eye(DIM))[1]


MEANS = [
    mse,
    indexed,
    along_one_input,
    written_beside_the_rows,
    per_example_then_mean,
    flattened,
    time_major,
    accumulated_over_chunks,
    vmapped,
    in_remat,
]
MEANS += [two_views, scaled_by_a_scalar, weighted_ones, mean_of_sums, sum_then_mean, by_rank_within_a_row, volume]
RATIOS = [masked_by_where, masked_and_guarded, masked_with_epsilon, normalised_weights, where_guard, ratio_and_decay]
RATIOS += [hidden_by_rank_within_a_row]


@pytest.mark.full("indexed", "per_example_then_mean", "weighted_ones")
@pytest.mark.parametrize("loss", MEANS + RATIOS, ids=lambda loss: loss.__name__)
def test_means_and_ratios_combine_to_the_whole(loss):
    _, lifted = trace(loss)
    assert lifted.kind == ("mean" if loss in MEANS else "ratio"), lifted.reason
    assert not lifted.refused and not lifted.couplings
    np.testing.assert_allclose(combined(loss, DATA), loss(PARAMS, DATA), rtol=2e-5)


def test_a_guard_acts_on_the_whole_weight():
    data = {**DATA, "mask": np.zeros((BATCH, SEQ), np.float32)}
    data["mask"][0, 0] = 0.25  # less than the guard, and in one micro-batch only
    np.testing.assert_allclose(combined(masked_and_guarded, data), masked_and_guarded(PARAMS, data), rtol=1e-5)


def test_a_mean_over_something_as_long_as_the_batch_is_no_mean_over_it():
    square = {"x": np.random.default_rng(0).normal(size=(BATCH, BATCH)).astype(np.float32)}
    assert trace(lambda p, b: (b["x"] * p["v"][0]).sum(0).mean(), square)[1].kind == "sum"
    assert trace(lambda p, b: (b["x"] * p["v"][0]).sum(1).mean(), square)[1].kind == "mean"
    assert trace(lambda p, b: (b["x"] * p["v"][0]).mean(1).sum(), square)[1].kind == "sum"


def test_a_branch_chosen_by_the_batch_couples_it():
    def loss(p, b):
        big = jnp.abs(b["x"]).max() > 1
        return jax.lax.cond(big, jnp.tanh, lambda x: x, b["x"] @ p["v"]).mean()

    assert trace(loss)[1].couplings


def test_sums_are_refused():
    for loss in (
        lambda p, b: cross_entropies(p, b).sum(),
        lambda p, b: cross_entropies(p, b).sum(0).mean(),
        lambda p, b: cross_entropies(p, b).sum() / 3,
        lambda p, b: mse(p, b) + 0.1 * cross_entropies(p, b).sum(),
    ):
        _, lifted = trace(loss)
        assert lifted.kind == "sum" and lifted.refused
        assert "cjax.Mean(total, weight)" in lifted.reason


@pytest.mark.parametrize("loss", [clip_pairs, distances, simclr], ids=lambda loss: loss.__name__)
def test_pairs_of_examples_are_refused(loss):
    _, lifted = trace(loss)
    assert lifted.kind == "coupled" and lifted.refused
    assert "meet each other" in lifted.reason and "microbatches=1" in lifted.reason


@pytest.mark.parametrize("loss", [root_mean_square, worst, trained_weights], ids=lambda loss: loss.__name__)
def test_functions_of_all_examples_are_refused(loss):
    _, lifted = trace(loss)
    assert lifted.kind == "coupled" and lifted.refused


def rolled(p, b):
    return ((pooled(p, b) - jnp.roll(b["target"], 1, 0)) ** 2).mean()


def flipped(p, b):
    return ((pooled(p, b) - b["target"][::-1]) ** 2).mean()


def ranked(p, b):
    return (jnp.sort(pooled(p, b)) * b["target"]).mean()


def cumulated(p, b):
    return jnp.tanh(jnp.cumsum(pooled(p, b))).mean()


def against_the_first(p, b):
    return ((pooled(p, b) - pooled(p, b)[0]) ** 2).mean()


def variance(p, b):
    return pooled(p, b).var()


def by_row_number(p, b):
    return (pooled(p, b) * jnp.arange(len(b["target"]))).mean()


def by_row_numbers_made_before(p, b):
    return (pooled(p, b) * np.linspace(0, 1, len(b["target"]))).mean()


def by_row_numbers_added_up(p, b):
    return (pooled(p, b) * jnp.cumsum(jnp.ones(len(b["target"])))).mean()


def divided_by_heart(p, b):
    return pooled(p, b).sum() / BATCH


def scaled_by_the_number_of_rows(p, b):
    return (pooled(p, b) * np.float32(np.log(len(b["target"])))).mean()


def unbiased(p, b):
    return (pooled(p, b) ** 2).sum() / (len(b["target"]) - 1)


def advantages(p, b):
    advantage = (b["target"] - b["target"].mean()) / (b["target"].std() + 1e-8)
    return -(advantage * pooled(p, b)).mean()


def moved_by_an_index(p, b):
    n = len(b["target"])
    rows = jnp.where(jnp.arange(n) == 0, n - 1, jnp.arange(n))
    return (pooled(p, b) * b["target"][rows]).mean()


def weights_cumulated(p, b):
    shares = cross_entropies(p, b) * b["mask"] / b["mask"].sum()
    return jnp.cumsum(shares, 1).mean()


MEETING = [rolled, flipped, ranked, cumulated, against_the_first, variance, by_row_number, by_row_numbers_made_before]
MEETING += [by_row_numbers_added_up, divided_by_heart, scaled_by_the_number_of_rows, unbiased, advantages]
MEETING += [moved_by_an_index, weights_cumulated, statistics, balanced]


@pytest.mark.parametrize("loss", MEETING, ids=lambda loss: loss.__name__)
def test_losses_that_know_other_rows_are_refused(loss):
    _, lifted = trace(loss)
    assert lifted.refused, lifted
    assert "loss=microbatch" in lifted.reason and "test_verdict.py" in lifted.reason or "constant" in lifted.reason


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.BatchNorm(use_running_average=False)(nn.Dense(3)(x)))


def of_module(module, loss, inputs=lambda x: x):
    """The verdict on a loss of a Linen module's output."""
    variables = module.init(jax.random.key(0), DATA["x"])

    def traced(params, x):
        return loss(module.apply({**variables, "params": params}, inputs(x), mutable=["batch_stats"])[0])

    closed = [simplify(jax.make_jaxpr(traced)(variables["params"], DATA["x"][:n])) for n in (BATCH, MICRO)]
    count = len(jax.tree.leaves(variables["params"]))
    return lift_mean(*closed, {count}, count)


def test_statistics_inside_a_model_are_allowed_and_named():
    lifted = of_module(Normed(), lambda y: (y**2).mean())
    assert lifted.kind == "mean"
    assert lifted.couplings == ("Normed/BatchNorm_0 (reduce_sum)",)


class Cumulated(nn.Module):
    """Each row sees the sum of those before it, as places in an expert's queue are counted."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(jnp.cumsum(nn.Dense(3)(x), 0))


def test_rows_that_see_those_before_them_stay_rows_within_a_model():
    lifted = of_module(Cumulated(), lambda y: (y**2).mean())
    assert lifted.kind == "mean" and not lifted.refused
    assert [text.partition(" (")[0] for text in lifted.couplings] == ["Cumulated"]


def test_statistics_around_a_model_are_refused():
    jnp.roll(DATA["x"], 1, 0)  # JAX keeps its trace, with the place of whoever called it first
    for loss in (lambda y: ((y - y.mean(0)) ** 2).mean(), lambda y: (y * jnp.roll(y, 1, 0)).mean()):
        assert of_module(Normed(), loss).refused
    for inputs in (lambda x: x / len(x), lambda x: x / jnp.abs(DATA["mask"][: len(x)]).sum(), lambda x: x - x.mean(0)):
        assert of_module(nn.Dense(1), lambda y: (y**2).mean(), inputs).refused


def test_what_cannot_be_followed_is_refused():
    def one_by_one(p, b):
        return jax.lax.scan(lambda c, x: (c + jnp.tanh(x @ p["v"]).sum(), None), 0.0, b["x"])[0] / BATCH

    _, lifted = trace(one_by_one)
    assert lifted.kind == "unknown" and lifted.refused and "scan" in lifted.reason


@pytest.mark.parametrize("how", ["stack", "unstack", "tile"])
def test_stack_unstack_and_tile_keep_a_weight(how):
    def loss(p, b):
        losses = cross_entropies(p, b)
        if how == "stack":
            losses = jnp.stack([losses, -losses], -1).sum(-1) + losses
        elif how == "tile":
            losses = jnp.tile(losses, (1, 2))[:, : losses.shape[1]]
        else:
            first, *rest = jnp.moveaxis(losses.reshape(*losses.shape[:-1], 2, 3), -2, 0)
            losses = jnp.concatenate([first, *rest], -1)
        return (losses * b["mask"]).sum() / b["mask"].sum()

    assert trace(loss)[1].kind == "ratio"


def test_ratios_and_means_blend():
    def other_weight(p, b):
        return masked_by_where(p, b) + (cross_entropies(p, b) * (1 - b["mask"])).sum() / (1 - b["mask"]).sum()

    for loss in (other_weight, lambda p, b: masked_by_where(p, b) + 0.1 * (logits(p, b) ** 2).mean()):
        assert trace(loss)[1].kind == "blend"


@pytest.mark.full("linen_encoder_decoder", "linen_remat", "linen_vit", "nnx_encoder")
@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_zoo(name):
    case = zoo.MODELS[name]
    captured, batch = subject(name, wide=False).captured, subject(name, wide=False).batches[0]
    trees = captured.params_shape, captured.frozen_shape, captured.model_state_shape

    def first(*args):
        return captured.apply(*args, True)[0]

    def traced(batch):
        return simplify(jax.make_jaxpr(first)(*trees, batch, jax.random.key(0)))

    twice = jax.tree.map(lambda x: jax.ShapeDtypeStruct((2 * len(x), *x.shape[1:]), x.dtype), batch)
    before, count = len(jax.tree.leaves(trees)), len(jax.tree.leaves(batch))
    invars = set(range(before, before + count))
    lifted = lift_mean(traced(batch), traced(twice), invars, len(jax.tree.leaves(trees[0])))
    assert lifted.kind == ("ratio" if name in RATIOS_OF_THE_ZOO else "mean"), lifted.reason
    assert bool(lifted.couplings) == case.couples


def by_hand(backward):
    """tanh with a gradient of its author's own."""

    @jax.custom_vjp
    def tanh(x):
        return jnp.tanh(x)

    tanh.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (backward(x, g),))
    return lambda p, b: tanh(pooled(p, b)).mean()


def test_a_gradient_by_hand_may_not_know_the_rows():
    assert trace(by_hand(lambda x, g: g * (1 - jnp.tanh(x) ** 2)))[1].kind == "mean"
    for backward in (
        lambda x, g: g / x.shape[0],
        lambda x, g: g - g.mean(),
        lambda x, g: g[::-1],
        lambda x, g: g / jnp.linalg.norm(x),
        lambda x, g: jnp.full_like(x, 1 / np.sqrt(len(x))),
    ):
        _, lifted = trace(by_hand(backward))
        assert lifted.refused and "its author's own" in lifted.reason


def test_a_derivative_by_hand_may_not_know_the_rows():
    @jax.custom_jvp
    def tanh(x):
        return jnp.tanh(x)

    tanh.defjvps(lambda t, y, x: t / len(x))
    assert trace(lambda p, b: tanh(pooled(p, b)).mean())[1].refused
    assert trace(lambda p, b: jax.nn.relu(pooled(p, b)).mean())[1].kind == "mean"


def test_a_loss_with_a_gradient_by_hand_is_a_mean_if_its_gradient_is():
    @jax.custom_vjp
    def mean_square(x):
        return (x**2).mean()

    mean_square.defvjp(lambda x: ((x**2).mean(), x), lambda x, g: (g * 2 * x / x.size,))
    assert trace(lambda p, b: mean_square(pooled(p, b)))[1].kind == "mean"
