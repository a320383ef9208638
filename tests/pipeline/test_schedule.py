"""Every generated table, for any number of stages, micro-batches and chunks, and the papers' formulas."""

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cjax.pipeline import (
    Op,
    Schedule,
    build,
    from_orders,
    gpipe,
    interleaved,
    one_f_one_b,
    split_backward,
    zero_bubble,
    zero_bubble_v,
)
from cjax.pipeline.route import needs, sends

STAGES, MICROBATCHES = st.integers(1, 9), st.integers(1, 30)


def with_ring_groups(p: int, m: int, v: int) -> Schedule:
    return interleaved(p, math.ceil(m / p) * p, v)


TABLES: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda p, m, v: gpipe(p, m),
    "1f1b": lambda p, m, v: one_f_one_b(p, m),
    "1f1b lead=1": lambda p, m, v: one_f_one_b(p, m, lead=1),
    "interleaved": with_ring_groups,
    "interleaved, split": lambda p, m, v: split_backward(with_ring_groups(p, m, v)),
    "zero_bubble": lambda p, m, v: zero_bubble(p, m),
    "zero_bubble lead=1": lambda p, m, v: zero_bubble(p, m, lead=1),
    "zero_bubble_v": lambda p, m, v: zero_bubble_v(p, m),
}
tables = st.builds(lambda name, p, m, v: (name, TABLES[name](p, m, v)), st.sampled_from(sorted(TABLES)), STAGES,
                   MICROBATCHES, st.integers(1, 4))  # fmt: skip


@settings(max_examples=120, deadline=None)
@given(tables)
def test_the_laws_said_another_way(drawn: tuple[str, Schedule]) -> None:
    """Making a schedule checks it; this reads the same laws off the finished table without that code."""
    name, table = drawn
    blocks = [[k for k, owner in enumerate(table.route) if owner == stage] for stage in range(table.num_stages)]
    when = {}
    for tick, row in enumerate(table.ticks):
        for stage, ops in enumerate(row):
            assert [op.kind for op in ops] == [kind for kind in "FBW" if kind in [op.kind for op in ops]]
            for place, (kind, microbatch, chunk) in enumerate(ops):
                assert when.setdefault((kind, microbatch, blocks[stage][chunk]), (tick, place)) == (tick, place)
    kinds = "FBW" if "zero" in name or "split" in name else "FB"
    assert len(when) == len(kinds) * table.num_microbatches * len(table.route)
    for i in range(table.num_microbatches):
        ticks = [when["F", i, k][0] for k in range(len(table.route))]
        ticks += [when["B", i, k][0] for k in reversed(range(len(table.route)))]
        turn = len(table.route)
        assert all(b > a for a, b in zip(ticks[:turn], ticks[1:turn], strict=False))
        assert all(b > a for a, b in zip(ticks[turn:], ticks[turn + 1 :], strict=False))
        assert when["B", i, turn - 1] > when["F", i, turn - 1]
        assert "W" not in kinds or all(when["W", i, k] > when["B", i, k] for k in range(turn))


@settings(max_examples=60, deadline=None)
@given(tables)
def test_what_the_executor_builds_on(drawn: tuple[str, Schedule]) -> None:
    name, table = drawn
    if "lead=1" not in name:
        assert table.waiting() == (0, 0), "a message that is not used in the next tick needs an inbox"
    limit = table.num_microbatches if name == "gpipe" else 2 * table.num_stages
    assert max(table.held()) == table.slots <= limit * table.num_chunks


