"""How long a plan's step takes: parts that add up, an interval around the sum, and a bound that no fit is part of."""

import dataclasses
import functools
from collections.abc import Iterable

import numpy as np

from cjax.planner.costs.calibration import TEN_PERCENT, Calibration
from cjax.planner.costs.compute import Pass
from cjax.planner.costs.ideal import Ideal, Ways, ideal
from cjax.planner.costs.pipelines import asynchronous, makespan, ticks
from cjax.planner.costs.transfers import Receipt
from cjax.planner.hardware import Hardware
from cjax.planner.table import REMATS, SCHEDULES, PlanTable
from cjax.planner.work import Work, WorkSplit

PARTS = (
    "matmul", "attention", "elementwise", "recompute", "tensor", "sequence", "data", "gather", "pipeline", "bubble",
    "optimizer", "overhead",
)  # fmt: skip

# Nineteen of twenty published runs spend less of a step outside of matmuls, attention and bubbles; and how uncertain is
# what goes beyond it.
USUAL, UNKNOWN = 0.4, 0.5


@dataclasses.dataclass(frozen=True)
class Durations:
    """Seconds of a step, and what they are spent on; arrays [plans].

    Args:
      matmul, attention, elementwise: what is computed once, forward and backward, on the slowest stage of a pipeline.
      recompute: what of it is computed again for the backward pass.
      tensor, sequence: their collectives, as far as nothing hides them. The same goes for all transfers here.
      data: gradients, and parameters under ZeRO 1 and 2.
      gather: parameters under ZeRO-3.
      pipeline: a stage's output on its way to the next.
      bubble: stages that wait.
      optimizer: the optimizer.
      overhead: what a step takes beside all that; stragglers among many hosts.
      hidden: transfers that go on beside computation. No part of the total.
      bound: no software takes less on this hardware.
      low, high: the ends of an 80 % interval around the total.
      flops: that a device computes, what is computed again with it.
      moved: bytes that a device receives, by axis.
    """

    matmul: np.ndarray
    attention: np.ndarray
    elementwise: np.ndarray
    recompute: np.ndarray
    tensor: np.ndarray
    sequence: np.ndarray
    data: np.ndarray
    gather: np.ndarray
    pipeline: np.ndarray
    bubble: np.ndarray
    optimizer: np.ndarray
    overhead: np.ndarray
    hidden: np.ndarray
    bound: np.ndarray
    low: np.ndarray
    high: np.ndarray
    flops: np.ndarray
    moved: dict[str, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        return _added(getattr(self, part) for part in PARTS)


def durations(
    work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware, calibration: Calibration
) -> Durations:
    """How long a step takes under each plan of a table.

    Args:
      work: the model and its batch.
      split: what the table's tensor and sequence words make of it.
      table: the plans.
      hardware: the devices. Links that it does not know cost nothing.
      calibration: what they and their software make of the datasheet.
    """
    return timed(ideal(work, split, table, hardware, calibration), calibration)


def timed(plans: Ideal, calibration: Calibration) -> Durations:
    """The same of plans that were looked at before."""
    return _Clock(plans, calibration).durations()


@dataclasses.dataclass(frozen=True)
class _Seconds:
    """One micro-batch through one stretch, one way."""

    matmul: np.ndarray
    attention: np.ndarray
    elementwise: np.ndarray
    recompute: np.ndarray
    tensor: np.ndarray
    sequence: np.ndarray
    hidden: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.matmul + self.attention + self.elementwise + self.recompute + self.tensor + self.sequence


_Both = tuple[_Seconds, _Seconds]  # forward, backward


class _Clock:
    def __init__(self, plans: Ideal, calibration: Calibration) -> None:
        self._plans, self._constants = plans, calibration

    def durations(self) -> Durations:
        plans, constants = self._plans, self._constants
        software = constants.software
        layer, first, last = (self._both(ways, ways is plans.layer) for ways in (plans.layer, plans.first, plans.last))
        piped = plans.stages > 1
        # The stage that is waited for: the one with what comes before the layers, or the one with what comes after.
        early = plans.full * _sum(layer) + _sum(first)
        late = plans.short * _sum(layer) + _sum(last)
        # Stages that take all branches together each run what comes before and after the layers as well.
        both = plans.together | ~piped
        is_late = ~both & (late > early)
        layers = np.where(is_late, plans.short, plans.full)
        weights = (layers, 1.0 * ~is_late, 1.0 * (is_late | both))
        computed = np.where(both, early + _sum(last), np.maximum(early, late))
        if constants.shares_cores:
            # A stage that waits leaves the cores to the others: what counts is an average stage's work.
            share = np.where(both, 1.0, plans.stages)
            weights = (np.where(both, plans.full, plans.layers / share), 1.0 / share, 1.0 / share)
            computed = _added(weight * _sum(way) for weight, way in zip(weights, (layer, first, last), strict=True))
        found = {
            name: plans.microbatches
            * sum(
                weight * sum(getattr(way, name) for way in ways)
                for weight, ways in zip(weights, (layer, first, last), strict=True)
            )
            for name in ("matmul", "attention", "elementwise", "recompute", "tensor", "sequence", "hidden")
        }
        back = plans.full * layer[1].total + first[1].total + last[1].total
        found["elementwise"] = found["elementwise"] + plans.accumulate * plans.turns / constants.memory
        found["gather"], beside = self._exposed(plans.gather, plans.microbatches * computed, constants.hidden_gather)
        each, beside_each = self._exposed(plans.reduce_each, plans.microbatches * computed, constants.hidden_data)
        hidden = constants.hidden_data if software.hides_gradients else 0.0
        once, beside_once = self._exposed(plans.reduce, back, hidden)
        found["data"] = each + once
        found["hidden"] = found["hidden"] + beside + beside_each + beside_once
        found["bubble"], found["pipeline"] = self._pipelines(layer, first, last, computed)
        found["optimizer"] = plans.optimizer / constants.memory
        spent = sum(found[name] for name in found if name != "hidden")
        found["overhead"] = constants.step + constants.straggling * np.log2(plans.hosts) * spent
        found = {name: seconds / constants.factor for name, seconds in found.items()}
        total = _added(found[name] for name in PARTS)
        wide = np.exp(TEN_PERCENT * self._spread(found, total))
        return Durations(
            **found, bound=self._bound(), low=total / wide, high=total * wide, flops=self._flops(), moved=plans.moved
        )

    def _spread(self, found: dict[str, np.ndarray], total: np.ndarray) -> np.ndarray:
        """Wider for plans that spend more outside of matmuls and attention than the runs that were fitted on."""
        seldom = 1 - sum(found[name] for name in ("matmul", "attention", "recompute", "bubble")) / total
        return np.hypot(self._constants.spread, UNKNOWN * np.maximum(0.0, seldom - USUAL))

    # -- one micro-batch ----------------------------------------------------------------------------------------------
    def _both(self, ways: Ways, is_layer: bool) -> _Both:
        there = self._way(ways.forward, ways.tensor_forward, ways.sequence_forward, ways.exchanges, is_layer)
        back = self._way(ways.backward, ways.tensor_backward, ways.sequence_backward, ways.exchanges, is_layer, 2.0)
        if not is_layer:
            return there, back
        remat = self._plans.remat
        light = there.attention + there.elementwise
        again = np.where(remat == REMATS.index("dots"), light, 0.0)
        is_whole = remat == REMATS.index("block")
        again = np.where(is_whole, self._matmul(ways.again, is_layer) + light, again)
        return there, dataclasses.replace(
            back,
            recompute=again,
            tensor=back.tensor + is_whole * there.tensor,
            sequence=back.sequence + is_whole * there.sequence,
            hidden=back.hidden + is_whole * there.hidden,
        )

    def _way(
        self,
        one: Pass,
        tensor: Receipt,
        sequence: Receipt,
        exchanges: np.ndarray,
        is_layer: bool,
        launches: float = 1.0,
    ) -> _Seconds:
        constants = self._constants
        matmul = self._matmul(one, is_layer)
        attention = one.attention / constants.attention
        elementwise = one.touched / constants.memory + constants.launch * launches * is_layer
        computed = matmul + attention + elementwise
        is_abreast = self._plans.turns < self._plans.microbatches
        hidden = np.where(is_abreast | constants.software.hides_tensor, constants.overlapped, constants.hidden_tensor)
        tensor_seconds, beside = self._exposed(tensor, computed, hidden)
        sequence_seconds, beside_too = self._exposed(
            sequence, computed, np.where(exchanges, constants.hidden_tensor, constants.overlapped)
        )
        none = np.zeros_like(matmul)
        return _Seconds(matmul, attention, elementwise, none, tensor_seconds, sequence_seconds, beside + beside_too)

    def _matmul(self, one: Pass, is_layer: bool) -> np.ndarray:
        faster = self._constants.faster if is_layer else 1.0
        return (one.matmul + self._constants.thin * faster * one.thin) / (self._constants.matmul * faster)

    def _exposed(
        self, transfer: Receipt, computed: np.ndarray, hidden: float | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What of a transfer is waited for, and what is not."""
        constants = self._constants
        seconds = transfer.seconds(constants.links, constants.adapters, constants.latency, constants.hop)
        beside = hidden * np.minimum(seconds, computed)
        return seconds - beside, beside

    # -- pipelines ----------------------------------------------------------------------------------------------------
    def _pipelines(
        self, layer: _Both, first: _Both, last: _Both, computed: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Bubble, and transfers between stages."""
        plans, constants = self._plans, self._constants
        send = plans.send.seconds(constants.links, constants.adapters, constants.latency, constants.hop)
        bubble = np.zeros_like(computed)
        if not (plans.stages > 1).any():
            return bubble, np.zeros_like(computed)
        rows = plans.rows.seconds(constants.links, constants.adapters, constants.latency, constants.hop)
        # In lockstep a tick ends when its messages are there: XLA lays nothing beside them.
        arrived = send + rows
        # Half of a matmul's gradients are of weights.
        weight = plans.full * layer[1].matmul / 2
        if not constants.software.is_lockstep:
            forward, backward = plans.full * layer[0].total, plans.full * layer[1].total - weight
            for number, name in enumerate(SCHEDULES):
                waits = asynchronous(name, plans.stages, plans.chunks, forward, backward, weight)
                bubble = np.where((plans.schedule == number) & (plans.stages > 1), waits, bubble)
            sent = (1 - constants.hidden_pipeline) * 2 * plans.microbatches * plans.chunks * send
            return bubble, np.where(plans.stages > 1, sent, 0.0)
        forward = plans.full * layer[0].total + first[0].total * ~plans.together
        # What comes after the layers runs forwards and backwards in the tick of a B.
        tail = plans.short * layer[1].total + last[0].total + last[1].total
        whole = np.maximum(plans.full * layer[1].total + first[1].total, tail)
        # Together, the ends run once for each micro-batch, whatever else is in their tick.
        whole = np.where(plans.together, plans.full * layer[1].total, whole)
        computed = np.where(plans.together, plans.full * _sum(layer), computed)
        forward, backward, weight = (seconds / plans.chunks for seconds in (forward, whole - weight, weight))
        # Stages that share cores leave these to others while they wait; what they throw away takes its time.
        counts = (plans.stages > 1) & (plans.together | (not constants.shares_cores))
        columns = np.stack([plans.schedule, plans.stages, plans.microbatches, plans.chunks, plans.together])
        kinds, place = np.unique(columns[:, counts].astype(int), axis=1, return_inverse=True)
        at = np.flatnonzero(counts)
        for i, (schedule, stages, microbatches, chunks, together) in enumerate(kinds.T.tolist()):
            mine = at[place.reshape(-1) == i]
            found = ticks(SCHEDULES[schedule], stages, microbatches, chunks)
            args = (forward[mine], backward[mine], weight[mine], bool(together))
            bubble[mine] = np.maximum(makespan(found, *args) - microbatches * computed[mine], 0.0)
        return bubble, arrived

    # -- what no software saves ---------------------------------------------------------------------------------------
    def _least(self, ways: Ways, peak: float) -> np.ndarray:
        passes = (ways.forward, ways.again * self._again(ways), ways.backward)
        return _added((one.matmul_least + one.attention_least) / peak for one in passes)

    def _again(self, ways: Ways) -> np.ndarray:
        whole = self._plans.remat == REMATS.index("block")
        return 1.0 * (whole if ways is self._plans.layer else np.zeros_like(whole))

    def _bound(self) -> np.ndarray:
        """Arithmetic at the peak, or the longest of the transfers at full rate: either could hide the other."""
        plans = self._plans
        layer, first, last = (
            self._least(ways, self._constants.peak) for ways in (plans.layer, plans.first, plans.last)
        )
        return plans.microbatches * (plans.layers * layer + first + last) / plans.stages

    def _flops(self) -> np.ndarray:
        plans = self._plans
        layer, first, last = (
            ways.forward.flops + ways.again.flops * self._again(ways) + ways.backward.flops
            for ways in (plans.layer, plans.first, plans.last)
        )
        return plans.microbatches * (plans.layers * layer + first + last) / plans.stages


def _added(arrays: Iterable[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.add, arrays)


def _sum(ways: _Both) -> np.ndarray:
    return ways[0].total + ways[1].total
