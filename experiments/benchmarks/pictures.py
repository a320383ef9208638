"""A picture of `bench_gpu.py`'s results: tokens a second and memory of each side, relative to cjax's."""

import html
import json
from pathlib import Path

COLORS = {"cjax": "#2b6cb0", "jax": "#a0aec0", "torch": "#dd6b20"}
NAMES = {"jax": "plain JAX", "torch": "torch.compile"}
BAR, GAP, LEFT, WIDE = 16, 14, 96, 300  # pixels


def draw(results: Path, picture: Path) -> None:
    """Writes an SVG of bars, a group for each row: on the left tokens a second, on the right the peak of memory."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for text in results.read_text().splitlines():
        found = json.loads(text)
        if "failed" not in found:
            rows.setdefault(found["row"], {})[found["side"]] = found
    parts: list[str] = []
    y = 30
    for name, sides in rows.items():
        middle = y + BAR * len(sides) / 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{html.escape(name)}</text>')
        for side, found in sides.items():
            for column, (key, unit, scale) in enumerate((("tokens/s", "", 1.0), ("peak", " GiB", 2**30))):
                most = max(other[key] for other in sides.values())
                x, length = LEFT + column * (WIDE + 110), WIDE * found[key] / most
                value = f"{found[key] / scale:,.0f}" if not unit else f"{found[key] / scale:.1f}{unit}"
                parts.append(f'<rect x="{x}" y="{y}" width="{length:.1f}" height="{BAR - 3}" fill="{COLORS[side]}"/>')
                parts.append(f'<text x="{x + length + 5:.1f}" y="{y + BAR - 6}">{value}</text>')
            y += BAR
        y += GAP
    for place, side in enumerate(COLORS):
        x = LEFT + 130 * place
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLORS[side]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 10}">{NAMES.get(side, side)}</text>')
    head = f'<text x="{LEFT}" y="18">tokens a second</text><text x="{LEFT + WIDE + 110}" y="18">peak memory</text>'
    width, height = LEFT + 2 * (WIDE + 110), y + 24
    picture.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>{head}{"".join(parts)}</svg>\n'
    )
