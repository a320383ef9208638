"""`cjax check-model`."""

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro

from cjax.cli.devices import training_devices
from cjax.parallelize import parallelize
from cjax.program import Check
from cjax.report.render import Table
from cjax.users import UsersError, user_parts

# Each kind of parallelism alone and the ways they meet, with the devices that each divides.
_COVER = (
    (1, "data=-1"),
    (1, "microbatches=2"),
    (1, "zero=2 microbatches=2"),
    (1, "zero=3 remat=block"),
    (1, "precision=bfloat16"),
    (2, "tensor=2 zero=1"),
    (4, "tensor=4"),
    (4, "tensor=2d:4"),
    (8, "tensor=3d:8"),
    (2, "sequence=ring:2"),
    (2, "pipeline=1f1b:2 microbatches=4"),
    (4, "pipeline=gpipe:2 microbatches=2 tensor=2"),
)
_POLL = 0.1


@dataclasses.dataclass(frozen=True)
class CheckModel:
    """Compares what plans compute with what your model computes on one device; exits with 1 if any differs.

    Loss, aux and every gradient of one batch, for each plan in turn. A plan that is refused is a row with its reason,
    and so is one that crashes or hangs: each has a process that it can take down.

    Attributes:
        model: `file.py:function` with a function of yours that returns what `cjax.parallelize` takes: (model, loss,
            optimizer, batch). Of a batch of ShapeDtypeStructs, the values are random, whole numbers 0 or 1.
        plans: the plans; one of each kind that the devices allow, if not given.
        devices: how many; "cpu:8" for virtual ones even where there are others.
        timeout: seconds that one plan may take, compiling included.
        disk_folder: where plans with disk= keep what they move there; made if it is missing.
    """

    model: tyro.conf.Positional[str]
    plans: tuple[str, ...] = ()
    devices: str | None = None
    timeout: float = 900.0
    disk_folder: str | None = None

    @staticmethod
    def parse(arguments: Sequence[str]) -> "CheckModel":
        return tyro.cli(CheckModel, args=arguments, prog="cjax check-model")

    def run(self) -> int:
        if ".py:" not in self.model:
            raise ValueError(
                f"{self.model}: write file.py:function, a function that returns (model, loss, optimizer, batch)"
            )
        if self.timeout <= 0:
            raise ValueError(f"--timeout {self.timeout:g}: give the seconds that one plan may take, such as 900")
        rows: list[dict[str, str]] = []
        for row in self._rows():
            rows.append(row)
            print(f"{len(rows):3} {row['plan']}: {row['verdict']}", file=sys.stderr, flush=True)
        cells = [(row["plan"], row["verdict"], row["error"], row["said"]) for row in rows]
        print(Table(("plan", "verdict", "of rounding", "worst, or why"), cells, right=frozenset({2})).text())
        wrong = sum(row["verdict"] in ("DIFFERS", "crashed") for row in rows)
        agree = sum(row["verdict"] == "agrees" for row in rows)
        print(f"\n{agree} of {len(rows)} plans agree with one device, {wrong} differ or crash")
        return 1 if wrong or not agree else 0

    def _rows(self) -> Iterator[dict[str, str]]:
        plans = list(self.plans)
        with tempfile.TemporaryDirectory() as folder:
            while True:
                worker = _Worker(self, plans, Path(folder))
                yield from worker.rows()
                if worker.lost is None:
                    return
                plan, why = worker.lost
                yield {"plan": plan, "verdict": "crashed", "error": "", "said": why}
                plans = worker.plans[worker.plans.index(plan) + 1 :]
                if not plans:
                    return


