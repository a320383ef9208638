"""How fast a run goes, and how much of the hardware it uses."""

import time
from collections import deque
from typing import Any

import jax

from cjax.planner.hardware import hardware_of
from cjax.program import Program

_KEPT = 100  # of the latest steps


class Meter:
    """Rates from the times at which steps are known to be done.

    Args:
        program: what runs; its report says how many operations a step is and how much memory it takes.
        sequence: tokens per sample, or None where samples are not text.
    """

    def __init__(self, program: Program, sequence: int | None):
        self._unit = "samples/s" if sequence is None else "tokens/s"
        self._size = 1 if sequence is None else sequence
        report = program.report()
        self._memory = report.memory.total
        self._devices = list(program.mesh.devices.flat)
        hardware = hardware_of(self._devices)
        peak = hardware.matmul_flops(program.plan.precision or "float32")
        self._peak_steps = peak * hardware.num_devices / report.flops.model if peak and report.flops else None
        self._seconds: float | None = None
        self._last: tuple[float, int] | None = None
        self._steps: deque[float] = deque(maxlen=_KEPT)

    @property
    def names(self) -> tuple[str, ...]:
        return (self._unit, "mfu", "memory")

    @property
    def step_seconds(self) -> tuple[float, ...]:
        """What each of the latest steps took; without those that were compiled first, or came after a pause."""
        return tuple(self._steps)

    def tick(self, samples: int) -> dict[str, float]:
        """A step is done, and `samples` were read so far. The first says nothing of speed: it was compiled."""
        now = time.perf_counter()
        last, self._last = self._last, (now, samples)
        facts: dict[str, float] = {}
        if last is not None and samples > last[1]:
            seconds = now - last[0]
            self._steps.append(seconds)
            # A running mean over about ten steps: single ones jitter, since dispatch runs ahead of the devices.
            self._seconds = seconds if self._seconds is None else 0.9 * self._seconds + 0.1 * seconds
            facts["samples/s"] = (samples - last[1]) / self._seconds
            facts[self._unit] = facts["samples/s"] * self._size
            if self._peak_steps is not None:
                facts["mfu"] = 1 / (self._seconds * self._peak_steps)
        facts["memory"] = self._used_memory()
        return facts

    def pause(self) -> None:
        """What comes now is no training; the next step is measured from its own beginning."""
        self._last = None

    def _used_memory(self) -> int:
        """Peak bytes on one device: what the device says, or the compiler where it says nothing, as CPUs do."""
        local = [device for device in self._devices if device.process_index == jax.process_index()]
        stats: list[Any] = [device.memory_stats() for device in local]
        return max((each["peak_bytes_in_use"] for each in stats if each), default=self._memory)
