"""The devices of a run: those that are here, virtual ones, and cards that are absent and only compiled for."""

import os
import re
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from cjax.cards import CARDS, card_of_kind
from cjax.jax_compat.backends import (
    absent_gpus,
    clear_backends,
    gathers_ahead,
    made_together,
    names_in_cache_key,
    only_compiles,
    without_compilation_cache,
)
from cjax.machines import Cluster
from cjax.mesh.axes import Device
from cjax.mesh.launch import check_joined

_MOST_VIRTUAL = 4096
# The machines for which devices that are not here were made, by what those of one call have in common.
_CLUSTERS: weakref.WeakKeyDictionary[Any, Cluster] = weakref.WeakKeyDictionary()


def simulate(num_devices: int) -> list[Device]:
    """Replaces the devices of this process by `num_devices` virtual CPU devices; works in a running notebook too.

    Args:
      num_devices: how many.

    Raises:
      TypeError, ValueError: no number of devices, one below 1, or more than any machine can have.
      RuntimeError: when arrays already live on the present devices: replacing the devices would destroy them.

    >>> len(simulate(8))
    8
    """
    if isinstance(num_devices, bool) or not isinstance(num_devices, int):
        raise TypeError(f"simulate takes a number of devices, such as 8, not {num_devices!r}.")
    if num_devices < 1:
        raise ValueError(f"simulate needs at least one device, not {num_devices}.")
    if num_devices > _MOST_VIRTUAL:
        raise ValueError(
            f"simulate({num_devices}): each virtual device has threads of its own, and {_MOST_VIRTUAL} are the most "
            'that any machine can have; to compile for more, give parallelize devices="h100:" and their number.'
        )
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
        clear_backends()
        done = _set_num_cpu_devices(num_devices)
        assert done, "JAX refuses jax_num_cpu_devices although its backends were cleared"
    jax.config.update("jax_platforms", "cpu")
    return jax.devices()


def _set_num_cpu_devices(num_devices: int) -> bool:
    # XLA sizes its pool of threads by this variable, or else by the machine's cores. On few cores, devices that wait
    # for each other in a collective may then hold every thread that the last of them needs.
    os.environ.setdefault("NPROC", str(max(os.cpu_count() or 1, 4 * num_devices)))
    # JAX takes this setting only while no backend has started; its refusal is the public way to know that one has.
    try:
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        return False
    return True


def resolve_devices(devices: Sequence[Device] | Cluster | str | None = None) -> list[Device]:
    """The devices meant by what a user passes as `devices`.

    Args:
      devices: None for all that JAX sees; JAX devices; a `Cluster` or its text, such as `"h100:64"`, for cards that are
        not here, on which programs only compile; or `"cpu:8"` for the first 8 CPU devices of this process.

    Raises:
      ValueError: when the text is malformed, names a card that is not known or that nothing compiles for, or asks for
        CPU devices that don't exist.
      RuntimeError: when this process evidently is not what it was meant to be: XLA_FLAGS set too late, one of several
        launched processes that never joined, or a compile target without the compiler (extra `cjax[aot]`).

    >>> resolve_devices("cpu:1")[0].platform
    'cpu'
    """
    if devices is None:
        found = jax.devices()
        check_joined()
        _check_xla_flags()
        return list(found)
    if isinstance(devices, Cluster):
        return _compile_only_devices(devices)
    if isinstance(devices, str):
        num_cpus = num_cpus_named(devices)
        return _compile_only_devices(Cluster.parse(devices)) if num_cpus is None else _cpu_devices(devices, num_cpus)
    found = list(devices) if isinstance(devices, Iterable) else []
    if not found or not all(isinstance(device, jax.Device) for device in found):
        raise ValueError(f'devices must be JAX devices, a cjax.Cluster or text such as "h100:64", not {devices!r}.')
    if twice := sorted({str(device) for device in found if found.count(device) > 1}):
        raise ValueError(
            f"devices holds {', '.join(twice)} twice, and a device has one part of the work: give each once, as "
            "jax.devices() does. (Virtual CPU devices, to try a plan with: cjax.simulate(8).)"
        )
    if len(platforms := sorted({device.platform for device in found})) > 1:
        raise ValueError(
            f"devices are of {' and '.join(platforms)}, and a program runs on one kind: give "
            f"jax.devices({platforms[-1]!r})."
        )
    return found


def num_cpus_named(text: str) -> int | None:
    """8 of `"cpu:8"`; None for a text that names cards.

    Raises:
      ValueError: for CPU devices without a number, or with more than that said of them.
    """
    match = re.fullmatch(r"\s*cpu\b\s*(?::\s*(\d*)\s*)?(/?.*)", text, re.IGNORECASE | re.DOTALL)
    if match is None:
        return None
    if not match[1] or match[2]:
        more = "; links and prices are of cards that are not here" if match[2].startswith("/") else ""
        raise ValueError(f'{text!r}: CPU devices are named with their number alone, as "cpu:8"{more}.')
    return int(match[1])


def _cpu_devices(text: str, num_devices: int) -> list[Device]:
    found = jax.devices("cpu")
    if num_devices < 1:
        raise ValueError(f'{text!r} is no device at all; {len(found)} CPU device(s) here: "cpu:{len(found)}".')
    if num_devices > len(found):
        raise ValueError(f"{text!r}: {len(found)} CPU device(s) here. Type first: cjax.simulate({num_devices})")
    return found[:num_devices]


