"""A job as the service knows it, from its submission to its end, and what it keeps of it on disk."""

import dataclasses
import json
import math
import time
from typing import Any

from cjax.cluster.folder import ClusterJobFolder
from cjax.cluster.rates import corrected
from cjax.cluster.running import RunningJob
from cjax.cluster.submitted import Submitted
from cjax.job.files import read_lines, read_object, write_whole
from cjax.scheduler.policy.job import Job, Placement, Speed, SpeedTable, size_of

OVER = ("done", "failed", "stopped")


@dataclasses.dataclass
class Segment:
    """Steps at one batch.

    Attributes:
        first: the step that it began behind.
        batch: rows.
        noise: the noise scale as it was known then.
    """

    first: int
    batch: float
    noise: float


class TrackedJob:
    """One job.

    Args:
        submitted: what its user said.
        folder: its own; what an earlier service knew of it is read there.
    """

    def __init__(self, submitted: Submitted, folder: ClusterJobFolder) -> None:
        self.submitted, self.folder = submitted, folder
        found: dict[str, Any] = read_object(folder.state) or {}
        self.status: str = found.get("status", "waiting")
        if self.status not in OVER:
            self.status = "waiting"
        self.least, self.most = found.get("least", submitted.least), found.get("most", submitted.most)
        self.step: int = found.get("step", 0)
        self.noise: float = found.get("noise", 0.0)
        self.starts: int = found.get("starts", 0)
        self.waited: float = found.get("waited", 0.0)
        self.service: float = found.get("service", 0.0)
        self.restart: float | None = found.get("restart")
        self.ended: float | None = found.get("ended")
        self.why: str = found.get("why", "")
        self.measured = {(int(devices), float(batch)): rate for devices, batch, rate in found.get("measured", [])}
        self.segments = [Segment(**each) for each in found.get("segments", [])]
        self._until: int = found.get("until", submitted.steps)  # the step that is its last, at the batch that it has
        self.running: RunningJob | None = None
        self.wanted: Placement | None = None
        self.is_told = False  # to stop, by its user
        self._seen = time.monotonic()

    def keep(self) -> None:
        """On disk."""
        names = ("status", "least", "most", "step", "noise", "starts", "waited", "service", "restart", "ended", "why")
        found = {name: getattr(self, name) for name in names}
        found["measured"] = [[*way, rate] for way, rate in self.measured.items()]
        found["until"] = self._until
        found["segments"] = [dataclasses.asdict(each) for each in self.segments]
        write_whole(self.folder.state, json.dumps(found))

    @property
    def is_over(self) -> bool:
        return self.status in OVER

    @property
    def placement(self) -> Placement:
        """What it holds, or is to hold as soon as it has left what it held."""
        if self.running is not None and self.running.told is None:
            return self.running.placement
        return self.wanted or {}

    # -- what it has done ---------------------------------------------------------------------------------------------
    def look(self) -> None:
        """Time goes on."""
        now = time.monotonic()
        since, self._seen = now - self._seen, now
        if self.is_over:
            return
        if self.running is None:
            self.waited += since
            return
        self.service += since * size_of(self.running.placement)
        beat = self.running.beat()
        self.step = max(beat.get("step") or 0, beat.get("first") or 0) if beat else self.step
        if (rate := self.running.rate()) is not None:
            self.measured[size_of(self.running.placement), self.running.speed.batch] = rate

    def look_at_noise(self) -> None:
        """Of a job whose batch may change, as its steps measure it."""
        if self.submitted.rule is None:
            return
        lines = read_lines(self.folder.run.run / "metrics.jsonl")[-50:]
        known = [line["noise_scale"] for line in lines if isinstance(line.get("noise_scale"), int | float)]
        if known and math.isfinite(known[-1]) and known[-1] > 0:
            self.noise = known[-1]

    def done(self, step: int) -> float:
        """Samples that so many steps are worth, counted in those of the base batch."""
        ends = [*(each.first for each in self.segments[1:]), math.inf]
        if not self.segments:
            return step * self.submitted.batch
        return sum(
            max(0.0, min(step, end) - each.first) * self._worth(each.batch, each.noise)
            for each, end in zip(self.segments, ends, strict=True)
        )

    def _worth(self, batch: float, noise: float) -> float:
        """Of a step, in samples of the base batch."""
        base = self.submitted.batch
        return batch * (base + noise) / (batch + noise)

    def begin(self, batch: float) -> int:
        """The step until which it goes on, where it is to start now at this batch."""
        if self.submitted.rule is None:
            return self._until
        first = self._saved()
        self.segments = [each for each in self.segments if each.first < first]
        self.segments.append(Segment(first, batch, self.noise))
        left = max(0.0, self.submitted.work - self.done(first))
        self._until = first + math.ceil(left / self._worth(batch, self.noise) - 1e-9)
        return self._until

    def _saved(self) -> int:
        """The step that it goes on behind."""
        checkpoints = (self.folder.run.run / "checkpoints").glob("*/checkpoint.json")
        return max((int(each.parent.name) for each in checkpoints if each.parent.name.isdecimal()), default=0)

    # -- what the policy is told --------------------------------------------------------------------------------------
    def table(self) -> SpeedTable:
        return corrected(self.submitted.speeds, self.measured)

    def told(self, restart: float) -> Job:
        """As a policy sees it."""
        done = self.done(self.step)
        return Job(
            self.submitted.name,
            self.table(),
            batch=self.submitted.batch,
            noise=self.noise,
            work_left=max(self.submitted.work - done, self.submitted.batch),
            work_done=done,
            service=self.service,
            waited=self.waited,
            submitted=self.submitted.time,
            least=self.least,
            most=self.most,
            restart=self.restart or restart,
        )

    def way(self, placement: Placement) -> Speed:
        """How it runs best on these devices."""
        return self.table().best(size_of(placement), self.submitted.batch, self.noise)

    def shown(self) -> dict[str, Any]:
        """For people."""
        running, job = self.running, self.submitted
        placement = running.placement if running else {}
        rate = end = None
        if running is not None:
            rate = self.measured.get((size_of(placement), running.speed.batch))
            worth = (rate or running.speed.samples_per_second) * self._worth(running.speed.batch, self.noise)
            left = job.work - self.done(self.step)
            end = time.time() + left / (worth / running.speed.batch)
        return {
            "name": job.name, "status": self.status, "devices": size_of(placement), "least": self.least,
            "most": self.most, "placement": {node: list(devices) for node, devices in placement.items()},
            "plan": running.speed.plan if running else "", "batch": running.speed.batch if running else job.batch,
            "step": self.step, "steps": self._until, "rate": rate, "end": end, "starts": self.starts, "why": self.why,
            "submitted": job.time, "ended": self.ended, "sizes": list(self.table().sizes),
        }  # fmt: skip
