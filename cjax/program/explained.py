"""What planning says of a plan, as the plain facts that are printed."""

from cjax.planner.choice.decide import Decision
from cjax.planner.choice.explain import Alternative, Explanation
from cjax.planner.choice.planning import Planning
from cjax.planner.choice.scored import Scored
from cjax.report import Explained

UNMEASURED = (
    "nobody has measured these devices: plans are put in order by their arithmetic and the bytes that they move, and "
    "no time can be told"
)


def explained(found: Explanation, planning: Planning, decision: Decision | None = None) -> Explained:
    """An explanation for people; of devices that nobody has measured, without times."""
    chosen, is_timed = found.chosen, planning.calibration is not None
    rows = [
        (word, " ".join([each.word, *each.changes]), *_costs(each.scored), _why(chosen, each, is_timed))
        for word, others in found.words.items()
        for each in others
    ]
    notes = [*planning.work.notes, *(decision.notes if decision else ())]
    if planning.calibration is None:
        notes.append(UNMEASURED)
    else:
        notes.append(f"constants {planning.calibration.source}")
    return Explained(
        str(chosen.plan),
        f"{chosen.num_devices} x {planning.hardware(chosen.num_devices).name}",
        chosen.seconds if is_timed else {},
        (chosen.low, chosen.high),
        chosen.memory,
        chosen.limit,
        rows,
        notes,
    )


def _costs(scored: Scored | None) -> tuple[float | None, float | None]:
    return (None, None) if scored is None else (scored.time, scored.bytes)


def _why(chosen: Scored, other: Alternative, is_timed: bool) -> str:
    if is_timed or other.scored is None or (not other.scored.fits and chosen.fits):
        return other.why
    change = other.scored.time / chosen.time - 1
    return "as much to do" if abs(change) < 0.005 else f"{abs(change):.0%} {'more' if change > 0 else 'less'} to do"
