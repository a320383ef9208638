"""A table of forwards alone: nothing is saved, and the results of every micro-batch come out."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cjax.pipeline.buffers import Arrays, Row, State, at, columns_of, put, union
from cjax.pipeline.partition import Partition
from cjax.pipeline.table import Schedule
from cjax.pipeline.wiring import wire
from cjax.trace.stages import Stages


class Forward:
    """Runs a table of F; arguments as of `Executor`."""

    def __init__(self, stages: Stages, schedule: Schedule, part: Partition, axis: str, together: bool) -> None:
        self._stages, self._schedule, self._part = stages, schedule, part
        self._axis, self._together, self._wiring = axis, together, wire(schedule, part)

    def __call__(self, shared: Arrays, stacks: Sequence[Arrays], given: Callable[[Any], Arrays]) -> Arrays:
        """The results of the loss, micro-batches first. Of all stages, one has them; the others have zeros.

        Args:
          shared: parameters that no stack has one each of, as stored.
          stacks: for each stack its weights, the stage's own rows of them.
          given: micro-batch -> all other inputs, as stored.
        """
        stages, num_stacks = self._stages, len(self._part.rows)
        once = [stages.once(k, shared, given(0)) for k in range(num_stacks)]
        payloads = [jax.eval_shape(lambda: stages.enter(shared, given(0)))]
        for k in range(num_stacks):
            payloads.append(jax.eval_shape(lambda p, k=k: stages.leave(k, shared, given(0), p), payloads[k]))
        *payloads, results = payloads
        results = results[: len(stages.cut.results())]
        places, message = union(payloads)
        stage = lax.axis_index(self._axis)

        def pack(k: int, payload: Arrays) -> Arrays:
            found = dict(zip(places[k], payload, strict=True))
            return [found[i] if i in found else jnp.zeros(s.shape, s.dtype) for i, s in enumerate(message)]

        def choose(row: Row, name: str, k: int, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
            own = (row["does"] == k + 1) & ((row[name] > 0) if name != "does" else True)
            if not self._together:
                return lax.cond(own, yes, no)
            both = lambda: jax.tree.map(lambda a, b: jnp.where(own, a, b), yes(), no())  # noqa: E731
            return lax.cond(row[f"any {name} {k}"] > 0, both, no)

        def forward(k: int, row: Row, state: State) -> tuple[Arrays, Arrays]:
            inputs = given(row["microbatch"])
            beside = stages.beside(k, shared, inputs)
            payload = [at(state["inbox"][i], row["reads"]) for i in places[k]]
            if k == 0:
                payload = choose(row, "starts", k, lambda: stages.enter(shared, inputs), lambda: payload)

            def layer(payload: Arrays, i: Any) -> tuple[Arrays, None]:
                ready = stages.ready(k, [at(w, row["row"] + i) for w in stacks[k]])
                new = stages.layer(k, ready, once[k], beside, row["layer"] + i, payload)
                if self._part.is_even(k):
                    return new, None
                return [jnp.where(i < row["count"], a, b) for a, b in zip(new, payload, strict=True)], None

            payload, _ = lax.scan(layer, payload, jnp.arange(self._part.rows[k], dtype=jnp.int32))
            if k + 1 < num_stacks:
                return choose(
                    row, "ends", k,
                    lambda: pack(k + 1, stages.leave(k, shared, inputs, payload)), lambda: pack(k, payload),
                ), state["results"]  # fmt: skip

            def score() -> Arrays:
                outs = stages.leave(k, shared, inputs, payload)[: len(results)]
                return [put(room, x, row["microbatch"]) for room, x in zip(state["results"], outs, strict=True)]

            return pack(k, payload), choose(row, "ends", k, score, lambda: state["results"])

        def tick(state: State, rows: Any) -> tuple[State, None]:
            row: Row = rows["op"]
            sent, found = [jnp.zeros(s.shape, s.dtype) for s in message], state["results"]
            for k in range(num_stacks):
                now = state | {"results": found}
                sent, found = choose(
                    row, "does", k,
                    lambda k=k, now=now: forward(k, row, now),
                    lambda sent=sent, found=found: (sent, found),
                )  # fmt: skip
            arrived = {"F": sent}
            for source, way in (("left", 1), ("right", -1)):
                if source in rows["arrivals"]:
                    num = self._schedule.num_stages
                    pairs = [(i, (i + way) % num) for i in range(num)]
                    arrived[source] = [lax.ppermute(x, self._axis, pairs) for x in sent]
            inbox = state["inbox"]
            for source, where in rows["arrivals"].items():
                inbox = [put(box, x, where) for box, x in zip(inbox, arrived[source], strict=True)]
            return {"inbox": inbox, "results": found}, None

        columns = columns_of(dict(self._wiring.ops["F"]), num_stacks, self._together)
        tables = {"op": columns, "arrivals": dict(self._wiring.arrivals)}
        rows = jax.tree.map(lambda table: jnp.asarray(table)[:, stage], tables)
        start = {
            "inbox": [jnp.zeros((self._wiring.num_messages + 1, *s.shape), s.dtype) for s in message],
            "results": [jnp.zeros((self._schedule.num_microbatches, *s.shape), s.dtype) for s in results],
        }
        final, _ = lax.scan(tick, start, rows, length=self._schedule.num_ticks)
        return final["results"]
