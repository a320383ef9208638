"""What a user holds."""

from cjax.program.check import Check as Check
from cjax.program.memory import OutOfMemory as OutOfMemory
from cjax.program.parts import Given as Given
from cjax.program.parts import Parts as Parts
from cjax.program.program import Program as Program
from cjax.program.state import State as State
from cjax.program.verify import MismatchError as MismatchError
