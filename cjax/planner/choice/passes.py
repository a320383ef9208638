"""The homes with which passes forward move the fewest bytes: of weights that are only read, and of layers' memory.

A pass goes through all layers once. It reads each layer's weights, and reads and writes what the layer remembers of
earlier passes; nothing of it is needed behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cjax.plan.sizes import size_text
from cjax.planner.choice.homes import TooLittle, readable, rounded_up
from cjax.planner.homes import IN_FLIGHT, Home, RowBytes


@dataclass(frozen=True)
class PassRows:
    """The rows of one kind of one stack, all alike.

    Args:
      length: the number of layers.
      row: bytes of one.
    """

    length: int
    row: RowBytes

    def in_flight(self, kept: int) -> int:
        """Bytes of a device for rows on their way, where it keeps so many."""
        return min(IN_FLIGHT, self.length - kept) * self.row.device

    def held(self, kept: int) -> int:
        """And with those that it keeps."""
        return kept * self.row.device + self.in_flight(kept)


@dataclass(frozen=True)
class PassHomes:
    """Homes of weights, stack by stack ("disk": where they are stored), and of memory."""

    weights: tuple[tuple[Home, ...], ...]
    memory: tuple[Home, ...]


def choose_pass_homes(
    weights: Sequence[PassRows],
    memory: PassRows,
    stack: int,
    fixed: int,
    budget: int | None = None,
    host: int | None = None,
    what: str = "",
    forced: Sequence[str] = (),
) -> PassHomes:
    """Where weights and memory are, so that a pass moves the fewest bytes. What the host has no room for of the weights
    is read where they are stored, in every pass.

    Args:
      weights: of each stack.
      memory: of the layers that remember.
      stack: whose these are; others are gone through once, before the first token.
      fixed: bytes of a device beside rows.
      budget: bytes that a device may hold; None: no limit.
      host: bytes of a process in host memory; None: no limit.
      what: says of an error what needs so much.
      forced: "params" and "activations" that may not be kept on the devices.

    Raises:
      TooLittle: a budget smaller than the least that works, which is named; a host too small for the memory.

    >>> rows = PassRows(8, RowBytes(10, 10, 10))
    >>> homes = choose_pass_homes([rows], PassRows(8, RowBytes(1, 1, 1)), 0, fixed=5, budget=5 + 8 + 40, host=20)
    >>> [homes.weights[0].count(home) for home in ("device", "host", "disk")], homes.memory.count("device")
    ([2, 2, 4], 8)
    """
    best: tuple[int, list[int], int] | None = None
    for kept in [0] if "activations" in forced else range(memory.length, -1, -1):
        if host is not None and (memory.length - kept) * memory.row.host > host:
            continue
        found = _weights_kept(weights, stack, memory, kept, fixed, budget, "params" in forced)
        if found is None:
            continue
        moved = 2 * (memory.length - kept) * memory.row.device
        moved += (weights[stack].length - found[stack]) * weights[stack].row.device
        if best is None or moved < best[0]:
            best = moved, found, kept
    if best is None:
        raise _refusal(weights, memory, stack, fixed, budget, host, what)
    _, found, kept = best
    left = None if host is None else host - (memory.length - kept) * memory.row.host
    homes: list[tuple[Home, ...]] = [()] * len(weights)
    for k in _order(weights, stack):
        rows, length = weights[k], weights[k].length
        away = length - found[k]
        there = away if left is None else min(away, left // max(rows.row.host, 1))
        left = None if left is None else left - there * rows.row.host
        homes[k] = (*["device"] * found[k], *["host"] * there, *["disk"] * (away - there))  # type: ignore[assignment]
    return PassHomes(tuple(homes), _memory_homes(memory, kept))


def keep_memory(
    memory: PassRows, peak: int, room: int, budget: int, forced: bool, host: int | None
) -> tuple[Home, ...]:
    """Where memory is, beside rows that stay where they are.

    Args:
      memory: of the layers that remember.
      peak: bytes of a device that a pass needs beside rows.
      room: bytes of a device that are left for both.
      budget: bytes that a device may hold.
      forced: whether none of it may be kept there.
      host: bytes of a process that host memory has left; None: no limit.

    Raises:
      TooLittle: there is no room for a pass.
    """
    for kept in [0] if forced else range(memory.length, -1, -1):
        if peak + memory.held(kept) <= room:
            if host is not None and (over := (memory.length - kept) * memory.row.host - host) > 0:
                raise TooLittle(_no_host(memory, kept, host), "room", over)
            return _memory_homes(memory, kept)
    missing = peak + memory.in_flight(0) - room
    raise TooLittle(
        f"a pass over these texts needs {readable(peak)} of a device beside weights and memory, and two layers' memory "
        f"{readable(memory.in_flight(0))}, where budget={size_text(budget)} leaves {readable(max(room, 0))}: give "
        f"fewer rows a pass, or write budget={rounded_up(budget + missing)}.",
        "budget", missing,
    )  # fmt: skip


def _memory_homes(memory: PassRows, kept: int) -> tuple[Home, ...]:
    return (*(["device"] * kept), *(["host"] * (memory.length - kept)))  # type: ignore[return-value]


def _order(weights: Sequence[PassRows], stack: int) -> list[int]:
    """What every token reads goes first."""
    return [stack, *(k for k in range(len(weights)) if k != stack)]


def _needed(weights: Sequence[PassRows], kept: Sequence[int], stack: int, memory: PassRows, memory_kept: int) -> int:
    """Bytes of rows on a device: stacks are gone through one after the other."""
    staying = sum(rows.row.device * n for rows, n in zip(weights, kept, strict=True))
    staying += memory_kept * memory.row.device
    passing = [rows.in_flight(n) for rows, n in zip(weights, kept, strict=True)]
    passing[stack] += memory.in_flight(memory_kept)
    return staying + max(passing)


def _weights_kept(
    weights: Sequence[PassRows], stack: int, memory: PassRows, memory_kept: int, fixed: int, budget: int | None,
    forced: bool,
) -> list[int] | None:  # fmt: skip
    """How many layers of each stack stay on the devices; None where not even none of them fits."""

    def fits(kept: Sequence[int]) -> bool:
        return budget is None or fixed + _needed(weights, kept, stack, memory, memory_kept) <= budget

    kept = [0] * len(weights)
    if not fits(kept):
        whole = [rows.length for rows in weights]  # nothing is on its way then
        return whole if not forced and fits(whole) else None
    for k in [] if forced else _order(weights, stack):
        # With the last layers at home there is none on its way: more may fit than one by one.
        counts = range(weights[k].length, 0, -1)
        kept[k] = next((n for n in counts if fits([*kept[:k], n, *kept[k + 1 :]])), 0)
    return kept


def _refusal(
    weights: Sequence[PassRows], memory: PassRows, stack: int, fixed: int, budget: int | None, host: int | None,
    what: str,
) -> TooLittle:  # fmt: skip
    least = fixed + _needed(weights, [0] * len(weights), stack, memory, 0)
    if budget is not None and least > budget:
        row = max(rows.row.device for rows in weights)
        return TooLittle(
            f"budget={size_text(budget)} is less than a device needs at least, {readable(least)}: {readable(fixed)} "
            f"beside the layers{what}, and two layers at a time, each of {readable(row)} with "
            f"{readable(memory.row.device)} of keys and values. Write budget={rounded_up(least)}, or give fewer rows a "
            "pass.",
            "budget", least - budget,
        )  # fmt: skip
    assert host is not None
    needs = memory.length * memory.row.host
    return TooLittle(_no_host(memory, 0, host), "room", needs - host)


def _no_host(memory: PassRows, kept: int, host: int) -> str:
    needs = (memory.length - kept) * memory.row.host
    return (
        f"keys and values of {memory.length - kept} layers need {readable(needs)} of host memory, and host="
        f"{size_text(host)} has not so much left: write host={rounded_up(needs)}, a larger budget=, or give fewer rows "
        "a pass."
    )
