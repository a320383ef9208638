"""`cjax.plans`: the best plans for a model on machines that may not be here, by arithmetic; the first few compiled."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cjax.machines import Cluster
from cjax.mesh import Device, num_cpus_named, resolve_devices
from cjax.plan import Auto, Plan, is_auto
from cjax.planner.choice.decide import Decision, no_plan, planning_of
from cjax.planner.choice.planning import Asked, Planning
from cjax.planner.choice.scored import Objective, Scored, check_objective, of_limit
from cjax.planner.choice.search import Found
from cjax.planner.hardware import Hardware, hardware_of, hardware_of_cluster
from cjax.program.batches import batch_structs
from cjax.program.compose import compose
from cjax.program.composed import Given
from cjax.program.explained import UNMEASURED, explained
from cjax.program.program import Program
from cjax.report import Explained, Ranked, Ranking, Report
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource
from cjax.tree import kind_of

MOST_DEVICES = 1024  # that a search goes up to where nobody says how many
SPARE = 4  # times as many plans are at hand as are to be compiled: some may turn out not to work
AXES = {"pipe": "pipeline", "data": "data", "zero": "data", "sequence": "sequence"}  # all others are of the tensor mode
TRANSFERS = {"tensor": ("tensor",), "sequence": ("sequence",), "data": ("data", "gather"), "pipeline": ("pipeline",)}


@dataclass(frozen=True, repr=False)
class Plans(Ranking):
    """The table of `cjax.plans`, best plan first; prints as text, shows as HTML in a notebook.

    Attributes:
      on: what the plans are for, such as "64 x NVIDIA H100 80GB HBM3".
      objective: what was to be least.
      plans: the best, then those with a mark that are not among them; `plans[0].plan` is the text of the best.
      num_plans, num_fitting: how many there are in all.
      front: of all plans that fit, (seconds, bytes, plan) of those that no other beats in both.
      notes: what else there is to say.
      planning: what `explain` asks.
      resolved: the plan that the text of a row stands for.

    `cjax.plans` has an example.
    """

    planning: Planning = dataclasses.field(kw_only=True)
    resolved: Mapping[str, Plan] = dataclasses.field(kw_only=True)

    def explain(self, number: int = 1) -> Explained:
        """Why the plan in the row of this number, counted from 1, is as it is: its words' nearest other values.

        Raises:
          ValueError: no such row.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(self.plans):
            raise ValueError(f"explain({number!r}): there are rows 1 to {len(self.plans)}")
        found = self.planning.explain(self.resolved[self.plans[number - 1].plan])
        assert not isinstance(found, str), "a plan that was listed"
        return explained(found, self.planning)


def plans(
    program_or_call: Any,
    devices: Sequence[Device] | Cluster | str | None = None,
    objective: Objective = "time",
    top: int = 8,
    verify: int = 3,
    *,
    plan: str = "auto",
    price: float | None = None,
) -> Plans:
    """The best of all plans, predicted; nothing runs, and the devices need not be here.

    Args:
      program_or_call: a `Program`, or what `cjax.parallelize` takes: (model, loss, optimizer, batch).
      devices: JAX devices, a `cjax.Cluster`, or text such as "h100:64"; "h100" alone leaves their number to the search.
        Those of the program, or all that are here, if not given.
      objective: what is to be least: "time" of a step, "memory" of a device, "cost" or "energy" of a token.
      top: how many plans to list.
      verify: how many of them to compile, where XLA can compile for the devices. Memory and transfers are then its own;
        a plan that turns out not to fit is dropped, and the next one taken.
      plan: "auto", and behind it words that every plan has to have: "auto precision=bfloat16".
      price: dollars for an hour of one device, if not the cluster's.

    Raises:
      TypeError: neither a program nor such a tuple.
      ValueError: an unknown objective or card; rows that nothing can share; no plan that fits, with the leanest and how
        many devices it takes until one does.

    >>> import flax.linen as nn, jax, optax
    >>> batch = jax.ShapeDtypeStruct((64, 512), "float32")
    >>> call = nn.Dense(512), lambda model, x: (model(x) ** 2).mean(), optax.adam(1e-3), batch
    >>> found = plans(call, "h100:8", verify=0)
    >>> found.best.num_devices, found.best.bytes < found.best.limit
    (8, True)
    """
    _check_call(program_or_call)
    check_objective(objective)
    _check_numbers(top, verify, price)
    if not isinstance(plan, str) or not is_auto(plan):
        raise ValueError(f'`plan` is {plan!r}: write "auto", and behind it the words that every plan has to have')
    given, own = _given(program_or_call)
    planning, numbers, found_devices = _planned(given, own if devices is None else devices, price)
    asked = Asked(numbers, Auto.parse(plan), objective, top + SPARE * verify)
    found = planning.search(asked)
    if not found.best:
        raise ValueError(_nothing_fits(planning, asked, found))
    rows, notes = _verified(given, found, found_devices, top, verify)
    if not rows:
        raise ValueError(
            f"None of the {len(notes)} best plans can be had: {'; '.join(notes[:3])}. Fix words of the plan, as in "
            'plan="auto remat=block", or list plans by arithmetic alone with verify=0.'
        )
    return _table(planning, asked, found, rows, notes)


