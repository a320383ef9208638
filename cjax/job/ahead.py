"""How far the workers of another size go while the present ones train: the less is left for when these have stopped."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cjax.job.beat import TRAINING
from cjax.job.member import BEFORE_DEVICES, BEFORE_STATE
from cjax.job.spec import JobSpec

_MEMORY = Path("/proc/meminfo")
_LIMITED = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))  # of a container


def how_far(spec: JobSpec, beats: Sequence[dict[str, Any] | None], pids: Sequence[int], size: int) -> tuple[str, str]:
    """Where they wait for their turn, or "" where they start behind the present ones; and why.

    Args:
        spec: the job.
        beats: what the present workers say.
        pids: of the present workers.
        size: how many are to follow.
    """
    if any(beat is None or beat["platform"] is None or beat["ended"] is not None for beat in beats):
        return "", "they stop first, since no fit is under way that could go on, or its layers are on a disk"
    if spec.hosts:
        return BEFORE_DEVICES, "they start and import; how much memory the hosts have for two of each is not known here"
    if (platform := next(beat["platform"] for beat in beats if beat)) != "cpu":
        return BEFORE_DEVICES, f"they start and import; two processes do not share the memory of a {platform}"
    if lack := no_room(pids, size):
        return "", f"they stop first: beside them {lack}"
    return BEFORE_STATE, "they start, import and compile"


def no_room(pids: Sequence[int], size: int) -> str:
    """What is missing for so many more processes of the size of the present ones; "" where nothing is."""
    needed, free = size * max(map(resident, pids)), free_memory()
    return f"{size} more would take {needed >> 20:,} MiB, and {free >> 20:,} are free" if needed > free else ""


def is_time_for_spares(beats: Sequence[dict[str, Any] | None]) -> bool:
    """Whether all train, and their first steps are done: before that they need the machine for themselves."""
    return all(
        beat is not None and beat["phase"] == TRAINING and (beat["step"] or 0) > (beat["first"] or 0) for beat in beats
    )


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 of one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def free_memory() -> int:
    """Bytes of memory that processes here may still take."""
    lines = (line.split() for line in _MEMORY.read_text().splitlines())
    free = next(int(size) * 1024 for name, size, *_ in lines if name == "MemAvailable:")
    try:
        most, taken = (file.read_text().strip() for file in _LIMITED)
    except OSError:
        return free
    return free if most == "max" else min(free, int(most) - int(taken))
