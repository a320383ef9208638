"""Why this plan: for each of its words, what the nearest other values of it would cost."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cjax.plan import Pipeline, Plan, Tensor, Zero
from cjax.plan import Sequence as SequencePlan
from cjax.planner.choice.scored import Question, Scored, of_limit, size_text
from cjax.planner.choice.space import MODES, Space, arrangement_of, divisors, tensors_of
from cjax.planner.table import PRECISIONS, REMATS

WORDS = ("tensor", "sequence", "expert", "pipeline", "microbatches", "overlap", "zero", "remat", "precision")
# What the parts of a step's time are, in the words in which differences are told.
KINDS = {
    **dict.fromkeys(("matmul", "attention", "elementwise"), "arithmetic"),
    **dict.fromkeys(("tensor", "sequence", "data", "gather", "pipeline"), "transfers"),
    **{"recompute": "recomputation", "bubble": "idle stages", "optimizer": "the optimizer", "overhead": "overhead"},
}
SMALL = 5e-3  # of a step: differences below it are none


@dataclass(frozen=True)
class Alternative:
    """One other value of one word.

    Args:
      word: as the plan would have it: "tensor=4".
      scored: what would come of it; None where it can't be had.
      why: what it would cost, or why it can't be had.
      changes: other words that could not stay as they were: "microbatches=4".
    """

    word: str
    scored: Scored | None
    why: str
    changes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Explanation:
    """A plan, and by each of its words (as written, "zero=0" where it is not) the nearest other values."""

    chosen: Scored
    words: Mapping[str, tuple[Alternative, ...]]


def explain(question: Question, space: Space, plan: Plan) -> Explanation | str:
    """What each word of a plan is there for.

    Args:
      question: the model and the devices.
      space: what may be chosen from.
      plan: resolved.

    Returns:
      For each word its nearest other values, all other words as they are but for `data`, which is what is left, and
      micro-batches that would not divide; or why the plan itself can't be had.
    """
    chosen = question.score(plan)
    if isinstance(chosen, str):
        return chosen
    plan = chosen.plan
    words: dict[str, tuple[Alternative, ...]] = {}
    for name in WORDS:
        found = []
        for other in _neighbours(name, plan, space):
            word = _word(other, name)
            if word not in {each.word for each in found}:
                found.append(_alternative(question, space, chosen, other, name))
        words[_word(plan, name)] = tuple(found)
    return Explanation(chosen, words)


def _word(plan: Plan, name: str) -> str:
    value = getattr(plan, name)
    if name == "sequence" and value == SequencePlan():
        return "sequence=1"
    return f"{name}=1" if name == "pipeline" and value.size == 1 else f"{name}={value}"


def _alternative(question: Question, space: Space, chosen: Scored, other: Plan, name: str) -> Alternative:
    word, num = _word(other, name), chosen.num_devices
    legal = space.nearest(other, num)
    if isinstance(legal, str):
        reason = question.split_or_reason(arrangement_of(other))
        return Alternative(word, None, first_line(reason if isinstance(reason, str) else legal))
    scored = question.score(legal)
    if isinstance(scored, str):
        return Alternative(word, None, first_line(scored))
    kept = [each for each in ("microbatches", "zero") if each != name and getattr(legal, each) != getattr(other, each)]
    # What was changed along with the word itself is told too.
    kept += ["expert"] if name != "expert" and other.expert != chosen.plan.expert else []
    kept += ["microbatches"] if name == "overlap" and other.microbatches != chosen.plan.microbatches else []
    return Alternative(word, scored, difference(chosen, scored), tuple(_word(legal, each) for each in kept))


def difference(chosen: Scored, other: Scored) -> str:
    """What another plan costs beside the one that was chosen, in a few words.

    >>> from cjax.plan import Plan
    >>> one = Scored(Plan(data=1), 1, {"params": 0}, 2**30, {"matmul": 0.5, "data": 0.1}, 0.5, 0.7, 0.4, 1024)
    >>> difference(one, replace(one, seconds={"matmul": 0.5, "data": 0.138}))
    '+38 ms of transfers'
    >>> difference(one, replace(one, memory={"params": 2**31}))
    '2.0 of 1.0 GiB'
    """
    if not other.fits and (chosen.fits or other.bytes > chosen.bytes):
        return of_limit(other.bytes, other.limit)
    change = other.time - chosen.time
    saved = chosen.bytes - other.bytes
    memory = f", {size_text(abs(saved))} {'less' if saved > 0 else 'more'}" if abs(saved) > 0.02 * chosen.bytes else ""
    if abs(change) < SMALL * chosen.time:
        return f"as fast{memory}"
    kinds: dict[str, float] = {}
    for part, kind in KINDS.items():
        kinds[kind] = kinds.get(kind, 0) + other.seconds.get(part, 0) - chosen.seconds.get(part, 0)
    of, most = max(kinds.items(), key=lambda item: math.copysign(1, change) * item[1])
    more = f" ({_ms(most)} of {of})" if abs(most) > 1.2 * abs(change) else f" of {of}"
    return f"{_ms(change)}{more}{memory}"


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    digits = 0 if abs(value) >= 10 else 1 if abs(value) >= 1 else 3
    return f"{value:+,.{digits}f} ms"


def first_line(reason: str) -> str:
    """Of an error that has several."""
    return reason.splitlines()[0] if reason else ""


def _neighbours(name: str, plan: Plan, space: Space) -> Iterator[Plan]:
    """`plan` with the nearest other values of one word; whether they are legal is asked later."""
    match name:
        case "tensor":
            yield from (_with(plan, tensor=tensor) for tensor in _tensors(plan))
        case "sequence":
            yield from (_with(plan, sequence=sequence) for sequence in _sequences(plan, space))
        case "expert":
            yield from (_with(plan, expert=expert) for expert in _experts(plan, space))
        case "pipeline":
            yield from (_with(plan, pipeline=pipeline) for pipeline in _pipelines(plan, space))
        case "microbatches":
            counts = space.counts(plan)
            lower, higher = [n for n in counts if n < plan.microbatches], [n for n in counts if n > plan.microbatches]
            for n in (*lower[-1:], *higher[:1]):
                yield replace(plan, microbatches=n, overlap=plan.overlap if n % plan.overlap == 0 else 1)
        case "overlap":
            for num in (plan.microbatches, 2 * plan.microbatches):
                others = [n for n in space.overlaps(plan, num) if n != plan.overlap]
                if others and num in space.counts(plan):
                    yield from (replace(plan, microbatches=num, overlap=n) for n in others)
                    return
        case "zero":
            # Groups and experts both split the data-parallel devices, so that one plan has one of them.
            if plan.data * plan.sequence.size * plan.tensor.depth > 1:
                groups = [None] if plan.zero.group is None else [plan.zero.group, None]
                stages = [Zero(stage, group if stage else None) for group in groups for stage in range(4)]
                yield from (replace(plan, zero=zero) for zero in dict.fromkeys(stages) if zero != plan.zero)
        case "remat":
            yield from (replace(plan, remat=each) for each in REMATS if each != plan.remat)
        case "precision":
            yield from (replace(plan, precision=each) for each in PRECISIONS if each != plan.precision)


def _with(plan: Plan, **words: object) -> Plan:
    """`plan` with other words, and as many copies as the same devices make; without ZeRO's group."""
    group = replace(plan.zero, group=None)
    overlap = 1 if "pipeline" in words else plan.overlap  # stages decide themselves what runs when
    found = replace(plan, **{"data": -1, "zero": group, "overlap": overlap, "expert": 1, **words})
    found = found.resolve(plan.num_devices)
    # As many share out experts as before, or as there are left.
    kept = math.gcd(plan.expert, found.data) if found.tensor.mode == "1d" else 1
    return found if "expert" in words else replace(found, expert=kept)


