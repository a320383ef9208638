"""A loss, read: what its dims are called, what belongs to the batch, and what runs from layer to layer."""

import dataclasses
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from contract import trace_of
from traces import plain_trace
from zoo import MODELS

from cjax.trace.author.capture import capture
from cjax.trace.reading import Trace, once
from cjax.trace.source import TraceSource

LINEN_ATTENTION = {
    "(query|key)/kernel": "embed heads head_dim",
    "value/kernel": "embed heads value_dim",
    "out/kernel": "heads value_dim embed",
}
LINEN_BLOCK = {**LINEN_ATTENTION, "lock_0/Dense_0/kernel": "embed ffn", "lock_0/Dense_1/kernel": "ffn embed"}
# A pattern for the leaf's path, and the names of its dims. A number behind a name is one more class of that kind.
NAMES: dict[str, dict[str, str]] = {
    "linen_decoder": {**LINEN_BLOCK, "Embed_0": "vocab embed", "^positions": "positions embed",
                      "^Dense_0": "embed vocab_2", "^tokens": "batch sequence"},
    "linen_tied": {**LINEN_BLOCK, "Embed_0": "vocab embed"},
    "linen_scan": {r"query/kernel": "* embed heads head_dim", "out/kernel": "* heads value_dim embed",
                   r"Block_0/Dense_0/kernel": "* embed ffn"},
    "linen_encoder": {**LINEN_BLOCK, "^mask": "batch sequence", "^labels": "batch"},
    "linen_vit": {**LINEN_BLOCK, "^images": "batch * * in", "patches/kernel": "* * in embed"},
    "nnx_decoder": {**LINEN_ATTENTION, "up/kernel": "embed ffn", "down/kernel": "ffn embed", "head": "embed vocab_2"},
    "nnx_llama": {"query": "embed heads out", "0/key": "embed heads out_2", "value": "embed heads value_dim",
                  "blocks/0/out": "heads value_dim embed", "(gate|up)/kernel": "embed ffn", "down": "ffn embed"},
    "linen_encoder_decoder": {"encoder_0/MultiHead.*out/kernel": "heads value_dim *", "cross/out/kernel":
                              "heads_3 value_dim_3 embed", "^source": "batch sequence", "^target": "batch sequence_2"},
    "nnx_mlp": {"layers/0/kernel": "in ffn", "layers/1/kernel": "ffn ffn_2", "^x$": "batch in", "^y$": "batch"},
}  # fmt: skip


@pytest.mark.full("linen_encoder_decoder")
@pytest.mark.parametrize("name", NAMES)
def test_dims_get_textbook_names(name: str) -> None:
    trace = trace_of(name)
    for pattern, wanted in NAMES[name].items():
        leaves = [i for i, leaf in enumerate(trace.leaves) if re.search(pattern, leaf.name)]
        assert leaves, pattern
        for i in leaves:
            found = trace.dims_of(i)
            assert [w if w != "*" else f for w, f in zip(wanted.split(), found, strict=True)] == list(found), (
                trace.leaves[i].name
            )


@pytest.mark.parametrize("name", ["linen_decoder", "linen_encoder_decoder", "linen_moe_soft", "nnx_conv", "nnx_mlp"])
def test_stacks_are_those_the_author_wrote(name: str) -> None:
    assert tuple(run.repeats for run in trace_of(name).runs) == MODELS[name].blocks


def test_layers_have_one_set_of_dims() -> None:
    trace = trace_of("nnx_decoder")
    kernels = [i for i, leaf in enumerate(trace.leaves) if leaf.name.endswith("up/kernel")]
    assert len(kernels) == 4 and len({trace.classes_of(i) for i in kernels}) == 1


def test_the_stream_is_what_layers_hand_on() -> None:
    for name in ("linen_decoder", "linen_scan"):
        trace = trace_of(name)
        names = {trace.names.get(c) for c in trace.stream}
        assert "embed" in names and not names & {"batch", "heads", "ffn"}


def test_leaves_come_in_the_order_of_the_users_trees() -> None:
    trace = trace_of("linen_conv")
    kinds = [leaf.kind for leaf in trace.leaves]
    assert kinds == sorted(kinds, key=["params", "frozen", "model_state", "batch", "key", "index"].index)
    assert {leaf.name for leaf in trace.leaves if leaf.kind == "batch"} == {"images", "labels"}
    assert any("batch_stats" in leaf.name for leaf in trace.leaves if leaf.kind == "model_state")


def test_a_micro_batch_is_traced() -> None:
    trace = trace_of("nnx_mlp", parts=4)
    assert [trace.leaves[i].shape for i in trace.leaves_of("batch")] == [(4, 10), (4,)]


def test_nothing_in_the_zoo_is_unknown() -> None:
    for name in ("linen_moe_capacity", "linen_lstm", "linen_conv", "nnx_scan"):
        assert not trace_of(name).dims.unknown, name


def test_names_given_by_the_author_win() -> None:
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            init = nn.initializers.lecun_normal()
            x = nn.Dense(9, kernel_init=nn.with_partitioning(init, ("pixels", "hidden")))(x)
            return nn.Dense(3)(jnp.tanh(x))

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return model(x).mean()

    batch = jax.ShapeDtypeStruct((4, 5), jnp.float32)
    trace = TraceSource(capture(Net(), loss, batch), batch).read()
    by_name = {leaf.name: trace.dims_of(i) for i, leaf in enumerate(trace.leaves)}
    assert by_name["Dense_0/kernel"] == ("pixels", "hidden")
    assert by_name["Dense_1/kernel"][0] == "hidden", "found by its own means in the second layer"
    assert by_name["batch"] == ("batch", "pixels")


def test_all_leaves_of_a_batch_have_the_same_rows() -> None:
    """Also those that meet no other: where they go, the others go."""

    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        return (batch["x"] * params["w"]).mean() + batch["y"].mean(), {}, model_state

    trace = plain_trace(loss, params={"w": jnp.ones(3)}, batch={"x": jnp.ones((4, 3)), "y": jnp.ones((4, 5))})
    x, y = (trace.classes_of(i) for i in trace.leaves_of("batch"))
    assert x[0] == y[0] == trace.batch_class and x[1] != y[1]


def test_what_is_asked_of_a_trace_again_is_worked_out_once() -> None:
    """And anew of another one, be it equal in every field."""
    asked: list[Trace] = []

    @once
    def count(trace: Trace) -> int:
        asked.append(trace)
        return len(trace.leaves)

    rows = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    trace = TraceSource(capture(nn.Dense(4), lambda model, x: (model(x) ** 2).mean(), rows), rows).read()
    assert count(trace) == count(trace) == len(trace.leaves) and asked == [trace]
    assert count(dataclasses.replace(trace)) == len(trace.leaves) and len(asked) == 2
