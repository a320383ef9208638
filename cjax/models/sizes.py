"""What the sizes of all models share: known ones by name, and refusals that say what to write instead."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

Config = TypeVar("Config")


def choose(presets: Mapping[str, Config], kind: str, name: str, overrides: Mapping[str, Any]) -> Config:
    """The preset called `name` with some fields changed; `kind` is what people call such a model ("GPT").

    Raises:
        ValueError: an unknown name or field, with those that exist.
    """
    if name not in presets:
        raise ValueError(f"no {kind} is called {name!r}; the names are {', '.join(presets)}")
    return change(presets[name], overrides)


def change(config: Any, overrides: Mapping[str, Any]) -> Any:
    """`config` with some fields changed.

    Raises:
        ValueError: it has no such field, with those that it has.
    """
    fields = [field.name for field in dataclasses.fields(config)]
    if unknown := [field for field in overrides if field not in fields]:
        name = type(config).__name__
        raise ValueError(f"{name} has no {', '.join(unknown)}; its fields are {', '.join(fields)}")
    return dataclasses.replace(config, **overrides)


def check_counts(config: Any, *names: str) -> None:
    """Refuses a field below 1."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise ValueError(f"{type(config).__name__}: {name} is {value!r}; it must be a whole number")
        if value < 1:
            raise ValueError(f"{type(config).__name__}: {name} is {value}; it must be at least 1")


def check_divides(config: Any, whole: str, parts: str, noun: str) -> None:
    """Refuses a `whole` that is no multiple of `parts`, naming the nearest that is."""
    size, number = getattr(config, whole), getattr(config, parts)
    if size % number:
        nearest = max(1, round(size / number)) * number
        raise ValueError(
            f"{type(config).__name__}: {whole} {size} does not divide into {number} {noun}; "
            f"write {whole}={nearest}, or another {parts}"
        )


def check_rate(config: Any, name: str) -> None:
    """Refuses a dropout rate that would drop everything, or less than nothing."""
    if not 0.0 <= getattr(config, name) < 1.0:
        value = getattr(config, name)
        raise ValueError(f"{type(config).__name__}: {name} is {value}; it is a rate, at least 0 and below 1")


def check_choice(config: Any, name: str, choices: tuple[Any, ...]) -> None:
    """Refuses a value that is none of `choices`."""
    value = getattr(config, name)
    if value not in choices:
        raise ValueError(f"{type(config).__name__}: {name} is {value!r}; write one of {', '.join(map(repr, choices))}")


def check_length(length: int, context: int, what: str = "tokens") -> None:
    """Refuses a sequence longer than a model's learned positions."""
    if length > context:
        raise ValueError(
            f"a sequence of {length} {what} is longer than this model's context of {context}; "
            f"cut it, or build the model with context={length}"
        )
