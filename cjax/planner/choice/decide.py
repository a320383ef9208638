"""The plan in full: what the user wrote, checked against the batch and the devices, or what `auto` chooses."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import optax

from cjax.mesh import Device
from cjax.plan import Auto, Plan, is_auto
from cjax.planner.choice.planning import Asked, Planning
from cjax.planner.choice.scored import Scored, of_limit
from cjax.planner.choice.search import Found
from cjax.planner.hardware import Hardware, hardware_of
from cjax.trace.source import TraceSource
from cjax.tree import kind_of

CLOSE = 0.85  # of a device's memory: above it the compiled program may need more than there is


@dataclass(frozen=True)
class Decision:
    """A plan, and how it came about.

    Args:
      plan: every number filled in.
      notes: what there is to say about how it was chosen.
      found: of a search, what else there was; None where the user wrote the plan.
      scored: of a search, what it predicts of the plan.
    """

    plan: Plan
    notes: tuple[str, ...] = ()
    found: Found | None = None
    scored: Scored | None = None

    @property
    def is_close(self) -> bool:
        """Whether a search's plan fits by arithmetic, and so narrowly that only the compiled program can tell."""
        each = self.scored
        return each is not None and CLOSE * each.limit < each.bytes <= each.limit

    def leaner(self, needed: float) -> list["Decision"]:
        """The plans that fit if all need as much more than arithmetic says as this one, which needs so many bytes; the
        fastest first."""
        if self.found is None or self.scored is None:
            return []
        more = max(1.0, needed / max(1.0, self.scored.bytes))
        leaner = [each for each in self.found.front if each.bytes < self.scored.bytes]
        return [
            Decision(each.plan, (*self.notes, f"then {each.plan}, {_costs(each)}"), self.found, each)
            for each in leaner
            if each.bytes * more <= each.limit
        ]

    def noting(self, note: str) -> "Decision":
        """The same, and something more to say."""
        return dataclasses.replace(self, notes=(*self.notes, note))


def planning_of(
    source: TraceSource,
    optimizer: optax.GradientTransformation | None,
    devices: Sequence[Device],
    learned: dict[str, tuple[float, str]] | None = None,
) -> Planning:
    """What can be asked about plans on these devices; `learned` is what measured steps have taught before."""

    @functools.cache  # asked when a search needs it: a plan that the user wrote out needs no facts
    def facts() -> Hardware:
        return hardware_of(devices)

    known = {} if learned is None else learned
    return Planning(source, optimizer, lambda num_devices: dataclasses.replace(facts(), num_devices=num_devices), known)


def decide(planning: Planning, plan: Plan | str, num_devices: int, refused: Sequence[Plan] = ()) -> Decision:
    """The plan, every number filled in, and what there is to say about how it was chosen.

    Args:
      planning: the user's model and loss; `auto` reads off its trace what a step has to do.
      plan: text, a `Plan`, or "auto", with words behind it that are fixed.
      num_devices: what the plan is for.
      refused: plans that a search found before, and that turned out not to work.

    Raises:
      TypeError: `plan` is none of these.
      ValueError: it does not suit the batch or the devices.
    """
    if not isinstance(plan, Plan | str):
        raise TypeError(
            f'`plan` is {plan!r}, {kind_of(plan)}. Write text such as "data=4 tensor=2", a cjax.Plan(...), or "auto".'
        )
    if isinstance(plan, str) and is_auto(plan):
        return _chosen(planning, Asked((num_devices,), Auto.parse(plan), refused=tuple(refused)))
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    _check_divides(plan.microbatches, _num_rows(planning.source))
    return Decision(plan.resolve(num_devices))


def _num_rows(source: TraceSource) -> list[int]:
    return [leaf.shape[0] for leaf in jax.tree.leaves(source.batch_shape) if leaf.shape]


def _check_divides(microbatches: int, num_rows: Sequence[int]) -> None:
    for rows in num_rows:
        if rows % microbatches:
            near = max(1, rows // microbatches) * microbatches
            divisors = [str(n) for n in range(1, min(rows, 2 * microbatches) + 1) if rows % n == 0]
            raise ValueError(
                f"microbatches={microbatches} does not divide a batch of {rows} rows; "
                f"use {near} or {near + microbatches} rows, or microbatches of {', '.join(divisors)}."
            )


def _chosen(planning: Planning, asked: Asked) -> Decision:
    """What a search finds; the leanest plan where none fits."""
    found = planning.search(asked)
    best = found.best[0] if found.best else found.least
    if best is None:
        raise ValueError(no_plan(planning, asked, found))
    return Decision(best.plan, (_note(planning, asked, found, best),), found, best)


def no_plan(planning: Planning, asked: Asked, found: Found) -> str:
    """Why nothing at all can share this batch: what would."""
    rows, num = min(_num_rows(planning.source), default=1), max(asked.num_devices)
    fixed = [] if str(asked.auto) == "auto" else [f"leave out words of {str(asked.auto)!r}"]
    # By the words that are fixed: devices of one copy, copies if they are given, parts of what a copy is given.
    words = asked.auto.fixed
    unit = math.prod(words[name].size for name in ("tensor", "sequence", "pipeline") if name in words)
    least = unit * words.get("expert", 1)
    data, parts = words.get("data"), math.lcm(words.get("microbatches", 1), words.get("overlap", 1))
    instead = []
    if num % least == 0 and data in (None, num // unit):
        share = num // unit * parts
        more = max(1, rows // share) * share
        instead.append(f"{more if more != rows else 2 * more} rows")
    fewer = [n for n in range(num - 1, 0, -1) if n % least == 0 and data in (None, n // unit)]
    fewer = [n for n in fewer if rows % (n // unit * parts) == 0]
    instead += [*(f"devices=jax.devices()[:{n}]" for n in fewer[:1]), *fixed]
    why = "; ".join(f"{words}: {reason.splitlines()[0]}" for words, reason in list(found.refused.items())[:3])
    lacks = f"no plan shares {rows} rows over {num} devices"
    if num % least:
        lacks = f"its words need a multiple of {least} devices, and there are {num}"
    return f"plan={str(asked.auto)!r}: {lacks}" + (f" ({why})" if why else "") + f". Use {', or '.join(instead)}."


def _note(planning: Planning, asked: Asked, found: Found, best: Scored) -> str:
    size = _size(best)
    if not found.best:
        return f"auto chose {best.plan}: the leanest of {found.num_plans:,} plans, and it may not fit, {size}"
    many = f"{found.num_fitting:,} plans that fit" if found.num_fitting > 1 else "the one plan that fits"
    out = [f"micro-batches are ruled out: {found.refused['microbatches']}"] if "microbatches" in found.refused else []
    if planning.calibration is None:
        num = max(asked.num_devices)
        name = planning.hardware(num).name
        least = f"the least arithmetic and bytes moved of {many}"
        said = f"auto chose {best.plan}: {least}, {size}; how fast a {name} is nobody has measured"
        plan = best.plan
        if num > 1 and plan.tensor.size == plan.sequence.size == plan.pipeline.size == 1:
            said += ", so plans that split the model were not tried"
    else:
        said = f"auto chose {best.plan}: the fastest of {many}, {_costs(best)}; program.explain() says why"
    return "; ".join([said, *out])


def _size(scored: Scored) -> str:
    return f"about {of_limit(scored.bytes, scored.limit)}"


def _costs(scored: Scored) -> str:
    return f"about {ms(scored.time)} ms ({ms(scored.low)}-{ms(scored.high)}) a step, {_size(scored)}"


def ms(seconds: float) -> str:
    """Milliseconds with two or three digits."""
    value = seconds * 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
