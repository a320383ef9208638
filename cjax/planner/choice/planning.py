"""One model and its batch on devices of one kind, as a search asks of them: worked out once, for all that is asked."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import optax

from cjax.jax_compat.core import Literal
from cjax.plan import Auto, Plan
from cjax.planner.choice.assumed import assumed
from cjax.planner.choice.explain import Explanation, explain
from cjax.planner.choice.scored import Objective, Question, Scored
from cjax.planner.choice.search import Found, search
from cjax.planner.choice.space import CARRIED, Space, space_of, words_of
from cjax.planner.costs.calibration import Calibration
from cjax.planner.costs.duration import Durations, durations
from cjax.planner.costs.memory import MemoryCost, memory_of
from cjax.planner.costs.profiled import profiled
from cjax.planner.hardware import Hardware
from cjax.planner.profile import Profile, factor_of, read_profile
from cjax.planner.reading.readings import Readings
from cjax.planner.table import PlanTable
from cjax.planner.work import Work, WorkSplit
from cjax.trace.microbatches.part import read_part
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource
from cjax.trace.stages.counters import depends
from cjax.trace.stages.stacks import find_stacks, reads_states, torn_states

MANY = 64  # plans of which the simplest is taken where times are guesses
UNTOLD = 1.0  # times as long again has a guess to be before a word more is worth it


@dataclass(frozen=True)
class Planning:
    """What plans can be asked about.

    Args:
      source: the model, its loss and its batch.
      optimizer: what trains it, if anything does.
      hardware: so many of the devices.
      learned: by kind of device, how many times longer than predicted a step of this model took, and what says so.
    """

    source: TraceSource
    optimizer: optax.GradientTransformation | None
    hardware: Callable[[int], Hardware]
    learned: dict[str, tuple[float, str]] = field(default_factory=dict)

    @functools.cached_property
    def trace(self) -> Trace:
        return self.source.read()

    @functools.cached_property
    def readings(self) -> Readings:
        return Readings(self.source, self._optimizer_bytes())

    @functools.cached_property
    def work(self) -> Work:
        """As plans without tensor parallelism have it read."""
        return self.readings.work(Plan())

    def _optimizer_bytes(self) -> float:
        """Of its state for each byte of trained parameters."""
        if self.optimizer is None:
            return 0.0
        params = self.source.capture.params_shape
        with jax.numpy_dtype_promotion("standard"):  # of optax: see store_optimizer
            made: Any = jax.eval_shape(self.optimizer.init, params)
        whole = sum(_bytes(leaf) for leaf in jax.tree.leaves(params))
        return sum(_bytes(leaf) for leaf in jax.tree.leaves(made)) / max(1, whole)

    @property
    def calibration(self) -> Calibration | None:
        """Of these devices; None where nobody has measured any like them."""
        return self._calibrated(self.hardware(1))

    def _calibrated(self, hardware: Hardware) -> Calibration | None:
        _, calibration = profiled(hardware, self._profile)
        if calibration is None or hardware.name not in self.learned:
            return calibration
        return calibration.measured(*self.learned[hardware.name])

    def learn(self, plan: Plan, step_seconds: Sequence[float]) -> None:
        """Takes what steps of this program took for the measure of all further predictions on such devices.

        Where nobody has measured the devices, there is no prediction that it could be the measure of.

        Args:
          plan: the program's, resolved.
          step_seconds: of some steps, without those that were compiled first.
        """
        name = self.hardware(1).name
        self.learned.pop(name, None)
        base = self.calibration
        scored = "" if base is None else self.score(plan)
        if base is not None and isinstance(scored, Scored):
            ratio = factor_of(step_seconds, scored.time)
            said = f"{base.source}; steps of this program took {ratio:.2f} times as long as these say"
            self.learned[name] = ratio, said

    @functools.cached_property
    def _profile(self) -> Profile | None:
        """What was measured here on devices of this kind, absent ones too: a chip is a chip.

        Of several processes each has a file of its own, or none: all of them have to come to the same plan, or they
        wait for each other in different programs.
        """
        if jax.distributed.is_initialized():
            return None
        return read_profile(self.hardware(1).name)

    def known(self, num_devices: int) -> Hardware:
        """So many of the devices, with measured rates where no datasheet has any."""
        return profiled(self.hardware(num_devices), self._profile)[0]

    @functools.cached_property
    def question(self) -> Question:
        def split(plan: Plan) -> WorkSplit:
            found = self.readings.split(plan)
            if plan.tensor.size > 1 and sum(found.held) >= sum(self.readings.split(Plan(data=1)).held):
                raise ValueError(f"tensor={plan.tensor} splits no weights of this model")
            return found

        return Question(self.readings.work, split, self.known, self._memory, self._durations)

    def _memory(self, work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware) -> MemoryCost:
        # As the devices are, and not with rates from measurements: which kernels there are hangs on what is known of
        # the card.
        return memory_of(work, split, table, self.hardware(hardware.num_devices))

    def _durations(self, work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware) -> Durations:
        calibration = self._calibrated(self.hardware(hardware.num_devices))
        if calibration is None:
            hardware, calibration = assumed(hardware)
        return durations(work, split, table, hardware, calibration)

    def on(self, hardware: Callable[[int], Hardware]) -> "Planning":
        """The same model and batch on other devices: what has been read of them is not read again."""
        other = replace(self, hardware=hardware)
        read = {name: getattr(self, name) for name in ("trace", "readings", "work", "_stacks", "_hands_on")}
        asks = {"hardware_at": other.known, "memory": other._memory, "durations": other._durations}
        vars(other).update(read, question=replace(self.question, **asks))
        return other

    def space(self, auto: Auto, num_devices: int) -> Space:
        """What may be chosen from."""
        rows = [leaf.shape[0] for leaf in jax.tree.leaves(self.source.batch_shape) if leaf.shape]
        near = self.hardware(num_devices).devices_per_host
        return space_of(self.work, rows, self._stacks, near, auto, self._hands_on)

    @functools.cached_property
    def _stacks(self) -> tuple[int, ...]:
        """Layers of each stack that stages can share; none where the loss reads what it makes of other examples."""
        stacks = find_stacks(self.trace)
        if reads_states(self.trace, stacks) or torn_states(self.trace, stacks):
            return ()
        return tuple(stack.length for stack in stacks)

    def search(self, asked: "Asked") -> Found:
        """The best plans.

        A loss that can't be put together from micro-batches is asked only when a plan has some: its answer takes two
        more traces.
        """
        space = asked.limit(self.space(asked.auto, max(asked.num_devices)))
        found = self._search(space, asked)
        if not any(each.plan.microbatches > 1 for each in found.best) or not space.cuts_batch:
            return found
        if not (reason := self._undivided(found.best, asked.auto)):
            return found
        found = self._search(replace(space, cuts_batch=False), asked)
        found.refused["microbatches"] = reason
        return found

    def _search(self, space: Space, asked: "Asked") -> Found:
        """Where nobody has measured the devices, plans that split the model are tried if no other fits, or if the user
        fixed such a word."""
        question = self.question if asked.memory is None else self.question.within(asked.memory)
        if self.calibration is not None:
            return search(question, space, asked.num_devices, asked.objective, asked.top)
        args = (asked.num_devices, asked.objective, max(asked.top, MANY))
        found = search(question, replace(space, splits_model=False), *args)
        if not found.best:
            found = search(question, space, *args)
        if asked.objective != "memory":
            found.best = _simplest_first(found.best)
        found.best = found.best[: asked.top]
        return found

    def _undivided(self, best: Sequence[Scored], auto: Auto) -> str:
        """Why the loss can't be put together from parts; empty if it can."""
        num = next(each.plan.microbatches for each in best if each.plan.microbatches > 1)
        try:
            read_part(self.source, num, apart=auto.fixed.get("loss") == "microbatch")
        except ValueError as error:
            return str(error)
        return ""

    def score(self, plan: Plan) -> Scored | str:
        """One resolved plan, or why it can't be had."""
        return self.question.score(plan)

    @functools.cached_property
    def _hands_on(self) -> bool:
        """Whether the model makes state of examples, which each micro-batch changes for the next."""
        jaxpr, state = self.trace.closed.jaxpr, self.trace.leaves_of("model_state")
        on = {jaxpr.invars[i]: frozenset(["batch"]) for i in self.trace.leaves_of("batch")}
        depends(jaxpr.eqns, on, lambda eqn, kinds: kinds)
        return any(on.get(v) for v in jaxpr.outvars[len(jaxpr.outvars) - len(state) :] if not isinstance(v, Literal))

    def explain(self, plan: Plan) -> Explanation | str:
        """What each word of a resolved plan is there for, or why it can't be had."""
        carried = {name: getattr(plan, name) for name in CARRIED}
        space = self.space(Auto(carried, "auto"), plan.num_devices)
        return explain(self.question, space, plan)


