"""One run trains in a folder at a time."""

import contextlib
import errno
import fcntl
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from cjax.job.folder import JobFolder

_logger = logging.getLogger("cjax")
# File systems without locks, as Lustre's where it is mounted so, say it in one of these ways.
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_ASKED = 1.0  # seconds in which whoever asks whether a folder is taken has its lock no more


@contextlib.contextmanager
def locked(run: Path) -> Iterator[None]:
    """Nobody else trains in this folder meanwhile, or supervises who does; the system itself gives it free where this
    process is killed.

    Args:
        run: the folder, made if it is not there.

    Raises:
        BlockingIOError: somebody does.
    """
    run.mkdir(parents=True, exist_ok=True)
    with open(JobFolder(run).lock, "a") as file:
        until = time.monotonic() + _ASKED
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    _logger.warning("cjax: %s has no locks (%s), so that two runs in it are not noticed", run, error)
                    break
                if not isinstance(error, BlockingIOError):
                    raise
                if time.monotonic() > until:
                    raise BlockingIOError(
                        error.errno,
                        f"another run trains in {run} now, or is supervised there (cjax status {run}): wait for its "
                        "end, or give another folder",
                    ) from error
            time.sleep(0.05)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                # Also of processes that were forked off meanwhile, whose lock it would stay.
                fcntl.flock(file, fcntl.LOCK_UN)


def is_locked(run: Path) -> bool:
    """Whether somebody trains in this folder, or supervises who does."""
    try:
        with open(JobFolder(run).lock) as file:
            # With others who ask, and given back at once: whoever wants the folder now waits that long.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return False
