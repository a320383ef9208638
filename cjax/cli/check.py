"""`cjax check`."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Sequence

import tyro

from cjax.cli.devices import quiet_devices
from cjax.planner.hardware import hardware_of

# What each package is for, and the extra that brings it; None is part of every installation.
_PACKAGES = (
    ("jax", None, ""),
    ("jaxlib", None, ""),
    ("flax", None, ""),
    ("optax", None, ""),
    ("orbax-checkpoint", None, ""),
    ("grain", "data", "to read data in batches"),
    ("tokenizers", "data", "for byte-pair encoding"),
    ("tyro", "cli", "for this command line"),
    ("rich", "cli", "for the progress bar"),
    ("tensorboardX", "log", "for TensorBoard files"),
    ("psutil", "hardware", "to log what the hardware does"),
    ("jax-cuda13-plugin", "aot", "to compile for GPUs that are not here"),
)


@dataclasses.dataclass(frozen=True)
class Check:
    """Shows versions and devices, what is missing, and how to install it."""

    @staticmethod
    def parse(arguments: Sequence[str]) -> "Check":
        return tyro.cli(Check, args=arguments, prog="cjax check")

    def run(self) -> int:
        lines, is_complete = _package_lines()
        print(f"python               {platform.python_version()}")
        print("\n".join(lines))
        devices = quiet_devices()
        facts = hardware_of(devices)
        print(f"devices              {len(devices)} x {facts.name}, {facts.memory / 2**30:.1f} GiB each")
        if devices[0].platform == "cpu":
            print("                     cjax.simulate(8), or cjax run --devices 8, makes 8 virtual ones of them")
        return 0 if is_complete else 1


def _package_lines() -> tuple[list[str], bool]:
    """A line for each package, and whether all that cjax can't do without are there."""
    lines, is_complete = [], True
    for name, extra, purpose in _PACKAGES:
        try:
            lines.append(f"{name:20} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            is_complete = is_complete and extra is not None
            install = f'pip install "cjax[{extra}]"' if extra else "pip install cjax"
            lines.append(f"{name:20} missing{', ' + purpose if purpose else ''}: {install}")
    return lines, is_complete