@settings(max_examples=60, deadline=None)
@given(STAGES, MICROBATCHES, st.integers(1, 4))
def test_in_flight_as_the_papers_say(p: int, m: int, v: int) -> None:
    stages = range(p)
    assert gpipe(p, m).held() == (m,) * p
    assert one_f_one_b(p, m, lead=1).held() == tuple(min(m, p - r) for r in stages)
    assert one_f_one_b(p, m).held() == tuple(min(m, 2 * (p - r) - 1) for r in stages)
    assert zero_bubble(p, m, lead=1).held() == (min(m, p),) * p
    assert max(zero_bubble(p, m).held()) == min(m, 2 * p - 1)
    groups = math.ceil(m / p)
    warm = tuple(min(groups * p * v, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in stages)
    assert interleaved(p, groups * p, v).held() == warm
    assert max(zero_bubble_v(p, m).held()) <= max(2 * p + 1, (5 * p - 1) // 2)


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zero_bubble", "zero_bubble_v"])
def test_memory_does_not_grow_with_micro_batches(name: str, p: int) -> None:
    assert TABLES[name](p, 3 * p, 2).held() == TABLES[name](p, 8 * p, 2).held()


def test_ticks() -> None:
    p, m, v = 4, 12, 3
    assert gpipe(p, m).num_ticks == 2 * m + 2 * (p - 1) - 1
    assert one_f_one_b(p, m).num_ticks == m + 2 * (p - 1)
    assert interleaved(p, m, v).num_ticks == m * v + (p * v - 1) + (p - 1)
    assert one_f_one_b(p, m, lead=1).num_ticks == 2 * (m + p - 1)


def test_one_message_a_boundary_each_way() -> None:
    for table in (one_f_one_b(4, 6), interleaved(4, 8, 3), zero_bubble_v(4, 7)):
        moves = [sends(table.route, at.op.kind, [k for k, r in enumerate(table.route) if r == at.stage][at.op.chunk])
                 for at in table.placed()]  # fmt: skip
        crossed = sum(a != b for a, b in zip(table.route, table.route[1:], strict=False))
        assert sum(map(abs, moves)) == 2 * crossed * table.num_microbatches and sum(moves) == 0


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: interleaved(4, 6, 2), "groups of 4, and 6 are not .*: write microbatches=4 or microbatches=8"),
        (lambda: interleaved(4, 3, 2), "write microbatches=4$"),
        (lambda: interleaved(4, 8, 0), "whole number of chunks, 1 or more: not 0"),
        (lambda: gpipe(0, 4), "whole number of stages, 1 or more: not 0"),
        (lambda: one_f_one_b(4, 2.5), "whole number of micro-batches, 1 or more: not 2.5"),
        (lambda: one_f_one_b(4, 8, lead=3), "lead=3: 2 fills"),
        (lambda: build("dualpipe", 4, 8), "no schedule 'dualpipe' with 1 chunks a stage: there are gpipe"),
        (lambda: build("1f1b", 4, 8, 2), "no schedule '1f1b' with 2 chunks"),
    ],
)
def test_numbers_that_no_schedule_takes(make: Callable[[], Schedule], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make()


def test_a_split_backward_holds_no_more() -> None:
    whole, parts = interleaved(4, 8, 3), split_backward(interleaved(4, 8, 3))
    assert (parts.held(), parts.num_ticks, parts.split) == (whole.held(), whole.num_ticks, True)
    assert split_backward(parts) is parts
    assert [op for op in parts.order(1) if op.kind != "W"] == whole.order(1)


def test_a_plan_names_its_schedule() -> None:
    assert build("gpipe", 2, 3) == gpipe(2, 3) and build("1f1b", 2, 3) == one_f_one_b(2, 3)
    assert build("interleaved", 2, 4, 3) == interleaved(2, 4, 3)
    assert build("zero_bubble", 2, 3) == zero_bubble(2, 3) and build("zero_bubble", 2, 3, 2) == zero_bubble_v(2, 3)


def test_orders_that_wait_for_each_other() -> None:
    first, second = Op("F", 0), Op("F", 1)
    backs = [Op("B", 0), Op("B", 1)]
    with pytest.raises(ValueError, match="each of these waits for another: B0 on stage 0; F1 on stage 1"):
        from_orders("crossed", (0, 1), [[first, backs[0], second, backs[1]], [second, first, *backs]])


@pytest.mark.parametrize(
    "route, orders, text",
    [
        ((0, 1), [[Op("F", 0)]], r"1 orders for the 2 stages of route=\(0, 1\)"),
        ((0, 1), [[Op("F", 0)], [Op("F", 0, 1)]], "F0 of chunk 1 on stage 1: ops are F, B or W of 1 chunks"),
        ((0, 2), [[], [], []], "needs each of the stages 0, 1, 2, ... equally often"),
        ((0, 1), [[Op("F", 0)], [Op("F", 0), Op("B", 0)]], "B0 on stage 0 is missing"),
        ((0,), [[]], "needs 1 micro-batch or more, not 0"),
    ],
)
def test_orders_that_make_no_table(route: tuple[int, ...], orders: list[list[Op]], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        from_orders("mine", route, orders)


def test_orders_keep_their_order() -> None:
    orders = [one_f_one_b(3, 5, lead=1).order(stage) for stage in range(3)]
    for fused in (True, False):
        table = from_orders("mine", (0, 1, 2), orders, slots=6, fused=fused)
        assert [table.order(stage) for stage in range(3)] == orders and table.slots == 6
        assert max(len(ops) for row in table.ticks for ops in row) == (2 if fused else 1)


def test_orders_that_meet_on_a_link_give_way() -> None:
    """Beside F1, which goes to the right, B0 of chunk 1 is ready too, and would."""
    order = [Op("F", 0), Op("F", 0, 1), Op("F", 1), Op("B", 0, 1), Op("F", 1, 1), Op("B", 0), Op("B", 1, 1), Op("B", 1)]
    table = from_orders("vee", (0, 1, 1, 0), [order, order])
    assert (Op("F", 1),) in [row[0] for row in table.ticks] and table.order(0) == order


def test_needs() -> None:
    assert [list(needs(kind, 1, 3)) for kind in ("F", "B", "W")] == [[("F", 0)], [("F", 1), ("B", 2)], [("B", 1)]]
    assert list(needs("F", 0, 3)) == [] and list(needs("B", 2, 3)) == [("F", 2)]
