"""The chart of who held which devices when, to its scale."""

import re
import xml.etree.ElementTree as ET

import pytest

from cjax.scheduler.replay.gantt import LEFT, TOP, WIDTH, gantt_of
from cjax.scheduler.replay.simulate import Holding, Replayed

NODES = {"a": 4, "<b>": 2}
HOLDINGS = (
    Holding("first", {"a": (0, 1, 3)}, 100.0, 200.0),
    Holding("<second>", {"a": (2,), "<b>": (0, 1)}, 150.0, 300.0),
)
OUTCOME = Replayed({"first": 100.0, "<second>": 200.0}, 200.0, 0.5, 0.5, {"first": 0, "<second>": 0}, HOLDINGS)


def bars() -> dict[str, list[tuple[float, float, float, float]]]:
    """By what it is called: left, top, width and height of each part."""
    found = {}
    for path in ET.fromstring(gantt_of(OUTCOME, NODES)).findall("{*}path"):
        title = path.find("{*}title")
        if title is not None and title.text:
            number = r"(-?[\d.]+)"
            parts = re.findall(rf"M{number} {number}h{number}v{number}h", path.get("d", ""))
            found[title.text] = [tuple(map(float, part)) for part in parts]
    return found


def test_spans_lie_where_they_were_and_are_as_long() -> None:
    first, second = (bars()[each] for each in ("first: 3 devices, 100 to 200 s", "<second>: 3 devices, 150 to 300 s"))
    row = 12.0
    assert first == [(LEFT, TOP, WIDTH / 2, 2 * row), (LEFT, TOP + 3 * row, WIDTH / 2, row)]
    assert second == [
        pytest.approx((LEFT + WIDTH / 4, TOP + 2 * row, WIDTH * 3 / 4, row)),
        pytest.approx((LEFT + WIDTH / 4, TOP + 4 * row, WIDTH * 3 / 4, 2 * row)),
    ]


def test_the_scale_and_the_nodes_are_named() -> None:
    texts = [each.text for each in ET.fromstring(gantt_of(OUTCOME, NODES)).findall("{*}text")]
    assert texts == ["2 jobs, 6 devices", "a", "<b>", "100 s", "300 s"]
