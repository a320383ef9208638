"""The live run's jobs, and their replay; the cluster itself is what `python experiments/scheduling.py live` starts."""

from typing import Any

import pytest
from schedules import live, training
from schedules.waiting import after

from cjax.scheduler.policy.job import size_of


def test_jobs_that_wait_have_states_of_their_own() -> None:
    x, seen = 0.1, set[float]()
    for _ in range(2000):
        x = after(x)
        seen.add(x)
    assert len(seen) == 2000, "a step that is left out, or done twice, shows"
    job = live.JOBS[0]
    assert job.steps * job.step == pytest.approx(job.seconds)
    assert [speed.samples_per_second for speed in job.speeds()][0] == pytest.approx(1 / job.step)
    data = training.Waves(8, (1, 2))
    assert (next(data.batches(4))["x"] == next(training.Waves(8).batches(4))["x"][4:]).all()


def test_the_replay_has_the_same_jobs_and_the_same_death() -> None:
    begin = 1000.0
    facts: dict[str, dict[str, Any]] = {
        job.name: {"submitted": begin + job.time, "ended": begin + job.time + 100, "restart": 2.0, "starts": 1,
                   "status": "done"} for job in live.JOBS
    }  # fmt: skip
    facts[live.REAL] = {"submitted": begin + 1, "ended": begin + 75, "starts": 2, "status": "done"}
    spans = ((5, 40, 0, 100, ("node0",)), (40, 75, 100, 200, ("node0", "node1")))
    crash = {"job": "crash", "placement": {}}
    history = [{"event": "start", "time": begin + 15, **crash}, {"event": "end", "time": begin + 25, **crash}]
    for start, end, first, last, nodes in spans:
        where = {"job": live.REAL, "placement": {node: [0, 1] for node in nodes}}
        history.append({"event": "start", "time": begin + start, "step": first, **where})
        history.append({"event": "end", "time": begin + end, "step": last, **where})
    outcome = live._replayed(facts, history, begin, begin + live.DIES)
    assert outcome.seconds.keys() == {*(job.name for job in live.JOBS), f"{live.REAL}-0", f"{live.REAL}-1"}
    stages = {name: size_of(h.placement) for h in outcome.holdings if (name := h.job).startswith(live.REAL)}
    assert stages == {f"{live.REAL}-0": 2, f"{live.REAL}-1": 4}
    assert all(h.end <= live.DIES or live.DEAD not in h.placement for h in outcome.holdings)
    rows = live._rows(facts, outcome, dict.fromkeys(facts, "the same"), begin)
    assert [row[0] for row in rows] == [*(job.name for job in live.JOBS), live.REAL, "mean"]
    assert rows[0][3] == "100.0" and float(rows[0][4]) == pytest.approx(outcome.seconds["long"], abs=0.1)
    drawn = live._as_replayed(history[2:], facts, begin)
    assert [(h.start, h.end) for h in drawn.holdings] == [(5, 40), (40, 75)]
