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
        job.name: {"submitted": begin + job.time, "ended": begin + job.time + 100, "starts": 1, "status": "done"}
        for job in live.JOBS
    }
    facts[live.REAL] = {"submitted": begin + 1, "ended": begin + 75, "starts": 2, "status": "done"}
    waiting = live.Costs({size: 2.0 for size in live.SIZES}, {}, 0.5)
    seen = live.Measured(waiting, live.Costs({2: 8.0, 4: 12.0}, {2: 0.25, 4: 0.3}, 1.0), 7.0)
    outcome = live._replayed(facts, seen, begin, begin + live.DIES)
    assert outcome.seconds.keys() == facts.keys()
    assert outcome.seconds["crash"] == pytest.approx(15 - 12 + 29 * 0.2 + 7), "from the decision behind its submission"
    sizes = [size_of(h.placement) for h in outcome.holdings if h.job == live.REAL]
    assert set(sizes) == {2, 4} and sizes[0] == 2
    assert all(h.end <= live.DIES or live.DEAD not in h.placement for h in outcome.holdings)
    rows = live._rows(facts, outcome, dict.fromkeys(facts, "the same"))
    assert [row[0] for row in rows] == [*(job.name for job in live.JOBS), live.REAL, "mean"]
    assert rows[0][3] == "100.0" and float(rows[0][4]) == pytest.approx(outcome.seconds["long"], abs=0.1)
    where = {"job": live.REAL, "placement": {"node0": [0, 1]}}
    history = [
        {"event": event, "time": begin + when, "step": step, **where}
        for event, when, step in (("start", 5, 0), ("step", 14, 4), ("stop", 40, 108), ("end", 41, 110))
    ]
    drawn = live._as_replayed(history, facts, begin)
    assert [(h.start, h.end) for h in drawn.holdings] == [(5, 41)]
    costs = live._costs(history, (live.REAL,))
    assert (costs.starts, costs.steps, costs.leaves) == ({2: 8.0}, {2: 0.25}, 1.0)