@dataclass(frozen=True)
class Asked:
    """What is asked of a search.

    Args:
      auto: the words that are fixed.
      num_devices: numbers of devices that may be taken.
      objective: what is to be least.
      top: how many plans are wanted.
      refused: plans that turned out not to work: what made them so is left out.
      memory: bytes a device that a plan may need; None: what the device has.
    """

    num_devices: tuple[int, ...]
    auto: Auto = field(default_factory=Auto)
    objective: Objective = "time"
    top: int = 1
    refused: tuple[Plan, ...] = ()
    memory: int | None = None

    def limit(self, space: Space) -> Space:
        """`space` without what has been refused: the word that is the likeliest reason."""
        for plan in self.refused:
            if plan.overlap > 1:
                space = replace(space, hands_on=True)
            elif plan.pipeline.size > 1:
                space = replace(space, stacks=())
            elif plan.model_size * plan.expert > 1 or plan.sequence.mode == "gather":
                space = replace(space, without=space.without | {words_of(plan)})
            else:
                space = replace(space, cuts_batch=False)
        return space


def _simplest_first(best: Sequence[Scored]) -> list[Scored]:
    """Plans that nobody could tell apart without a measurement come in the order of their words."""
    most = (1 + UNTOLD) * min((each.time for each in best), default=0.0)
    near = [each for each in best if each.time <= most]
    near.sort(key=lambda each: (each.num_devices, len(str(each.plan).split())))
    return [*near, *(each for each in best if each.time > most)]


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * leaf.dtype.itemsize
