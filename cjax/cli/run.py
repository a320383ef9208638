"""`cjax run`."""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from cjax.job.spec import JobSpec
from cjax.job.supervisor import supervise

_SRUN = "srun --nodes=1 --ntasks=1 --overlap --nodelist={host}"


@dataclasses.dataclass(frozen=True)
class Run:
    """Runs a Python script of yours on virtual devices, on those that are here, or as a job that survives.

    The options below are taken wherever they stand on the line, and the rest is the script's; put `--` before its name
    where it has a --workers, --folder or --devices of its own: all that follows that name is the script's then. With
    --workers, the script is started as so many processes, which `cjax.initialize()` joins; they are watched, and
    started again where one dies, hangs or is told to leave. `train` in the place of a script is `cjax train`.

    Attributes:
        script: the file.
        devices: so many virtual CPU devices instead of those that are here; of each worker, where there are several.
        workers: how many processes.
        min_workers: with how many the job still goes on, where places are lost.
        restarts: how often workers are started again after a failure.
        fruitless: how many of these may follow each other without a new step.
        folder: of the run, in which the job keeps what it has to know; a new one below `runs` if not given.
        grace: seconds that workers have to save and leave.
        hang_after: seconds without a sign of life, or five steps where these take longer, after which a worker hangs.
        silence: seconds that anything besides a step may take: compiling, reading a checkpoint.
        hosts: one worker on each, on a disk that all of them see; those of the allocation under Slurm.
        launch: the command that starts another one on {host}; srun under Slurm.
    """

    script: tyro.conf.Positional[str]
    devices: int | None = None
    workers: int | None = None
    min_workers: int = 1
    restarts: int = 100
    fruitless: int = 5
    folder: str | None = None
    grace: float = 60.0
    hang_after: float = 10.0
    silence: float = 3600.0
    hosts: tuple[str, ...] = ()
    launch: str = "ssh {host}"
    arguments: tyro.conf.Suppress[tuple[str, ...]] = ()

    @staticmethod
    def parse(arguments: Sequence[str]) -> "Run":
        ours, rest = list(arguments), []
        if "--" in ours:
            position = ours.index("--")
            ours, rest = ours[:position] + ours[position + 1 : position + 2], ours[position + 2 :]
        options, unknown = tyro.cli(Run, args=ours, prog="cjax run", return_unknown_args=True)
        return dataclasses.replace(options, arguments=(*unknown, *rest))

    def run(self) -> int:
        command = self._command()
        if self.workers is not None:
            supervise(self._job(command, self.workers))
        environment = dict(os.environ)
        if self.devices is not None:
            if self.devices < 1:
                raise ValueError(f"--devices {self.devices}: at least one device is needed")
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.devices)}
        # A new process image: JAX reads its environment as it is imported, and here it is already. Signals and the
        # exit status are the script's own.
        sys.stdout.flush()
        os.execve(sys.executable, command, environment)

    def _command(self) -> list[str]:
        if Path(self.script).is_file():
            return [sys.executable, self.script, *self.arguments]
        if self.script == "train":
            code = "import sys; from cjax.cli import main; sys.exit(main())"
            return [sys.executable, "-c", code, "train", *self.arguments]
        raise FileNotFoundError(f"there is no script {self.script}")

    def _job(self, command: list[str], workers: int) -> JobSpec:
        environment = os.environ
        if int(environment.get("WORLD_SIZE", 1)) > 1 or int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
            raise ValueError(
                "cjax run --workers starts the workers itself, and is here one of several processes: type it once, "
                "without torchrun or srun; or start the script by these, with fit(..., resume='auto') in it"
            )
        hosts, launch = self.hosts, self.launch
        if not hosts and workers > 1 and int(environment.get("SLURM_NNODES", 1)) > 1:
            listed = subprocess.run(["scontrol", "show", "hostnames"], capture_output=True, text=True, check=True)
            hosts, launch = tuple(listed.stdout.split()), _SRUN
        name = "train" if self.script == "train" else Path(self.script).stem
        folder = Path(self.folder or Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
        numbers = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(JobSpec)
            if field.name not in ("command", "folder", "workers", "hosts", "launch")
        }
        print(f"cjax run: {workers} workers; folder {folder}; cjax status {folder}", file=sys.stderr, flush=True)
        return JobSpec(tuple(command), str(folder), workers, hosts=hosts, launch=launch if hosts else "", **numbers)
