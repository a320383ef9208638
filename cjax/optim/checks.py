"""What optimizers and schedules check of their arguments."""

import difflib
from collections.abc import Iterable
from typing import Any


def check_learning_rate(learning_rate: Any) -> None:
    """Raises ValueError for a rate of 0 or below; a schedule is its author's own."""
    if callable(learning_rate):
        return
    try:
        value = float(learning_rate)
    except TypeError:  # traced, as under optax.inject_hyperparams
        return
    if not value > 0:
        raise ValueError(
            f"learning_rate is {value:g}, which trains nothing or away from the minimum; give a number above 0, "
            "such as 1e-3, or a schedule"
        )


def check_choice(name: str, given: Any, choices: Iterable[str]) -> None:
    """Raises ValueError for a value that is none of the choices, with the nearest of them."""
    known = list(choices)
    if given in known:
        return
    folded = {choice.lower(): choice for choice in known}
    near = difflib.get_close_matches(str(given).lower(), list(folded), 1, 0.4)
    hint = f"; did you mean {folded[near[0]]!r}?" if near else ""
    raise ValueError(f"{name}={given!r} is none of {', '.join(map(repr, known))}{hint}")
