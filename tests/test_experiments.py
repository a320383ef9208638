"""Baselines of benchmarks are the same models as cjax's: same weights, same loss, same gradients. What finds sizes that
fit and draws pictures does so."""

import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh

import cjax
from cjax.models.gpt import GPT, GPTConfig, loss
from cjax.tree import leaf_names

sys.path.insert(0, str(Path(__file__).parent.parent / "experiments"))
import large_batch  # noqa: E402
import large_batch_data  # noqa: E402
import pipeline_plots  # noqa: E402
import pipeline_tables  # noqa: E402
import plain_gpt  # noqa: E402
import tensor_parallel_timed  # noqa: E402
from large_batch_plots import write_plots as write_large_batch_plots  # noqa: E402
from large_batch_recipes import RECIPES, schedule  # noqa: E402
from large_batch_runs import with_microbatches  # noqa: E402
from large_batch_tables import epochs_to  # noqa: E402
from large_batch_tables import write_tables as write_large_batch_tables  # noqa: E402
from pipeline_schedules import SizeOfStep, schedule_row  # noqa: E402
from tensor_parallel_measure import Results, largest, measure  # noqa: E402
from tensor_parallel_models import Case, elements_received, linears  # noqa: E402
from tensor_parallel_plots import write_plots  # noqa: E402
from tensor_parallel_tables import large_partners, write_tables  # noqa: E402

SIZES = plain_gpt.Sizes(num_layers=2, num_heads=4, embed=24, vocab=40, seq=10, batch=8)

LAYER = {
    "q": "attention/query/kernel", "k": "attention/key/kernel", "v": "attention/value/kernel",
    "q_bias": "attention/query/bias", "k_bias": "attention/key/bias", "v_bias": "attention/value/bias",
    "out": "attention/out/kernel", "out_bias": "attention/out/bias", "up": "mlp/up/kernel", "up_bias": "mlp/up/bias",
    "down": "mlp/down/kernel", "down_bias": "mlp/down/bias", "ln1_scale": "attention_norm/scale",
    "ln1_bias": "attention_norm/bias", "ln2_scale": "mlp_norm/scale", "ln2_bias": "mlp_norm/bias",
}  # fmt: skip


def test_the_baseline_is_the_same_model() -> None:
    config = GPTConfig(num_layers=2, num_heads=4, embed_dim=24, context=10, vocab_size=40)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, 40, (8, 10), dtype=np.int32) for name in ("inputs", "targets")}
    program = cjax.parallelize(lambda rngs: GPT(config, rngs=rngs), loss, optax.adam(1e-3), batch, "data=2 tensor=4")
    state = program.init(0)
    params = program.params(state)
    named = dict(zip(leaf_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))

    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    step, held_shape, _ = plain_gpt.make_step(SIZES, mesh, zero=0)
    weights, opt = plain_gpt.fresh(held_shape)
    top = {"wte": "token_embed", "wpe": "position_embed", "norm_scale": "norm/scale", "norm_bias": "norm/bias"}
    for mine, theirs in top.items():
        theirs = theirs if "/" in theirs else f"{theirs}/embedding"
        weights[mine] = jax.device_put(named[theirs], weights[mine].sharding)
    for mine, theirs in LAYER.items():
        value = jnp.stack([named[f"blocks/{i}/{theirs}"] for i in range(2)])
        weights[mine] = jax.device_put(value, weights[mine].sharding)

    _, ours = program.step(state, batch)
    _, by_hand = step((weights, opt), batch)
    np.testing.assert_allclose(ours["loss"], by_hand["loss"], rtol=1e-6)
    np.testing.assert_allclose(ours["grad_norm"], by_hand["grad_norm"], rtol=1e-5)


@pytest.mark.parametrize("plan", ["tensor=4", "tensor=2d:4", "tensor=2.5d:8/2", "tensor=3d:8"])
def test_layers_by_gspmd_alone_are_the_same_layers(plan: str) -> None:
    case = Case("", "blocks", width=32, heads=4, layers=3, length=6, batch=8)
    batch = {"x": np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)}
    devices = jax.devices()[: 4 if ":4" in plan or plan == "tensor=4" else 8]
    program = cjax.parallelize(case.build, case.loss, optax.adam(1e-3), batch, plan, devices=devices)
    state = program.init(0)
    params = program.params(state)
    named = dict(zip(leaf_names(params), map(np.asarray, jax.tree.leaves(params)), strict=True))

    step, held_shape, batch_shape = tensor_parallel_timed.make_step(case, plan, devices, jnp.float32)
    weights, opt = tensor_parallel_timed.fresh(held_shape)
    for mine in weights:
        value = named["scale"] if mine == "scale" else np.stack([named[f"blocks/{i}/{LAYER[mine]}"] for i in range(3)])
        assert value.shape == weights[mine].shape
        weights[mine] = jax.device_put(value, weights[mine].sharding)
    placed = {"x": jax.device_put(batch["x"], batch_shape["x"].sharding)}

    _, ours = program.step(state, batch)
    _, alone = step((weights, opt), placed)
    np.testing.assert_allclose(ours["loss"], alone["loss"], rtol=1e-6)
    np.testing.assert_allclose(ours["grad_norm"], alone["grad_norm"], rtol=1e-5)


