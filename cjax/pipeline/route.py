"""Which block of layers lives where, what an op reads, and which way its result goes."""

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Literal

Kind = Literal["F", "B", "W"]
KINDS: tuple[Kind, ...] = ("F", "B", "W")


@cache
def blocks_of(route: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """For each stage, which blocks of layers, counted from the model's input, are its chunks."""
    return tuple(tuple(block for block, owner in enumerate(route) if owner == stage) for stage in range(max(route) + 1))


def block_of(route: tuple[int, ...], stage: int, chunk: int) -> int:
    """Which block of layers, counted from the model's input, is this chunk of this stage."""
    return blocks_of(route)[stage][chunk]


def chunk_of(route: tuple[int, ...], block: int) -> int:
    """The reverse of `block_of`."""
    return blocks_of(route)[route[block]].index(block)


def hop(route: tuple[int, ...], block: int) -> int:
    """The way to the next block: 1 to the right, -1 to the left, 0 stays. Gradients go the other way.

    Of two stages each is on both sides of the other: there, a step to the next chunk is one on around the ring.
    """
    here, there = route[block], route[block + 1]
    # With two stages, left and right lead to the same one. Which it is decides which permute carries the message, and
    # both sides have to say the same.
    if max(route) == 1 and here != there:
        return there - here if chunk_of(route, block) == chunk_of(route, block + 1) else here - there
    steps = (there - here) % (max(route) + 1)
    return -1 if steps > 1 and steps == max(route) else steps


def needs(kind: Kind, block: int, num_blocks: int) -> Iterator[tuple[Kind, int]]:
    """The ops, as (kind, block) of the same micro-batch, whose results an op reads."""
    if kind == "F" and block > 0:
        yield "F", block - 1
    if kind == "B":
        yield "F", block
        if block < num_blocks - 1:
            yield "B", block + 1
    if kind == "W":
        yield "B", block


@cache
def sends(route: tuple[int, ...], kind: Kind, block: int) -> int:
    """The way that an op's result leaves its stage: 1 to the right, -1 to the left, 0 not at all."""
    if kind == "F" and block < len(route) - 1:
        return hop(route, block)
    if kind == "B" and block > 0:
        return -hop(route, block - 1)
    return 0


def check_route(where: str, route: tuple[int, ...]) -> None:
    """Every stage has equally many chunks; blocks that follow each other live on one stage or on neighbours.

    Raises:
      ValueError: it is not so; the text begins with `where`.
    """
    counts = Counter(route)
    if not route or set(counts) != set(range(len(counts))) or len(set(counts.values())) != 1:
        raise ValueError(f"{where} route={route} needs each of the stages 0, 1, 2, ... equally often")
    for block in range(len(route) - 1):
        if abs(hop(route, block)) > 1:
            raise ValueError(
                f"{where} route={route}: blocks {block} and {block + 1} live on stages {route[block]} and "
                f"{route[block + 1]}, which are not neighbours: a block follows on the same stage, or the one to its "
                "left or right"
            )
