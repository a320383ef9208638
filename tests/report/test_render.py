from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cjax.report.render import WIDTH, Lines, Table, bytes_unit, flops_text, fraction_text, milliseconds, wrap

words = st.text("abcdefgh_/ 0123456789", max_size=150)


class Cells(HTMLParser):
    """Collects the text of every cell, as a browser would show it, and refuses tags that cjax doesn't write."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.cells: list[str] = []
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        assert tag in ("table", "thead", "tbody", "tr", "th", "td")
        if tag in ("th", "td"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.cells[-1] += data


@pytest.mark.parametrize(
    "size, text",
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1536, "1.5 KiB"),
        (3 * 2**20, "3.0 MiB"),
        (41.2 * 2**30, "41.2 GiB"),
        (5000 * 2**30, "5,000.0 GiB"),
    ],
)
def test_bytes(size: float, text: str) -> None:
    unit = bytes_unit(size)
    assert f"{unit(size)} {unit.name}" == text


def test_one_unit_for_all_and_nothing_vanishes() -> None:
    unit = bytes_unit(None, 2**30, 5)
    assert unit.name == "GiB" and unit(5) == "<0.1" and unit(0) == "0"


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0, "0"),
        (0.212, "212"),
        (0.0142, "14.2"),
        (0.014, "14"),
        (0.00123, "1.23"),
        (1.5, "1,500"),
        (1e-9, "<0.001"),
        (0.1, "100"),
        (0.02, "20"),
    ],
)
def test_milliseconds(seconds: float, text: str) -> None:
    assert milliseconds(seconds) == text


@pytest.mark.parametrize(
    "share, text",
    [(1, "whole"), (1 / 8, "1/8"), (0.2503, "1/4"), (0.21, "1/4.8"), (0.9, "0.9"), (0, "0"), (1e-3, "1/1,000")],
)
def test_fractions(share: float, text: str) -> None:
    assert fraction_text(share) == text


def test_flops() -> None:
    assert flops_text(1.25e12) == "1.2 TFLOP" and flops_text(12) == "12 FLOP"


@given(words, st.integers(12, 60))
def test_wrapping_keeps_the_text_and_the_width(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(len(line) <= width for line in lines)
    if all(len(piece) < width for word in text.split() for piece in word.split("/")):
        assert "".join("".join(lines).split()) == "".join(text.split())


@given(st.lists(st.tuples(words, words, st.integers(0, 10**9).map(str), words), min_size=1, max_size=4))
def test_tables_fit_the_page_and_keep_figures(rows: list[tuple[str, ...]]) -> None:
    text = Table(("a", "b", "a rather long title of figures", "d"), rows, right=frozenset({2})).text()
    assert all(len(line) <= WIDTH for line in text.splitlines())
    assert all(row[2] in text for row in rows)
    title = text.splitlines()[0]
    assert title.startswith("a ")


@given(st.lists(st.tuples(words.filter(str.strip), words), min_size=1, max_size=3))
def test_notes_fit_the_page(rows: list[tuple[str, str]]) -> None:
    text = Table(("plan", "fits", "memory"), rows).text()
    assert all(len(line) <= WIDTH for line in text.splitlines())


def test_titles_over_figures_are_narrowed_where_figures_leave_room() -> None:
    title, figures = ("a", "b", "c", "d", "number", "words over a small figure"), ("9" * 30, "1")
    text = Table((*title,), [("some words here and more",) * 4 + figures], right=frozenset({4, 5})).text()
    assert all(len(line) <= WIDTH for line in text.splitlines()) and "9" * 30 in text


def test_lines_keep_a_name_with_its_number() -> None:
    text = Lines([("fits", ", ".join(f"compiler {n}.5" for n in range(20)))]).text()
    assert len(text.splitlines()) > 1 and all(len(line) <= WIDTH for line in text.splitlines())
    assert "compiler\n" not in text and all(line.startswith("        ") for line in text.splitlines()[1:])


@example("<b>&amp;</b>")
@given(st.text(st.characters(exclude_categories=["Cs", "Cc"])))
def test_html_shows_what_was_said(text: str) -> None:
    assert Cells(Lines([(text, text)]).html()).cells == [text, text]
    assert Cells(Table(("<a>", "b", "c"), [(text, "&", "'"), (text, text)]).html()).cells == [
        "<a>", "b", "c", text, "&", "'", text, text
    ]  # fmt: skip
