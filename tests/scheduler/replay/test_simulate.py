"""Rounds, restarts and ends, against times counted by hand."""

import dataclasses
from pathlib import Path

import pytest
from scheduler.replay.logs import write_log, write_tables

from cjax.scheduler.policy.job import size_of
from cjax.scheduler.replay.gantt import gantt_of
from cjax.scheduler.replay.knowledge import Knowledge, setting_of
from cjax.scheduler.replay.simulate import Replayed, simulate
from cjax.scheduler.replay.workload import Library, read_workload

NODES = {"a": 2, "b": 2}
FOUR = {"a": 4}


def replayed(path: Path, policy: str, knowledge: Knowledge = Knowledge(), **more: float) -> Replayed:  # noqa: B008
    return simulate(read_workload(path, path.parent / "speeds.csv"), FOUR, setting_of(policy, FOUR, knowledge), **more)


def test_fifo_by_hand(tmp_path: Path) -> None:
    outcome = replayed(write_log(tmp_path), "fifo")
    # a: seen at 60, starts at 90, 6,000 samples at 18/s: ends at 423. b, beside it: at 210.
    assert outcome.seconds["a"] == 423 and outcome.seconds["b"] == 210 - 30
    # c wants all four and waits. d, behind it, passes by at 240, when b has left one device more: 270 + 9,000 / 10.
    assert outcome.seconds["d"] == 1170 - 100
    assert outcome.seconds["c"] == 1200 + 30 + 40 - 100
    assert outcome.makespan == 1270 and set(outcome.restarts.values()) == {0}
    assert [holding.end for holding in outcome.holdings if holding.job == "a"] == [423]
    held = 2 * (423 - 60) + (210 - 60) + 2 * (1170 - 240) + 4 * (1270 - 1200)
    assert outcome.utilisation == pytest.approx(held / (4 * 1270))


def test_devices_are_held_once_at_a_time(tmp_path: Path) -> None:
    for policy in ("fifo", "goodput", "tiresias", "optimus"):
        holdings = replayed(write_log(tmp_path), policy).holdings
        for index, holding in enumerate(holdings):
            for other in holdings[:index]:
                if holding.start < other.end and other.start < holding.end:
                    shared = {n: set(d) & set(other.placement.get(n, ())) for n, d in holding.placement.items()}
                    assert not any(shared.values())


def test_goodput_resizes_and_is_quicker(tmp_path: Path) -> None:
    path = write_log(tmp_path)
    outcome = replayed(path, "goodput")
    assert outcome.mean < replayed(path, "fifo").mean
    assert {size_of(holding.placement) for holding in outcome.holdings if holding.job == "a"} - {2}
    assert replayed(path, "goodput", restart=0.0).mean < outcome.mean
    assert replayed(path, "goodput", Knowledge(work=False)).mean >= outcome.mean


def test_a_job_that_no_node_has_room_for_is_named(tmp_path: Path) -> None:
    path = write_log(tmp_path, "name,time,application,work,least\nbig,0,vision,100,4\n")
    jobs = read_workload(path, path.parent / "speeds.csv")
    with pytest.raises(ValueError, match="big would wait for ever"):
        simulate(jobs, {"a": 2, "b": 1}, setting_of("goodput", {"a": 2, "b": 1}))


def test_the_chart_has_every_span(tmp_path: Path) -> None:
    outcome = replayed(write_log(tmp_path), "goodput")
    picture = gantt_of(outcome, FOUR)
    assert picture.count("<title>") == len(outcome.holdings) and "d: 2 devices" in picture


def test_published_tables_are_read_and_learned(tmp_path: Path) -> None:
    tables = write_tables(tmp_path)
    (tmp_path / "jobs.csv").write_text("name,time,application,num_replicas,batch_size\nx,10,bert,4,64\n")
    library = Library(tables)
    nodes = {"a": 4, "b": 4}
    jobs = read_workload(tmp_path / "jobs.csv", tables, library)
    # 200 base steps; a batch of 64 on 4 devices, 16 rows each, takes 0.35 s and, at noise 4 x 8 = 32 base batches'
    # worth, gains (32 + 1) / (32 / 8 + 1) = 6.6 steps.
    fifo = simulate(jobs, nodes, setting_of("fifo", nodes))
    assert fifo.seconds["x"] == 60 + 30 + round(100 / (6.6 / 0.35)) * 2 - 10
    means = [
        simulate(jobs, nodes, setting_of("goodput", nodes, Knowledge(speeds=speeds))).mean for speeds in (True, False)
    ]
    assert means[0] <= means[1] < 3 * means[0]
    with pytest.raises(ValueError, match="around 8 devices on 1 nodes"):
        library["bert"].times((8,), 4)
    with pytest.raises(ValueError, match="no tables of 'gpt' were published"):
        library["gpt"]
    with pytest.raises(ValueError, match="there are goodput, fifo"):
        setting_of("best", nodes)


def test_jobs_of_a_node_that_dies_go_on_elsewhere(tmp_path: Path) -> None:
    path = write_log(tmp_path, "name,time,application,work,most\none,0,vision,60000,2\nother,0,vision,60000,2\n")
    jobs, setting = read_workload(path, path.parent / "speeds.csv"), setting_of("goodput", NODES)
    whole = simulate(jobs, NODES, setting)
    outcome = simulate(jobs, NODES, setting, deaths={"b": 610.0})
    assert all(holding.end <= 610 or "b" not in holding.placement for holding in outcome.holdings)
    assert any(holding.end == 610 for holding in outcome.holdings)
    assert all(holding.start < holding.end for holding in outcome.holdings)
    assert max(outcome.seconds.values()) > max(whole.seconds.values()) + 600
    # All devices compute but while they start: 30 s each time, on what is held then.
    starts = sum(30 * size_of(holding.placement) for holding in whole.holdings)
    there = 4 * whole.makespan
    assert whole.computing * there == pytest.approx(whole.utilisation * there - starts)
    slow = simulate([dataclasses.replace(jobs[0], restart=500.0), jobs[1]], NODES, setting)
    assert slow.seconds["one"] == whole.seconds["one"] + 470


def test_starts_and_ends_take_what_was_measured(tmp_path: Path) -> None:
    path = write_log(tmp_path, "name,time,application,work,most\none,0,vision,60000,4\n")
    (job,) = read_workload(path, path.parent / "speeds.csv")
    setting = setting_of("goodput", FOUR)
    measured = dataclasses.replace(job, starts={1: 5.0, 2: 6.0, 4: 7.0}, leaves=2.0)
    assert simulate([measured], FOUR, setting).seconds["one"] == 60 + 7 + 60000 / 30
    # Told at 605 to have two at most, it is moved at once: 2 s to leave, 6 s to start.
    ranged = simulate([dataclasses.replace(measured, ranges=((605.0, 1, 2),))], FOUR, setting)
    done = (605 - 60 - 7) * 30
    assert ranged.seconds["one"] == pytest.approx(605 + 2 + 6 + (60000 - done) / 18, abs=0.6)
    assert [holding.end for holding in ranged.holdings][0] == 605
    failed = simulate([dataclasses.replace(measured, fails_after=100.0)], FOUR, setting)
    assert failed.seconds["one"] == 160
