"""What a worker does for its first step while those before it still train: all that needs none of their state."""

import os
import shutil
from pathlib import Path

import jax

from cjax.checkpoint import Checkpointer
from cjax.job import beating, member
from cjax.job.beat import COMPILING, wait_for_turn
from cjax.job.folder import JobFolder
from cjax.job.member import BEFORE_STATE
from cjax.mesh import together
from cjax.program import Program
from cjax.program.on_disk import on_disk
from cjax.train.resume import of_first


def get_ready(program: Program, folder: Path | None) -> None:
    """Returns when it is this process's turn: at once, where nobody trains before it. Until then nothing of the run in
    `folder` is changed here.

    Raises:
        OutOfMemory: the plan does not fit the devices; those who train go on.
        ValueError: what was kept is of another model.
    """
    mine = member()
    if mine is not None and mine.waits == BEFORE_STATE and mine.is_next:
        beating().turn(COMPILING)
        program.compile()
        if folder is not None and on_disk(program) is None:
            _rehearse(program, folder)
    wait_for_turn(BEFORE_STATE)


def _rehearse(program: Program, folder: Path) -> None:
    """Restores the last checkpoint and lets it go: what that compiles is compiled. Where there is none, or it goes
    meanwhile, restoring takes longer when it counts."""
    with Checkpointer(folder / "checkpoints") as checkpoints:
        last = of_first(checkpoints.latest())
    if last is None:
        return
    # Links, which those who train do not remove with the checkpoint.
    ours = JobFolder(folder).rehearsal
    is_first = jax.process_index() == 0
    try:
        with together("rehearse a restore", ours):
            if is_first:
                shutil.rmtree(ours, ignore_errors=True)
                shutil.copytree(folder / "checkpoints" / str(last), ours, copy_function=os.link)
        with together("rehearse a restore", ours):  # until all have read what the first then removes
            jax.block_until_ready(program.restore(ours))
    except OSError:
        return
    finally:
        if is_first:
            shutil.rmtree(ours, ignore_errors=True)
