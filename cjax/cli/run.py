"""`cjax run`."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro

from cjax.cli.options import flag
from cjax.job.folder import new_run
from cjax.job.spec import JobOptions, JobSpec
from cjax.job.supervisor import supervise

_SRUN = "srun --nodes=1 --ntasks=1 --overlap --nodelist={host}"


@dataclasses.dataclass(frozen=True)
class Run(JobOptions):
    """Runs a Python script of yours on virtual devices, on those that are here, or as a job that survives.

    The options below are taken wherever they stand on the line, and the rest is the script's; put `--` before its name
    where it has a --workers, --folder or --devices of its own: all that follows that name is the script's then. With
    --workers, the script is started as so many processes, which `cjax.initialize()` joins; they are watched, and
    started again where one dies, hangs or is told to leave. `train` in the place of a script is `cjax train`.

    Attributes:
        script: the file.
        workers: how many processes.
        folder: of the run, in which the job keeps what it has to know; a new one below `runs` if not given.
    """

    script: tyro.conf.Positional[str]
    workers: int | None = None
    folder: str | None = None
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
        self._check()
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

    def _check(self) -> None:
        """Refuses what would be heeded by nobody."""
        defaults = {field.name: field.default for field in dataclasses.fields(JobOptions) if field.name != "devices"}
        given = [flag(name) for name, usual in {**defaults, "folder": None}.items() if getattr(self, name) != usual]
        if self.workers is None and given:
            raise ValueError(
                f"{', '.join(given)}: of a job, which has --workers, such as --workers 2; where they are the script's, "
                f"type -- before it: cjax run -- {self.script} ..."
            )
        if self.folder is not None and Path(self.folder).exists() and not Path(self.folder).is_dir():
            raise NotADirectoryError(f"--folder {self.folder} is a file: name a folder, which is made if it is missing")

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
        said = {field.name: getattr(self, field.name) for field in dataclasses.fields(JobOptions)}
        said |= {"hosts": hosts, "launch": launch}
        spec = JobSpec(tuple(command), str(Path(self.folder or "").absolute()), workers, **said)
        if self.folder is None:
            spec = dataclasses.replace(spec, folder=str(new_run(name)))
        print(f"cjax run: {workers} workers; folder {spec.folder}; cjax status {spec.folder}", file=sys.stderr)
        sys.stderr.flush()
        return spec
