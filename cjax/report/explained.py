"""Why a plan: each of its words beside the nearest other values, and what these would cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cjax.report.render import Lines, Sheet, Table, milliseconds

Row = tuple[str, str, float | None, float | None, str]


@dataclass(frozen=True, repr=False)
class Explained(Sheet):
    """What each word of a plan is there for; prints as text, shows as HTML in a notebook.

    Args:
      plan: text of the plan.
      devices: what it is for, such as "64 x H100".
      time: seconds of a step by what they are spent on; empty where nobody knows how fast the devices are.
      interval: seconds between which 80 of 100 steps would be.
      memory: bytes a device, by use.
      limit: bytes that a device has.
      rows: a word of the plan, another value of it, the step's seconds and the bytes with that (None where it can't be
        had), and what that costs or why it can't be.
      notes: what else there is to say.

    >>> rows = [("tensor=2", "tensor=4", 0.658, 2**33, "+38 ms of transfers")]
    >>> print(Explained("tensor=2", "8 x H100", {"matmul": 0.62}, (0.54, 0.72), {"params": 2**34}, 2**36, rows))
    plan    tensor=2
    on      8 x H100
    step    about 620 ms (540-720): matmul 620
    memory  about 16.0 of 64.0 GiB a device: params 16.0
    <BLANKLINE>
    word      instead   step, ms  GiB  what it costs
    --------  --------  --------  ---  -------------------
    tensor=2  tensor=4       658  8.0  +38 ms of transfers
    """

    plan: str
    devices: str
    time: Mapping[str, float]
    interval: tuple[float, float]
    memory: Mapping[str, float]
    limit: int
    rows: Sequence[Row]
    notes: Sequence[str] = ()

    def _lines(self) -> Lines:
        step = f"about {about(sum(self.time.values()), *self.interval)}: {parts_text(self.time)}"
        uses = ", ".join(f"{use} {_gib(size)}" for use, size in self.memory.items() if size >= 0.05 * 2**30)
        memory = f"about {_gib(sum(self.memory.values()))} of {_gib(self.limit)} GiB a device"
        lines = [("plan", self.plan), ("on", self.devices)]
        lines += [("step", step if self.time else "time unknown: nobody has measured these devices")]
        lines += [("memory", f"{memory}: {uses}" if uses else memory)]
        return Lines([*lines, *(("note", note) for note in self.notes)])

    def _table(self) -> Table:
        rows, last = [], ""
        for word, instead, seconds, size, cost in self.rows:
            shown = ["" if word == last else word, instead]
            times = milliseconds(seconds) if seconds is not None and self.time else "-"
            rows.append((*shown, times, _gib(size) if size is not None else "-", cost))
            last = word
        title = ("word", "instead", "step, ms", "GiB", "what it costs")
        return Table(title, rows, right=frozenset({2, 3}))


def about(seconds: float, low: float, high: float) -> str:
    """A time and the interval around it: `620 ms (540-720)`, to as many digits as anybody believes."""
    return f"{_rounded(seconds)} ms ({_rounded(low)}-{_rounded(high)})"


def parts_text(parts: Mapping[str, float]) -> str:
    """What a time is spent on, in ms, the most first; what is next to nothing is left out."""
    total = sum(parts.values())
    shown = {name: seconds for name, seconds in parts.items() if seconds > 0.002 * total}
    ordered = sorted(shown.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in ordered)


def _rounded(seconds: float) -> str:
    """Two or three digits: 1,240 for 1.2371 s, 620 for 0.6183 s."""
    value = seconds * 1e3
    if value < 100:
        return milliseconds(float(f"{value:.2g}") / 1e3)
    return f"{int(float(f'{value:.3g}' if str(int(value))[0] == '1' else f'{value:.2g}')):,}"


def _gib(size: float) -> str:
    return f"{size / 2**30:,.1f}" if size >= 0.05 * 2**30 else "<0.1"
