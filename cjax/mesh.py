"""Mesh axis names, the mesh, virtual and absent devices, multi-host start: the only file that touches devices."""

import importlib.metadata
import math
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend.backend
import numpy as np
from jax.experimental import mesh_utils, topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from cjax.cards import CARDS

Device = Any  # a jax.Device; type checkers do not see a type in that name

DATA = "data"
ZERO = "zero"
TENSOR = "tensor"

# Outermost first. Neighbours on a later axis are neighbours in the machine: the tensor axis talks several times a layer
# and must stay within a host, a ZeRO group talks once or twice a layer, plain data parallelism once a step.
AXES = (DATA, ZERO, TENSOR)
# The axes that split the batch. A ZeRO group is part of data parallelism: its devices read different examples.
BATCH_AXES = (DATA, ZERO)


def build_mesh(axis_sizes: Mapping[str, int], devices: Sequence[Device]) -> Mesh:
    """The mesh with these axes over these devices, every axis of type Auto (unmodified Flax models fail on others).

    Args:
      axis_sizes: number of devices along each axis; in whatever order, the mesh has the order of `AXES`.
      devices: as many devices as the sizes multiply to; a device order that suits the machine is chosen.

    Raises:
      ValueError: when an axis is unknown, a size is below 1, or the sizes don't multiply to the number of devices.

    >>> build_mesh({"tensor": 1, "data": 1}, jax.devices()[:1]).axis_names
    ('data', 'tensor')
    """
    unknown = [axis for axis in axis_sizes if axis not in AXES]
    if unknown:
        raise ValueError(f"No mesh axis is called {unknown[0]!r}; the axes are {', '.join(AXES)}.")
    names = tuple(axis for axis in AXES if axis in axis_sizes)
    sizes = tuple(axis_sizes[axis] for axis in names)
    if any(size < 1 for size in sizes):
        raise ValueError(f"Every mesh axis needs at least one device, not {dict(axis_sizes)}.")
    if math.prod(sizes) != len(devices):
        product = " x ".join(f"{axis} {size}" for axis, size in zip(names, sizes, strict=True))
        raise ValueError(wrong_number_of_devices(f"{product} = {math.prod(sizes)}", math.prod(sizes), devices))
    ordered = sorted(devices, key=_place_in_machine)
    if ordered[0].platform == "tpu":
        # A TPU's links form a torus, on which device numbers do not say who is whose neighbour.
        array = mesh_utils.create_device_mesh(sizes, ordered)
    else:
        array = np.array(ordered, dtype=object).reshape(sizes)
    return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))


def _place_in_machine(device: Device) -> tuple[int, int, int]:
    # A launcher that deals processes to hosts in turn gives a host every other process: only the slice (one a host, for
    # GPUs) tells which devices share it. CPU devices have none.
    return getattr(device, "slice_index", None) or 0, device.process_index, device.id


def wrong_number_of_devices(wanted: str, num_wanted: int, devices: Sequence[Device]) -> str:
    """The message for a plan that asks for `num_wanted` devices (`wanted` says how) where `devices` are here."""
    here = f"{len(devices)} {devices[0].device_kind} device{'s' if len(devices) > 1 else ''}" if devices else "none"
    return (
        f"The plan needs {num_wanted} devices ({wanted}); here: {here}. Type one of\n"
        f"  cjax.simulate({num_wanted})                  virtual CPU devices, before any array is made\n"
        f'  parallelize(..., devices="h100:{num_wanted}")   compile only, for cards that are not here\n'
        '  parallelize(..., plan="auto")        a plan for the devices that are here'
    )


def simulate(num_devices: int) -> list[Device]:
    """Replaces the devices of this process by `num_devices` virtual CPU devices; works in a running notebook too.

    Args:
      num_devices: how many.

    Raises:
      RuntimeError: when arrays already live on the present devices: replacing the devices would destroy them.

    >>> len(simulate(8))
    8
    """
    if num_devices < 1:
        raise ValueError(f"simulate needs at least one device, not {num_devices}.")
    if not _set_num_cpu_devices(num_devices):
        if jax.default_backend() == "cpu" and jax.device_count() == num_devices:
            return jax.devices()
        if jax.distributed.is_initialized():
            raise RuntimeError("simulate is for a single process, and this one is part of a multi-process run.")
        num_arrays = len(jax.live_arrays())
        if num_arrays:
            raise RuntimeError(
                f"simulate({num_devices}) would destroy the {num_arrays} JAX array(s) that this process already holds "
                f"on {jax.device_count()} {jax.devices()[0].device_kind} device(s). Restart and type, before any array "
                f"is made (in a notebook: in the first cell)\n  import cjax; cjax.simulate({num_devices})\n"
                "or delete those arrays (del name; a notebook's Out keeps results too) and type it again."
            )
        jax.extend.backend.clear_backends()
        done = _set_num_cpu_devices(num_devices)
        assert done, "JAX refuses jax_num_cpu_devices although its backends were cleared"
    jax.config.update("jax_platforms", "cpu")
    return jax.devices()


