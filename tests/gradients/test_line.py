"""How a model's layers are shared out among stages."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

from cjax.gradients import arrange_stages
from cjax.plan import Plan
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

BATCH = jax.ShapeDtypeStruct((32, 8), jnp.float32)


class Headed(nn.Module):
    """Twelve layers, and a head that is as much work as five."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(12):
            x = x + nn.Dense(8)(jnp.tanh(x))
        return nn.Dense(40)(x)


@pytest.fixture(scope="module")
def source() -> TraceSource:
    return TraceSource(capture(Headed(), lambda model, x: jnp.square(model(x)).mean(), BATCH), BATCH)


@pytest.mark.parametrize(
    ("words", "layers"), [("", (4, 4, 4, 0)), ("sequence=ring:2", (3, 3, 3, 3)), ("tensor=2d:4", (3, 3, 3, 3))]
)
def test_the_last_stage_has_fewer_layers_where_it_alone_has_the_head(
    source: TraceSource, words: str, layers: tuple[int, ...]
) -> None:
    line = arrange_stages(source.read(4), Plan.parse(f"data=1 pipeline=4 microbatches=4 {words}"))
    assert line.partition.count == layers and line.lockstep == bool(words)


def looped(backwards: bool) -> TraceSource:
    """A loop over layers, with a penalty on their kernels."""

    class Looped(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            kernel = self.param("kernel", nn.initializers.normal(), (4, 8, 8))
            bias = self.param("bias", nn.initializers.normal(), (4, 8))
            turn = lambda x, w: (x + jnp.tanh(x @ w[0] + w[1]), None)  # noqa: E731
            x, _ = jax.lax.scan(turn, nn.Dense(8)(x), (kernel, bias), reverse=backwards)
            return nn.Dense(5)(x) + jnp.square(kernel).sum()

    return TraceSource(capture(Looped(), lambda model, x: jnp.square(model(x)).mean(), BATCH), BATCH)


def test_weights_that_are_read_elsewhere_too_are_told_of() -> None:
    line = arrange_stages(looped(False).read(4), Plan.parse("data=1 pipeline=2 microbatches=8"))
    assert line.whole == ("kernel",) and len(line.rows) == 1
    assert "every stage keeps all of kernel, " in " ".join(line.notes)


def test_a_loop_that_goes_backwards_is_named() -> None:
    with pytest.raises(ValueError, match=r"reverse=True"):
        arrange_stages(looped(True).read(4), Plan.parse("data=1 pipeline=2 microbatches=8"))
