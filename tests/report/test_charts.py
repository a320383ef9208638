"""A chart is drawn to its scale, and says in words what it shows."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from cjax.report.charts import COLORS, HEIGHT, TOP, Chart, Points


def lines(chart: Chart, **series: Points) -> list[tuple[dict[str, Any], list[tuple[float, float]]]]:
    """The attributes of each line, and its corners."""
    drawn = ET.fromstring(chart.svg(series)).findall("{*}path")
    found = [path.attrib for path in drawn if path.get("stroke-width") == "2"]
    return [(each, [tuple(map(float, at.split())) for at in re.split("[ML]", each["d"])[1:]]) for each in found]  # type: ignore[misc]


CHART = Chart("Loss", "nats", "steps", low=0.0, high=4.0)


def test_what_is_beyond_the_scale_is_at_its_edge() -> None:
    ((_, corners),) = lines(CHART, a=[(1, 9.0), (2, 4.0), (3, 1.0), (4, -7.0)])
    heights = [y for _, y in corners]
    assert heights == pytest.approx([TOP, TOP, TOP + HEIGHT * 3 / 4, TOP + HEIGHT])


@pytest.mark.parametrize("doubling", [False, True])
def test_powers_are_as_far_apart_as_their_scale_says(doubling: bool) -> None:
    chart = Chart("t", "u", "GPUs", 0.0, 1.0, doubling)
    ((_, corners),) = lines(chart, a=[(8, 0.1), (16, 0.5), (32, 0.9)])
    first, second, third = (x for x, _ in corners)
    assert (second - first) / (third - first) == pytest.approx(1 / 2 if doubling else 1 / 3, abs=1e-3)


def test_lines_are_told_apart_where_there_are_more_than_colours() -> None:
    names = [f"line {i}" for i in range(2 * len(COLORS))]
    drawn = lines(CHART, **{name: [(0.0, 1.0), (1.0, 2.0)] for name in names})
    looks = {(each["stroke"], each.get("stroke-dasharray", "")) for each, _ in drawn}
    assert len(drawn) == len(looks) == len(names)


def test_words_are_no_markup() -> None:
    texts = [each.text for each in ET.fromstring(Chart("<a> & b", "u", "x", 0, 1).svg({"<c>": [(0, 0)]})) if each.text]
    assert texts[0] == "<a> & b" and texts[-1] == "<c>"
