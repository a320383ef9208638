"""The homes with which a step moves the fewest bytes, under what devices, host memory and disk may hold.

Kept on the devices are parameters first (of each byte stored they move the most, four a step), then frozen ones, then
optimizer state, whole layers at a time, from the first layer on; beside these gradients, from the first layer on, and
inputs, from the last one back, since the backward pass makes the former as it uses up the latter. Of all these choices
that fit, the one that moves the least is taken, so that more room never moves more; or, where seconds are known and
these are fewer, the one that moves the least in the update. Layers on disk that can be updated in the backward pass
are, and others in the next forward pass, where that fits beside the rest; where seconds are known, also if fewer layers
then stay, or gradients go to the disk for it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cjax.plan.sizes import Offloaded, size_text
from cjax.planner.homes import (
    HALVES,
    IN_FLIGHT,
    KINDS,
    PASSING,
    PHASES,
    STAYING,
    TRAFFIC,
    Home,
    Homes,
    Kind,
    Peaks,
    Phase,
    RowBytes,
    RowSizes,
    occupied,
)

CHAIN: tuple[Kind, ...] = ("params", "frozen", "opt")
# What host memory takes first: what moves most, then what would be on disk twice.
HOST_FIRST: tuple[Kind, ...] = ("params", "opt", "inputs", "grads", "frozen")
KINDS_OF: dict[Offloaded, tuple[Kind, ...]] = {
    "params": ("params", "frozen"),
    "optimizer": ("opt",),
    "gradients": ("grads",),
    "activations": ("inputs",),
}
_NAMES: dict[Phase, str] = {
    "birth": "making the parameters",
    "forward": "the forward pass",
    "after": "the loss",
    "backward": "the backward pass",
    "update": "the update",
}


class TooLittle(ValueError):
    """A budget, host memory or a disk that is too small.

    Attributes:
      what: "budget", or "room" for what leaves the devices.
      missing: bytes.
    """

    def __init__(self, message: str, what: Literal["budget", "room"], missing: int) -> None:
        super().__init__(message)
        self.what, self.missing = what, missing


def choose_homes(
    sizes: RowSizes,
    peaks: Peaks,
    budget: int | None = None,
    host: int | None = None,
    disk: int | None = None,
    offload: Sequence[Offloaded] = (),
    record: int = 0,
    seconds: Callable[[Homes], float] | None = None,
    alone: Sequence[bool] = (),
    defers: bool = False,
) -> Homes:
    """Where each row lives.

    Args:
      sizes: of the rows.
      peaks: what a device needs beside rows.
      budget: bytes that a device may hold; None: no limit, so that only `offload` takes rows away.
      host, disk: bytes of a process; None: no limit to the host's memory, and no disk.
      offload: what may not live on the devices.
      record: bytes that a process keeps on disk beside rows, if it keeps any there: what belongs to no layer, so that a
        step on disk is complete.
      seconds: of a step with some homes, where that is known: besides the least that moves, the least that moves in the
        update is tried, which computing does not hide, and the faster of both taken.
      alone: by stack, whether the update of a layer needs nothing of others: then it is made in the backward pass where
        it can be taken back, if the budget has room for that; where seconds are known, fewer layers are kept at home
        for it if that is faster.
      defers: whether the update of other layers may wait for the next forward pass; it does where there is room alike.
        Where all else is on disk it takes gradients there: where seconds are known, that is tried too.

    Raises:
      TooLittle: a budget smaller than the least that works, which is named; host memory or disk too small for the
        rest, with what is missing.
      ValueError: no layers.

    >>> row = (RowBytes(4, 4, 4),) * 8
    >>> homes = choose_homes({"params": (row,), "opt": (row,)}, Peaks(10, 1, 1, 1, 1), budget=10 + 1 + 4 * 8 + 4 * 4)
    >>> [sum(home == "device" for home in homes.of[kind][0]) for kind in ("params", "opt")]
    [8, 2]
    """
    if not any(row.device for stacks in sizes.values() for rows in stacks for row in rows):
        raise ValueError(
            "nothing of this model can leave the devices: it has no layers that repeat and have parameters of their "
            "own; leave out budget= and offload=, and share the model out with zero=3 or tensor=."
        )
    shapes = {tuple(map(len, stacks)) for stacks in sizes.values()}
    assert len(shapes) == 1, f"all kinds have a row for each layer, if one of no bytes, and not {shapes}"
    forced: set[Kind] = {kind for name in offload for kind in KINDS_OF[name]}
    room = _Room(sizes, peaks, forced)
    found: list[Homes] = []
    refused: list[TooLittle] = []

    def beyond(homes: Homes) -> int:
        return 0 if budget is None else max(0, occupied(sizes, peaks, homes).peak - budget)

    def fits(homes: Homes) -> bool:
        there = sum(occupied(sizes, peaks, homes).disk.values())
        return not beyond(homes) and (not there or there + record <= (disk or 0))

    def consider(kept: set[tuple[Kind, int, int]]) -> int:
        """Adds homes, with layers updated on the way if there is room; returns what the budget lacks for that."""
        try:
            homes = _with_disk(sizes, kept, host, disk, record)
        except TooLittle as error:
            refused.append(error)
            return 0
        assert not beyond(homes), "homes that hold more than they may"
        fused = homes.with_fused(alone, sizes)
        both = [fused.with_deferred(sizes), fused, homes.with_deferred(sizes)] if defers else [fused]
        ways = [way for way in both if way != homes]
        found.append(next((way for way in ways if fits(way)), homes))
        return beyond(ways[0]) if ways else 0

    for times in (times_moved,) if seconds is None else (times_moved, times_exposed):
        kept = room.best(budget, times)
        if kept is None:
            assert budget is not None, "without a limit anything fits"
            raise TooLittle(_too_small(room, sizes, peaks, budget, offload), "budget", room.least() - budget)
        missing = consider(kept)
        if missing and seconds is not None and budget is not None:
            # Fewer layers at home, or none of anything, leave room to update the others on the way.
            for smaller in (room.best(budget - missing, times), _Room(sizes, peaks, set(KINDS)).best(budget, times)):
                if smaller is not None:
                    consider(smaller)
    if seconds is not None and defers and any(homes.is_durable(sizes) for homes in found):
        kept = _Room(sizes, peaks, {*forced, "grads"}).best(budget, times_moved)
        if kept is not None:
            consider(kept)
    if not found:
        raise refused[0]
    return found[0] if seconds is None else min(found, key=seconds)


class _Room:
    """All choices at once: how many rows of the chain stay (`chain`), how many gradients and how many inputs (a
    matrix), and for each the bytes that a device holds at most."""

    def __init__(self, sizes: RowSizes, peaks: Peaks, forced: set[Kind]) -> None:
        self._sizes = sizes
        self.chain = [at for kind in CHAIN if kind not in forced for at in places(sizes, kind)]
        self._grads = [] if "grads" in forced else list(places(sizes, "grads"))
        self._inputs = [] if "inputs" in forced else list(reversed(list(places(sizes, "inputs"))))
        kept = self._kept = [_Kept.of(sizes, rows) for rows in (self.chain, self._grads, self._inputs)]
        chain, grads, inputs = kept
        always = {phase: peaks.outside + getattr(peaks, phase) for phase in PHASES}
        self._fixed = {
            phase: always[phase] + chain.held + sum(chain.passing[kind] for kind in CHAIN if kind in PASSING[phase])
            for phase in PHASES
        }
        self._beside = {phase: self._held_beside(phase, grads, inputs) for phase in PHASES}
        lowest = [self._fixed[phase] + self._beside[phase].min() for phase in PHASES]
        self._lowest = np.max(lowest, axis=0)  # what no choice of gradients and inputs comes below

    def _held_beside(self, phase: Phase, grads: "_Kept", inputs: "_Kept") -> np.ndarray:
        found = np.zeros((len(grads.held), len(inputs.held)), np.int64)
        for kind, kept, turned in (("grads", grads, (slice(None), None)), ("inputs", inputs, (None, slice(None)))):
            if kind in PASSING[phase]:
                found += kept.passing[kind][turned]
            if kind in STAYING[phase] and phase != "backward":
                found += kept.held[turned]
        return found + self._alive(grads, inputs) if phase == "backward" else found

    def _alive(self, grads: "_Kept", inputs: "_Kept") -> np.ndarray:
        """Gradients and inputs at the fullest moment of the backward pass: see `most_alive`."""
        a, b = len(grads.held), len(inputs.held)
        most = np.maximum(grads.held[:, None], inputs.held[None, :])
        num = max(a, b) - 1
        for at in range(num if a > 1 and b > 1 else 0):
            # At this layer: of the first gradients those from here on, of the last inputs those up to here.
            behind = np.maximum(0, grads.held - grads.held[np.minimum(at, np.arange(a))])
            before = np.maximum(0, inputs.held - inputs.held[np.minimum(num - 1 - at, np.arange(b))])
            most = np.maximum(most, behind[:, None] + before[None, :])
        return most

    def _peaks(self, at: int) -> np.ndarray:
        """By gradients and inputs kept, with so many rows of the chain."""
        return np.max([self._fixed[phase][at] + self._beside[phase] for phase in PHASES], axis=0)

    def best(self, budget: int | None, times: Callable[[Kind], int]) -> set[tuple[Kind, int, int]] | None:
        """The rows that stay: the least that moves, were each moved so many times; of equals, more of the chain, then
        more gradients."""
        of_chain, grads, inputs = (each.moved(times) for each in self._kept)
        beside = grads[:, None] + inputs[None, :]
        found: tuple[int, int, int, int] | None = None
        for at in reversed(range(len(of_chain))):
            if found is not None and of_chain[at] + beside.min() >= found[0]:
                break  # fewer rows of the chain move more
            if budget is not None and self._lowest[at] > budget:
                continue
            fits = np.ones(beside.shape, bool) if budget is None else self._peaks(at) <= budget
            if not fits.any():
                continue
            moved = np.where(fits, beside + of_chain[at], np.iinfo(np.int64).max)
            rows, columns = np.nonzero(moved == moved.min())
            best = (int(moved.min()), at, int(rows[-1]), int(columns[-1]))
            found = best if found is None or best[0] < found[0] else found
        if found is None:
            return None
        _, chain, grads, inputs = found
        return {*self.chain[:chain], *self._grads[:grads], *self._inputs[:inputs]}

    def least(self) -> int:
        """The smallest budget with which there is a choice."""
        least = int(self._peaks(0).min())
        for at in range(1, len(self._lowest)):
            if self._lowest[at] < least:
                least = min(least, int(self._peaks(at).min()))
        return least


@dataclass(frozen=True)
class _Kept:
    """By the number of rows that stay, of a list of them: bytes on a device, and bytes that pass through it, by kind.

    `rows` are kinds and bytes of each.
    """

    held: np.ndarray
    passing: dict[Kind, np.ndarray]
    rows: Sequence[tuple[Kind, int]]

    @staticmethod
    def of(sizes: RowSizes, kept: Sequence[tuple[Kind, int, int]]) -> "_Kept":
        device = [sizes[kind][stack][layer].device for kind, stack, layer in kept]
        held = np.concatenate([[0], np.cumsum(device, dtype=np.int64)]).astype(np.int64)
        left = {(kind, stack): [row.device for row in rows] for kind in sizes for stack, rows in enumerate(sizes[kind])}
        passing: dict[Kind, np.ndarray] = {}
        for kind in sizes:
            now = {stack: _Largest(left[kind, stack]) for stack in range(len(sizes[kind]))}
            sums = [sum(each.total for each in now.values())]
            for size, (own, stack, _) in zip(device, kept, strict=True):
                if own == kind:
                    now[stack].remove(size)
                sums.append(sum(each.total for each in now.values()))
            passing[kind] = np.asarray(sums, np.int64)
        absent = np.zeros(len(kept) + 1, np.int64)
        rows: list[tuple[Kind, int]] = [(kind, size) for size, (kind, _, _) in zip(device, kept, strict=True)]
        return _Kept(held, {**dict.fromkeys((*CHAIN, "grads", "inputs"), absent), **passing}, rows)

    def moved(self, times: Callable[[Kind], int]) -> np.ndarray:
        """Bytes of the rows that don't stay, were each moved so many times."""
        sizes = [size * times(kind) for kind, size in self.rows]
        return sum(sizes) - np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)


