"""The planner asked about one model: each of its flavours, on any devices."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax
from shared.results import Results, Row

from cjax.machines import Cluster
from cjax.plan import Auto, Plan
from cjax.planner.choice.planning import Planning
from cjax.planner.choice.scored import Objective, Scored
from cjax.planner.choice.search import Found, search
from cjax.planner.hardware import hardware_of_cluster
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

from .flavours import autos
from .models import Case

GIB = 2**30
DIGITS = 5  # of the numbers that are kept


class Asking:
    """One model and its batch, read when the first row asks for it.

    Args:
      results: where rows are kept; what is there isn't asked again.
      case: the model.
    """

    def __init__(self, results: Results, case: Case) -> None:
        self.case, self._results = case, results
        self._on: dict[str, Planning] = {}

    @functools.cached_property
    def read(self) -> Planning:
        """On no devices yet."""
        model, loss, batch = self.case.call()
        source = TraceSource(capture(model, loss, batch, None), batch)
        return Planning(source, optax.adamw(1e-3), _devices(Cluster("a100-40gb")))

    def planning(self, cluster: Cluster) -> Planning:
        if str(cluster) not in self._on:
            self._on[str(cluster)] = self.read.on(_devices(cluster))
        return self._on[str(cluster)]

    @property
    def num_params(self) -> int:
        """Numbers that are trained."""
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.read.source.capture.params_shape))

    def ask(
        self, part: str, cluster: Cluster, num: int, flavour: str, is_pure: bool = True, objective: Objective = "time"
    ) -> Row:
        """The best plan of a flavour on so many of these devices, or why there is none."""
        case = self.case
        key = {"part": part, "model": case.model, "rows": case.rows, "length": case.length, "cluster": str(cluster),
               "devices": num, "flavour": flavour}  # fmt: skip

        def make() -> Row:
            found = self.best(cluster, num, autos(flavour, num, is_pure), objective)
            return {"batch": case.batch, "params": self.num_params} | found

        row = self._results.get(key, make)
        print(said(row), flush=True)
        return row

    def best(self, cluster: Cluster, num: int, wanted: Sequence[Auto], objective: Objective = "time") -> Row:
        """The best of some searches. What a planning's own search asks a loss beside that, whether it is put "
        "together of
        micro-batches, is known of these: theirs are means over examples or words."""
        planning = self.planning(cluster)
        all_found = [search(planning.question, planning.space(auto, num), (num,), objective) for auto in wanted]
        best = [found.best[0] for found in all_found if found.best]
        if best:
            return facts(min(best, key=lambda each: each.bytes if objective == "memory" else each.time))
        over = [found.least for found in all_found if found.least]
        if over:
            least = min(over, key=lambda each: each.bytes)
            return facts(least) | {"over": True}
        return {"refused": _reason(planning, num, wanted, all_found)}

    def score(self, cluster: Cluster, plan: Plan) -> Scored | str:
        """One plan, resolved."""
        return self.planning(cluster).score(plan)


def _devices(cluster: Cluster) -> Any:
    return lambda num: hardware_of_cluster(cluster, num)


def _reason(planning: Planning, num: int, wanted: Sequence[Auto], all_found: Sequence[Found]) -> str:
    """Why none of these searches has a plan."""
    reasons = [reason for found in all_found for reason in found.refused.values()]
    if reasons:
        return reasons[0].splitlines()[0]
    if not wanted:
        return f"there is no such arrangement of {num} devices"
    words = wanted[0].fixed
    space = planning.space(wanted[0], num)
    plan = Plan(data=1, tensor=words["tensor"], sequence=words["sequence"], pipeline=words["pipeline"])
    why = space.nearest(plan, num)
    split = planning.question.split_or_reason(Plan(tensor=plan.tensor, sequence=plan.sequence))
    return (
        split.splitlines()[0] if isinstance(split, str) else why if isinstance(why, str) else "the batch is too small"
    )


def facts(scored: Scored) -> Row:
    """What is kept of a plan: seconds, GiB."""
    short = {
        "plan": str(scored.plan),
        "s": scored.time,
        "low": scored.low,
        "high": scored.high,
        "mfu": scored.mfu,
        "gib": scored.bytes / GIB,
        "limit": scored.limit / GIB,
        "tokens": scored.tokens,
        "kwh": scored.kwh,
        "parts": {name: seconds for name, seconds in scored.seconds.items() if seconds},
    }
    return {name: _short(value) for name, value in short.items()}


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def said(row: Row) -> str:
    """A row as a line of a log."""
    where = f"{row['cluster']} x {row['devices']}"
    of = f"  {row['part']:8s} {row['model']:12s} {row.get('batch', ''):14s} {where}: {row['flavour']:20s}"
    if "refused" in row:
        return f"{of} refused: {row['refused'][:90]}"
    over = " OVER" if row.get("over") else ""
    return f"{of} {1e3 * row['s']:9.1f} ms {row['gib']:6.1f} GiB{over}  {row['plan']}"
