"""One job of a workload, simulated: what it does in a stretch of time on the devices that it holds."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from cjax.scheduler.policy.job import Placement, size_of
from cjax.scheduler.replay.learned import LearnedTimes
from cjax.scheduler.replay.measured import Floats, MeasuredModel, Shape, Way
from cjax.scheduler.replay.own import OwnModel

Model = MeasuredModel | OwnModel


@dataclasses.dataclass(frozen=True)
class Submission:
    """A line of a workload.

    Attributes:
        name: the job's own.
        time: seconds from the beginning.
        model: what it trains.
        devices: that its user asked for.
        batch: that its user asked for.
        least: devices that it has to have.
        most: devices that it may have; what its model allows if None.
        restart: seconds that a start or a change is taken to cost it; as much as all others if None.
        starts: seconds until it works, by devices, where these were measured; else `restart`.
        leaves: seconds for which who is told to leave still holds its devices.
        fails_after: seconds on devices after which it ends without having done its work.
        ranges: other `least` and `most` that its user gives it later: when, and which.
    """

    name: str
    time: float
    model: Model
    devices: int
    batch: float
    least: int = 1
    most: int | None = None
    restart: float | None = None
    starts: Mapping[int, float] | None = None
    leaves: float = 0.0
    fails_after: float | None = None
    ranges: tuple[tuple[float, int, int], ...] = ()


class SimulatedJob:
    """Trains the model of a submission, at the speed that was measured."""

    def __init__(self, submission: Submission, adapts: bool, restart: float, learns: bool = False) -> None:
        self.submission, self.model = submission, submission.model
        self.adapts = adapts  # its batch, to what is best where it runs
        self.restart = restart
        self.learned = LearnedTimes() if learns else None  # what it knows of its steps, where it has no table
        self.time = submission.time
        self.least, self.most = submission.least, submission.most
        self.end: float | None = None
        self.progress = 0.0  # base steps
        self.epoch = 0
        self.noise: float | None = None  # as it was measured last
        self.service = self.waited = self.held = 0.0
        self.computed = 0.0  # device-seconds in which devices neither waited for each other nor for a start
        self.num_restarts = 0
        self.placement: Placement = {}
        self._shape: Shape = ()
        self._starting = 0.0  # seconds until it works
        self._way: Way | None = None
        self._chosen_for: tuple[Shape, float | None, int] | None = None

    @property
    def work(self) -> float:
        """Samples of the base batch in all."""
        return self.model.progress_at(self.model.num_epochs) * self.model.base_batch

    @property
    def done(self) -> float:
        return self.progress * self.model.base_batch

    def follow(self, now: float) -> None:
        """Takes the range that its user has given it by now."""
        for when, least, most in self.submission.ranges:
            if when <= now:
                self.least, self.most = least, most

    def place(self, placement: Placement | None, delay: float = 0.0) -> None:
        """Gives it other devices, or none; those it is given are free after `delay` seconds."""
        placement = placement or {}
        if placement == self.placement:
            return
        self.num_restarts += bool(placement) and bool(self.service)
        self.placement = placement
        self._shape = tuple(map(len, placement.values()))
        starts = self.submission.starts
        self._starting = delay + (self.restart if starts is None or not placement else starts[sum(self._shape)])
        self._choose()

    def advance(self, until: float) -> None:
        """Trains up to a time, or to its end."""
        seconds = until - self.time
        if not self._shape:
            self.waited += seconds
            self.time = until
            return
        fails = self.submission.fails_after
        if fails is not None and self.end is None and self.held + seconds >= fails:
            until = self.time + fails - self.held
            self.end, seconds = until, until - self.time
        self.held += seconds
        delay = min(self._starting, seconds)
        self._starting -= delay
        self._spend(delay)
        while self.time < until and self.epoch < self.model.num_epochs:
            self._train(until - self.time)
            self._choose()
        self.time = until

    def _spend(self, seconds: float, computing: float = 0.0) -> None:
        self.time += seconds
        self.computed += computing * seconds * size_of(self.placement)
        self.service += seconds * size_of(self.placement)

    def _train(self, seconds: float) -> None:
        """Up to the end of the epoch at most: in the next one the noise is another."""
        assert self._way is not None, "it runs"
        sqr, var = self.model.gradient(self._way.batch, self.epoch)
        scale = self._way.batch / self.model.base_batch
        self.noise = var / sqr * self.model.base_batch
        rate = (var + sqr) / (var / scale + sqr) / self.model.seconds(self._shape, self._way)
        if self.learned is not None:
            self.learned.see(self._shape, self._way.rows, *self.model.times_of(self._shape, self._way))
        whole = self.model.seconds(self._shape, self._way)
        share = 1 - self.model.times_of(self._shape, self._way)[1] / whole
        next_epoch = self.model.progress_at(self.epoch + 1)
        if self.progress + rate * seconds < next_epoch:
            self.progress += rate * seconds
            self._spend(seconds, share)
            return
        # Whole seconds, as in the simulations that this one is held against.
        self._spend(min(seconds, round((next_epoch - self.progress) / rate)), share)
        self.progress = next_epoch
        self.epoch += 1
        if self.epoch == self.model.num_epochs:
            self.end = self.time

    def _choose(self) -> None:
        """The way to make a batch where it is now."""
        count, facts = sum(self._shape), (self._shape, *self.knows)
        if facts == self._chosen_for:
            return
        self._chosen_for = facts
        if not count:
            self._way = None
        elif not self.adapts:
            self._way = self.model.way(self.submission.batch, count)
        else:
            ways = self.model.ways(count)
            self._way = ways[int(np.argmax(self.goodputs(self._shape)))]

    @property
    def knows(self) -> tuple[float | None, int]:
        """What goodputs depend on: where it is the same, so are they."""
        return self.noise, self.learned.version if self.learned is not None else 0

    def goodputs(self, shape: Shape) -> Floats:
        """Of each way to run on devices laid out like this, as far as the job knows; nothing is known of what was never
        run, and its smallest batch is then the best."""
        ways, noise, base = self.model.ways(sum(shape)), self.noise or 0.0, self.model.base_batch
        batches = self.model.batches_of_ways(sum(shape))
        if self.learned is None:
            seconds = self.model.seconds_of_ways(shape)
        elif self.learned.knows:
            seconds = self.learned.seconds(shape, ways)
        else:
            seconds = np.ones(len(ways)) * batches
        return batches / seconds * (base + noise) / (batches + noise)
