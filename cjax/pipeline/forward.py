"""Evaluation in a pipeline: a table of forwards alone, which saves nothing and gives all micro-batches' results."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cjax.pipeline.buffers import Arrays, Messages, Row, State, at, branch, columns_of, put, room, runs, send, ticks
from cjax.pipeline.partition import Partition
from cjax.pipeline.table import Schedule
from cjax.pipeline.wiring import wire
from cjax.trace.stages.stages import Stages


class Forward:
    """Runs a table of F; arguments as of `Executor`."""

    def __init__(self, stages: Stages, schedule: Schedule, partition: Partition, axis: str) -> None:
        self.stages, self.partition, self.axis = stages, partition, axis
        self.wiring, self.num_stages = wire(schedule, partition), schedule.num_stages
        self.num_ticks, self.num_microbatches = schedule.num_ticks, schedule.num_microbatches

    def __call__(
        self, shared: Arrays, stacks: Sequence[Arrays], given: Callable[[Any], Arrays], lockstep: bool
    ) -> Arrays:
        """The results of the loss, micro-batches first. Of all stages, one has them; the others have zeros.

        Args:
          shared: parameters that are no layer's own, as stored.
          stacks: for each stack its weights, the stage's own rows of them.
          given: micro-batch -> all other inputs, as stored.
          lockstep: as of `Executor`.
        """
        return _Pass(self, shared, stacks, given, lockstep).run()


class _Pass:
    """One run: what is alike in all ticks."""

    def __init__(
        self,
        forward: Forward,
        shared: Arrays,
        stacks: Sequence[Arrays],
        given: Callable[[Any], Arrays],
        lockstep: bool,
    ) -> None:
        self.of, self.stages, self.partition, self.lockstep = forward, forward.stages, forward.partition, lockstep
        self.shared, self.stacks, self.given = shared, stacks, given
        self.num_stacks = len(self.partition.rows)
        self.once = [self.stages.once(k, shared, given(0)) for k in range(self.num_stacks)]
        payloads = [jax.eval_shape(lambda: self.stages.enter(shared, given(0)))]
        for k in range(self.num_stacks):
            leave = functools.partial(self.stages.leave, k, shared)
            payloads.append(jax.eval_shape(lambda p, leave=leave: leave(given(0), p), payloads[k]))
        *payloads, results = payloads
        # In evaluation the model state is read and not changed.
        self.results = results[: len(self.stages.cut.results())]
        self.messages = Messages(payloads)

    def run(self) -> Arrays:
        of, stage = self.of, lax.axis_index(self.of.axis)
        columns = columns_of(dict(of.wiring.ops["F"]), self.num_stacks, self.lockstep)
        tables = {"op": columns, "arrivals": dict(of.wiring.arrivals)}
        rows = jax.tree.map(lambda table: jnp.asarray(table)[:, stage], tables)
        start = {
            "inbox": room(self.messages.shapes, of.wiring.num_messages + 1),
            "results": room(self.results, of.num_microbatches),
        }
        with ticks():
            final, _ = lax.scan(self._tick, start, rows, length=of.num_ticks)
        return final["results"]

    def _tick(self, state: State, rows: Any) -> tuple[State, None]:
        """One tick: each stage's block, if it has one, then messages move."""
        row: Row = rows["op"]
        sent, results = self.messages.empty(), state["results"]
        for k in range(self.num_stacks):
            sent, results = self._if(
                "does", k, row,
                functools.partial(self._forward, k, row, state["inbox"], results),
                lambda sent=sent, results=results: (sent, results),
            )  # fmt: skip
        arrived = {"F": sent}
        for source, way in (("left", 1), ("right", -1)):
            if source in rows["arrivals"]:
                arrived[source] = send(sent, way, self.of.axis, self.of.num_stages)
        inbox = state["inbox"]
        for source, places in rows["arrivals"].items():
            inbox = [put(box, x, places) for box, x in zip(inbox, arrived[source], strict=True)]
        return {"inbox": inbox, "results": results}, None

    def _if(self, name: str, k: int, row: Row, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """`yes()` where the row says that a stage `does` stack `k`, or that its block `starts` or `ends` it."""
        times, does = (self.of.wiring.turns("F", column, k, self.lockstep) for column in (name, "does"))
        with runs([times], self.of.num_ticks if name == "does" else does, self.lockstep):
            return branch(row, name, k, self.lockstep, yes, no)

    def _forward(self, k: int, row: Row, inbox: Arrays, results: Arrays) -> tuple[Arrays, Arrays]:
        """What a block hands on, and results with those of the micro-batch if it was the last."""
        given = self.given(row["microbatch"])
        recomputed = self.stages.recomputed(k, self.shared, given)
        payload = self.messages.unpack(k, [at(box, row["reads"]) for box in inbox])
        if k == 0:
            payload = self._if("starts", k, row, lambda: self.stages.enter(self.shared, given), lambda: payload)

        def layer(payload: Arrays, i: Any) -> tuple[Arrays, None]:
            ready = self.stages.ready(k, [at(w, row["row"] + i) for w in self.stacks[k]])
            new = self.stages.layer(k, ready, self.once[k], recomputed, row["layer"] + i, payload)
            if self.partition.is_even(k):
                return new, None
            return [jnp.where(i < row["count"], a, b) for a, b in zip(new, payload, strict=True)], None

        payload, _ = lax.scan(layer, payload, jnp.arange(self.partition.rows[k], dtype=jnp.int32))

        def after() -> tuple[Arrays, Arrays]:
            outs = self.stages.leave(k, self.shared, given, payload)
            if k + 1 < self.num_stacks:
                return self.messages.pack(k + 1, outs), results
            # Stages that are not the last keep zeros here, and a sum over them gives every stage the results.
            outs = outs[: len(results)]
            return handed, [put(x, out, row["microbatch"]) for x, out in zip(results, outs, strict=True)]

        handed = self.messages.pack(k, payload)
        return self._if("ends", k, row, after, lambda: (handed, results))
