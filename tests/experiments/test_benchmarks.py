"""The benchmarks of GPUs at toy size on CPUs, so that they never rot; and, where XLA's GPU compiler is, what a step for
an H100 must show: flash attention, logits never whole, no matmul in float32, memory within the formula."""

import dataclasses
import os

import bench_generate
import bench_gpu
import numpy as np
import optax
import pytest
from benchmarks.check import Check, check
from benchmarks.models import ROWS, TINY

import cjax


@pytest.mark.full
@pytest.mark.parametrize("name", TINY if os.environ.get("CJAX_TEST_ALL") == "1" else ["gpt"])
def test_a_row_is_timed_and_its_arithmetic_counted(name: str) -> None:
    row = TINY[name]
    found = bench_gpu.facts(row, row.batch, bench_gpu.run_cjax(row, row.batch, 1, "precision=bfloat16"))
    assert found["seconds"] > 0 and np.isfinite(found["loss"]) and found["predicted"] > 0
    # The formula knows no relative positions, no patches, and of grouped heads only the queries'.
    assert 0.95 < found["counted"] / row.flops(row.batch) < 1.05
    assert "tokens/s" in bench_gpu.line(name, "cjax", row.batch, row, found)


@pytest.mark.full
def test_a_side_runs_in_a_process_of_its_own_and_says_why_it_failed(capsys: pytest.CaptureFixture[str]) -> None:
    results = bench_gpu.main(["--tiny", "--rows", "gpt", "--steps", "1", "--sides", "cjax", "--plan", "tensor=3"])
    assert "tensor" in results[0]["failed"]
    assert results[0]["failed"] in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.parametrize("side", ["cjax-16", "folder-16"])
def test_a_text_is_timed(side: str) -> None:
    found = bench_generate.measured(bench_generate.TINY["llama"], side, 2, 5, 3)
    assert 0 < found["prompt"] < found["first"]


def test_a_token_reads_all_weights_and_what_it_remembers() -> None:
    config = bench_generate.TINY["llama"]
    wide, low = (bench_generate.read(config, side, 2, 5) for side in ("cjax", "torch"))
    past = 2 * 2 * 5 * config.num_kv_heads * 16  # keys and values of 2 texts, 5 positions
    assert wide == 2 * low == 4 * (config.num_params + 2 * past)


@pytest.mark.parity
@pytest.mark.parametrize("name", TINY)
def test_torchs_model_is_of_the_same_size(name: str) -> None:
    from benchmarks import in_torch

    row = TINY[name]
    found = bench_gpu.run_torch(row, row.batch, 1, compiled=False)
    assert np.isfinite(found["loss"])
    # BERT's second segment's embedding is not there: nobody uses it.
    assert abs(in_torch.num_params(row) - row.config.num_params) <= row.config.embed_dim


def test_what_a_compiled_step_must_not_show() -> None:
    row = ROWS["gpt2"]
    good = Check(("fmhaSoftmax", "fmhaSoftmaxBackward"), 0, 10, 100, 100, 209)
    assert not good.problems(row, 8)
    for fault, said in (
        ({"kernels": ("fmhaSoftmax",)}, "not a flash kernel"), ({"float32": 1}, "in float32"),
        ({"largest": 8 * 1024 * 50257}, "logits are whole"), ({"peak": 211}, "above state"),
    ):  # fmt: skip
        (problem,) = dataclasses.replace(good, **fault).problems(row, 8)
        assert said in problem


@pytest.mark.aot
@pytest.mark.full("bert-large-8", "vit-l16-16", "llama-1b-2")
@pytest.mark.parametrize(("name", "batch"), [("gpt2", 8), ("bert-large", 8), ("vit-l16", 16), ("llama-1b", 2)])
def test_a_step_for_an_h100_is_as_it_should_be(name: str, batch: int) -> None:
    assert not check(ROWS[name], batch, "data=-1", "h100:1").problems(ROWS[name], batch)


@pytest.mark.aot
@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=4 tensor=2 zero=1", "zero=3", "pipeline=1f1b:2 microbatches=4 data=4"])
def test_under_other_plans_too(plan: str) -> None:
    found = check(ROWS["gpt2"], 32, plan, "h100:8")
    assert "fmhaSoftmaxBackward" in found.kernels and not found.float32


@pytest.mark.aot
def test_in_float32_nothing_of_it_is_so_and_the_report_says_why() -> None:
    row = dataclasses.replace(ROWS["gpt2"], config=dataclasses.replace(ROWS["gpt2"].config, num_layers=2))
    program = cjax.parallelize(
        row.build, row.loss, optax.adamw(1e-4), row.shapes(8), "precision=float32", devices="h100:1"
    )
    assert "not by cuDNN's flash kernel" in str(program.report())