def _compile_only_devices(cluster: Cluster) -> list[Device]:
    name = cluster.card.name
    if cluster.num_devices is None:
        raise ValueError(
            f'"{cluster}" says no number of cards, which only a search can choose: write one, as "{name}:8".'
        )
    if not cluster.card.is_compilable:
        like = "; a card of your own compiles with chip=..., as cjax.cards.CARDS has them" if name not in CARDS else ""
        raise ValueError(
            f"nothing compiles for {cluster.card.kind}, so {name} is for planning alone: cjax.plans and cjax plan "
            f"--search tell what plans take on it{like}."
        )
    try:
        found = absent_gpus(cluster.xla_target, cluster.topology)
    except NotImplementedError as error:
        raise RuntimeError(
            f'devices="{cluster}" compiles with XLA\'s GPU compiler, which is not installed (or not for JAX '
            f"{jax.__version__}). Type\n  pip install 'cjax[aot]'\nand if that changes nothing, start Python with\n"
            "  JAX_PLATFORMS=cpu"
        ) from error
    _CLUSTERS[made_together(found[0])] = cluster
    return found


def cluster_of(devices: Sequence[Device]) -> Cluster | None:
    """The machines that devices which are not here belong to; None for devices that are, or of a card not known."""
    if not is_compile_only(devices):
        return None
    if (cluster := _CLUSTERS.get(made_together(devices[0]))) is not None:
        return cluster
    card = card_of_kind(devices[0].device_kind)  # of a topology that cjax did not make
    return Cluster(card) if card is not None else None


SCATTERED_TOGETHER = 8 << 20  # bytes


def compiler_options(
    mesh: Mesh, scatters_in_layers: bool = False, leaves_apart: bool = False, saves_gathered: bool = False
) -> dict[str, bool | int | str] | None:
    """What programs for a mesh are compiled with, for `jax.jit`.

    With a thread for each core, devices that wait in collectives keep them from those that are waited for, and steps on
    several CPU devices have been seen to hang (docs/design.md). So each of several is to take one, in a schedule that
    needs the least memory: there is nothing to run beside.

    On GPUs, matmuls are the vendor's, which add a bias or a residual as they go: GPT-2 XL's step takes 2 % less on an
    H100 than with XLA's own where these seem faster (JAX 0.11.2). For absent cards there is nothing to try them on.

    Where each layer scatters its gradients (under ZeRO, unless devices add up micro-batches of their own), XLA would do
    so with all of them at once, when the last is made and nothing of the layer is left to hide that under: larger ones
    go alone, as soon as they are made.

    Where each layer gathers its weights and saves nothing else (ZeRO-1 and -2 with remat=block), it is to gather those
    of the next meanwhile: XLA of JAX 0.11 and 0.12 would gather all of a layer's first. That costs copies of what is
    gathered ahead. Where layers save what they compute as well, XLA gathers between, and those copies cost more than
    they hide; and where layers gather for the backward pass too (ZeRO-3), it would be beside gradients on their way.

    XLA is to leave small products of one operand apart where micro-batches run abreast, which would wait for each
    other, and where cjax has put those side by side that gain by it: of others each adds its bias as it goes.
    """
    devices = list(mesh.devices.flat)
    if mesh.size > 1 and devices[0].platform == "cpu":
        options = ("xla_cpu_multi_thread_eigen", "xla_cpu_enable_concurrency_optimized_scheduler")
        return dict.fromkeys(options, False)
    found: dict[str, bool | int | str] = {}
    if on_gpus(mesh):
        found["xla_gpu_enable_triton_gemm"] = False
    if scatters_in_layers and on_gpus(mesh):
        found["xla_gpu_reduce_scatter_combine_threshold_bytes"] = SCATTERED_TOGETHER
    if saves_gathered and on_gpus(mesh):
        found |= gathers_ahead()
    if leaves_apart and on_gpus(mesh):
        found["xla_gpu_dot_merger_threshold_mb"] = 0
    return found or None


def on_gpus(mesh: Mesh) -> bool:
    """Whether programs for a mesh are XLA's GPU compiler's: by what the mesh is made of, not by what this process runs
    on, as plans are compiled for cards that are not here."""
    return mesh.devices.flat[0].platform in ("gpu", "cuda")


def is_compile_only(devices: Sequence[Device]) -> bool:
    """Whether programs for these devices can be compiled but not run, as for `"h100:64"`."""
    return only_compiles(devices[0])


def compile_lowered(lowered: jax.stages.Lowered, devices: Sequence[Device], named: bool = False) -> jax.stages.Compiled:
    """Compiles a lowered program for the devices it was lowered for, which may be absent.

    With `named`, the operations of what comes back have the names that this program gives them: JAX's persistent
    compilation cache takes programs that differ in nothing but names for one.

    JAX writes programs for absent devices to its persistent compilation cache and then fails to read them back, with a
    warning each time; so for these the cache is off.
    """
    is_cached = not is_compile_only(devices) or not jax.config.values["jax_enable_compilation_cache"]
    with names_in_cache_key(named) if is_cached else without_compilation_cache():
        return lowered.compile()


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
