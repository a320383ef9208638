"""Starts the service of a cluster, as a process of its own that outlives this one."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cjax.cluster.folder import ClusterFolder
from cjax.cluster.service import ClusterSettings
from cjax.job.files import read_object
from cjax.job.spec import bare_line, without_launchers
from cjax.job.workers import started

_UP = 120.0  # seconds in which it is there


def start(
    nodes: Mapping[str, int] | None = None,
    *,
    executor: str | None = None,
    card: str | None = None,
    period: float | None = None,
    grace: float | None = None,
    restart: float | None = None,
    address: str | None = None,
    cluster: str | Path | None = None,
) -> ClusterFolder:
    r"""Starts a cluster; back when it takes jobs. Those that it had before go on.

    What is not given is as it was when this cluster was started last; in brackets, what it is the first time.

    Args:
        nodes: devices of each; those of the Ray at `address`, if there is one.
        executor: "local" (the default), plain processes on this machine; or "ray".
        card: what the devices are: "cpu" (the default) for virtual ones, or a card that the planner knows, as "h100".
        period: seconds from one decision to the next (10).
        grace: seconds that workers have to save and leave (60).
        restart: seconds that a change of devices is taken to cost, before one was seen (30).
        address: of a Ray to join; without one, it is started on this machine.
        cluster: the folder that it keeps all in; that of CJAX_CLUSTER, or the user's own, if not given.

    Raises:
        ValueError: settings that can't be.
        RuntimeError: it runs already, or does not come up.

    >>> import tempfile
    >>> from cjax.cluster import logs, resize, status, stop, submit
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     place, script, speeds = Path(folder) / "cluster", Path(folder) / "train.py", Path(folder) / "speeds.csv"
    ...     _ = script.write_text("import time; time.sleep(60)")
    ...     _ = speeds.write_text("devices,samples_per_second\n1,10\n2,18")
    ...     _ = start({"here": 2}, cluster=place)
    ...     name = submit(str(script), steps=10, devices="1:2", speeds=speeds, cluster=place)
    ...     resize(name, 1, cluster=place)
    ...     stop(name, cluster=place)
    ...     found, printed = status(place), logs(name, cluster=place)
    ...     stop(cluster=place)
    >>> [job["name"] for job in found["jobs"]]
    ['train']
    """
    folder = ClusterFolder.of(cluster)
    given = {"nodes": None if nodes is None else dict(nodes), "executor": executor, "card": card, "address": address}
    given |= {"period": period, "grace": grace, "restart": restart}
    before = read_object(folder.settings) or {}
    known = {each.name: before[each.name] for each in dataclasses.fields(ClusterSettings) if each.name in before}
    told: dict[str, Any] = {"nodes": {}} | known | {name: v for name, v in given.items() if v is not None}
    settings = ClusterSettings(**told)
    _check(settings)
    if folder.is_alive:
        raise RuntimeError(f"the cluster in {folder.place} runs already: cjax cluster status --cluster {folder.place}")
    folder.jobs.mkdir(parents=True, exist_ok=True)
    os.chmod(folder.place, 0o700)
    text = json.dumps({"folder": str(folder.place), "settings": dataclasses.asdict(settings)})
    line = bare_line("from cjax.cluster.service import main", text)
    environment = {
        name: v for name, v in without_launchers(os.environ).items() if not name.startswith("JAX_COMPILATION")
    }
    with open(folder.log, "ab") as log:
        begun = log.tell()
        done = subprocess.run(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
        )
    pid, until = int(done.stdout or 0), time.monotonic() + _UP
    while not ((read_object(folder.settings) or {}).get("pid") == pid and folder.is_alive):
        if not pid or started(pid) is None or time.monotonic() > until:
            if pid and started(pid):
                os.kill(pid, signal.SIGKILL)
            with open(folder.log, "rb") as log:
                log.seek(begun)
                said = log.read().decode(errors="replace").strip()
            raise RuntimeError(f"the cluster did not come up: {said.splitlines()[-1] if said else 'it said nothing'}")
        time.sleep(0.05)
    return folder


def _check(settings: ClusterSettings) -> None:
    if settings.executor not in ("local", "ray"):
        raise ValueError(f"--executor {settings.executor}: it is local or ray")
    if settings.address and settings.executor != "ray":
        raise ValueError("--address is that of a Ray: give --executor ray too")
    if not settings.address and (not settings.nodes or min(settings.nodes.values()) < 1):
        raise ValueError("a cluster has a node at least, and each has a device: give --nodes 1x8")
    if settings.executor == "local" and settings.card != "cpu" and len(settings.nodes) > 1:
        raise ValueError(
            f"--nodes: the {settings.card} cards of this machine are one node: give --nodes "
            f"1x{sum(settings.nodes.values())}; several machines are joined by --executor ray --address"
        )
    for name in ("period", "grace", "restart"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"--{name} {getattr(settings, name):g}: it is above 0 seconds")
    if settings.executor == "local" and settings.card != "cpu" and shutil.which("nvidia-smi") is None:
        raise ValueError(f"--card {settings.card}: no NVIDIA driver is on this machine; leave --card out")
