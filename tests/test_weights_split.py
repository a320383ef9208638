"""Weights that do not go into a matmul as they are: split by the tensor axis all the same, equal to one device, or said
to be whole. A weight kept whole passes every test of values, so bytes are asserted beside them."""

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import EXACT, assert_close, bytes_on_a_device, on_host, widened
from flax import nnx
from starts import begin, first_values, values_for

import cjax
from cjax.program import Given, Program
from cjax.program.compose import compose
from cjax.trace.author.capture import Capture, capture
from cjax.trace.source import TraceSource

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
Form = Callable[..., jax.Array]


def standardised(w: jax.Array) -> jax.Array:
    axes = tuple(range(w.ndim - 1))
    return (w - w.mean(axes, keepdims=True)) / jnp.sqrt(w.var(axes, keepdims=True) + 1e-5)


FORMS: dict[str, Form] = {
    "scaled": lambda w: 0.5 * w,
    "through a function": jnp.tanh,
    "rounded": lambda w: w.astype(jnp.bfloat16).astype(w.dtype),
    "normalised": lambda w: w / jnp.linalg.norm(w, axis=0),
    "standardised": standardised,
    "transposed twice": lambda w: (w.T * 2).T,
    "clipped": lambda w: jnp.clip(w, -0.1, 0.1) + jnp.where(w > 0, w, 0.0),
    "beside another product": lambda w: w + 0.1 * (w @ w.T @ w),
}


class Functional(nn.Module):
    """Two layers whose kernels go through a function, and one weight norm's own gain."""

    form: Form
    wide: int = 64

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (self.wide, x.shape[-1]):
            shape = (x.shape[-1], features)
            kernel = self.param(f"kernel_{features}", nn.initializers.lecun_normal(), shape)
            gain = self.param(f"gain_{features}", nn.initializers.normal(1.0), (features,))
            x = jnp.tanh(x @ (gain * self.form(kernel)))
        return x


class Standardised(nnx.Module):
    """Convolutions of standardised kernels, as of big transfer."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 8, (3, 3), rngs=rngs)
        self.head = nnx.Linear(8, 16, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in (self.first, self.second):
            kernel = layer.kernel[...]
            x = jax.lax.conv_general_dilated(
                x, standardised(kernel), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = nnx.gelu(x + layer.bias[...])
        return self.head(x.mean((1, 2)))


class Recurrent(nn.Module):
    cell: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(24)(nn.RNN(self.cell)(x))


class Square(nn.Module):
    """Layers of one weight each: what one hands on is what its weight makes."""

    num: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(self.num):
            x = jnp.tanh(nn.Dense(x.shape[-1])(x))
        return x


class Residual(nn.Module):
    """Blocks of two equal convolutions, or of three with a narrow middle, wider from stage to stage."""

    middle: bool

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False)
        for features in (8, 8, 16, 16) if ALL else (8, 16):
            skip = x if x.shape[-1] == features else conv(features, (1, 1))(x)
            for kernel in ((1, 1), (3, 3)) if self.middle else ((3, 3),):
                x = nn.relu(nn.GroupNorm(2)(conv(8 if self.middle else features, kernel)(x)))
            x = nn.relu(skip + nn.GroupNorm(2)(conv(features, (1, 1) if self.middle else (3, 3))(x)))
        return nn.Dense(12)(x.mean((1, 2)))


class Deep(nn.Module):
    """Convolutions down and up again with skips, of more different widths than could all be tried together."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kept = []
        for features in (4, 8):
            for _ in range(2):
                x = nn.relu(nn.Conv(features, (3, 3))(x))
            kept.append(x)
            x = nn.max_pool(x, (2, 2), (2, 2))
        for features, skip in ((8, kept[1]), (4, kept[0])):
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[3]), "nearest")
            x = jnp.concatenate([nn.Conv(features, (2, 2))(x), skip], -1)
            for _ in range(2):
                x = nn.relu(nn.Conv(features, (3, 3))(x))
        return nn.Conv(3, (1, 1))(x)


