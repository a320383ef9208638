"""No transfer by another thread while a program runs for the first time.

When XLA loads cuDNN's attention, at a program's first run, it records what is put on the device's main stream, and
throws that away (seen with JAX 0.11 and cuDNN 9). A transfer that another thread begins in that moment has to wait for
this stream, and so becomes part of the recording: the program fails, "capturing stream has unjoined work".

>>> with moving():
...     pass
>>> with alone():
...     pass
"""

import contextlib
import threading
from collections.abc import Iterator

_changed = threading.Condition()
_num_moving = 0  # threads that are at a transfer
_is_alone = False  # also while who wants to be still waits for those
_turn = threading.Lock()


@contextlib.contextmanager
def moving() -> Iterator[None]:
    """While a thread besides the main one moves arrays, until these are where they belong."""
    global _num_moving
    with _changed:
        _changed.wait_for(lambda: not _is_alone)
        _num_moving += 1
    try:
        yield
    finally:
        with _changed:
            _num_moving -= 1
            _changed.notify_all()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """While a program runs for the first time, until its results are there."""
    global _is_alone
    with _turn:
        try:  # from the first: an interrupt while this waits would leave everything waiting for ever
            with _changed:
                _is_alone = True
                _changed.wait_for(lambda: not _num_moving)
            yield
        finally:
            with _changed:
                _is_alone = False
                _changed.notify_all()