class _Largest:
    """The rows that are in flight at once, of those that are left."""

    def __init__(self, rows: list[int]) -> None:
        self._rows = sorted(rows)

    @property
    def total(self) -> int:
        return sum(self._rows[-IN_FLIGHT:])

    def remove(self, row: int) -> None:
        self._rows.remove(row)


def places(sizes: RowSizes, kind: Kind) -> Iterator[tuple[Kind, int, int]]:
    """All rows of a kind in the order in which the forward pass comes to them: (kind, stack, layer)."""
    for stack, rows in enumerate(sizes.get(kind, ())):
        for layer in range(len(rows)):
            yield kind, stack, layer


def times_moved(kind: Kind) -> int:
    """How often a step moves a row that is not at home on the devices, in either direction."""
    return sum(sum(kinds.get(kind, (0, 0))) for kinds in TRAFFIC.values())


def times_exposed(kind: Kind) -> int:
    """The same, what the update brings in counted before all else: the passes forward and back compute beside."""
    return 1000 * TRAFFIC["update"].get(kind, (0, 0))[0] + times_moved(kind)


# -- host and disk ----------------------------------------------------------------------------------------------------
def _with_disk(
    sizes: RowSizes, kept: set[tuple[Kind, int, int]], host: int | None, disk: int | None, record: int
) -> Homes:
    """Homes of all rows: host memory takes what does not stay as far as that goes, and the disk the rest."""
    found: dict[Kind, list[list[Home]]] = {
        kind: [["device"] * len(rows) for rows in stacks] for kind, stacks in sizes.items()
    }
    away = [at for kind in HOST_FIRST for at in places(sizes, kind) if at not in kept and _row(sizes, at).device]
    in_host = on_disk = 0
    is_full = False
    for kind, stack, layer in away:
        row = sizes[kind][stack][layer]
        is_full = is_full or (host is not None and in_host + row.host > host)
        found[kind][stack][layer] = "disk" if is_full else "host"
        if is_full:
            on_disk += row.disk * HALVES[kind]
        else:
            in_host += row.host
    on_disk += record if on_disk else 0
    if on_disk and (disk is None or on_disk > disk):
        assert host is not None, "memory without a limit is full"
        total = sum(_row(sizes, at).host for at in away)
        raise TooLittle(_no_place(host, disk, total, on_disk), "room", on_disk - (disk or 0))
    return Homes({kind: tuple(tuple(places) for places in stacks) for kind, stacks in found.items()})


