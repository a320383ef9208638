"""The choice of classes that one axis splits: what it weighs, and its words. `test_layout` has what comes of it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from contract import trace_of
from flax import nnx
from traces import plain_trace

from cjax.sharding.layout.one_d import blocked_by, choose, experts_of, scorers, undivided, whole_heads
from cjax.trace.author.capture import capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource


def names(trace: Trace, size: int = 4, excluded: set[int] | None = None) -> set[str]:
    chosen, _ = choose(trace, size, {trace.batch_class or 0} | (excluded or set()), str(size))
    return {trace.names.get(c, "?") for c in chosen}


def class_named(trace: Trace, name: str) -> int:
    return next(c for c, other in trace.names.items() if other == name)


class Bottle(nnx.Module):
    """Wide, narrow, wide: [in, wide] [wide, narrow] [narrow, wide] [wide, 1]."""

    def __init__(self, wide: int, narrow: int, *, rngs: nnx.Rngs):
        sizes = [(6, wide), (wide, narrow), (narrow, wide), (wide, 1)]
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in sizes])

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x


def bottle(wide: int, narrow: int) -> Trace:
    batch = jax.ShapeDtypeStruct((8, 6), jnp.float32)
    captured = capture(lambda rngs: Bottle(wide, narrow, rngs=rngs), lambda model, x: model(x).mean(), batch)
    return TraceSource(captured, batch).read()


# -- what is chosen ---------------------------------------------------------------------------------------------------
def test_a_transformer_is_split_by_heads_ffn_and_vocabulary() -> None:
    found = names(trace_of("nnx_decoder"))
    assert found == {"heads", "ffn", "vocab", "vocab_2"}


def test_experts_are_split_though_their_results_are_added_up() -> None:
    """Each token's parts are added up over experts and seats, which are activations both; the seats stay whole."""
    trace = trace_of("linen_moe_capacity")
    assert names(trace, 4) == {"heads", "experts", "vocab", "vocab_2"}, "and not the scores, of which the best count"
    assert names(trace, 8) == {"heads", "ffn", "vocab", "vocab_2"}, "four experts are too few for eight"


class AllExperts(nnx.Module):
    """Four experts that all compute for all, weighed by scores, behind four heads."""

    def __init__(self, *, rngs: nnx.Rngs):
        draw = rngs.params.normal
        self.router = nnx.Linear(6, 4, rngs=rngs)
        self.up, self.down = nnx.Param(draw((4, 6, 10))), nnx.Param(draw((4, 10, 6)))
        self.heads = nnx.Param(draw((6, 4, 3)))

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jnp.einsum("bhk,dhk->bd", jnp.tanh(jnp.einsum("bd,dhk->bhk", x, self.heads[...])), self.heads[...])
        made = nnx.relu(jnp.einsum("bd,edf->bef", x, self.up[...]))
        back = jnp.einsum("bef,efd->bed", made, self.down[...])
        return jnp.einsum("be,bed->bd", nnx.softmax(self.router(x)), back)


def all_experts() -> Trace:
    batch = jax.ShapeDtypeStruct((8, 6), jnp.float32)
    captured = capture(lambda rngs: AllExperts(rngs=rngs), lambda model, x: (model(x) ** 2).mean(), batch)
    return TraceSource(captured, batch).read()


def test_what_scores_experts_is_told_from_what_they_compute_with() -> None:
    trace = all_experts()
    chosen, _ = choose(trace, 4, {trace.batch_class or 0}, "4")
    experts = class_named(trace, "experts")
    assert experts in chosen and [trace.leaves[leaf].name for leaf in scorers(trace, chosen)] == ["router/kernel"]
    assert not scorers(trace, [c for c in chosen if c != experts])
    heads = next(i for i, leaf in enumerate(trace.leaves) if leaf.name == "heads")
    assert trace.classes_of(heads)[1] in chosen, "as many as experts, and no scores"


