"""Multi-host start: how the processes of a run find each other."""

import os
from typing import Any

import jax

from cjax.jax_compat.backends import each_process_writes_its_cache, gloo_stays_on_loopback
from cjax.job import beating, leave_when_told, member
from cjax.job.beat import wait_for_turn
from cjax.job.member import BEFORE_DEVICES

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def initialize() -> None:
    """Joins this process to the others of its run; to be called first. Alone, there is nothing to do.

    Knows `cjax run`, Slurm (`srun`), Open MPI (`mpirun`), torchrun and whatever sets its variables (RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT, LOCAL_RANK), and JAX's own JAX_COORDINATOR_ADDRESS. From then on SIGTERM ends a process
    of several with status 75, "again", where no `fit` runs that would save first.

    Raises:
      RuntimeError: when Slurm reserved several tasks but started this process outside of them, when a variable is
        missing, or when JAX was used before.

    >>> initialize()
    """
    beating()  # what supervises this process knows from here on that it lives
    wait_for_turn(BEFORE_DEVICES)
    _join()
    if jax.distributed.is_initialized() or member() is not None:
        leave_when_told()
    if member() is not None:
        each_process_writes_its_cache()


def _join() -> None:
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
    bound: dict[str, Any] = {}
    if launcher["MASTER_ADDR"] in _LOOPBACK:  # by default it would listen on all networks of the machine
        bound = {"coordinator_bind_address": f"{launcher['MASTER_ADDR']}:{port}"}
        gloo_stays_on_loopback()
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    jax.distributed.initialize(
        coordinator_address=f"{launcher['MASTER_ADDR']}:{port}",
        num_processes=num_processes,
        process_id=int(launcher["RANK"]),
        local_device_ids=_local_device(launcher),
        **bound,
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


def check_joined() -> None:
    """Refuses to go on as one of several launched processes that see themselves alone."""
    if num_launched() > 1 and jax.process_count() == 1:
        raise RuntimeError(
            f"{num_launched()} processes were launched or asked for, and this one sees itself alone: each would train "
            "its own model. Type first, before JAX is used,\n  cjax.initialize()"
        )