def _set_num_cpu_devices(num_devices: int) -> bool:
    # JAX takes this setting only while no backend has started; its refusal is the public way to know that one has.
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        return False
    return True


def resolve_devices(devices: Sequence[Device] | str | None = None) -> list[Device]:
    """The devices meant by what a user passes as `devices`.

    Args:
      devices: None for all that JAX sees; JAX devices; or text: `"h100:64"` (also a100, h200) for cards that are not
        here, on which programs only compile, or `"cpu:8"` for the first 8 CPU devices of this process.

    Raises:
      ValueError: when the text is malformed, or asks for CPU devices that don't exist.
      RuntimeError: when this process evidently is not what it was meant to be: XLA_FLAGS set too late, one of several
        launched processes that never joined, or a compile target without the compiler (extra `cjax[aot]`).

    >>> resolve_devices("cpu:1")[0].platform
    'cpu'
    """
    if devices is None:
        found = jax.devices()
        _check_joined()
        _check_xla_flags()
        return list(found)
    if not isinstance(devices, str):
        found = list(devices)
        if not found or not all(isinstance(device, jax.Device) for device in found):
            raise ValueError(f'devices must be JAX devices or text such as "h100:64", not {devices!r}.')
        return found
    match = re.fullmatch(r"\s*(\w+)\s*:\s*(\d+)\s*", devices)
    kinds = ["cpu", *CARDS]
    if match is None or match[1].lower() not in kinds:
        raise ValueError(
            f'No devices are called {devices!r}: write one of {", ".join(kinds)} and a number, as "h100:64".'
        )
    name, num_devices = match[1].lower(), int(match[2])
    if name == "cpu":
        found = jax.devices("cpu")
        if not 1 <= num_devices <= len(found):
            raise ValueError(f"{devices!r}: {len(found)} CPU device(s) here. Type first: cjax.simulate({num_devices})")
        return found[:num_devices]
    return _compile_only_devices(name, num_devices)


def _compile_only_devices(name: str, num_devices: int) -> list[Device]:
    card = CARDS[name]
    description = dict(platform="cuda", target_config=card.xla_target(), topology=card.xla_topology(num_devices))
    # The compiler plugin refuses to register where CUDA's libraries are missing, though compiling needs none of them.
    before = os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    try:
        try:
            return list(topologies.get_topology_desc(**description).devices)
        except NotImplementedError:
            # JAX looked for plugins when its first backend started, under the check, and does not look again.
            for plugin in importlib.metadata.entry_points(group="jax_plugins"):
                if "cuda" in plugin.name:
                    plugin.load().initialize()
            return list(topologies.get_topology_desc(**description).devices)
    except NotImplementedError as error:
        raise RuntimeError(
            f'devices="{name}:{num_devices}" compiles with XLA\'s GPU compiler, which is not installed (or not for JAX '
            f"{jax.__version__}). Type\n  pip install 'cjax[aot]'\nand if that changes nothing, start Python with\n"
            "  JAX_PLATFORMS=cpu"
        ) from error
    finally:
        if before is None:
            del os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]
        else:
            os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = before


def is_compile_only(devices: Sequence[Device]) -> bool:
    """Whether programs for these devices can be compiled but not run, as for `"h100:64"`."""
    return devices[0].client.runtime_type == "compile_only_runtime"


