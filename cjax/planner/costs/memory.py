"""Bytes a device by use: for now state exactly and activations by what is touched; replaced when it is merged."""

from dataclasses import dataclass, fields

import numpy as np

from cjax.planner.hardware import Hardware
from cjax.planner.table import Table
from cjax.planner.work import Split, Work, elements


@dataclass(frozen=True)
class MemoryCost:
    """Bytes a device by use, one number a plan."""

    params: np.ndarray
    optimizer: np.ndarray
    batch: np.ndarray
    grads: np.ndarray
    activations: np.ndarray
    working: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return sum((getattr(self, field.name) for field in fields(self)), np.zeros(()))


def memory_of(work: Work, split: Split, table: Table, hardware: Hardware) -> MemoryCost:
    """What each plan of a table needs."""
    shares = table.data * table.microbatches
    inner = split.sizes.get("sequence", 1) * split.sizes.get("depth", 1)
    over = np.where(table.zero_group < table.data, table.zero_group, table.data * inner)
    whole = np.zeros(len(table))
    kept, one = np.zeros(len(table)), np.zeros(len(table))
    for part, held in zip(work.parts, split.held, strict=True):
        size = held * 4 * part.repeats
        whole = whole + (size / table.pipeline if part.repeats > 1 else size)
        half = np.where(table.precision > 0, 0.5, 1.0)
        full = sum(split.local(v.dims) * v.times * v.itemsize for v in part.touched) * half / shares
        stream = (split.local(part.stream.dims) * 4 if part.stream else 0) * half / shares
        saved = np.where(table.remat == 2, stream, np.where(table.remat == 1, 0.6 * full, full))
        flight = np.where(table.pipeline > 1, np.minimum(table.microbatches, 2 * table.pipeline - 1) / table.pipeline, 1)
        kept = kept + part.repeats * saved * flight
        one = np.maximum(one, full)
    params = np.where(table.zero == 3, whole / over, whole)
    grads = np.where(table.zero >= 2, whole / over, whole)
    optimizer = work.optimizer_bytes * np.where(table.zero >= 1, whole / over, whole)
    batch = np.full(len(table), float(work.batch_bytes)) / table.data
    return MemoryCost(params, optimizer, batch, grads, kept, one)
