"""Backends, plugins and the persistent compilation cache: JAX decides about each once for a process."""

import functools
import importlib.metadata
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.extend.backend
from jax._src import compiler, distributed, lib
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache


def clear_backends() -> None:
    """Ends all backends of this process and what is on them, so that the number of virtual devices can change.

    Private: nothing by name. But JAX has said that it may go: `jax.clear_backends` went.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a number of CPU devices that can be set while a backend runs.
    """
    jax.extend.backend.clear_backends()


@contextmanager
def without_plugin_failures() -> Iterator[None]:
    """Where a plugin for GPUs is installed and no GPU is here, JAX logs a traceback and goes on with the CPU: not so
    while this is open.

    Private: the name of the logger.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a plugin that says that it finds no device, and is believed.
    """
    logger = logging.getLogger("jax._src.xla_bridge")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def needs_more_memory() -> bool:
    """Whether XLA's compiler for GPUs keeps a second copy of what branches of a conditional change, each another part,
    and leaves larger gaps between values.

    Private: no name; XLA promises nothing of its use of memory, and what is told of it beforehand depends on this.
    Tried: JAX 0.10.2 copies; 0.11.2 and 0.12.0.1 do not. Of 82 pairs of model and plan, 0.10.2 needs 1.4 % more than
    0.12.0.1 at the median, a mixture under ZeRO-3 7 % more, and pipelines up to 68 %.
    Public instead: nothing. It goes when JAX 0.10 does.
    """
    return jax.__version_info__ < (0, 11)


def keeps_behind_barriers() -> bool:
    """Whether XLA's compiler for GPUs computes what is behind an optimization barrier after what the barrier waits for.

    Private: barriers keep operations from being merged; nothing is promised of their order in the end.
    Tried: JAX 0.10.2 does not; 0.11.2 and 0.12.0.1 do. 0.10.2 computes the last micro-batch's forward pass ahead of the
    others, and keeps what it saves all the while: a BERT under ZeRO-2 needs 56 % more memory. With the others it is
    0.9 % more at the median of ten pairs of model and plan.
    Public instead: nothing. It goes when JAX 0.10 does.
    """
    return not needs_more_memory()  # which is of the same XLA


def splits_what_has_a_layout() -> bool:
    """Whether XLA's compiler for GPUs leaves an array in parts that is told how to lie in memory.

    Private: no name; the partitioner's rule for one custom call, which `with_layout_constraint` becomes.
    Tried: JAX 0.10.2 gathers it on every device; 0.11.2 and 0.12.0.1 do not.
    Public instead: nothing. It goes when JAX 0.10 does.
    """
    return jax.__version_info__ >= (0, 11)


def gathers_ahead() -> dict[str, str]:
    """The compile option with which XLA for GPUs gathers in each turn of a loop what the next turn reads, where it
    would otherwise gather all that a turn saves before it computes anything.

    Private: the option's name, and where it is needed: XLA from JAX 0.11 on begins to save as early as it can.
    Tried: JAX 0.10.2, which gathers as it goes; 0.11.2, 0.12.0.1, which do not.
    Public instead: nothing; a scheduler that gathers as it goes.
    """
    if jax.__version_info__ < (0, 11):
        return {}
    return {"xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON"}


