import contextlib
import io

import pytest

from cjax.train.display import Bar, LineDisplay, Remaining, Silent, make_display


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_and_a_file_gets_lines():
    assert isinstance(make_display(10, 0, True, io.StringIO()), LineDisplay)
    bar = make_display(10, 0, True, Terminal())
    assert isinstance(bar, Bar)
    bar.close()
    assert isinstance(make_display(10, 0, False, Terminal()), Silent)


def test_lines_come_now_and_then_and_at_the_end():
    stream = io.StringIO()
    display = LineDisplay(10, 0, stream, interval=1000)
    for step in range(1, 11):
        display.update(step, {"loss": f"{1 / step:.1f}"})
    assert [line.split("  left")[0] for line in stream.getvalue().splitlines()] == [
        "step 1/10  loss 1.0",
        "step 10/10  loss 0.1",
    ]


def test_what_is_left_follows_from_the_steps_of_this_run(monkeypatch):
    """A run that goes on at step 90 compiles for a minute, then takes 20 s for 10 steps: the last 4 take 8 s."""
    stream, now = io.StringIO(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    display = LineDisplay(105, 90, stream)
    display.phase("compiling")
    now[0] += 60
    display.update(91, {})
    now[0] += 20
    display.update(101, {})
    lines = stream.getvalue().splitlines()
    assert [lines[0], *(line.split("left ")[1] for line in lines[1:])] == ["compiling ...", "?", "0:08"]


def test_a_first_evaluation_that_compiles_is_no_measure_of_what_is_left(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    remaining = Remaining(100)
    assert remaining(1) is None
    for step in range(2, 11):
        now[0] += 0.5
        assert remaining(step) == pytest.approx(0.5 * (100 - step))
    now[0] += 30.0
    assert remaining(11) == pytest.approx(0.5 * 89)
    now[0] += 2.0  # a later one is
    assert remaining(12) == pytest.approx((9 * 0.5 + 2.0) / 10 * 88)
    remaining(5)  # gone back
    now[0] += 0.5
    assert remaining(6) == pytest.approx((10 * 0.5 + 2.0) / 11 * 94)


def test_lines_come_often_at_first(monkeypatch):
    stream, now = io.StringIO(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    display = LineDisplay(1000, 0, stream)
    for step in range(1, 300):
        display.update(step, {})
        now[0] += 0.25
    steps = [int(line.split()[1].split("/")[0]) for line in stream.getvalue().splitlines()]
    assert steps[:4] == [1, 5, 9, 17] and steps[-1] - steps[-2] == 40


def test_the_bar_shows_the_facts_and_notes():
    stream = Terminal()
    bar = Bar(10, 3, stream)
    bar.phase("compiling")
    bar.update(7, {"loss": "1.2345", "tokens/s": "9,876"})
    bar.note("validation [not markup] 2.0")
    bar.close()
    for part in ("compiling", "step 7/10", "loss", "1.2345", "9,876", "validation [not markup] 2.0"):
        assert part in stream.getvalue()


def test_a_log_on_a_full_disk_costs_its_lines_alone() -> None:
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # which says so once more as it is closed
        display = make_display(3, 0, True, full)
        display.phase("compiling")
        display.update(3, {"loss": "1"})
        display.note("done")
        display.close()
        shown = True
    assert shown
