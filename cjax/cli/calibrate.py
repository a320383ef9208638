"""`cjax calibrate`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from cjax.calibrate import calibrate
from cjax.cli.devices import training_devices
from cjax.planner.profile import write_profile


@dataclasses.dataclass(frozen=True)
class CalibrateCommand:
    """Times matmuls, reading and writing, and collectives on the devices that are here, and keeps the rates.

    It takes less than a minute. Planning for these devices goes by them.

    Attributes:
        devices: a number: of the accelerators here, or of virtual CPU devices where there are none; cpu:8 for virtual
            ones anywhere. All accelerators, or 8 virtual devices, if not given.
        out: a file to keep the rates in, rather than where planning looks for them (~/.cache/cjax, or cjax in
            $XDG_CACHE_HOME).
        seconds: when to stop.
    """

    devices: str | None = None
    out: Path | None = None
    seconds: float = 45.0

    @staticmethod
    def parse(arguments: Sequence[str]) -> "CalibrateCommand":
        return tyro.cli(CalibrateCommand, args=arguments, prog="cjax calibrate")

    def run(self) -> int:
        if not 0 < self.seconds <= 3600:
            raise ValueError(f"--seconds {self.seconds:g}: give some, up to 3600")
        if self.out is not None and self.out.is_dir():
            raise ValueError(f"--out {self.out}: it is a folder; name a file, as {self.out / 'profile.json'}")
        profile = calibrate(training_devices(self.devices), self.seconds)
        path = write_profile(profile, self.out)
        print(f"{profile}\nkept in {path}")
        if profile.shares_cores:
            print(
                "These devices are virtual: the rates are what each has while all of them share the processor's cores."
            )
        return 0