class Flat(nn.Module):
    """Equal convolutions, whose result a wide classifier reads as one row."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for features in (8, 8):
            x = nn.relu(nn.Conv(features, (3, 3))(x))
        x = nn.max_pool(x, (3, 3), (3, 3)).reshape(x.shape[0], -1)
        return nn.Dense(4)(nn.relu(nn.Dense(32)(nn.relu(nn.Dense(32)(x)))))


ROWS = np.random.RandomState(0).randn(8, 12).astype("float32")
WORDS = np.random.RandomState(0).randn(8, 5, 12).astype("float32")
PICTURES = np.random.RandomState(0).randn(8, 6, 6, 3).astype("float32")
# What a device holds of the parameters under tensor=4: a quarter, and the vectors that no matmul splits.
MODELS: dict[str, tuple[Any, np.ndarray, float]] = {
    **{name: (Functional(form), ROWS, 0.27) for name, form in FORMS.items()},
    "nnx standardised convolutions": (lambda rngs: Standardised(rngs), PICTURES, 0.29),
    "LSTM": (Recurrent(nn.LSTMCell(16, param_dtype=jnp.float64)), WORDS, 0.27),
    "optimized LSTM": (Recurrent(nn.OptimizedLSTMCell(16, param_dtype=jnp.float64)), WORDS, 0.31),
    "GRU": (Recurrent(nn.GRUCell(16, param_dtype=jnp.float64)), WORDS, 0.28),
    "five square layers": (Square(5), ROWS, 0.34),
    "two equal convolutions": (Residual(False), PICTURES, 0.28),
    "three convolutions": (Residual(True), PICTURES, 0.33),
    "down and up": (Deep(), PICTURES, 0.30),
    "a flat classifier": (Flat(), PICTURES, 0.28),
    "nnx LSTM": (lambda rngs: NNXRecurrent(rngs), WORDS, 0.29),
}


class NNXRecurrent(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.cells = nnx.RNN(nnx.LSTMCell(12, 16, param_dtype=jnp.float64, rngs=rngs), rngs=rngs)
        self.head = nnx.Linear(16, 24, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(self.cells(x))


def loss(model: Any, x: jax.Array) -> jax.Array:
    return jnp.square(model(x) - 0.3).mean()


def captured(model: Any, x: np.ndarray) -> Capture:
    """The model with parameters in float64."""
    found = capture(model, loss, x)
    return dataclasses.replace(
        found,
        init=lambda key: widened(found.init(key)),
        params_shape=widened(found.params_shape),
        model_state_shape=widened(found.model_state_shape),
    )


def program_of(model: Any, x: np.ndarray, plan: str) -> Program:
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    given = Given(TraceSource(captured(model, x), shape), optax.sgd(0.1))
    return Program(compose(given, plan, jax.devices()[: 8 if "data" in plan else 4]))


def whole_notes(program: Program) -> list[str]:
    return [note for note in program._composed.notes if "whole on every device" in note]


FEW = ["standardised", "three convolutions", "optimized LSTM", "GRU"]
# Cells, convolutions and functions of single numbers that another of the table is like, with more to it.
ALIKE = ("LSTM", "nnx LSTM", "two equal convolutions", "nnx standardised convolutions", "scaled", "through a function",
         "clipped")  # fmt: skip
PAIRS = [(name, "tensor=4") for name in MODELS if ALL or name not in ALIKE]
PAIRS += [(name, plan) for name in FEW[:: 1 if ALL else 3] for plan in ("data=2 tensor=4 zero=3", "tensor=2d:4 data=2")]
PAIRS += [("five square layers", "data=2 tensor=4 microbatches=2")]
PAIRS += [("down and up", "data=2 tensor=4 precision=float32")] if ALL else []


@functools.cache
def by_its_author(name: str) -> Any:
    """Loss and gradients on one device."""
    model, x, _ = MODELS[name]
    x = x.astype("float64")
    author = captured(model, x)
    trees = values_for(author.params_shape, author.frozen_shape, author.model_state_shape)

    def loss(params: Any) -> jax.Array:
        return author.apply(params, *trees[1:], x, jax.random.key(0), True)[0]

    return on_host(jax.jit(jax.value_and_grad(loss))(trees[0]))


@pytest.mark.full(
    "GRU-data=2 tensor=4 zero=3",
    "GRU-tensor=2d:4 data=2",
    "GRU-tensor=4",
    "a flat classifier-tensor=4",
    "down and up-tensor=4",
    "five square layers-data=2 tensor=4 microbatches=2",
    "optimized LSTM-tensor=4",
    "three convolutions-tensor=4",
)
@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_equal_to_one_device_and_split(name: str, plan: str) -> None:
    model, x, share = MODELS[name]
    with jax.enable_x64(True):
        x = x.astype("float64")
        program = program_of(model, x, plan)
        params, state = first_values(program)[0], begin(program)
        given = on_host(program.value_and_grad(state, x))
        assert_close(given, by_its_author(name), EXACT)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if plan == "tensor=4":
        assert bytes_on_a_device(state._params) <= share * total
        assert not whole_notes(program)


def test_layers_taken_in_pairs_are_the_same_model_under_any_plan() -> None:
    """Scored in pairs, taken over by a plan that has a layer for each turn of its loop, and by stages of a pipeline."""
    program = cjax.parallelize(Square(4), loss, optax.sgd(0.1), ROWS, "tensor=4", devices=jax.devices()[:4])
    assert program._composed.trace.pairs
    state = begin(program)
    wanted = float(program.evaluate(state, ROWS)["loss"])
    for plan in ("data=4", "pipeline=gpipe:4 microbatches=2"):
        other = program.replan(plan)
        assert not other._composed.trace.pairs and other._composed.trace.runs[0].repeats == 4
        np.testing.assert_allclose(other.evaluate(other.restore(state), ROWS)["loss"], wanted, rtol=1e-6)
