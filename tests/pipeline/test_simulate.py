"""Times of schedules: closed forms, and the published bubble rates of the zero-bubble papers."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cjax.pipeline import (
    Op,
    Schedule,
    Simulation,
    Times,
    from_orders,
    gpipe,
    interleaved,
    one_f_one_b,
    simulate,
    split_backward,
    zero_bubble,
    zero_bubble_v,
)

# Zero Bubble Pipeline Parallelism (Qi et al. 2023), profiled milliseconds and the bubble rates of its tables:
# p, m, (F, B, W, transfer), 1F1B, interleaved 1F1B, ZB-H1, ZB-H2.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 0.2431, 0.1055, 0.1585, 0.1083),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 0.1985, 0.0818, 0.1242, 0.0837),
    (8, 64, (18.546, 18.097, 9.321, 0.762), 0.1240, 0.0443, 0.0674, 0.0444),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 0.2347, 0.0808, 0.1323, 0.0698),
    (8, 32, (29.802, 29.428, 19.530, 0.577), 0.1898, 0.0628, 0.1045, 0.0559),
    (8, 64, (29.935, 29.621, 19.388, 0.535), 0.1091, 0.0320, 0.0554, 0.0294),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 0.2552, 0.1104, 0.1397, 0.0672),
    (16, 64, (11.307, 11.254, 8.101, 0.379), 0.2082, 0.0852, 0.1088, 0.0516),
    (16, 128, (11.325, 11.308, 8.109, 0.378), 0.1251, 0.0445, 0.0576, 0.0266),
    (32, 96, (10.419, 10.207, 7.715, 0.408), 0.2646, 0.1493, 0.1421, 0.0641),
    (32, 128, (10.408, 10.204, 7.703, 0.408), 0.2168, 0.1164, 0.1106, 0.0490),
    (32, 256, (10.402, 10.248, 7.698, 0.460), 0.1352, 0.0624, 0.0594, 0.0257),
]
# The papers do not say how many chunks a stage had. One layer a chunk fits: 24, 32, 48 and 64 blocks (the first and
# last stage hold one fewer) over 8, 8, 16 and 32 stages. Every other count is off by 6 % at least.
CHUNKS = {0: 3, 1: 4, 2: 3, 3: 2}
MODELS = [(row, CHUNKS[index // 3]) for index, row in enumerate(PUBLISHED)]


def papers(schedule: Schedule, times: Times) -> Simulation:
    return simulate(schedule, times, lockstep=False)


def zb_h2(p: int, m: int) -> Schedule:
    """The papers' ZB-H2: twice 1F1B's lead, W two micro-batches later for every stage in front."""
    orders, whole = [], one_f_one_b(p, m)
    for stage in range(p):
        order, done = [], 0
        for op in whole.order(stage):
            order.append(op)
            if op.kind == "B" and op.microbatch >= 2 * stage:
                order.append(Op("W", done))
                done += 1
        orders.append(order + [Op("W", i) for i in range(done, m)])
    return from_orders("ZB-H2", tuple(range(p)), orders)


@pytest.mark.full("row10-2", "row11-2", "row8-3", "row9-2")
@pytest.mark.parametrize("row, chunks", MODELS)
def test_published_bubbles(row: tuple, chunks: int) -> None:
    p, m, measured, f1b, ring, h1, h2 = row
    times = Times(*measured)
    assert papers(one_f_one_b(p, m, lead=1), times).stage_bubble == pytest.approx(f1b, abs=1e-4)
    assert papers(zero_bubble(p, m, lead=1), times).stage_bubble == pytest.approx(h1, abs=1e-4)
    assert papers(zb_h2(p, m), times).stage_bubble == pytest.approx(h2, abs=1e-4)


@pytest.mark.full("row11-2")
@pytest.mark.parametrize("row, chunks", MODELS)
def test_published_bubbles_of_interleaved(row: tuple, chunks: int) -> None:
    """The papers count p transfers fewer than the ring has, of 2 v p - 2: with those taken off, to four digits."""
    p, m, measured, _, ring, *_ = row
    found = papers(interleaved(p, m, chunks), Times(*measured))
    assert found.bubble == pytest.approx(ring, rel=0.042)
    assert 1 - found.work[0] / (found.makespan - p * measured[3]) == pytest.approx(ring, abs=1e-4)


@pytest.mark.full("row8-3")
@pytest.mark.parametrize("row, chunks", [(row, chunks) for row, chunks in MODELS if row[0] < 32])
def test_the_executor_loses_little_against_the_papers(row: tuple, chunks: int) -> None:
    p, m, measured, f1b, ring, h1, _ = row
    times, free = Times(*measured), Times(*measured[:3])
    assert simulate(one_f_one_b(p, m), times).bubble <= f1b
    assert simulate(zero_bubble(p, m), times).bubble == pytest.approx(h1, abs=1e-4)
    # In every short tick of the ring a transfer is left open, unless W runs behind it.
    table = interleaved(p, m, chunks)
    assert simulate(table, free).bubble == pytest.approx(papers(table, free).bubble, rel=1e-9)
    assert simulate(table, times).bubble > 1.1 * ring > 1.1 * simulate(split_backward(table), times).bubble


durations = st.floats(0.5, 3)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 12), st.integers(1, 4), durations, durations, durations)
def test_bubbles_as_the_papers_say(p: int, more: int, v: int, f: float, b: float, w: float) -> None:
    """In closed form, without transfers, and for both semantics: what is idle beside the work of one stage."""
    m, times = p + more, Times(f, b, w)

    def idle(schedule: Schedule, lockstep: bool) -> float:
        found = simulate(schedule, times, lockstep)
        assert found.work == pytest.approx([schedule.num_microbatches * (f + b + w)] * p)
        assert found.bubble == pytest.approx(1 - found.work[0] / found.makespan)
        return found.makespan - found.work[0]

    for lockstep in (True, False):
        assert idle(gpipe(p, m), lockstep) == pytest.approx((p - 1) * (f + b + w))
        assert idle(one_f_one_b(p, m), lockstep) == pytest.approx((p - 1) * (f + b + w))
        assert idle(interleaved(p, p * v, v), lockstep) == pytest.approx((p - 1) * (f + b + w) / v)
    assert idle(one_f_one_b(p, m, lead=1), False) == pytest.approx((p - 1) * (f + b + w))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 12), durations, durations, st.floats(0.1, 1))
def test_bubbles_of_zero_bubble(p: int, more: int, f: float, b: float, share: float) -> None:
    m, w = p + more, share * min(f, b)
    for table in (zero_bubble(p, m), zero_bubble_v(p, m)):
        found = simulate(table, Times(f, b, w))
        idle = found.makespan - found.work[0]
        if m >= 2 * p - 2 or table.num_chunks == 2:
            assert idle == pytest.approx((p - 1) * (f + b - w), abs=1e-9)
        else:
            assert (p - 1) * (f + b - w) - 1e-9 <= idle <= (p - 1) * (f + b) + 1e-9


def test_the_lead_costs_memory_and_its_lack_costs_time() -> None:
    """In the papers' order, one op a tick: no loss if F lasts as long as B and W together, much otherwise."""
    short, long = one_f_one_b(4, 12, lead=1), one_f_one_b(4, 12)
    assert simulate(short, Times(2, 1, 1)).makespan == simulate(long, Times(2, 1, 1)).makespan == 60
    assert simulate(long, Times(1, 1, 1)).makespan == 45
    assert simulate(short, Times(1, 1, 1)).makespan == pytest.approx(4 + 2 * (2 * 15 - 4), rel=0.1)