def _check_numbers(top: Any, verify: Any, price: Any) -> None:
    for name, value, least in (("top", top, 1), ("verify", verify, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: it is a whole number, at least {least}")
    if price is not None and (isinstance(price, bool) or not isinstance(price, int | float) or not price > 0):
        raise ValueError(f"price={price!r}: it is dollars for an hour of one device, more than 0")


def _check_call(program_or_call: Any) -> None:
    if isinstance(program_or_call, Program) or (isinstance(program_or_call, tuple) and len(program_or_call) == 4):
        return
    raise TypeError(
        "plans takes a Program, or in one tuple what parallelize takes: plans((model, loss, optimizer, batch), ...), "
        f"not {kind_of(program_or_call)}"
    )


def _given(program_or_call: Any) -> tuple[Given, Sequence[Device] | None]:
    """What the user gave, and the devices of a program."""
    if isinstance(program_or_call, Program):
        return program_or_call._composed.given, list(program_or_call.mesh.devices.flat)
    _check_call(program_or_call)
    model, loss, optimizer, batch = program_or_call
    shape = batch_structs(batch)
    return Given(TraceSource(capture(model, loss, batch, None), shape), optimizer), None


def planned(
    program_or_call: Any, devices: Sequence[Device] | Cluster | str
) -> tuple[Planning, tuple[int, ...], Callable[[int], Sequence[Device]]]:
    """What can be asked about a model on devices that may not be here, for which numbers of them, and these devices,
    which need not exist until then."""
    return _planned(_given(program_or_call)[0], devices, None)


def _planned(
    given: Given, devices: Sequence[Device] | Cluster | str | None, price: float | None
) -> tuple[Planning, tuple[int, ...], Callable[[int], Sequence[Device]]]:
    """What can be asked, for which numbers of devices, and the devices themselves, which need not exist until then."""
    if isinstance(devices, str) and num_cpus_named(devices) is None:
        devices = Cluster.parse(devices)
    if isinstance(devices, Cluster):
        cluster = devices

        def hardware(num: int) -> Hardware:
            return _priced(hardware_of_cluster(cluster, num), price)

        numbers = _numbers(cluster) if cluster.num_devices is None else (cluster.num_devices,)
        planning = Planning(given.source, given.optimizer, hardware, given.learned)
        return planning, numbers, lambda num: resolve_devices(cluster.with_devices(num))
    here = resolve_devices(devices)
    facts = _priced(hardware_of(here), price)
    planning = planning_of(given.source, given.optimizer, here, given.learned)
    planning = dataclasses.replace(planning, hardware=lambda num: dataclasses.replace(facts, num_devices=num))
    return planning, (len(here),), lambda num: here


def _priced(facts: Hardware, price: float | None) -> Hardware:
    return facts if price is None else dataclasses.replace(facts, price=float(price))


def _numbers(cluster: Cluster) -> tuple[int, ...]:
    """A part of a host, and hosts: powers of two, and three times these."""
    few = [n for n in (1, 2, 4, 8, 16) if n <= cluster.cards_per_host]
    hosts = sorted({base * 2**power for base in (1, 3) for power in range(11)})
    many = [cluster.cards_per_host * n for n in hosts]
    return tuple(sorted({n for n in (*few, *many) if n <= MOST_DEVICES}))


def _nothing_fits(planning: Planning, asked: Asked, found: Found) -> str:
    if found.least is None:
        return no_plan(planning, asked, found)
    least = found.least
    needs = f"needs about {of_limit(least.bytes, least.limit)}"
    more = f"; on {least.num_devices} devices the leanest, {str(least.plan)!r}, {needs}"
    enough = _enough(planning, asked)
    then = f" From {enough} devices on one does." if enough else " Nor does one on 16 times as many."
    words = f"leave words of {str(asked.auto)!r} open" if asked.auto.fixed else 'write "auto precision=bfloat16"'
    return f"no plan fits memory{more}.{then} Or take a smaller batch, or {words}."


def _enough(planning: Planning, asked: Asked) -> int | None:
    """The number of devices from which a plan fits, by twos."""
    num = max(asked.num_devices)
    for _ in range(4):
        num *= 2
        if planning.search(dataclasses.replace(asked, num_devices=(num,), objective="memory", top=1)).best:
            return num
    return None


# -- compiled ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Row:
    scored: Scored
    is_exact: bool = False


def _verified(
    given: Given,
    found: Found,
    devices: Callable[[int], Sequence[Device]],
    top: int,
    verify: int,
) -> tuple[list[_Row], list[str]]:
    """The first plans, compiled as far as that goes; in the order in which they are best. `found` is left without those
    that can't be had."""
    rows: list[_Row] = []
    notes: list[str] = []
    waiting = list(found.best)
    while waiting and len(rows) < verify:
        each = waiting.pop(0)
        try:
            here = devices(each.num_devices)
        except (RuntimeError, ValueError) as error:
            notes.append(f"none of these is compiled: {str(error).splitlines()[0]}")
            waiting.insert(0, each)
            break
        outcome = _compiled(given, each, here)
        if isinstance(outcome, str):
            notes.append(f"{each.plan} is left out: {outcome}")
            _leave_out(found, each)
        else:
            rows.append(_Row(outcome, is_exact=True))
    return [*rows, *(_Row(each) for each in waiting)][:top], notes


def _leave_out(found: Found, scored: Scored) -> None:
    """Takes a plan out of what a search found: the best of those that are left have its marks."""
    found.best = [each for each in found.best if each != scored]
    found.front = [each for each in found.front if each != scored]
    orders: dict[str, Callable[[Scored], Any]] = {
        "fastest": lambda each: each.time,
        "leanest": lambda each: each.bytes,
        "cheapest": lambda each: (each.time * each.num_devices, each.time),
        "fewest": lambda each: (each.num_devices, each.time),
    }
    for name, order in orders.items():
        if getattr(found, name) == scored:
            setattr(found, name, min([*found.best, *found.front], key=order, default=None))


def _compiled(given: Given, scored: Scored, devices: Sequence[Device]) -> Scored | str:
    """A plan with the compiled program's memory and transfers, or why it can't be had."""
    try:
        program = Program(compose(given, Decision(scored.plan), devices))
        report = program.report()
    except Exception as error:
        # Whatever it is, XLA's own errors included: a plan that can't be had is left out, and the others are listed.
        said, kind = str(error).strip().partition("\n")[0], type(error).__name__
        if isinstance(error, ValueError) and said:
            return said
        return f"{kind}: {said}" if said else kind
    if not report.memory.fits:
        return f"compiled it needs {report.memory}"
    uses = {use: float(size) for use, size in report.memory.parts.items()}
    seconds = _with_transfers(scored, report)
    longer = sum(seconds.values()) / scored.time
    dollars = None if scored.dollars is None else scored.dollars * longer
    return dataclasses.replace(
        scored, memory=uses, seconds=seconds, low=scored.low * longer, high=scored.high * longer,
        mfu=None if scored.mfu is None else scored.mfu / longer, dollars=dollars,
        kwh=None if scored.kwh is None else scored.kwh * longer,
    )  # fmt: skip


def _with_transfers(scored: Scored, report: Report) -> dict[str, float]:
    """Seconds of a step with as many bytes on the way as the compiled program sends."""
    predicted, compiled = (_by_kind(moved) for moved in (scored.moved, report.bytes_moved_by_axis))
    seconds = dict(scored.seconds)
    for kind, parts in TRANSFERS.items():
        if predicted.get(kind) and compiled.get(kind):
            for part in parts:
                seconds[part] *= compiled[kind] / predicted[kind]
    return seconds


def _by_kind(moved: Any) -> dict[str, float]:
    """Bytes by the part of a plan that sends them; axes come as "data+zero"."""
    found: dict[str, float] = {}
    for axes, size in moved.items():
        kinds = {AXES.get(axis, "tensor") for axis in axes.split("+")}
        kind = next(kind for kind in ("data", "pipeline", "sequence", "tensor") if kind in kinds)
        found[kind] = found.get(kind, 0.0) + size
    return found


# -- the table --------------------------------------------------------------------------------------------------------
def _table(planning: Planning, asked: Asked, found: Found, rows: list[_Row], notes: list[str]) -> Plans:
    is_timed = planning.calibration is not None
    marked = {"leanest": found.leanest, "fewest devices": found.fewest, "cheapest": found.cheapest}
    extremes = {"fastest": found.fastest} | marked if is_timed else {"leanest": found.leanest}
    if len(asked.num_devices) == 1:
        extremes = {name: each for name, each in extremes.items() if name in ("fastest", "leanest")}
    listed = {(row.scored.plan, row.scored.num_devices) for row in rows}
    for each in extremes.values():
        if each is not None and (each.plan, each.num_devices) not in listed:
            listed.add((each.plan, each.num_devices))
            rows = [*rows, _Row(each)]
    shown = []
    for row in rows:
        same = (row.scored.plan, row.scored.num_devices)
        marks = [name for name, each in extremes.items() if each and (each.plan, each.num_devices) == same]
        shown.append(_ranked(row, is_timed, tuple(marks)))
    facts = planning.hardware(max(asked.num_devices))
    many = "" if len(asked.num_devices) == 1 else f"{min(asked.num_devices)} to "
    said = [*notes, *planning.work.notes, *_ruled_out(found)]
    said.append(f"constants {planning.calibration.source}" if planning.calibration else UNMEASURED)
    return Plans(
        f"{many}{facts.num_devices} x {facts.name}",
        asked.objective,
        shown,
        found.num_plans,
        found.num_fitting,
        [(each.time, each.bytes, str(each.plan)) for each in found.front],
        said,
        planning=planning,
        resolved={str(row.scored.plan): row.scored.plan for row in rows},
    )


def _ruled_out(found: Found) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for words, reason in found.refused.items():
        reasons.setdefault(reason.splitlines()[0], []).append(words)
    return [f"ruled out: {', '.join(words[:6])}: {reason}" for reason, words in list(reasons.items())[:3]]


def _ranked(row: _Row, is_timed: bool, marks: tuple[str, ...]) -> Ranked:
    each = row.scored
    return Ranked(
        str(each.plan),
        each.num_devices,
        {part: seconds for part, seconds in each.seconds.items() if seconds} if is_timed else {},
        (each.low, each.high),
        each.tokens_per_second,
        each.mfu if is_timed else None,
        each.bytes,
        each.limit,
        row.is_exact,
        each.dollars if is_timed else None,
        each.kwh if is_timed else None,
        marks,
    )
