"""The flavours of parallelism: which words of a plan each of them fixes. All other words are the search's."""

from collections.abc import Callable
from typing import Any

from cjax.plan import Auto, Pipeline, Sequence, Tensor, Zero
from cjax.plan.parts import SequenceMode, TensorMode
from cjax.planner.choice.space import divisors, tensors_of

Words = dict[str, Any]
PLAIN: Words = {"tensor": Tensor(), "sequence": Sequence(), "pipeline": Pipeline(), "precision": "bfloat16"}
MOST_CHUNKS = 6
HOST = 8
WHOLE = Sequence()
BEST = "auto"


def _data(stage: int) -> Callable[[list[int]], list[Words]]:
    """State shared by all, or within hosts of eight where there are several."""

    def words(sizes: list[int]) -> list[Words]:
        groups = [None, HOST] if stage and HOST in sizes[:-1] else [None]
        return [PLAIN | {"zero": Zero(stage, group)} for group in groups]

    return words


def _tensor(mode: TensorMode, sequence: Sequence = WHOLE) -> Callable[[list[int]], list[Words]]:
    def words(sizes: list[int]) -> list[Words]:
        found = [tensor for size in sizes for tensor in tensors_of(mode, size)]
        return [PLAIN | {"tensor": tensor, "sequence": sequence} for tensor in found]

    return words


def _sequence(mode: SequenceMode) -> Callable[[list[int]], list[Words]]:
    return lambda sizes: [PLAIN | {"sequence": Sequence(size, mode)} for size in sizes]


def _pipeline(schedule: Any) -> Callable[[list[int]], list[Words]]:
    chunks = {"interleaved": range(2, MOST_CHUNKS + 1), "zero_bubble": (1, 2)}.get(schedule, (1,))
    return lambda sizes: [PLAIN | {"pipeline": Pipeline(size, schedule, many)} for size in sizes for many in chunks]


def _with_pipelines(tensors: list[Tensor]) -> Callable[[list[int]], list[Words]]:
    """These tensor words beside any pipeline and any copies, positions split between matmuls or not."""
    ways = [Sequence(), Sequence(1, "gather")]
    words = [
        {"tensor": tensor, "sequence": way, "precision": "bfloat16"}
        for tensor in tensors
        for way in (ways if tensor.mode == "1d" and tensor.size > 1 else ways[:1])
    ]
    return lambda sizes: list(words)


# By name, which is as a plan's text would have it: what is fixed, where a flavour has one of these sizes.
FLAVOURS: dict[str, Callable[[list[int]], list[Words]]] = {
    "data": _data(0),
    "zero=1": _data(1),
    "zero=2": _data(2),
    "zero=3": _data(3),
    "tensor": _tensor("1d"),
    "sequence=gather": _tensor("1d", Sequence(1, "gather")),
    "tensor=2d": _tensor("2d"),
    "tensor=2.5d": _tensor("2.5d"),
    "tensor=3d": _tensor("3d"),
    "sequence=ring": _sequence("ring"),
    "sequence=all_to_all": _sequence("all_to_all"),
    "pipeline=gpipe": _pipeline("gpipe"),
    "pipeline=1f1b": _pipeline("1f1b"),
    "pipeline=interleaved": _pipeline("interleaved"),
    "pipeline=zero_bubble": _pipeline("zero_bubble"),
}
# What large models are trained with: tensor parallelism inside of a host, and pipelines between hosts.
COMBINED: dict[str, Callable[[list[int]], list[Words]]] = {
    "tensor and pipeline": _with_pipelines([Tensor(size) for size in (1, 2, 4, 8)]),
    "grid and pipeline": _with_pipelines([Tensor(4, "2d"), Tensor(8, "2.5d", 2), Tensor(8, "3d")]),
}
DATA = ("data", "zero=1", "zero=2", "zero=3")
PIPELINES = tuple(name for name in FLAVOURS if name.startswith("pipeline"))
TENSORS = ("tensor", "sequence=gather", "tensor=2d", "tensor=2.5d", "tensor=3d")
SEQUENCES = ("sequence=ring", "sequence=all_to_all")


def autos(flavour: str, num_devices: int, is_pure: bool) -> list[Auto]:
    """What to search, all of it, for the best plan of a flavour.

    Args:
      flavour: one of `FLAVOURS`, or "auto" for any plan.
      num_devices: that there are.
      is_pure: whether all of them are the flavour's; else some of them, and data parallelism has the rest.
    """
    if flavour == BEST:
        return [Auto({"precision": "bfloat16"}, "auto precision=bfloat16")]
    sizes = [num_devices] if is_pure else divisors(num_devices)[1:]
    return [Auto(words, flavour) for words in (FLAVOURS | COMBINED)[flavour](sizes)]
