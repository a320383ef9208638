"""The programs of a walk, compiled ahead in the order in which a step calls them, and what devices need for them."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cjax.planner.homes import KINDS, Peaks, RowBytes, RowSizes
from cjax.walk.direct import whole_blocks
from cjax.walk.disk import aligned
from cjax.walk.jitted import Jitted
from cjax.walk.optimizer import RowOptimizer
from cjax.walk.walker import Walker


@dataclass(frozen=True)
class WalkPiece:
    """A compiled program of a walk.

    Args:
      name: what it does.
      compiled: the program.
      calls: how often a step calls it.
    """

    name: str
    compiled: jax.stages.Compiled
    calls: int


@dataclass(frozen=True)
class Measured:
    """What a walk needs.

    Args:
      pieces: its programs.
      sizes: bytes of rows.
      peaks: bytes of a device beside rows.
    """

    pieces: tuple[WalkPiece, ...]
    sizes: RowSizes
    peaks: Peaks


def num_bytes(tree: Any) -> int:
    """Bytes of a device of arrays as placed."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape) * _itemsize(x)
        for x in jax.tree.leaves(tree)
    )


def data_bytes(x: Any) -> int:
    """Bytes of an array, all of it."""
    return math.prod(x.shape) * _itemsize(x)


def _itemsize(x: Any) -> int:
    return 8 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.dtype(x.dtype).itemsize


def row_sizes(walker: Walker) -> RowSizes:
    """Bytes of the rows of each kind."""
    return {
        kind: tuple((row_bytes(walker.structs(kind, k)),) * length for k, length in enumerate(walker.lengths))
        for kind in KINDS
    }


def row_bytes(structs: Iterable[jax.ShapeDtypeStruct]) -> RowBytes:
    """Bytes of a row."""
    device = host = disk = 0
    for x in structs:
        part = math.prod(x.sharding.shard_shape(x.shape)) * _itemsize(x)
        indices = x.sharding.devices_indices_map(x.shape)
        own = [d for d in indices if d.process_index == jax.process_index()] or list(indices)
        device += part
        host += part * len(own)
        disk += aligned(part) * len({str(indices[d]) for d in own})
    return RowBytes(device, host, whole_blocks(disk))


