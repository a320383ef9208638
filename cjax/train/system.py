"""What the hardware does while a run goes on: `system.jsonl`, on a clock of its own."""

import json
import platform
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax

from cjax.job.files import WholeLines
from cjax.train.callbacks import Callback, Training
from cjax.train.readings import Cards, Host, Reading, sum_known


class HardwareLog(Callback):
    """Reads the hardware of this host every few seconds, in a thread.

    In the run's folder: `system.jsonl`; of other processes than the first, `system-1.jsonl` and so on. A line has
    `time` (Unix), `step`, and the numbers; null is one that could not be read, and the first line of each start says
    why. The last line is a `summary`, with energy by step and by sample.

    Args:
        interval: seconds between readings.

    Raises:
        ImportError: psutil is not installed.
    """

    def __init__(self, interval: float = 5.0):
        if interval <= 0:
            raise ValueError(f"hardware is read every {interval} seconds; give a number above 0")
        self._interval = interval
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._host = Host()
        self._cards = Cards([])
        self.summary: dict[str, Any] | None = None

    def on_begin(self, training: Training) -> None:
        if training.folder is None:
            raise ValueError("hardware=True needs a folder to write to; give fit folder=...")
        local = [d for d in training.program.mesh.devices.flat if d.process_index == jax.process_index()]
        gpus = [device for device in local if device.platform == "gpu"]
        self._cards, self._has_gpus = Cards(gpus), bool(gpus)
        number = jax.process_index()
        training.folder.mkdir(parents=True, exist_ok=True)
        self._file = WholeLines(training.folder / (f"system-{number}.jsonl" if number else "system.jsonl"))
        self._is_noted = False
        self._training, self._begin = training, (time.time(), training.step, training.samples)
        unknown = self._host.unknown | self._cards.unknown
        self._write({"host": platform.node(), "devices": [str(device) for device in local], "unknown": unknown})
        self._first = self._last = self._read()
        self._write(self._first)
        self._done.clear()
        self._thread = threading.Thread(target=self._watch, name="hardware", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(self._interval):
            try:
                self._last = self._read()
            except OSError as error:
                self._note(error)
            else:
                self._write(self._last)

    def _read(self) -> Reading:
        return {"step": self._training.step, **self._host.read(), **self._cards.read()}

    def _write(self, values: Mapping[str, Any]) -> None:
        try:
            self._file.add(json.dumps({"time": round(time.time(), 3), **values}))
        except OSError as error:
            self._note(error)

    def _note(self, error: OSError) -> None:
        if not self._is_noted:
            self._is_noted = True
            self._training.note(
                f"what the hardware does could not be written: {error}. Training goes on without these lines; it is "
                "tried again at the next, and not said again"
            )

    def on_end(self, training: Training) -> None:
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._done.set()
        thread.join()
        try:
            last = self._read()
        except OSError as error:
            self._note(error)
            last = self._last
        self._write(last)
        began, step, samples = self._begin
        steps, seconds = training.step - step, time.time() - began
        self.summary = {
            "seconds": round(seconds, 3),
            "steps": steps,
            **energy(self._first, last, steps, training.samples - samples, self._has_gpus),
        }
        self._write({"summary": self.summary})
        self._file.close()
        self._cards.close()
        training.note(said(self.summary))


def energy(first: Reading, last: Reading, steps: int, samples: int, has_gpus: bool = True) -> dict[str, float | None]:
    """Joules by the counters of the cards and of the CPU, each None where one of them could not be read."""
    found: dict[str, float | None] = {}
    for what, ending in (*([("gpu", "/energy_joules")] if has_gpus else []), ("cpu", "cpu_energy_joules")):
        ends = [(first.get(name), last[name]) for name in last if name.endswith(ending)]
        total = sum_known([None if a is None or b is None else b - a for a, b in ends])
        found[f"{what}_joules"] = total
        found[f"{what}_joules_per_step"] = None if total is None or steps < 1 else total / steps
        found[f"{what}_joules_per_sample"] = None if total is None or samples < 1 else total / samples
    return found


def said(summary: Mapping[str, Any]) -> str:
    """The summary in a line."""
    parts = []
    for what, name in (("gpu", "GPUs"), ("cpu", "CPUs")):
        if f"{what}_joules" not in summary:
            continue
        total, step, sample = (summary[f"{what}_joules{end}"] for end in ("", "_per_step", "_per_sample"))
        if total is None:
            parts.append(f"{name} unknown")
        else:
            each = "" if step is None else f" ({step:.4g} J a step, {sample:.4g} J a sample)"
            parts.append(f"{name} {total:,.0f} J{each}")
    return f"energy: {', '.join(parts)}"
