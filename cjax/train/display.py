"""What a run shows while it goes: a bar in a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TextIO

from cjax.train.callbacks import Callback, Training
from cjax.train.writers import flat


class Display(Protocol):
    """Where a run says how it goes."""

    def phase(self, text: str) -> None:
        """What is done before the first step, that takes its time."""
        ...

    def update(self, step: int, facts: Mapping[str, str]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


def make_display(num_steps: int, first: int, is_first_process: bool, stream: TextIO | None = None) -> Display:
    """The display that suits where the output goes.

    Args:
        num_steps: of the whole run.
        first: the step the run starts after.
        is_first_process: the others show nothing.
        stream: standard error unless said, so that what a program prints stays apart.
    """
    output: TextIO = sys.stderr if stream is None else stream
    if not is_first_process:
        return Silent()
    if output.isatty():
        try:
            return Bar(num_steps, first, output)
        except ImportError:
            pass  # the extra `cli` is not there; plain lines say the same
    return LineDisplay(num_steps, first, output)


class Silent:
    """Shows nothing."""

    def phase(self, text: str) -> None: ...

    def update(self, step: int, facts: Mapping[str, str]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class Remaining:
    """How long a run will take still, from the steps that are done.

    What came before the first of them was compiling, which says nothing of how long steps take; and so was, most
    likely, the longest pause between two of them, in which the first evaluation was compiled.

    >>> remaining = Remaining(num_steps=10)
    >>> remaining(1)  # None: nothing is known yet
    """

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._last: tuple[float, int] | None = None
        self._seconds, self._steps = 0.0, 0
        self._longest = (0.0, 0)

    def __call__(self, step: int) -> float | None:
        """Seconds, now that this step is done."""
        now = time.monotonic()
        if self._last is not None and step > self._last[1]:
            seconds, steps = now - self._last[0], step - self._last[1]
            self._seconds, self._steps = self._seconds + seconds, self._steps + steps
            self._longest = max(self._longest, (seconds, steps))
        self._last = (now, step)
        if not self._steps:
            return None
        seconds, steps = self._seconds - self._longest[0], self._steps - self._longest[1]
        each = seconds / steps if steps else self._seconds / self._steps
        return each * (self._num_steps - step)


class LineDisplay:
    """A line now and then: often at first, then about every ten seconds."""

    def __init__(self, num_steps: int, first: int, stream: TextIO, interval: float = 10.0):
        self._num_steps, self._stream, self._interval = num_steps, stream, interval
        self._last, self._begun = float("-inf"), float("inf")
        self._remaining = Remaining(num_steps)

    def phase(self, text: str) -> None:
        self.note(f"{text} ...")

    def update(self, step: int, facts: Mapping[str, str]) -> None:
        now = time.monotonic()
        self._begun = min(self._begun, now)
        left = _clock(self._remaining(step))
        interval = min(self._interval, max(1.0, (now - self._begun) / 2))
        if now - self._last < interval and step < self._num_steps:
            return
        self._last = now
        text = "  ".join(f"{name} {value}" for name, value in facts.items())
        self.note(f"step {step}/{self._num_steps}  {text}  left {left}")

    def note(self, text: str) -> None:
        with contextlib.suppress(OSError):  # a log on a disk that is full costs its lines, and no training
            print(text, file=self._stream, flush=True)

    def close(self) -> None: ...


class Bar:
    """A progress bar."""

    def __init__(self, num_steps: int, first: int, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = ("step {task.completed}/{task.total}", "{task.fields[facts]}")
        self._progress = Progress(
            TextColumn(columns[0]),
            BarColumn(bar_width=24),
            TextColumn(columns[1]),
            console=Console(file=stream),
        )
        self._remaining = Remaining(num_steps)
        self._task = self._progress.add_task("", total=num_steps, completed=first, facts="")
        self._progress.start()

    def phase(self, text: str) -> None:
        self._progress.update(self._task, facts=text, refresh=True)  # no step will do so for a while

    def update(self, step: int, facts: Mapping[str, str]) -> None:
        facts = {**facts, "left": _clock(self._remaining(step))}
        text = "  ".join(f"[dim]{name}[/dim] {value}" for name, value in facts.items())
        self._progress.update(self._task, completed=step, facts=text)

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


class Progress(Callback):
    """Shows what steps and evaluations give.

    Args:
        display: where.
        names: of the numbers of a step that are shown, besides the loss.
    """

    def __init__(self, display: Display, names: Sequence[str]):
        self._display, self._names = display, ("loss", *names)

    def on_step(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        self._display.update(step, format_facts({name: values[name] for name in self._names if name in values}))

    def on_evaluate(self, training: Training, step: int, values: Mapping[str, Any]) -> None:
        said = ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in flat(values).items())
        self._display.note(f"step {step}: {said}")


def format_facts(values: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of a step as people read them.

    >>> format_facts({"loss": 2.34567, "tokens/s": 12345.6, "mfu": 0.413, "memory": 3 * 2**30})
    {'loss': '2.3457', 'tokens/s': '12,346', 'mfu': '41.3 %', 'memory': '3.0 GiB'}
    """

    def text(name: str, value: Any) -> str:
        if name == "learning_rate":
            return f"{value:.3g}"
        if name == "mfu":
            return f"{100 * value:.1f} %"
        if name == "memory":
            return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
        return f"{value:,.0f}" if name.endswith("/s") else f"{value:.4f}"

    return {name: text(name, value) for name, value in values.items() if isinstance(value, (int, float))}


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
