"""Outside of JAX: starts the workers of a job, notices when they die or hang, and starts them again on what is left."""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from cjax.job.ahead import how_far, is_time_for_spares, no_room
from cjax.job.files import append_line, read_lines, read_object, write_whole
from cjax.job.folder import JobFolder
from cjax.job.lock import locked
from cjax.job.member import AGAIN, BEFORE_DEVICES, BEFORE_STATE
from cjax.job.processes import Start
from cjax.job.spec import JobSpec, start_line
from cjax.job.state import JobState
from cjax.job.workers import Ending, Workers, show, started

PERIOD = 0.1  # seconds between two looks at the workers
_LEAVING = 0.02  # seconds between two, where all wait for those who leave
_ROOM = 5.0  # seconds between two attempts to write on a disk that is full
_TRIES = 2  # of a place at which no worker comes to life


class Supervisor:
    """One job's.

    Args:
        spec: the job.
        start: starts its workers; on this machine, or by its launcher, if not given.
        out: where what the first worker prints goes; this process's own if None.
        err: where what is said about the workers goes; this process's own if None.
    """

    def __init__(
        self, spec: JobSpec, start: Start | None = None, out: TextIO | None = None, err: TextIO | None = None
    ) -> None:
        self.spec, self.folder = spec, JobFolder(Path(spec.folder))
        self._start, self._out, self._err = start, out, err
        self._told: list[int] = []
        self._failed_starts: dict[str, int] = {}
        self._best = max((line.get("step") or 0 for line in read_lines(self.folder.history)), default=0)
        self._patience = 1.0
        self._next: Workers | None = None  # who get ready: of the size that was asked for, or spares
        self._are_spares = False  # of the size that there is, for when the present ones end
        self._spareless = 0  # the incarnation beside which no spares are started, or none again
        self._leaving: Workers | None = None  # of the size before, who have kept what they had
        self._until = 0.0  # when these are to be gone

    def run(self) -> int:
        """Until the job is done, has failed, or is told to stop; the exit status."""
        self.folder.place.mkdir(parents=True, exist_ok=True)
        with locked(self.folder.run):
            self.state = JobState.of(self.folder, self.spec)
            self.folder.asked.unlink(missing_ok=True)  # of one that nobody supervised any more
            self._settle()
            while True:
                workers = None if self._told else self._begin()
                if workers is None:  # before anybody was started
                    return self._finish("stopped", self._status())
                status = self._until_it_ends(workers)
                if status is not None:
                    return status

    def heed_signals(self) -> None:
        """From now on this process's SIGTERM and SIGINT tell it to stop. Only in the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self.tell)

    def tell(self, number: int, frame: FrameType | None = None) -> None:
        """To stop, as that signal does; from any thread."""
        self._told.append(number)

    # -- one incarnation ----------------------------------------------------------------------------------------------
    def _is_counted(self, incarnation: int) -> bool:
        """Whether it is written down which incarnation it is now, before any of it trains: who is late then knows that
        it is. A job that has run waits for room where a disk is full."""
        self.state.incarnation, self.state.next = incarnation, 0
        self.state.status = "running"
        is_said = False
        while not self._told:
            try:
                write_whole(self.folder.state, self.state.text())
                return True
            except OSError as error:
                if self.state.incarnation == 1:
                    raise
                if not is_said:
                    self._say(f"{error}. Workers start when that can be written; it is tried every {_ROOM:g} s")
                is_said = True
            until = time.monotonic() + _ROOM
            while not self._told and time.monotonic() < until:
                time.sleep(PERIOD)
        return False

    def _begin(self) -> Workers | None:
        """Who trains now: new workers, or those who have got ready. None where we are told to stop before that."""
        places = tuple(place for place in self.state.places if place not in self.state.lost)
        if self._are_spares and self._next is not None and (self._next.places != places or self._next.look()):
            self._drop()
        if self._next is not None:
            return self._take_over(self._next)
        self._see_off(at_once=True)
        self.state.pids = []
        if not self._is_counted(self.state.new_number()):
            return None
        for old in self.folder.beats.glob("*"):
            old.unlink()
        try:
            workers = Workers(self.spec, self.state.incarnation, places, self._patience, self._start, self._out)
        except OSError:
            self._finish("stopped", 1)  # nobody runs
            raise
        self._keep_pids(workers)
        self._note("start", workers=len(places), places=list(places))
        return workers

    def _keep_pids(self, workers: Workers) -> None:
        """Of these, and of those who get ready and who leave."""
        self._list_pids(workers, self._next, self._leaving)
        self._keep()

    def _list_pids(self, *each: Workers | None) -> None:
        processes = [process for some in each if some is not None for process in some.processes]
        self.state.pids = [[process.pid, started(process.pid)] for process in processes]

    def _until_it_ends(self, workers: Workers) -> int | None:
        """The exit status of the job; None where the workers are to be started again."""
        while True:
            time.sleep(PERIOD)
            ending = workers.look()
            workers.show()
            self._see_off()
            if ending is not None:
                return self._ended(workers, ending)
            if self._told:
                return self._stopped(workers)
            if (asked := self._asked()) is not None and not self._prepare(workers, *asked):
                self._resized(workers, asked[0])
                return None
            if self._next is None or self._are_spares:
                self._keep_spares(workers)
            elif self._are_prepared(workers, self._next):
                self._resized(workers, len(self._next.places))
                return None

    def _ended(self, workers: Workers, ending: Ending) -> int | None:
        if ending.kind == "again":
            self._wait(workers.are_gone)  # the others have agreed to leave too
        if ending.kind == "hung":
            workers.ask_where()
        workers.kill()
        workers.show()
        self._note("end", kind=ending.kind, why=ending.why, **workers.facts())
        if ending.kind == "done":
            return self._finish("done", 0)
        if self._told:  # the terminal's or the machine's signal reached the workers as well
            return self._finish("stopped", self._status())
        is_new = workers.step > self._best
        self._best = max(self._best, workers.step)
        self.state.fruitless = 0 if is_new or ending.kind == "again" else self.state.fruitless + 1
        # Where it was no hang after all, but a step that is compiled anew, more patience gets past it.
        self._patience = self._patience * 2 if ending.kind == "hung" and not is_new else 1.0
        self._lose(workers, ending)
        if (over := self._is_over(workers, ending)) is not None:
            return over
        self.state.restarts += 1
        where = f" (stacks: {self.folder.place}/logs/{workers.incarnation}-*.log)" if ending.kind == "hung" else ""
        self._say(f"{ending.why}{where}; starting again ({self.state.restarts} of {self.spec.restarts})")
        return None

    def _lose(self, workers: Workers, ending: Ending) -> None:
        """A place at which no worker comes to life, where others do, is given up."""
        if not ending.is_unseen:
            return
        place = workers.places[ending.rank]
        self._failed_starts[place] = self._failed_starts.get(place, 0) + 1
        if self._failed_starts[place] >= _TRIES and len(workers.places) > self.spec.min_workers:
            self.state.lost.append(place)
            self._say(f"no worker comes to life at {place}: going on with {len(workers.places) - 1}")

    def _is_over(self, workers: Workers, ending: Ending) -> int | None:
        if self.state.restarts >= self.spec.restarts:
            reason = f"it has been started again {self.state.restarts} times, as often as --restarts allows"
        elif self.state.fruitless >= self.spec.fruitless:
            reason = f"{self.state.fruitless} starts in a row have not brought a new step"
        else:
            return None
        self._say(f"{ending.why}; giving up: {reason}. The last lines of worker {ending.rank}:")
        show(self._err or sys.stderr, f"{workers.last_lines(ending.rank)}\n".encode())
        return self._finish("failed", 1)

    def _stopped(self, workers: Workers) -> int:
        self._say(f"{signal.Signals(self._told[0]).name}: workers have {self.spec.grace:g} s to save and leave")
        self._leave(workers)
        self._note("end", kind="stopped", why=signal.Signals(self._told[0]).name, **workers.facts())
        return self._finish("stopped", self._status())

    def _status(self) -> int:
        return AGAIN if self._told[0] == signal.SIGTERM else 128 + self._told[0]

    def _leave(self, workers: Workers) -> None:
        """Workers save and leave, or are ended."""
        workers.tell()
        self._wait(workers.are_gone)
        workers.kill()
        workers.show()

    def _wait(self, are_gone: Callable[[], bool]) -> None:
        """Until all have left, or their time is over, or we are told to stop a second time."""
        before, until = len(self._told), time.monotonic() + self.spec.grace
        while not are_gone() and time.monotonic() < until and len(self._told) <= max(before, 1):
            time.sleep(_LEAVING)

    # -- other sizes --------------------------------------------------------------------------------------------------
    def _asked(self) -> tuple[int, bool] | None:
        """The size that is asked for, and whether the present workers are to stop first."""
        asked = read_object(self.folder.asked)
        if asked is None:
            return None
        self.folder.asked.unlink(missing_ok=True)
        self._drop()  # whatever was asked for before
        self._keep()
        size = int(asked["workers"])
        return (size, bool(asked.get("stop_first"))) if size != len(self.state.places) or self.state.lost else None

    def _prepare(self, workers: Workers, size: int, stops_first: bool) -> bool:
        """Starts workers of another size beside the present ones, as far as that goes; whether it does."""
        waits, why = "", "they stop first"
        if not stops_first and self._start is None:
            waits, why = how_far(self.spec, workers.beats, [process.pid for process in workers.processes], size)
        self._say(f"resizing from {len(workers.places)} to {size} workers: {why}")
        if not waits:
            return False
        self.state.next, self.state.resize = self.state.new_number(), f"to {size} workers, {why}"
        places = self.state.places_of(size)
        try:
            write_whole(self.folder.state, self.state.text())  # or they would not know who they are
            self._next = Workers(self.spec, self.state.next, places, self._patience, None, self._out, waits)
        except OSError as error:
            self._say(f"{error}. The workers of the new size start behind the present ones")
            self.state.next = 0
            return False
        self._keep_pids(workers)
        return True

    def _are_prepared(self, workers: Workers, following: Workers) -> bool:
        """Whether all of the new size wait for their turn. Where one of them fails, the present ones just go on."""
        ending = following.look()
        if ending is None:
            return following.are_ready
        size = len(following.places)
        self._say(
            f"the resize to {size} workers has failed: {ending.why}. The {len(workers.places)} that there are go on. "
            f"(Where it was room for both: cjax resize {self.folder.run} {size} --stop-first.) The last lines of the "
            f"new worker {ending.rank}:"
        )
        show(self._err or sys.stderr, f"{following.last_lines(ending.rank)}\n".encode())
        self._drop()
        self.state.resize = (
            f"to {size} workers has failed: {ending.why} ({self.folder.log(following.incarnation, ending.rank)})"
        )
        self._keep_pids(workers)
        return False

    def _drop(self) -> None:
        """Nobody follows the present workers any more."""
        if self._next is not None:
            self._next.kill()
            shutil.rmtree(self.folder.rehearsal, ignore_errors=True)
        self._next, self.state.next, self.state.resize, self._are_spares = None, 0, "", False

    def _keep_spares(self, workers: Workers) -> None:
        """Keeps processes that have imported all, and wait for the present workers to end by whatever it be. Where they
        fail, nothing else does: the next start is one as without them."""
        if not self.spec.spare or self._start is not None or self._spareless == workers.incarnation:
            return
        if self._next is not None:
            if (ending := self._next.look()) is not None:
                rank = ending.rank
                log = self.folder.log(self._next.incarnation, rank)
                self._give_up_spares(workers, f"{ending.why.replace('worker', 'spare worker', 1)} ({log})")
            return
        if not is_time_for_spares(workers.beats):
            return
        pids = [process.pid for process in workers.processes]
        if not self.spec.hosts and (lack := no_room(pids, len(workers.places))):
            self._give_up_spares(workers, f"beside the workers {lack}")
            return
        self.state.next = self.state.new_number()
        try:
            write_whole(self.folder.state, self.state.text())  # or they would not know who they are
            self._next = Workers(
                self.spec, self.state.next, workers.places, self._patience, None, self._out, BEFORE_DEVICES
            )
        except OSError as error:
            self._give_up_spares(workers, str(error))
            return
        self._are_spares = True
        self._keep_pids(workers)

    def _give_up_spares(self, workers: Workers, why: str) -> None:
        self._say(f"{why}: no spare workers before the next start")
        self._spareless = workers.incarnation
        self._drop()
        self._keep_pids(workers)

    def _resized(self, workers: Workers, size: int) -> None:
        if self._next is not None and self._next.waits == BEFORE_STATE:
            # Who has kept what it had is waited for no longer: it has nothing that the next ones need.
            workers.tell()
            self._wait(workers.have_kept)
            self._leaving, self._until = workers, time.monotonic() + self.spec.grace
            if not workers.have_kept():
                self._see_off(at_once=True)
        else:
            self._leave(workers)
        self._note("end", kind="resized", why=f"resized to {size} workers", **workers.facts())
        self._best = max(self._best, workers.step)
        self.state.size, self.state.lost, self._failed_starts = size, [], {}

    def _take_over(self, workers: Workers) -> Workers | None:
        """It is the turn of those who have got ready, or who are at it, where those before have died meanwhile."""
        if not self._are_spares:
            self.state.size, self.state.lost, self._failed_starts = len(workers.places), [], {}
        self._are_spares, self.state.resize, workers.patience = False, "", self._patience
        self.state.leaving = 0 if self._leaving is None else self._leaving.incarnation
        self._list_pids(workers, self._leaving)  # written with their number: who reads one has the other
        if not self._is_counted(workers.incarnation):
            return None
        self._next = None
        self._note("start", workers=len(workers.places), places=list(workers.places))
        return workers

    def _see_off(self, at_once: bool = False) -> None:
        """Those who leave have the rest of their time, as long as they do nothing else."""
        leaving = self._leaving
        if leaving is None:
            return
        if at_once or leaving.are_gone() or time.monotonic() > self._until or not leaving.have_kept():
            leaving.kill()
            leaving.show()
            self._leaving, self.state.leaving = None, 0
            self._keep()

    # -- what is kept -------------------------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Ends what a supervisor that was killed has left running: its workers save and leave, or are ended."""
        known = [(pid, since) for pid, since in self.state.pids if since is not None]
        self._signal(known, os.kill, signal.SIGTERM)
        self._wait(lambda: all(started(pid) != since for pid, since in known))
        self._signal(known, os.killpg, signal.SIGKILL)
        if self.state.status == "running":
            self._note("end", kind="orphaned", why="the supervisor was killed", **self.state.last_facts())

    @staticmethod
    def _signal(known: Sequence[tuple[int, str]], how: Callable[[int, int], None], number: int) -> None:
        for pid, since in known:
            if started(pid) == since:  # and not another process, that has got its number since
                with contextlib.suppress(ProcessLookupError):
                    how(pid, number)

    def _say(self, text: str) -> None:
        say(text, self._err)

    def _finish(self, status: str, code: int) -> int:
        self._drop()
        self._see_off(at_once=True)
        self.state.status, self.state.pids = status, []
        self.state.restarts = self.state.fruitless = 0
        self._keep()
        return code

    def _keep(self) -> None:
        try:
            write_whole(self.folder.state, self.state.text())
        except OSError as error:  # of a disk that is full, say; what runs goes on
            self._say(f"{error}. cjax status does not know what has happened since")

    def _note(self, event: str, **facts: Any) -> None:
        line = {"event": event, "time": round(time.time(), 3), "incarnation": self.state.incarnation, **facts}
        try:
            append_line(self.folder.history, line)
        except OSError as error:
            self._say(f"{error}. cjax status will not know of this {event}")


def say(text: str, err: TextIO | None = None) -> None:
    show(err or sys.stderr, f"cjax run: {text}\n".encode())


def main(text: str) -> int:
    """Supervises the job of `JobSpec.text()`."""
    try:
        supervisor = Supervisor(JobSpec.of_text(text))
        supervisor.heed_signals()
        return supervisor.run()
    except OSError as error:
        say(str(error))
        return 1


def supervise(spec: JobSpec) -> None:
    """This process becomes the supervisor of a job."""
    sys.stdout.flush()
    line = start_line(spec)
    os.execv(line[0], line)
