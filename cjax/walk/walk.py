"""Passes over layers: what is next is fetched while one layer is computed, and what is done is written behind."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from cjax.gradients import Evaluated, Scale
from cjax.planner.homes import KINDS, Homes
from cjax.tree import PyTree
from cjax.walk.files import Folder
from cjax.walk.model import Arrays, Outside
from cjax.walk.programs import Programs
from cjax.walk.stores import LayerRows

Row = tuple[jax.Array, ...]
Put = Callable[[int, int, Row, Row, Row], None]  # stack, layer, gradients, params, optimizer state if it is asked for
Due = Callable[[int, int, list[Row]], Row]  # stack, layer, its gradients, optimizer state and params -> new params


@dataclass(frozen=True, eq=False)
class Held:
    """What layers have between their turns; for each stack the rows of its layers.

    Args:
      homes: where they are.
      params, frozen: weights.
      opt: the optimizer's state.
      grads: gradients, from the backward pass to the update.
      inputs: what layers were handed, from the forward pass to the backward pass.
      folder: of those on disk.
      due: (stack, layer) of those whose rows are as they were before the last step, and what their update reads of all
        layers; their gradients are in `grads`. Who updates one takes it out.
      whose: the step of the one state that these are the rows of.
    """

    homes: Homes
    params: Sequence[LayerRows]
    frozen: Sequence[LayerRows]
    opt: Sequence[LayerRows]
    grads: Sequence[LayerRows]
    inputs: Sequence[LayerRows]
    folder: Folder | None = None
    due: dict[tuple[int, int], Mapping[str, jax.Array]] = field(default_factory=dict)
    whose: list[jax.Array] = field(default_factory=list)

    @property
    def every(self) -> list[LayerRows]:
        return [rows for kind in KINDS for rows in getattr(self, kind)]


def in_turn(
    stores: Sequence[LayerRows], order: Sequence[int], more: Callable[[int], Sequence[LayerRows]] = lambda at: ()
) -> Iterator[tuple[int, list[Row]]]:
    """Layers in order, each with its rows; those of the next are on their way meanwhile.

    Args:
      stores: of which all layers have a row.
      order: layers.
      more: the stores of which a layer has one besides.
    """
    for store in (*stores, *more(order[0])) if order else ():
        store.ahead(order[0])
    for here, at in enumerate(order):
        found = [store.fetch(at) for store in (*stores, *more(at))]
        for store in (*stores, *more(order[here + 1])) if here + 1 < len(order) else ():
            store.ahead(order[here + 1])
        yield at, found
        found.clear()  # or they would be on the devices until the next are there


class LayerWalk:
    """Loss and gradients of a batch, by a walk over layers.

    All micro-batches go through a layer before the next, so that its weights are moved once a pass. Programs are waited
    for, layer by layer: JAX would otherwise fetch all that it is asked for, as soon as it is asked.

    Args:
      programs: what is called.
      lengths: the number of layers of each stack.
    """

    def __init__(self, programs: Programs, lengths: Sequence[int]) -> None:
        self._programs, self._lengths, self._num = programs, tuple(lengths), programs.model.num

    def gradients(
        self,
        held: Held,
        params: Row,
        frozen: Row,
        model_state: Row,
        batch: PyTree,
        key: jax.Array,
        scale: Scale,
        put: Put,
        fused: Collection[tuple[int, int]] = (),
        update: Due | None = None,
    ) -> tuple[Evaluated, Row]:
        """What the batch gives, with the model state behind it, and the gradients of `params`.

        Args:
          held: the layers' weights are read, and what they are handed is kept.
          params, frozen: weights that belong to no layer, as stored.
          model_state: as stored.
          batch: as placed.
          key: of random numbers, this step's.
          scale: what the loss is multiplied by.
          put: is given each layer's gradients, last layer first.
          fused: stack and layer of those of which it is given the optimizer's state too.
          update: is given each layer whose update is due, when the forward pass comes to it.
        """
        programs = self._programs
        out, new, states = programs.begin(params, frozen, model_state, batch, key)
        out = dataclasses.replace(out, params=params, frozen=frozen)
        sums, states, back, ends, once = self._forward(held, out, states, scale, update)
        divisor = programs.divisor(sums[0], scale)
        results, outer = sums
        for k in reversed(range(len(self._lengths))):
            back, own = self._back_through(k, held, out, states, ends[k], back, once[k], divisor, put, fused)
            outer = programs.back_once[k](out, states, own, outer)
            for i in range(self._num) if k else ():
                payload = [*ends[k - 1][i][0], *ends[k - 1][i][1]]
                outer, *back[i] = programs.back_leave[k - 1](
                    out, np.int32(i), states, payload, [*back[i][0], *back[i][1]], outer
                )
                ends[k - 1][i][0] = []  # nobody reads it again
        for i in range(self._num):
            outer = programs.back_enter(out, np.int32(i), states, [*back[i][0], *back[i][1]], outer)
        return programs.close(results, outer, new, states, scale)

    def _forward(self, held: Held, out: Outside, states: Arrays, scale: Scale, update: Due | None) -> Any:
        """Sums of results and of gradients outside of layers, states, the gradients of what the last stack made, what
        each stack made, and what all layers of each read."""
        programs, model, numbers = self._programs, self._programs.model, range(self._num)
        payloads, ends, once = [], [], []
        for i in numbers:
            payload, states = programs.enter(out, np.int32(i), states)
            payloads.append(payload)
        for k, length in enumerate(self._lengths):
            once.append(programs.once[k](out, states))
            parts = [model.passing(k, payload) for payload in payloads]
            moving, passing = [part[0] for part in parts], [part[1] for part in parts]

            def more(at: int, k: int = k) -> list[LayerRows]:
                return [held.grads[k], held.opt[k]] if (k, at) in held.due else []

            for at, rows in in_turn([held.params[k], held.frozen[k]], range(length), more):
                held.inputs[k].put(at, tuple(x for some in moving for x in some))
                params, frozen, *rest = rows
                rows.clear()
                if rest:
                    assert update is not None, "whoever reads a state's rows has made its updates"
                    given = [*rest, params]
                    rest.clear()
                    del params  # or the old ones would be there beside the new
                    params = update(k, at, given)
                for i in numbers:
                    given = [*moving[i], *passing[i]]
                    moving[i], states = programs.forward[k](
                        (params, frozen), once[k], out, np.int32(i), np.int32(at), states, given
                    )
                jax.block_until_ready(moving)
                del params, frozen
            ends.append([list(both) for both in zip(moving, passing, strict=True)])
            if k + 1 < len(self._lengths):
                payloads = [programs.leave[k](out, np.int32(i), states, [*moving[i], *passing[i]]) for i in numbers]
        sums, back = programs.zeros(out, states, [*ends[-1][0][0], *ends[-1][0][1]]), []
        for i in numbers:
            payload = [*ends[-1][i][0], *ends[-1][i][1]]
            sums, states, *grads = programs.finish(out, np.int32(i), states, payload, sums, scale)
            back.append(grads)
            ends[-1][i][0] = []
        return sums, states, back, ends, once

    def _back_through(
        self, k: int, held: Held, out: Outside, states: Arrays, ends: Any, back: Any, once: Arrays, divisor: jax.Array,
        put: Put, fused: Collection[tuple[int, int]],
    ) -> tuple[list[Any], Arrays]:  # fmt: skip
        """The gradients of what a stack was handed, and of what all its layers read."""
        programs, outer = self._programs, self._programs.zero_once[k](once)
        back = [list(both) for both in back]
        stores = [held.params[k], held.frozen[k], held.inputs[k]]

        def more(at: int) -> list[LayerRows]:
            return [held.opt[k]] if (k, at) in fused else []

        for at, rows in in_turn(stores, range(self._lengths[k] - 1, -1, -1), more):
            params, frozen, inputs, *opt = rows
            own, size = programs.zero_row[k](params), len(inputs) // self._num
            for i in range(self._num):
                handed = [*inputs[i * size : (i + 1) * size], *ends[i][1]]
                *back[i], own, outer = programs.backward[k](
                    (params, frozen), once, out, np.int32(i), np.int32(at), states, handed, *back[i], own, outer
                )
                del handed
            jax.block_until_ready(back)
            rows.clear()
            del frozen, inputs  # none may be there while the next is fetched
            held.inputs[k].forget(at)
            put(k, at, tuple(programs.average[k](own, divisor)), params, opt.pop() if opt else ())
            del params, own
        return back, outer
