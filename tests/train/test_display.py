import io

from cjax.train.display import Bar, LineDisplay, Silent, make_display


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
    """A run that goes on at step 90 has taken 20 s for 10 steps: the last 5 take half as long."""
    stream, now = io.StringIO(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    display = LineDisplay(105, 90, stream)
    now[0] += 20
    display.update(100, {})
    assert stream.getvalue().endswith("left 0:10\n")


def test_the_bar_shows_the_facts_and_notes():
    stream = Terminal()
    bar = Bar(10, 3, stream)
    bar.update(7, {"loss": "1.2345", "tokens/s": "9,876"})
    bar.note("validation [not markup] 2.0")
    bar.close()
    for part in ("step 7/10", "loss", "1.2345", "9,876", "validation [not markup] 2.0"):
        assert part in stream.getvalue()
