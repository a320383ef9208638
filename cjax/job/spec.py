"""What a job is, as `cjax run` was told, and the environment of each of its workers."""

import json
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from cjax.job.folder import JobFolder
from cjax.job.member import AHEAD, INCARNATION, JOB, SUPERVISOR

# What launchers set. A worker's place among the others is said by its own supervisor alone.
_LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "CJAX_JOB", "CJAX_INC", AHEAD)
_PLACES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "JAX_COORDINATOR_ADDRESS"),
)
# What srun sets for each process of a step, of which it is told nothing here.
_STEPS = tuple(
    f"SLURM_{name}"
    for name in (
        *("PROCID", "LOCALID", "NODEID", "GTIDS", "NTASKS", "NPROCS", "TASK_PID", "TASKS_PER_NODE", "STEPID"),
        *("STEP_ID", "STEP_NODELIST", "STEP_NUM_NODES", "STEP_NUM_TASKS", "STEP_TASKS_PER_NODE"),
    )
)
_PORTS = range(20000, 30000)  # on other hosts, below those that systems give away by themselves


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job may be told beside what it runs: the same for who types it and for who supervises it.

    Attributes:
        min_workers: with how many the job still goes on, where places are lost.
        restarts: how often workers are started again after a failure.
        fruitless: how many of these may follow each other without a new step.
        devices: so many virtual CPU devices of each process, instead of those that are here.
        grace: seconds that workers have to save and leave.
        hang_after: seconds without a sign of life, or five steps where these take longer, after which a worker hangs.
        silence: seconds that anything besides a step may take: compiling, reading a checkpoint.
        spare: whether as many processes wait beside the workers, with all imported, to take over when these end: a
            start after a kill then takes a few seconds less. They take memory, and run the script up to
            cjax.initialize().
        hosts: one worker on each, on a disk that all of them see; those of the allocation under Slurm. Without any, all
            are on this machine, which then listens on loopback alone.
        launch: the command that starts another one on {host}; srun under Slurm.
    """

    min_workers: int = 1
    restarts: int = 100
    fruitless: int = 5
    devices: int | None = None
    grace: float = 60.0
    hang_after: float = 10.0
    silence: float = 3600.0
    spare: bool = False
    hosts: tuple[str, ...] = ()
    launch: str = "ssh {host}"


@dataclass(frozen=True)
class JobSpec(JobOptions):
    """A job.

    Attributes:
        command: what each worker runs.
        folder: of the run.
        workers: how many.
    """

    command: tuple[str, ...]
    folder: str
    workers: int = 1

    def __post_init__(self) -> None:
        least = {"workers": 1, "min_workers": 1, "restarts": 0, "fruitless": 1, "devices": 1}
        for name, number in least.items():
            value = getattr(self, name)
            if value is not None and value < number:
                raise ValueError(f"--{name.replace('_', '-')} {value}: it is a whole number, at least {number}")
        if self.min_workers > self.workers:
            raise ValueError(f"--min-workers {self.min_workers}: there are {self.workers}; it is at most --workers")
        if self.hosts and len(self.hosts) < self.workers:
            raise ValueError(f"--workers {self.workers}, and {len(self.hosts)} hosts: each has one worker")
        if self.hosts and "{host}" not in self.launch:
            raise ValueError(f'--launch {self.launch!r}: it says where {{host}} goes, as in "ssh {{host}}"')
        for name in ("grace", "hang_after", "silence"):
            if not getattr(self, name) > 0:
                raise ValueError(f"--{name.replace('_', '-')} {getattr(self, name)}: it is above 0 seconds")

    @staticmethod
    def of_text(text: str) -> "JobSpec":
        """What `text` gave."""
        found = json.loads(text)
        given: dict[str, Any] = {field.name: found[field.name] for field in fields(JobSpec) if field.name in found}
        for name in ("command", "hosts"):
            given[name] = tuple(given[name])
        return JobSpec(**given)

    def text(self) -> str:
        return json.dumps(asdict(self))

    @property
    def places(self) -> tuple[str, ...]:
        """Where workers may be: hosts, or places on this machine by number."""
        return self.hosts or tuple(str(number) for number in range(self.workers))

    def line(self, place: str, said: dict[str, str]) -> list[str]:
        """The command that starts a worker at a place, which on another host brings its environment along."""
        if not self.hosts:
            return list(self.command)
        start = shlex.split(self.launch.replace("{host}", place))
        launchers = sorted({*_STEPS, *_PLACES, *filter(_is_launchers, os.environ)} - said.keys())
        without = [word for name in launchers for word in ("-u", name)]
        whole = ["env", "-C", os.getcwd(), *without, *(f"{name}={v}" for name, v in said.items()), *self.command]
        # A shell reads what ssh is given, and nobody else does.
        return [*start, *(map(shlex.quote, whole) if Path(start[0]).name == "ssh" else whole)]

    def environment(self, said: dict[str, str]) -> dict[str, str]:
        """That of what `line` starts: a worker's own; all of ours where it is a launcher, which needs what it has set,
        as srun does to know its allocation."""
        if self.hosts:
            return dict(os.environ)
        return without_launchers(os.environ) | said

    def said(
        self, incarnation: int, rank: int, world: int, address: tuple[str, int], waits: str = ""
    ) -> dict[str, str]:
        """What a worker is told in its environment; `waits` is as of `Member`."""
        is_here = not self.hosts
        told = {
            JOB: self.folder,
            INCARNATION: str(incarnation),
            SUPERVISOR: str(os.getpid() if is_here else 0),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank if is_here else 0),
            "LOCAL_WORLD_SIZE": str(world if is_here else 1),
            "MASTER_ADDR": address[0],
            "MASTER_PORT": str(address[1]),
            "PYTHONUNBUFFERED": "1",  # what is printed is in the log when a worker is killed
        }
        if waits:
            told[AHEAD] = waits
        if "JAX_COMPILATION_CACHE_DIR" not in os.environ or os.environ.get(_KEPT):
            told |= {"JAX_COMPILATION_CACHE_DIR": str(JobFolder(Path(self.folder)).cache(rank)), _KEPT: "1"}
            told |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        if self.devices is not None:
            told |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.devices)}
        return told

    def address(self, incarnation: int, places: tuple[str, ...]) -> tuple[str, int]:
        """Where the workers of an incarnation meet: another port each time, so that none of an older one is there."""
        if self.hosts:
            return places[0], _PORTS[(sum(self.folder.encode()) * 101 + incarnation) % len(_PORTS)]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return "127.0.0.1", free.getsockname()[1]


_KEPT = "CJAX_CACHE_IS_THE_RUNS"


def without_launchers(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment, less what a launcher says of its own processes in it."""
    return {name: value for name, value in environment.items() if not _is_launchers(name)}


def _is_launchers(name: str) -> bool:
    """Whether this is what a launcher says of its own processes."""
    return name.startswith(_LAUNCHERS) or name in _PLACES


def start_line(spec: JobSpec) -> list[str]:
    """The command that supervises a job."""
    return bare_line("from cjax.job.supervisor import main", spec.text())


def bare_line(imports_main: str, text: str) -> list[str]:
    """The command that runs a `main(text)` of cjax in a Python that imports its room and neither JAX nor the rest of
    cjax: it is there at once, and small."""
    code = (
        "import sys, types; cjax = sys.modules['cjax'] = types.ModuleType('cjax'); cjax.__path__ = [sys.argv[1]]; "
        f"{imports_main}; sys.exit(main(sys.argv[2]))"
    )
    return [sys.executable, "-c", code, str(Path(__file__).parent.parent), text]
