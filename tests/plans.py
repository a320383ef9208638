"""The plans that every model must train alike under, and which pairs of model and plan the default run takes."""

import itertools
import re
from collections.abc import Mapping, Sequence

NUM_DEVICES = 8

LAYOUTS = (
    "data=8",
    "zero=1",
    "zero=2",
    "zero=3",
    "zero=1/4",
    "zero=3/4",
    "tensor=2",
    "tensor=4",
    "tensor=8",
    "data=4 tensor=2 zero=2",
    "data=2 tensor=4 zero=3",
)
REMAT = ("zero=3 remat=block", "data=4 tensor=2 remat=dots", "data=2 tensor=4 zero=3 microbatches=2 remat=block")
GRIDS = ("tensor=2d:4", "tensor=2d:4 zero=3", "tensor=2.5d:8/2", "tensor=2.5d:8/2 zero=1", "tensor=3d:8")
# Micro-batches that are computed several at a time; with more devices or parts than two, all in one turn or in two.
OVERLAPS = (
    "tensor=4 microbatches=2 overlap=2",
    "data=4 tensor=2 zero=2 microbatches=4 overlap=2",
    "zero=3 microbatches=2 overlap=2",
    "tensor=2d:4 microbatches=4 overlap=2",
    "data=2 tensor=4 zero=3 microbatches=4 overlap=4 remat=block",
)
LOW = tuple(
    f"{layout} precision=bfloat16"
    for layout in (
        "data=8",
        "zero=3",
        "tensor=4",
        "data=4 tensor=2 zero=2 microbatches=2",
        "zero=1/4 remat=block",
        "tensor=2d:4",
        "tensor=3d:8",
        "tensor=4 microbatches=2 overlap=2",
    )
) + tuple(
    f"{layout} precision=float16"
    for layout in ("zero=2", "data=4 tensor=2 microbatches=2", "tensor=2.5d:8/2", "zero=3 remat=block")
)
PLANS = (
    *LAYOUTS,
    *GRIDS,
    *(f"{layout} microbatches={parts}" for parts in (2, 4) for layout in LAYOUTS),
    *(f"{layout} microbatches=2" for layout in GRIDS),
    *(f"tensor={mode} microbatches=8" for mode in ("2d:4", "2.5d:8/2", "3d:8")),  # two rows in each: refused
    *REMAT,
    *OVERLAPS,
    *LOW,
)

# Each layout micro-batched in one way, by two and by four in turns: what the default run leaves out. The number is one
# of the step's loop, and not of its body.
TWINS = frozenset(f"{layout} microbatches={(4, 2)[i % 2]}" for i, layout in enumerate(LAYOUTS))


def num_parts(plan: str) -> int:
    """The micro-batches of a plan."""
    found = re.search(r"microbatches=(\d+)", plan)
    return int(found[1]) if found else 1


def tensor_of(plan: str) -> tuple[str, int, int]:
    """The mode of tensor parallelism, the devices along one axis of it, and its depth."""
    found = re.search(r"tensor=(?:([\d.]+d):)?(\d+)(?:/(\d+))?", plan)
    if not found:
        return "1d", 1, 1
    mode, size, depth = found[1] or "1d", int(found[2]), int(found[3] or 1)
    return mode, round((size / depth) ** {"1d": 1, "2d": 1 / 2, "2.5d": 1 / 2, "3d": 1 / 3}[mode]), depth


def tensor_size(plan: str) -> int:
    """All devices of tensor parallelism."""
    mode, side, depth = tensor_of(plan)
    return depth * side ** {"1d": 1, "2d": 2, "2.5d": 2, "3d": 3}[mode]


def data_size(plan: str) -> int:
    """The devices of `NUM_DEVICES` along data parallelism."""
    return NUM_DEVICES // tensor_size(plan)


def batch_shards(plan: str) -> int:
    """How many parts of the batch there are: a grid splits it too, 2d along rows, 2.5d along depth and rows, 3d along
    two of its three axes."""
    mode, side, depth = tensor_of(plan)
    return data_size(plan) * {"1d": 1, "2d": side, "2.5d": depth * side, "3d": side**2}[mode]


def is_refused(plan: str, rows: int) -> bool:
    """Whether the rows of a micro-batch can't be shared evenly, so that the plan must raise."""
    return rows // num_parts(plan) % batch_shards(plan) != 0


def features(plan: str) -> frozenset[str]:
    """What could break in a plan: its words, but for the sizes of what works alike in every size."""
    words = set(plan.split())
    words |= {"micro-batched"} if num_parts(plan) > 1 else set()
    words |= {f"group of {data_size(plan)}"}
    return frozenset(re.sub(r"^(microbatches|data)=\d+$", r"\1", word) for word in words)


def cover(
    models: Sequence[str],
    plans: Sequence[str],
    times: int,
    always: Sequence[tuple[str, str]] = (),
    traits: Mapping[str, frozenset[str]] | None = None,
) -> list[tuple[str, str]]:
    """Pairs in which every model and every plan comes at least `times` times, each model meeting what it has not yet.

    Greedy and deterministic: the next pair is the one that lacks the most, among equals the first in the tables.

    Args:
      models: names of all models.
      plans: all plans.
      times: how often each must come.
      always: pairs to begin with, such as those that broke once.
      traits: the features of each plan; its words by default.
    """
    traits = traits or {plan: features(plan) for plan in plans}
    chosen = list(dict.fromkeys(always))
    while True:
        short_models = [m for m in models if sum(pair[0] == m for pair in chosen) < min(times, len(plans))]
        short_plans = [p for p in plans if sum(pair[1] == p for pair in chosen) < min(times, len(models))]
        if not short_models and not short_plans:
            return sorted(chosen, key=lambda pair: (models.index(pair[0]), plans.index(pair[1])))
        met = {(model, word) for model, plan in chosen for word in traits[plan]}
        uses = {x: sum(x in pair for pair in chosen) for x in (*models, *plans)}
        pairs = [pair for pair in itertools.product(models, short_plans or plans) if pair not in chosen]
        chosen.append(
            max(
                pairs,
                key=lambda pair: (
                    (pair[0] in short_models) + (pair[1] in short_plans),
                    -uses[pair[0]] - uses[pair[1]],
                    sum((pair[0], word) not in met for word in traits[pair[1]]),
                ),
            )
        )