class Slots(nnx.Module):
    """A few slots with a weight of its own each, to which queries attend."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.read, self.own = nnx.Linear(6, 8 * 12, rngs=rngs), nnx.Param(jax.random.normal(rngs.params(), (8, 12, 12)))
        self.ask, self.out = nnx.Linear(6, 5 * 12, rngs=rngs), nnx.Linear(12, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        slots = jnp.einsum("bsd,sde->bse", self.read(x).reshape(len(x), 8, 12), self.own[...])
        weights = jax.nn.softmax(jnp.einsum("bqd,bsd->bqs", self.ask(x).reshape(len(x), 5, 12), slots))
        return self.out(jnp.einsum("bqs,bsd->bqd", weights, slots).mean(1))


def test_what_is_attended_to_is_no_expert() -> None:
    batch = jax.ShapeDtypeStruct((8, 6), jnp.float32)
    captured = capture(lambda rngs: Slots(rngs=rngs), lambda model, x: model(x).mean(), batch)
    trace = TraceSource(captured, batch).read()
    assert any(m.batched for m in trace.dims.matmuls) and not experts_of(trace)


def test_no_weight_is_split_twice_and_the_sums_are_of_the_narrow() -> None:
    """Of two classes beside each other one can be split; both wide ones leave results of the narrow one to be added."""
    trace = bottle(64, 16)
    chosen, _ = choose(trace, 4, {trace.batch_class or 0}, "4")
    sizes = {max(trace.dims.size[d] for ids in trace.dims.inputs for d in ids if trace.dims.class_of(d) == c)
             for c in chosen}  # fmt: skip
    assert sizes == {64}


class Residual(nnx.Module):
    """A product of what comes in, which layers add to."""

    def __init__(self, features: int, layers: int, *, rngs: nnx.Rngs):
        self.first = nnx.Linear(features, 64, use_bias=False, rngs=rngs)
        self.layers = nnx.List(
            [nnx.List([nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)]) for _ in range(layers)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for up, down in self.layers:
            x = x + down(nnx.tanh(up(x)))
        return x


@pytest.mark.parametrize(
    ("features", "layers", "is_split"),
    [pytest.param(48, 4, False, id="few"), pytest.param(48, 1, True, id="much of all weights"),
     pytest.param(1600, 100, True, id="many numbers")],
)  # fmt: skip
def test_what_is_reduced_to_divide_next_to_nothing_stays_whole(features: int, layers: int, is_split: bool) -> None:
    batch = jax.ShapeDtypeStruct((8, features), jnp.float32)
    captured = capture(lambda rngs: Residual(features, layers, rngs=rngs), lambda model, x: model(x).mean(), batch)
    trace = TraceSource(captured, batch).read()
    chosen, notes = choose(trace, 4, {trace.batch_class or 0}, "4")
    first = next(ids for leaf, ids in zip(trace.leaves, trace.dims.inputs, strict=True) if leaf.shape == (features, 64))
    assert (trace.dims.class_of(first[0]) in chosen) is is_split and not notes


def test_what_has_its_place_already_is_left_there() -> None:
    trace = trace_of("nnx_decoder")
    assert "ffn" not in names(trace, excluded={class_named(trace, "ffn")})
    assert "heads" in names(trace, excluded={class_named(trace, "ffn")})


def test_dims_smaller_than_the_axis_are_left_whole() -> None:
    assert names(bottle(64, 16), 128) == set()
    assert names(bottle(64, 16), 64) != set()


def test_a_table_of_positions_does_not_count_as_a_matmul() -> None:
    """It would be split along its rows otherwise, and what is looked up added up over the axis."""
    trace = trace_of("linen_decoder")
    positions = next(i for i, leaf in enumerate(trace.leaves) if leaf.name == "positions/embedding")
    chosen, _ = choose(trace, 4, {trace.batch_class or 0}, "4")
    assert not set(trace.classes_of(positions)) & set(chosen)


# -- heads ------------------------------------------------------------------------------------------------------------
def test_flat_key_value_heads_too_few_for_the_axis() -> None:
    trace = trace_of("nnx_llama")
    heads = class_named(trace, "heads")
    assert whole_heads(trace, heads, 2) == set()
    assert blocked_by(trace, heads, 2, set(), True, "2") is None


@pytest.mark.parametrize(
    ("tensor", "count", "sizes"),
    [
        ("4", 6, "1, 2, 3, 6"),
        ("2d:16", 6, "1, 2d:4, 2d:9, 2d:36"),
        ("2.5d:16", 3, "1, 2.5d:9"),
        ("2.5d:32/2", 6, "1, 2.5d:8/2, 2.5d:18/2, 2.5d:72/2"),
        ("3d:64", 6, "1, 3d:8, 3d:27, 3d:216"),
    ],
)
def test_words_for_heads_that_do_not_divide_name_plans_of_the_same_mode(tensor: str, count: int, sizes: str) -> None:
    trace = trace_of("nnx_decoder")
    said = str(undivided(trace, class_named(trace, "heads"), count, tensor))
    assert said == (
        f"tensor={tensor} can't split heads: this model has {count}. Write a tensor size that divides it: {sizes}."
    )


def test_a_dim_that_is_taken_apart_is_split_along_its_first_factor() -> None:
    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        return jnp.tanh((batch @ params["w"]).reshape(-1, 3, 8)).mean(), {}, model_state

    trace = plain_trace(loss, params={"w": jnp.ones((5, 24))}, batch=jnp.ones((4, 5)))
    wide = trace.classes_of(0)[1]
    assert blocked_by(trace, wide, 3, set(), False, "3") is None
    said = blocked_by(trace, wide, 4, set(), False, "4")
    assert said is not None and said.endswith("(24 = 3 x 8) is kept whole: 4 does not divide it")
