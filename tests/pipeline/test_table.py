"""The laws of a table: each broken on purpose, and named."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cjax.pipeline import Op, Schedule, check, interleaved, one_f_one_b, zero_bubble, zero_bubble_v
from cjax.pipeline.route import hop
from cjax.pipeline.table import Placed

Rows = list[list[list[Op]]]
BASE = one_f_one_b(3, 4)
SPLIT = zero_bubble(3, 4)
VEE = zero_bubble_v(3, 4)


def rows_of(table: Schedule) -> Rows:
    return [[list(ops) for ops in row] for row in table.ticks]


def with_rows(table: Schedule, rows: Rows) -> Schedule:
    return replace(table, ticks=tuple(tuple(tuple(ops) for ops in row) for row in rows))


def broken(table: Schedule, fault: Callable[[Rows], object]) -> Schedule:
    rows = rows_of(table)
    fault(rows)
    return with_rows(table, rows)


def find(table: Schedule, stage: int, op: Op) -> int:
    return next(at.tick for at in table.placed() if (at.stage, at.op) == (stage, op))


def move(table: Schedule, stage: int, op: Op, by: int) -> Schedule:
    tick = find(table, stage, op)

    def fault(rows: Rows) -> None:
        rows[tick][stage].remove(op)
        rows[tick + by][stage] = sorted([*rows[tick + by][stage], op], key=lambda op: "FBW".index(op.kind))

    return broken(table, fault)


def by_hand(route: tuple[int, ...], *rows: list[str], slots: int = 9) -> Schedule:
    """A table from text: a list for each tick, in it a text for each stage, "F1b" for F1 of chunk 1."""
    ticks = tuple(
        tuple(tuple(Op(text[0], int(text[1]), int("b" in text)) for text in ops.split()) for ops in row)  # pyright: ignore
        for row in rows
    )
    num_microbatches = 1 + max(op.microbatch for row in ticks for ops in row for op in ops)
    return Schedule("by hand", route, num_microbatches, slots, ticks)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: broken(BASE, lambda rows: rows[1][1].clear()), "F0 on stage 1 is missing: every op runs exactly once"),
        (lambda: broken(BASE, lambda rows: rows[7][2].append(Op("F", 0))),
         "F0 on stage 2 in tick 7 ran in tick 2 already: every op runs exactly once"),
        (lambda: broken(BASE, lambda rows: rows[0][0].append(Op("F", 1))),
         "F0 on stage 0 in tick 0 stands in FF: a tick takes at most one F, then one B, then one W"),
        (lambda: broken(BASE, lambda rows: rows[2][2].reverse()), "stands in BF"),
        (lambda: broken(SPLIT, lambda rows: rows[-1][0].clear()), "W3 on stage 0 is missing"),
        (lambda: broken(BASE, lambda rows: rows[7][2].append(Op("W", 0))), "W0 on stage 0 is missing"),
        (lambda: broken(BASE, lambda rows: rows[0][1].append(Op("F", 4))),
         "F4 on stage 1 in tick 0: the table is for 4 micro-batches and 1 chunks a stage"),
        (lambda: broken(BASE, lambda rows: rows[0][1].append(Op("F", 0, 1))), "F0 of chunk 1 on stage 1 in tick 0"),
        (lambda: broken(BASE, lambda rows: rows[0][1].append(Op("G", 0))), "G0 on stage 1 in tick 0 stands in G:"),
        (lambda: broken(BASE, lambda rows: rows[0].pop()), "tick 0 has 2 entries for 3 stages"),
        (lambda: move(BASE, 2, Op("F", 0), -1),
         "F0 on stage 2 in tick 1 reads what F0 on stage 1 in tick 1 sends, there from tick 2"),
        (lambda: by_hand((0, 1), ["F0", ""], ["", "B0"], ["B0", "F0"]),
         "B0 on stage 1 in tick 1 reads what F0 on stage 1 in tick 2 sends, there from tick 2"),
        (lambda: by_hand((0, 1), ["F0", ""], ["", "F0 B0"], ["W0", "W0"], ["B0", ""]),
         "W0 on stage 0 in tick 2 reads what B0 on stage 0 in tick 3 sends, there from tick 3"),
        (lambda: by_hand((0, 1), ["F0", ""], ["", "F0 B0"], ["F1", ""], ["B0", "F1 B1"], ["", ""], ["B1", ""], slots=1),
         "F1 on stage 0 in tick 2 is one activation more than slots=1: give slots=2, or run backwards earlier"),
        (lambda: by_hand(
            (0, 1, 1, 0), ["F0", ""], ["", "F0"], ["", "F0b"], ["F0b", ""], ["F1 B0b", ""], ["", "F1 B0b"],
            ["", "F1b B0"], ["F1b B0", ""], ["B1b", ""], ["", "B1b"], ["", "B1"], ["B1", ""]),
         "B0 of chunk 1 on stage 0 in tick 4 and F1 both send to the right: a tick takes one message each way"),
        (lambda: replace(BASE, slots=3), "F3 on stage 0 in tick 3 is one activation more than slots=3: give slots=4"),
        (lambda: replace(BASE, num_microbatches=0, ticks=()), "needs 1 micro-batch or more, not 0"),
        (lambda: replace(BASE, route=(0, 1, 1)), "needs each of the stages 0, 1, 2, ... equally often"),
        (lambda: replace(BASE, route=(0, 2, 3, 1)), "blocks 0 and 1 live on stages 0 and 2, which are not neighbours"),
    ],
)  # fmt: skip
def test_a_broken_law_is_named(make: Callable[[], Schedule], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


tables = st.sampled_from([BASE, SPLIT, VEE, interleaved(3, 6, 2), zero_bubble_v(4, 6), one_f_one_b(5, 3)])


@settings(max_examples=80, deadline=None)
@given(tables, st.data())
def test_faults_planted_anywhere_are_found(table: Schedule, data: st.DataObject) -> None:
    placed = list(table.placed())
    at: Placed = data.draw(st.sampled_from(placed))
    rows = rows_of(table)
    rows[at.tick][at.stage].remove(at.op)
    with pytest.raises(ValueError, match=f"{at.op} on stage {at.stage} is missing"):
        with_rows(table, rows)
    if at.op.kind != "W" and at.tick > 0 and not (at.op.kind == "F" and at.op.chunk == 0 and at.stage == 0):
        with pytest.raises(ValueError, match="reads what|stands in"):
            move(table, at.stage, at.op, -1)
    with pytest.raises(ValueError, match=f"more than slots={max(table.held()) - 1}: give slots={max(table.held())}"):
        replace(table, slots=max(table.held()) - 1)


def test_a_table_that_keeps_the_laws_passes() -> None:
    table = by_hand((0, 1), ["F0", ""], ["", "F0"], ["F1", "B0"], ["", "F1 B1"], ["B0", ""], ["B1", ""])
    check(table)
    assert table.held() == (2, 1) and table.slots == 9 and not table.split
    assert table.waiting() == (0, 1), "B0 lies at stage 0 in tick 3, B1 in tick 4"


def test_ways_around_the_ring() -> None:
    assert [hop((0, 1, 2, 3, 0, 1, 2, 3), k) for k in range(7)] == [1] * 7
    assert [hop((0, 1, 2, 3, 3, 2, 1, 0), k) for k in range(7)] == [1, 1, 1, 0, -1, -1, -1]
    assert [hop((0, 1, 0, 1), k) for k in range(3)] == [1, 1, 1], "of two stages: on around the ring"
    assert [hop((0, 1, 1, 0), k) for k in range(3)] == [1, 0, -1], "of two stages: back up the V"
