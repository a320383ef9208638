"""Whether a plan fits, before its first step: the compiled program's memory against the device's."""

import dataclasses
from collections.abc import Callable

from cjax.plan import Plan
from cjax.planner.ladder import LADDER
from cjax.report import Candidate, Comparison, Report


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
        advice = "No plan tried fits; use more devices, a smaller batch, or a smaller model."
        if fitting:
            advice = "These fit: " + "; ".join(f'plan="{plan}"' for plan in fitting)
        super().__init__(f"plan {report.plan!r} does not fit.\n{report.summary}\n{advice}")


def alternatives(plan: Plan, try_plan: Callable[[str], Report | str], wanted: int = 3) -> Comparison:
    """The first plans that fit, of those that spend the least on it: more ZeRO, then remat, then micro-batches."""
    base = dataclasses.replace(plan, data=-1)
    found = []
    for zero, remat, microbatches in LADDER:
        candidate = dataclasses.replace(base, zero=max(zero, plan.zero_stage), remat=remat, microbatches=microbatches)
        outcome = try_plan(str(candidate)) if candidate != base else "refused already"
        if isinstance(outcome, Report) and outcome.memory.fits:
            found.append(Candidate(str(candidate), report=outcome))
        if len(found) == wanted:
            break
    return Comparison(found)
