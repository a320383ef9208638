"""What a user holds."""

from cjax.program.check import Check as Check
from cjax.program.composed import Composed as Composed
from cjax.program.composed import Given as Given
from cjax.program.memory import OutOfMemory as OutOfMemory
from cjax.program.program import Program as Program
from cjax.program.state import State as State
from cjax.program.verify import MismatchError as MismatchError