def _tensors(plan: Plan) -> list[Tensor]:
    """Fewer and more devices in this mode, and the other modes."""
    most = plan.data * plan.tensor.size
    sizes = {mode: [t for n in divisors(most) if n > 1 for t in tensors_of(mode, n)] for mode in MODES}
    found: list[Tensor] = []
    for mode, tensors in sizes.items():
        if mode == plan.tensor.mode or plan.tensor.size == 1:
            below = [t for t in tensors if t.size < plan.tensor.size] or ([Tensor()] if plan.tensor.size > 1 else [])
            above = [t for t in tensors if t.size > plan.tensor.size]
            found += [*below[-1:], *above[:1]]
        else:
            found += [t for t in tensors if t.size == plan.tensor.size][:1]
    gathered = plan.sequence.mode == "gather"  # lives on the axis of 1d
    return [t for t in found if t != plan.tensor and not (gathered and (t.mode != "1d" or t.size == 1))]


def _sequences(plan: Plan, space: Space) -> list[SequencePlan]:
    if not space.lengths:
        return []
    found = [SequencePlan()]
    if plan.tensor.mode == "1d" and plan.tensor.size > 1:
        found.append(SequencePlan(mode="gather"))
    sizes = [n for n in divisors(plan.data * plan.sequence.size) if n > 1]
    for mode in ("ring", "all_to_all"):
        same = [n for n in sizes if n == plan.sequence.size]
        near = [n for n in sizes if n < plan.sequence.size][-1:] + [n for n in sizes if n > plan.sequence.size][:1]
        found += [SequencePlan(n, mode) for n in (near if mode == plan.sequence.mode else same or near[-1:])]
    return [sequence for sequence in found if sequence != plan.sequence]


def _experts(plan: Plan, space: Space) -> list[int]:
    if not space.experts or plan.tensor.mode != "1d":
        return []
    sizes = [n for n in divisors(plan.data) if all(number % n == 0 for number in space.experts)]
    return [n for n in sizes if n < plan.expert][-1:] + [n for n in sizes if n > plan.expert][:1]


def _pipelines(plan: Plan, space: Space) -> list[Pipeline]:
    if not space.stacks or plan.unroll == "layers":
        return []
    now = plan.pipeline
    sizes = [n for n in divisors(plan.data * now.size) if n <= min(space.stacks)]
    near = [n for n in sizes if n < now.size][-1:] + [n for n in sizes if n > now.size][:1]
    found: list[Pipeline] = []
    for size in near:
        try:
            found.append(Pipeline() if size == 1 else replace(now, size=size))
        except ValueError:  # as many chunks as that need more layers
            continue
    if now.size > 1:
        each = [Pipeline(now.size, "1f1b"), Pipeline(now.size, "gpipe"), Pipeline(now.size, "zero_bubble")]
        each.append(Pipeline(now.size, "interleaved", 2))
        found += [pipeline for pipeline in each if pipeline.schedule != now.schedule]
        chunks = [c for c in divisors(min(space.stacks) // now.size) if c > 1 and c != now.chunks]
        near = [c for c in chunks if c < now.chunks][-1:] + [c for c in chunks if c > now.chunks][:1]
        found += [replace(now, chunks=c) for c in near if now.schedule == "interleaved"]
    return [pipeline for pipeline in dict.fromkeys(found) if pipeline != now]
