"""Published runs as rows, the constants that were fitted on them, and what the checks on them see."""

import dataclasses

import numpy as np
import pytest
from published import checks
from published.fit import CONSTANTS, Fit, Problem, fit
from published.recipes import behind
from published.rows import Row, Run, read, run_of

from cjax.plan import Pipeline
from cjax.planner.costs.calibration import FITTED


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(read()[0])


@pytest.fixture(scope="module")
def found(problem: Problem) -> Fit:
    return fit(problem, np.arange(len(problem.runs)), {name: FITTED[name] for name in CONSTANTS})


def everyone(problem: Problem) -> np.ndarray:
    return np.arange(len(problem.runs))


def test_rows_that_say_enough_are_runs() -> None:
    runs, left = read()
    assert len(runs) >= 400
    # Cards without runs enough, systems that no fact is known of, and few others.
    assert sum(count for reason, count in left.items() if reason not in ("card", "system")) < 20
    assert {run.facts.card for run in runs} == {"V100", "A100-40", "A100", "H100"}


GPT3: Row = {
    "source": "Reducing Activation Recomputation (2205.05198) Table 5", "hardware": "A100-80GB SXM", "gpus": "64",
    "model": "GPT", "params": "175B", "layers": "96", "hidden": "12288", "heads": "96", "vocab": "51200",
    "seq_len": "2048", "global_batch": "64", "micro_batch": "1", "tp_mode": "1d+megatron-sp", "tp": "8", "pp": "8",
    "dp": "1", "cp": "1", "schedule": "interleaved 1F1B (3 chunks/device)", "zero": "0", "recompute": "selective",
    "dtype": "fp16 mixed", "tflops_per_gpu": "160.4", "tokens_per_s_per_gpu": "148.9", "step_time_s": "13.75",
    "notes": "",
}  # fmt: skip


def test_a_row_is_a_plan() -> None:
    run = run_of(2, GPT3)
    assert isinstance(run, Run)
    assert str(run.plan) == "data=1 pipeline=interleaved:8/3 microbatches=64 precision=bfloat16 remat=dots"
    assert run.spread.tensor == 8 and run.spread.is_split
    assert run.step == pytest.approx(13.75, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "lack"),
    [
        ({"hardware": "TPU v4"}, "card"),
        ({"source": "A system of my own"}, "system"),
        ({"seq_len": ""}, "shapes of the model"),
        ({"tp": ""}, "plan"),
        ({"dp": "2"}, "sizes that multiply to the devices"),
        ({"tokens_per_s_per_gpu": "", "step_time_s": "", "tflops_per_gpu": ""}, "rate"),
    ],
)
def test_a_row_that_lacks_something_says_what(changes: Row, lack: str) -> None:
    assert run_of(2, GPT3 | changes) == lack


def test_a_system_that_nobody_knows_is_asked_about_but_not_fitted_on() -> None:
    row = GPT3 | {"source": "Mine", "hardware": "H200", "interconnect": "NVSwitch + 8x200Gb/s IB", "gpus_per_node": "8"}
    assert run_of(2, row) == "card"
    run = run_of(2, row, guesses=True)
    assert isinstance(run, Run)
    assert (run.facts.kernel, run.hardware.network_bandwidth, run.hardware.memory_bandwidth) == (
        "flash 2024",
        25e9,
        4.8e12,
    )
    (said,) = Fit(FITTED, {}).log_ratio(Problem([run]), np.array([0]))
    assert said > np.log(1.5), "an H200 is faster than the A100s of that row"


@pytest.mark.full
def test_the_constants_in_cjax_are_those_of_the_fit(found: Fit) -> None:
    for name, value in found.values.items():
        assert value == pytest.approx(FITTED[name], rel=0.03), name
    assert np.exp(found.factors["JAX"]) == pytest.approx(FITTED["JAX"], rel=0.01)


def test_predictions_are_as_good_as_the_log_says(problem: Problem, found: Fit) -> None:
    logs = found.log_ratio(problem, everyone(problem))
    assert checks.Errors(logs).median <= 0.04 and checks.Errors(logs).p90 <= 0.12
    assert 0.75 <= checks.coverage(logs, np.full(len(logs), found.spread)) <= 0.85
    ranked = checks.order(problem, logs)
    assert ranked.right >= 0.9 and ranked.regret <= 0.015 and ranked.third >= 0.97


def test_so_are_those_of_rows_that_the_fit_did_not_see(problem: Problem, found: Fit) -> None:
    seen, held = next(checks.folds(problem, 0))
    assert not set(seen) & set(held) and len(seen) + len(held) == len(problem.runs)
    errors = checks.Errors(fit(problem, seen, found.values).log_ratio(problem, held))
    # One fold of five, so that its tail is a few rows.
    assert errors.median <= 0.05 and errors.p90 <= 0.16


def test_no_run_is_faster_than_its_bound(problem: Problem, found: Fit) -> None:
    assert checks.above_bound(problem, found) == ([], [])
    optimist = dataclasses.replace(found, factors=dict.fromkeys(found.factors, 2.0))
    assert checks.above_bound(problem, optimist)[0], "a fault that the check must see"


def test_shuffled_predictions_are_seen(problem: Problem, found: Fit) -> None:
    logs = np.random.default_rng(0).normal(0, 0.3, len(problem.runs))
    ranked = checks.order(problem, logs)
    assert ranked.right < 0.8 and ranked.regret > 0.03


@pytest.mark.full
def test_recipes_are_near_the_best_of_their_kind(problem: Problem, found: Fit) -> None:
    """Three of them; the log has all."""
    own = [run for run in problem.runs if run.facts.system == "NeMo" and run.decoder.layers == 126]
    for run in own[:3]:
        assert behind(problem, found, run)[0] <= 0.05
    few = next(run for run in own if run.plan.microbatches == 64)
    slow = dataclasses.replace(few, plan=dataclasses.replace(few.plan, pipeline=Pipeline(8)))
    assert behind(Problem([slow]), found, slow)[0] > 0.05, "64 micro-batches in a pipeline of eight, and no chunks"
