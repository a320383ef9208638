"""Weights that stay in files until a layer needs them: the states of programs that only generate."""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cjax.planner.choice.homes import readable
from cjax.planner.choice.passes import PassHomes, PassRows, choose_pass_homes
from cjax.planner.homes import Home, Homes
from cjax.program.composed import Composed
from cjax.program.texts import Needs, Step, Texts, Weights
from cjax.sharding.storage.storage import Slot
from cjax.tree import leaf_names
from cjax.walk.layer_slots import layer_slot
from cjax.walk.measured import num_bytes, row_bytes
from cjax.walk.quantized import Bits, Quantized, quantize, structs_of
from cjax.walk.read_rows import ReadRows
from cjax.walk.stores import make_rows
from cjax.walk.walk import Held, Row


class StoredArray(Protocol):
    """An array of the model in a file."""

    shape: tuple[int, ...]
    dtype: Any

    @property
    def num_inputs(self) -> int | None: ...


ReadWhole = Callable[[Sequence[Any], bool], list[np.ndarray]]  # arrays in files, whether NaN is looked for


@dataclass(frozen=True)
class _Entry:
    """What is kept of one slot of a layer: one array, or two where it is quantized.

    Args:
      leaves: of the model, by layer.
      slot: of one layer.
      structs: what is kept.
      num_inputs: how many dims a product sums over, of what is quantized.
      kind: into what.
    """

    leaves: tuple[int, ...]
    slot: Slot
    structs: tuple[jax.ShapeDtypeStruct, ...]
    num_inputs: int | None
    kind: Bits | None

    def kept(self, array: np.ndarray) -> tuple[np.ndarray, ...]:
        """From the model's array."""
        if self.kind is not None:
            assert self.num_inputs is not None
            return quantize(array, self.num_inputs, self.kind)
        struct = self.structs[0]
        array = array.astype(struct.dtype, copy=False).reshape(self.slot.shape)
        pads = [(0, whole - size) for size, whole in zip(array.shape, struct.shape, strict=True)]
        return (np.pad(array, pads) if any(more for _, more in pads) else array,)

    def grouped(self, arrays: Sequence[Any]) -> Any:
        """What programs take."""
        return arrays[0] if self.kind is None else Quantized(arrays[0], arrays[1], self.kind, self.slot.shape)


