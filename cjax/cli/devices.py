"""The devices that a command runs on, before JAX has started any."""

import os
import re
from pathlib import Path
from typing import Any

import jax

from cjax.cards import CARDS
from cjax.jax_compat.backends import without_plugin_failures
from cjax.mesh import resolve_devices, simulate

# Where Linux shows accelerators: NVIDIA's, AMD's, and TPUs in both of their forms.
_ACCELERATOR_FILES = ("nvidia[0-9]*", "kfd", "accel[0-9]*", "vfio/[0-9]*")


def quiet_devices() -> list[Any]:
    """The devices that are here.

    With a GPU plugin and no GPU, as the extra `aot` has it, JAX logs a traceback and goes on with the CPU; where the
    machine shows no accelerator at all there is nothing in it that anyone should read.
    """
    if any(True for pattern in _ACCELERATOR_FILES for _ in Path("/dev").glob(pattern)):
        return resolve_devices()
    with without_plugin_failures():
        return resolve_devices()


def training_devices(text: str | None, default_virtual: int = 8) -> list[Any]:
    """The devices to train on.

    Args:
        text: a number: of the accelerators here, or of virtual CPU devices where there are none; `cpu:8` for virtual
            ones anywhere; None for all accelerators, or `default_virtual` virtual devices.
        default_virtual: see `text`.

    Raises:
        ValueError: text that says neither, cards to compile for, or more accelerators than there are.
    """
    kind, _, number = (text or "").rpartition(":")
    if text is not None and re.split("[:/]", text)[0].lower() in CARDS:
        raise ValueError(
            f"--devices {text} stands for cards that are not here, on which nothing runs; "
            f'cjax plan --target {text} compiles for them, and "cpu:8" trains on virtual devices'
        )
    if text is not None and (not number.isdecimal() or int(number) < 1 or kind not in ("", "cpu")):
        raise ValueError(f'--devices {text}: write a number, as "8", or "cpu:8" for virtual CPU devices')
    if kind == "cpu":
        return simulate(int(number))
    here = quiet_devices()
    is_told = text is None and "JAX_NUM_CPU_DEVICES" in os.environ  # as `cjax run --devices` tells its workers
    if here[0].platform == "cpu" and jax.process_count() == 1 and not is_told:
        return simulate(int(number) if text else default_virtual)
    if text is None:
        return here
    if int(number) > len(here):
        raise ValueError(f'--devices {text}: {len(here)} are here; "cpu:{number}" makes virtual ones')
    return here[: int(number)]
