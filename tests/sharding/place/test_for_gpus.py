"""What programs for GPUs have otherwise: which GELUs are made again, that numbers stay right, and how layers lie."""

import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from starts import begin

import cjax
from cjax.audit import audit
from cjax.jax_compat.core import Literal
from cjax.mesh import compile_lowered
from cjax.sharding.place import for_gpus, place
from cjax.sharding.place.for_gpus import make_again, remade
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.simplify import simplify

HALF = float(np.sqrt(2 / np.pi))


def exact(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def by_hand(x: jax.Array) -> jax.Array:
    return 0.5 * x * (jnp.tanh(HALF * (x + 0.044715 * jnp.power(x, 3))) + 1.0)


def divided(x: jax.Array) -> jax.Array:
    return x / 2 * jax.lax.erfc(-x / float(np.sqrt(2)))


GELUS = {"tanh": jax.nn.gelu, "erfc": exact, "by hand": by_hand, "divided": divided}
OTHERS: dict[str, Callable[[jax.Array], Any]] = {
    "also handed out": lambda x: (lambda t: (1 + t, t))(jnp.tanh(x)),
    "alone": jnp.tanh,
    "also read as it is": lambda x: (lambda t: (1 + t) * t)(jnp.tanh(x)),
    "one less": lambda x: 1 - jnp.tanh(x),
    "two more": lambda x: 2 + jnp.tanh(x),
    "scaled": lambda x: jnp.exp(x * x) * jax.lax.erfc(x),
    "of another": lambda x: jnp.flip(x) * jax.lax.erfc(-x),
    "divided by it": lambda x: x * jax.lax.erfc(1 / x),
    "squared": lambda x: jax.lax.erfc(x) * jax.lax.erfc(x),
    "a tail": lambda x: jnp.log(jax.lax.erfc(x)),
    "a multiple of it scaled": lambda x: jnp.exp(x * x) * (2 * x * jax.lax.erfc(x)).reshape(3, 2).reshape(2, 3),
    "a multiple of it over an exponential": lambda x: 3 * (x * jax.lax.erfc(x)) / (2 * jnp.exp(-x * x)),
    "a multiple's tail": lambda x: jnp.log(x * jax.lax.erfc(x)),
}


def found_in(function: Callable[..., Any], dtype: Any = jnp.float32) -> int:
    return len(remade(simplify(jax.make_jaxpr(function)(jnp.ones((2, 3), dtype))).jaxpr))


@pytest.mark.parametrize("name", GELUS)
def test_a_gelu_is_known_by_its_readers(name: str) -> None:
    assert found_in(GELUS[name]) == 1
    assert found_in(jax.checkpoint(GELUS[name])) == 1
    assert found_in(GELUS[name], jnp.bfloat16) == 1
    assert found_in(lambda x: GELUS[name](2 * x).sum() + GELUS[name](x * x).mean()) == 2
    with jax.enable_x64(True):
        assert found_in(GELUS[name], jnp.float64) == 0


@pytest.mark.parametrize("name", OTHERS)
def test_what_counts_when_it_is_small_is_left_alone(name: str) -> None:
    assert found_in(OTHERS[name]) == 0


def with_derivative(function: Callable[..., Any], x: jax.Array) -> np.ndarray:
    value, pull = jax.vjp(function, x)
    return np.stack([np.asarray(value, np.float64), np.asarray(pull(jnp.ones_like(x))[0], np.float64)])


@pytest.mark.full("tanh-bfloat16", "tanh-float32")
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", GELUS)
def test_it_is_as_right_as_its_author_s(name: str, dtype: Any) -> None:
    """Value and derivative, held against those of float64."""
    x = jnp.concatenate([jnp.linspace(-12, 12, 4001), jnp.asarray([1e-8, -1e-4, 3e-2, -90.0, 90.0])]).astype(dtype)
    closed = simplify(jax.make_jaxpr(GELUS[name])(x))
    again = remade(closed.jaxpr)

    def made(x: jax.Array) -> jax.Array:
        values = {closed.jaxpr.invars[0]: x}
        for eqn in closed.jaxpr.eqns:
            ins = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
            [out] = [make_again(eqn, ins[0])] if id(eqn) in again else bind_as_is(eqn, ins)
            values.update(zip(eqn.outvars, [out], strict=True))
        return values[closed.jaxpr.outvars[0]]

    author, ours = with_derivative(GELUS[name], x), with_derivative(made, x)
    with jax.enable_x64(True):
        wanted = with_derivative(GELUS[name], jnp.asarray(np.asarray(x, np.float64)))
    assert not np.array_equal(ours, author) or dtype != jnp.float32
    for found, theirs, right in zip(ours, author, wanted, strict=True):
        assert np.abs(found - right).max() <= 1.1 * np.abs(theirs - right).max() + 1e-6


class Layers(nn.Module):
    """Three layers with one kind of GELU."""

    kind: str
    width: int = 8
    hidden: int = 24

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(11, self.width)(tokens)
        for _ in range(3):
            x = x + nn.Dense(self.width)(GELUS[self.kind](nn.Dense(self.hidden)(nn.LayerNorm()(x))))
        return nn.Dense(11)(x)


def loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "word", "plan"), [("tanh", "tanh", "data=2 tensor=4"), ("erfc", "erfc", "zero=3 precision=bfloat16")]
)
def test_a_program_for_gpus_makes_them_again(kind: str, word: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 11, (16, 6)).astype(np.int32) for name in "xy"}
    texts, grads = [], []
    for on_gpus in (False, True):
        monkeypatch.setattr(place, "on_gpus", lambda mesh, on=on_gpus: on)
        program = cjax.parallelize(Layers(kind), loss, optax.sgd(0.1), batch, plan)
        state = begin(program)
        grads.append(jax.tree.leaves(program.value_and_grad(state, batch)))
        texts.append(program.lower().as_text())
    assert word in texts[0] and word not in texts[1]
    tolerance = 2e-2 if "bfloat16" in plan else 1e-5
    for author, ours in zip(*grads, strict=True):
        a, b = np.asarray(author, np.float64), np.asarray(ours, np.float64)
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(a)


