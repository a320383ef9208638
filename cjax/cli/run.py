"""`cjax run`."""

import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import tyro


@dataclasses.dataclass(frozen=True)
class Run:
    """Runs a Python script of yours on virtual devices, or on those that are here.

    What follows the script's name is the script's; put `--` before that name if it has a --devices of its own.

    Attributes:
        script: the file.
        devices: so many virtual CPU devices instead of those that are here.
    """

    script: tyro.conf.Positional[str]
    devices: int | None = None
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
        if not Path(self.script).is_file():
            raise FileNotFoundError(f"there is no script {self.script}")
        environment = dict(os.environ)
        if self.devices is not None:
            if self.devices < 1:
                raise ValueError(f"--devices {self.devices}: at least one device is needed")
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(self.devices)}
        # A new process image: JAX reads its environment as it is imported, and here it is already. Signals and the
        # exit status are the script's own.
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, self.script, *self.arguments], environment)
