"""A job while it holds devices: its supervisor, in a thread of its own."""

import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from cjax.cluster.executor import HeldDevices, NodeGone, ProcessExecutor
from cjax.cluster.folder import ClusterJobFolder
from cjax.cluster.submitted import WAY, Submitted, rate_factor
from cjax.job.beat import read_beat
from cjax.job.member import AGAIN
from cjax.job.processes import WorkerProcess
from cjax.job.spec import JobSpec, without_launchers
from cjax.job.supervisor import Supervisor
from cjax.scheduler.policy.job import Placement, Speed, size_of

HANG_AFTER = 30.0  # seconds: the machine is shared
FRUITLESS = 3  # starts in a row without a new step, after which a job gives its devices up
SEEN = 3  # steps after a start from which on its steps are believed
_CACHES = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")

Outcome = Literal["done", "failed", "stopped", "lost"]


class RunningJob:
    """One job on the devices that it holds.

    Args:
        submitted: the job.
        folder: its own.
        speed: how it is to run there: plan and batch.
        until: the step at which it is done.
        placement: the devices.
        executor: who starts its processes.
        platform: "cpu" for virtual devices, or "cuda".
        grace: seconds that workers have to save and leave.
    """

    def __init__(
        self,
        submitted: Submitted,
        folder: ClusterJobFolder,
        speed: Speed,
        until: int,
        placement: Placement,
        executor: ProcessExecutor,
        platform: str,
        grace: float,
    ) -> None:
        self.submitted, self.speed, self.placement = submitted, speed, placement
        self.outcome: Outcome | None = None
        self.why = ""
        self.begun, self.stepped, self.told = time.monotonic(), None, None
        self.begun_at = time.time()
        self._folder, self._until, self._executor, self._platform = folder, until, executor, platform
        self._held: HeldDevices | None = None
        self._met: tuple[str, int] = ("", 0)
        is_cpu, (count, *_) = platform == "cpu", map(len, placement.values())
        spec = JobSpec(
            submitted.command, str(folder.run.run), len(placement), devices=count if is_cpu else None, grace=grace,
            hang_after=HANG_AFTER, fruitless=FRUITLESS,
        )  # fmt: skip
        self._out, self._err = open(os.devnull, "w"), open(folder.said, "a")  # noqa: SIM115  # closed behind the thread
        self._supervisor = Supervisor(spec, self._start, self._out, self._err)
        self._thread = threading.Thread(target=self._go, name=f"job {submitted.name}")
        self._thread.start()

    def _go(self) -> None:
        outcome: Outcome = "failed"
        try:
            self._held = self._executor.hold(self.submitted.name, self.placement)
            code = self._supervisor.run()
            outcome = "done" if code == 0 else "stopped" if code == AGAIN else "failed"
            self.why = "" if outcome != "failed" else self._last_said()
        except NodeGone as error:
            outcome, self.why = "lost", str(error)
        except Exception as error:  # one job's trouble is not that of all others
            self.why = f"{type(error).__name__}: {error}"
        finally:
            if self._held is not None:
                self._held.release()
            self._out.close()
            self._err.close()
            self.outcome = outcome

    def _last_said(self) -> str:
        lines = self._folder.said.read_text(errors="replace").splitlines()
        return next((line.removeprefix("cjax run: ") for line in reversed(lines) if line.startswith("cjax run: ")), "")

    def _start(self, rank: int, line: Sequence[str], said: Mapping[str, str], log: Path) -> WorkerProcess:
        assert self._held is not None, "devices are held before anything is started on them"
        environment = without_launchers(self.submitted.environment)
        told = {name: value for name, value in said.items() if name not in _CACHES or _CACHES[0] not in environment}
        if rank == 0:
            self._met = self._held.meeting()
        # A process has all devices of its node that the job holds.
        told |= {"MASTER_ADDR": self._met[0], "MASTER_PORT": str(self._met[1])}
        told |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", WAY: json.dumps(self._way())}
        if self._platform != "cpu":
            devices = list(self.placement.values())[rank]
            told["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
        return self._held.start(rank, line, environment | told, log, self.submitted.folder)

    def _way(self) -> dict[str, Any]:
        job, speed = self.submitted, self.speed
        return {
            "plan": speed.plan, "batch": speed.batch, "base": job.batch, "steps": self._until, "rule": job.rule,
            "rate": rate_factor(job.rule, speed.batch, job.batch), "devices": size_of(self.placement),
        }  # fmt: skip

    # -- what the service asks ----------------------------------------------------------------------------------------
    @property
    def is_over(self) -> bool:
        return self.outcome is not None and not self._thread.is_alive()

    def stop(self) -> None:
        """It saves and leaves; a second time, it is ended at once."""
        self.told = self.told or time.monotonic()
        self._supervisor.tell(signal.SIGTERM)

    def beat(self) -> dict[str, Any]:
        """What its first worker said last; nothing, as long as it has said nothing."""
        state = getattr(self._supervisor, "state", None)
        found = None if state is None else read_beat(self._folder.run.beat(state.incarnation, 0))
        if found is None:
            return {}
        if self.stepped is None and found["step"] is not None and found["step"] > (found["first"] or 0):
            self.stepped = time.monotonic()
        return found

    def rate(self) -> float | None:
        """Samples a second, as far as steps were seen."""
        beat = self.beat()
        if not beat or beat["step"] is None or beat["step"] - (beat["first"] or 0) < SEEN or not beat["step_seconds"]:
            return None
        return self.speed.batch / beat["step_seconds"]
