"""Whether devices that hold the same piece of a state hold the same bits: silent corruption, found and named."""

from collections import Counter, defaultdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from cjax.mesh import compiler_options, own_context

_SHOWN = 4  # arrays that are named of each device
NOT_ON_DEVICES = (
    "copies can be compared where all of the state is on the devices of one mesh, and none of it in host memory or on "
    "disk: leave out verify_copies_every="
)


class CopiesDifferError(RuntimeError):
    """Devices that hold the same piece of the state have other bits in it.

    Attributes:
        devices: those that differ from most of the others, or where as many say the one as the other, all of them.
    """

    def __init__(self, message: str, devices: list[Any]):
        super().__init__(message)
        self.devices = devices


class DeviceCopies:
    """The copies of a state, compared by sums of their bits that each device makes of its own.

    A sum of 32 bits is exact in any order, and one flipped bit always changes it. What lives on one device alone has
    nothing to be compared with: ZeRO's parts, and what other axes split.

    Args:
        state: any tree of arrays on one mesh; those to come are placed like it.

    Raises:
        ValueError: no array of it is held by two devices, or some are not on the devices.
    """

    def __init__(self, state: Any):
        named = jax.tree_util.tree_leaves_with_path(state)
        shardings = [leaf.sharding for _, leaf in named]
        meshes = {each.mesh for each in shardings if isinstance(each, NamedSharding)}
        is_on_devices = all(each.memory_kind in (None, "device", _usual(each)) for each in shardings)
        if len(meshes) != 1 or not all(isinstance(each, NamedSharding) for each in shardings) or not is_on_devices:
            raise ValueError(NOT_ON_DEVICES)
        self._mesh: Any = meshes.pop()
        self._devices: list[Any] = list(self._mesh.devices.flat)
        # By array: the devices, by number, that hold the same piece.
        groups = [
            _groups(sharding, leaf.shape, self._devices) for (_, leaf), sharding in zip(named, shardings, strict=True)
        ]
        self._which = [i for i, found in enumerate(groups) if found and named[i][1].size]
        self._groups = [groups[i] for i in self._which]
        self._names = [jax.tree_util.keystr(named[i][0], simple=True, separator="/").lstrip("_") for i in self._which]
        if not self._which:
            raise ValueError(
                f"under this plan no two of {len(self._devices)} devices hold the same piece of the state, so there is "
                "nothing to compare: leave out verify_copies_every="
            )
        specs = tuple(shardings[i].spec for i in self._which)
        rows = PartitionSpec(self._mesh.axis_names)
        each = jax.shard_map(_sums, mesh=self._mesh, in_specs=specs, out_specs=rows, check_vma=False)
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        self._sums = jax.jit(each, out_shardings=everywhere, compiler_options=compiler_options(self._mesh))

    @own_context
    def start(self, state: Any) -> jax.Array:
        """Begins to add up; returns at once, and the state may be given to the next step."""
        leaves = jax.tree.leaves(state)
        return self._sums(*(leaves[i] for i in self._which))

    def check(self, sums: jax.Array, step: int) -> None:
        """Compares what `start` gave of the state after this step. All processes come to the same.

        Raises:
            CopiesDifferError: there are others than the rest.
        """
        table = np.asarray(sums)
        found: dict[int, list[str]] = defaultdict(list)
        is_sure = True
        for column, (name, groups) in enumerate(zip(self._names, self._groups, strict=True)):
            for group in groups:
                values = [int(table[number, column]) for number in group]
                (most, count), *others = Counter(values).most_common()
                if not others:
                    continue
                is_tie = others[0][1] == count
                is_sure = is_sure and not is_tie
                for number, value in zip(group, values, strict=True):
                    if is_tie or value != most:
                        found[number].append(name)
        if found:
            raise CopiesDifferError(self._said(found, step, is_sure), [self._devices[number] for number in found])

    def _said(self, found: dict[int, list[str]], step: int, is_sure: bool) -> str:
        parts = []
        for number, names in found.items():
            device = self._devices[number]
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            listed = f"{', '.join(names[:_SHOWN])}{more}"
            parts.append(f"{device} of process {device.process_index} (in {listed})")
        who = "; ".join(parts)
        these = f"{who}, unlike the others that hold the same" if is_sure else f"one of {who}, which hold the same"
        return (
            f"after step {step} the state is corrupt on {these}. Memory or arithmetic of that device failed without a "
            "word, or a kernel in the step gives other bits each time (on GPUs --xla_gpu_deterministic_ops=true in "
            "XLA_FLAGS tells which)"
        )


class CopyChecks:
    """When copies are compared, and what follows where they differ.

    Args:
        state: of the run.
        every: steps between two comparisons; they are made before each checkpoint too.
        rolls_back: whether the run goes back to the last checkpoint, or ends.

    Raises:
        ValueError: as of `DeviceCopies`.
    """

    def __init__(self, state: Any, every: int, rolls_back: bool):
        self._copies, self._every, self._rolls_back = DeviceCopies(state), every, rolls_back
        self._begun: tuple[int, jax.Array] | None = None
        self._fine = -1  # the last step whose copies were alike

    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    def begin(self, state: Any, step: int) -> None:
        """Of the state after this step; what comes of it is said by `look`, which waits for it."""
        if step not in (self._fine, self._begun and self._begun[0]):
            self._begun = (step, self._copies.start(state))

    def forget(self) -> None:
        """The run went back: what was compared is not what comes of the same steps now."""
        self._begun, self._fine = None, -1

    def look(self) -> str | None:
        """What differs, where the run is to go back then; None where all is well, or nothing was begun.

        Raises:
            CopiesDifferError: it is to end.
        """
        if self._begun is None:
            return None
        (step, sums), self._begun, self._fine = self._begun, None, -1
        try:
            self._copies.check(sums, step)
        except CopiesDifferError as error:
            if not self._rolls_back:
                raise
            return str(error)
        self._fine = step
        return None


def _usual(sharding: Any) -> str | None:
    device = next(iter(sharding.device_set))
    return device.default_memory().kind


def _groups(sharding: NamedSharding, shape: tuple[int, ...], devices: list[Any]) -> list[list[int]]:
    """The numbers of devices that hold the same piece, where more than one does."""
    found: dict[str, list[int]] = defaultdict(list)
    places = sharding.devices_indices_map(shape)
    for number, device in enumerate(devices):
        found[str(places[device])].append(number)
    return [group for group in found.values() if len(group) > 1]


def _sums(*shards: jax.Array) -> jax.Array:
    """Of each shard of this device the sum of its bits, as a row."""
    return jnp.stack([_sum(shard) for shard in shards])[None]


def _sum(shard: jax.Array) -> jax.Array:
    if jnp.issubdtype(shard.dtype, jax.dtypes.prng_key):
        shard = jax.random.key_data(shard)
    size = shard.dtype.itemsize
    if shard.dtype == jnp.bool_ or (jnp.issubdtype(shard.dtype, jnp.integer) and size < 8):
        return jnp.sum(shard.astype(jnp.uint32), dtype=jnp.uint32)
    if jnp.issubdtype(shard.dtype, jnp.complexfloating):
        return _sum(shard.real) + 3 * _sum(shard.imag)
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(size, jnp.uint32)  # of what is wider, several
    return jnp.sum(jax.lax.bitcast_convert_type(shard, unsigned), dtype=jnp.uint32)
