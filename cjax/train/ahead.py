"""What a worker does for its first step while those before it still train: all that needs no state."""

from cjax.job import beating, member
from cjax.job.beat import COMPILING, wait_for_turn
from cjax.job.member import BEFORE_STATE
from cjax.program import Program


def get_ready(program: Program) -> None:
    """Returns when it is this process's turn: at once, where nobody trains before it. Until then nothing of the run's
    folder is read or written here.

    Raises:
        OutOfMemory: the plan does not fit the devices; those who train go on.
    """
    mine = member()
    if mine is not None and mine.waits == BEFORE_STATE and not mine.is_current:
        beating().turn(COMPILING)
        program.compile()
    wait_for_turn(BEFORE_STATE)
