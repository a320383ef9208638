"""The arrays of a state as a program keeps them between two steps: where each is, and of what form."""

from cjax.program.program import Program
from cjax.program.state import State


def stored_shape(program: Program) -> State | None:
    """A state of placed shapes; None of a program that walks, which has most of its state elsewhere."""
    if not isinstance(program, Program) or program._walking is not None:
        return None
    return program._composed.state_shape
