"""A cluster of plain processes for a test, which leaves none of them behind."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from schedules import training, waiting
from shared.processes import processes_of

import cjax
from cjax.cluster import client, start, status
from cjax.cluster.folder import ClusterFolder
from cjax.job.files import read_object

WAITING, TRAINING = (Path(str(module.__file__)) for module in (waiting, training))
HOUSE = str(Path(cjax.__file__).parent)


def until(what: Callable[[], Any], seconds: float = 30.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.05)
    return found


class LiveCluster:
    """Told to in few words."""

    def __init__(self, place: Path) -> None:
        self.folder = ClusterFolder(place)

    def start(self, nodes: dict[str, int] | None = None, **more: Any) -> None:
        start(nodes, **{"period": 0.3, "grace": 10.0, "restart": 0.5, "cluster": self.folder.place, **more})

    def submit(self, name: str, steps: int, devices: str, *words: str, seconds: float = 0.02) -> None:
        speeds = self.folder.place / "speeds.csv"
        speeds.write_text("devices,samples_per_second\n" + "".join(f"{n},{n / seconds}\n" for n in (1, 2, 4, 8)))
        waits = json.dumps({n: seconds / n for n in (1, 2, 4, 8)})
        client.submit(
            str(WAITING), steps=steps, devices=devices, name=name, speeds=speeds, cluster=self.folder.place,
            arguments=(HOUSE, waits, *words),
        )  # fmt: skip

    def job(self, name: str) -> dict[str, Any]:
        return next(job for job in status(self.folder.place)["jobs"] if job["name"] == name)

    def state(self, name: str) -> dict[str, Any]:
        return read_object(self.folder.job(name).state) or {}

    def ends(self, name: str, how: str, seconds: float = 30.0) -> None:
        until(lambda: self.state(name).get("status") in ("done", "failed", "stopped"), seconds)
        assert self.state(name)["status"] == how, self.state(name)

    def losses(self, name: str) -> list[str]:
        return (self.folder.job(name).run.run / "losses").read_text().splitlines()

    def pid(self) -> int:
        return (read_object(self.folder.settings) or {})["pid"]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LiveCluster]:
    found = LiveCluster(tmp_path / "cluster")
    found.folder.jobs.mkdir(parents=True)
    yield found
    if found.folder.is_alive:
        os.kill(found.pid(), signal.SIGTERM)
        until(lambda: not found.folder.is_alive)
    until(lambda: not processes_of(found.folder.place), 10)
