"""What a worker tells its supervisor while it runs: that it lives, what it does, and how far it is.

One small file a worker, written in place at each step and twice a second by a thread. So a process that is stopped is
silent, and one whose thread lives while its steps do not go on is seen as well.
"""

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from cjax.job.folder import JobFolder
from cjax.job.member import AGAIN, BEFORE_DEVICES, BEFORE_STATE, JOB, Member, member

SIZE = 1024  # bytes; a beat is written over the one before
PERIOD = 0.5  # seconds
# Seconds between two looks of who waits for its turn. Spares may wait before the devices for days.
_LOOKS = {BEFORE_DEVICES: 0.05, BEFORE_STATE: 0.01}
SHOW_STACKS = signal.SIGRTMAX - 7  # asks a worker for the stacks of all its threads, on stderr; no one else's signal
IMPORTING, STARTING, READY, RESTORING, COMPILING, TRAINING, EVALUATING, SAVING, CALLING, ENDED = (
    "importing", "starting", "ready", "restoring", "compiling", "training", "evaluating", "saving", "calling back",
    "ended",
)  # fmt: skip


class Doing:
    """What this process does and how far it is; nobody watches it from outside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since = self._stepped = time.monotonic()
        self._facts: dict[str, Any] = {
            "phase": STARTING, "first": None, "step": None, "steps": None, "step_seconds": 0.0, "seconds": {},
            "ended": None, "platform": None,
        }  # fmt: skip

    @property
    def phase(self) -> str:
        return self._facts["phase"]

    @property
    def step_seconds(self) -> float:
        """What a step takes, of late; 0 where that is not known yet."""
        return self._facts["step_seconds"]

    @property
    def moved(self) -> float:
        """When it did anything new, by the monotonic clock."""
        return max(self._since, self._stepped)

    def __str__(self) -> str:
        step = self._facts["step"]
        return f"{self.phase}, {'before the first step' if step is None else f'after step {step}'}"

    def tell(self, **facts: Any) -> None:
        """Numbers that changed: `first` (where the run goes on from), `steps` (of the whole run), `platform`
        (of its devices), `ended`."""
        with self._lock:
            self._facts.update(facts)
            self._write()

    def step(self, step: int) -> None:
        """A step is done."""
        now = time.monotonic()
        with self._lock:
            if self._facts["phase"] == TRAINING and self._facts["step"] is not None:
                before, taken = self._facts["step_seconds"], now - self._stepped
                self._facts["step_seconds"] = round(0.8 * before + 0.2 * taken if before else taken, 4)
            self._stepped = now
            self._facts["step"] = step
            self._turn(TRAINING)
            self._write()

    def turn(self, phase: str) -> None:
        """What the worker does from now on."""
        with self._lock:
            self._turn(phase)
            self._write()

    def begin(self) -> None:
        """What was done so far was done beside the training of others; from now on its time is the job's."""
        with self._lock:
            self._since = self._stepped = time.monotonic()
            self._facts |= {"phase": STARTING, "seconds": {}}
            self._write()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """What the worker does for a while."""
        before, stepped, begun = self.phase, self._stepped, time.monotonic()
        self.turn(phase)
        try:
            yield
        finally:
            self._stepped = stepped + time.monotonic() - begun  # which is no time of the step that is under way
            self.turn(before)

    def _turn(self, phase: str) -> None:
        now, before = time.monotonic(), self._facts["phase"]
        seconds = self._facts["seconds"]
        seconds[before] = round(seconds.get(before, 0.0) + now - self._since, 3)
        self._since = now
        self._facts["phase"] = phase

    def _write(self) -> None:
        """Nobody reads it."""


class Beat(Doing):
    """The beats of one worker.

    Args:
        mine: which worker.
    """

    def __init__(self, mine: Member) -> None:
        super().__init__()
        self._mine = mine
        self._facts |= {"incarnation": mine.incarnation, "rank": mine.rank, "pid": os.getpid(), "count": 0}
        self._facts["seconds"] = {IMPORTING: round(_alive(), 3)}
        file = JobFolder(mine.folder).beat(mine.incarnation, mine.rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        faulthandler.register(SHOW_STACKS, file=2)
        self._write()
        threading.Thread(target=self._go_on, daemon=True, name="beat").start()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # a full disk is no reason to die
            os.pwrite(self._file, json.dumps(self._facts).encode().ljust(SIZE), 0)

    def _go_on(self) -> None:
        is_orphan = False
        while True:
            time.sleep(PERIOD)
            with self._lock:
                self._facts["count"] += 1
                self._write()
            if not self._mine.is_known:
                os._exit(AGAIN)  # late: whatever it has, nobody waits for it
            if self._mine.supervisor and os.getppid() != self._mine.supervisor and not is_orphan:
                # Nobody watches any more, and whoever watches next starts workers of its own: save, and leave.
                is_orphan = True
                os.kill(os.getpid(), signal.SIGTERM)


def _alive() -> float:
    """Seconds since this process was started."""
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")


@functools.cache
def beating() -> Doing:
    """What this process does; a worker's beats begin when this is called first.

    Raises:
        SystemExit: the job has gone on without this process.
        RuntimeError: it is no worker, but was started by one.
    """
    mine = member()
    if mine is None:
        return Doing()
    is_anothers = mine.supervisor and os.getppid() != mine.supervisor
    if is_anothers and mine.is_known and Path(f"/proc/{mine.supervisor}").exists():
        raise RuntimeError(
            f"this process is no worker of the job in {mine.folder}, but was started by one, and has its environment: "
            f"start it without {JOB}, RANK and WORLD_SIZE in it, so that it trains for itself"
        )
    if is_anothers or not mine.is_known:
        _leave(mine)
    return Beat(mine)


def wait_for_turn(where: str) -> None:
    """Of a worker that was started while those before it train: returns when these have left. Of who is at it: at once.
    Who has been at it leaves here.

    Args:
        where: this is, `BEFORE_DEVICES` or `BEFORE_STATE`. Who has missed the first waits at the second.
    """
    mine = member()
    if mine is None or (mine.waits, where) == (BEFORE_STATE, BEFORE_DEVICES) or mine.is_current:
        return
    beating().turn(READY)
    while mine.incarnation != (known := mine.told())[0]:
        if mine.incarnation != known[1]:  # of one and the same look: between two it may have become its turn
            _leave(mine)
        time.sleep(_LOOKS[where])
    beating().begin()


def _leave(mine: Member) -> NoReturn:
    print(f"cjax: the job in {mine.folder} goes on without this process, which leaves", file=sys.stderr)
    raise SystemExit(AGAIN)


def read_beat(file: Path) -> dict[str, Any] | None:
    """The last beat; None where there is none yet, or one that is being written."""
    try:
        found = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
