"""From scores to the softmax and on to the values: what each variable on the way is called."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from cjax.trace.attention.walk import MAX_SPINE, Index, Miss, Other, Walk
from cjax.trace.jaxpr.simplify import simplify

B, H, QUERIES, KEYS, D = 2, 3, 5, 7, 4
Q, K, V = jnp.ones((B, QUERIES, H, D)), jnp.ones((B, KEYS, H, D)), jnp.ones((B, KEYS, H, D))


def indexed(function: Any, *args: Any) -> Index:
    jaxpr = simplify(jax.make_jaxpr(function)(*args)).jaxpr
    return Index(jaxpr.eqns, jaxpr.outvars, ())


def walked(weigh: Any) -> Walk:
    """A walk along `softmax`-like weights of scores, [batch, heads, queries, keys]."""

    def function(q: Any, k: Any, v: Any) -> Any:
        return jnp.einsum("bhqk,bkhd->bqhd", weigh(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)

    trace = indexed(function, Q, K, V)
    walk = Walk(trace, next(eqn for eqn in trace.eqns if eqn.primitive.name == "dot_general"))
    walk.walk()
    return walk


def made_by(walk: Walk, part: str) -> str:
    return walk.trace.writer[walk.by_name[part]].primitive.name


def plain(scores: Any) -> Any:
    exps = jnp.exp(scores)
    return exps / exps.sum(-1, keepdims=True)


def shifted(scores: Any, low: Any = None) -> Any:
    most = scores.max(-1, keepdims=True)
    return plain(scores - (most if low is None else jnp.maximum(most, low)))


def test_each_part_of_a_softmax_has_its_name() -> None:
    walk = walked(lambda scores: shifted(scores * 0.5))
    assert walk.sizes == dict(enumerate((B, H, QUERIES, KEYS)))
    assert walk.by_name["key"] == 3
    names = {part: made_by(walk, part) for part in ("logits", "masked", "exps", "total", "numerator", "weights")}
    assert names == {"logits": "mul", "masked": "mul", "exps": "exp", "total": "reduce_sum", "numerator": "exp",
                     "weights": "div"}  # fmt: skip
    assert walk.by_name["terms"] is walk.by_name["exps"] and walk.by_name["dropped"] is walk.by_name["weights"]
    assert walk.by_name["logits"] is walk.by_name["masked"], "the exponents are relative to their own maximum"
    assert [walk.by_name["final"], walk.by_name["division"]] == [
        walk.spine[-1],
        walk.trace.writer[walk.by_name["weights"]],
    ]
    assert {walk.kinds[walk.start.outvars[0]], walk.kinds[walk.by_name["logits"]]} == {"logits"}
    assert walk.labels[walk.by_name["total"]] == ((0,), (1,), (2,))


def test_the_maximum_is_taken_off_or_it_is_not() -> None:
    """Whatever is made of it may be, as long as a row has one number."""
    assert "shift" not in walked(plain).by_name and "maximum" not in walked(plain).by_name
    for low, shift in ((None, "broadcast_in_dim"), (-jnp.inf, "max"), (0.0, "max"), (jnp.ones((H, 1, 1)), "max")):
        walk = walked(lambda scores, low=low: shifted(scores, low))
        assert (made_by(walk, "maximum"), made_by(walk, "shift")) == ("reduce_max", shift)
        assert walk.labels[walk.by_name["shift"]] == ((0,), (1,), (2,), ())
    softmax = walked(jax.nn.softmax)
    assert softmax.kinds[softmax.by_name["shift"]] == "max" and not softmax.stops_masked
    assert walked(lambda scores: plain(scores - jax.lax.stop_gradient(scores).max(-1, keepdims=True))).stops_masked


def test_what_is_taken_off_or_divided_by_is_one_number_for_all_keys() -> None:
    bias = jnp.ones(KEYS)
    for weigh in (
        lambda scores: plain(scores - (scores.max(-1, keepdims=True) + bias)),
        lambda scores: jnp.exp(scores) / (jnp.exp(scores).sum(-1, keepdims=True) + bias),
    ):
        with pytest.raises(Other):
            walked(weigh)

    def everywhere(scores: Any) -> Any:
        most = jnp.broadcast_to(scores.max(-1, keepdims=True), scores.shape)
        return plain(scores - jnp.where(jnp.isfinite(most), most, 0))

    assert made_by(walked(everywhere), "shift") == "select_n", "as many numbers as keys, but all of a row the same"


def test_logits_and_what_the_maximum_is_of_may_differ() -> None:
    def biased(scores: Any) -> Any:
        logits = scores + 1
        return plain(logits - (scores * 2).max(-1, keepdims=True))

    walk = walked(biased)
    assert (made_by(walk, "logits"), made_by(walk, "masked")) == ("add", "mul")


def test_weights_may_be_scaled_on_their_way_but_not_bent() -> None:
    for function in (
        lambda w: w * 2,
        lambda w: jnp.where(jnp.ones(w.shape, bool), w, 0),
        lambda w: -w,
        lambda w: w.astype(jnp.bfloat16).astype(w.dtype),
    ):
        walk = walked(lambda scores, function=function: function(shifted(scores)))
        assert (
            walk.by_name["dropped"] is walk.spine[-2].outvars[0] or walk.by_name["dropped"] is walk.by_name["weights"]
        )
    for function, name in (
        (lambda w: w * w, "mul|square|integer_pow"),
        (lambda w: w + 1, "add"),
        (lambda w: jnp.where(w > 0.5, w, 0), "gt"),
        (lambda w: jnp.where(jnp.ones(w.shape, bool), w, 1), "select_n"),
        (lambda w: 1 / w, "div"),
        (lambda w: (w * 9).astype(int), "convert_element_type"),
        (jax.lax.stop_gradient, "stop_gradient"),
    ):
        with pytest.raises(Miss, match=f"go through `({name})`, which is neither dropout nor a product"):
            walked(lambda scores, function=function: function(shifted(scores)))


def test_what_divides_is_told_from_what_is_divided() -> None:
    def with_sums(combine: Any) -> Any:
        return lambda scores: combine(jnp.exp(scores), jnp.exp(scores).sum(-1, keepdims=True))

    def once(combine: Any) -> Any:
        def weigh(scores: Any) -> Any:
            exps = jnp.exp(scores)
            return combine(exps, exps.sum(-1, keepdims=True))

        return weigh

    for combine in (lambda x, total: x / total, lambda x, total: x * (1 / total), lambda x, total: (1 / total) * x):
        walk = walked(once(combine))
        assert made_by(walk, "numerator") == "exp" and walk.kinds[walk.by_name["divisor"]] == "sum"
    with pytest.raises(Other):
        walked(once(lambda x, total: total / x))
    with pytest.raises(Other):  # two exponentials, of which one could be of something else
        walked(with_sums(lambda x, total: x / total))


def test_what_is_no_softmax_over_one_dim() -> None:
    with pytest.raises(Other):  # over queries in one place, over keys in the other
        walked(lambda scores: jnp.exp(scores - scores.max(-2, keepdims=True)) / jnp.exp(scores).sum(-1, keepdims=True))
    with pytest.raises(Other):  # over queries and keys at once
        walked(lambda scores: jnp.exp(scores) / jnp.exp(scores).sum((-2, -1), keepdims=True))
    with pytest.raises(Other):  # no exponential
        walked(lambda scores: scores / scores.sum(-1, keepdims=True))
    with pytest.raises(Other):  # the scores themselves
        walked(lambda scores: scores)


def test_weights_that_multiply_nothing() -> None:
    trace = indexed(lambda q, k: shifted(jnp.einsum("bqhd,bkhd->bhqk", q, k)), Q, K)
    with pytest.raises(Miss, match="multiply nothing"):
        Walk(trace, next(eqn for eqn in trace.eqns if eqn.primitive.name == "dot_general")).walk()


def test_a_walk_ends() -> None:
    def longer(scores: Any) -> Any:
        for _ in range(MAX_SPINE):
            scores = scores * 0.5
        return shifted(scores)

    with pytest.raises(Other):
        walked(longer)


def test_who_writes_and_who_reads() -> None:
    trace = indexed(lambda x, w: (x + jnp.zeros((1, 3)), (x.T.reshape(6) * 2) @ w), jnp.ones((2, 3)), jnp.ones(6))
    x = trace.eqns[-1].invars[0]
    (double,) = [eqn for eqn in trace.eqns if eqn.primitive.name == "mul"]
    assert trace.writer[x] is double and trace.readers[x] == [trace.eqns[-1]]
    origin = trace.origin(double.invars[0])
    assert origin is not None and origin.aval.shape == (2, 3) and origin not in trace.writer
    assert trace.origin(x) is x, "twice of something is no form of it"
    assert trace.origin(double.invars[1]) is None
    (added,) = [eqn for eqn in trace.eqns if eqn.primitive.name == "add"]
    zeros = [trace.is_zero(atom) for atom in added.invars]
    assert sorted(zeros) == [False, True]
