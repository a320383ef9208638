"""Weights of an odd size that GPUs' programs fill up: products are wider, and numbers stay what they are."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.extend import core as jex
from starts import begin

import cjax
from cjax.audit import audit
from cjax.mesh import compile_lowered
from cjax.models import cross_entropy
from cjax.program.steps import make_step
from cjax.sharding.place import filled

ROWS, LENGTH, WIDTH, VOCAB, FULL = 4, 6, 16, 1027, 1088
RNG = np.random.default_rng(0)
BATCH = {name: RNG.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32) for name in "xy"}


class Linen(nn.Module):
    """A layer between a table and a classifier; gives what is classified, and what classifies it."""

    tied: bool = True
    size: int = VOCAB

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        table = self.param("table", nn.initializers.normal(1.0), (self.size, WIDTH))
        x = table[tokens]
        x = nn.LayerNorm()(x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(24)(x))))
        return x, table.T if self.tied else self.param("head", nn.initializers.normal(0.3), (WIDTH, self.size))


class Attending(nn.Module):
    """With Flax's own words: `attend` of a tied table, or a `Dense`, whose bias is as long as the classes."""

    tied: bool = True

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, WIDTH)
        x = nn.LayerNorm()(nn.tanh(nn.Dense(WIDTH)(embed(tokens))))
        return embed.attend(x) if self.tied else nn.Dense(VOCAB)(x)


