"""Which plan. For now by data parallelism alone: the least ZeRO stage, remat and micro-batching that fits."""

from collections.abc import Callable, Iterator

from cjax.plan import Plan, Remat

# (ZeRO stage, remat, micro-batches), cheapest first: sharded state costs little, recomputation a third of the
# arithmetic, micro-batches the size of each matmul.
LADDER: tuple[tuple[int, Remat, int], ...] = (
    (0, "none", 1), (1, "none", 1), (2, "none", 1), (3, "none", 1), (2, "dots", 1), (3, "dots", 1), (3, "block", 1),
    (3, "block", 2), (3, "block", 4), (3, "block", 8), (3, "block", 16), (3, "block", 32), (3, "block", 64),
)  # fmt: skip


def candidates(batch_size: int, num_devices: int) -> Iterator[Plan]:
    """The ladder's plans that this batch and these devices allow."""
    for zero, remat, microbatches in LADDER:
        if batch_size % (num_devices * microbatches) == 0:
            yield Plan(zero=zero if num_devices > 1 else 0, remat=remat, microbatches=microbatches)


def first_fitting(
    batch_size: int, num_devices: int, limit: int, estimate: Callable[[Plan], int]
) -> tuple[Plan, int, bool]:
    """The first plan of the ladder whose estimated bytes a device are within `limit`.

    Args:
      batch_size: rows of the batch.
      num_devices: how many devices share it.
      limit: bytes a device.
      estimate: bytes a device of a plan.

    Returns:
      The plan, its estimate, and whether it fits; the leanest plan where none does.

    Raises:
      ValueError: a batch that the devices can't share.
    """
    last: tuple[Plan, int] | None = None
    for plan in candidates(batch_size, num_devices):
        last = plan, estimate(plan)
        if last[1] <= limit:
            return *last, True
    if last is None:
        rows = max(1, batch_size // num_devices) * num_devices
        raise ValueError(
            f'plan="auto" shares a batch over all {num_devices} devices, and {batch_size} rows do not divide. '
            f"Use {rows} rows, or name the devices: devices=jax.devices()[:{max(1, min(batch_size, num_devices))}]."
        )
    return *last, False