def absent_gpus(target: str, topology: str) -> list[Any]:
    """Devices that are not here, for which programs compile and don't run.

    Private: the variable `JAX_SKIP_CUDA_CONSTRAINTS_CHECK`, and that a plugin can be started anew after JAX has looked
    for plugins.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: `get_topology_desc` without a driver, at any time.

    Args:
      target: the accelerator, as XLA describes one.
      topology: "hosts x 1 x devices of a host".

    Raises:
      NotImplementedError: where XLA's compiler for GPUs is not installed.
    """
    # The compiler plugin refuses to register where CUDA's libraries are missing, though compiling needs none of them.
    before = os.environ.get("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    description = dict(platform="cuda", target_config=target, topology=topology)
    try:
        try:
            return list(topologies.get_topology_desc(**description).devices)
        except NotImplementedError:
            # JAX looked for plugins when its first backend started, under the check, and does not look again.
            for plugin in importlib.metadata.entry_points(group="jax_plugins"):
                if "cuda" in plugin.name:
                    plugin.load().initialize()
            return list(topologies.get_topology_desc(**description).devices)
    finally:
        if before is None:
            del os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"]
        else:
            os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = before


def only_compiles(device: Any) -> bool:
    """Whether a device is one of those that are not here.

    Private: the name of its client's kind of runtime.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a field of devices that says it.
    """
    return device.client.runtime_type == "compile_only_runtime"


def made_together(device: Any) -> Any:
    """What the devices of one topology share, and those of another do not; it can be a weak key.

    Private: a device's client. One is made with each topology, and all of its devices have that one.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: the topology of a device.
    """
    return device.client


def is_of_this_process(device: Any) -> bool:
    """Whether a device belongs to this process, and not to another of the same run.

    Private: a device's client, which knows the process's number among those of its own kind of device.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: `jax.process_index(backend)` of a device; by default it is about the default backend.
    """
    return device.process_index == device.client.process_index()


@contextmanager
def names_in_cache_key(named: bool) -> Iterator[None]:
    """While this is open, JAX's persistent compilation cache takes programs that differ in nothing but the names of
    their operations for two, if `named`.

    Private: the setting, which JAX's list of settings that one may change does not have.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: the setting as a `with`.
    """
    before = jax.config.values["jax_compilation_cache_include_metadata_in_key"]
    jax.config.update("jax_compilation_cache_include_metadata_in_key", before or named)
    try:
        yield
    finally:
        jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


@contextmanager
def without_compilation_cache() -> Iterator[None]:
    """While this is open, nothing is read from JAX's persistent compilation cache, nor written to it. It was on.

    Private: that JAX decides at the first compilation whether it caches, for the whole process, and that a reset makes
    it decide anew.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: the setting as a `with`, which is heeded each time.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def each_process_writes_its_cache() -> None:
    """Programs that any process of several compiles are kept, and not only those of the first: for caches that each
    process has for itself.

    Private: `compiler._cache_write`, and that the number of a process which it looks at is in `distributed`.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a setting that says which processes write the compilation cache.
    """
    write = compiler._cache_write
    if hasattr(write, "cjax_writes"):
        return

    @functools.wraps(write)
    def writes(*args: Any, **named: Any) -> None:
        number = distributed.global_state.process_id
        distributed.global_state.process_id = 0
        try:
            write(*args, **named)
        finally:
            distributed.global_state.process_id = number

    vars(writes)["cjax_writes"] = True
    compiler._cache_write = writes


def compiles_cpu_programs_anew() -> None:
    """From now on no program for several CPU devices comes from JAX's persistent compilation cache, where programs have
    lost the order of their collectives.

    XLA begins the collectives of such a program in one order on all devices, as they share a resource. JAX 0.10 reads
    each of them back with a resource of its own; then two devices come to different ones and wait for ever.

    Private: `compiler._cache_read`.
    Tried: JAX 0.10.2 hangs within a few steps; 0.11.2 and 0.12.0.1 keep the order, and nothing is done.
    Public instead: nothing. It goes when JAX 0.10 does.
    """
    read = compiler._cache_read
    if jax.__version_info__ >= (0, 11) or hasattr(read, "cjax_reads"):
        return

    @functools.wraps(read)
    def reads(*args: Any) -> Any:
        backend, devices = args[3:5]
        return (None, None) if backend.platform == "cpu" and len(devices) > 1 else read(*args)

    vars(reads)["cjax_reads"] = True
    compiler._cache_read = reads


def coordinator_address() -> str:
    """Where the processes of this run meet, as `host:port`; empty for one that is alone.

    Private: `distributed.global_state`.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a function of `jax.distributed` that says it.
    """
    return distributed.global_state.coordinator_address or ""


def is_compiling(thread: int) -> bool:
    """Whether a thread compiles a program now, or looks for it among those that are kept.

    Private: the file in which JAX calls the compiler; and Python's `sys._current_frames`.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: an event at the beginning of a compilation, as there is one at its end.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code.co_filename == compiler.__file__:
            return True
        frame = frame.f_back
    return False


def gloo_stays_on_loopback() -> None:
    """Collectives between processes on CPUs listen on this machine's loopback alone, whatever its name stands for.

    Private: `xla_bridge`'s call of `make_gloo_tcp_collectives`.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a setting with the address.
    """
    library: Any = vars(lib)["_jax"]  # which `xla_bridge` looks the function up in
    if not isinstance(library.make_gloo_tcp_collectives, functools.partial):
        library.make_gloo_tcp_collectives = functools.partial(library.make_gloo_tcp_collectives, hostname="127.0.0.1")
