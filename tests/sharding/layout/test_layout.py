"""Which dims 1D tensor parallelism splits, in every model whose right answer is written down in `contract.SPLIT`."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from contract import SPLIT, split_dim, trace_of
from flax import nnx
from jax.sharding import PartitionSpec as P
from zoo import MODELS

from cjax.models.gpt import GPT, gpt, loss
from cjax.sharding.layout.layout import Layout, make_layout
from cjax.trace.author.capture import capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource


def layout_of(trace: Trace, tensor: int, rules: Mapping[str, str | None] | None = None) -> Layout:
    return make_layout(trace, {"data": 1, "tensor": tensor}, rules or {})


def specs(trace: Trace, layout: Layout) -> dict[str, P]:
    leaves = [(i, leaf) for i, leaf in enumerate(trace.leaves) if leaf.kind == "params"]
    return {leaf.name: layout.spec(trace.classes_of(i), leaf.shape) for i, leaf in leaves}


@pytest.mark.full("linen_encoder_decoder-2")
@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("name", SPLIT)
def test_splits_what_the_table_says(name: str, tensor: int) -> None:
    trace = trace_of(name)
    found = specs(trace, layout_of(trace, tensor))
    for leaf in trace.leaves:
        if leaf.kind == "params":
            dim = split_dim(name, leaf.name, leaf.shape, tensor)
            wanted = ["tensor" if i == dim else None for i in range(len(leaf.shape))]
            assert [*found[leaf.name]] == wanted, leaf.name


@pytest.mark.full("nnx_encoder-2", "nnx_encoder-4")
@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("name", sorted(set(MODELS) - set(SPLIT)))
def test_no_weight_is_split_twice_and_something_is(name: str, tensor: int) -> None:
    trace = trace_of(name)
    found = specs(trace, layout_of(trace, tensor))
    assert any("tensor" in spec for spec in found.values())
    assert all([*spec].count("tensor") <= 1 for spec in found.values())


def test_packed_projections_are_split_by_heads() -> None:
    trace = trace_of("linen_packed_qkv")
    found = specs(trace, layout_of(trace, 4))
    assert found["qkv_0/kernel"] == P(None, None, "tensor"), "[embed, q k v, heads]"
    assert found["proj_0/kernel"] == P("tensor", None)


def test_experts_are_split_where_they_are_enough_and_their_insides_where_not() -> None:
    for name in ("linen_moe_soft", "linen_moe_capacity"):
        trace = trace_of(name)
        assert specs(trace, layout_of(trace, 4))["MixtureOfExperts_0/up"] == P("tensor", None, None)
        assert specs(trace, layout_of(trace, 8))["MixtureOfExperts_0/up"] == P(None, None, "tensor")
    found = specs(trace_of("linen_moe_capacity"), layout_of(trace_of("linen_moe_capacity"), 4))
    assert not any(found["MixtureOfExperts_0/router/kernel"]), "every device needs all scores, to know the best"


def test_key_value_heads_fewer_than_the_axis_stay_whole_with_a_note() -> None:
    trace = trace_of("nnx_llama")
    layout = layout_of(trace, 4)
    found = specs(trace, layout)
    assert found["blocks/0/query"] == P(None, "tensor", None)
    assert found["blocks/0/key"] == P(None, None, None)
    assert layout.notes[0] == "2 key-value heads on 4 devices: each is kept by 2 of them"
    assert "blocks/*/key 3.3 % (embed 40 is what layers hand on, heads 2 is less than 4" in layout.notes[1]
    assert not layout_of(trace, 2).notes


def gpt_trace(**sizes: int) -> Trace:
    config = gpt("gpt-mini", **sizes)
    batch = {name: jax.ShapeDtypeStruct((4, 16), jnp.int32) for name in ("inputs", "targets")}
    return TraceSource(capture(lambda rngs: GPT(config, rngs=rngs), loss, batch), batch).read()


@pytest.mark.parametrize(("heads", "tensor"), [(6, 4), (3, 2), (4, 8)])
def test_query_heads_that_do_not_divide_are_refused(heads: int, tensor: int) -> None:
    with pytest.raises(ValueError, match=rf"tensor={tensor} can't split heads: this model has {heads}"):
        layout_of(gpt_trace(num_heads=heads), tensor)


def test_a_vocabulary_that_does_not_divide_is_split_all_the_same() -> None:
    trace = gpt_trace(vocab_size=257)
    found = specs(trace, layout_of(trace, 4))
    assert found["token_embed/embedding"] == P("tensor", None)
    assert found["position_embed/embedding"] == P(None, None)


def test_a_model_of_one_wide_layer() -> None:
    batch = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    captured = capture(lambda rngs: nnx.Linear(6, 64, rngs=rngs), lambda model, x: (model(x) ** 2).mean(), batch)
    trace = TraceSource(captured, batch).read()
    assert specs(trace, layout_of(trace, 4))["kernel"] == P(None, "tensor")


def test_what_can_be_split_by_nothing_says_so() -> None:
    batch = jax.ShapeDtypeStruct((4, 3), jnp.float32)
    captured = capture(lambda rngs: nnx.Linear(3, 2, rngs=rngs), lambda model, x: (model(x) ** 2).mean(), batch)
    trace = TraceSource(captured, batch).read()
    assert layout_of(trace, 8).notes[-1].startswith("tensor=8 splits nothing in this model")


# -- data and rules ---------------------------------------------------------------------------------------------------
def test_the_batch_is_split_over_data_and_zero() -> None:
    trace = trace_of("nnx_mlp")
    layout = make_layout(trace, {"data": 2, "zero": 4, "tensor": 1}, {})
    x = next(i for i, leaf in enumerate(trace.leaves) if leaf.name == "x")
    assert layout.spec(trace.classes_of(x), (16, 10)) == P(("data", "zero"), None)
    assert all(set(spec) <= {None} for spec in specs(trace, layout).values())


def test_rows_that_do_not_divide_are_refused_with_numbers_that_do() -> None:
    with pytest.raises(ValueError, match=r"16 rows.*3 data-parallel devices.*Use 15 or 18 rows.*divides 16: 1, 2"):
        make_layout(trace_of("nnx_mlp"), {"data": 3, "tensor": 1}, {})


def test_rules_win_by_name_and_by_path() -> None:
    trace = trace_of("nnx_decoder")
    found = specs(trace, layout_of(trace, 4, {"vocab": None, "blocks/0/up/kernel:1": None}))
    assert found["embed/embedding"] == P(None, None)
    assert {found[f"blocks/{i}/up/kernel"] for i in range(4)} == {P(None, None)}, "a dim is split everywhere or nowhere"
    assert found["blocks/0/attention/query/kernel"] == P(None, "tensor", None)


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"vocabulary": None}, r"rules\['vocabulary'\] matches nothing. Write a dim found in this model .*vocab"),
        ({"blocks/0/up/kernel:2": None}, "matches nothing"),
        ({"ffn": "expert"}, "names 'expert'; this plan's mesh has data, tensor"),
    ],
)
def test_rules_that_say_nothing_are_refused(rules: dict[str, str | None], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layout_of(trace_of("nnx_decoder"), 4, rules)


def test_an_axis_serves_one_dim_of_a_tensor() -> None:
    layout = Layout({0: ("tensor",), 1: ("data", "tensor")}, {"data": 2, "tensor": 4})
    assert layout.spec((0, 1), (8, 8)) == P("tensor", "data")
    assert layout.spec((0, 0), (8, 8)) == P("tensor", None)
    assert layout.spec((0, 2), (3, 8)) == P(None, None), "fewer entries than devices"


def test_heads_that_are_to_stay_whole_do_whatever_their_size() -> None:
    """Few heads of keys, merged with their features, are as long as any other dim of their class."""
    layout = Layout({1: ("tensor",)}, {"tensor": 4}, whole=frozenset({(1, 8)}))
    assert layout.spec([0, 1], [5, 16]) == P(None, "tensor")
    assert layout.spec([0, 1], [5, 8]) == P(None, None)
