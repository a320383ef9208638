"""Least squares of the planner's constants on published runs: all at once, in logarithms, with a factor a system."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from cjax.planner.costs.calibration import TEN_PERCENT, Calibration
from cjax.planner.costs.duration import timed
from cjax.planner.costs.ideal import Ideal, ideal
from published.facts import CHIPS, CORES, Facts
from published.rows import Run

# Constant: what is known of it before any run is seen, how surely (standard deviation of its logarithm), least, most.
CONSTANTS: dict[str, tuple[float, float, float, float]] = {
    "matmul V100": (0.70, 0.1, 0.2, 0.98),
    "matmul A100": (0.78, 0.1, 0.2, 0.98),
    "matmul H100": (0.70, 0.1, 0.2, 0.98),
    "faster": (1.5, 0.1, 1.0, 2.0),
    "attention A100": (0.35, 0.2, 0.05, 0.9),
    "attention H100 2023": (0.2, 0.2, 0.05, 0.9),
    "attention H100 2024": (0.3, 0.2, 0.05, 0.9),
    "thin": (0.1, 1.0, 0.001, 2.0),
    "memory": (0.8, 0.1, 0.2, 0.95),
    "links": (0.8, 0.1, 0.3, 0.95),
    "adapters": (0.65, 0.2, 0.1, 0.95),
    "latency": (1e-5, 0.5, 1e-6, 5e-5),
    "hop": (3e-5, 0.7, 1e-6, 3e-4),
    "hidden data": (0.6, 0.3, 0.02, 0.98),
    "hidden gather": (0.6, 0.3, 0.02, 0.98),
    "hidden tensor": (0.1, 1.0, 0.01, 0.9),
    "overlapped": (0.7, 0.1, 0.05, 0.98),
    "hidden pipeline": (0.7, 0.3, 0.05, 0.99),
    "step": (2e-2, 0.5, 1e-4, 1e-1),
    "straggling": (0.003, 1.0, 1e-4, 0.05),
}
FACTOR_SPREAD = 0.15  # of systems' factors, in logarithms: what keeps that of a system with few runs near 1
LAUNCH = 1e-5  # seconds of a layer's pass, where all of it is few microseconds; no run says
COMPILED_STEP = 1e-2  # seconds beside a program that holds the whole step, optimizer and all
NOISE = 0.05  # of identical configurations in one source 0.035; beyond this a row counts as an outlier's


def ideals(runs: list[Run]) -> Ideal:
    """All runs, one below the other."""
    found = []
    for run in runs:
        calibration = Calibration("", cores=CORES[CHIPS[run.facts.card]], software=run.facts.software)
        found.append(ideal(run.work, run.split, run.table, run.hardware, calibration))
    return _stack(found)


def _stack(parts: list[Any]) -> Any:
    if isinstance(parts[0], dict):  # bytes by axis, which no constant touches
        return {}
    if not dataclasses.is_dataclass(parts[0]):
        return np.concatenate([np.atleast_1d(part) for part in parts])
    names = [field.name for field in dataclasses.fields(parts[0])]
    return type(parts[0])(*(_stack([getattr(part, name) for part in parts]) for name in names))


def take(plans: Any, rows: np.ndarray) -> Any:
    if isinstance(plans, dict):
        return {}
    if not dataclasses.is_dataclass(plans):
        return plans[rows]
    return type(plans)(*(take(getattr(plans, field.name), rows) for field in dataclasses.fields(plans)))


class Problem:
    """Runs with what is known of them, ready for any values of the constants."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs, self.plans = runs, ideals(runs)
        self.steps = np.array([run.step for run in runs])
        self.systems = sorted({run.facts.system for run in runs})
        self.system = np.array([self.systems.index(run.facts.system) for run in runs])

    def calibration(self, values: dict[str, float], rows: np.ndarray) -> Calibration:
        facts = [self.runs[i].facts for i in rows]

        def each(one: Callable[[Facts], float]) -> Any:  # constants of many runs are arrays
            return np.array([one(fact) for fact in facts], float)

        soft = [fact.software for fact in facts]
        hides: Any = np.array([one.hides_gradients for one in soft])
        kernels = {
            "none": "attention A100",
            "flash": "attention A100",
            "flash 2023": "attention H100 2023",
            "flash 2024": "attention H100 2024",
        }
        return Calibration(
            "fit",
            matmul=each(lambda fact: values[f"matmul {CHIPS[fact.card]}"]),
            attention=each(lambda fact: values[kernels[fact.kernel]]),
            thin=values["thin"],
            memory=values["memory"],
            links=values["links"],
            adapters=values["adapters"],
            latency=values["latency"],
            hop=values["hop"],
            hidden_data=hides * values["hidden data"],
            hidden_gather=values["hidden gather"],
            hidden_tensor=each(lambda fact: values["overlapped" if fact.software.hides_tensor else "hidden tensor"]),
            overlapped=values["overlapped"],
            hidden_pipeline=values["hidden pipeline"],
            launch=LAUNCH,
            step=each(lambda fact: COMPILED_STEP if fact.is_compiled else values["step"]),
            straggling=values["straggling"],
            faster=each(lambda fact: values["faster"] if fact.is_float8 else 1.0),
            peak=each(lambda fact: 2.0 if fact.is_float8 else 1.0),
            software=dataclasses.replace(soft[0], is_lockstep=False, hides_tensor=False, hides_gradients=True),
        )

    def run_calibration(self, values: dict[str, float], run: Run) -> Calibration:
        """Of one run, for other plans of it."""
        row = self.runs.index(run)
        arrays = self.calibration(values, np.array([row]))
        scalars = {
            field.name: float(value[0])
            for field in dataclasses.fields(arrays)
            if isinstance(value := getattr(arrays, field.name), np.ndarray)
        }
        return dataclasses.replace(arrays, cores=CORES[CHIPS[run.facts.card]], **scalars)

    def predict(self, values: dict[str, float], rows: np.ndarray | None = None):
        rows = np.arange(len(self.runs)) if rows is None else rows
        return timed(take(self.plans, rows), self.calibration(values, rows))


