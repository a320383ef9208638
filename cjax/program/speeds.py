"""A job's table for the scheduler: of each number of devices the plan that the planner finds best there."""

from collections.abc import Sequence
from typing import Any

from cjax.machines import Cluster
from cjax.mesh import num_cpus_named
from cjax.plan import Auto
from cjax.planner.choice.planning import Asked
from cjax.program.plans import planned
from cjax.scheduler.policy.job import Speed, SpeedTable


def speed_table(program_or_call: Any, devices: Cluster | str, sizes: Sequence[int], plan: str = "auto") -> SpeedTable:
    """How fast a model trains on each of some numbers of devices, by arithmetic; nothing runs.

    Args:
      program_or_call: a `Program`, or what `cjax.parallelize` takes: (model, loss, optimizer, batch).
      devices: cards that need not be here, such as "h100"; or virtual ones, such as "cpu:8".
      sizes: numbers of devices. One on which no plan works, or none fits, is left out.
      plan: "auto", and behind it words that every plan has to have.

    Raises:
      ValueError: no plan fits on any of these sizes.

    >>> import flax.linen as nn, jax, optax
    >>> batch = jax.ShapeDtypeStruct((64, 512), "float32")
    >>> call = nn.Dense(512), lambda model, x: (model(x) ** 2).mean(), optax.adam(1e-3), batch
    >>> table = speed_table(call, "h100", [1, 2, 4])
    >>> table.sizes, table.best(4, 64, 0.0).batch
    ((1, 2, 4), 64)
    """
    is_virtual = isinstance(devices, str) and num_cpus_named(devices) is not None
    cluster = Cluster.parse(devices) if isinstance(devices, str) and not is_virtual else devices
    if isinstance(cluster, Cluster) and (wrong := [size for size in sizes if not cluster.fits(size)]):
        raise ValueError(
            f"{wrong[0]} devices are more than one host of {cluster.cards_per_host}, and not whole ones: leave it out"
        )
    planning, _, _ = planned(program_or_call, cluster)
    rows, auto = planning.source.num_rows, Auto.parse(plan)
    found = [best for size in sizes for best in planning.search(Asked((size,), auto)).best[:1]]
    if not found:
        raise ValueError(
            f"no plan fits on {', '.join(map(str, sizes))} devices; cjax.plans(..., {str(cluster)!r}) says what would"
        )
    return SpeedTable([Speed(best.num_devices, rows / best.time, rows, str(best.plan)) for best in found])
