"""The workers of one incarnation: started together, watched together, ended together."""

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO

from cjax.job.beat import ENDED, READY, TRAINING, read_beat
from cjax.job.beat import PERIOD as BEAT
from cjax.job.folder import JobFolder
from cjax.job.member import AGAIN
from cjax.job.processes import LocalProcess, Start, WorkerProcess
from cjax.job.spec import JobSpec

STEPS = 5  # that a step may take the time of
_SHOWN = 20  # lines of what a worker printed last
_QUIET = 2 * BEAT  # seconds without a beat, where somebody hangs
_UNSEEN = 60.0  # seconds after the first sign of life of some, when all others are to have given one
_TO_ANSWER = 0.5  # seconds to print where one is
_AWAY = 1.0  # seconds between two looks of ours, which are a tenth apart where we are not stopped

Kind = Literal["done", "again", "died", "hung"]


@dataclass(frozen=True)
class Ending:
    """How an incarnation ended by itself.

    Attributes:
        kind: "done", all have; "again", some left because they were told to, not by us; "died"; "hung".
        rank: whose fault it was.
        why: for people.
        is_unseen: that one never gave a sign of life, and others did: its place may be lost.
    """

    kind: Kind
    rank: int
    why: str
    is_unseen: bool = False


class Workers:
    """The worker processes of one incarnation.

    Args:
        spec: the job.
        incarnation: which.
        places: where each is to be.
        patience: what the job's `hang_after` is multiplied by.
        start: starts each process; on this machine, or a launcher's, if not given.
        out: where what the first worker prints is passed on to.
        waits: where they wait for their turn, if others train meanwhile.
    """

    def __init__(
        self,
        spec: JobSpec,
        incarnation: int,
        places: Sequence[str],
        patience: float = 1.0,
        start: Start | None = None,
        out: TextIO | None = None,
        waits: str = "",
    ) -> None:
        self.spec, self.incarnation, self.places, self.waits = spec, incarnation, tuple(places), waits
        self._folder, self.patience, self._out = JobFolder(Path(spec.folder)), patience, out
        self.beats: list[dict[str, Any] | None] = [None] * len(places)
        self._heard = [time.monotonic()] * len(places)  # when something changed in a worker's beats
        self._moved = list(self._heard)  # when it did anything new
        self._first_seen: float | None = None
        self._listened = time.monotonic()
        self._shown = 0
        address = spec.address(incarnation, self.places)
        self.processes: list[WorkerProcess] = []
        try:
            for rank, place in enumerate(self.places):
                said = spec.said(incarnation, rank, len(self.places), address, waits)
                log = self._folder.log(incarnation, rank)
                line = spec.line(place, said)
                if start is None:
                    self.processes.append(LocalProcess(line, spec.environment(said), log))
                else:
                    self.processes.append(start(rank, line, said, log))
        except BaseException:
            self.kill()  # those that were started wait for the others
            raise

    # -- watching -----------------------------------------------------------------------------------------------------
    def look(self) -> Ending | None:
        """How it ended; None as long as all goes well. To be asked several times a second."""
        self._listen()
        codes = [process.poll() for process in self.processes]
        for rank, code in enumerate(codes):
            if code in (None, 0):
                continue
            return self._ending(rank, code)
        if all(code == 0 for code in codes):
            ended = {beat["ended"] for beat in self.beats if beat} & {"SIGTERM", "SIGINT"}
            return Ending("again", 0, f"stopped by {ended.pop()}") if ended else Ending("done", 0, "all is done")
        return self._hanging(codes)

    def _ending(self, rank: int, code: int) -> Ending:
        if code == AGAIN:
            return Ending("again", rank, f"worker {rank} was told to leave, and has saved what it had")
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        unseen = self.beats[rank] is None and any(self.beats)
        return Ending("died", rank, f"worker {rank} ended {how}{self._when(rank)}", unseen)

    def _when(self, rank: int) -> str:
        beat = self.beats[rank]
        if beat is None:
            return ", before it had given any sign of life"
        return f" after step {beat['step']}, {beat['phase']}" if beat["step"] is not None else f", {beat['phase']}"

    def _listen(self) -> None:
        now = time.monotonic()
        if (away := now - self._listened) > _AWAY:
            # We were stopped ourselves, the machine asleep maybe, and so may the workers have been: it is not their
            # silence.
            self._heard = [heard + away for heard in self._heard]
            self._moved = [moved + away for moved in self._moved]
        self._listened = now
        for rank in range(len(self.places)):
            beat, before = read_beat(self._folder.beat(self.incarnation, rank)), self.beats[rank]
            if beat is None or beat == before:
                continue
            self._heard[rank] = now
            if before is None or (beat["step"], beat["phase"]) != (before["step"], before["phase"]):
                self._moved[rank] = now
            self.beats[rank] = beat
            self._first_seen = now if self._first_seen is None else self._first_seen

    def _hanging(self, codes: list[int | None]) -> Ending | None:
        now, least = time.monotonic(), self.spec.hang_after * self.patience
        for rank, beat in enumerate(self.beats):
            if codes[rank] is not None:
                continue
            if beat is None:
                if self._first_seen is not None and now - self._first_seen > max(_UNSEEN, least):
                    return Ending("hung", rank, f"worker {rank} has not given any sign of life", True)
                continue
            silent, still = now - self._heard[rank], now - self._moved[rank]
            is_step = beat["phase"] == TRAINING
            limit = max(least, STEPS * beat["step_seconds"]) if is_step else self.spec.silence * self.patience
            if silent > least or (still > limit and beat["phase"] != READY):  # whose turn may come in a week
                return self._culprit(now, rank)
        return None

    def _culprit(self, now: float, rank: int) -> Ending:
        """Who waits for whom: all others wait for one that is stopped, or for the one that is a step behind."""
        silent = [now - heard for heard in self._heard]
        stopped = max(range(len(silent)), key=silent.__getitem__)
        if silent[stopped] > _QUIET:
            why = f"worker {stopped} is stopped: no sign of life for {silent[stopped]:.0f} s"
            return Ending("hung", stopped, why)
        steps = [-1 if beat is None or beat["step"] is None else beat["step"] for beat in self.beats]
        behind = min(range(len(steps)), key=steps.__getitem__) if len(set(steps)) > 1 else rank
        still = now - self._moved[behind]
        return Ending("hung", behind, f"worker {behind} hangs{self._when(behind)}: nothing new for {still:.0f} s")

    # -- what it came to ----------------------------------------------------------------------------------------------
    @property
    def step(self) -> int:
        """The last that any worker has done, and that of which the run goes on where none was."""
        return max((max(beat["step"] or 0, beat["first"] or 0) for beat in self.beats if beat), default=0)

    @property
    def are_ready(self) -> bool:
        """Whether all wait for their turn."""
        return all(beat is not None and beat["phase"] == READY for beat in self.beats)

    def facts(self) -> dict[str, Any]:
        """For the history."""
        firsts = [beat["first"] for beat in self.beats if beat and beat["first"] is not None]
        beat = self.beats[0]
        return {
            "first": max(firsts, default=None),
            "step": self.step if firsts else None,
            "seconds": beat["seconds"] if beat else {},
        }

    def show(self) -> None:
        """Passes on what the first worker has printed since."""
        with _opened(self._folder.log(self.incarnation, 0)) as file:
            file.seek(self._shown)
            text = file.read()
        self._shown += len(text)
        show(self._out or sys.stdout, text)

    def last_lines(self, rank: int) -> str:
        """What a worker printed last."""
        with _opened(self._folder.log(self.incarnation, rank)) as file:
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_SHOWN:])

    # -- ending -------------------------------------------------------------------------------------------------------
    def tell(self) -> None:
        """Asks all to save and leave."""
        for process in self.processes:
            process.stop()

    def ask_where(self) -> None:
        """Where workers of this machine are now: the stacks of their threads, into their logs."""
        if not self.spec.hosts and any(process.poll() is None for process in self.processes):
            for process in self.processes:
                process.show_stacks()
            time.sleep(_TO_ANSWER)

    def are_gone(self) -> bool:
        """Whether all have left."""
        self._listen()
        self.show()
        return all(process.poll() is not None for process in self.processes)

    def have_kept(self) -> bool:
        """Whether all have left, or have kept what they had and are about to."""
        gone = self.are_gone()
        return gone or all(beat is not None and beat["phase"] == ENDED for beat in self.beats)

    def kill(self) -> None:
        """Ends all that is left, with what they have started."""
        for process in self.processes:
            process.kill()
        self._listen()


def show(stream: TextIO, text: bytes) -> None:
    """Prints. Where nobody reads it any more (`| tee log`, ended), or its disk is full, this and all that follows goes
    nowhere: workers are watched all the same."""
    try:
        stream.buffer.write(text)
        stream.flush()
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _opened(path: Path) -> BinaryIO:
    return open(path if path.exists() else os.devnull, "rb")


def started(pid: int) -> str | None:
    """When a process was started, in the system's own ticks, which tells it from another of the same number; None if
    there is none, or what is left of one."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
