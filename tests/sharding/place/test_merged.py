"""Products of one tensor with several weights, as one: which are merged, that numbers stay right, what is compiled."""

import functools
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import cjax
from cjax.mesh import compile_lowered
from cjax.sharding.place import merged

WIDTH, ROWS, LENGTH = 16, 8, 24


class Layer(nn.Module):
    """Queries, keys and values by heads, a gate and what it opens, and one product of which there is no other."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x))
        y = nn.LayerNorm()(x)
        wide = self.param("wide", nn.initializers.lecun_normal(), (40, WIDTH))  # its columns first
        opened = jnp.einsum("...e,fe->...f", y, wide)[..., :24]
        return x + nn.Dense(WIDTH)(nn.silu(nn.Dense(24)(y)) * opened)


class Model(nn.Module):
    """Layers that repeat, and one last product."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = Layer()(x)
        return nn.Dense(1)(x)


def loss(model: Any, batch: Any) -> jax.Array:
    return jnp.mean((model(batch["x"])[..., 0] - batch["y"]) ** 2)


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = rng.standard_normal
    return {"x": draw((ROWS, LENGTH, WIDTH), np.float32), "y": draw((ROWS, LENGTH), np.float32)}


def program(plan: str) -> cjax.Program:
    return cjax.parallelize(Model(), loss, optax.adamw(1e-3), batch(), plan, devices=jax.devices("cpu")[:1])


def results(plan: str) -> tuple[float, list[np.ndarray], int]:
    """Loss, gradients, and products in the program."""
    made = program(plan)
    value, grads = made.value_and_grad(made.init(0), batch())
    dots = len(re.findall(r"stablehlo.dot_general", made.lower().as_text()))
    return float(value), [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(grads)], dots


as_on_cpus = functools.cache(results)


@pytest.mark.full("precision=bfloat16")
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param("precision=bfloat16", marks=pytest.mark.full),
        pytest.param("precision=float16 unroll=layers", marks=pytest.mark.full),
        "precision=bfloat16 remat=block",
    ],
)
def test_numbers_are_those_of_products_one_by_one(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wanted, apart = as_on_cpus(plan)
    exact = as_on_cpus("precision=float32")[1]
    monkeypatch.setattr(merged, "on_gpus", lambda mesh: True)
    value, grads, together = results(plan)
    assert together < apart
    np.testing.assert_allclose(value, plain, rtol=1e-3)
    # Leaf by leaf against the largest: a key's bias has no gradient but what rounding makes.
    largest = max(map(np.linalg.norm, exact))
    for mine, theirs, right in zip(grads, wanted, exact, strict=True):
        assert np.linalg.norm(mine - right) <= 1.5 * np.linalg.norm(theirs - right) + 2e-3 * largest


def test_is_for_one_gpu_and_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    meshes = [Mesh(np.array(jax.devices("cpu")[:count]), ("data",)) for count in (1, 2)]
    assert not merged.merges(meshes[0], True)
    monkeypatch.setattr(merged, "on_gpus", lambda mesh: True)
    assert [merged.merges(mesh, True) for mesh in meshes] == [True, False]
    assert not merged.merges(meshes[0], False)


@pytest.mark.full
def test_float32_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, wanted, apart = as_on_cpus("precision=float32")
    monkeypatch.setattr(merged, "on_gpus", lambda mesh: True)
    value, grads, together = results("precision=float32")
    assert (value, together) == (plain, apart)
    assert all(map(np.array_equal, grads, wanted))


def test_few_rows_are_not_worth_a_copy_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "on_gpus", lambda mesh: True)
    monkeypatch.setattr(merged, "_columns", lambda eqn: ROWS * LENGTH)
    fewer = results("precision=bfloat16")[2]
    monkeypatch.undo()
    assert fewer == as_on_cpus("precision=bfloat16")[2]


class Added(nn.Module):
    """Two products, and what is added to each."""

    what: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        one, two = (self.param(name, nn.initializers.lecun_normal(), (WIDTH, 12)) for name in ("one", "two"))
        bias, other = (self.param(name, nn.initializers.normal(1.0), (12,))[None, None] for name in ("bias", "other"))
        others = {
            "a bias": other,
            "a bias, and the product is read again": other,
            "a number for each position": self.param("rows", nn.initializers.normal(1.0), (LENGTH, 12)),
            "something of the batch": 2 + jnp.tanh(x[:, :, :12]).mean((0, 1), keepdims=True),
        }
        product = x @ two
        out = (x @ one + bias) * jnp.tanh(product + others[self.what])
        return nn.Dense(1)(out + jnp.sin(product) if "again" in self.what else out)


@pytest.mark.parametrize(
    "what", ["a bias", "a bias, and the product is read again", "a number for each position", "something of the batch"]
)
def test_only_a_bias_is_added_with_the_product(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[Any] = []
    find = merged.MergedProducts.find

    def seen(self: Any, *args: Any) -> list[Any]:
        found = find(self, *args)
        groups[:] = found or groups
        return found

    monkeypatch.setattr(merged.MergedProducts, "find", seen)
    monkeypatch.setattr(merged, "on_gpus", lambda mesh: True)
    first = jax.devices("cpu")[:1]
    made = cjax.parallelize(Added(what), loss, optax.sgd(1e-3), batch(), "precision=bfloat16", devices=first)
    assert made.check(made.init(0), batch()).ok
    (group,) = groups
    assert len(group.of.biases) == (2 if what == "a bias" else 0)


def attention_for_an_h100(has_biases: bool) -> str:
    wide = {"x": jax.ShapeDtypeStruct((8, 512, 64), jnp.float32), "y": jax.ShapeDtypeStruct((8, 512), jnp.float32)}

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            for _ in range(3):
                x = x + nn.MultiHeadDotProductAttention(4, qkv_features=256, use_bias=has_biases)(x)
            return nn.Dense(1)(x)

    made = cjax.parallelize(Attention(), loss, optax.sgd(1e-3), wide, "precision=bfloat16", devices="h100:1")
    return compile_lowered(made.lower(), list(made.mesh.devices.flat)).as_text() or ""


@pytest.mark.aot
def test_an_h100_adds_biases_as_it_multiplies() -> None:
    """Of three layers and three products each; no kernel cuts the results of one, or adds up what was put together."""
    text = attention_for_an_h100(True)
    found = re.findall(r"bf16\[4096,256\]\S*, s8\S*\) custom-call\(.*__cublas.*\"epilogue\":\"(\w+)\"", text)
    assert found.count("BIAS") == 9
    assert not re.findall(r"= \(bf16\[8,512,\S+ bf16\[8,512,\S+ bf16\[8,512,\S+ fusion", text)
    put_together = r"= \(bf16\[8,512,768\]\S*, f32\[(?:\d+,)?768\]\S*\) fusion"  # and the sums over rows with it
    assert len(re.findall(put_together, text)) == 3


@pytest.mark.aot
def test_an_h100_multiplies_once_for_all_three() -> None:
    text = attention_for_an_h100(False)
    # The gradient of the input of each layer but the first: one product, over the columns of all three weights.
    assert (
        len(re.findall(r"bf16\[4096,64\]\S*, s8\S*\) custom-call\(\S+ \S+\), custom_call_target=\"__cublas", text)) >= 2
    )
    assert "bf16[64,768]" in text
