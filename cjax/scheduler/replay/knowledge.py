"""What a policy is told of a job that is simulated: all, what the job learned itself, or less."""

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping

import numpy as np

from cjax.scheduler.policy.baselines import Tiresias, fifo, optimus
from cjax.scheduler.policy.goodput import allocate
from cjax.scheduler.policy.job import Job, Nodes, Speed, SpeedTable
from cjax.scheduler.policy.packing import rooms
from cjax.scheduler.policy.worth import RULES, Rules
from cjax.scheduler.replay.measured import Way, packed
from cjax.scheduler.replay.own import OwnModel
from cjax.scheduler.replay.simulate import Setting
from cjax.scheduler.replay.simulated import Model, SimulatedJob

POLICIES = ("goodput", "fifo", "tiresias", "optimus")
# Each doubling of devices beyond those that a job has run on is hoped to bring 2^(1 - DOUBT) at most: what nobody saw
# is mostly worse than it looks, and to find that out is a restart there and one back.
DOUBT = 0.3


@dataclasses.dataclass(frozen=True)
class Knowledge:
    """What the goodput policy is told.

    Attributes:
        work: of a job, how much is left.
        speeds: at all sizes from the beginning; else what each job learned from its own steps so far.
        wrong_work: spread of the logarithm of an error in the work left, one for each job.
        wrong_speeds: the same of the speeds, one for each job and size.
    """

    work: bool = True
    speeds: bool = True
    wrong_work: float = 0.0
    wrong_speeds: float = 0.0


class Seen:
    """Makes of a simulated job what a policy is told."""

    def __init__(self, knowledge: Knowledge, nodes: Nodes) -> None:
        self.knowledge, self.room = knowledge, rooms(nodes)
        self._tables: dict[tuple[object, str | None], SpeedTable] = {}
        self._learned: dict[str, tuple[object, SpeedTable]] = {}

    def __call__(self, job: SimulatedJob) -> Job:
        submission, learned = job.submission, job.learned
        known = learned is None or learned.knows
        left = job.work - job.done if known and self.knowledge.work else None
        if left is not None and self.knowledge.wrong_work:
            left *= math.exp(self.knowledge.wrong_work * error_of(submission.name))
        return Job(
            submission.name,
            self._table(job) if learned is None else self._learned_table(job),
            batch=job.model.base_batch,
            noise=job.noise or 0.0,
            work_left=left,
            work_done=job.done,
            waited=job.waited,
            submitted=submission.time,
            least=job.least,
            most=job.most,
            restart=job.restart,
        )

    def _learned_table(self, job: SimulatedJob) -> SpeedTable:
        name = job.submission.name
        if name not in self._learned or self._learned[name][0] != job.knows:
            self._learned[name] = job.knows, learned_table(job, self.room)
        return self._learned[name][1]

    def _table(self, job: SimulatedJob) -> SpeedTable:
        wrong, name = self.knowledge.wrong_speeds, job.submission.name
        key = (job.model, name if wrong else None)
        if key not in self._tables:
            speeds = all_speeds(job.model, max(self.room), tuple(job.model.sizes(self.room)))
            if wrong:
                speeds = [
                    dataclasses.replace(
                        speed,
                        samples_per_second=speed.samples_per_second
                        * math.exp(wrong * error_of(f"{name} on {speed.devices}")),
                    )
                    for speed in speeds
                ]
            self._tables[key] = SpeedTable(speeds)
        return self._tables[key]


def all_speeds(model: Model, per_node: int, sizes: tuple[int, ...]) -> list[Speed]:
    """Each way to run on each size, on as few nodes as can be."""
    if isinstance(model, OwnModel):
        return list(model.speeds)
    found = []
    for size in sizes:
        seconds = model.seconds_of_ways(packed(size, per_node))
        found += [
            Speed(size, way.batch / second, way.batch)
            for way, second in zip(model.ways(size), seconds.tolist(), strict=True)
        ]
    return found


