"""What signals do to a process of a job while no loop heeds them."""

import os
import signal
import sys
import threading
from types import FrameType

from cjax.job.member import AGAIN

_INTERRUPTED = 128 + signal.SIGINT


def leave_when_told() -> None:
    """From now on SIGTERM ends this process with the status that says "again", wherever its Python is.

    JAX takes the signal for itself as processes join each other, and would swallow it: so this is called right behind.
    A loop that has something to save heeds it in its own way for as long as it runs. Only in the main thread.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    sys.exit(AGAIN)


class LeaveAtOnce:
    """While it is entered, the second SIGINT ends the process there and then: also where the main thread is in compiled
    code, which a handler in Python would wait for. Only in the main thread, and where nobody else (an event loop) is
    told of signals. Not in a notebook, whose kernel is to outlive what runs in it.
    """

    def __init__(self) -> None:
        self._pipe: tuple[int, int] | None = None

    def __enter__(self) -> "LeaveAtOnce":
        if threading.current_thread() is not threading.main_thread() or "ipykernel" in sys.modules:
            return self
        ours = os.pipe()
        os.set_blocking(ours[1], False)
        before = signal.set_wakeup_fd(ours[1], warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            for end in ours:
                os.close(end)
            return self
        self._pipe = ours
        threading.Thread(target=_count, args=(ours[0],), daemon=True, name="interrupts").start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)
            os.close(self._pipe[1])  # ends the thread, which closes its own end
            self._pipe = None


def _count(pipe: int) -> None:
    interrupts = 0
    while numbers := os.read(pipe, 64):
        interrupts += numbers.count(signal.SIGINT)
        if interrupts > 1:
            os._exit(_INTERRUPTED)
    os.close(pipe)
