"""What passes that keep nothing need of a device: their programs compiled ahead, in the order in which they run."""

from typing import Any

from cjax.walk.jitted import Jitted
from cjax.walk.measured import num_bytes


class Tally:
    """Compiles the programs of a pass, and notes what a device holds at most beside weights and rows.

    Attributes:
      kept: bytes of what is there from here on, beside what is said of each program.
      peak: the most of all programs so far.
    """

    def __init__(self) -> None:
        self.kept = self.peak = 0

    def run(self, program: Jitted, *args: Any, handed: Any = ()) -> Any:
        """The results of a program, as structs.

        Args:
          program: is compiled, for these arguments.
          args: as structs with their placements.
          handed: those of them, or of what else is there meanwhile, that `kept` has not.
        """
        outs = program.compile(*args)
        assert program.compiled is not None
        stats = program.compiled.memory_analysis()
        made = num_bytes(outs) if stats is None else stats.output_size_in_bytes - stats.alias_size_in_bytes
        self.peak = max(self.peak, self.kept + num_bytes(handed) + program.temporary + max(made, 0))
        return outs
