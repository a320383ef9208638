"""How a job goes, read from the folder of its run: what any terminal can ask."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cjax.job.beat import ENDED, TRAINING, read_beat
from cjax.job.files import read_lines, read_object, write_whole
from cjax.job.folder import JobFolder
from cjax.job.lock import is_locked

_SHOWN = 10  # of the last incarnations


@dataclass(frozen=True)
class Incarnation:
    """What workers did between a start and an end.

    Attributes:
        number: counted from 1.
        workers: how many.
        first: the step it went on from; None if it did not come so far.
        step: the last that it did.
        why: how it ended; empty while it runs.
        seconds: of the first worker, by what it did.
        begin: seconds since the epoch.
        end: the same.
    """

    number: int
    workers: int
    first: int | None
    step: int | None
    why: str
    seconds: dict[str, float]
    begin: float
    end: float


@dataclass(frozen=True)
class Status:
    """How a job goes.

    Attributes:
        status: "running", "done", "failed", "stopped"; "unwatched" where its supervisor was killed.
        step: the last that was done.
        steps: of the whole run, if known.
        saved: the step of the last whole checkpoint, if there is one.
        metrics: what the run wrote last.
        incarnations: all of them.
        resize: what became of the last one that was asked for, if it is not done.
    """

    status: str
    step: int
    steps: int | None
    saved: int | None
    metrics: dict[str, Any]
    incarnations: tuple[Incarnation, ...]
    resize: str = ""

    @property
    def repeated(self) -> int:
        """Steps that were done again, because they were done after the last checkpoint."""
        known = [each for each in self.incarnations if each.first is not None and each.step is not None]
        pairs = zip(known, known[1:], strict=False)
        return sum(max(0, (before.step or 0) - (after.first or 0)) for before, after in pairs)

    @property
    def wall(self) -> float:
        """Seconds from the first start to now, or to the end."""
        return self.incarnations[-1].end - self.incarnations[0].begin if self.incarnations else 0.0

    def seconds(self) -> dict[str, float]:
        """Of the wall time, by what the job did; `away` is when no worker was there."""
        found: dict[str, float] = {}
        for each in self.incarnations:
            for phase, taken in each.seconds.items():
                if phase != ENDED:
                    found[phase] = found.get(phase, 0.0) + taken
        return found | {"away": max(0.0, self.wall - sum(found.values()))}

    @property
    def goodput(self) -> float:
        """The share of the wall time that went into steps that count."""
        done = sum(
            each.step - each.first for each in self.incarnations if each.step is not None and each.first is not None
        )
        useful = 1 - self.repeated / done if done else 0.0
        return useful * self.seconds().get(TRAINING, 0.0) / self.wall if self.wall else 0.0

    def __str__(self) -> str:
        of = f" of {self.steps}" if self.steps else ""
        values = [
            f"{name} {value:,.4g}"
            for name, value in self.metrics.items()
            if (name in ("loss", "validation_loss") or name.endswith("/s")) and isinstance(value, int | float)
        ]
        parts = ", ".join(f"{name} {taken:.1f} s" for name, taken in self.seconds().items() if taken >= 0.05)
        last = self.incarnations[-_SHOWN:]
        workers = f", {last[-1].workers} workers, incarnation {last[-1].number}" if last else ""
        lines = [
            f"job         {self.status}{workers}",
            f"step        {', '.join([f'{self.step}{of}', *values])}",
            f"checkpoint  {'none yet' if self.saved is None else f'after step {self.saved}'}",
            f"lost        {self.repeated} steps were done twice",
            f"goodput     {100 * self.goodput:.0f} % of {self.wall:.0f} s: {parts}",
        ]
        if self.resize:
            lines.append(f"resize      {self.resize}")
        for each in last:
            steps = "no step" if each.first is None else f"step {each.first} to {each.step}"
            lines.append(f"  {each.number:>3}  {each.workers} workers, {steps}: {each.why or 'running'}")
        return "\n".join(lines)


def status_of(run: Path) -> Status:
    """How the job of a folder goes.

    Raises:
        FileNotFoundError: there is none.
    """
    folder = JobFolder(run)
    state, lines = read_object(folder.state), read_lines(folder.history)
    if state is None or not lines:
        raise FileNotFoundError(f"{run} is no folder of a job: cjax run ... --workers 2 --folder {run} makes it one")
    beats = [read_beat(folder.beat(state["incarnation"], rank)) for rank in range(len(lines[-1].get("places", [0])))]
    beat = next((beat for beat in beats if beat), None)
    incarnations = _incarnations(lines, beat)
    metrics = read_lines(run / "metrics.jsonl")
    last: dict[str, Any] = {}
    for line in metrics[-200:]:
        last |= line
    saved = [
        int(each.parent.name)
        for each in (run / "checkpoints").glob("*/checkpoint.json")
        if each.parent.name.isdecimal()
    ]
    status = state["status"]
    if status == "running" and not is_locked(folder.run):
        status = "unwatched (its supervisor was killed: type its cjax run again)"
    steps = [each.step for each in incarnations if each.step is not None]
    return Status(
        status,
        steps[-1] if steps else 0,
        beat["steps"] if beat else None,
        max(saved, default=None),
        last,
        incarnations,
        _resize(folder, state),
    )


def _resize(folder: JobFolder, state: dict[str, Any]) -> str:
    said = state.get("resize", "")  # nothing where those who get ready are spares
    if said and (beat := read_beat(folder.beat(state["next"], 0)) if state.get("next") else None):
        said += f": {beat['phase']}"
    return said


def _incarnations(lines: list[dict[str, Any]], beat: dict[str, Any] | None) -> tuple[Incarnation, ...]:
    begins = {line["incarnation"]: line for line in lines if line["event"] == "start"}
    ends = {line["incarnation"]: line for line in lines if line["event"] == "end"}
    found = []
    for number, begin in begins.items():
        if (end := ends.get(number)) is None:  # still running, or nobody saw its end
            is_this = beat is not None and beat["incarnation"] == number
            now = {"first": beat["first"], "step": beat["step"], "seconds": beat["seconds"]} if is_this and beat else {}
            end = {"why": "", "time": time.time(), **now}
        first = end.get("first")
        step = end.get("step") if end.get("step") is not None else first
        found.append(
            Incarnation(
                number, begin["workers"], first, step, end["why"], end.get("seconds") or {}, begin["time"], end["time"]
            )
        )
    return tuple(found)


def ask_for(run: Path, workers: int, stop_first: bool = False) -> None:
    """Asks the supervisor of a run for another number of workers.

    Args:
        run: its folder.
        workers: how many.
        stop_first: the present ones stop before any of the new ones start.

    Raises:
        FileNotFoundError: the folder is of no job.
        ValueError: a number that can't be.
        RuntimeError: nobody supervises it.
    """
    folder = JobFolder(run)
    state = read_object(folder.state)
    if state is None:
        raise FileNotFoundError(f"{run} is no folder of a job: cjax run ... --workers 2 --folder {run} makes it one")
    hosts = state["spec"]["hosts"]
    if workers < 1 or (hosts and workers > len(hosts)):
        most = f", and at most {len(hosts)}, one on each host" if hosts else ""
        raise ValueError(f"{workers} workers: it is at least 1{most}")
    if not is_locked(folder.run):
        how = f"type its cjax run again, with --workers {workers}"
        if state["status"] == "done":
            raise RuntimeError(f"the job in {run} is done. For more steps, give its script more of them, and {how}")
        raise RuntimeError(f"nobody supervises {run}: {how}")
    write_whole(folder.asked, json.dumps({"workers": workers, "stop_first": stop_first}))
