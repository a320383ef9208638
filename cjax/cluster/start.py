"""Starts the service of a cluster, as a process of its own that outlives this one."""

import dataclasses
import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from cjax.cluster.folder import ClusterFolder
from cjax.cluster.service import ClusterSettings
from cjax.job.files import read_object
from cjax.job.spec import bare_line, without_launchers

_UP = 120.0  # seconds in which it is there


def start(
    nodes: Mapping[str, int],
    *,
    executor: str = "local",
    card: str = "cpu",
    period: float = 10.0,
    grace: float = 60.0,
    address: str = "",
    cluster: str | Path | None = None,
) -> ClusterFolder:
    """Starts a cluster; back when it takes jobs. Those that it had before go on.

    Args:
        nodes: devices of each; those of the Ray at `address`, if there is one.
        executor: "local", plain processes on this machine; or "ray".
        card: what the devices are: "cpu" for virtual ones, or a card that the planner knows, such as "h100".
        period: seconds from one decision to the next.
        grace: seconds that workers have to save and leave.
        address: of a Ray to join; one is started on this machine, if empty.
        cluster: the folder that it keeps all in; that of CJAX_CLUSTER, or the user's own, if not given.

    Raises:
        ValueError: settings that can't be.
        RuntimeError: it runs already, or does not come up.
    """
    folder = ClusterFolder.of(cluster)
    settings = ClusterSettings(dict(nodes), executor, card, period, grace, address)
    _check(settings)
    if folder.is_alive:
        raise RuntimeError(f"the cluster in {folder.place} runs already: cjax cluster status --cluster {folder.place}")
    folder.jobs.mkdir(parents=True, exist_ok=True)
    os.chmod(folder.place, 0o700)
    folder.settings.unlink(missing_ok=True)
    told = {"folder": str(folder.place), "settings": dataclasses.asdict(settings)}
    line = bare_line("from cjax.cluster.service import main", json.dumps(told))
    environment = {
        name: v for name, v in without_launchers(os.environ).items() if not name.startswith("JAX_COMPILATION")
    }
    with open(folder.log, "ab") as log:
        begun = log.tell()
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
        )
    until = time.monotonic() + _UP
    while not ((read_object(folder.settings) or {}).get("pid") == process.pid and folder.is_alive):
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            process.wait()
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
    for name in ("period", "grace"):
        if not getattr(settings, name) > 0:
            raise ValueError(f"--{name} {getattr(settings, name):g}: it is above 0 seconds")
    if settings.executor == "local" and settings.card != "cpu" and shutil.which("nvidia-smi") is None:
        raise ValueError(f"--card {settings.card}: no NVIDIA driver is on this machine; leave --card out")
