"""What a run shows while it goes: a bar in a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol, TextIO


class Display(Protocol):
    """Where a run says how it goes."""

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

    def update(self, step: int, facts: Mapping[str, str]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class LineDisplay:
    """A line now and then: often at first, then about every ten seconds."""

    def __init__(self, num_steps: int, first: int, stream: TextIO, interval: float = 10.0):
        self._num_steps, self._stream, self._interval = num_steps, stream, interval
        self._first, self._begin, self._last = first, time.monotonic(), float("-inf")

    def update(self, step: int, facts: Mapping[str, str]) -> None:
        now = time.monotonic()
        if now - self._last < self._interval and step < self._num_steps:
            return
        self._last = now
        text = "  ".join(f"{name} {value}" for name, value in facts.items())
        left = (now - self._begin) / max(step - self._first, 1) * (self._num_steps - step)
        print(f"step {step}/{self._num_steps}  {text}  left {_clock(left)}", file=self._stream, flush=True)

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None: ...


class Bar:
    """A progress bar."""

    def __init__(self, num_steps: int, first: int, stream: TextIO):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = ("step {task.completed}/{task.total}", "{task.fields[facts]}")
        self._progress = Progress(
            TextColumn(columns[0]),
            BarColumn(bar_width=24),
            TextColumn(columns[1]),
            TimeRemainingColumn(),
            console=Console(file=stream),
        )
        self._task = self._progress.add_task("", total=num_steps, completed=first, facts="compiling")
        self._progress.start()

    def update(self, step: int, facts: Mapping[str, str]) -> None:
        text = "  ".join(f"[dim]{name}[/dim] {value}" for name, value in facts.items())
        self._progress.update(self._task, completed=step, facts=text)

    def note(self, text: str) -> None:
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def format_facts(values: Mapping[str, Any]) -> dict[str, str]:
    """The numbers of a step as people read them.

    >>> format_facts({"loss": 2.34567, "tokens/s": 12345.6, "mfu": 0.413, "memory": 3 * 2**30})
    {'loss': '2.3457', 'tokens/s': '12,346', 'mfu': '41.3 %', 'memory': '3.0 GiB'}
    """

    def text(name: str, value: Any) -> str:
        if name == "mfu":
            return f"{100 * value:.1f} %"
        if name == "memory":
            return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
        return f"{value:,.0f}" if name.endswith("/s") else f"{value:.4f}"

    return {name: text(name, value) for name, value in values.items() if isinstance(value, (int, float))}


def _clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
