"""A worker that beats and counts steps, and needs no JAX for it; and how tests follow a job of such."""

import time
from collections.abc import Callable
from typing import Any

from cjax.job.files import read_lines, read_object
from cjax.job.folder import JobFolder

# Counts to 40; goes on from the last number that the first worker has saved; `at` is what a test does at a step,
# `early` before any sign of life, `ready` between the two places where a worker waits that is started ahead,
# `late` when all is kept.
WORKER = """
import sys, types
cjax = sys.modules["cjax"] = types.ModuleType("cjax")
cjax.__path__ = [sys.argv[1]]
import os, signal, time
from pathlib import Path
from cjax.job import beating, leave_when_told, member
from cjax.job.beat import read_beat, wait_for_turn
from cjax.job.folder import JobFolder

platform = "cpu"
exec(sys.argv[3])  # before any sign of life
mine, beat = member(), beating()
wait_for_turn("initialize")
exec(sys.argv[4])
wait_for_turn("fit")
told = []
signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
rank, world, number = mine.rank, int(os.environ["WORLD_SIZE"]), mine.incarnation
saved = mine.folder / "saved"
step = first = int(saved.read_text()) if saved.exists() else 0
beat.tell(first=first, steps=40, platform=platform)


def beats(other):
    return (read_beat(JobFolder(mine.folder).beat(number, other)) or {"step": -1})["step"]


while step < 40 and not told:
    time.sleep(0.02)
    # Nobody is further than a step ahead of the others, as collectives have it.
    while not told and any((beats(r) or first) < step for r in range(world)):
        time.sleep(0.005)
    if told:
        break  # else it would be two steps ahead of one that has left
    step += 1
    exec(sys.argv[2])
    beat.step(step)
    if rank == 0 and step % 10 == 0:
        saved.write_text(str(step))
if rank == 0:
    saved.write_text(str(step))
beat.turn("ended")
exec(sys.argv[5])
sys.exit(75 if told else 0)
"""


def until(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)
    return found


def ends(folder: JobFolder) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder.history) if line["event"] == "end"]


def nothing_twice(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """But for the last step, on which workers here do not agree, as those of `fit` do."""
    return 0 <= before["step"] - after["first"] <= 1


def state(folder: JobFolder) -> dict[str, Any]:
    return read_object(folder.state) or {}