class Streamed:
    """The weights of a program that walks and trains nothing, which are read layer by layer where they are stored.

    Args:
      composed: what the program is made of; its plan has a budget.
      step: a pass over new tokens; see `Texts`.
      stored: of each parameter by name.
      read: reads several of them.
      kind: in which form layers' matrices are kept; as in the files if None.
      is_limited: whether the plan's budget is to be kept to.
    """

    def __init__(
        self, composed: Composed, step: Step, stored: Mapping[str, StoredArray], read: ReadWhole,
        kind: Bits | None = None, is_limited: bool = True,
    ) -> None:  # fmt: skip
        walker, shelf = composed.walker, composed.shelves.params
        assert walker is not None and not composed.shelves.frozen.slots and not composed.shelves.model_state.slots
        self._composed, self._walker, self._read, self._is_limited = composed, walker, read, is_limited
        names = leaf_names(shelf.leaf_shapes())
        self._stored = [stored[name] for name in names]
        self._entries = [
            [self._entry(shelf.slots[at], kind) for at in walker.slots("params", k)] for k in range(len(walker.lengths))
        ]
        self.texts = Texts(composed, step, self._rows)
        self._sound: set[tuple[int, int]] = set()  # rows in which NaN was looked for
        self._last: tuple[PassHomes, Held] | None = None

    def _entry(self, slot: Slot, kind: Bits | None) -> _Entry:
        mine, own = [self._stored[leaf] for leaf in slot.layer_leaves], layer_slot(slot)
        assert slot.is_stack, "a model of cjax.models has an array of each layer"
        if kind is not None and mine[0].num_inputs is not None:
            structs = structs_of(mine[0].shape, mine[0].num_inputs, kind)
            if structs is not None:
                whole = NamedSharding(self._composed.mesh, PartitionSpec())
                placed = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in structs)
                return _Entry(slot.layer_leaves, own, tuple(placed), mine[0].num_inputs, kind)
        # What has fewer bytes in all files keeps them, and is widened where it is computed with: to the same numbers.
        narrow = {np.dtype(x.dtype) for x in mine}
        dtype = slot.dtype
        if (
            len(narrow) == 1
            and (few := next(iter(narrow))) in (jnp.bfloat16, jnp.float16)
            and slot.dtype == jnp.float32
        ):
            dtype = few
        sharding = NamedSharding(self._composed.mesh, own.stored_spec)
        struct = jax.ShapeDtypeStruct(own.stored_shape, dtype, sharding=sharding)
        return _Entry(slot.layer_leaves, own, (struct,), None, None)

    def _rows(self, k: int) -> Sequence[tuple[Any, ...]]:
        return [tuple(entry.grouped(entry.structs) for entry in self._entries[k]), ()]

    def _structs(self, k: int) -> list[jax.ShapeDtypeStruct]:
        return [x for entry in self._entries[k] for x in entry.structs]

    # -- reading ------------------------------------------------------------------------------------------------------
    def _read_row(self, k: int, layer: int) -> list[np.ndarray]:
        stored = [self._stored[entry.leaves[layer]] for entry in self._entries[k]]
        arrays = self._read(stored, (k, layer) not in self._sound)
        self._sound.add((k, layer))
        return [x for entry, array in zip(self._entries[k], arrays, strict=True) for x in entry.kept(array)]

    @functools.cached_property
    def _outside(self) -> Row:
        """What belongs to no layer, one array at a time."""
        shelf, mesh, found = self._composed.shelves.params, self._composed.mesh, []
        for at in self._walker.outside("params"):
            slot = shelf.slots[at]
            arrays: list[Any] = [self._read([self._stored[leaf]], True)[0].astype(slot.dtype) for leaf in slot.leaves]
            leaf: Any = np.stack(arrays) if slot.is_stack else arrays[0]
            whole = np.asarray(slot.store(leaf))
            found.append(jax.device_put(whole, NamedSharding(mesh, slot.stored_spec)))
        return tuple(found)

    # -- passes -------------------------------------------------------------------------------------------------------
    def homes(self, needs: Needs) -> PassHomes:
        """Where weights and memory are for passes that need so much; nothing is read.

        Raises:
          TooLittle: the plan's budget or host memory is less than the least that works.
        """
        plan, walker = self._composed.plan, self._walker
        stacks = [PassRows(length, row_bytes(self._structs(k))) for k, length in enumerate(walker.lengths)]
        outside = num_bytes(walker.outside_structs("params"))
        what = f" ({readable(outside)} of weights, {readable(needs.peak)} for the programs of a pass)"
        budget = plan.budget if self._is_limited else None
        fixed = outside + needs.peak
        return choose_pass_homes(stacks, needs.memory, needs.stack, fixed, budget, plan.host, what, plan.offload)

    def ready(self, needs: Needs) -> tuple[Weights, tuple[Home, ...]]:
        """Weights where passes read them, and the homes of memory."""
        homes = self.homes(needs)
        has_failed = self._last is not None and any(
            isinstance(rows, ReadRows) and rows.has_failed for rows in self._last[1].params
        )
        if self._last is None or has_failed or self._last[0].weights != homes.weights:
            self.close()
            self._last = homes, self._hold(homes)
        self._last = homes, self._last[1]
        key = jax.device_put(jax.random.key(0), self._composed.whole)
        return Weights(self._last[1], self._outside, (), (), key), homes.memory

    def _hold(self, homes: PassHomes) -> Held:
        params, frozen, there = [], [], Homes.all_at("device", self._walker.lengths).of["frozen"]
        for k, of in enumerate(homes.weights):
            params.append(ReadRows(self._structs(k), of, functools.partial(self._read_row, k), self._grouped(k)))
            frozen.append(make_rows([], there[k], "frozen", k))
            for layer in range(len(of)):
                frozen[k].put(layer, ())
        return Held(Homes({"params": homes.weights, "frozen": there}), params, frozen, (), (), ())

    def _grouped(self, k: int) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
        def grouped(arrays: Sequence[Any]) -> tuple[Any, ...]:
            left = iter(arrays)
            return tuple(entry.grouped([next(left) for _ in entry.structs]) for entry in self._entries[k])

        return grouped

    @property
    def held(self) -> PassHomes | None:
        """The homes of the last passes."""
        return None if self._last is None else self._last[0]

    def close(self) -> None:
        """Gives up the rows that are held; the next pass reads them again."""
        last, self._last = self._last, None
        with contextlib.ExitStack() as closed:  # all of them, also where one could not be read
            for rows in (*last[1].params, *last[1].frozen) if last is not None else ():
                closed.callback(rows.close)
