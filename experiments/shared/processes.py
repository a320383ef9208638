"""Processes that are there."""

import os
from pathlib import Path


def processes_of(folder: Path) -> list[int]:
    """Those that have this folder in their environment or on their command line, but for this one."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            text = (place / "environ").read_bytes() + (place / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text and int(place.name) != os.getpid():
            found.append(int(place.name))
    return found
