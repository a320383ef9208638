"""What users ask of a cluster, from the command line and from Python: all of it by files in the cluster's folder."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cjax.cluster.folder import ClusterFolder, ClusterJobFolder, check_name
from cjax.cluster.submitted import RULES, Submitted, range_of, sizes_of
from cjax.job.files import read_object, write_whole
from cjax.job.spec import without_launchers
from cjax.job.workers import started
from cjax.scheduler.policy.job import Speed

_PICKED_UP = 30.0  # seconds in which a service that lives has read what it is asked
_READ = 600.0  # that it may take to read a model and to look for its plans


def submit(
    script: str,
    *,
    steps: int,
    devices: str | int | tuple[int, int],
    name: str | None = None,
    batch: str | tuple[int, int] | None = None,
    rate_rule: str | None = None,
    plan: str = "auto",
    speeds: str | Path | None = None,
    arguments: Sequence[str] = (),
    cluster: str | Path | None = None,
) -> str:
    """Gives a job to a cluster; back as soon as it is accepted.

    Args:
        script: `train.py:make`, a function that returns (model, loss, optimizer, data), as `cjax.train.fit` takes data;
            or a script that trains by itself, as `cjax run` takes one.
        steps: that it takes, at the base batch.
        devices: the least and the most that it may have, "1:8".
        name: its own among those of the cluster; that of the script, if not given.
        batch: the least and the most rows of the global batch, where that may change; needs `rate_rule`.
        rate_rule: how the rate of learning follows the batch: "sqrt" or "linear".
        plan: "auto", and behind it words that every plan has to have.
        speeds: a csv file with devices, samples_per_second, and batch and plan where they are known: what the job does
            on each number of devices. Without it the planner says; a script that trains by itself needs one.
        arguments: the script's.
        cluster: its folder; that of CJAX_CLUSTER, or the user's own, if not given.

    Returns:
        the job's name.

    Raises:
        ValueError: a range that holds no legal plan; a name that is taken; options that do not go together.
        FileNotFoundError: there is no such script.
        RuntimeError: the script can't be imported, or the cluster is gone.

    `cjax.cluster.start` has an example.
    """
    folder = ClusterFolder.of(cluster)
    nodes = folder.alive()["nodes"]
    file, _, function = script.rpartition(":") if ".py:" in script else (script, "", "")
    if not Path(file).is_file():
        raise FileNotFoundError(f"there is no script {file}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ValueError(f"--steps {steps!r}: it is a whole number, at least 1")
    least, most = _range("--devices", devices)
    batches = None if batch is None else _range("--batch", batch)
    _check_batch(batches, rate_rule, function, speeds)
    name = name or Path(file).stem
    check_name(name)
    place = folder.job(name)
    if place.place.exists():
        raise ValueError(_taken(name, place))
    sizes = [size for size in sizes_of(nodes) if least <= size <= most]
    if not sizes:
        raise ValueError(
            f"--devices {least}:{most}: a job here is on {', '.join(map(str, sizes_of(nodes)))} devices, parts of one "
            f"node or whole ones; type --devices 1:{max(sizes_of(nodes))}"
        )
    table = None if speeds is None else _given(Path(speeds), sizes_of(nodes), least, most)
    if function:
        call = "import sys; from cjax.cluster.training import main; sys.exit(main(*sys.argv[1:]))"
        command = (sys.executable, "-c", call, str(Path(file).absolute()), function, *arguments)
        asked = {"file": str(Path(file).absolute()), "function": function, "arguments": list(arguments), "plan": plan}
        asked |= {"range": [least, most], "all": sizes_of(nodes), "card": folder.alive()["card"], "batches": batches}
        read = _read(asked)
        base = read["batch"] if batches is None else batches[0]
        planned = tuple(Speed(**each) for each in read["speeds"])
        table = planned if table is None else _with_plans(table, planned, base)
    elif table is None:
        raise ValueError(
            f"{script} trains by itself, and only who wrote it knows how fast: give --speeds, a csv file with devices "
            "and samples_per_second; or name a function in it that returns (model, loss, optimizer, data), as "
            f"{script}:make"
        )
    else:
        command = (sys.executable, str(Path(file).absolute()), *arguments)
        base = min(speed.batch for speed in table)
    job = Submitted(
        name, command, os.getcwd(), without_launchers(os.environ), steps, least, most, table, base, rate_rule,
        time.time(),
    )  # fmt: skip
    _keep(place, job)
    return name


def _keep(place: ClusterJobFolder, job: Submitted) -> None:
    try:
        place.place.mkdir(parents=True)  # of two who take one name at once, one has it
    except FileExistsError:
        raise ValueError(_taken(job.name, place)) from None
    os.chmod(place.place, 0o700)  # the environment may hold passwords
    write_whole(place.submitted, job.text())


def _taken(name: str, place: ClusterJobFolder) -> str:
    status = (read_object(place.state) or {}).get("status", "waiting")
    return f"there is a job {name!r} already ({status}, in {place.place}): give another --name, such as {name}-2"


def _range(option: str, given: Any) -> tuple[int, int]:
    try:
        return range_of(given)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _check_batch(batches: Any, rule: str | None, function: str, speeds: Any) -> None:
    if (batches is None) != (rule is None):
        raise ValueError("--batch and --rate-rule go together: a larger batch wants another rate, and only you know it")
    if rule is not None and rule not in RULES:
        raise ValueError(f"--rate-rule {rule}: it is one of {', '.join(RULES)}")
    if batches is not None and (not function or speeds is not None):
        raise ValueError("--batch is for `train.py:make` without --speeds: a batch that changes is cjax's to make")


def _given(path: Path, sizes: Sequence[int], least: int, most: int) -> tuple[Speed, ...]:
    """What a user's own csv file says of the sizes that there are here."""
    lines = _rows(path)
    found = [
        Speed(
            int(_number(row, "devices", path)),
            _number(row, "samples_per_second", path),
            _number(row, "batch", path) if row.get("batch") else 1.0,
            row.get("plan") or "",
        )
        for row in lines
    ]
    table = tuple(speed for speed in found if speed.devices in sizes)
    if not any(least <= speed.devices <= most for speed in table):
        known = ", ".join(str(speed.devices) for speed in table) or "none"
        raise ValueError(f"--devices {least}:{most}: {path} has speeds on {known} devices, and none that is meant")
    return table


