"""The numbers that stages look up, followed by hand: every op finds in its places what it should."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.pipeline.partition import partition
from cjax.pipeline.route import block_of
from cjax.pipeline.schedule import (
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    split_backward,
    zero_bubble,
    zero_bubble_v,
)
from cjax.pipeline.table import Schedule
from cjax.pipeline.wiring import wire

MAKE = {
    "gpipe": lambda p, m: gpipe(p, m),
    "gpipe of two": lambda p, m: gpipe(p, m, 2),
    "1f1b": lambda p, m: one_f_one_b(p, m),
    "1f1b of the papers": lambda p, m: one_f_one_b(p, m, lead=1),
    "interleaved": lambda p, m: interleaved(p, p * m, 2),
    "interleaved, split": lambda p, m: split_backward(interleaved(p, p * m, 3)),
    "zero_bubble": lambda p, m: zero_bubble(p, m),
    "zero_bubble of the papers": lambda p, m: zero_bubble(p, m, lead=1),
    "zero_bubble_v": lambda p, m: zero_bubble_v(p, m),
    "forward": lambda p, m: forward_only(tuple(range(p)) * 2, m),
}


def follow(schedule: Schedule, num_stacks: int) -> None:
    """Run the tables with names in the place of arrays."""
    part = partition([12] * num_stacks, schedule.route)
    wiring, num_blocks = wire(schedule, part), len(schedule.route)
    inbox: list[dict[int, Any]] = [{} for _ in range(schedule.num_stages)]
    kept: list[dict[Any, Any]] = [{} for _ in range(schedule.num_stages)]
    num_ops = 0
    for tick, row in enumerate(schedule.ticks):
        sent: dict[tuple[str, int], Any] = {}
        for stage, ops in enumerate(row):
            for kind in ("F", "B", "W"):
                of = {name: int(table[tick, stage]) for name, table in wiring.ops[kind].items()}
                mine = [op for op in ops if op.kind == kind]
                assert bool(of["does"]) == bool(mine)
                if not mine:
                    continue
                (op,), num_ops = mine, num_ops + 1
                block = block_of(schedule.route, stage, op.chunk)
                stack = part.stack[block]
                assert (of["does"], of["microbatch"]) == (stack + 1, op.microbatch)
                assert (of["layer"], of["count"]) == (part.first[block], part.count[block])
                assert 0 <= of["slot"] < max(1, wiring.slots[stack]) or schedule.forward_only
                before = {"F": block - 1, "B": block + 1}.get(kind)
                if before is not None and 0 <= before < num_blocks:
                    assert inbox[stage][of["reads"]] == (kind, op.microbatch, before)
                place, end = ("slot", stack, of["slot"]), ("end", stack, of["end_slot"])
                if kind == "F":
                    kept[stage][place] = op.microbatch, block
                    if of["ends"]:
                        kept[stage][end] = op.microbatch, block
                else:
                    assert kept[stage][place] == (op.microbatch, block)
                    assert kind == "W" or not of["ends"] or kept[stage][end] == (op.microbatch, block)
                to = {1: ("left", (stage + 1) % schedule.num_stages), -1: ("right", stage - 1), 0: (kind, stage)}
                source, reader = to[of["way"]]
                sent[source, reader % schedule.num_stages] = kind, op.microbatch, block
        for source, table in wiring.arrivals.items():
            for stage in range(schedule.num_stages):
                place = int(table[tick, stage])
                if place < wiring.num_messages:
                    inbox[stage][place] = sent[source, stage]
    assert num_ops == sum(1 for _ in schedule.placed())


@pytest.mark.full("interleaved", "interleaved, split")
@pytest.mark.parametrize("name", MAKE)
@given(p=st.integers(2, 5), m=st.integers(1, 9))
def test_every_op_finds_what_it_needs(name: str, p: int, m: int) -> None:
    schedule = MAKE[name](p, m)
    follow(schedule, 1)
    if schedule.num_chunks == 2:
        follow(schedule, 2)


@given(p=st.integers(2, 5), m=st.integers(1, 20))
def test_places_are_those_of_the_table(p: int, m: int) -> None:
    for schedule in (one_f_one_b(p, m), zero_bubble(p, m), interleaved(p, p * m, 2)):
        wiring = wire(schedule, partition([12], schedule.route))
        assert wiring.slots[0] <= schedule.slots <= 2 * p * schedule.num_chunks
        assert wiring.num_messages <= 2, "each message is read in the tick after it was sent"
