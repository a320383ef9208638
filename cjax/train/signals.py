"""Being told to stop: the step is finished and saved before anything ends."""

import signal
import threading
from types import FrameType

import numpy as np
from jax.experimental import multihost_utils

from cjax.job import LeaveAtOnce

_PATIENCE = 1.0  # seconds between two questions to all processes, at least, where steps are slower than that


class StopRequest:
    """Notices SIGINT and SIGTERM while it is entered. A second SIGTERM ends the process as it always would, a second
    SIGINT at once.

    Signal handlers belong to the main thread; elsewhere nothing is noticed, and nothing changes.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}
        self._at_once = LeaveAtOnce()
        self._every = 0

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._notice)
        self._at_once.__enter__()
        return self

    def _notice(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGTERM, self._before[signal.SIGTERM])  # type: ignore[arg-type]
        # Not as it was: who is started in the background has it ignored, and could not be interrupted twice.
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._before.clear()

    def __exit__(self, *_: object) -> None:
        self._restore()
        self._at_once.__exit__()

    def is_asked(self, step: int, num_processes: int, most: int) -> bool:
        """Whether to ask for it before the next step; with several processes not at every one, since agreeing waits
        for the slowest, but about every second, and each `most` steps at least. The same in all processes."""
        return num_processes == 1 or self._every == 0 or step % min(self._every, most) == 0

    def agreed(self, num_processes: int, step_seconds: float = 0.0) -> signal.Signals | None:
        """The signal that any process got. All must ask at the same step, or they would stop at different ones.

        Args:
            num_processes: of the run.
            step_seconds: what a step takes in this process.
        """
        mine = int(self.signal or 0)
        if num_processes > 1:
            told = multihost_utils.process_allgather(np.array([mine, step_seconds * 1e3], np.int32))
            mine, slowest = np.max(np.reshape(told, (-1, 2)), 0).tolist()
            self._every = max(1, int(_PATIENCE * 1e3 / max(slowest, 1)))
        return signal.Signals(mine) if mine else None
