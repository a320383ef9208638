"""What a device computes in one pass over a part of the model: seconds at the datasheet's rates, and what slows them.

A matmul runs in tiles that the chip's cores take in waves, so a result that cuts into few tiles leaves cores without
work, and one with a small dim is waited for at the memory. Both are counted here, product by product; how much of the
peak a large one reaches is the calibration's.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from cjax.mesh import EXPERT
from cjax.planner.costs.calibration import Calibration
from cjax.planner.hardware import Hardware
from cjax.planner.table import PRECISIONS
from cjax.planner.work import (
    BATCH,
    ROWS,
    AttentionWork,
    Dims,
    MatmulWork,
    NamedTensor,
    Part,
    RingWork,
    WorkSplit,
    shares_rows,
)
from cjax.sharding.products.blocks import rows_multiplied
from cjax.sharding.products.tiles import rows_in_tiles, suits

# Results of a tile, and how well it runs beside the largest.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.92), (64, 128, 0.8))
WIDE, NARROW = 64, 8  # tensor cores want dims that these divide
UNALIGNED, CROOKED = 1.2, 9.0  # times slower where they don't
_HIGH, _WIDE, _EFFICIENCY = np.array(TILES).T[:, :, None, None]  # [tiles, parts, plans]
_PARTS = np.array([1.0, 2.0, 4.0, 8.0])[:, None]  # into which a product is cut along the dim that it adds up over
LEAST_INNER = 1024  # of such a part; products are cut only where there are fewer tiles than cores
FUSED_BACK = 2.5  # a flash kernel's backward pass in forward passes: five products for two
SCORE_PASSES = 5.0  # over scores that no kernel keeps from the memory: made, masked, normalised, dropped out, read
AGAIN_PASSES = 3.0  # those of scores that a ring makes again: dropping out and reading are of the backward pass itself


@dataclasses.dataclass(frozen=True)
class Pass:
    """One micro-batch on its way through one part in one direction; arrays [plans], seconds at full rates.

    Args:
      matmul: with what alignment and waves cost.
      thin: what small dims add for each unit of `Calibration.thin`.
      attention: of flash kernels.
      touched: of elementwise operations.
      matmul_least, attention_least: without any loss.
      flops: of all of it.
    """

    matmul: np.ndarray
    thin: np.ndarray
    attention: np.ndarray
    touched: np.ndarray
    matmul_least: np.ndarray
    attention_least: np.ndarray
    flops: np.ndarray

    @classmethod
    def none(cls, count: int) -> "Pass":
        return cls(*(np.zeros(count) for _ in dataclasses.fields(cls)))

    def __add__(self, other: "Pass") -> "Pass":
        return Pass(*(mine + theirs for mine, theirs in zip(self.arrays, other.arrays, strict=True)))

    def __mul__(self, times: np.ndarray | float) -> "Pass":
        return Pass(*(array * times for array in self.arrays))

    def __getitem__(self, rows: np.ndarray) -> "Pass":
        return Pass(*(array[rows] for array in self.arrays))

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


class Computing:
    """One device at work on a share of the batch.

    Args:
      hardware: its rates; ones that it does not know count as infinite.
      calibration: its cores, and what its software does.
      split: what the tensor and sequence words split.
      share: parts into which data parallelism and micro-batches cut the batch. [plans]
      data: devices that share what all examples of a micro-batch make together. [plans]
      precision: places in `PRECISIONS`. [plans]
    """

    def __init__(
        self,
        hardware: Hardware,
        calibration: Calibration,
        split: WorkSplit,
        share: np.ndarray,
        data: np.ndarray,
        precision: np.ndarray,
    ) -> None:
        self._split, self._share, self._data = split, share, data
        self._is_half = precision != PRECISIONS.index("float32")
        self._software, self._cores = calibration.software, calibration.cores
        self._has_tiles = hardware.is_hopper
        # What a chip has no units for, it computes in float32.
        whole = hardware.matmul_flops("float32") or np.inf
        self._peak = np.array([hardware.matmul_flops(name) or whole for name in PRECISIONS])[precision]
        self._memory = hardware.memory_bandwidth or np.inf
        self._item = np.where(self._is_half, 2.0, 4.0)

    def passes(self, part: Part, rings: Sequence[RingWork] = ()) -> tuple[Pass, Pass, Pass]:
        """Forward and backward through one layer of the part, and forward again for a backward pass that has kept
        nothing of it.

        Args:
          part: the part.
          rings: that its attentions are in, if any.
        """
        there = back = unneeded = Pass.none(len(self._share))
        for product in part.products:
            f, b = self._product(product)
            there, back = there + f, back + b
            unneeded = unneeded if product.is_remade else unneeded + f
        for number, attention in enumerate(part.attentions):
            f, b = self._attention(attention, rings[number] if rings else None)
            there, back = there + f, back + b
        # What is read and written forward is read and written for the gradient, beside the gradient itself.
        touched = sum((self._bytes(value) for value in part.touched), np.zeros(len(self._share)))
        touched = touched * self._software.passes / self._memory
        there = there + self._touching(touched)
        return there, back + self._touching(2 * touched), there + unneeded * -1.0

    def _local(self, dims: Dims) -> np.ndarray:
        return np.maximum(self._split.local(dims) / self._shares(dims), 1.0) * np.ones_like(self._share)

    def _shares(self, dims: Dims) -> np.ndarray | float:
        """Into how many parts what has these dims is cut, beside what is split."""
        if any(name == BATCH for name, _ in dims):
            return self._share
        return np.where(shares_rows(dims, self._data), self._data, 1.0)

    def _bytes(self, value: NamedTensor) -> np.ndarray:
        size = np.where(self._is_half & value.is_computed, min(2, value.itemsize), value.itemsize)
        return value.times * size * self._split.local(value.dims) / self._shares(value.dims)

    def _touching(self, seconds: np.ndarray) -> Pass:
        return dataclasses.replace(Pass.none(len(self._share)), touched=seconds)

    def _product(self, product: MatmulWork) -> tuple[Pass, Pass]:
        # An axis that splits two dims of a product splits it once: between products, positions or features may be where
        # weights are, too, but they are gathered for it.
        groups = product.outer, product.inner, product.rows, product.batch
        outer, inner, rows, batch = self._apart(*groups, order=self._order(product))
        there = self._matmul(batch, rows, inner, outer)
        back = self._matmul(batch, rows, outer, inner) + self._matmul(batch, inner, rows, outer)
        if product.groups > 1:
            times = self._multiplied(product.groups, rows, inner, outer) / rows
            there, back = (dataclasses.replace(each, matmul=each.matmul * times) for each in (there, back))
        return there * product.times, back * product.times

    def _multiplied(self, groups: int, rows: np.ndarray, inner: np.ndarray, outer: np.ndarray) -> np.ndarray:
        """In how many rows' time a device multiplies rows in so many groups: by a kernel, or in blocks."""
        num = np.ceil(rows).astype(int)
        return np.where(
            self._has_tiles & self._is_half & suits(num, inner, outer),
            rows_in_tiles(num, groups),
            np.vectorize(rows_multiplied)(num, groups),
        )

    def _order(self, product: MatmulWork) -> list[int]:
        """In which order a product's dims are served by axes. Along that of experts which are shared out, their own
        products have other experts, and all others other examples."""
        groups = product.outer, product.inner, product.rows, product.batch
        order = list(range(len(groups)))
        if EXPERT not in self._split.sizes:
            return order
        if product.is_weight:
            return order[::-1]
        return sorted(order, key=lambda at: BATCH not in {name for name, _ in groups[at]})

    def _apart(self, *groups: Dims, order: Sequence[int]) -> list[np.ndarray]:
        """Of each of these dims what a device has, where an axis serves the first that it splits, in this order."""
        found, before = dict[int, np.ndarray](), ()
        # Of the batch, whatever else there is; of what it makes together only where none of it is.
        names = [{name for name, _ in dims} for dims in groups]
        cut = BATCH if any(BATCH in some for some in names) else ROWS
        first = next((at for at, some in enumerate(names) if cut in some), None)
        for at in order:
            dims = groups[at]
            share = self._shares(dims) if at == first else 1.0
            held = self._split.local((*before, *dims)) / self._split.local(before)
            found[at] = np.maximum(held / share, 1.0) * np.ones_like(self._share)
            before = (*before, *dims)
        return [found[at] for at in range(len(groups))]

    def _matmul(self, batch: np.ndarray, rows: np.ndarray, inner: np.ndarray, outer: np.ndarray) -> Pass:
        """[batch, rows, inner] x [batch, inner, outer]."""
        flops = 2 * batch * rows * inner * outer
        least = flops / self._peak
        matmul = least
        if self._cores:
            pads = self._is_half & self._software.pads
            matmul = least * _misaligned(inner, outer, pads) / _busy(batch, rows, inner, outer, self._cores)
        dim = np.minimum(np.minimum(rows, inner), outer)
        thin = matmul * self._peak / self._memory * (self._item / 2) / dim
        none = np.zeros_like(flops)
        return Pass(matmul, thin, none, none, least, none, flops)

    def _attention(self, work: AttentionWork, ring: RingWork | None) -> tuple[Pass, Pass]:
        queries, keys = self._local(work.queries), self._local(work.keys)
        # Positions that an axis splits are in one of the two dims.
        scores = self._local((*work.batch, *work.heads, *work.queries, *work.keys)) * work.times
        flops = 4 * scores * work.features
        is_fused = self._is_half & self._fuses(work)
        halved = 0.5 if work.is_causal else 1.0
        kernel = flops * (1.0 if self._software.masks_whole else halved) / self._peak
        least = flops * halved / self._peak
        none = np.zeros_like(flops)
        fused = Pass(none, none, kernel, none, none, least, flops * halved)
        if ring is not None:
            queries, keys = queries / ring.chunks, keys / ring.chunks
        whole = scores / (queries * keys)  # matmuls of [queries, keys]
        touched = self._touching(scores * self._item / self._memory)
        made = self._matmul(whole, queries, np.full_like(keys, work.features), keys)
        plain = made + self._matmul(whole, queries, keys, np.full_like(keys, work.features)) + touched * SCORE_PASSES
        plain_back = plain * 2
        if ring is not None:
            # A ring keeps no scores either, and makes each block's again.
            plain_back = (plain_back + made + touched * AGAIN_PASSES) * ring.share
            plain = plain * ring.share
        # The kernel makes scores again that others would have kept: time, but no work of the model's.
        back = dataclasses.replace(fused * 2, attention=FUSED_BACK * kernel)
        return _either(is_fused, fused, plain), _either(is_fused, back, plain_back)

    def _fuses(self, work: AttentionWork) -> bool:
        if not (self._software.is_fused and work.is_fused):
            return False
        # Positions that are split where heads are not: those that heads share an axis with are gathered.
        apart = self._split.parts_of((*work.heads, *work.queries)) / self._split.parts_of(work.heads)
        return self._software.fuses_split or apart == 1