class Tails(nn.Module):
    """Layers of which the last one's `erfc` is read by a logarithm too."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            far = 6 + nn.tanh(nn.Dense(8)(x))
            tail = jax.lax.erfc(far)
            x = x + jnp.sin(far) + far * tail
        return x + jnp.log(tail)


def test_a_layer_that_stands_for_all_is_no_gelu_where_another_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32)}
    losses = []
    for on_gpus in (False, True):
        monkeypatch.setattr(place, "on_gpus", lambda mesh, on=on_gpus: on)
        mean = lambda model, batch: jnp.square(model(batch["x"])).mean()  # noqa: E731
        program = cjax.parallelize(Tails(), mean, optax.sgd(0.1), batch, "data=1", devices=jax.devices()[:1])
        assert program._composed.trace.runs
        losses.append(float(program.value_and_grad(begin(program), batch)[0]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.aot
@pytest.mark.full("erfc")
@pytest.mark.parametrize("kind", ["tanh", "erfc"])
def test_a_step_touches_fewer_bytes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In each layer, [rows, length, hidden] of float32 is neither written nor read by two who need it."""
    rows, length, hidden = 8, 1024, 6400
    batch = {name: jax.ShapeDtypeStruct((rows, length), np.int32) for name in "xy"}
    touched = []
    for on_gpus in (False, True):
        monkeypatch.setattr(place, "on_gpus", lambda mesh, on=on_gpus: on)
        model = Layers(kind, 1600, hidden)
        program = cjax.parallelize(model, loss, optax.sgd(0.1), batch, "precision=bfloat16", devices="h100:1")
        compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
        touched.append(audit(compiled, program.mesh).bytes_accessed)
    stored = 3 * rows * length * hidden * 4
    assert touched[0] - touched[1] >= stored


class Patches(nn.Module):
    """A vision transformer without attention: patches by one product, or by a convolution; layers that may convolve."""

    first: str
    convolves: bool = False
    width: int = 1024

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        rows, side = len(images), images.shape[1] // 16
        if self.first == "product":
            cut = images.reshape(rows, side, 16, side, 16, 3).swapaxes(2, 3).reshape(rows, side * side, -1)
            x = nn.Dense(self.width)(cut)
        else:
            x = nn.Conv(self.width, (16, 16), (16, 16), "VALID")(images).reshape(rows, side * side, -1)
        for _ in range(3):
            if self.convolves:
                x = x + nn.Conv(self.width, (3,), feature_group_count=self.width)(x)
            x = x + nn.Dense(self.width)(nn.relu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(10)(x.mean(1))


def image_loss(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def of_images(rows: int, side: int) -> dict[str, jax.ShapeDtypeStruct]:
    return {"x": jax.ShapeDtypeStruct((rows, side, side, 3), np.float32), "y": jax.ShapeDtypeStruct((rows,), np.int32)}


@pytest.mark.parametrize(
    ("first", "convolves", "splits"),
    [("product", False, True), ("convolution", False, True), ("product", True, True), ("product", False, False)],
)
def test_layers_hand_on_rows_unless_they_convolve_or_are_gathered_for_it(
    first: str, convolves: bool, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "on_gpus", lambda mesh: True)
    monkeypatch.setattr(for_gpus, "splits_what_has_a_layout", lambda: splits)
    model = Patches(first, convolves, width=8)
    program = cjax.parallelize(model, image_loss, optax.sgd(0.1), of_images(16, 32), "data=4 zero=1 tensor=2")
    assert ("LayoutConstraint" in program.lower().as_text()) is (splits and not convolves)


@pytest.mark.aot
@pytest.mark.full("data=2 tensor=4")
@pytest.mark.parametrize("plan", ["precision=bfloat16 unroll=none", "data=2 tensor=4"])
def test_a_vision_transformer_is_not_transposed_in_each_layer(plan: str) -> None:
    """What its loops hand on has the features innermost: [examples, positions, features] in this order."""
    devices = "h100:8" if "data" in plan else "h100:1"
    program = cjax.parallelize(
        Patches("convolution"), image_loss, optax.sgd(0.1), of_images(64, 224), plan, devices=devices
    )
    text = compile_lowered(program.lower(), list(program.mesh.devices.flat)).as_text() or ""
    handed_on = re.findall(r"while\S* = \(s32\[\], (?:f32|bf16)\[\d+,196,\d+\](\{[\d,]+\})", text)
    assert len(handed_on) == 2 and set(handed_on) == {"{2,1,0}"}
