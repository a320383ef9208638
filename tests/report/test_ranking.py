"""A ranking prints within the page, hides columns that nobody filled, and draws what it lists."""

import dataclasses
import re

import pytest

from cjax.report import Explained, Ranked, Ranking
from cjax.report.explained import about

PLANS = [
    Ranked(
        "data=8 zero=1", 8, {"matmul": 0.5, "data": 0.12}, (0.54, 0.72), 105_000, 0.41, 2**34, 2**36, True, 31.2, 6.5
    ),
    Ranked("data=4 tensor=2", 8, {"matmul": 0.7}, (0.6, 0.8), 90_000, 0.35, 2**33, 2**36, marks=("leanest",)),
]
FRONT = [(0.62, 2**34, "data=8 zero=1"), (0.7, 2**33, "data=4 tensor=2")]


def ranking(*plans: Ranked, **changes: object) -> Ranking:
    return Ranking("8 x H100", "time", plans or PLANS, 1200, 400, FRONT, **changes)  # type: ignore[arg-type]


def test_what_is_compiled_and_what_is_arithmetic() -> None:
    text = str(ranking())
    assert re.search(r"data=8 zero=1 +620 \(540-720\) +105,000 +41 % +=16\.0 +31\.20 +6\.5", text)
    assert re.search(r"data=4 tensor=2 +700 \(600-800\) +90,000 +35 % +~8\.0 +leanest", text)
    assert "best    data=8 zero=1: matmul 500, data 120" in text and "400 plans that fit, of 1,200" in text
    assert max(map(len, text.splitlines())) <= 100


def test_columns_that_nobody_filled_are_not_there() -> None:
    plain = [dataclasses.replace(each, parts={}, mfu=None, dollars=None, kwh=None, marks=()) for each in PLANS]
    text = str(ranking(*plain, notes=["nobody has measured these devices"]))
    assert (
        not re.search("step|tokens|MFU|kWh|marks|devices  ", text) and "GiB" in text and "nobody has measured" in text
    )
    assert "<svg" not in ranking(*plain)._repr_html_()


def test_a_plan_that_nobody_predicted_has_no_time_beside_one_that_somebody_did() -> None:
    text = str(ranking(PLANS[0], dataclasses.replace(PLANS[1], plan="data=8 disk=1TiB", parts={})))
    assert re.search(r"data=8 disk=1TiB  +35 % +~8\.0 +leanest", text) and "620 (540-720)" in text


def test_numbers_of_devices_are_shown_where_they_differ() -> None:
    assert "devices" not in str(ranking())
    assert "devices" in str(ranking(PLANS[0], dataclasses.replace(PLANS[1], num_devices=16)))


def test_the_picture_has_a_dot_for_each_plan_with_its_text() -> None:
    picture = ranking().picture
    assert picture.count("<circle") == 4 and picture.count('class="mark"') == 2 and "data=4 tensor=2" in picture
    places = [tuple(map(float, dot)) for dot in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', picture)]
    assert places[0] == places[2] and places[0][0] > places[1][0] and places[0][1] > places[1][1], "faster is lower"
    assert all(0 < x < 560 and 0 < y < 260 for x, y in places)
    assert picture.count("<svg") == 1 and ranking()._repr_html_().endswith(picture)


@pytest.mark.parametrize("spread", [1, 100])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_axes_have_round_numbers_whatever_the_scale(scale: float, spread: float) -> None:
    sizes = [scale * (1 + spread * i) for i in range(3)]
    plans = [dataclasses.replace(PLANS[0], parts={"matmul": size}, bytes=2**30 * size) for size in sizes]
    found = Ranking("x", "time", plans, 3, 3).picture
    assert len(re.findall(r'text-anchor="(?:end|middle)">[\d.e+-]+<', found)) >= 4


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.6183, "620"), (1.2371, "1,240"), (2.3456, "2,300"), (0.01234, "12"), (0.1251, "125")]
)
def test_a_time_has_the_digits_that_somebody_believes(seconds: float, text: str) -> None:
    assert about(seconds, seconds, seconds) == f"{text} ms ({text}-{text})"


def test_an_explanation_without_times() -> None:
    rows = [("zero=1", "zero=0", 0.5, 2.0**33, "as much to do"), ("zero=1", "zero=3", None, None, "heads 3: no")]
    found = Explained("zero=1", "8 x cpu", {}, (0, 0), {"params": 2.0**32}, 2**35, rows, ["nobody has measured"])
    text = str(found)
    assert "time unknown" in text and "about 4.0 of 32.0 GiB a device: params 4.0" in text
    assert re.search(r"zero=1 +zero=0 +- +8.0 +as much to do\n +zero=3 +- +- +heads 3: no", text)
    assert "<table>" in found._repr_html_()
