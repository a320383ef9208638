"""What a step that walks over layers moves between devices, host memory and disk, and how long it takes by arithmetic.

In each of its phases computing, the link in, the link out and the disk go on at once, so that a phase takes as long as
the slowest of them. The update has no computing that counts beside it: it is as long as its transfers, but for those of
layers that are updated in the backward pass, or in the next step's forward pass.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from cjax.planner.hardware import Hardware
from cjax.planner.homes import DEFERRED_TRAFFIC, FUSED_TRAFFIC, KINDS, TRAFFIC, Homes, Kind, Phase, RowSizes

# Bytes/s of a process's disk where nobody says how fast it is: NVMe drives that read 12 GB/s and write 9, as one of
# PCIe 5 does, or two of PCIe 4 side by side.
DISK_READ, DISK_WRITE = 12e9, 9e9
LINK_REACHED = 0.86  # of PCIe's rate, in large transfers of pinned memory: 55 GB/s of the 64 of PCIe 5

Bound = Literal["compute", "link", "disk"]
Traffic = Mapping[Phase, Mapping[Kind, tuple[int, int]]]  # how often a phase reads and writes rows of a kind


@dataclass(frozen=True)
class WalkRates:
    """Bytes/s.

    Args:
      link: between a device and the memory of its host, each way, both ways at once; None where nobody knows.
      disk_read, disk_write: of the disk of a process, all its devices together.
    """

    link: float | None
    disk_read: float = DISK_READ
    disk_write: float = DISK_WRITE


@dataclass(frozen=True)
class RowsMoved:
    """Bytes of one kind in a step: of a device over its link, of a process from and to its disk."""

    link_in: int = 0
    link_out: int = 0
    disk_read: int = 0
    disk_written: int = 0


@dataclass(frozen=True)
class PhaseSeconds:
    """Seconds of one phase, were each all that is done."""

    compute: float
    link_in: float
    link_out: float
    disk: float

    @property
    def total(self) -> float:
        return max(self.compute, self.link_in, self.link_out, self.disk)

    @property
    def waits(self) -> float:
        """What computing does not hide."""
        return self.total - self.compute


@dataclass(frozen=True)
class WalkCost:
    """A step.

    Args:
      moved: by kind.
      seconds: by phase; empty where the link or the computing is not known.
      hidden_from: tokens a step from which the forward and the backward pass hide all that is moved beside them; None
        where no number of tokens does, or nobody knows.
    """

    moved: Mapping[Kind, RowsMoved]
    seconds: Mapping[Phase, PhaseSeconds]
    hidden_from: int | None

    @property
    def total(self) -> float | None:
        """Seconds of a step; None where nobody knows."""
        return sum(each.total for each in self.seconds.values()) if self.seconds else None

    @property
    def compute(self) -> float | None:
        """Of these, were nothing moved."""
        return sum(each.compute for each in self.seconds.values()) if self.seconds else None

    @property
    def bound(self) -> Bound | None:
        """What the step has most of, each counted alone."""
        if not self.seconds:
            return None
        alone: dict[Bound, float] = {
            "compute": sum(each.compute for each in self.seconds.values()),
            "link": sum(max(each.link_in, each.link_out) for each in self.seconds.values()),
            "disk": sum(each.disk for each in self.seconds.values()),
        }
        return max(alone, key=lambda name: alone[name])

    @property
    def disk_written(self) -> int:
        """Bytes that a process writes to its disk in a step: what wears it out."""
        return sum(each.disk_written for each in self.moved.values())


def rates_of(hardware: Hardware) -> WalkRates:
    """The rates of these devices, as far as datasheets tell, and the assumed ones of a disk."""
    return WalkRates(None if hardware.pcie_bandwidth is None else LINK_REACHED * hardware.pcie_bandwidth)


def reading_again(times: Mapping[Kind, int]) -> Traffic:
    """The traffic of a step whose update reads rows more often than once, as an optimizer with passes of its own does.

    >>> reading_again({"grads": 1})["update"]["grads"]
    (2, 0)
    """
    update: Mapping[Kind, tuple[int, int]] = {
        kind: (reads + times.get(kind, 0), writes) for kind, (reads, writes) in TRAFFIC["update"].items()
    }
    return {**TRAFFIC, "update": update}


def walk_cost(
    sizes: RowSizes,
    homes: Homes,
    rates: WalkRates,
    compute: Mapping[Phase, float] | None,
    tokens: float,
    traffic: Traffic = TRAFFIC,
) -> WalkCost:
    """What a step moves and how long it takes.

    Args:
      sizes: of the rows.
      homes: of the rows.
      rates: of link and disk.
      compute: seconds of arithmetic by phase ("after" belongs to "backward"); what is missing takes none. None: not
        known.
      tokens: of a step, with which arithmetic and inputs grow.
      traffic: how often rows are read and written, but for those of fused and deferred layers. What the update of the
        latter reads more often than once, it reads at its own time.
    """
    moved: dict[Kind, RowsMoved] = {kind: RowsMoved() for kind in KINDS if kind in sizes}
    seconds: dict[Phase, PhaseSeconds] = {}
    of_phase: dict[Phase, tuple[RowsMoved, RowsMoved]] = {}
    for phase, kinds in traffic.items():
        fused, deferred = FUSED_TRAFFIC.get(phase, {}), DEFERRED_TRAFFIC.get(phase, {})
        if phase == "update":
            deferred = {kind: (reads - TRAFFIC[phase][kind][0], 0) for kind, (reads, _) in kinds.items()}
        each: dict[Kind, RowsMoved] = {
            kind: _moved(kind, sizes, homes, *(of.get(kind, (0, 0)) for of in (kinds, fused, deferred)))
            for kind in sizes
            if kind in kinds or kind in fused or kind in deferred
        }
        for kind, more in each.items():
            moved[kind] = _sum(moved[kind], more)
        inputs = each.pop("inputs", RowsMoved())
        of_phase[phase] = _sum(*each.values()), inputs
        if rates.link is not None and compute is not None:
            seconds[phase] = _seconds(_sum(*of_phase[phase]), rates, rates.link, compute.get(phase, 0.0))
    return WalkCost(moved, seconds, _hidden_from(of_phase, seconds, rates, tokens))


def _moved(
    kind: Kind, sizes: RowSizes, homes: Homes, times: tuple[int, int], of_fused: tuple[int, int],
    of_deferred: tuple[int, int],
) -> RowsMoved:  # fmt: skip
    """Bytes of rows that are read and written so often, in layers that are neither fused nor deferred, and in such."""
    found = RowsMoved()
    for k, (rows, places) in enumerate(zip(sizes[kind], homes.of[kind], strict=True)):
        for at, (row, home) in enumerate(zip(rows, places, strict=True)):
            reads, writes = of_fused if (k, at) in homes.fused else of_deferred if (k, at) in homes.deferred else times
            away = row.device if home != "device" else 0
            on_disk = row.disk if home == "disk" else 0
            found = _sum(found, RowsMoved(reads * away, writes * away, reads * on_disk, writes * on_disk))
    return found


def _sum(*parts: RowsMoved) -> RowsMoved:
    names = ("link_in", "link_out", "disk_read", "disk_written")
    return RowsMoved(*(sum(getattr(part, name) for part in parts) for name in names))


def _seconds(moved: RowsMoved, rates: WalkRates, link: float, compute: float) -> PhaseSeconds:
    disk = moved.disk_read / rates.disk_read + moved.disk_written / rates.disk_write
    return PhaseSeconds(compute, moved.link_in / link, moved.link_out / link, disk)


def _hidden_from(
    moved: Mapping[Phase, tuple[RowsMoved, RowsMoved]],
    seconds: Mapping[Phase, PhaseSeconds],
    rates: WalkRates,
    tokens: float,
) -> int | None:
    """Tokens from which each phase that computes takes no longer than its arithmetic. Rows are moved once whatever the
    tokens; arithmetic and inputs grow with them."""
    most = 0.0
    for phase, each in seconds.items():
        if not each.compute or rates.link is None:
            continue
        fixed, growing = (_seconds(part, rates, rates.link, 0.0) for part in moved[phase])
        for name in ("link_in", "link_out", "disk"):
            once, spare = getattr(fixed, name), each.compute - getattr(growing, name)
            if spare < 0 or (once and not spare):
                return None
            most = max(most, tokens * once / spare if once else 0.0)
    # Infinite where a phase computes next to nothing: no number of tokens is enough.
    return -int(-most // 1) if seconds and most < math.inf else None