class NNX(nnx.Module):
    def __init__(self, tied: bool, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.layer = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.head = None if tied else nnx.Linear(WIDTH, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jnp.tanh(self.layer(self.embed(tokens)))
        return x, self.embed.embedding[...].T if self.head is None else self.head.kernel[...]


def whole(model: Any, batch: Any) -> jax.Array:
    out = model(batch["x"])
    logits = out if isinstance(out, jax.Array) else out[0] @ out[1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def by_classes(model: Any, batch: Any) -> jax.Array:
    """The classifier is the product's first operand, its classes the result's first dim."""
    hidden, kernel = model(batch["x"])
    logits = jnp.einsum("wv,blw->vbl", kernel, hidden)
    return optax.softmax_cross_entropy_with_integer_labels(jnp.moveaxis(logits, 0, -1), batch["y"]).mean()


def chunked(model: Any, batch: Any) -> jax.Array:
    hidden, kernel = model(batch["x"])
    return cross_entropy(hidden, batch["y"], lambda some: some @ kernel, chunk=2)


CASES: dict[str, tuple[Any, Any]] = {
    "tied": (Linen(), whole),
    "tied, chunked": (Linen(), chunked),
    "untied": (Linen(tied=False), whole),
    "untied, chunked": (Linen(tied=False), chunked),
    "first operand": (Linen(tied=False), by_classes),
    "attend": (Attending(), whole),
    "Dense": (Attending(tied=False), whole),
    "NNX, tied, chunked": (functools.partial(NNX, True), chunked),
    "NNX, untied": (functools.partial(NNX, False), whole),
}


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a step is made of, how many loops each equation is in, and what the model's loss and gradients are."""

    step: list[tuple[Any, int]]
    loss: jax.Array
    grads: Any


def seen(model: Any, loss: Any, plan: str, fills: bool, monkeypatch: pytest.MonkeyPatch, batch: Any = BATCH) -> Seen:
    """A program of which weights are filled up as on a GPU, or not."""
    monkeypatch.setattr(filled, "on_gpus", lambda mesh: fills)
    if not isinstance(model, nn.Module):
        model = functools.partial(_of_nnx, model)
    number = next((size for size in (2, 3) if f"={size} " in plan), 1)
    program = cjax.parallelize(model, loss, optax.sgd(0.1), batch, plan, devices=jax.devices()[:number])
    step = make_step(program._composed).trace(*program._inputs).jaxpr
    return Seen(list(equations(step.jaxpr)), *program.value_and_grad(begin(program), batch))


def _of_nnx(make: Any, rngs: nnx.Rngs) -> nnx.Module:
    return make(rngs=rngs)


def equations(jaxpr: Any, loops: int = 0) -> Iterator[tuple[Any, int]]:
    """All equations, and how many loops they are in."""
    for eqn in jaxpr.eqns:
        yield eqn, loops
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations(getattr(inner, "jaxpr", inner), loops + (eqn.primitive.name in ("scan", "while")))


def widths(found: Seen, size: int) -> list[int]:
    """In how many loops the products are that read or make a dim of this size."""
    products = [(eqn, loops) for eqn, loops in found.step if eqn.primitive.name == "dot_general"]
    return [loops for eqn, loops in products if any(size in v.aval.shape for v in (*eqn.invars, *eqn.outvars))]


def assert_same(given: Seen, wanted: Seen) -> None:
    """Loss and gradients, but for how sums of bfloat16 are rounded."""
    assert float(given.loss) == pytest.approx(float(wanted.loss), rel=1e-5)
    paths = jax.tree_util.tree_leaves_with_path(given.grads)
    for (path, a), b in zip(paths, jax.tree.leaves(wanted.grads), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape and np.linalg.norm(b) > 0
        assert np.linalg.norm(a - b) <= 5e-3 * np.linalg.norm(b), jax.tree_util.keystr(path)


@pytest.mark.full(
    "Dense",
    "NNX, tied, chunked",
    "NNX, untied",
    "attend",
    "first operand",
    "tied, chunked",
    "untied",
    "untied, chunked",
)
@pytest.mark.parametrize("case", CASES)
def test_a_filled_weight_gives_the_same_numbers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given, wanted = (seen(*CASES[case], "precision=bfloat16", fills, monkeypatch) for fills in (True, False))
    assert_same(given, wanted)
    assert widths(wanted, VOCAB) and not widths(wanted, FULL)
    assert widths(given, FULL) and not any(
        VOCAB in v.aval.shape and WIDTH in v.aval.shape
        for eqn, _ in given.step if eqn.primitive.name == "dot_general" for v in (*eqn.invars, *eqn.outvars)
    ), "all products read what is filled up"  # fmt: skip


@pytest.mark.full("untied, chunked-True")
@pytest.mark.parametrize(("case", "fills"), [("untied, chunked", True), ("tied, chunked", False)])
def test_beside_other_devices_with_examples_of_their_own(
    case: str, fills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tied weight is read as copies there, one for each device, and is not filled up."""
    plan = "data=2 precision=bfloat16"
    given, wanted = (seen(*CASES[case], plan, fills, monkeypatch) for fills in (True, False))
    assert bool(widths(given, FULL)) is fills
    assert_same(given, wanted)


@pytest.mark.full("untied, chunked-1", "untied, chunked-3", "untied-1")
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("case", ["untied", "untied, chunked"])
def test_devices_that_keep_a_part_of_its_gradient_get_no_more(
    case: str, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is placed as its optimizer needs it before anything is cut off."""
    plan = f"data=2 zero={stage} precision=bfloat16"
    given, wanted = (seen(*CASES[case], plan, fills, monkeypatch) for fills in (True, False))
    assert_same(given, wanted)
    wide = [eqn for eqn, _ in given.step if [v.aval.shape for v in eqn.invars] == [(WIDTH, FULL)]]
    placed = [eqn for eqn in wide if eqn.primitive.name == "sharding_constraint" and any(eqn.params["sharding"].spec)]
    cuts = [eqn for eqn in wide if eqn.primitive.name == "slice"]
    assert placed and cuts[-1].invars == placed[-1].outvars


@pytest.mark.full
def test_devices_may_keep_a_part_of_its_odd_dim(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,029 columns go to three devices, 1,088 do not."""
    batch = {name: RNG.integers(0, VOCAB, (6, LENGTH)).astype(np.int32) for name in "xy"}
    case = Linen(tied=False, size=VOCAB + 2), chunked, "data=3 zero=1 precision=bfloat16"
    given, wanted = (seen(*case, fills, monkeypatch, batch) for fills in (True, False))
    assert widths(given, FULL)
    assert_same(given, wanted)


@pytest.mark.aot
def test_gpus_scatter_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a cut XLA would reduce it to all devices, which is twice as much."""
    batch = {name: jax.ShapeDtypeStruct((64, 32), np.int32) for name in "xy"}
    program = cjax.parallelize(
        *CASES["untied, chunked"], optax.sgd(0.1), batch, "zero=1 precision=bfloat16", devices="h100:8"
    )
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    assert facts.moved("reduce-scatter") > 2 * WIDTH * VOCAB > 4 * facts.moved("all-reduce")


@pytest.mark.full("tied, chunked")
@pytest.mark.parametrize("case", ["tied, chunked", "untied, chunked"])
def test_a_loop_over_positions_reads_what_is_filled_once(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And adds up its gradient as wide: no weight is filled up, or cut, in each turn."""
    found = seen(*CASES[case], "precision=bfloat16", True, monkeypatch)
    assert set(widths(found, FULL)) == {1}
    weights = [{WIDTH, size} for size in (VOCAB, FULL)]
    moved = [
        (eqn.primitive.name, loops) for eqn, loops in found.step
        if eqn.primitive.name in ("pad", "slice") and set(eqn.outvars[0].aval.shape) in weights
    ]  # fmt: skip
    assert moved and not any(loops for _, loops in moved), moved


@pytest.mark.parametrize(
    ("plan", "size"), [("precision=float32", VOCAB), ("precision=bfloat16", 1032), ("precision=bfloat16", 515)]
)
def test_what_is_read_fast_as_it_is_stays(plan: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 bits, of whole reads, or small."""
    batch = {name: np.minimum(tokens, size - 1) for name, tokens in BATCH.items()}
    found = seen(Linen(tied=False, size=size), whole, plan, True, monkeypatch, batch)
    assert widths(found, size) and not widths(found, size - size % 64 + 64)


class Summed(nn.Module):
    """What is summed over is the odd dim: of it nothing is left to cut off."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(4, use_bias=False)(nn.softmax(nn.Dense(VOCAB, use_bias=False)(x)))


def test_a_product_that_sums_over_the_odd_dim_reads_the_weight_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = {"x": RNG.standard_normal((ROWS, WIDTH)).astype(np.float32)}
    given, wanted = (
        seen(
            Summed(),
            lambda model, batch: (model(batch["x"]) ** 2).mean(),
            "precision=bfloat16",
            fills,
            monkeypatch,
            batch,
        )
        for fills in (True, False)
    )
    assert widths(given, FULL) and widths(given, VOCAB) and not widths(wanted, FULL)
    assert_same(given, wanted)


def test_nothing_is_kept_behind_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filled, "on_gpus", lambda mesh: True)
    program = cjax.parallelize(*CASES["untied"], optax.sgd(0.1), BATCH, devices=jax.devices()[:1])
    known = filled.Filled(program._composed.trace, program.mesh)
    leaf = next(iter(known._multiplied))
    weight = jnp.ones((VOCAB, 8), jnp.bfloat16)
    assert known.ready(leaf, weight) is weight, "outside of an evaluation"
    with known.made():
        cut = known.ready(leaf, weight)
        assert cut.shape == weight.shape and known.has(cut) and not known.has(weight)
        assert known.ready(-1, weight) is weight and not known.has(jnp.ones(3))
    assert not known.has(cut)
