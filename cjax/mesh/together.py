"""What several processes do together, or none of them."""

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils


@contextlib.contextmanager
def together(what: str, folder: Path) -> Iterator[None]:
    """What every process does before any goes on: where one fails, all raise."""
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    if jax.process_count() > 1:
        fine = multihost_utils.process_allgather(np.array(failed is None)).tolist()
        if failed is None and not all(fine):
            whose = [i for i, is_fine in enumerate(fine) if not is_fine]
            failed = OSError(errno.EIO, f"processes {whose} could not {what} in {folder}; what they raised says why")
    if failed is not None:
        raise failed
