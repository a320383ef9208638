"""The best plans of a search side by side, with what is predicted of each; in notebooks with a picture of the trade."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from cjax.report.explained import about, parts_text
from cjax.report.render import Lines, Sheet, Table

WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 560, 260, 64, 40, 16
STYLE = (
    "text{font:12px sans-serif;fill:#808080}path{fill:none;stroke:#808080}"
    "circle{fill:#4c72b0}.mark{fill:#dd8452}.front{stroke:#4c72b0;stroke-opacity:.5}"
)


@dataclass(frozen=True)
class Ranked:
    """One plan of a ranking.

    Args:
      plan: its text.
      num_devices: how many devices it is for.
      parts: seconds of a step by what they are spent on; empty where nobody has measured the devices.
      interval: seconds between which 80 of 100 steps would be.
      tokens_per_second: of all devices.
      mfu: the model's own arithmetic as a share of what the devices could do.
      bytes, limit: a device's, and what it has.
      is_exact: whether `bytes` is the compiled program's.
      dollars, kwh: for 10^9 tokens.
      marks: what it is the best at: "fastest", "leanest", "fewest devices", "cheapest".

    `cjax.report.Ranking` has an example.
    """

    plan: str
    num_devices: int
    parts: Mapping[str, float]
    interval: tuple[float, float]
    tokens_per_second: float
    mfu: float | None
    bytes: float
    limit: int
    is_exact: bool = False
    dollars: float | None = None
    kwh: float | None = None
    marks: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Of a step: its parts together."""
        return sum(self.parts.values())


