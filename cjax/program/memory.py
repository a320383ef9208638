"""Whether a plan fits, before its first step: the compiled program's memory against the device's."""

import dataclasses
from collections.abc import Callable, Sequence

from cjax.plan import Auto, Plan
from cjax.plan.sizes import size_text
from cjax.planner.choice.planning import Asked, Planning
from cjax.planner.choice.scored import Scored
from cjax.planner.choice.space import CARRIED
from cjax.report import Candidate, Comparison, Report

MAYBE = 1.1  # of what there is: arithmetic that says so may be wrong by as much
MOST_TRIED = 6  # plans that are compiled in search of those that fit


class OutOfMemory(MemoryError):
    """A plan that needs more memory than its devices have.

    Attributes:
      report: what it needs, by use.
      alternatives: up to three plans that fit.
    """

    def __init__(self, report: Report, alternatives: Comparison) -> None:
        self.report = report
        self.alternatives = alternatives
        fitting = [candidate.plan for candidate in alternatives.candidates if candidate.report is not None]
        advice = (
            "No plan tried fits; use more devices, a smaller batch, or a smaller model; or let host memory have what "
            f"does not fit, if layers repeat: {_budget(report)}."
        )
        if fitting:
            advice = "These fit: " + "; ".join(f'plan="{plan}"' for plan in fitting)
        super().__init__(f"plan {report.plan!r} does not fit.\n{report.summary}\n{advice}")


def _budget(report: Report) -> str:
    """A plan for all that a device has, in whole units."""
    limit = report.memory.limit
    assert limit is not None, "only what has a limit is over it"
    unit = next(unit for unit in (2**30, 2**20, 1) if limit >= 8 * unit)
    return f'plan="zero=3 budget={size_text(limit // unit * unit)}"'


def alternatives(
    planning: Planning, plan: Plan, report: Report, try_plan: Callable[[str], Report | str], wanted: int = 3
) -> Comparison:
    """Plans that fit, the fastest by prediction first, each compiled.

    Args:
      planning: what can be asked about plans.
      plan: the plan that does not fit; its precision, loss and rules are the user's.
      report: of that plan.
      try_plan: the report of another, or why there is none.
      wanted: how many.
    """
    kept = {name: getattr(plan, name) for name in ("precision", *CARRIED) if getattr(plan, name) is not None}
    asked = Asked((plan.num_devices,), Auto(kept, f"auto instead of {plan}"))
    limit, scored = report.memory.limit, planning.score(plan)
    assert limit is not None, "only what has a limit is over it"
    # Arithmetic was too low for this plan, so it is taken to be as low for the others.
    more = 1.0 if isinstance(scored, str) else max(1.0, report.memory.total / max(1.0, scored.bytes))
    found = planning.search(dataclasses.replace(asked, memory=int(MAYBE * limit / more)))
    tried, fitting = 0, []
    for each in _spread(found.front) or ([found.least] if found.least else []):
        outcome = try_plan(str(each.plan)) if each.plan != plan else "refused already"
        tried += 1
        if isinstance(outcome, Report) and outcome.memory.fits:
            fitting.append(Candidate(str(each.plan), report=outcome))
        if len(fitting) == wanted or tried == MOST_TRIED:
            break
    return Comparison(fitting)


def _spread(front: Sequence[Scored]) -> list[Scored]:
    """The fastest, then from the leanest on: where arithmetic was wrong, plans beside a refused one are refused too."""
    both = [each for pair in zip(front, reversed(front), strict=True) for each in pair]
    return list({each.plan: each for each in both}.values())
