"""Where what belongs to layers lives between its uses: on the devices, in host memory, or on disk; and what that holds.

A step walks over the layers three times: forward, backward, and once more for the update, when the gradients of all are
known. Layers whose update needs no other's gradients, and whose old rows stay on disk until the new ones are known to
be good, are updated in the backward pass (*fused*). Of the others, those of which something is away from the devices
are updated when the next step's forward pass comes to them (*deferred*), if the devices have room for that. Rows that
are not at home on the devices pass through them: the one in use, and the next or the last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, get_args

Home = Literal["device", "host", "disk"]
Kind = Literal["params", "frozen", "opt", "grads", "inputs"]
Phase = Literal["birth", "forward", "after", "backward", "update"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PHASES: tuple[Phase, ...] = get_args(Phase)

IN_FLIGHT = 2  # rows of a kind and a stack that are on the devices while they pass through: one in use, one on its way

# Rows of a kind and a stack that host memory has besides, at most, while they move: of those at home there the new ones
# beside the old; of those on disk five buffers, what two threads write, and what three hand to the devices.
MOVING: Mapping[Home, int] = {"device": 0, "host": 2, "disk": 10}

# Rows on disk that a step replaces are there twice, so that the last step stays whole until the next is complete. Of
# gradients that is so where an update is deferred: see `Homes.halves`.
HALVES: Mapping[Kind, int] = {"params": 2, "frozen": 1, "opt": 2, "grads": 1, "inputs": 1}

_STATE: tuple[Kind, ...] = ("params", "frozen", "opt")
# Kinds that a phase brings rows of to the devices, or takes away; and those of which the devices have rows all the time
# then, where that is their home. Layers' inputs come one by one and go one by one, and so do gradients.
PASSING: Mapping[Phase, tuple[Kind, ...]] = {
    "birth": _STATE,
    "forward": ("params", "frozen", "inputs"),
    "after": ("params", "frozen", "inputs"),
    "backward": ("params", "frozen", "inputs", "grads"),
    "update": ("params", "opt", "grads"),
}
STAYING: Mapping[Phase, tuple[Kind, ...]] = {
    "birth": _STATE,
    "forward": (*_STATE, "inputs"),
    "after": (*_STATE, "inputs"),
    "backward": (*_STATE, "inputs", "grads"),
    "update": (*_STATE, "grads"),
}
# How often a phase reads and writes a row of a kind. Micro-batches change nothing: all of them go through a layer while
# it is there.
TRAFFIC: Mapping[Phase, Mapping[Kind, tuple[int, int]]] = {
    "forward": {"params": (1, 0), "frozen": (1, 0), "inputs": (0, 1)},
    "backward": {"params": (1, 0), "frozen": (1, 0), "inputs": (1, 0), "grads": (0, 1)},
    "update": {"params": (1, 1), "opt": (1, 1), "grads": (1, 0)},
}
FUSED_TRAFFIC: Mapping[Phase, Mapping[Kind, tuple[int, int]]] = {
    "forward": TRAFFIC["forward"],
    "backward": {"params": (1, 1), "frozen": (1, 0), "inputs": (1, 0), "opt": (1, 1)},
}
DEFERRED_TRAFFIC: Mapping[Phase, Mapping[Kind, tuple[int, int]]] = {
    "forward": {"params": (1, 1), "frozen": (1, 0), "inputs": (0, 1), "opt": (1, 1), "grads": (1, 0)},
    "backward": TRAFFIC["backward"],
}
_UPDATED: tuple[Kind, ...] = ("params", "opt", "grads")


@dataclass(frozen=True)
class Homes:
    """For each kind of what layers have, each stack and each layer in it: its home.

    Args:
      of: kind -> stack -> layer -> home. "inputs" are what layers were handed in the forward pass, all of it.
      fused: (stack, layer) of those that are updated in the backward pass.
      deferred: of those that are updated in the next step's forward pass.
    """

    of: Mapping[Kind, tuple[tuple[Home, ...], ...]]
    fused: frozenset[tuple[int, int]] = field(default_factory=frozenset)
    deferred: frozenset[tuple[int, int]] = field(default_factory=frozenset)

    @classmethod
    def all_at(cls, home: Home, lengths: Sequence[int]) -> "Homes":
        """The same for all rows of stacks of these lengths."""
        stacks = [list[Home]([home]) * length for length in lengths]
        return cls(dict.fromkeys(KINDS, tuple(map(tuple, stacks))))

    def with_fused(self, alone: Sequence[bool], sizes: "RowSizes") -> "Homes":
        """With layers fused that can be: of stacks whose layers are updated each by itself, those whose last step stays
        on disk while this one is made.

        Args:
          alone: by stack.
          sizes: of the rows. An optimizer without a state has none to keep.
        """

        def is_kept(kind: Kind, k: int, at: int) -> bool:
            return kind not in sizes or self.of[kind][k][at] == "disk" or not sizes[kind][k][at].device

        layers = [
            (k, at)
            for k, is_alone in enumerate(alone)
            for at, home in enumerate(self.of["params"][k])
            if is_alone and home == "disk" and is_kept("opt", k, at)
        ]
        return replace(self, fused=frozenset(layers))

    def with_deferred(self, sizes: "RowSizes") -> "Homes":
        """With all layers deferred that are not fused and whose update moves anything: then that is hidden, and
        parameters move once less. Where a run that is killed goes on from the disk (`is_durable`), so are the gradients
        of those that wait.

        Args:
          sizes: of the rows.
        """
        is_durable = self.is_durable(sizes)
        layers = [
            (k, at)
            for k, rows in enumerate(sizes.get("grads", ()))
            for at, row in enumerate(rows)
            if row.device and any(self.of[kind][k][at] != "device" for kind in _UPDATED if kind in sizes)
            if (k, at) not in self.fused and (not is_durable or self.of["grads"][k][at] == "disk")
        ]
        return replace(self, deferred=frozenset(layers))

    def is_durable(self, sizes: "RowSizes") -> bool:
        """Whether all that layers have between steps is on disk, so that a run that is killed can go on from there."""
        homes = {
            home
            for kind in _STATE
            for rows, places in zip(sizes.get(kind, ()), self.of.get(kind, ()), strict=True)
            for row, home in zip(rows, places, strict=True)
            if row.device
        }
        return homes == {"disk"}

    def halves(self, kind: Kind) -> int:
        """How often the disk has a row of this kind that has its home there."""
        return 2 if kind == "grads" and self.deferred else HALVES[kind]

    @property
    def used(self) -> set[Home]:
        """All homes that some row has."""
        return {home for kind in self.of.values() for stack in kind for home in stack}


class RowBytes(NamedTuple):
    """Bytes of what one layer has of one kind: on one device; in host memory, of all devices of a process; on disk, of
    all that a process keeps of it, each part once."""

    device: int
    host: int
    disk: int


# kind -> stack -> layer; a kind that no layer has is left out, and a layer without it (one that is not trained has no
# gradients) has a row of no bytes.
RowSizes = Mapping[Kind, tuple[tuple[RowBytes, ...], ...]]


@dataclass(frozen=True)
class Peaks:
    """Bytes of one device beside rows.

    Args:
      outside: what belongs to no layer and is there all the time: parameters, their gradients and optimizer state, the
        batch.
      forward, after, backward, update, birth: what the fullest program of that phase needs beside `outside` and rows:
        its temporaries, and what it is handed and hands on. "after" is the loss and its gradient, behind the layers.
      fused, deferred: the same of an update in the backward pass, and in the forward pass.
    """

    outside: int
    forward: int
    after: int
    backward: int
    update: int
    birth: int = 0
    fused: int = 0
    deferred: int = 0


@dataclass(frozen=True)
class Occupied:
    """What homes hold, at most.

    Args:
      peaks: bytes of a device, by phase.
      device: of these, rows that have their home there, by kind.
      host, disk: bytes of a process by kind; on disk with what is there twice.
      moving: bytes of a process that rows on their way take of host memory besides, at most.
    """

    peaks: Mapping[Phase, int]
    device: Mapping[Kind, int]
    host: Mapping[Kind, int]
    disk: Mapping[Kind, int]
    moving: int = 0

    @property
    def peak(self) -> int:
        return max(self.peaks.values())

    @property
    def fullest(self) -> Phase:
        return max(self.peaks, key=lambda phase: self.peaks[phase])


def occupied(sizes: RowSizes, peaks: Peaks, homes: Homes) -> Occupied:
    """What these homes hold of these rows."""
    found: dict[str, dict[Kind, int]] = {home: dict.fromkeys(sizes, 0) for home in get_args(Home)}
    for kind, stacks in sizes.items():
        for rows, places in zip(stacks, homes.of[kind], strict=True):
            for row, home in zip(rows, places, strict=True):
                found[home][kind] += getattr(row, home) * (homes.halves(kind) if home == "disk" else 1)
    at: dict[Phase, int] = {
        phase: peaks.outside + getattr(peaks, phase) + _rows(phase, sizes, homes) for phase in PHASES
    }
    if homes.fused:
        passing = sum(
            in_flight([row.device for at, row in enumerate(rows) if (k, at) in homes.fused])
            for k, rows in enumerate(sizes.get("opt", ()))
        )
        rows = _rows("backward", sizes, homes) + passing
        at["backward"] = peaks.outside + max(peaks.backward, peaks.fused) + rows
    if homes.deferred:
        rows = _rows("forward", sizes, homes) + _due(sizes, homes)
        at["forward"] = peaks.outside + max(peaks.forward, peaks.deferred) + rows
    return Occupied(at, found["device"], found["host"], found["disk"], _moving(sizes, homes))


def _due(sizes: RowSizes, homes: Homes) -> int:
    """Bytes on a device of what deferred updates read in the forward pass besides: gradients that are at home there,
    others on their way, and optimizer state on its way."""
    found = 0
    kinds: tuple[Kind, ...] = ("grads", "opt")
    for kind in kinds:
        for k, (rows, places) in enumerate(zip(sizes.get(kind, ()), homes.of.get(kind, ()), strict=True)):
            due = [(row.device, home) for at, (row, home) in enumerate(zip(rows, places, strict=True))
                   if (k, at) in homes.deferred]  # fmt: skip
            found += in_flight([row for row, home in due if home != "device"])
            found += sum(row for row, home in due if home == "device" and kind == "grads")
    return found


def _moving(sizes: RowSizes, homes: Homes) -> int:
    return sum(
        MOVING[home] * max(row.host for row, own in zip(rows, places, strict=True) if own == home)
        for kind, stacks in sizes.items()
        for rows, places in zip(stacks, homes.of[kind], strict=True)
        for home in set(places)
    )


def _rows(phase: Phase, sizes: RowSizes, homes: Homes) -> int:
    """Bytes of rows on a device at the fullest moment of a phase."""
    passing = sum(
        in_flight([row.device for row, home in zip(rows, places, strict=True) if home != "device"])
        for kind in PASSING[phase]
        for rows, places in zip(sizes.get(kind, ()), homes.of.get(kind, ()), strict=True)
    )
    resident = {kind: _resident(kind, sizes, homes) for kind in STAYING[phase]}
    inputs, grads = resident.pop("inputs", []), resident.pop("grads", [])
    staying = sum(sum(rows) for rows in resident.values())
    return passing + staying + most_alive(inputs, grads)


def in_flight(rows: list[int]) -> int:
    """Bytes of those of these rows that are on their way through the devices at once."""
    return sum(sorted(rows)[-IN_FLIGHT:])


def most_alive(inputs: list[int], grads: list[int]) -> int:
    """Bytes at the fullest moment of a backward pass: when it is at a layer, there are the inputs of this one and of
    those before, and the gradients of this one and of those behind. Without either, all of the other."""
    before, behind, most = 0, sum(grads), sum(grads)
    for at in range(max(len(inputs), len(grads))):
        before += inputs[at] if inputs else 0
        most = max(most, before + behind)
        behind -= grads[at] if grads else 0
    return most


def _resident(kind: Kind, sizes: RowSizes, homes: Homes) -> list[int]:
    """By layer, over all stacks in order, the bytes of rows that have their home on the devices."""
    return [
        row.device if home == "device" else 0
        for rows, places in zip(sizes.get(kind, ()), homes.of.get(kind, ()), strict=True)
        for row, home in zip(rows, places, strict=True)
    ]