def _rows(path: Path) -> list[dict[str, str]]:
    words = [[word.strip() for word in line.split(",")] for line in path.read_text().splitlines() if line.strip()]
    if not words or not {"devices", "samples_per_second"} <= set(words[0]):
        raise ValueError(f"{path} needs the columns devices and samples_per_second, and may have batch and plan")
    return [dict(zip(words[0], each, strict=False)) for each in words[1:]]


def _number(row: Mapping[str, str], column: str, path: Path) -> float:
    try:
        return float(row.get(column, ""))
    except ValueError:
        raise ValueError(f"{path}: {column} is {row.get(column)!r}, not a number") from None


def _with_plans(table: Sequence[Speed], planned: Sequence[Speed], base: float) -> tuple[Speed, ...]:
    """The user's speeds, of which those without a plan take the planner's."""
    plans = {speed.devices: speed.plan for speed in planned}
    if missing := [speed.devices for speed in table if not speed.plan and speed.devices not in plans]:
        raise ValueError(f"on {missing[0]} devices no plan works: leave that line out of --speeds, or give its plan")
    return tuple(dataclasses.replace(speed, batch=base, plan=speed.plan or plans[speed.devices]) for speed in table)


def _read(asked: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own reads of the user's function: plans and speeds.

    Raises:
        ValueError: no legal plan.
        RuntimeError: the file can't be imported, or its function raises.
    """
    with tempfile.TemporaryDirectory() as place:
        answer = Path(place) / "answer.json"
        code = "import sys; from cjax.cluster.reading import main; sys.exit(main(*sys.argv[1:]))"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(max(asked["all"]))}
        line = [sys.executable, "-c", code, json.dumps(asked), str(answer)]
        try:
            done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=_READ)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{asked['file']} has not been read within {_READ:g} s") from None
        found = read_object(answer)
    if found is None:
        raise RuntimeError(f"{asked['file']} could not be read:\n{done.stderr.strip()[-2000:]}")
    if "error" in found:
        raise (ValueError if found["kind"] == "plan" else RuntimeError)(found["error"])
    return found


# -- jobs that are there ----------------------------------------------------------------------------------------------
def status(cluster: str | Path | None = None) -> dict[str, Any]:
    """What all jobs did a second ago: `nodes`, and `jobs` with name, status, devices, plan, rate and predicted end.

    Args:
        cluster: its folder; that of CJAX_CLUSTER, or the user's own, if not given.

    Raises:
        RuntimeError: the cluster is gone.

    `cjax.cluster.start` has an example.
    """
    folder = ClusterFolder.of(cluster)
    folder.alive()
    found = read_object(folder.status) or {"nodes": {}, "jobs": [], "time": time.time()}
    known = {job["name"] for job in found["jobs"]}
    for place in sorted(folder.jobs.glob("*/submitted.json")):
        if place.parent.name not in known and (job := Submitted.of(place)) is not None:
            found["jobs"].append({"name": job.name, "status": "waiting", "devices": 0, "step": 0, "steps": job.steps,
                                  "least": job.least, "most": job.most, "plan": "", "rate": None, "end": None,
                                  "starts": 0, "why": "", "submitted": job.time, "ended": None})  # fmt: skip
    return found


def resize(name: str, devices: str | int | tuple[int, int], cluster: str | Path | None = None) -> None:
    """Gives a job another range of devices; back when the cluster has read it.

    Args:
        name: the job's.
        devices: the least and the most that it may have, "1:8"; "4" is just so many.
        cluster: its folder; that of CJAX_CLUSTER, or the user's own, if not given.

    Raises:
        ValueError: no such job, or it has no plan in that range.
        RuntimeError: the job has ended, or the cluster is gone.

    `cjax.cluster.start` has an example.
    """
    folder = ClusterFolder.of(cluster)
    folder.alive()
    least, most = _range("devices", devices)
    place = folder.known(name)
    job = Submitted.of(place.submitted)
    assert job is not None, "it is known"
    sizes = sorted({speed.devices for speed in job.speeds})
    if not any(least <= size <= most for size in sizes):
        raise ValueError(
            f"{name} has plans on {', '.join(map(str, sizes))} devices, and none on {least} to {most}: type "
            f"cjax cluster resize {name} {sizes[0]}:{sizes[-1]}"
        )
    _wish(folder, place, name, {"least": least, "most": most})


def stop(name: str | None = None, cluster: str | Path | None = None) -> None:
    """Ends a job, or a whole cluster; back when it has ended.

    A job saves first. Those of a cluster that is stopped go on when it is started again.

    Args:
        name: the job's; None stops the cluster.
        cluster: its folder; that of CJAX_CLUSTER, or the user's own, if not given.

    Raises:
        ValueError: no such job.
        RuntimeError: the job has ended already, or does not end; or the cluster is gone.

    `cjax.cluster.start` has an example.
    """
    folder = ClusterFolder.of(cluster)
    settings = folder.alive()
    patience = 2 * settings["grace"] + _PICKED_UP
    if name is None:
        pid, since = settings["pid"], started(settings["pid"])
        os.kill(pid, signal.SIGTERM)
        _until(lambda: started(pid) != since, patience, f"the service (process {pid}) still runs: {folder.log}")
        return
    place = folder.known(name)
    _wish(folder, place, name, {"stop": True})
    _until(lambda: _status_of(place) in ("done", "failed", "stopped"), patience, f"{name} has not ended")


def logs(name: str, rank: int = 0, cluster: str | Path | None = None) -> str:
    """What was said about a job's workers, and what one of them printed since it was started last.

    Args:
        name: the job's.
        rank: of the worker, from 0.
        cluster: its folder; that of CJAX_CLUSTER, or the user's own, if not given.

    Raises:
        ValueError: no such job.

    `cjax.cluster.start` has an example.
    """
    place = ClusterFolder.of(cluster).known(name)
    said = place.said.read_text(errors="replace") if place.said.exists() else ""
    state = read_object(place.run.state)
    printed = place.run.log(state["incarnation"], rank) if state else None
    return said + (printed.read_text(errors="replace") if printed is not None and printed.exists() else "")


def _status_of(place: ClusterJobFolder) -> str:
    return (read_object(place.state) or {}).get("status", "waiting")


def _wish(folder: ClusterFolder, place: ClusterJobFolder, name: str, wish: dict[str, Any]) -> None:
    if (now := _status_of(place)) in ("done", "failed", "stopped"):
        raise RuntimeError(f"{name} has ended ({now}); cjax cluster logs {name} shows what it printed")
    write_whole(place.wish, json.dumps(wish))
    _until(lambda: not place.wish.exists(), _PICKED_UP, f"the service does not answer; {folder.log} may say why")


def _until(what: Callable[[], bool], seconds: float, otherwise: str) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise RuntimeError(otherwise)
        time.sleep(0.1)
