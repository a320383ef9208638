"""The steps that a program keeps on disk, as a loop needs them: what it notes beside each, and goes on from."""

from collections.abc import Mapping
from typing import Any

from cjax.optim import LossScaleState
from cjax.program.program import Program
from cjax.program.state import State
from cjax.program.walking import Walking
from cjax.walk.files import Folder


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
