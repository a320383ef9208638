"""Checks of what was typed, so that it is refused before it costs anything."""

from collections.abc import Mapping
from typing import Any


def flag(name: str) -> str:
    """How the option of a field is typed."""
    return f"--{name.replace('_', '-')}"


def check_options(options: Any, at_least: Mapping[str, int]) -> None:
    """Raises ValueError for an option below the least that makes sense; None stands for one that was not given."""
    for name, least in at_least.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} {value}: it is a whole number, at least {least}")
