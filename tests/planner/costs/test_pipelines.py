"""Ticks counted by kind are those that `simulate` lays out, for any number of micro-batches."""

import numpy as np
import pytest

from cjax.pipeline.partition import partition
from cjax.pipeline.schedule import build, one_f_one_b
from cjax.pipeline.simulate import Times, simulate
from cjax.pipeline.wiring import wire
from cjax.planner.costs.pipelines import asynchronous, makespan, ticks, turns
from cjax.planner.costs.places import route_of

SCHEDULES = [("1f1b", 1), ("gpipe", 1), ("gpipe", 2), ("interleaved", 2), ("interleaved", 3), ("zero_bubble", 1),
             ("zero_bubble", 2)]  # fmt: skip
TIMES = [(1.0, 1.0, 1.0), (1.0, 2.5, 0.25), (0.5, 0.75, 2.0)]


def seconds(schedule: str, stages: int, microbatches: int, chunks: int, times: tuple) -> float:
    found = ticks(schedule, stages, microbatches, chunks)
    of_a_chunk = (np.array([time / chunks]) for time in times)
    return float(makespan(found, *of_a_chunk)[0])


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_a_pipeline_takes_as_long_as_simulate_says(schedule: str, chunks: int, stages: int) -> None:
    for rounds in (1, 2, 3, 5):
        microbatches = stages * rounds + (0 if schedule == "interleaved" else rounds - 1)
        for times in TIMES:
            exact = simulate(build(schedule, stages, microbatches, chunks), Times(*times)).makespan
            assert seconds(schedule, stages, microbatches, chunks, times) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_stages_that_take_all_branches_run_what_any_of_them_has_to(schedule: str, chunks: int) -> None:
    for stages, microbatches in ((2, 2), (4, 4), (4, 12)):
        rows = build(schedule, stages, microbatches, chunks).ticks
        for times in TIMES:
            split = any(op.kind == "W" for row in rows for ops in row for op in ops)
            of = dict(zip("FBW", (times[0], times[1] + (not split) * times[2], times[2]), strict=True))
            most = [{kind: max(sum(op.kind == kind for op in ops) for ops in row) for kind in "FBW"} for row in rows]
            exact = sum(of[kind] * row[kind] for row in most for kind in "FBW")
            found = ticks(schedule, stages, microbatches, chunks)
            each = [float(makespan(found, *map(np.float64, times), together)) for together in (False, True)]
            assert each[1] == pytest.approx(exact) and each[1] >= each[0]


@pytest.mark.parametrize(("schedule", "chunks", "stacks"), [*((name, v, 1) for name, v in SCHEDULES),
                                                         ("interleaved", 1, 2), ("interleaved", 2, 2)])  # fmt: skip
@pytest.mark.parametrize("stages", [2, 3])
def test_stages_that_take_all_branches_take_them_as_often_as_the_executor_has_them(
    schedule: str, chunks: int, stacks: int, stages: int
) -> None:
    route = route_of(schedule, stages, chunks * stacks)
    cut = partition([stages * chunks] * stacks, route)
    for microbatches in (stages, 2 * stages, 7 * stages):
        wiring = wire(build(schedule, stages, microbatches, chunks * stacks), cut)
        kinds = ("F", "B", "W" if schedule == "zero_bubble" else "B")
        wanted = tuple(sum(wiring.turns(kind, "does", k, True) for k in range(stacks)) for kind in kinds)
        assert turns(schedule, stages, microbatches, chunks, stacks) == wanted


def test_few_micro_batches() -> None:
    for stages, microbatches in ((4, 1), (4, 2), (8, 3)):
        for schedule in ("1f1b", "gpipe", "zero_bubble"):
            exact = simulate(build(schedule, stages, microbatches), Times(*TIMES[1])).makespan
            assert seconds(schedule, stages, microbatches, 1, TIMES[1]) == pytest.approx(exact)


def test_stages_that_do_not_wait_for_ticks_have_the_papers_bubbles() -> None:
    for stages, microbatches in ((2, 4), (4, 12)):
        for times in TIMES:
            exact = simulate(one_f_one_b(stages, microbatches, lead=1), Times(*times), lockstep=False).makespan
            args = (np.array([float(stages)]), np.array([1.0]), *(np.array([time]) for time in times))
            assert asynchronous("1f1b", *args)[0] == pytest.approx(exact - microbatches * sum(times))
            exact = simulate(build("interleaved", stages, microbatches, 2), Times(*times), lockstep=False).makespan
            args = (np.array([float(stages)]), np.array([2.0]), *(np.array([time]) for time in times))
            assert asynchronous("interleaved", *args)[0] == pytest.approx(exact - microbatches * sum(times))