def learned_table(job: SimulatedJob, room: Mapping[int, int]) -> SpeedTable:
    """What a job believes: the goodput of its best way at each size, doubted where it never had so many."""
    assert job.learned is not None, "it learns"
    base, per_node = job.model.base_batch, max(room)
    sizes = job.model.sizes(room)
    if not job.learned.knows:
        # How long its samples take, nobody knows yet: its length counts as that of any new job. On one node it is hoped
        # to grow; further on nothing of it is seen.
        first = max(per_node, next(size for size in sizes if size >= job.least))
        return SpeedTable([Speed(size, size ** (1 - DOUBT), base) for size in sizes if size <= first])
    noise = job.noise or 0.0
    speeds = []
    for size in sizes:
        goodputs = job.goodputs(packed(size, per_node))
        best = int(np.argmax(goodputs))
        batch = float(job.model.batches_of_ways(size)[best])
        doubted = float(goodputs[best]) * min(1.0, job.learned.most_devices / size) ** DOUBT
        speeds.append(Speed(size, doubted * (batch + noise) / (base + noise), batch))
    return SpeedTable(speeds)


def error_of(what: str) -> float:
    """A draw from the normal distribution, the same whenever it is asked for."""
    return float(np.random.default_rng(zlib.crc32(what.encode())).standard_normal())


# -- policies of fixed batches ----------------------------------------------------------------------------------------
def asked_alone(job: SimulatedJob) -> Job:
    """For policies that ask for nothing but what users asked for."""
    submission = job.submission
    return Job(
        submission.name,
        _ANY,
        service=job.service,
        submitted=submission.time,
        asked=submission.devices,
    )


_ANY = SpeedTable([Speed(1, 1.0)])


class SeenByOptimus:
    """Steps that are left at the batch that was asked for, and their seconds by devices."""

    def __init__(self, nodes: Nodes) -> None:
        self.per_node, self.most = max(nodes.values()), sum(nodes.values())
        self._tables: dict[tuple[object, float], SpeedTable] = {}

    def __call__(self, job: SimulatedJob) -> Job:
        submission, model = job.submission, job.model
        key = (model, submission.batch)
        if key not in self._tables:
            self._tables[key] = SpeedTable(list(self._speeds(model, submission.batch)))
        return Job(
            submission.name,
            self._tables[key],
            batch=submission.batch,
            work_left=submission.batch * model.steps_left(submission.batch, job.epoch),
            submitted=submission.time,
        )

    def _speeds(self, model: Model, batch: float) -> list[Speed]:
        if isinstance(model, OwnModel):
            found = {
                speed.devices: speed for speed in model.speeds if model.way(batch, speed.devices).batch == speed.batch
            }
            return [found[size] for size in sorted(found)]
        most = 1 if model.fixed else min(int(batch // model.least_rows), self.most)
        found = []
        for size in range(1, most + 1):
            way = model.way(batch, size)
            if size == 1 and not way.extra_passes:
                way = Way(math.ceil(way.rows / 2), 1, 1)  # as in the published simulation
            found.append(Speed(size, batch / model.seconds(packed(size, self.per_node), way), batch))
        return found


def setting_of(name: str, nodes: Nodes, knowledge: Knowledge = Knowledge(), rules: Rules = RULES) -> Setting:  # noqa: B008
    """A policy by its name, and what it is told.

    Raises:
        ValueError: no policy has this name.
    """
    if name == "goodput":
        return Setting(functools.partial(allocate, rules=rules), Seen(knowledge, nodes), True, not knowledge.speeds)
    if name == "optimus":
        return Setting(optimus, SeenByOptimus(nodes))
    if name in ("fifo", "tiresias"):
        return Setting(fifo if name == "fifo" else Tiresias(), asked_alone)
    raise ValueError(f"no policy is called {name!r}; there are {', '.join(POLICIES)}")
