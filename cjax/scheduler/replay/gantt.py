"""Who held which devices when, as SVG."""

from collections.abc import Sequence
from html import escape

from cjax.scheduler.policy.job import Nodes
from cjax.scheduler.replay.simulate import Holding, Replayed

WIDTH, LEFT, TOP = 960, 62, 30  # pixels
MOST_ROW, MOST_HEIGHT = 12.0, 900.0
COLORS = ("#5b9bd5", "#e88c4a", "#6fbf73", "#c76bb5", "#d9b441", "#5fb7b7", "#a38bd6", "#d46a6a", "#8aa05a", "#9c8468")
STYLE = (
    "text{font:12px sans-serif;fill:#222}.line{stroke:#888;fill:none}"
    "@media(prefers-color-scheme:dark){.label{fill:#ddd}}"
)


def gantt_of(outcome: Replayed, nodes: Nodes) -> str:
    """A row for each device, time to the right; one color a job, and its name for the pointer over it."""
    holdings = outcome.holdings
    first, last = min(holding.start for holding in holdings), max(holding.end for holding in holdings)
    scale = WIDTH / max(last - first, 1e-9)
    row = min(MOST_ROW, MOST_HEIGHT / sum(nodes.values()))
    rows = {device: number for number, device in enumerate((n, d) for n, size in nodes.items() for d in range(size))}
    bottom = TOP + row * len(rows)
    colors = {name: COLORS[number % len(COLORS)] for number, name in enumerate(outcome.seconds)}
    drawn = [f'<text class="label" x="{LEFT}" y="18">{len(outcome.seconds)} jobs, {len(rows)} devices</text>']
    for node in nodes:
        y = TOP + row * rows[node, 0]
        drawn.append(f'<path class="line" d="M{LEFT} {y:g}h{WIDTH}" stroke-width=".3"/>')
        if nodes[node] * row >= 10:
            drawn.append(f'<text class="label" x="4" y="{y + nodes[node] * row / 2 + 4:g}">{escape(node)}</text>')
    for holding in holdings:
        x, width = LEFT + (holding.start - first) * scale, (holding.end - holding.start) * scale
        bars = "".join(
            f"M{x:.2f} {TOP + row * y:.2f}h{width:.2f}v{n * row:.2f}h-{width:.2f}z" for y, n in _runs(holding, rows)
        )
        what = f"{holding.job}: {sum(map(len, holding.placement.values()))} devices, {holding.start:g} to "
        what += f"{holding.end:g} s"
        drawn.append(f'<path d="{bars}" fill="{colors[holding.job]}"><title>{escape(what)}</title></path>')
    drawn.append(f'<text class="label" x="{LEFT}" y="{bottom + 16:g}">{first:g} s</text>')
    drawn.append(f'<text class="label" x="{LEFT + WIDTH}" y="{bottom + 16:g}" text-anchor="end">{last:g} s</text>')
    size = f'width="{LEFT + WIDTH + 12}" height="{bottom + 26:g}"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>', *drawn, "</svg>\n"])


def _runs(holding: Holding, rows: dict[tuple[str, int], int]) -> Sequence[tuple[int, int]]:
    """Neighbouring rows of what is held: the first, and how many."""
    found: list[tuple[int, int]] = []
    for number in sorted(rows[node, device] for node, devices in holding.placement.items() for device in devices):
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