class Measuring:
    """Compiles a walk; see `measure`."""

    def __init__(self, walker: Walker, inputs: Any) -> None:
        self._walker, self._programs, self._num = walker, walker.programs, walker.programs.model.num
        self._params, self._frozen, self._model_state, self._batch, self._key, self._scale = inputs
        self.pieces: list[WalkPiece] = []
        self._peaks = {"forward": 0, "after": 0, "backward": 0, "update": 0, "birth": 0, "fused": 0, "deferred": 0}
        # By stack, what is there beside an update in the backward pass, and in the forward pass.
        self._beside_update, self._beside_due = dict[int, int](), dict[int, int]()
        self.kept = 0  # what is there all the time besides state

    def _compile(self, phase: str, name: str, program: Jitted, calls: int, *args: Any, beside: int = 0) -> Any:
        outs = program.compile(*args)
        assert program.compiled is not None
        self.pieces.append(WalkPiece(name, program.compiled, calls))
        self._peaks[phase] = max(self._peaks[phase], program.temporary + beside)
        return outs

    def run(self) -> Measured:
        walker, programs, model, num = self._walker, self._programs, self._programs.model, self._num
        index, numbers = np.int32(0), range(len(walker.lengths))
        out, new, states = self._compile(
            "forward", "begin", programs.begin, 1, self._params, self._frozen, self._model_state, self._batch, self._key
        )
        self.kept += num_bytes((out, new, states))
        out = dataclasses.replace(out, params=self._params, frozen=self._frozen)
        payload, states = self._compile("forward", "enter", programs.enter, num, out, index, states)
        ends, once = [], []
        rows = [(tuple(walker.structs("params", k)), tuple(walker.structs("frozen", k))) for k in numbers]
        for k in numbers:
            once.append(self._compile("forward", f"once {k}", programs.once[k], 1, out, states))
            moving, passing = model.passing(k, payload)
            self.kept += num_bytes(once[k]) + num * num_bytes(passing)
            args = (rows[k], once[k], out, index, index, states, payload)
            self._beside_due[k] = num * num_bytes(moving)
            moving, states = self._compile(
                "forward", f"forward {k}", programs.forward[k], num * walker.lengths[k], *args,
                beside=self._beside_due[k],
            )  # fmt: skip
            ends.append([*moving, *passing])
            if k + 1 < len(walker.lengths):
                self.kept += num * num_bytes(moving)
                payload = self._compile("forward", f"leave {k}", programs.leave[k], num, out, index, states, ends[k])
        self._backwards(out, states, ends, once, rows, new)
        sizes, state = row_sizes(walker), (self._params, self._frozen, self._model_state)
        outside = num_bytes((state, self._batch, self._opt())) + self.kept
        return Measured(tuple(self.pieces), sizes, Peaks(outside, **self._peaks))

    def _opt(self) -> list[jax.ShapeDtypeStruct]:
        return self._walker.outside_structs("opt")

    def _backwards(self, out: Any, states: Any, ends: Any, once: Any, rows: Any, new: Any) -> None:
        walker, programs, model, num = self._walker, self._programs, self._programs.model, self._num
        index, last = np.int32(0), len(walker.lengths) - 1
        sums = self._compile("after", "zeros", programs.zeros, 1, out, states, ends[last])
        results, outer = sums
        self.kept += num_bytes(sums)
        # Their gradients, and what of them is not kept in any case.
        handed = num * num_bytes((ends[last], model.passing(last, ends[last])[0]))
        _, states, moving, passing = self._compile(
            "after", "loss", programs.finish, num, out, index, states, ends[last], sums, self._scale, beside=handed
        )
        divisor = self._compile("after", "divisor", programs.divisor, 1, results, self._scale)
        for k in reversed(range(len(walker.lengths))):
            outer_once = self._compile("backward", f"zero once {k}", programs.zero_once[k], 1, once[k])
            own = self._compile("backward", f"zero row {k}", programs.zero_row[k], walker.lengths[k], rows[k][0])
            payload = [*model.passing(k, ends[k])[0], *model.passing(k, ends[k])[1]]
            beside = num * num_bytes((moving, passing)) + num_bytes((own, outer_once))
            self._beside_update[k] = beside
            moving, passing, own, outer_once = self._compile(
                "backward", f"backward {k}", programs.backward[k], num * walker.lengths[k],
                rows[k], once[k], out, index, index, states, payload, moving, passing, own, outer_once, beside=beside,
            )  # fmt: skip
            self._compile("backward", f"average {k}", programs.average[k], walker.lengths[k], own, divisor)
            outer = self._compile(
                "backward", f"back once {k}", programs.back_once[k], 1, out, states, outer_once, outer
            )
            if k:
                grads = [*moving, *passing]
                outer, moving, passing = self._compile(
                    "backward", f"back leave {k - 1}", programs.back_leave[k - 1], num,
                    out, index, states, ends[k - 1], grads, outer, beside=beside,
                )  # fmt: skip
        grads = [*moving, *passing]
        outer = self._compile(
            "backward", "back enter", programs.back_enter, num, out, index, states, grads, outer,
            beside=num * num_bytes(grads),
        )  # fmt: skip
        _, outer = self._compile("backward", "close", programs.close, 1, results, outer, new, states, self._scale)
        if walker.optimizer is not None:
            self._update(walker.optimizer, tuple(outer))

    def _update(self, optimizer: RowOptimizer, grads: Any) -> None:
        """The last pass, which has the most at once: the others read parts of the same rows, and make numbers."""
        walker = self._walker
        loss: Any = jax.ShapeDtypeStruct((), jnp.float32)
        opt: Any = tuple(self._opt())
        rows: list[Any] = [tuple(tuple(walker.structs(kind, k)) for kind in ("grads", "opt", "params"))
                for k in range(len(walker.lengths))]  # fmt: skip
        joint = optimizer.join(0, {}, grads, opt, self._params, loss, {})
        for number in range(1, optimizer.num_rounds + 1):
            exports = {
                (k, at): optimizer.export(number, k, at, rows[k][0], rows[k][1], rows[k][2], joint)
                for k, length in enumerate(walker.lengths)
                for at in range(length)
            }
            joint = optimizer.join(number, exports, grads, opt, self._params, loss, joint)
        whole = jax.sharding.NamedSharding(self._programs.mesh, jax.sharding.PartitionSpec())
        joint = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), joint)
        for k, length in enumerate(walker.lengths):
            if not rows[k][0]:
                continue
            update = optimizer.compile_update(k, 0, rows[k][0], rows[k][1], rows[k][2], joint)
            assert update.compiled is not None
            self.pieces.append(WalkPiece(f"update {k}", update.compiled, length))
            self._peaks["update"] = max(self._peaks["update"], update.temporary)
            self._peaks["fused"] = max(self._peaks["fused"], update.temporary + self._beside_update[k])
            self._peaks["deferred"] = max(self._peaks["deferred"], update.temporary + self._beside_due[k])


def measure(walker: Walker, inputs: Any) -> Measured:
    """Compiles the programs of a walk.

    Args:
      walker: the walk.
      inputs: params and frozen outside of layers, the model state, the batch, a key, and what the loss is multiplied
        by, as structs with their placements.
    """
    return Measuring(walker, inputs).run()
