"""Random plans for eight devices, of every kind of parallelism and of their combinations."""

import re
from collections.abc import Iterator

import numpy as np

NUM_DEVICES = 8
TENSORS = ("1", "2", "4", "8", "2d:4", "2.5d:4/1", "2.5d:8/2", "3d:8")
SCHEDULES = ("gpipe:2", "1f1b:2", "zero_bubble:2", "interleaved:2/2", "zero_bubble:2/2", "1f1b:4", "gpipe:4",
             "zero_bubble:4")  # fmt: skip


def num_parts(plan: str) -> int:
    found = re.search(r"microbatches=(\d+)", plan)
    return int(found[1]) if found else 1


def size_of(word: str) -> int:
    """The devices of `4`, `2d:4`, `2.5d:8/2` or `1f1b:2`."""
    return int(re.sub(r"^.*:", "", word).split("/")[0])


def kind(plan: str) -> str:
    """What sort of plan it is, without sizes."""
    words = []
    for word in plan.split():
        name, _, value = word.partition("=")
        if name == "microbatches":
            words.append("microbatches")
        elif name == "overlap":
            words.append("overlap")
        elif name == "data":
            continue
        elif name in ("tensor", "sequence", "pipeline"):
            words.append(f"{name}={value.split(':')[0] if ':' in value else '1d' if name == 'tensor' else value}")
        else:
            words.append(f"{name}={value.split('/')[0]}")
    return " ".join(sorted(words)) or "data"


def draw(rng: np.random.Generator, rows: int, has_stack: bool, splits_positions: float) -> str:
    """One plan. Most suit the model; a few must be refused. So many of them, a share, have a sequence word."""
    words, left = [], NUM_DEVICES
    stages = 1
    if rng.random() < (0.35 if has_stack else 0.02):
        schedule = str(rng.choice(SCHEDULES))
        stages = size_of(schedule)
        left //= stages
        words.append(f"pipeline={schedule}")
    fitting = [word for word in TENSORS if size_of(word) <= left]
    weights = np.array([3.0 if word == "1" else 1.0 for word in fitting])
    tensor = str(rng.choice(fitting, p=weights / weights.sum()))
    if tensor != "1":
        words.append(f"tensor={tensor}")
        left //= size_of(tensor)
    if rng.random() < splits_positions:
        mode = str(rng.choice(["ring", "all_to_all", "gather"]))
        if mode == "gather" and ":" not in tensor and tensor != "1":
            words.append("sequence=gather")
        elif mode != "gather" and left > 1:
            words.append(f"sequence={mode}:2")
            left //= 2
    zero = int(rng.choice([0, 1, 2, 3], p=[0.4, 0.2, 0.15, 0.25]))
    if zero and left > 1:
        words.append(f"zero={zero}/{left // 2}" if left >= 4 and rng.random() < 0.2 else f"zero={zero}")
    if stages > 1:
        words.append(f"microbatches={int(rng.choice([n for n in (2, 4, 8) if n >= stages]))}")
    elif rng.random() < 0.3:
        words.append(f"microbatches={int(rng.choice([2, 4]))}")
    if rng.random() < 0.15:
        words.append(f"remat={rng.choice(['block', 'dots'])}")
    parts = num_parts(" ".join(words))
    if stages == 1 and parts > 1 and rng.random() < 0.5:
        words.append(f"overlap={int(rng.choice([n for n in (2, 4) if n <= parts]))}")
    if stages == 1 and rng.random() < 0.1:
        words.append(f"unroll={rng.choice(['layers', 'none'])}")
    return " ".join(words) or "data=8"


def draws(seed: int, number: int, rows: int, has_stack: bool, splits_positions: float) -> list[str]:
    """So many plans, all different."""
    rng, found = np.random.default_rng([seed, 1]), {}
    for _ in range(20 * number):
        if len(found) == number:
            break
        plan = draw(rng, rows, has_stack, splits_positions)
        if shares_rows(plan, rows) or rng.random() < 0.02:
            found[plan] = None
    return list(found)


def shares_rows(plan: str, rows: int) -> bool:
    """Whether each micro-batch's rows can be shared by all devices that see different ones."""
    taken = {name: value for name, value in (word.split("=") for word in plan.split())}
    model = 1
    for name in ("tensor", "sequence", "pipeline"):
        model *= 1 if taken.get(name) in (None, "gather") else size_of(taken[name])
    shards = NUM_DEVICES // model
    mode = taken.get("tensor", "1")
    shards *= {"2d:4": 2, "2.5d:4/1": 2, "2.5d:8/2": 4, "3d:8": 4}.get(mode, 1)
    return rows // num_parts(plan) % shards == 0


def simpler(plan: str) -> Iterator[str]:
    """Plans that ask for less, the boldest first."""
    words = plan.split()
    for i, word in enumerate(words):
        name, _, value = word.partition("=")
        rest = words[:i] + words[i + 1 :]
        if name in ("zero", "remat", "sequence", "tensor", "data", "overlap", "unroll"):
            yield " ".join(rest) or "data=8"
        elif name == "microbatches":
            if "pipeline" not in plan:
                yield " ".join(word for word in rest if not word.startswith("overlap")) or "data=8"
            elif value != "2":
                yield " ".join([*rest, "microbatches=2"])
        elif name == "pipeline":
            yield " ".join(word for word in rest if not word.startswith("microbatches")) or "data=8"
            if value not in ("gpipe:2", "1f1b:2"):
                yield " ".join(["pipeline=1f1b:2", *rest])
        if name == "tensor" and value != "2":
            yield " ".join([*words[:i], "tensor=2", *rest[i:]])
