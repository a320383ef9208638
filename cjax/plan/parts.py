"""The parts of a plan: how many devices one kind of parallelism gets, checked by arithmetic alone."""

import math
import operator
from dataclasses import dataclass
from typing import Any, Literal, get_args

TensorMode = Literal["1d", "2d", "2.5d", "3d"]
SequenceMode = Literal["ring", "all_to_all", "gather"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero_bubble"]
Precision = Literal["float32", "bfloat16", "float16"]
Remat = Literal["none", "dots", "block"]
LossOf = Literal["batch", "microbatch"]


@dataclass(frozen=True)
class Tensor:
    """How many devices share each matmul, and in which arrangement.

    Args:
      size: devices in all: any number for 1d, q*q for 2d, depth*q*q for 2.5d, l*l*l for 3d.
      mode: "1d" (Megatron), "2d" (SUMMA), "2.5d" (Tesseract) or "3d".
      depth: layers of 2.5d; 1 in every other mode.
    """

    size: int = 1
    mode: TensorMode = "1d"
    depth: int = 1

    def __post_init__(self) -> None:
        store(self, size=whole_number("tensor", self.size), depth=whole_number("tensor depth", self.depth))
        check_choice("tensor", self.mode, TensorMode)
        if self.mode != "2.5d" and self.depth != 1:
            raise ValueError(f"tensor={self}: only 2.5d has a depth, as in tensor=2.5d:8/2")
        power, shape = {"1d": (1, "n"), "2d": (2, "q*q"), "2.5d": (2, "depth*q*q"), "3d": (3, "l*l*l")}[self.mode]
        side = self._side(power)
        if self.depth * side**power != self.size:
            sizes = {self.depth * max(1, s) ** power for s in (side - 1, side, side + 1)}
            nearest = sorted(sorted(sizes, key=lambda size: abs(size - self.size))[:2])
            raise ValueError(
                f"tensor={self}: {self.mode} needs {shape} devices; nearest that work: "
                + ", ".join(f"tensor={self.mode}:{size}{_part(self.depth)}" for size in nearest)
            )

    def _side(self, power: int) -> int:
        return round((self.size / self.depth) ** (1 / power))

    def axis_sizes(self) -> dict[str, int]:
        """Mesh axes of this arrangement, outermost first."""
        match self.mode:
            case "1d":
                return {"tensor": self.size}
            case "2d":
                return {"row": self._side(2), "col": self._side(2)}
            case "2.5d":
                return {"depth": self.depth, "row": self._side(2), "col": self._side(2)}
            case "3d":
                return {"i": self._side(3), "j": self._side(3), "k": self._side(3)}

    def __str__(self) -> str:
        mode = "" if self.mode == "1d" else f"{self.mode}:"
        return f"{mode}{self.size}{_part(self.depth)}"


@dataclass(frozen=True)
class Sequence:
    """How many devices share each sequence. `gather` lives on the tensor axis and takes no size of its own."""

    size: int = 1
    mode: SequenceMode = "ring"

    def __post_init__(self) -> None:
        store(self, size=whole_number("sequence", self.size))
        check_choice("sequence", self.mode, SequenceMode)
        if self.mode == "gather" and self.size != 1:
            raise ValueError(f"sequence=gather:{self.size}: gather lives on the tensor axis, write sequence=gather")

    def __str__(self) -> str:
        return "gather" if self.mode == "gather" else f"{self.mode}:{self.size}"


@dataclass(frozen=True)
class Pipeline:
    """How many stages the layers are cut into, in which order they run, and how many chunks of layers a stage holds."""

    size: int = 1
    schedule: Schedule = "1f1b"
    chunks: int = 1

    def __post_init__(self) -> None:
        store(self, size=whole_number("pipeline", self.size), chunks=whole_number("pipeline chunks", self.chunks))
        check_choice("pipeline", self.schedule, Schedule)
        least, most = {"interleaved": (2, math.inf), "zero_bubble": (1, 2)}.get(self.schedule, (1, 1))
        if not least <= self.chunks <= most:
            allowed = f"{least} or more" if most > 2 else " or ".join(map(str, range(least, int(most) + 1)))
            instead = f"pipeline=interleaved:{self.size}/{max(2, self.chunks)}"
            raise ValueError(f"pipeline={self}: {self.schedule} takes {allowed} chunks a stage; for more, {instead}")
        if self.size == 1 and self.chunks > 1:
            raise ValueError(f"pipeline={self}: chunks need at least 2 stages")

    def __str__(self) -> str:
        return f"{self.schedule}:{self.size}{_part(self.chunks)}"


@dataclass(frozen=True)
class Zero:
    """What data-parallel devices share instead of repeating: 1 optimizer state, 2 also gradients, 3 also parameters.

    `group` limits the sharing to groups of that many devices; None means all of them.
    """

    stage: int = 0
    group: int | None = None

    def __post_init__(self) -> None:
        store(self, stage=whole_number("zero", self.stage, least=0))
        if self.stage > 3:
            raise ValueError(f"zero={self}: the stages are 0, 1, 2 and 3; a group follows a slash, as in zero=3/8")
        if self.group is not None:
            store(self, group=whole_number("zero group", self.group, least=2))
            if self.stage == 0:
                raise ValueError(f"zero={self}: stage 0 shares nothing, so it has no group; write zero=0")

    def __str__(self) -> str:
        return f"{self.stage}{_part(self.group or 1)}"


def store(part: Any, **values: Any) -> None:
    """Sets fields of a frozen dataclass while it is being made: the normalised form is the only one anyone sees."""
    for name, value in values.items():
        object.__setattr__(part, name, value)


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """`value` as an int of at least `least`; NumPy's integers are welcome, True and 4.0 are not."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise ValueError(f"{name} is a whole number of at least {least}, not {value!r}")
    return number


def check_choice(name: str, value: Any, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")


def _part(number: int) -> str:
    return f"/{number}" if number > 1 else ""
