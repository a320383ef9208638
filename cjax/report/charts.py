"""Lines over a scale: SVG, written out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#d62728", "#2ca02c", "#1f77b4", "#9467bd", "#555555", "#ff7f0e")
WIDTH, HEIGHT, LEFT, TOP = 480, 260, 60, 56
DASHES = ("", ' stroke-dasharray="7 3"', ' stroke-dasharray="2 3"')  # where there are more lines than colours
MOST_MARKS = 30  # of a line; more run into one another
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over a scale. `low` and `high` are the ends of the vertical scale: what is beyond is drawn at its edge."""

    title: str
    unit: str
    across: str
    low: float
    high: float
    doubling: bool = False  # each mark of the horizontal scale is a multiple of the one before

    def svg(self, series: dict[str, Points]) -> str:
        places = sorted({x for points in series.values() for x, _ in points})
        drawn = [text(LEFT, 20, self.title, 13, "start"), text(LEFT, 38, self.unit, 11, "start"), *self._axes(places)]
        for i, (name, points) in enumerate(series.items()):
            color, dash = COLORS[i % len(COLORS)], DASHES[i // len(COLORS) % len(DASHES)]
            corners = [self._at(x, y, places) for x, y in points]
            path = "L".join(f"{x:.1f} {y:.1f}" for x, y in corners)
            drawn.append(f'<path d="M{path}" stroke="{color}" stroke-width="2" fill="none"{dash}/>')
            if len(points) <= MOST_MARKS:
                drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in corners]
            y = TOP + 10 + 18 * i
            drawn.append(f'<path d="M{LEFT + WIDTH + 12} {y}h18" stroke="{color}" stroke-width="3"{dash}/>')
            drawn.append(text(LEFT + WIDTH + 36, y + 4, name, 11, "start"))
        return picture(LEFT + WIDTH + 160, TOP + HEIGHT + 44, drawn)

    def _at(self, x: float, y: float, places: Sequence[float]) -> tuple[float, float]:
        first, last = (math.log(p) if self.doubling else p for p in (places[0], places[-1]))
        share = ((math.log(x) if self.doubling else x) - first) / ((last - first) or 1.0)
        up = (min(max(y, self.low), self.high) - self.low) / (self.high - self.low)
        return LEFT + 15 + (WIDTH - 30) * share, TOP + HEIGHT * (1 - up)

    def _axes(self, places: Sequence[float]) -> list[str]:
        drawn = [f'<path d="M{LEFT} {TOP}V{TOP + HEIGHT}h{WIDTH}" stroke="black" fill="none"/>']
        for x in places if self.doubling else places[:: max(1, len(places) // 6)]:
            drawn.append(text(self._at(x, 0, places)[0], TOP + HEIGHT + 16, f"{x:,.0f}", 10))
        drawn.append(text(LEFT + WIDTH / 2, TOP + HEIGHT + 34, self.across, 11))
        for quarter in range(5):
            y = self.low + (self.high - self.low) * quarter / 4
            drawn.append(
                text(
                    LEFT - 6,
                    self._at(places[0], y, places)[1] + 4,
                    f"{y:,.0f}" if abs(y) >= 1e4 else f"{y:.4g}",
                    10,
                    "end",
                )
            )
        return drawn


def text(x: float, y: float, said: str, size: int, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}">{escape(said)}</text>'


def picture(width: float, height: float, drawn: Sequence[str]) -> str:
    """What was drawn, on white."""
    size = f'width="{width:.0f}" height="{height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *drawn, "</svg>\n"])
