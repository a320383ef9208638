"""Mesh axis names and the mesh."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from cjax.cards import CARDS
from cjax.jax_compat.backends import compiles_cpu_programs_anew

Device = Any  # a jax.Device; type checkers do not see a type in that name

PIPE = "pipe"
DATA = "data"
ZERO = "zero"
EXPERT = "expert"
SEQUENCE = "sequence"
TENSOR = "tensor"
DEPTH, ROW, COL = "depth", "row", "col"  # of 2d and 2.5d tensor parallelism
I, J, K = "i", "j", "k"  # of 3d  # noqa: E741

# Outermost first. Neighbours on a later axis are neighbours in the machine: the tensor axes talk several times a layer
# and must stay within a host, those that have different experts four times in a layer of experts, a ZeRO group once or
# twice a layer, plain data parallelism once a step, and stages of a pipeline hand each other one activation at a time.
AXES = (PIPE, DATA, ZERO, EXPERT, SEQUENCE, DEPTH, ROW, COL, I, J, K, TENSOR)
# The axes of data parallelism. A ZeRO group is part of it, and so are devices that have different experts: they read
# different examples.
BATCH_AXES = (DATA, ZERO, EXPERT)


def build_mesh(axis_sizes: Mapping[str, int], devices: Sequence[Device]) -> Mesh:
    """The mesh with these axes over these devices, every axis of type Auto (unmodified Flax models fail on others).

    Args:
      axis_sizes: number of devices along each axis; in whatever order, the mesh has the order of `AXES`.
      devices: as many devices as the sizes multiply to; a device order that suits the machine is chosen.

    Raises:
      ValueError: when an axis is unknown, a size is below 1, or the sizes don't multiply to the number of devices.

    >>> import jax
    >>> build_mesh({"tensor": 1, "data": 1}, jax.devices()[:1]).axis_names
    ('data', 'tensor')
    """
    unknown = [axis for axis in axis_sizes if axis not in AXES]
    if unknown:
        raise ValueError(f"No mesh axis is called {unknown[0]!r}; the axes are {', '.join(AXES)}.")
    names = tuple(axis for axis in AXES if axis in axis_sizes)
    sizes = tuple(axis_sizes[axis] for axis in names)
    if any(size < 1 for size in sizes):
        raise ValueError(
            f"Every mesh axis needs at least one device, not {dict(axis_sizes)}: write 1, or leave the axis out."
        )
    if math.prod(sizes) != len(devices):
        product = " x ".join(f"{axis} {size}" for axis, size in zip(names, sizes, strict=True))
        raise ValueError(wrong_number_of_devices(f"{product} = {math.prod(sizes)}", math.prod(sizes), devices))
    ordered = sorted(devices, key=_place_in_machine)
    if ordered[0].platform == "tpu":
        # A TPU's links form a torus, on which device numbers do not say who is whose neighbour.
        array = mesh_utils.create_device_mesh(sizes, ordered)
    else:
        array = np.array(ordered, dtype=object).reshape(sizes)
    if ordered[0].platform == "cpu":
        compiles_cpu_programs_anew()
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def _place_in_machine(device: Device) -> tuple[int, int, int]:
    # A launcher that deals processes to hosts in turn gives a host every other process: only the slice (one a host, for
    # GPUs) tells which devices share it. CPU devices have none.
    return getattr(device, "slice_index", None) or 0, device.process_index, device.id


def wrong_number_of_devices(wanted: str, num_wanted: int, devices: Sequence[Device]) -> str:
    """The message for a plan that asks for `num_wanted` devices (`wanted` says how) where `devices` are here."""
    here = f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}" if devices else "none"
    ways = [('parallelize(..., plan="auto")', "a plan for the devices that are here")]
    if num_wanted < len(devices):
        ways.append((f"parallelize(..., devices=jax.devices()[:{num_wanted}])", "some of the devices"))
    else:
        ways.insert(0, (f"cjax.simulate({num_wanted})", "virtual CPU devices, before any array is made"))
    per_host = CARDS["h100"].cards_per_host
    if num_wanted <= per_host or num_wanted % per_host == 0:
        ways.append((f'parallelize(..., devices="h100:{num_wanted}")', "compile only, for cards that are not here"))
    width = max(len(way) for way, _ in ways)
    lines = [f"  {way.ljust(width)}   {meaning}" for way, meaning in ways]
    return "\n".join([f"The plan needs {num_wanted} devices ({wanted}); here: {here}. Type one of", *lines])
