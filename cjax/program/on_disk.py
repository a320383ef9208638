"""The steps that a program keeps on disk, as a loop needs them: what it notes beside each, and goes on from."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from cjax.optim import LossScaleState
from cjax.program.disk_state import identity_of
from cjax.program.program import Program
from cjax.program.state import State
from cjax.program.walking import Walking
from cjax.walk.files import Folder
from cjax.walk.record import records_in


class OnDisk:
    """The steps on disk of one program.

    Args:
      walking: what runs it; all that its layers have is on disk.
    """

    def __init__(self, walking: Walking) -> None:
        self._walking = walking

    @property
    def folder(self) -> str:
        """Where they are."""
        return str(self._files.path)

    @property
    def kept(self) -> tuple[int, dict[str, Any]] | None:
        """The step that was kept last, and what was noted beside it; None if there is none."""
        folder = self._files
        return None if folder.step is None else (folder.step, folder.note)

    def note(self, facts: Mapping[str, Any] | None) -> None:
        """What is kept beside each step from now on, in JSON's types; None: nothing more."""
        self._walking.note = dict(facts or {})

    @property
    def _files(self) -> Folder:
        folder = self._walking._folder
        assert folder is not None, "there are layers on disk"
        return folder

    @staticmethod
    def scaling(state: State) -> LossScaleState:
        """The loss's scale, and how many steps of the whole run changed nothing."""
        return state._scaling


def on_disk(program: Program) -> OnDisk | None:
    """None of a program that keeps some of its layers' state elsewhere."""
    walking = program._walking if isinstance(program, Program) else None
    return OnDisk(walking) if walking is not None and walking._is_durable else None


@dataclass(frozen=True)
class Elsewhere:
    """A step that another program has kept on the disk of this one, or this one under another plan.

    Args:
      folder: where.
      step: which.
      note: what was noted beside it.
      plan: the plan it was kept under, with the number of devices.
      differing: what is not as here: of "plan", "devices", "params", "frozen", "opt" and "model_state".
    """

    folder: Path
    step: int
    note: Mapping[str, Any]
    plan: str
    differing: tuple[str, ...]


def elsewhere(program: Program) -> list[Elsewhere]:
    """The steps of others in the folder that a program was given for its disk, also where its plan keeps none there."""
    given = program._composed.given.disk_folder if isinstance(program, Program) else None
    if given is None:
        return []
    own, found = identity_of(program._composed), list[Elsewhere]()
    for folder, record in records_in(given.absolute(), jax.process_index()):
        there = json.loads(record.identity)
        differing = tuple(name for name in own if there.get(name) != own[name])
        if differing:
            plan = f"{there.get('plan')} on {there.get('devices')} devices"
            found.append(Elsewhere(folder, record.step, record.note, plan, differing))
    return found
