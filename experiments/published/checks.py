"""What the planner's predictions of published runs are worth, on rows that the constants did not see."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from published.fit import Fit, Problem, fit
from published.rows import Run

FOLDS = 5
SEEDS = (0, 1, 2, 3, 4)  # of the ways in which rows are dealt out to folds: a median over them depends on none
APART = 0.03  # plans that differ by less are equal: identical configurations of one source differ by 3.5 %


@dataclasses.dataclass(frozen=True)
class Errors:
    """Absolute relative errors of tokens/s."""

    logs: np.ndarray

    @property
    def relative(self) -> np.ndarray:
        return np.abs(np.expm1(self.logs))

    @property
    def median(self) -> float:
        return float(np.median(self.relative))

    @property
    def p90(self) -> float:
        return float(np.quantile(self.relative, 0.9))

    def __str__(self) -> str:
        return f"{100 * self.median:.1f} / {100 * self.p90:.1f} %"


def folds(problem: Problem, seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows to fit on, and rows to predict: every row is predicted once."""
    places = np.random.default_rng(seed).permutation(len(problem.runs))
    for held in np.array_split(places, FOLDS):
        yield np.setdiff1d(places, held), np.sort(held)


def cross_validated(problem: Problem, start: Fit, with_factor: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """log of predicted / published rate of each row, by fits that did not see it, and the spreads they gave it.

    One row of each array for each seed.
    """
    logs, spreads = np.zeros((2, len(SEEDS), len(problem.runs)))
    for i, seed in enumerate(SEEDS):
        for seen, held in folds(problem, seed):
            found = fit(problem, seen, start.values, with_factor)
            logs[i, held] = found.log_ratio(problem, held, with_factor)
            spreads[i, held] = found.spread
    return logs, spreads


def left_out(problem: Problem, start: Fit) -> np.ndarray:
    """The same, by fits that saw no run of the row's system."""
    logs = np.zeros(len(problem.runs))
    for number in range(len(problem.systems)):
        held = np.flatnonzero(problem.system == number)
        found = fit(problem, np.flatnonzero(problem.system != number), start.values)
        logs[held] = found.log_ratio(problem, held, with_factor=False)
    return logs


@dataclasses.dataclass(frozen=True)
class Order:
    """How well predictions rank plans for the same model, batch, devices and software.

    Args:
      groups, pairs: how many there are; pairs that differ by more than `APART`.
      right: share of these in the right order.
      regret: speed lost by taking the predicted best, on average over groups; `worst` of one.
      first, third: share of groups whose best is predicted first, or among the first three.
    """

    groups: int
    pairs: int
    right: float
    regret: float
    worst: float
    first: float
    third: float

    def __str__(self) -> str:
        return (
            f"{100 * self.right:.0f} % of {self.pairs} pairs in order, regret {100 * self.regret:.1f} % "
            f"(worst {100 * self.worst:.0f} %), best first in {100 * self.first:.0f} % and in the first three in "
            f"{100 * self.third:.0f} % of {self.groups} groups"
        )


def order(problem: Problem, logs: np.ndarray) -> Order:
    """By `logs` of predicted / published rate."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, run in enumerate(problem.runs):
        groups[run.setting].append(i)
    right, regrets, places = [], [], []
    for rows in groups.values():
        plans: dict[Any, list[int]] = defaultdict(list)
        for i in rows:  # repeated measurements of a plan are one
            plans[problem.runs[i].spread, problem.runs[i].plan, problem.runs[i].facts.software].append(i)
        if len(plans) < 2:
            continue
        real = np.array([np.mean([np.log(problem.runs[i].rate) for i in each]) for each in plans.values()])
        said = np.array([np.mean([np.log(problem.runs[i].rate) + logs[i] for i in each]) for each in plans.values()])
        for one, other in itertools.combinations(range(len(real)), 2):
            if abs(real[one] - real[other]) > np.log1p(APART):
                right.append((real[one] > real[other]) == (said[one] > said[other]))
        regrets.append(-np.expm1(real[np.argmax(said)] - real.max()))
        places.append(int((said > said[np.argmax(real)]).sum()))
    if not right:
        raise ValueError("no two plans are for one model, batch, devices and software")
    placed = np.array(places)
    return Order(
        len(places), len(right), float(np.mean(right)), float(np.mean(regrets)), float(np.max(regrets)),
        float(np.mean(placed == 0)), float(np.mean(placed < 3)),
    )  # fmt: skip


def by_system(problem: Problem, logs: np.ndarray) -> list[tuple[str, int, Errors]]:
    """By name: runs, and errors over all seeds."""
    return [
        (name, int((problem.system == i).sum()), Errors(logs[:, problem.system == i]))
        for i, name in enumerate(problem.systems)
    ]


def above_bound(problem: Problem, found: Fit) -> tuple[list[Run], list[Run]]:
    """Runs that are said to take less than the bound, and runs that did."""
    rows = np.arange(len(problem.runs))
    said = problem.predict(found.values, rows)
    seconds = said.total / np.exp([found.factors.get(run.facts.system, 0.0) for run in problem.runs])
    early = [problem.runs[i] for i in np.flatnonzero(said.bound > seconds)]
    return early, [problem.runs[i] for i in np.flatnonzero(said.bound > problem.steps)]


def coverage(logs: np.ndarray, spreads: np.ndarray, width: float = 1.2816) -> float:
    """Share of rows within their interval."""
    return float(np.mean(np.abs(logs) <= width * spreads))


def spread_of(logs: np.ndarray, width: float = 1.2816) -> float:
    """The spread whose 80 % interval holds four of five."""
    return float(np.quantile(np.abs(logs), 0.8) / width)


def spread_of_jax(problem: Problem, unseen: np.ndarray) -> float:
    """Of cjax's plans: that of a system never seen, and of a factor that few runs of JAX tell."""
    own = unseen[problem.system == problem.systems.index("JAX")]
    return float(np.hypot(spread_of(unseen), np.std(own) / len(own) ** 0.5))


def order_text(problem: Problem, logs: np.ndarray) -> str:
    """`order`, or that there is nothing to put in order."""
    try:
        return str(order(problem, logs))
    except ValueError:
        return "no two plans for one setting"


def names(runs: Sequence[Run]) -> str:
    return ", ".join(f"line {run.line} ({run.facts.system})" for run in runs) or "none"
