"""Any schedule as one program that all stages run, in a region that is manual over the pipe axis.

A `lax.scan` goes through the ticks. In each a stage looks up what it does: F stores what its layers save, B and W read
that. Whatever is sent moves on between two ticks. Autodiff never sees the loop: each op differentiates its own layers,
so memory is that of the places that the schedule needs, whatever the number of micro-batches.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.pipeline.buffers import Arrays, Messages, Row, State, at, branch, columns_of, put, room, runs, send, ticks
from cjax.pipeline.partition import Partition
from cjax.pipeline.route import Kind
from cjax.pipeline.sums import added, sum_like
from cjax.pipeline.table import Schedule
from cjax.pipeline.wiring import wire
from cjax.trace.emit.backward import Derivative, is_real
from cjax.trace.stages.stages import Stages

RunOp = Callable[[int, Row, State], tuple[Arrays, State]]  # an op of one stack, on a row of the tables


class Executor:
    """Runs a schedule.

    Args:
      stages: the model, in parts.
      schedule: when stages do what.
      partition: which layers they hold.
      trained: for each stack, which of its weights are trained.
      axis: the mesh axis of the stages.
      total: results of the loss -> (its total, results that are added up over micro-batches).
      states: leaves of the model state that are made of examples: their place among what is given, who makes them
        ("layers", "before" or "after" them), the stack, and which of its; of those outside of layers all that are kept
        together. Micro-batches make them one after the other.
    """

    def __init__(
        self,
        stages: Stages,
        schedule: Schedule,
        partition: Partition,
        trained: Sequence[Sequence[bool]],
        axis: str,
        total: Callable[[Arrays], tuple[jax.Array, Any]],
        states: Sequence[tuple[int, str, int, Any]] = (),
    ) -> None:
        self._stages, self._schedule, self._partition = stages, schedule, partition
        self._axis, self._total = axis, total
        self._states = list(states)
        self._trained = [list(which) for which in trained]
        self._wiring = wire(schedule, partition)
        self._num_stacks = len(partition.rows)

    def __call__(
        self,
        shared: Arrays,
        stacks: Sequence[Arrays],
        given: Callable[[Any], Arrays],
        scale: jax.Array | None = None,
        lockstep: bool = False,
    ) -> tuple[Any, Arrays, list[Arrays], Arrays]:
        """Results of the loss added up, gradients of `shared` and of the trained `stacks`, and the last `states`.

        On each stage, results, gradients of `shared` and states are its own share: they are to be added up over the
        axis.

        Args:
          shared: parameters that are no layer's own, as stored.
          stacks: for each stack its weights, the stage's own rows of them.
          given: micro-batch -> all other inputs, as stored.
          scale: what gradients are multiplied by; 1 if None.
          lockstep: whether all stages take part in what any of them does in a tick, and those with nothing to do throw
            it away. Needed where an op permutes over other axes: XLA may expect every device of the program at a
            permute.
        """
        return _Execution(self, shared, stacks, given, scale, lockstep).run()


class _Execution:
    """One run: what is alike in all ticks. Methods that take a state give it back changed."""

    def __init__(
        self,
        executor: Executor,
        shared: Arrays,
        stacks: Sequence[Arrays],
        given: Callable[[Any], Arrays],
        scale: jax.Array | None,
        lockstep: bool,
    ) -> None:
        e, self.scale, self.lockstep = executor, scale, lockstep
        self.stages, self.partition, self.wiring, self.split = e._stages, e._partition, e._wiring, e._schedule.split
        self.axis, self.total, self.num_stacks = e._axis, e._total, e._num_stacks
        self.num_ticks, self.num_stages = e._schedule.num_ticks, e._schedule.num_stages
        self.shared, self.given, self.which = shared, given, e._trained
        self.stacks, self.states = stacks, e._states
        cut, first = self.stages.cut, given(0)
        # Outside of the loop, or each tick would make them; their gradients go back to the parameters once, at the end.
        self.once = [self.stages.once(k, shared, first) for k in range(self.num_stacks)]
        self.learned = [
            [is_learned and is_real(x) for x, is_learned in zip(values, which, strict=True)]
            for values, which in zip(self.once, cut.learned, strict=True)
        ]
        self.payloads = [jax.eval_shape(lambda: self.stages.enter(shared, given(0)))]
        for k in range(self.num_stacks - 1):
            leave = functools.partial(self.stages.leave, k, shared)
            self.payloads.append(jax.eval_shape(lambda p, leave=leave: leave(given(0), p), self.payloads[k]))
        self.messages = Messages(self.payloads)
        self.derivatives = [self._derivative(k) for k in range(self.num_stacks)]

    def _derivative(self, k: int) -> Derivative:
        layer = self.stages.hooks.block(functools.partial(self._layer, k))
        weights = [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in self.stacks[k]]
        recomputed = jax.eval_shape(lambda: self.stages.recomputed(k, self.shared, self.given(0)))

        def inputs(weights: Arrays, recomputed: Arrays) -> tuple[Arrays, Arrays]:
            return self._operands(k, self.stages.ready(k, weights), recomputed, jnp.int32(0))

        own, fixed = jax.eval_shape(inputs, weights, recomputed)
        return Derivative(layer, own, fixed, self.payloads[k])

    def _operands(self, k: int, ready: Arrays, recomputed: Arrays, index: Any) -> tuple[Arrays, Arrays]:
        """(with gradients, without) of what a layer reads besides what it is handed."""
        # In what is trained alone: gradients of frozen weights (under a LoRA, most of a model) would be thrown away.
        own = [w for w, trained in zip(ready, self.which[k], strict=True) if trained]
        own += [x for x, learned in zip(self.once[k], self.learned[k], strict=True) if learned]
        fixed = [w for w, trained in zip(ready, self.which[k], strict=True) if not trained]
        fixed += [x for x, learned in zip(self.once[k], self.learned[k], strict=True) if not learned]
        return own, [*fixed, *recomputed, index]

    def _layer(self, k: int, own: Arrays, fixed: Arrays, payload: Arrays, states: bool = False) -> Arrays:
        own_, fixed_ = iter(own), iter(fixed)
        ready = [next(own_) if trained else None for trained in self.which[k]]
        once = [next(own_) if learned else None for learned in self.learned[k]]
        ready = [next(fixed_) if w is None else w for w in ready]
        once = [next(fixed_) if x is None else x for x in once]
        *recomputed, index = fixed_
        return self.stages.layer(k, ready, once, recomputed, index, payload, states)

    # -- the loop --
    def run(self) -> tuple[Any, Arrays, list[Arrays], Arrays]:
        stage = lax.axis_index(self.axis)

        def mine(table: np.ndarray) -> jax.Array:
            return jnp.asarray(table)[:, stage]

        ops = self.wiring.ops.items()
        tables = {kind: columns_of(dict(columns), self.num_stacks, self.lockstep) for kind, columns in ops}
        rows = jax.tree.map(mine, {"ops": tables, "arrivals": dict(self.wiring.arrivals)})
        # Never differentiated as a loop: JAX would save the state of every tick, which is what a schedule avoids.
        with ticks():
            state, _ = lax.scan(self._tick, self._empty(), rows, length=self.num_ticks)
        states = [self._share(stage, *of[1:], x) for of, x in zip(self.states, state["states"], strict=True)]
        return state["results"], self._gradients_of_shared(state), state["stacks"], states

    def _share(self, stage: jax.Array, whose: str, k: int, _: int, value: jax.Array) -> jax.Array:
        """Of a state, what this stage has made, and zeros for the rest: the stages' shares are added up afterwards."""
        route = self.partition.route
        maker = self.partition.owners(k) if whose == "layers" else route[0 if whose == "before" else -1]
        mine = jnp.asarray(maker, jnp.int32) == stage
        return jnp.where(mine.reshape(*mine.shape, *[1] * (value.ndim - mine.ndim)), value, jnp.zeros_like(value))

    def _given(self, row: Row, state: State) -> Arrays:
        """What an op reads that is not trained; states as they are now."""
        given = list(self.given(row["microbatch"]))
        for (place, *_), x in zip(self.states, state["states"], strict=True):
            given[place] = x
        return given

    def _outside(self, whose: str, new: Arrays) -> Arrays:
        """New states that are made "before" or "after" the layers, as they are kept: those of layers on one dim."""
        found = [[new[j] for j in of] for _, maker, _, of in self.states if maker == whose]
        return [jnp.stack(some) if len(some) > 1 else some[0] for some in found]

    def _with_states(self, state: State, whose: str, k: int, new: Callable[[Any, Any], Any]) -> State:
        """`state` with the states that are `whose` replaced; `new` gets which of them, and the old one."""
        mine = [of[1:3] == (whose, k) for of in self.states]
        old = zip(self.states, state["states"], mine, strict=True)
        return state | {"states": [new(of[3], x) if own else x for of, x, own in old]}

    def _empty(self) -> State:
        wiring, rows = self.wiring, self.partition.rows
        # A stage that runs a branch for others' sake writes something somewhere. Not over what it keeps, so there:
        # selecting afterwards would copy the whole buffer.
        spare = int(self.lockstep)  # a place for what is thrown away
        slots, end_slots = [n + spare for n in wiring.slots], [n + spare for n in wiring.end_slots]
        results = jax.eval_shape(self._results, self.shared, self.payloads[-1], self.given(0))[1][0]
        numbers = range(self.num_stacks)
        own = [[w for w, trained in zip(self.stacks[k], self.which[k], strict=True) if trained] for k in numbers]
        return {
            "saved": [room(self.derivatives[k].saved, slots[k], rows[k]) for k in numbers],
            "crossing": [room(self.derivatives[k].crossing, slots[k], rows[k]) if self.split else [] for k in numbers],
            "ends": [room(self.payloads[k], end_slots[k]) for k in numbers],
            "inbox": room(self.messages.shapes, wiring.num_messages + 1),
            "shared": [sum_like(x) for x in self.shared],
            "stacks": [[sum_like(x) for x in weights] for weights in own],
            "once": [[sum_like(x) for x in self._learned_once(k)] for k in numbers],
            "results": jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), results),
            "states": [self.given(0)[place] for place, *_ in self.states],
        }

    def _learned_once(self, k: int) -> Arrays:
        return [x for x, learned in zip(self.once[k], self.learned[k], strict=True) if learned]

    def _tick(self, state: State, rows: Any) -> tuple[State, None]:
        ops: dict[Kind, Row] = rows["ops"]
        where = self.axis, self.num_stages
        # Without a V, forwards only go right and backwards only left, so each is sent in a permute of its own as soon
        # as it is done. In a V both go both ways; a tick has at most one message each way, so F and B share one permute
        # for each.
        simple = self.wiring.ways("F") <= {1} and self.wiring.ways("B") <= {-1}
        forward, state = self._op("F", self._forward, ("saved", "ends", "states"), ops["F"], state)
        # Sent as soon as it is there, so that the transfer runs while B and W compute.
        arrived = {"left": send(forward, 1, *where)} if simple else {}
        changes = "shared", "results", "states", *(("crossing",) if self.split else ("stacks", "once"))
        backward, state = self._op("B", self._backward, changes, ops["B"], state)
        if simple:
            arrived["right"] = send(backward, -1, *where)
        else:
            arrived["left"] = send(_either(ops["F"]["way"] == 1, forward, backward), 1, *where)
            arrived["right"] = send(_either(ops["F"]["way"] == -1, forward, backward), -1, *where)
        if self.split:
            _, state = self._op("W", self._weights, ("stacks", "once"), ops["W"], state)
        arrived |= {"F": forward, "B": backward}
        inbox = state["inbox"]
        for source, places in rows["arrivals"].items():
            inbox = [put(box, x, places) for box, x in zip(inbox, arrived[source], strict=True)]
        return state | {"inbox": inbox}, None

    def _op(self, kind: Kind, run: RunOp, changes: Sequence[str], row: Row, state: State) -> tuple[Arrays, State]:
        """What a stage does in a tick, or nothing: then its message is anything."""

        def idle(state: State) -> tuple[Arrays, State]:
            return self.messages.empty(), {name: state[name] for name in changes}

        def busy(k: int, row: Row, state: State) -> tuple[Arrays, State]:
            message, new = run(k, row, state)
            return message, {name: new[name] for name in changes}

        # Only what an op changes comes out of the branches, or the compiler would copy the rest.
        if not self.lockstep:
            numbers = range(self.num_stacks)
            ways = [functools.partial(idle, state), *(functools.partial(busy, k, row, state) for k in numbers)]
            turns = [self.wiring.turns(kind, "does", k, False) for k in numbers]
            with runs(turns, self.num_ticks, False):
                message, new = lax.switch(row["does"], ways)
            return message, state | new
        # In lockstep there is no switch over stacks, which would let stages differ: each stack's branch is taken by all
        # or by none, one behind the other, and the stage whose turn it is keeps the result.
        message, _ = idle(state)
        for k in range(self.num_stacks):
            mine = row["does"] == k + 1
            own = row | {"mine": mine, "slot": jnp.where(mine, row["slot"], self.wiring.slots[k])}
            own["end_slot"] = jnp.where(mine & (row["ends"] == 1), row["end_slot"], self.wiring.end_slots[k])
            # Functions of this turn's own: JAX traces a function that it has seen no second time, so that one of all
            # turns would give back the state as it was before the first of them.
            ways = [functools.partial(busy, k, own, state), functools.partial(idle, state)]
            with runs([self.wiring.turns(kind, "does", k, True)], self.num_ticks, True):
                found, new = lax.cond(row[f"any does {k}"], *ways)
            message, state = _either(mine, found, message), state | new
        return message, state

    def _if(self, kind: Kind, name: str, k: int, row: Row, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """`yes()` where the row says that a block `starts` or `ends` stack `k`, `no()` elsewhere."""
        with self._runs(kind, name, k):
            return branch(row, name, k, self.lockstep, yes, no)

    def _runs(self, kind: Kind, name: str, k: int) -> Any:
        times, turns = (self.wiring.turns(kind, column, k, self.lockstep) for column in (name, "does"))
        return runs([times], turns, self.lockstep)

    # -- ops --
    def _forward(self, k: int, row: Row, state: State) -> tuple[Arrays, State]:
        given = self._given(row, state)
        recomputed = self.stages.recomputed(k, self.shared, given)
        payload = self.messages.unpack(k, self._read_message(row, state))
        if k == 0:
            payload = self._if("F", "starts", k, row, lambda: self.stages.enter(self.shared, given), lambda: payload)

        def layer(carry: Any, i: Any) -> Any:
            payload, kept, state = carry
            weights, index = [at(w, row["row"] + i) for w in self.stacks[k]], row["layer"] + i
            own, fixed = self._operands(k, self.stages.ready(k, weights), recomputed, index)
            # State made of examples (a running mean), in forwards alone: in the order of micro-batches.
            if self.stages.cut.states.layers[k]:
                new = self._layer(k, own, fixed, payload, states=True)  # the compiler merges this with `forward`
                mine = row["mine"] if self.lockstep else True
                state = self._with_states(
                    state, "layers", k,
                    lambda j, x: put(x, jnp.where(mine, new[j].astype(x.dtype), at(x, index)), index),
                )  # fmt: skip
            payload, saved = self.derivatives[k].forward(own, fixed, payload)
            return payload, [put(box, x, row["slot"], i) for box, x in zip(kept, saved, strict=True)], state

        states = {"states": state["states"]}
        payload, kept, states = self._layers(k, row, layer, (payload, state["saved"][k], states))
        state = state | {"saved": _replace(state["saved"], k, kept)} | states
        if k == 0 and self.stages.cut.states.before:
            new = self._if(
                "F", "starts", k, row,
                lambda: self._outside("before", self.stages.states_before(self.shared, given)),
                lambda: [x for of, x in zip(self.states, state["states"], strict=True) if of[1] == "before"],
            )  # fmt: skip
            made = iter(new)
            state = self._with_states(state, "before", 0, lambda _, x: next(made).astype(x.dtype))
        kept = state["ends"][k]
        with self._runs("F", "ends", k):
            ends = lax.cond(  # what is not a stage's own goes to a place of its own, which costs no copy of the others
                row[f"any ends {k}"] if self.lockstep else row["ends"] == 1,
                lambda: [put(box, x, row["end_slot"]) for box, x in zip(kept, payload, strict=True)],
                lambda: kept,
            )
        state = state | {"ends": _replace(state["ends"], k, ends)}
        message = self.messages.pack(k, payload)
        if k + 1 < self.num_stacks:
            message = self._if(
                "F", "ends", k, row,
                lambda: self.messages.pack(k + 1, self.stages.leave(k, self.shared, given, payload)),
                lambda: message,
            )  # fmt: skip
        return message, state

    def _backward(self, k: int, row: Row, state: State) -> tuple[Arrays, State]:
        given = self._given(row, state)
        recomputed = self.stages.recomputed(k, self.shared, given)
        # The last stage of the last stack has no gradient coming in: it starts the backward with the loss. Behind a
        # stack's last block it comes through what lies between two stacks.
        message = self._read_message(row, state)
        gradients, shared, results, states = self._if(
            "B", "ends", k, row,
            lambda: self._after(k, row, given, message, state),
            lambda: (self.messages.unpack(k, message), state["shared"], state["results"], state["states"]),
        )  # fmt: skip
        state = state | {"shared": shared, "results": results, "states": states}
        derivative = self.derivatives[k]

        def layer(carry: Any, i: Any) -> Any:
            gradients, sums, kept = carry
            own, fixed, saved, pull = self._saved(k, row, recomputed, state, i)
            # Split, B hands on the gradient of its input at once, on which the stage in front waits; W makes those of
            # the weights later, of what both need, kept between the two.
            if not self.split:
                gradients, found = derivative.both(own, fixed, saved, gradients)
                return gradients, self._add(k, row, i, sums, found, pull), kept
            gradients, crossing = derivative.backward(own, fixed, saved, gradients)
            return gradients, sums, [put(box, x, row["slot"], i) for box, x in zip(kept, crossing, strict=True)]

        carry = gradients, (state["stacks"][k], state["once"][k]), state["crossing"][k]
        gradients, sums, kept = self._layers(k, row, layer, carry, reverse=True)
        state = state | {"crossing": _replace(state["crossing"], k, kept)}
        state = state | {name: _replace(state[name], k, x) for name, x in zip(("stacks", "once"), sums, strict=True)}
        if k == 0:
            shared = self._if(
                "B", "starts", k, row,
                lambda: self._before(given, gradients, state["shared"]), lambda: state["shared"],
            )  # fmt: skip
            state = state | {"shared": shared}
        return self.messages.pack(k, gradients), state

    def _weights(self, k: int, row: Row, state: State) -> tuple[Arrays, State]:
        recomputed = self.stages.recomputed(k, self.shared, self._given(row, state))

        def layer(sums: Any, i: Any) -> Any:
            own, fixed, saved, pull = self._saved(k, row, recomputed, state, i)
            crossing = [at(box, row["slot"], i) for box in state["crossing"][k]]
            found = self.derivatives[k].weight_gradients(own, fixed, saved, crossing)
            return self._add(k, row, i, sums, found, pull)

        sums = self._layers(k, row, layer, (state["stacks"][k], state["once"][k]))
        state = state | {name: _replace(state[name], k, x) for name, x in zip(("stacks", "once"), sums, strict=True)}
        return self.messages.empty(), state

    # -- layers --
    def _layers(self, k: int, row: Row, layer: Callable[..., Any], carry: Any, reverse: bool = False) -> Any:
        def turn(carry: Any, i: Any) -> tuple[Any, None]:
            # A block may have fewer layers than there is room for. Its stage skips them by a branch; in lockstep, where
            # the branch may hold a permute for all, it computes them and keeps what it had.
            if self.partition.is_even(k):
                return layer(carry, i), None
            if self.lockstep:
                new = layer(carry, i)
                return jax.tree.map(lambda a, b: jnp.where(i < row["count"], a, b), new, carry), None
            return lax.cond(i < row["count"], lambda c: layer(c, i), lambda c: c, carry), None

        return lax.scan(turn, carry, jnp.arange(self.partition.rows[k], dtype=jnp.int32), reverse=reverse)[0]

    def _saved(self, k: int, row: Row, recomputed: Arrays, state: State, i: Any) -> tuple[Arrays, Arrays, Arrays, Any]:
        """A layer's weights and what else it reads, what its forward saved, and the way from gradients of weights in
        use to those of weights kept."""
        weights = [at(w, row["row"] + i) for w in self.stacks[k]]
        # Derivatives are taken in weights as used (gathered, rounded) and brought back to weights as kept.
        ready, pull = jax.vjp(lambda ws: self.stages.ready(k, ws), weights)
        own, fixed = self._operands(k, ready, recomputed, row["layer"] + i)
        saved = [at(box, row["slot"], i) for box in state["saved"][k]]

        def back(own: Arrays) -> Arrays:
            found = iter(own)
            full = [next(found) if t else jnp.zeros_like(w) for w, t in zip(ready, self.which[k], strict=True)]
            return [g for g, t in zip(pull(full)[0], self.which[k], strict=True) if t]

        return own, fixed, saved, back

    def _add(self, k: int, row: Row, i: Any, sums: Any, own: Arrays, pull: Any) -> Any:
        """`sums` with the gradients of one layer's weights added."""
        rows, once = sums
        if self.lockstep:
            # Another stage's micro-batch gives numbers like any other, and nobody would notice that they were added.
            own = [jnp.where(row["mine"], g, jnp.zeros_like(g)) for g in own]
        num = sum(self.which[k])
        place = row["row"] + i
        found = added([at(total, place) for total in rows], pull(own[:num]))
        rows = [put(total, g, place) for total, g in zip(rows, found, strict=True)]
        return rows, added(once, own[num:])

    # -- before the first layer, and after the last --
    def _before(self, given: Arrays, gradients: Arrays, shared: Arrays) -> Arrays:
        real = [i for i, x in enumerate(self.payloads[0]) if is_real(x)]

        def of(shared: Arrays) -> Arrays:
            payload = self.stages.enter(shared, given)
            return [payload[i] for i in real]

        _, pull = jax.vjp(of, self.shared)
        return added(shared, pull([gradients[i] for i in real])[0])

    def _after(
        self, k: int, row: Row, given: Arrays, message: Arrays, state: State
    ) -> tuple[Arrays, Arrays, Any, Arrays]:
        """Back from what comes after stack `k` to what its last layer handed on."""
        payload = [at(box, row["end_slot"]) for box in state["ends"][k]]
        real = [i for i, x in enumerate(payload) if is_real(x)]

        def filled(some: Arrays) -> Arrays:
            found = dict(zip(real, some, strict=True))
            return [found.get(i, x) for i, x in enumerate(payload)]

        def of(shared: Arrays, some: Arrays) -> Any:
            if k + 1 == self.num_stacks:
                return self._results(shared, filled(some), given)
            outs = self.stages.leave(k, shared, given, filled(some))
            return [x for x in outs if is_real(x)], None

        out, pull, results = jax.vjp(of, self.shared, [payload[i] for i in real], has_aux=True)
        if k + 1 == self.num_stacks:
            seed = jnp.ones_like(out) if self.scale is None else self.scale.astype(out.dtype)
            results, new = results
            results = jax.tree.map(jnp.add, state["results"], results)
            made = iter(self._outside("after", new))
            state = self._with_states(state, "after", k, lambda _, x: next(made).astype(x.dtype))
        else:
            seed = [x for x in self.messages.unpack(k + 1, message) if is_real(x)]
            results = state["results"]
        own, some = pull(seed)
        found = dict(zip(real, some, strict=True))
        gradients = [found.get(i, jnp.zeros_like(x)) for i, x in enumerate(payload)]
        return gradients, added(state["shared"], own), results, state["states"]

    def _results(self, shared: Arrays, payload: Arrays, given: Arrays) -> tuple[jax.Array, Any]:
        outs = self.stages.leave(self.num_stacks - 1, shared, given, payload)
        num = len(self.stages.cut.results())
        total, results = self.total(outs[:num])
        return total, (results, outs[num:])

    def _gradients_of_shared(self, state: State) -> Arrays:
        """Those of what was made once are pulled back once."""
        total = state["shared"]
        for k in range(self.num_stacks):
            which = [i for i, learned in enumerate(self.learned[k]) if learned]
            if not which:
                continue

            def of(shared: Arrays, k: int = k, which: list[int] = which) -> Arrays:
                values = self.stages.once(k, shared, self.given(0))
                return [values[i] for i in which]

            values, pull = jax.vjp(of, self.shared)
            (own,) = pull([g.astype(x.dtype) for g, x in zip(state["once"][k], values, strict=True)])
            total = added(total, own)
        return total

    def _read_message(self, row: Row, state: State) -> Arrays:
        return [at(box, row["reads"]) for box in state["inbox"]]


def _either(which: jax.Array, one: Arrays, other: Arrays) -> Arrays:
    return [jnp.where(which, a, b) for a, b in zip(one, other, strict=True)]


def _replace(items: list[Any], k: int, item: Any) -> list[Any]:
    return [*items[:k], item, *items[k + 1 :]]
