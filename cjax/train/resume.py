"""Where a run goes on: behind its last checkpoint, or behind the last step that its plan kept on disk."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from cjax.checkpoint import Checkpointer, inspect
from cjax.program import Program, State
from cjax.program.on_disk import OnDisk, elsewhere
from cjax.train.snapshots import Snapshots

_LONGEST = 2048  # of what data says of itself, beside each step on disk


@dataclass(frozen=True)
class Resumed:
    """A run that goes on.

    Attributes:
        state: where.
        samples: global samples read by then.
        notes: what the user is told.
        unseen: steps that changed nothing, and that `fit` had not looked at when it ended.
        evaluated: whether the evaluation that was due then has been made.
    """

    state: State
    samples: int
    notes: list[str]
    unseen: int = 0
    evaluated: bool = True


class Noting:
    """Notes beside each step on disk what it takes to go on from it.

    Args:
        disk: of the program.
        folder: of the run.
        how: to go on with it.
        identity: of the data.

    Attributes:
        skipped: steps that changed nothing, of those that `fit` has looked at.
    """

    def __init__(self, disk: OnDisk, folder: Path, how: str, identity: Any) -> None:
        self._disk = disk
        self._same = {"run": str(folder.resolve()), "how": how, "data": _brief(identity)}
        self.skipped = 0

    def __call__(self, samples: int) -> None:
        """Steps from now on leave so many global samples read."""
        self._disk.note({**self._same, "samples": int(samples), "skipped": self.skipped})

    def begin(self, state: State) -> None:
        """All that this state has skipped is known."""
        self.skipped = int(self._disk.scaling(state).num_skipped)

    def end(self) -> None:
        """Steps from now on are not this run's."""
        self._disk.note(None)


def has_begun(
    checkpoints: Checkpointer, disk: OnDisk | None, given: Path | None = None, snapshots: Snapshots | None = None
) -> bool:
    """Whether there is anything to go on from. What is not known to be nobody's counts, so that it is not lost; where a
    state was given to the run in the folder `given`, which may be what the disk holds, only what is that run's."""
    kept = None if disk is None else disk.kept
    is_on_disk = kept is not None and bool(kept[0] or kept[1].get("run"))
    if is_on_disk and kept is not None and given is not None:
        is_on_disk = kept[1].get("run") == str(given.resolve())
    in_memory = snapshots is not None and snapshots.newest(-1) is not None
    return is_on_disk or in_memory or of_first(checkpoints.latest()) is not None


def of_first(step: int | None) -> int | None:
    """What the first process sees: another may not see yet what lies on a disk that they share."""
    if jax.process_count() == 1:
        return step
    told = int(multihost_utils.broadcast_one_to_all(np.int32(-1 if step is None else step)))
    return None if told < 0 else told


def go_on(
    program: Program,
    data: Any,
    checkpoints: Checkpointer,
    disk: OnDisk | None,
    folder: Path,
    snapshots: Snapshots | None = None,
) -> Resumed:
    """The latest that was kept of the run in `folder`.

    Args:
        program: under whatever plan.
        data: whose position is told.
        checkpoints: of the run.
        disk: of the program.
        folder: of the run.
        snapshots: of the run; the newest goes before a checkpoint that is older.

    Raises:
        FileNotFoundError: nothing was kept.
        FileExistsError: the disk holds another run.
    """
    identity, last = getattr(data, "identity", None), of_first(checkpoints.latest())
    kept = None if disk is None else disk.kept
    if disk is not None and kept is not None:
        step, note = kept
        if (whose := note.get("run")) not in (None, str(folder.resolve())):
            raise FileExistsError(
                f"{disk.folder} holds the run of {whose} after step {step}, which would be lost: give another "
                "disk_folder= (--disk-folder), or remove that folder if nobody needs it"
            )
        if whose is not None and _is_latest(program, checkpoints, last, step):
            state = program.resume()
            assert state is not None
            notes = [f"resuming after step {step}, from {disk.folder}", *_other(note["data"], _brief(identity))]
            unseen = int(disk.scaling(state).num_skipped) - note["skipped"]
            return Resumed(state, note["samples"], notes, unseen)
    if snapshots is not None and (found := snapshots.newest(-1 if last is None else last)) is not None:
        state, said = snapshots.read(found)
        notes = [f"resuming after step {found[0]}, from a snapshot", *_other(said["data"]["identity"], identity)]
        return Resumed(state, said["data"]["samples"], notes, evaluated=said["evaluated"])
    if last is None:
        raise FileNotFoundError(_nothing(program, folder, disk, kept))
    place = checkpoints.place(last)
    state, meta = program.restore(place), inspect(place).meta
    before, now = meta["plan"], str(program.plan)
    changed = "" if before == now else f", from plan {before} to {now}"
    notes = [f"resuming after step {int(state.step)}{changed}", *_other(meta["data"]["identity"], identity)]
    return Resumed(state, meta["data"]["samples"], notes, evaluated=meta.get("evaluated", True))


def _is_latest(program: Program, checkpoints: Checkpointer, last: int | None, step: int) -> bool:
    """Whether a step on disk is what the run came to. Where another plan has gone on since, its checkpoint is; and of
    one step too, which asks for no more than the same model."""
    if last is None:
        return True
    return last < step and inspect(checkpoints.place()).meta["plan"] == str(program.plan)


def _nothing(program: Program, folder: Path, disk: OnDisk | None, kept: tuple[int, dict[str, Any]] | None) -> str:
    if disk is not None and kept is not None and kept[0]:
        return (
            f"there is no checkpoint in {folder}, and nothing says that {disk.folder}, which holds a state after step "
            f"{kept[0]}, is of this run. If it is, go on from it in Python: state = program.resume(), and "
            "fit(..., state=state, samples=...) with another folder"
        )
    mine = [each for each in elsewhere(program) if each.note.get("run") == str(folder.resolve())]
    if mine:
        last = max(mine, key=lambda each: each.step)
        there = f"there is no checkpoint in {folder}, but {last.folder} holds this run after step {last.step}"
        as_it_was = f"Go on with all options as they were, {last.note['how']}"
        if {*last.differing} <= {"plan", "devices"}:
            return (
                f"{there}, under plan {last.plan}, and this is {program.plan} on {program.mesh.size}. {as_it_was}, and "
                "interrupt that after a step (Ctrl-C), which saves a checkpoint: from that, other plans go on."
            )
        other = "another optimizer" if {*last.differing} <= {"plan", "devices", "opt"} else "another model"
        return f"{there}, and began with {other}, whose state this one can't take. {as_it_was}; or begin anew, in " + (
            "another folder with another --disk-folder (disk_folder=)."
        )
    return (
        f"there is no checkpoint in {folder}: the run ended before it had kept anything. Begin it anew, with "
        'resume="auto" here, or in another folder; with checkpoints every fewer steps less is lost'
    )


def _other(before: Any, now: Any) -> list[str]:
    if before == now:
        return []
    return [
        f"the data is not that of the run so far (it was {before}, it is {now}): the next losses are not those of an "
        "uninterrupted run"
    ]


def _brief(identity: Any) -> Any:
    """What data says of itself, or where that is long what tells it from other data, as it is read back."""
    text = json.dumps(identity)
    return json.loads(text) if len(text) <= _LONGEST else hashlib.sha256(text.encode()).hexdigest()
