"""What is said of weights that the tensor axis leaves whole."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from traces import plain_trace

from cjax.sharding.layout.kept import kept_whole
from cjax.sharding.layout.layout import Layout, make_layout
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource


class Layers(nn.Module):
    """Two kernels that are halves put side by side, and an ordinary layer of so many features."""

    features: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(2):
            half = self.param(f"half_{i}", nn.initializers.lecun_normal(), (x.shape[-1], 32))
            x = jnp.tanh(x @ jnp.concatenate([half, -half], -1))[:, :8]
        return nn.Dense(self.features)(nn.relu(nn.Dense(self.features)(x)))


def layout_of(model: Any, axes: dict[str, int], rules: dict[str, Any] | None = None) -> Layout:
    batch = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    captured = capture(model, lambda model, x: (model(x) ** 2).mean(), batch)
    return make_layout(TraceSource(captured, batch).read(), {"data": 1, **axes}, rules or {})


def said(layout: Layout) -> list[str]:
    return [note for note in layout.notes if "whole on every device" in note]


def test_few_bytes_are_not_worth_a_word() -> None:
    """Biases and norms, which are a twentieth of anything large at most."""
    assert not said(layout_of(nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64)]), {"tensor": 4}))
    assert not said(layout_of(Layers(512), {"tensor": 4}))


def test_weights_that_are_left_whole_are_named_with_their_share_and_why() -> None:
    why = "half_* 78 % (embed 8 is what layers hand on, dim 32 is put end to end with others)"
    for axes, tensor in (({"tensor": 4}, "4"), ({"row": 2, "col": 2}, "2d:4")):
        (note,) = said(layout_of(Layers(8), axes))
        assert note.startswith(f"tensor={tensor} leaves 7") and why in note


def test_of_a_plan_without_tensor_parallelism_nothing_is_said() -> None:
    assert not layout_of(Layers(8), {"tensor": 1}).notes


def test_what_rules_keep_whole_is_named_as_the_users_own_choice() -> None:
    layout = layout_of(nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(8)]), {"tensor": 4}, {"layers_0/kernel:1": None})
    assert "ffn 64 as `rules` says" in said(layout)[0]


def test_shares_are_of_bytes() -> None:
    """A weight of float32 counts twice beside one of bfloat16."""

    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        x = batch @ params["a"]
        return (x.astype(jnp.bfloat16) @ params["b"]).astype(jnp.float32).mean(), {}, model_state

    shapes = {"a": jnp.ones((6, 8)), "b": jnp.ones((8, 6), jnp.bfloat16)}
    trace = plain_trace(loss, params=shapes, batch=jnp.ones((4, 6)))
    specs = {0: PartitionSpec(None, None), 1: PartitionSpec(None, "tensor")}
    (note,) = kept_whole(trace, specs, ("tensor",), 2, "2", set())
    assert note.startswith("tensor=2 leaves 67 % of the parameters' bytes whole on every device: a 67 % (")
