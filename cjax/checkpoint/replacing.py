"""A checkpoint takes the place of another, so that a process may be killed at any moment: where the last whole one is
then, and what is left over.

The new one is written beside the name (`.unfinished`), and is whole when its description is there, which is written
last. The old one goes aside (`.replaced`), the new one takes the name, and only then is anything removed: by its
description first, so that half a folder is never taken for a checkpoint. What a run no longer keeps is renamed first
(`.removed`), for the same reason.
"""

import errno
import logging
import os
import shutil
from pathlib import Path

from cjax.checkpoint.description import FILE_NAME, REMOVED, REPLACED, UNFINISHED, checkpoint_steps, folder_of
from cjax.job import check_current

_logger = logging.getLogger("cjax")
# File systems that can't flush a folder say so in one of these ways.
_CANNOT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)


def located(path: Path) -> Path:
    """The folder that holds the checkpoint called `path`: another only where a kill left it under another name."""
    place = folder_of(path)
    if place != path:
        _logger.warning(
            "cjax: %s was being replaced when its process ended; the last whole one is %s, which is read instead. "
            "The next save to this name puts it right.",
            path,
            place.name,
        )
    return place


def settle(path: Path) -> None:
    """Makes good what a kill left around `path`: a whole checkpoint gets its name back, the rest is removed.

    Raises:
        FileExistsError: something that is no part of a checkpoint has one of the names that are needed.
    """
    place = folder_of(path)
    if place != path:
        remove(path)  # at most half of one
        os.replace(place, path)
        sync(path.parent)
    for ending in (UNFINISHED, REPLACED, REMOVED):
        remove(path.with_name(path.name + ending))


def settle_all(folder: Path) -> None:
    """`settle` for each step in the folder of a run, which has no others than whole ones then."""
    steps = checkpoint_steps(folder)
    for entry in sorted(folder.glob("*")):
        name, dot, ending = entry.name.partition(".")
        if not name.isdecimal() or (dot and dot + ending not in (UNFINISHED, REPLACED, REMOVED)):
            continue
        if int(name) in steps:
            settle(folder / name)
        else:
            remove(entry)  # half of one, or one that never had its name


def is_part(path: Path) -> bool:
    """Whether this folder holds a part of a checkpoint, and nothing else."""
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    # Orbax writes under a longer name, as `arrays.orbax-checkpoint-tmp`.
    return bool(names) and all(name == FILE_NAME or name.split(".")[0] == "arrays" for name in names)


def put_in_place(unfinished: Path, path: Path) -> None:
    """Gives a whole checkpoint its name; what had that name before is removed.

    Raises:
        OSError: it could not be renamed; the old one has its name still.
        SupersededError: this process is of a job that has gone on without it.
    """
    check_current()
    replaced = path.with_name(path.name + REPLACED)
    for entry in (*unfinished.rglob("*"), unfinished):
        sync(entry)
    had_one = path.exists()
    if had_one:
        os.replace(path, replaced)
    try:
        os.replace(unfinished, path)
    except OSError:
        if had_one:
            os.replace(replaced, path)
        raise
    for folder in list(path.parents)[:3]:  # those of a run that has just begun have names that are as new
        sync(folder)  # or a power cut could keep the removal and lose the new name
    remove(replaced)


def remove_older(folder: Path, keep: int, written: int) -> None:
    """Removes all but the step just written, which a run that went back has behind others, and the last of the rest."""
    others = [step for step in checkpoint_steps(folder) if step != written]
    for step in others[: max(0, len(others) - (keep - 1))]:
        removed = folder / f"{step}{REMOVED}"
        os.replace(folder_of(folder / str(step)), removed)
        remove(removed)


def remove(folder: Path) -> None:
    """Removes a checkpoint, or a part of one, if it is there: the description first, without which none takes it for
    a whole one.

    Raises:
        FileExistsError: it is something else.
    """
    if not folder.exists():
        return
    if not is_part(folder) and not (folder.is_dir() and not any(folder.iterdir())):
        raise FileExistsError(errno.EEXIST, f"{folder} is in the way, and is no part of a checkpoint: move it away")
    (folder / FILE_NAME).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def sync(path: Path) -> None:
    """Flushes a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(handle)