def _row(sizes: RowSizes, at: tuple[Kind, int, int]) -> RowBytes:
    kind, stack, layer = at
    return sizes[kind][stack][layer]


def _no_place(host: int, disk: int | None, total: int, on_disk: int) -> str:
    enough, needed = rounded_up(total), rounded_up(on_disk)
    what = f"{readable(total)} of a process leave the devices, and host={size_text(host)} takes them in part"
    if disk is None:
        return f"{what}; write host={enough}, or host={size_text(host)} disk={needed} beside it."
    return (
        f"{what}: the rest takes {readable(on_disk)} of disk, with what a step replaces there twice, and "
        f"disk={size_text(disk)} is {readable(on_disk - disk)} less; write disk={needed}, or host={enough}."
    )


# -- a budget that is too small ---------------------------------------------------------------------------------------
def _too_small(room: _Room, sizes: RowSizes, peaks: Peaks, budget: int, offload: Sequence[Offloaded]) -> str:
    least = room.least()
    kept = room.best(least, times_moved)
    assert kept is not None, "the least budget has a choice"
    homes = _with_disk(sizes, kept, None, None, 0)
    fullest = occupied(sizes, peaks, homes).fullest
    own = getattr(peaks, fullest)
    parts = {
        "outside of layers": peaks.outside,
        f"{_NAMES[fullest]} itself": own,
        "rows of layers that pass through or stay": least - peaks.outside - own,
    }
    said = ", ".join(f"{readable(size)} {name}" for name, size in parts.items() if size)
    more = " (offload= keeps rows away that could stay)" if offload else ""
    return (
        f"budget={size_text(budget)} is less than a device needs at least, {readable(least)}: {said}{more}; write "
        f"budget={rounded_up(least)}, or need less with more micro-batches, zero=3 or tensor=."
    )


def readable(size: float) -> str:
    """Bytes with three digits and a unit."""
    for name, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:,.3g} {name}" if size < 1000 * scale else f"{size / scale:,.0f} {name}"
    return f"{size:,.0f} B"


def rounded_up(size: int) -> str:
    """As a plan writes it, a size that is at least this one and little more."""
    scale = next((scale for scale in (2**40, 2**30, 2**20, 2**10) if size >= 100 * scale), 1)
    return size_text(-(-size // scale) * scale)
