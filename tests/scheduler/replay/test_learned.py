"""What a job believes of its steps, by those that it has made."""

from pathlib import Path

import numpy as np
import pytest

from cjax.scheduler.replay.knowledge import DOUBT, Knowledge, learned_table, setting_of
from cjax.scheduler.replay.learned import LearnedTimes
from cjax.scheduler.replay.measured import Way
from cjax.scheduler.replay.simulate import simulate
from cjax.scheduler.replay.simulated import SimulatedJob
from cjax.scheduler.replay.workload import read_workload

from .logs import write_log


def test_what_was_seen_is_believed_and_more_rows_hide_the_exchange() -> None:
    learned = LearnedTimes()
    learned.see((1,), 8, 0.2, 0.0)
    learned.see((1,), 16, 0.3, 0.0)
    assert learned.seconds((4, 4), (Way(8, 0, 8),)) == pytest.approx([0.2]), "nobody saw an exchange yet"
    learned.see((4,), 8, 0.5, 0.3)
    few, many, twice = learned.seconds((4,), (Way(8, 0, 4), Way(160, 0, 4), Way(8, 1, 4)))
    assert few == pytest.approx(0.5) and twice == pytest.approx(0.7)
    alone = 0.1 + 160 * 0.0125
    assert alone < many < alone + 0.02, "of 0.3 s hardly any is left to wait for"
    assert learned.seconds((4, 4), (Way(8, 0, 8),)) == pytest.approx([0.5])
    learned.see((4, 4), 8, 0.9, 0.7)
    ways = (Way(8, 0, 8),)
    assert learned.seconds((4, 4), ways) == pytest.approx([0.9]), "what was believed of it before is forgotten"
    learned.see((4,) * 3, 8, 1.0, 0.8)
    assert np.all(learned.seconds((4,) * 4, ways) > learned.seconds((4,) * 3, ways))


def test_between_what_was_measured_that_counts_and_a_line_behind_it() -> None:
    learned = LearnedTimes()
    for rows, seconds in ((1, 1.0), (2, 3.0), (4, 3.5)):
        learned.see((1,), rows, seconds, 0.0)
    at = learned.seconds((1,), tuple(Way(rows, 0, 1) for rows in (1, 2, 3, 4, 8)))
    assert at[:4] == pytest.approx([1.0, 3.0, 3.25, 3.5])
    assert at[4] > 3.5


def test_sizes_that_a_job_never_had_are_doubted(tmp_path: Path) -> None:
    speeds = "application,devices,samples_per_second\n" + "".join(f"vision,{n},{10 * n}\n" for n in (1, 2, 4, 8))
    path = write_log(tmp_path, "name,time,application,work\nx,0,vision,6000\n", speeds)
    (submission,) = read_workload(path, path.parent / "speeds.csv")
    job = SimulatedJob(submission, True, 30.0, learns=True)
    assert learned_table(job, {4: 2}).sizes == (1, 2, 4), "at first it stays on one node"
    assert job.learned is not None
    job.learned.see((2,), 0.5, 0.05, 0.0)
    rates = dict(zip((1, 2, 4, 8), learned_table(job, {4: 2}).rates.tolist(), strict=True))
    hoped = dict(zip((1, 2, 4, 8), (job.goodputs((n,) if n < 8 else (4, 4))[0] for n in (1, 2, 4, 8)), strict=True))
    assert rates[1] == pytest.approx(hoped[1]) and rates[2] == pytest.approx(hoped[2])
    assert rates[4] == pytest.approx(hoped[4] / 2**DOUBT) and rates[8] == pytest.approx(hoped[8] / 4**DOUBT)


def test_who_has_to_have_more_than_a_node_starts_without_knowing_anything(tmp_path: Path) -> None:
    speeds = "application,devices,samples_per_second\nvision,2,10\nvision,4,18\n"
    path = write_log(tmp_path, "name,time,application,work,devices,least\nx,0,vision,600,4,3\n", speeds)
    jobs = read_workload(path, path.parent / "speeds.csv")
    nodes = {"a": 2, "b": 2}
    outcome = simulate(jobs, nodes, setting_of("goodput", nodes, Knowledge(work=False, speeds=False)))
    assert outcome.seconds["x"] == 60 + 30 + round(600 / 18)