@dataclass(frozen=True, repr=False)
class Ranking(Sheet):
    """Plans in the order of an objective; prints as text, shows as HTML in a notebook.

    Args:
      on: what they are for, such as "64 x NVIDIA H100 80GB HBM3".
      objective: what was to be least.
      plans: the best, then those with a mark that are not among them.
      num_plans, num_fitting: how many there are in all.
      front: of all plans that fit, (seconds, bytes, plan) of those that no other beats in both.
      notes: what else there is to say.

    >>> time, interval, memory = {"matmul": 0.62}, (0.54, 0.72), 2**34
    >>> plan = Ranked("data=8 zero=1", 8, time, interval, 105_000, 0.41, memory, 2**36, marks=("fastest",))
    >>> print(Ranking("8 x H100", "time", [plan], 1200, 400))
    on      8 x H100
    of      400 plans that fit, of 1,200
    best    data=8 zero=1: matmul 620
    <BLANKLINE>
    plan           step, ms       tokens/s   MFU    GiB  marks
    -------------  -------------  --------  ----  -----  -------
    data=8 zero=1  620 (540-720)   105,000  41 %  ~16.0  fastest
    """

    on: str
    objective: str
    plans: Sequence[Ranked]
    num_plans: int
    num_fitting: int
    front: Sequence[tuple[float, float, str]] = ()
    notes: Sequence[str] = field(default_factory=tuple)

    @property
    def best(self) -> Ranked:
        """The first row."""
        return self.plans[0]

    def _repr_html_(self) -> str:
        return super()._repr_html_() + self.picture

    def _lines(self) -> Lines:
        many = f"{self.num_fitting:,} plans that fit, of {self.num_plans:,}"
        least = "" if self.objective == "time" else f"; least {self.objective} first"
        lines = [("on", self.on), ("of", many + least)]
        if self.plans and self.plans[0].parts:
            lines.append(("best", f"{self.plans[0].plan}: {parts_text(self.plans[0].parts)}"))
        return Lines([*lines, *(("note", note) for note in self.notes)])

    def _table(self) -> Table:
        has = {
            "devices": len({each.num_devices for each in self.plans}) > 1,
            "step, ms": any(each.parts for each in self.plans),
            "tokens/s": any(each.parts for each in self.plans),
            "MFU": any(each.mfu is not None for each in self.plans),
            "$": any(each.dollars is not None for each in self.plans),
            "kWh": any(each.kwh is not None for each in self.plans),
            "marks": any(each.marks for each in self.plans),
        }
        titles = ["plan", "devices", "step, ms", "tokens/s", "MFU", "GiB", "$", "kWh", "marks"]
        shown = [title for title in titles if has.get(title, True)]
        cells = [{title: cell for title, cell in zip(titles, _cells(each), strict=True)} for each in self.plans]
        per = {"$": "$ / 10^9 tokens", "kWh": "kWh / 10^9 tokens"}
        right = frozenset(i for i, title in enumerate(shown) if title not in ("plan", "marks", "step, ms"))
        rows = [tuple(row[title] for title in shown) for row in cells]
        return Table([per.get(title, title) for title in shown], rows, right=right)

    @property
    def picture(self) -> str:
        """Time against memory as self-contained SVG: all plans that no other beats in both, those listed numbered."""
        listed = [(each.seconds, each.bytes, each.plan) for each in self.plans if each.parts]
        points = [*self.front, *listed] if listed else []
        if len({point[:2] for point in points}) < 2:
            return ""
        x = _Scale([size / 2**30 for _, size, _ in points], LEFT, WIDTH - EDGE)
        y = _Scale([seconds * 1e3 for seconds, _, _ in points], HEIGHT - BOTTOM, EDGE)
        drawn = [f'<path d="M{LEFT} {EDGE}V{HEIGHT - BOTTOM}H{WIDTH - EDGE}"/>']
        for value in x.ticks:
            drawn.append(_text(x(value), HEIGHT - BOTTOM + 16, f"{value:g}", "middle"))
        for value in y.ticks:
            drawn.append(_text(LEFT - 6, y(value) + 4, f"{value:g}", "end"))
        drawn.append(_text(WIDTH / 2, HEIGHT - 6, "GiB a device", "middle"))
        drawn.append(_text(4, 12, "ms a step"))
        at = [(x(size / 2**30), y(seconds * 1e3), plan) for seconds, size, plan in self.front]
        if at:
            drawn.append(f'<path class="front" d="M{"L".join(f"{left:.1f} {top:.1f}" for left, top, _ in at)}"/>')
        drawn += [_dot(left, top, plan, "", 3) for left, top, plan in at]
        for number, (seconds, size, plan) in enumerate(listed, 1):
            left, top = x(size / 2**30), y(seconds * 1e3)
            drawn += [_dot(left, top, plan, "mark", 5), _text(left + 7, top - 5, str(number))]
        size = f'width="{WIDTH}" height="{HEIGHT}"'
        return "\n".join(
            [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>', *drawn, "</svg>\n"]
        )


def _cells(each: Ranked) -> list[str]:
    sign = "=" if each.is_exact else "~"
    return [
        each.plan,
        f"{each.num_devices:,}",
        about(each.seconds, *each.interval).replace(" ms", "") if each.parts else "",
        f"{each.tokens_per_second:,.0f}" if each.parts else "",
        "" if each.mfu is None else f"{each.mfu:.0%}".replace("%", " %"),
        f"{sign}{each.bytes / 2**30:,.1f}" if each.bytes >= 2**30 / 20 else f"{sign}{each.bytes / 2**30:.2g}",
        "" if each.dollars is None else f"{each.dollars:,.2f}" if each.dollars < 100 else f"{each.dollars:,.0f}",
        "" if each.kwh is None else f"{each.kwh:,.3g}" if each.kwh < 100 else f"{each.kwh:,.0f}",
        ", ".join(each.marks),
    ]


class _Scale:
    """From values to places, logarithmic where they span more than one order."""

    def __init__(self, values: Sequence[float], start: float, stop: float) -> None:
        low, high = min(values), max(values)
        self._log = low > 0 and high > 10 * low
        self._low, self._high = self._f(low), self._f(high)
        if self._low == self._high:
            self._high += 1
        margin = 0.05 * (self._high - self._low)
        self._low, self._high = self._low - margin, self._high + margin
        self._start, self._stop = start, stop

    def _f(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def __call__(self, value: float) -> float:
        return self._start + (self._f(value) - self._low) / (self._high - self._low) * (self._stop - self._start)

    @property
    def ticks(self) -> list[float]:
        """Round values within the range."""
        if self._log:
            powers = range(math.floor(self._low), math.ceil(self._high) + 1)
            found = [base * 10.0**power for power in powers for base in (1, 2, 5)]
            return [value for value in found if self._low <= math.log10(value) <= self._high]
        step = 10 ** math.floor(math.log10((self._high - self._low) / 2))
        step *= next(each for each in (1, 2, 5, 10) if (self._high - self._low) / (each * step) <= 6)
        first = math.ceil(self._low / step)
        return [round(i * step, 10) for i in range(first, math.floor(self._high / step) + 1)]


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(x: float, y: float, plan: str, kind: str, radius: int) -> str:
    mark = f' class="{kind}"' if kind else ""
    return f'<circle{mark} cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{escape(plan)}</title></circle>'