def test_transfers() -> None:
    """Of lock-step ticks, each is longer by what no later op of its own hides; stages by themselves only wait."""
    table = one_f_one_b(2, 3)
    assert simulate(table, Times(1, 1, 1, transfer=0.5)).makespan == 1.5 + 3 * 3.5 + 2, "the last B goes nowhere"
    assert simulate(table, Times(1, 1, 1, transfer=0)).makespan == 12
    hidden = zero_bubble(2, 8)
    late = simulate(hidden, Times(1, 1, 1, 0.5)).makespan - simulate(hidden, Times(1, 1, 1)).makespan
    assert late == 4 * 0.5, "W hides the gradient's transfer, but in two ticks at either end none runs"
    assert papers(table, Times(1, 1, 1, 0.5)).makespan > 12
    alone = zero_bubble_v(1, 4)
    for lockstep in (True, False):
        assert simulate(alone, Times(1, 1, 1, 9), lockstep).makespan == 12, "chunks of one stage: no transfer"


def test_one_slow_stage() -> None:
    """Ticks last as long as their slowest stage."""
    table = one_f_one_b(3, 5)
    slow = simulate(table, Times((1.0, 2.0, 1.0), 1, 1))
    assert slow.makespan == 1 + 2 + 3 + 4 + 4 + 4 + 3 + 2 + 2
    assert slow.work == (15, 20, 15)
    assert slow.bubble == pytest.approx(1 - 50 / (3 * slow.makespan))
    with pytest.raises(ValueError, match=r"Times\(forward=\(1, 2\)\): 2 times for 3 stages"):
        simulate(table, Times((1, 2)))


@pytest.mark.parametrize("bad", [-1, float("nan"), float("inf"), "1", (1, -2)])
def test_times_are_numbers(bad: object) -> None:
    with pytest.raises(ValueError, match="Times.weight=.*: times are numbers, 0 or more"):
        Times(weight=bad)  # pyright: ignore


def test_in_flight_in_whole_stages() -> None:
    assert simulate(interleaved(4, 8, 2)).in_flight == (5.5, 4.5, 3.5, 2.5)
    assert simulate(zero_bubble(4, 8)).in_flight == (7, 7, 7, 7)


def test_spans_do_not_overlap_and_stay_in_their_tick() -> None:
    table = zero_bubble_v(3, 5)
    for lockstep in (True, False):
        found = simulate(table, Times(1, 1.5, 0.5, 0.1), lockstep)
        for stage in range(3):
            mine = [span for span in found.spans if span.stage == stage]
            assert [span.op for span in mine] == table.order(stage)
            assert all(a.end <= b.start for a, b in zip(mine, mine[1:], strict=False))
