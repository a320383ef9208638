"""Gradients of a batch in parts are those of the whole: on one loss written by hand, of each kind that there is."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from traces import numbers

from cjax.gradients.accumulated import (
    Evaluated,
    Graded,
    cut_rows,
    divisors,
    locally_accumulated,
    mean,
    micro_batched,
    plain,
    sharing,
)
from cjax.gradients.reduced import reduction
from cjax.sharding.place.in_turn import InTurn
from cjax.trace.examples.values import RowWeight
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import every_equation
from cjax.trace.reading import Shared

ROWS, WIDTH, OUT, PARTS = 12, 4, 3, 3
KEY = jax.random.key(0)
PARAMS = (numbers(WIDTH, OUT), numbers(OUT))
DTYPES = (jnp.float32, jnp.float32)
BATCH = {"x": numbers(ROWS, WIDTH), "scale": np.float32(0.5), "y": numbers(ROWS, OUT)}
WEIGHTS = np.arange(ROWS, dtype=np.float32) % 5


def errors(params: Any, batch: Any) -> Any:
    kernel, bias = params
    return jnp.square(jnp.tanh(batch["x"] @ kernel + bias) - batch["scale"] * batch["y"]).sum(-1)


def a_mean(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Evaluated:
    """A mean over rows; a mean, and a total with its weight, beside it; and a count."""
    each = errors(params, batch)
    aux = [(each.max(initial=0) * 0 + batch["x"].mean(), None), (batch["x"].sum(), jnp.float32(batch["x"].shape[0]))]
    return Evaluated(each.mean(), None, aux, (model_state[0] + 1,))


def a_ratio(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Evaluated:
    """A total, whose weight depends on the batch and, so that its derivative would show, on the parameters."""
    total = (errors(params, batch) * batch["w"]).sum()
    return Evaluated(total, batch["w"].sum() + 0 * params[1].sum() ** 2 + params[1][0], [], model_state)


def whole(loss: Any, batch: Any, scale: Any = None) -> Graded:
    return jax.jit(plain(loss, DTYPES))(PARAMS, (), (jnp.int32(0),), batch, KEY, scale)


def assert_same(given: Graded, wanted: Graded) -> None:
    for a, b in zip(given.grads, wanted.grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(mean(given.out.total, given.out.weight), mean(wanted.out.total, wanted.out.weight), 1e-5)
    for a, b in zip(given.out.aux, wanted.out.aux, strict=True):
        np.testing.assert_allclose(mean(*a), mean(*b), rtol=1e-5)


def identity(tree: Any) -> Any:
    return tree


def shifted(weight: jax.Array) -> jax.Array:
    """Of the sum over parts, each of which counts the parameter that the whole counts once."""
    return weight - (PARTS - 1) * PARAMS[1][0]


CASES: list[tuple[Any, dict[str, Any], Callable[[Any], Any]]] = [
    (a_mean, BATCH, identity), (a_ratio, {**BATCH, "w": WEIGHTS}, shifted),
]  # fmt: skip


@pytest.mark.parametrize(("loss", "batch", "denominator"), CASES, ids=["mean", "ratio"])
@pytest.mark.parametrize("scale", [None, np.float32(64)], ids=["plain", "scaled"])
def test_micro_batches_are_the_whole(loss: Any, batch: Any, denominator: Any, scale: Any) -> None:
    function = micro_batched(loss, DTYPES, PARTS, identity, denominator)
    given = jax.jit(function)(PARAMS, (), (jnp.int32(0),), batch, KEY, scale)
    wanted = whole(loss, batch)
    assert_same(given, wanted)
    assert_same(whole(loss, batch, scale), wanted)
    assert given.out.model_state == ((PARTS,) if loss is a_mean else (0,)), "one micro-batch after the other"


@pytest.mark.parametrize(("loss", "batch", "denominator"), CASES, ids=["mean", "ratio"])
@pytest.mark.parametrize(("parts", "overlap"), [(PARTS, PARTS), (6, 2), (6, 3)])
def test_several_at_a_time_are_the_same_parts(
    loss: Any, batch: Any, denominator: Any, parts: int, overlap: int
) -> None:
    """And what they hand on is the last one's of each turn."""
    runs = [micro_batched(loss, DTYPES, parts, identity, denominator, overlap=n) for n in (1, overlap)]
    wanted, given = (jax.jit(run)(PARAMS, (), (jnp.int32(0),), batch, KEY, np.float32(64)) for run in runs)
    assert_same(given, wanted)
    assert given.out.model_state == ((parts // overlap,) if loss is a_mean else (0,))


def test_each_of_several_has_its_own_number() -> None:
    def numbered(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Evaluated:
        total = errors(params, batch).mean() * (index + 1)
        return Evaluated(total, None, [(total, None)], (jnp.where(index == 5, 7, model_state[0]),))

    runs = [micro_batched(numbered, DTYPES, 6, identity, identity, overlap=n) for n in (1, 3)]
    wanted, given = (jax.jit(run)(PARAMS, (), (jnp.int32(0),), BATCH, KEY, None) for run in runs)
    assert_same(given, wanted)
    assert given.out.model_state == (7,), "the last part's, whatever the others say"


def test_gradients_are_those_of_the_mean_of_the_weight_given() -> None:
    """A weight is a number: the mean's derivative is that of the total alone."""
    batch = {**BATCH, "w": WEIGHTS}
    weight = WEIGHTS.sum() + PARAMS[1][0]
    wanted = jax.grad(lambda params: (errors(params, batch) * batch["w"]).sum() / weight)(PARAMS)
    for a, b in zip(whole(a_ratio, batch).grads, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def test_nothing_counted_is_a_mean_of_zero() -> None:
    batch = {**BATCH, "w": 0 * WEIGHTS}
    given = micro_batched(a_ratio, DTYPES, PARTS, identity, lambda weight: 0 * weight)(PARAMS, (), (), batch, KEY, None)
    assert all((np.asarray(g) == 0).all() for g in given.grads)
    assert mean(jnp.float32(3), jnp.float32(0)) == 0 and mean(jnp.float32(3), None) == 3


@pytest.mark.parametrize("parts", [1, 512])
def test_of_rounded_weights_sums_and_quotients_are_not_rounded(parts: int) -> None:
    """Gradients of one, scaled by three: bfloat16 counts no further than 256, and has no third."""

    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Evaluated:
        return Evaluated((params[0].astype(jnp.float32) / 3).sum(), None, [], model_state)

    kept = (jnp.float32,)
    made = plain(loss, kept) if parts == 1 else micro_batched(loss, kept, parts, identity, identity)
    batch = {"x": np.zeros(parts, np.float32)}
    (found,) = jax.jit(made)((jnp.zeros(2, jnp.bfloat16),), (), (), batch, KEY, np.float32(3)).grads
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, 1 / 3, rtol=1e-6)


def test_parts_are_measured_as_if_each_were_the_batch() -> None:
    """The mean squared norm of the gradients of the parts, each of its own rows."""
    given = micro_batched(a_mean, DTYPES, PARTS, identity, identity, measures=True)(
        PARAMS, (), (jnp.int32(0),), BATCH, KEY, 8.0 * jnp.ones(())
    )
    parts = [{k: v if np.ndim(v) == 0 else v[i::PARTS] for k, v in BATCH.items()} for i in range(PARTS)]
    squares = [sum(float(jnp.square(g).sum()) for g in whole(a_mean, part).grads) for part in parts]
    assert given.num_parts == PARTS and given.part_square is not None
    np.testing.assert_allclose(given.part_square, np.mean(squares), rtol=1e-5)


def test_rows_are_dealt_out_in_turn() -> None:
    """Rows next to each other are on one device: so every micro-batch has some of each."""
    cut = cut_rows(jnp.arange(ROWS * 2).reshape(ROWS, 2), PARTS)
    assert cut.shape == (PARTS, ROWS // PARTS, 2)
    np.testing.assert_array_equal(cut[1, :, 0] // 2, [1, 4, 7, 10])


# -- devices' own sums ------------------------------------------------------------------------------------------------
MESH = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "zero"))
AXES = ("data", "zero")


def test_own_rows_are_the_whole() -> None:
    """Four devices with two micro-batches each, of weights that differ, beside the batch at once."""

    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Evaluated:
        return Evaluated((errors(params, batch) * batch["w"]).sum(), batch["w"].sum(), [], model_state)

    batch = {"x": numbers(16, WIDTH), "scale": np.float32(0.5), "y": numbers(16, OUT), "w": np.arange(16.0, dtype="f4")}
    hows = [
        reduction(p.shape, PartitionSpec(*[None] * p.ndim), PartitionSpec(*[None] * p.ndim), AXES, MESH) for p in PARAMS
    ]
    given = jax.jit(locally_accumulated(loss, DTYPES, 2, AXES, hows, MESH, identity))(PARAMS, (), (), batch, KEY, None)
    wanted = jax.jit(plain(loss, DTYPES))(PARAMS, (), (), batch, KEY, None)
    assert_same(given, wanted)


STACK, ROWS_OF_IT = (numbers(5, 4, 4),), {"x": numbers(16, 4)}


def layered(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Evaluated:
    def layer(x: jax.Array, weights: Any) -> Any:
        taken = weights.taken() if isinstance(weights, InTurn) else weights
        return jnp.tanh(x @ taken), taken

    x, taken = jax.lax.scan(layer, batch["x"], params[0])
    comes_in_parts = isinstance(params[0], InTurn) and params[0].gather is not None
    return Evaluated(jnp.square(x).mean(), None, [], model_state, (taken,) if comes_in_parts else ())


@pytest.mark.parametrize("in_parts", [(), (0,)], ids=["whole", "in parts"])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_layers_that_work_in_their_turn_change_nothing(parts: int, in_parts: tuple[int, ...]) -> None:
    (weights,) = STACK
    how = reduction(weights.shape, PartitionSpec(None, None, None), PartitionSpec(None, AXES, None), AXES, MESH)
    stacks = {0: weights.shape}
    run = locally_accumulated(layered, DTYPES[:1], parts, AXES, [how], MESH, identity, stacks=stacks, in_parts=in_parts)
    given = jax.jit(run)(STACK, (), (), ROWS_OF_IT, KEY, None)
    wanted = jax.jit(plain(layered, DTYPES[:1]))(STACK, (), (), ROWS_OF_IT, KEY, None)
    assert_same(given, wanted)


@pytest.mark.parametrize(("num", "times"), [(2, 2), (4, 1)])
def test_a_part_waits_for_the_one_before_it(num: int, times: int) -> None:
    """Its rows come behind the gradients of those before it; its forward pass would else be free to come first."""
    (weights,) = STACK
    how = reduction(weights.shape, PartitionSpec(None, None, None), PartitionSpec(None, AXES, None), AXES, MESH)
    run = locally_accumulated(layered, DTYPES[:1], num, AXES, [how], MESH, identity, stacks={0: weights.shape})
    jaxpr = jax.make_jaxpr(run)(STACK, (), (), ROWS_OF_IT, KEY, None)
    barriers = [eqn for eqn in every_equation(jaxpr.jaxpr) if name_of(eqn) == "optimization_barrier"]
    assert len(barriers) == times, "of parts in a loop none"
    for waits in barriers:
        shapes = [var.aval.shape for var in waits.invars]
        assert weights.shape in shapes and (4 // num, 4) in shapes, "gradients, and the rows that a device has of it"


# -- denominators of the whole batch ----------------------------------------------------------------------------------
@pytest.mark.parametrize("is_mean", [False, True])
@pytest.mark.parametrize("num_parts", [PARTS, 2 * PARTS])
def test_denominators_are_of_the_whole_batch(is_mean: bool, num_parts: int) -> None:
    """A sum is shared among the parts, so that their mean is the whole; of a mean each part has the mean."""
    kind = jnp.mean if is_mean else jnp.sum
    closed = jax.make_jaxpr(lambda w, key, index: [kind(w)])(WEIGHTS[: ROWS // PARTS], KEY, jnp.int32(0))
    (atom,) = closed.jaxpr.outvars
    shared = Shared(closed, (RowWeight(atom, is_mean=is_mean),), closed, {0: atom})
    (given,) = divisors(shared, [WEIGHTS], KEY, PARTS, num_parts)
    np.testing.assert_allclose(given, WEIGHTS.mean() if is_mean else WEIGHTS.sum() / num_parts, rtol=1e-6)

    def seen(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, scale: Any) -> Any:
        return batch

    (rows, divisor) = sharing(seen, shared, PARTS, num_parts)(PARAMS, (), (), [WEIGHTS], KEY, None)
    assert rows is WEIGHTS and divisor == given
    assert sharing(seen, None, PARTS, num_parts) is seen
