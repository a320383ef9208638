"""A cluster on Ray: real raylets on this machine. Only where Ray is installed."""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from schedules.waiting import undisturbed

from cjax.cluster import start
from cjax.cluster.on_ray import check_address
from cjax.job.files import read_lines

from .conftest import LiveCluster, until

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='Ray is not installed: pip install "cjax[ray]"'
)


def test_a_ray_that_listens_without_a_token_is_not_joined() -> None:
    with pytest.raises(ValueError, match="10.0.0.5:6379: whoever reaches a Ray without a token .* RAY_AUTH_MODE=token"):
        check_address("10.0.0.5:6379", {})
    check_address("10.0.0.5:6379", {"RAY_AUTH_MODE": "token"})
    for here in ("127.0.0.1:6379", "localhost:6379", "ray://127.0.0.1:10001"):
        check_address(here, {})


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r'--executor ray needs Ray: pip install "cjax\[ray\]"'):
        start({"a": 2}, executor="ray", cluster=tmp_path)


@pytest.mark.full
@needs_ray
def test_jobs_outlive_the_death_of_a_node_and_nobody_without_the_token_comes_in(cluster: LiveCluster) -> None:
    cluster.start({"a": 2, "b": 2}, executor="ray")
    (raylet,) = found("--node-name=b")
    gcs = next(word.partition("=")[2] for word in command(raylet) if word.startswith("--gcs-address="))
    code = f"import ray; ray.init(address={gcs!r}, _node_ip_address='127.0.0.2')"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    refused = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, timeout=60)
    assert refused.returncode and "uthenticat" in refused.stderr, refused.stderr[-500:]
    cluster.submit("job", 1000, "1:4", seconds=0.1)
    until(lambda: cluster.job("job")["status"] == "running" and cluster.job("job")["step"] > 20)
    workers = [int(beat) for beat in pids_of(cluster, "job")]
    assert cluster.job("job")["devices"] == 4 and len(workers) == 2
    os.kill(raylet, signal.SIGKILL)
    cluster.ends("job", "done", 120)
    assert cluster.losses("job") == undisturbed(1000)
    starts = [line for line in read_lines(cluster.folder.history) if line["event"] == "start"]
    assert set(starts[0]["placement"]) == {"a", "b"} and set(starts[-1]["placement"]) == {"a"}
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in workers))
    os.kill(cluster.pid(), signal.SIGTERM)
    until(lambda: not cluster.folder.is_alive and not found("--node-name="))


def pids_of(cluster: LiveCluster, name: str) -> list[str]:
    """Of the workers of a job."""
    place = str(cluster.folder.job(name).run.run).encode()
    environments = ((path.parent.name, path) for path in Path("/proc").glob("[0-9]*/environ"))
    return [pid for pid, path in environments if b"CJAX_JOB=" + place in _read(path)]


def found(word: str) -> list[int]:
    """Raylets with this on their command line."""
    places = (path.parent for path in Path("/proc").glob("[0-9]*/cmdline"))
    return [int(place.name) for place in places if any(w.startswith(word) for w in command(int(place.name)))]


def command(pid: int) -> list[str]:
    return _read(Path(f"/proc/{pid}/cmdline")).decode(errors="replace").split("\0")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
