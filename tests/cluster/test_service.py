"""Clusters of real processes: a service, and jobs that wait and count."""

import os
import signal
from pathlib import Path

import pytest
from schedules.waiting import undisturbed
from shared.processes import processes_of

from cjax.cluster import logs, resize, stop, submit
from cjax.job.files import read_lines

from .conftest import TRAINING, LiveCluster, until


def test_jobs_share_and_grow_and_lose_nothing(
    cluster: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start({"a": 2, "b": 2})
    monkeypatch.setenv("WHOSE", "mine")
    monkeypatch.chdir(tmp_path)
    cluster.submit("long", 300, "1:4")
    until(lambda: cluster.state("long").get("starts") and cluster.job("long")["devices"])
    resize("long", "1:2", cluster.folder.place)
    cluster.submit("short", 60, "2:2")
    cluster.submit("crash", 50, "1:1", "assert step < 7, 'seven'")
    cluster.ends("crash", "failed")
    assert "3 starts in a row have not brought a new step" in cluster.state("crash")["why"]
    assert "AssertionError: seven" in logs("crash", cluster=cluster.folder.place)
    cluster.ends("short", "done")
    cluster.ends("long", "done")
    assert cluster.losses("long") == undisturbed(300) and cluster.losses("short") == undisturbed(60)
    lines = read_lines(cluster.folder.history)
    held = [sum(map(len, each["placement"].values())) for each in lines if each["event"] == "start"]
    assert max(held) == 4 and cluster.state("long")["starts"] > 1
    said = logs("long", cluster=cluster.folder.place)
    assert f"place {tmp_path} of mine" in said
    spans = [(n, d, e["time"], e["event"], e["job"]) for e in lines for n, ds in e["placement"].items() for d in ds]
    holders: dict[tuple[str, int], str] = {}
    for node, device, _, event, job in spans:
        if event == "end":
            assert holders.pop((node, device)) == job
        else:
            assert holders.setdefault((node, device), job) == job, "two jobs hold one device"


def test_a_killed_service_leaves_no_process_and_another_goes_on(cluster: LiveCluster) -> None:
    cluster.start({"a": 2})
    cluster.submit("first", 150, "1:2")
    until(lambda: cluster.job("first")["step"] > 10)
    workers = processes_of(cluster.folder.job("first").place)
    assert workers
    os.kill(cluster.pid(), signal.SIGKILL)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers), 10)
    with pytest.raises(RuntimeError, match="is gone: type cjax cluster start"):
        cluster.submit("second", 5, "1:2")
    cluster.start()
    with pytest.raises(RuntimeError, match="runs already"):
        cluster.start()
    cluster.ends("first", "done")
    assert cluster.losses("first") == undisturbed(150)


@pytest.mark.full
def test_a_job_is_resized_and_stopped_and_goes_on_with_the_cluster(cluster: LiveCluster) -> None:
    cluster.start({"a": 4})
    cluster.submit("job", 5000, "1:4")
    cluster.submit("other", 5000, "1:1")
    until(lambda: cluster.job("job")["devices"] == 2 or cluster.job("job")["devices"] == 4)
    resize("job", 1, cluster.folder.place)
    until(lambda: cluster.job("job")["devices"] == 1 and cluster.job("job")["status"] == "running")
    with pytest.raises(ValueError, match="job has plans on 1, 2, 4 devices, and none on 3 to 3"):
        resize("job", "3", cluster.folder.place)
    stop("job", cluster.folder.place)
    assert cluster.state("job")["status"] == "stopped"
    with pytest.raises(RuntimeError, match="job has ended \\(stopped\\)"):
        resize("job", 2, cluster.folder.place)
    stop(cluster=cluster.folder.place)
    step = cluster.state("other")["step"]
    assert cluster.state("other")["status"] == "waiting" and not processes_of(cluster.folder.place)
    cluster.start()
    until(lambda: cluster.job("other")["step"] > step)
    assert cluster.job("job")["status"] == "stopped"
    stop("other", cluster.folder.place)
    assert cluster.losses("other") == undisturbed(len(cluster.losses("other")))


@pytest.mark.full
def test_a_real_job_goes_from_one_process_to_two_and_back_under_other_plans(cluster: LiveCluster) -> None:
    speeds = cluster.folder.place / "speeds.csv"
    speeds.write_text("devices,samples_per_second,plan\n1,80,data=1\n2,90,data=1 tensor=2\n")
    cluster.start({"a": 1, "b": 1, "c": 1})
    for name in ("still", "moved"):
        submit(
            f"{TRAINING}:make", steps=90, devices=1, name=name, speeds=speeds,
            arguments=("0.1",), cluster=cluster.folder.place,
        )  # fmt: skip
    for step, size in ((10, 2), (40, 1)):
        until(lambda step=step: cluster.job("moved")["step"] >= step, 120)
        resize("moved", size, cluster.folder.place)
    for name in ("still", "moved"):
        cluster.ends(name, "done", 120)
    moved, still = (read_lines(cluster.folder.job(name).run.run / "metrics.jsonl") for name in ("moved", "still"))
    losses = [{line["step"]: line["loss"] for line in lines if "loss" in line} for lines in (moved, still)]
    both = sorted(losses[0].keys() & losses[1].keys())
    assert len(both) >= 9 and all(losses[0][step] == pytest.approx(losses[1][step], rel=1e-4) for step in both)
    starts = [line for line in read_lines(cluster.folder.history) if (line["event"], line["job"]) == ("start", "moved")]
    held = [(len(line["placement"]), line["what"]) for line in starts]
    assert held == [(1, "data=1"), (2, "data=1 tensor=2"), (1, "data=1")]
