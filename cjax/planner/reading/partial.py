"""Gradients of activations that devices have parts of, and which of them are reduced together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass
class PartialGradient:
    """The gradient of an activation, which devices have parts of: what it is of, and how many numbers."""

    axes: frozenset[str]
    held: float
    at: int  # the step whose reading it is of
    is_product: bool


def merged(parts: Sequence[PartialGradient], readers: Sequence[int]) -> Iterator[tuple[PartialGradient, int]]:
    """The reductions of a gradient that several readers give parts of, each with how many it is the sum of.

    Products that leave the same parts read it together, and count as one reader. Autodiff adds gradients up from the
    last reader to the first. As long as all are parts, XLA adds these and reduces the sum; behind a gradient that is
    whole already, each is reduced on its own.
    """
    joint: dict[frozenset[str], PartialGradient] = {}
    for part in parts:
        if part.is_product:
            joint.setdefault(part.axes, part)
    left = [part for part in parts if not part.is_product or joint[part.axes] is part]
    gone = {part.at for part in parts} - {part.at for part in left}
    by_step = {part.at: part for part in left}
    trailing: list[PartialGradient] = []
    for at in sorted(set(readers) - gone, reverse=True):
        if at not in by_step:
            break
        trailing.append(by_step.pop(at))
    for axes in dict.fromkeys(part.axes for part in trailing):
        same = [part for part in trailing if part.axes == axes]
        yield same[0], len(same)
    for part in by_step.values():
        yield part, 1
