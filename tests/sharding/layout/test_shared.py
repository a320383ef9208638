"""Which experts data-parallel devices share out, and where what has experts is placed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax
from jax.sharding import PartitionSpec

from cjax.sharding.layout.layout import make_layout
from cjax.sharding.layout.shared import features_of, shared_experts
from cjax.trace.author.capture import capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource

ROWS, LENGTH, WIDTH, INNER, ROOM = 8, 6, 20, 28, 3


class Mixtures(nn.Module):
    """Mixtures of so many experts each, one behind the other; each example has seats of its own."""

    numbers: tuple[int, ...]

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for at, num in enumerate(self.numbers):
            gates = jax.nn.softmax(nn.Dense(num, name=f"gate_{at}")(x))
            send = jax.nn.one_hot(gates.argmax(-1), num)[..., None] * jnp.eye(LENGTH, ROOM)[:, None]
            up = self.param(f"up_{at}", nn.initializers.normal(), (num, WIDTH, INNER))
            down = self.param(f"down_{at}", nn.initializers.normal(), (num, INNER, WIDTH))
            bias = self.param(f"bias_{at}", nn.initializers.normal(), (num, 1, 1, INNER))
            given = jnp.einsum("gsec,gsm->egcm", send, x)
            made = jnp.einsum("egcf,efm->egcm", jnp.tanh(jnp.einsum("egcm,emf->egcf", given, up) + bias), down)
            x = x + jnp.einsum("gsec,egcm->gsm", send * gates[..., None], made)
        return x


class Sorted(nn.Module):
    """Tokens sorted by expert, as many to each."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kernel = self.param("kernel", nn.initializers.normal(), (4, WIDTH, WIDTH))
        tokens = x.reshape(-1, WIDTH)
        return lax.ragged_dot(tokens, kernel, jnp.full(4, len(tokens) // 4, jnp.int32)).reshape(x.shape)


def trace_of(model: nn.Module) -> Trace:
    batch = np.zeros((ROWS, LENGTH, WIDTH), np.float32)

    def loss(model: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(model(x) ** 2)

    return TraceSource(capture(model, loss, batch, None), batch).read()


def experts(trace: Trace, leaf: str) -> int:
    """The class of a leaf's first dim."""
    return next(trace.classes_of(i)[0] for i, each in enumerate(trace.leaves) if each.name == leaf)


def test_those_that_divide_are_shared_out_and_others_told_of() -> None:
    trace = trace_of(Mixtures((4, 6)))
    assert shared_experts(trace, 2, set()) == (sorted([experts(trace, "up_0"), experts(trace, "up_1")]), [])
    chosen, notes = shared_experts(trace, 3, set())
    assert chosen == [experts(trace, "up_1")]
    assert notes == ["4 experts are whole on every device: expert=3 does not divide them"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Mixtures((4, 6)),
            "expert=5 can't share out 4 or 6 experts evenly. Write a size that divides them: 2, 3, 4, 6.",
        ),
        (nn.Dense(8), "a weight of its own for each of several experts. Leave expert=5 out.$"),
        (Sorted(), r"sorts tokens for its experts \(lax.ragged_dot\).* Leave expert=5 out, or write tensor=5"),
    ],
)
def test_what_can_not_be_shared_out(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shared_experts(trace_of(model), 5, set())


def test_a_user_s_rule_for_experts_stays_the_user_s() -> None:
    trace = trace_of(Mixtures((4,)))
    with pytest.raises(ValueError, match="expert=2 shares out experts that `rules` has placed already"):
        shared_experts(trace, 2, {experts(trace, "up_0")})


def test_what_is_with_the_experts_and_what_is_with_the_examples() -> None:
    trace = trace_of(Mixtures((4,)))
    layout = make_layout(trace, {"data": 2, "expert": 2, "tensor": 1}, {})
    e, m, f = (trace.classes_of(next(i for i, x in enumerate(trace.leaves) if x.name == "up_0"))[d] for d in range(3))
    g, none = trace.batch_class, -1
    assert layout.experts == {e} and layout.features == features_of(trace, [e]) == {m, f}
    assert g is not None
    seats = ((e, g, none, m), (4, ROWS, ROOM, WIDTH))
    assert layout.spec(*seats) == PartitionSpec("expert", "data", None, None)
    assert layout.spec(*seats, with_examples=True) == PartitionSpec(None, ("data", "expert"), None, None)
    assert layout.spec((g, none, e, none), (ROWS, LENGTH, 4, ROOM)) == PartitionSpec(
        ("data", "expert"), None, None, None
    )
    weights = {trace.leaves[i].name: i for i in trace.leaves_of("params")}
    placed = {name: layout.weight_spec(i, trace.classes_of(i), trace.leaves[i].shape) for name, i in weights.items()}
    assert placed["up_0"] == placed["down_0"] == PartitionSpec("expert", None, None)
    assert placed["bias_0"] == PartitionSpec("expert", None, None, None)
    assert placed["gate_0/kernel"] == PartitionSpec(None, None), "who is sent where is known everywhere"
    assert placed["gate_0/bias"] == PartitionSpec(None)