def _either(condition: np.ndarray, one: Pass, other: Pass) -> Pass:
    return Pass(*(np.where(condition, mine, theirs) for mine, theirs in zip(one.arrays, other.arrays, strict=True)))


def _misaligned(inner: np.ndarray, outer: np.ndarray, pads: np.ndarray) -> np.ndarray:
    """How many times slower a matmul of these dims runs for their sake; rows may be any number."""
    worst = np.ones_like(inner)
    for dim in (np.ceil(inner), np.ceil(outer)):
        slow = np.where((dim % NARROW != 0) & ~pads, CROOKED, np.where(dim % WIDE != 0, UNALIGNED, 1.0))
        worst = np.maximum(worst, slow)
    return worst


def _busy(batch: np.ndarray, rows: np.ndarray, inner: np.ndarray, outer: np.ndarray, cores: int) -> np.ndarray:
    """Share of the cores' time that goes into the result, for the tiles and the cut of `inner` that suit it best."""
    tiles = batch * np.ceil(rows / _HIGH) * np.ceil(outer / _WIDE)
    used = _EFFICIENCY * (batch * rows * outer) / (_HIGH * _WIDE)
    waves = np.ceil(tiles * _PARTS / cores)
    may = (_PARTS == 1) | ((inner / _PARTS >= LEAST_INNER) & (tiles < cores))
    return np.max(np.where(may, used * _PARTS / (waves * cores), 0.0), axis=(0, 1))