@pytest.mark.aot
def test_what_is_measured_is_what_the_formula_says(tmp_path: Path) -> None:
    case = Case("small", "blocks", width=512, heads=8, layers=2, length=64, batch=8)
    results = Results(tmp_path / "results.jsonl")
    for plan in ("tensor=4", "tensor=2d:4"):
        row = measure(results, "a", case, plan)
        assert row["formula"] <= row["elements"] <= 1.01 * row["formula"]
        assert row["received"] == pytest.approx(sum(row["moved"].values()))
        assert 0 < row["exposed_s"] <= row["transfer_s"] and 0 < row["peak"] < row["limit"]
    assert large_partners(row) == row["partners"] == 2
    assert "can't split heads" in measure(results, "a", case, "tensor=16")["refused"]


def test_formulas_of_a_layer() -> None:
    tokens, width = 24, 10
    parts = [(tokens * k, k * n, tokens * n) for k, n in linears(width)]
    x, w, y = (sum(part) for part in zip(*parts, strict=True))
    assert elements_received("tensor=4", tokens, width) == 4 * (3 / 4) * tokens * width * 2
    assert elements_received("tensor=2d:9", tokens, width) == pytest.approx(3 * 2 / 9 * (x + w))
    assert elements_received("tensor=2.5d:8/2", tokens, width) == pytest.approx(3 / 4 * (x / 2 + w) + w / 4)
    assert elements_received("tensor=3d:27", tokens, width) == pytest.approx(2 / 27 * (3 * x + 3 * w + 2 * y))


@pytest.mark.parametrize("bend", [0.0, 2e-4])
@pytest.mark.parametrize("uncompilable", [0, 16])
def test_the_largest_size_is_found(bend: float, uncompilable: int) -> None:
    seen = []

    def peak_at(size: int) -> dict[str, Any]:
        if size == uncompilable:
            return {"failed": "no tiles"}
        seen.append(size)
        return {"peak": 7 + 0.31 * size + bend * size**2, "limit": 100.0}

    exact = max(n for n in range(0, 1000, 8) if 7 + 0.31 * n + bend * n**2 <= 100)
    found = largest(peak_at, 8, (16, 64), max_compiles=8)
    assert found["fits"] <= exact and (found["fails"] is None or found["fails"] > exact)
    assert found["fits"] >= 0.98 * exact
    assert len(seen) == len(set(seen)) == found["compiles"] <= 8


