"""Plans side by side: one row each; a plan that is refused is a row with its reason."""

from collections.abc import Sequence
from dataclasses import dataclass

from cjax.report.render import Table, bytes_unit, milliseconds
from cjax.report.step import Report


@dataclass(frozen=True)
class Candidate:
    """A plan and what became of it.

    Args:
      plan: its text.
      report: of its compiled step; None if it was refused.
      reason: why there is no report; empty if there is one.

    `cjax.report.Comparison` has an example.
    """

    plan: str
    report: Report | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        assert (self.report is None) == bool(self.reason), "a candidate has either a report or a reason"


@dataclass(frozen=True, repr=False)
class Comparison:
    """Several plans for one model on the same devices; prints as text, shows as HTML in a notebook.

    Args:
      candidates: the plans, as they were given.

    >>> print(Comparison([Candidate("tensor=3", reason="heads 8: 3 does not divide 8; nearest 2 or 4")]))
    plan      fits  memory, B  params  optimizer  activations  moves, B  not hidden  step >=, ms  bound
    --------  ----  ---------  ------  ---------  -----------  --------  ----------  -----------  -----
    tensor=3  heads 8: 3 does not divide 8; nearest 2 or 4
    """

    candidates: Sequence[Candidate]

    @property
    def reports(self) -> list[Report]:
        """Of the plans that were not refused."""
        return [candidate.report for candidate in self.candidates if candidate.report is not None]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits, by prediction where there is one; without times the one that moves least, if any."""
        fitting = [each for each in self.candidates if each.report is not None and each.report.memory.fits]
        return min(fitting, key=_cost, default=None)

    def __str__(self) -> str:
        return self._table().text()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> Table:
        memory = bytes_unit(*(report.memory.total for report in self.reports))
        moves = bytes_unit(*(report.bytes_moved for report in self.reports))
        best = self.best if len(self.reports) > 1 else None
        is_timed = any(report.time is not None and report.time.predicted is not None for report in self.reports)
        rows: list[Sequence[str]] = []
        for candidate in self.candidates:
            report = candidate.report
            plan = f"{candidate.plan} *" if candidate is best else candidate.plan
            if report is None:
                rows.append((plan, candidate.reason))
                continue
            use, time, exposed = report.memory, report.time, report.bytes_exposed
            fits = "?" if use.limit is None else "yes" if use.fits else "NO"
            sizes = [memory(size) for size in (use.total, use.params, use.optimizer, use.activations)]
            moved = [moves(report.bytes_moved), "?" if exposed is None else moves(exposed)]
            times = [milliseconds(time.total), time.bound] if time else ["?", "?"]
            said = ["?" if time is None or time.predicted is None else milliseconds(time.predicted)]
            rows.append((plan, fits, *sizes, *moved, *(said if is_timed else []), *times))
        title = ("plan", "fits", f"memory, {memory.name}", "params", "optimizer", "activations")
        title += (f"moves, {moves.name}", "not hidden", *(["step, ms"] if is_timed else []), "step >=, ms", "bound")
        return Table(title, rows, right=frozenset(range(2, len(title) - 1)))


def _cost(candidate: Candidate) -> tuple[float, int]:
    report = candidate.report
    assert report is not None
    time = report.time
    return (time.predicted or time.total) if time else float("inf"), report.bytes_moved