def compile_lowered(lowered: jax.stages.Lowered, devices: Sequence[Device]) -> jax.stages.Compiled:
    """Compiles a lowered program for the devices it was lowered for, which may be absent.

    JAX writes programs for absent devices to its persistent compilation cache and then fails to read them back, with a
    warning each time; so for these the cache is off.
    """
    if not is_compile_only(devices) or not jax.config.values["jax_enable_compilation_cache"]:
        return lowered.compile()
    # JAX decides at the first compilation whether it caches, for the whole process: each reset makes it decide anew.
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        return lowered.compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def _check_xla_flags() -> None:
    match = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if match is None or jax.default_backend() != "cpu" or jax.config.values["jax_num_cpu_devices"] >= 0:
        return
    if int(match[1]) != jax.local_device_count():
        raise RuntimeError(
            f"XLA_FLAGS asks for {match[1]} CPU devices and JAX has {jax.local_device_count()}: the variable was set "
            "after JAX had started. Set it before Python starts, or instead of it type first\n"
            f"  cjax.simulate({match[1]})"
        )


def initialize() -> None:
    """Joins this process to the others of its run; to be called first. Alone, there is nothing to do.

    Knows Slurm (`srun`), Open MPI (`mpirun`), torchrun and whatever sets its variables (RANK, WORLD_SIZE, MASTER_ADDR,
    MASTER_PORT, LOCAL_RANK), and JAX's own JAX_COORDINATOR_ADDRESS.

    Raises:
      RuntimeError: when Slurm reserved several tasks but started this process outside of them, when a variable is
        missing, or when JAX was used before.

    >>> initialize()
    """
    num_processes = num_launched()
    if jax.distributed.is_initialized() or (num_processes == 1 and "JAX_COORDINATOR_ADDRESS" not in os.environ):
        return
    if "JAX_COORDINATOR_ADDRESS" in os.environ or "OMPI_MCA_orte_hnp_uri" in os.environ:
        jax.distributed.initialize()
        return
    launcher = _launcher()
    if not launcher:
        # Slurm sets SLURM_NTASKS for the whole job, batch script included, and the step's variables only under srun.
        if "SLURM_STEP_NODELIST" not in os.environ:
            raise RuntimeError(
                f"Slurm gave this job {num_processes} tasks, but started this process outside of them, alone. Type\n"
                "  srun python ...\ninstead of python ..., or ask for one task (--ntasks=1)."
            )
        jax.distributed.initialize()
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in launcher]
    if missing:
        raise RuntimeError(
            f"{num_processes} processes were launched, but {' and '.join(missing)} not set for this one: start with "
            "torchrun, or with mpirun -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<a free port there>."
        )
    # Under torchrun its own store listens on MASTER_PORT; JAX's coordinator takes the next port.
    port = int(launcher["MASTER_PORT"]) + (os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
    jax.distributed.initialize(
        coordinator_address=f"{launcher['MASTER_ADDR']}:{port}",
        num_processes=num_processes,
        process_id=int(launcher["RANK"]),
        local_device_ids=_local_device(launcher),
    )


def num_launched() -> int:
    """How many processes the launcher started or was asked for, read from the environment; 1 when there is none."""
    return int(_launcher().get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or 1)


def _launcher() -> dict[str, str]:
    # torchrun's variables, or Open MPI's under torchrun's names; empty when neither launched this process.
    names = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if "WORLD_SIZE" not in os.environ:
        names_in_mpi = {"LOCAL_WORLD_SIZE": "LOCAL_SIZE", "WORLD_SIZE": "SIZE"}
        ours = {name: os.environ.get(f"OMPI_COMM_WORLD_{names_in_mpi.get(name, name)}") for name in names}
    else:
        ours = {name: os.environ.get(name) for name in names}
    if not ours["WORLD_SIZE"]:
        return {}
    ours |= {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    return {name: value for name, value in ours.items() if value}


def _local_device(launcher: dict[str, str]) -> int | None:
    # One process a GPU takes the GPU of its local rank, unless it sees that one alone; one process a host takes all.
    narrowed = len(os.environ.get("CUDA_VISIBLE_DEVICES", ",").split(",")) == 1
    if narrowed or launcher.get("LOCAL_WORLD_SIZE") == "1" or "LOCAL_RANK" not in launcher:
        return None
    return int(launcher["LOCAL_RANK"])


def _check_joined() -> None:
    if num_launched() > 1 and jax.process_count() == 1:
        raise RuntimeError(
            f"{num_launched()} processes were launched or asked for, and this one sees itself alone: each would train "
            "its own model. Type first, before JAX is used,\n  cjax.initialize()"
        )