@dataclasses.dataclass(frozen=True)
class Fit:
    values: dict[str, float]
    factors: dict[str, float]  # log, by system
    spread: float = 0.1  # standard deviation of a row around its prediction, as its tails have it

    def log_ratio(self, problem: Problem, rows: np.ndarray, with_factor: bool = True) -> np.ndarray:
        """log of predicted / published tokens a second."""
        seconds = problem.predict(self.values, rows).total
        logs = np.log(problem.steps[rows] / seconds)
        if with_factor:
            logs = logs + np.array([self.factors.get(problem.runs[i].facts.system, 0.0) for i in rows])
        return logs


def fit(problem: Problem, rows: np.ndarray, start: dict[str, float] | None = None, with_factor: bool = True) -> Fit:
    """Constants and factors of these rows."""
    start = start or {name: known[0] for name, known in CONSTANTS.items()}
    names = list(CONSTANTS)
    low, high = (np.log([CONSTANTS[name][i] for name in names]) for i in (2, 3))
    at = np.clip(np.log([start[name] for name in names]), low + 1e-6, high - 1e-6)
    prior = np.log([CONSTANTS[name][0] for name in names])
    sure = np.array([CONSTANTS[name][1] for name in names])
    system = problem.system[rows]
    counts = np.bincount(system, minlength=len(problem.systems))
    plans = take(problem.plans, rows)

    def factors_of(logs: np.ndarray) -> np.ndarray:
        # The best factor of each system, given all else: its mean error, shrunk.
        sums = np.bincount(system, logs, minlength=len(problem.systems))
        return -sums / (counts + (NOISE * 2 / FACTOR_SPREAD) ** 2) * with_factor

    def logs_of(x: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(x), strict=True))
        seconds = timed(plans, problem.calibration(values, rows)).total
        return np.log(problem.steps[rows] / seconds)

    def residuals(x: np.ndarray) -> np.ndarray:
        logs = logs_of(x)
        factors = factors_of(logs)
        return np.concatenate([(logs + factors[system]) / NOISE, factors / FACTOR_SPREAD, (x - prior) / sure])

    found = least_squares(residuals, at, bounds=(low, high), loss="soft_l1", x_scale="jac", max_nfev=60, ftol=1e-5)
    logs = logs_of(found.x)
    factors = factors_of(logs)
    # Four rows of five lie within; a tenth more, since the constants knew these rows.
    spread = 1.1 * np.quantile(np.abs(logs + factors[system]), 0.8) / TEN_PERCENT
    return Fit(
        dict(zip(names, np.exp(found.x).tolist(), strict=True)),
        dict(zip(problem.systems, factors.tolist(), strict=True)),
        float(spread),
    )
