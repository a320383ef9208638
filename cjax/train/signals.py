"""Being told to stop: the step is finished and saved before anything ends."""

import signal
import threading
from types import FrameType

import numpy as np
from jax.experimental import multihost_utils


class StopRequest:
    """Notices SIGINT and SIGTERM while it is entered. A second one ends the process as it always would.

    Signal handlers belong to the main thread; elsewhere nothing is noticed, and nothing changes.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._notice)
        return self

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def __exit__(self, *_: object) -> None:
        self._restore()

    def agreed(self, num_processes: int) -> signal.Signals | None:
        """The signal that any process got. All must ask at the same step, or they would stop at different ones."""
        mine = int(self.signal or 0)
        if num_processes > 1:
            mine = int(np.max(multihost_utils.process_allgather(np.int32(mine))))
        return signal.Signals(mine) if mine else None