def test_tables_and_pictures_of_what_is_there(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    size = {"name": "GPT", "layers": 4, "width": 8, "heads": 2, "batch": 2, "length": 3}
    row = {"received": 2**30, "elements": 2**29, "formula": 2**29, "partners": 3, "peak": 2**31, "moved": {}}
    row |= {"compute_s": 0.25, "transfer_s": 0.5, "exposed_s": 0.125}
    for plan in ("tensor=4", "tensor=2.5d:8/2"):
        results.get({"part": "a", "plan": plan} | size, lambda: row)
    results.get({"part": "a", "plan": "tensor=16"} | size, lambda: {"refused": "2 heads do not divide by 16\nmore"})
    found = {"part": "b: largest", "name": "GPT", "field": "batch", "plan": "tensor=4"}
    results.get(found, lambda: {"fits": 5, "fails": 6})
    again = Results(results.path)
    assert again.rows == results.rows
    assert again.get({"part": "a", "plan": "tensor=4"}, lambda: pytest.fail("made twice")) == results.rows[0]

    text = write_tables(again, tmp_path)
    assert "| tensor=2.5d:8/2 | 1.000" in text and "25%" in text and "2 heads do not divide by 16 |" in text
    write_plots(again, tmp_path)
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert pictures == ["floor-gpt.svg", "largest-batch-gpt-batch.svg", "peak-gpt.svg", "received-gpt.svg"]
    for name in pictures:
        marks = ElementTree.parse(tmp_path / name).getroot()
        assert len(marks.findall("{*}rect")) == 1 + (1 if name.startswith("largest") else 2)


def test_pipelines_are_measured_and_shown(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    size = SizeOfStep(num_layers=2, vocab_size=16, length=4, rows=1)
    row = schedule_row(results, "1f1b", 1, 2, 4, size)
    assert row["bubble"] == pytest.approx(1 / 5) and row["held"] == 3 and row["temporary"] > 0
    assert schedule_row(Results(results.path), "1f1b", 1, 2, 4, size) == row
    results.get(row | {"microbatches": 8}, dict)

    key = {"part": "c", "model": "gpt2", "batch": 32, "length": 1024}
    found = {"received": 2**30, "peak": 2**32, "even_s": 0.02, "compute_s": 0.025, "exposed_s": 0.005}
    results.get(key | {"plan": "data=4"}, lambda: found | {"floor_s": 0.03})
    pipe = found | {"layers": [3, 3, 3, 3], "bubble": 3 / 19, "bubble_as_cut": 0.5, "floor_s": 0.04}
    results.get(key | {"plan": "pipeline=1f1b:4 microbatches=16"}, lambda: pipe)

    text = pipeline_tables.write_tables(results, tmp_path)
    assert "| 1f1b:2   | 4" in text and "| 20.0%" in text
    assert "| pipeline=1f1b:4 microbatches=16 | 3 3 3 3 | 4.00" in text
    assert "| 15.8%  | 50.0%" in text and "| 800" in text
    pipeline_plots.write_plots(results, tmp_path)
    pictures = {path.name: ElementTree.parse(path).getroot() for path in tmp_path.glob("*.svg")}
    assert len(pictures) == 1 + len(pipeline_plots.SCHEDULES)
    assert len(pictures["memory-2.svg"].findall("{*}circle")) == 2
    assert len(pictures["gantt-zero_bubble-2.svg"].findall("{*}rect")) == 4 * 8 * 2 * 3


def test_large_batches_are_trained_and_shown(tmp_path: Path) -> None:
    large_batch.main(["--tiny", "--here", "--optimizers", "lamb", "--out", str(tmp_path)])
    results = Results(tmp_path / "results.jsonl")
    (images,), (masked,) = results.of("a"), results.of("b")
    for row, steps in ((images, 8), (masked, 8)):
        assert row["steps"] == steps and row["skipped"] == 0
        assert row["test_loss"][-1] < row["test_loss"][0]
    # A second batch size, as if it had been run: tables and pictures compare several.
    for row in (images, masked):
        results.get(row | {"batch": 128, "rate": float(f"{RECIPES['lamb'].rate_at(128):.4g}")}, dict)
    text = write_large_batch_tables(results, tmp_path)
    assert "| optimizer | 64" in text and "**Masked bytes of standard library, LAMB" in text
    write_large_batch_plots(results, tmp_path)
    pictures = {path.name: ElementTree.parse(path).getroot() for path in tmp_path.glob("*.svg")}
    assert len(pictures) == 5  # accuracy by batch, curves of two batches, loss by batch and its curves
    assert len(pictures["accuracy-stripes-4.svg"].findall("{*}circle")) == 2


def test_every_batch_size_sees_the_same_samples() -> None:
    source = large_batch_data.stripes(24)
    few, many = (
        np.concatenate([b["labels"] for b in large_batch_data.stream(source, batch, 96 // batch, seed=3)])
        for batch in (4, 16)
    )
    np.testing.assert_array_equal(few, many)
    np.testing.assert_array_equal(np.sort(few[:24]), np.sort(source.train["labels"]))  # an epoch has each once


def test_rates_follow_the_batch() -> None:
    assert RECIPES["sgd"].rate_at(1024) == pytest.approx(2 * RECIPES["sgd"].rate)
    assert RECIPES["adam"].rate_at(2048) == pytest.approx(2 * RECIPES["adam"].rate)
    assert RECIPES["lars"].rate_at(10**6) == RECIPES["lars"].most
    rates = np.array([schedule(1.0, 8192, 40)(step) for step in range(41)])  # a tenth of the steps is warm-up
    np.testing.assert_allclose(rates[[0, 3, 4, 40]], [0.25, 1.0, 1.0, 0.0], atol=1e-6)
    assert with_microbatches("data=2", 60_000) == "data=2 microbatches=60"


def test_masked_bytes_follow_berts_rule() -> None:
    targets = np.full((200, 100), 65, np.int32)
    found = large_batch_data.hide(targets, np.random.default_rng(0))
    asked = found["hidden"] == 1
    assert asked.mean() == pytest.approx(0.15, abs=0.01)
    assert (found["inputs"][asked] == large_batch_data.HIDDEN).mean() == pytest.approx(0.8, abs=0.03)
    np.testing.assert_array_equal(found["inputs"][~asked], targets[~asked])


def test_epochs_to_a_target() -> None:
    row = {"epochs": [1, 2, 3], "accuracy": [0.5, 0.9, 0.8]}
    assert epochs_to(row, 0.85) == 2 and epochs_to(row, 0.95) is None
