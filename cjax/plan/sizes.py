"""Bytes as a plan writes them, and what may leave the devices. Knows no Plan."""

import re
from fractions import Fraction
from typing import Any, Literal, get_args

from cjax.plan.parts import whole_number

Offloaded = Literal["params", "optimizer", "gradients", "activations"]
CLASSES: tuple[Offloaded, ...] = get_args(Offloaded)

# Larger ones first: of two texts of the same length, the larger unit reads better.
UNITS = {"TiB": 2**40, "TB": 10**12, "GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6,
         "KiB": 2**10, "kB": 10**3, "B": 1}  # fmt: skip
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")


def num_bytes(name: str, value: Any, least: int = 1) -> int:
    """Bytes, from a number of them or from text.

    Raises:
      ValueError: no such number, or text without a unit or with an unknown one: with what to write.

    >>> num_bytes("budget", "1.5GiB"), num_bytes("budget", 2000)
    (1610612736, 2000)
    """
    if not isinstance(value, str):
        return whole_number(f"{name} in bytes", value, least)
    found = _SIZE.fullmatch(value)
    if found is None:
        raise ValueError(f"{value!r} is no number of bytes; write {name}=16GiB, without a space")
    if found[2] not in UNITS and not (found[2] == "" and Fraction(found[1]) == 0):
        raise ValueError(f"{name}={value} has {_unit_fault(found[2])}; write {name}={found[1]}{_meant(found[2])}")
    exact = Fraction(found[1]) * UNITS.get(found[2], 0)  # of none, which only 0 may have
    if exact.denominator != 1:
        raise ValueError(f"{name}={value} is no whole number of bytes; write {name}={size_text(int(exact) or 1)}")
    return whole_number(f"{name} in bytes", int(exact), least)


def size_text(number: int) -> str:
    """Bytes in the unit that says them exactly with the fewest characters.

    >>> size_text(16 * 2**30), size_text(80 * 10**9), size_text(1536 * 2**30), size_text(2**40), size_text(0)
    ('16GiB', '80GB', '1536GiB', '1TiB', '0B')
    """
    whole = [f"{number // unit}{name}" for name, unit in UNITS.items() if number and number % unit == 0]
    return min(whole, key=len, default="0B")


def offloaded(value: Any) -> tuple[Offloaded, ...]:
    """The classes that are not to stay on the devices, in the one order in which they are written.

    Args:
      value: one or several, with "+" between them or as a sequence of names.

    Raises:
      ValueError: an unknown one, or one that is given twice.
    """
    names = value.split("+") if isinstance(value, str) and value else value
    if not isinstance(names, list | tuple) and names:
        raise ValueError(f"offload takes {', '.join(CLASSES)}, with '+' between several, not {value!r}")
    names = tuple(names or ())
    for name in names:
        if name not in CLASSES:
            raise ValueError(f"offload has no {name!r}; it takes {', '.join(CLASSES)}, with '+' between several")
        if names.count(name) > 1:
            raise ValueError(f"offload has {name} twice; write it once")
    return tuple(name for name in CLASSES if name in names)


def _unit_fault(unit: str) -> str:
    return f"the unit {unit!r}, which is none of {', '.join(UNITS)}" if unit else "no unit"


def _meant(unit: str) -> str:
    """The unit that somebody meant who typed this: `gib`, `G`, or nothing at all."""
    near = [name for name in UNITS if name.lower() == unit.lower()]
    near += [name for name in UNITS if name[0].lower() == unit[:1].lower()]
    return near[0] if near else "GiB"