class _Worker:
    """A process that checks plans, until one takes it down."""

    def __init__(self, command: CheckModel, plans: Sequence[str], folder: Path) -> None:
        self.plans = list(plans)
        self.lost: tuple[str, str] | None = None
        self._timeout, self._told, self._noise = command.timeout, folder / "told", folder / "noise"
        self._told.write_text("")
        job = [command.model, command.devices, self.plans, str(self._told), command.disk_folder]
        with self._noise.open("w") as noise:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cjax.cli.check_model", json.dumps(job)], stdout=noise, stderr=noise
            )

    def rows(self) -> Iterator[dict[str, str]]:
        """The rows that it tells; afterwards, `lost` is the plan that it did not come back from."""
        read, current, since, hangs = 0, "", time.monotonic(), False
        try:
            while True:
                is_over = self._process.poll() is not None
                lines = self._told.read_text().splitlines(keepends=True)
                for line in lines[read:]:
                    if not line.endswith("\n"):
                        break
                    read, since, told = read + 1, time.monotonic(), json.loads(line)
                    if "unready" in told:
                        raise ValueError(told["unready"])
                    elif "plans" in told:
                        self.plans = told["plans"]
                    elif "verdict" in told:
                        current = ""
                        yield told
                    else:
                        current = told["plan"]
                if is_over:
                    break
                if current and time.monotonic() - since > self._timeout:
                    hangs = True
                    break
                time.sleep(_POLL)
        finally:
            self._process.kill()
            status = self._process.wait()
        if not status and not hangs:
            return
        text = self._noise.read_text(errors="replace")
        if not current:
            raise ValueError(f"the model can't be made ready to be checked:\n{text}")
        why = f"nothing came of it in {self._timeout:g} seconds: it hangs, or --timeout is too short"
        self.lost = current, why if hangs else f"{_ended(status)}: {_last_words(text)}"


def _ended(status: int) -> str:
    return f"the process died of {signal.Signals(-status).name}" if status < 0 else f"the process ended with {status}"


def _last_words(text: str) -> str:
    """The line of a dead process that says most: a failed check of XLA's, or the last."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["without a word"]
    fatal = [line for line in lines if "Check fail" in line or "RET_CHECK" in line or line.startswith("F")]
    return (fatal or lines)[-1][:500]


def cover(num_devices: int) -> list[str]:
    """Plans of every kind for so many devices.

    >>> cover(1)[-1], len(cover(8))
    ('precision=bfloat16', 12)
    """
    return [plan for needs, plan in _COVER if num_devices % needs == 0]


def work(job: str) -> None:
    """What a worker does: a line of JSON for each plan that it begins, and for each that it is through with."""
    model, text, plans, told, folder = json.loads(job)
    with Path(told).open("a") as file:

        def tell(**what: Any) -> None:
            print(json.dumps(what), file=file, flush=True)

        try:
            devices = training_devices(text)
            network, loss, optimizer, batch = user_parts(model)
            base = parallelize(network, loss, optimizer, batch, "data=1", devices=devices[:1], disk_folder=folder)
            state, batch = base.init(0), _with_values(batch)
        except (ValueError, OSError, ImportError, UsersError) as error:  # what `cjax` says of them in one message
            return tell(unready=str(error))
        plans = plans or cover(len(devices))
        tell(plans=plans)
        for plan in plans:
            tell(plan=plan)
            tell(plan=plan, **_row(base, state, batch, plan, devices))


def _row(base: Any, state: Any, batch: Any, plan: str, devices: Any) -> dict[str, str]:
    try:
        program = base.replan(plan, devices)
    except ValueError as error:
        return {"verdict": "refused", "error": "", "said": str(error)}
    except Exception as error:  # whatever it is, the other plans are still to be checked
        return {"verdict": "crashed", "error": "", "said": f"{type(error).__name__}: {error}"[:500]}
    try:
        check: Check = program.check(program.restore(state), batch)
    except MemoryError as error:
        return {"verdict": "not checked", "error": "", "said": str(error)}
    except Exception as error:
        return {"verdict": "crashed", "error": "", "said": f"{type(error).__name__}: {error}"[:500]}
    if check.ok:
        return {"verdict": "agrees", "error": f"{check.error:.2g}", "said": check.worst}
    wrong = check.wrong
    more = f"; {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
    return {"verdict": "DIFFERS", "error": f"{check.error:.2g}", "said": f"{wrong[0]}{more}"}


def _with_values(batch: Any) -> Any:
    """Numbers for the leaves of a batch that are shapes alone."""
    rng = np.random.default_rng(0)

    def value(leaf: Any) -> Any:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            return rng.normal(size=leaf.shape).astype(leaf.dtype)
        return rng.integers(0, 2, leaf.shape).astype(leaf.dtype)

    return jax.tree.map(value, batch)


if __name__ == "__main__":
    work(sys.argv[1])
