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
Unroll = Literal["auto", "layers", "none"]


@dataclass(frozen=True)
class Tensor:
    """How many devices share each matmul, and in which arrangement.

    Args:
      size: devices in all: any number for 1d, q*q for 2d, depth*q*q for 2.5d, l*l*l for 3d.
      mode: "1d" (Megatron), "2d" (SUMMA), "2.5d" (Tesseract) or "3d".
      depth: layers of 2.5d; 1 in every other mode.

    Raises:
      ValueError: another mode, or a size that it can't arrange, with the nearest that it can.

    1d: Shoeybi et al., "Megatron-LM", 2019. 2d: Xu et al., "An Efficient 2D Method for Training Super-Large Deep
    Learning Models", 2021. 2.5d: Wang et al., "Tesseract", 2021. 3d: Bian et al., "Maximizing Parallelism in
    Distributed Training for Huge Neural Networks", 2021.

    >>> str(Tensor(8, "2.5d", depth=2)), Tensor(4, "2d").axis_sizes()
    ('2.5d:8/2', {'row': 2, 'col': 2})
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
    """How many devices share each sequence. `gather` lives on the tensor axis and takes no size of its own.

    Args:
      size: devices.
      mode: "ring" (keys and values go round), "all_to_all" (positions are exchanged for heads, and back) or "gather"
        (split between matmuls, whole inside of them).

    Raises:
      ValueError: another mode, a size below 1, or one for gather.

    Ring: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023. All-to-all: Jacobs
    et al., "DeepSpeed Ulysses", 2023. Gather: Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022.

    >>> str(Sequence(4)), str(Sequence(mode="gather"))
    ('ring:4', 'gather')
    """

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
    """How many stages the layers are cut into, in which order they run, and how many chunks of layers a stage holds.

    Args:
      size: stages.
      schedule: "1f1b", "gpipe", "interleaved" or "zero_bubble"; `cjax.pipeline` has their tables.
      chunks: 2 or more for interleaved, 1 or 2 for zero_bubble, 1 for the others.

    Raises:
      ValueError: another schedule, sizes below 1, or chunks that the schedule does not take.

    >>> str(Pipeline(4, "interleaved", chunks=2))
    'interleaved:4/2'
    """

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

    Args:
      stage: 0 to 3; 0 shares nothing.
      group: limits the sharing to groups of so many devices, at least 2; None means all of them.

    Raises:
      ValueError: another stage, or a group that is too small or has nothing to share.

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2019.

    >>> str(Zero(3, group=8))
    '3/8'
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
