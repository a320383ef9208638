"""Losses lifted to what adds up over micro-batches: parts, put together, are the whole."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core as jex
from traces import numbers, plain_trace

from cjax.gradients.accumulated import divisors
from cjax.trace.author.capture import Mean
from cjax.trace.microbatches.combine import averages, counters, guarded, lift, loss_size
from cjax.trace.reading import Trace

ROWS, WIDTH, PARTS = 12, 5, 3
PARAMS = {"w": numbers(WIDTH)}
BATCH = {"mask": (np.arange(ROWS) % 4 > 0).astype(np.float32), "x": numbers(ROWS, WIDTH)}


def errors(params: Any, batch: Any) -> Any:
    return jnp.square(jnp.tanh(batch["x"] @ params["w"]))


def rows_of(num: int) -> Any:
    return {name: array[:num] for name, array in BATCH.items()}


def traced(loss: Any, num: int, model_state: Any = ()) -> Trace:
    """The trace of `(params, batch) -> loss, aux`, or `(params, batch, carried) -> loss, aux, model_state`."""

    def function(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        return loss(params, batch, model_state) if model_state else (*loss(params, batch), model_state)

    return plain_trace(function, params=PARAMS, model_state=model_state, batch=rows_of(num))


def lifted(loss: Any, num: int = ROWS // PARTS, model_state: Any = (), **options: Any) -> Trace:
    options = {"shares": True} | options
    return lift(traced(loss, num, model_state), lambda rows: traced(loss, rows, model_state).closed, ROWS, **options)


def evaluated(trace: Trace, batch: Any, *more: Any) -> list[Any]:
    key, index = jax.random.key(0), jnp.int32(0)
    return jex.jaxpr_as_fun(trace.closed)(PARAMS["w"], *jax.tree.leaves(batch), *more, key, index)


def parts() -> list[Any]:
    return [{name: array[i::PARTS] for name, array in BATCH.items()} for i in range(PARTS)]


# -- losses -----------------------------------------------------------------------------------------------------------
def a_mean(params: Any, batch: Any) -> Any:
    return errors(params, batch).mean(), {}


def a_ratio(params: Any, batch: Any) -> Any:
    return (errors(params, batch) * batch["mask"]).sum() / batch["mask"].sum(), {}


def guarded_ratio(params: Any, batch: Any) -> Any:
    return (errors(params, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1), {}


def a_ratio_beside_a_mean(params: Any, batch: Any) -> Any:
    return a_ratio(params, batch)[0] + 0.1 * a_mean(params, batch)[0], {}


def test_a_mean_is_left_as_it_is() -> None:
    trace = lifted(a_mean)
    assert trace.num_loss == 1 and trace.ratio is None and trace.shared is None
    assert trace.results[0].kind == "mean" and averages(trace) and loss_size(trace) == 1
    np.testing.assert_allclose(
        np.mean([evaluated(trace, part)[0] for part in parts()]), a_mean(PARAMS, BATCH)[0], rtol=1e-6
    )


@pytest.mark.parametrize("loss", [a_ratio, guarded_ratio])
def test_a_ratio_becomes_its_total_and_weight(loss: Any) -> None:
    trace = lifted(loss)
    assert trace.num_loss == 2 and trace.has_weight and trace.ratio is not None and trace.ratio.weight is not None
    sums = np.sum([evaluated(trace, part)[:2] for part in parts()], 0)
    total, weight = sums[0], guarded(trace.ratio.weight, jnp.asarray(sums[1]))
    np.testing.assert_allclose(total / weight, loss(PARAMS, BATCH)[0], rtol=1e-6)
    assert loss_size(trace) == ROWS // PARTS


def test_a_guard_is_of_the_whole_weight() -> None:
    """Nothing counts in any part: the loss is 0 / 1, as of the whole, and not 0 / 3."""
    trace = lifted(guarded_ratio)
    assert trace.ratio is not None and trace.ratio.weight is not None
    assert guarded(trace.ratio.weight, jnp.zeros(())) == 1


def test_denominators_beside_means_become_inputs() -> None:
    trace = lifted(a_ratio_beside_a_mean)
    assert trace.shared is not None and trace.num_loss == 1
    added = [leaf for leaf in trace.leaves if leaf.name.startswith("denominator")]
    assert [leaf.kind for leaf in added] == ["batch"] and trace.leaves_of("batch")[-1] == trace.leaves.index(added[0])
    dealt = [np.stack([part[name] for part in parts()], 1).reshape(ROWS, *BATCH[name].shape[1:]) for name in BATCH]
    given = divisors(trace.shared, dealt, jax.random.key(0), PARTS, PARTS)
    np.testing.assert_allclose(given, [BATCH["mask"].sum() / PARTS], rtol=1e-6)
    found = np.mean([evaluated(trace, part, *given)[0] for part in parts()])
    np.testing.assert_allclose(found, a_ratio_beside_a_mean(PARAMS, BATCH)[0], rtol=1e-6)


@pytest.mark.parametrize("loss", [a_mean, a_ratio, a_ratio_beside_a_mean])
def test_of_one_row_is_read_what_is_of_two(loss: Any) -> None:
    """JAX takes short cuts past dims of size 1: a sum over one row is no sum in its trace."""
    one, two = lifted(loss, 1), lifted(loss, 2)
    assert (one.num_loss, one.shared is None) == (two.num_loss, two.shared is None)
    assert [value.kind for value in one.results] == [value.kind for value in two.results]
    given = [np.float32(1)] * (one.shared is not None)
    for batch in ({name: array[i : i + 1] for name, array in BATCH.items()} for i in range(1, 4)):
        wanted = evaluated(lifted(loss, 2), {name: np.repeat(array, 2, 0) for name, array in batch.items()}, *given)
        scale = 0.5 if one.has_weight else 1
        if one.shared is None:
            np.testing.assert_allclose(evaluated(one, batch)[: one.num_loss], np.multiply(scale, wanted), rtol=1e-6)


def test_what_does_something_else_with_one_row_is_refused() -> None:
    def squeezed(params: Any, batch: Any) -> Any:
        return jnp.square(jnp.squeeze(batch["x"] * params["w"])).mean(0).sum(), {}

    def by_number(params: Any, batch: Any) -> Any:
        found = errors(params, batch)
        return found.mean() if len(found) == 1 else (found * batch["mask"]).mean(), {}

    for loss in (squeezed, by_number):
        assert lifted(loss, 2).num_loss == 1
        with pytest.raises(ValueError, match="With one row in a micro-batch.*Use fewer micro-batches"):
            lifted(loss, 1)
        assert lifted(loss, 1, apart=True).num_loss == 1


def test_losses_that_cannot_be_put_together_are_refused() -> None:
    def squared(params: Any, batch: Any) -> Any:
        return jnp.square(errors(params, batch).mean()), {}

    def a_sum(params: Any, batch: Any) -> Any:
        return errors(params, batch).sum(), {}

    for loss, why in ((squared, "no mean over the examples"), (a_sum, "a sum over the examples")):
        with pytest.raises(ValueError, match=why):
            lifted(loss)
        assert lifted(loss, apart=True).num_loss == 1, "each part is a batch of its own"


# -- a loss that its author takes apart -------------------------------------------------------------------------------
def test_of_a_total_and_its_weight_both_grow_or_neither() -> None:
    def sums(params: Any, batch: Any) -> Any:
        return Mean((errors(params, batch) * batch["mask"]).sum(), batch["mask"].sum()), {}

    def means(params: Any, batch: Any) -> Any:
        return Mean((errors(params, batch) * batch["mask"]).mean(), batch["mask"].mean()), {}

    def crossed(params: Any, batch: Any) -> Any:
        return Mean((errors(params, batch) * batch["mask"]).sum(), batch["mask"].mean()), {}

    def numbered(params: Any, batch: Any) -> Any:
        return Mean(errors(params, batch).sum(), jnp.float32(ROWS)), {}

    for loss in (sums, means):
        assert lifted(loss).has_weight
    for loss in (crossed, numbered):
        with pytest.raises(ValueError, match="one is a sum over the examples and the other a mean"):
            lifted(loss)


def test_sums_among_aux_are_told_from_means() -> None:
    def loss(params: Any, batch: Any) -> Any:
        aux = {
            "count": batch["mask"].sum(),
            "mean": batch["x"].mean(),
            "of": Mean(batch["x"].sum(), batch["mask"].sum()),
        }
        return errors(params, batch).mean(), aux

    trace = lifted(loss)
    assert trace.aux_sums == {0} and not averages(trace)

    def largest(params: Any, batch: Any) -> Any:
        return errors(params, batch).mean(), {"most": batch["x"].max()}

    with pytest.raises(ValueError, match="Aux value 'most' is no mean"):
        lifted(largest)


# -- state ------------------------------------------------------------------------------------------------------------
STATE = {"mean": np.zeros(WIDTH, np.float32), "steps": np.float32(0)}


def test_what_changes_without_examples_changes_once() -> None:
    def loss(params: Any, batch: Any, model_state: Any) -> Any:
        new = {"mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0), "steps": model_state["steps"] + 1}
        return errors(params, batch).mean(), {}, new

    assert counters(lifted(loss, model_state=STATE), [False, False]) == {1}
    assert counters(lifted(a_mean), []) == frozenset()


def test_state_that_depends_on_both_is_refused() -> None:
    def debiased(params: Any, batch: Any, model_state: Any) -> Any:
        steps = model_state["steps"] + 1
        return (
            errors(params, batch).mean(),
            {},
            {"mean": model_state["mean"] + batch["x"].mean(0) / steps, "steps": steps},
        )

    with pytest.raises(ValueError, match="makes mean of the examples and of steps, which changes at every call"):
        counters(lifted(debiased, model_state=STATE), [False, False])

    def counted(params: Any, batch: Any, model_state: Any) -> Any:
        steps = model_state["steps"] * batch["x"].shape[0]
        return errors(params, batch).mean(), {}, {**model_state, "steps": steps}

    with pytest.raises(ValueError, match="makes steps of the number of examples"):
        counters(lifted(counted, model_state=STATE), [False, False])
