"""Numbers with units, labelled lines and tables, each as text of at most 100 columns and as HTML."""

import abc
import html
import itertools
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WIDTH = 100
INDENT = 8  # of labelled lines: the longest label and a space
MIN_COLUMN = 12  # columns of text are not narrowed below this
GAP = "  "

_BYTES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))
_FLOPS = (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6), ("FLOP", 1.0))


@dataclass(frozen=True)
class Unit:
    """A unit that all figures of a line or a column share, so that they can be compared at a glance."""

    name: str
    scale: float

    def __call__(self, value: float) -> str:
        scaled = value / self.scale
        if self.scale == 1 or value == 0:
            return f"{scaled:,.0f}"
        if 0 < scaled < 0.05:
            return "<0.1"
        return f"{scaled:,.1f}"


def bytes_unit(*values: float | None) -> Unit:
    """The unit of bytes that suits the largest of `values`."""
    return _unit(_BYTES, values)


def flops_text(value: float) -> str:
    """Operations with a unit: `1.2 TFLOP`."""
    unit = _unit(_FLOPS, (value,))
    return f"{unit(value)} {unit.name}"


def milliseconds(seconds: float) -> str:
    """Three significant digits, in ms: 0.0142 is `14.2`, 1.5 is `1,500`."""
    value = seconds * 1e3
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    text = f"{value:,.{digits}f}"
    if value and not float(text.replace(",", "")):
        return "<0.001"
    return text.rstrip("0").rstrip(".") if "." in text else text


def fraction_text(share: float) -> str:
    """A share as people say it: `1/8`, `whole`, or `0.9` where it is neither."""
    if share > 0.995:
        return "whole"
    if share <= 0:
        return "0"
    times = 1 / share
    if times < 1.5:
        return f"{share:.2g}"
    return f"1/{round(times):,}" if abs(times - round(times)) < 0.02 * times else f"1/{times:.2g}"


def _unit(units: tuple[tuple[str, float], ...], values: Iterable[float | None]) -> Unit:
    largest = max((value for value in values if value is not None), default=0)
    return Unit(*next((unit for unit in units if largest >= unit[1]), units[-1]))


@dataclass(frozen=True)
class Lines:
    """Labelled lines of prose: `fits    41.2 of ...`."""

    lines: Sequence[tuple[str, str]]

    def text(self) -> str:
        return "\n".join(self._fill(label, words) for label, words in self.lines)

    def _fill(self, label: str, words: str) -> str:
        glued = re.sub(r"(?<=\w) (?=<?\d)", "\N{NO-BREAK SPACE}", words)  # `compiler 2.4` stays on one line
        indent = " " * INDENT
        filled = textwrap.fill(
            glued,
            WIDTH,
            initial_indent=indent,
            subsequent_indent=indent,
            break_on_hyphens=False,
            break_long_words=False,
        )
        return label.ljust(INDENT) + filled[INDENT:].replace("\N{NO-BREAK SPACE}", " ")

    def html(self) -> str:
        rows = "".join(
            f"<tr><th style='text-align:left'>{html.escape(label)}</th>"
            f"<td style='text-align:left'>{html.escape(words)}</td></tr>"
            for label, words in self.lines
        )
        return f"<table>{rows}</table>"


@dataclass(frozen=True)
class Table:
    """A titled table; `right` has the columns of figures. A row shorter than the title is a note across the rest."""

    title: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: frozenset[int] = frozenset()

    def text(self) -> str:
        widths = self._widths()
        lines = [*self._cells(self.title, widths), "  ".join("-" * width for width in widths)]
        for row in self.rows:
            lines += self._cells(row, widths) if len(row) == len(self.title) else self._note(row, widths)
        return "\n".join(line.rstrip() for line in lines)

    def _widths(self) -> list[int]:
        """As wide as the cells, then narrowed to the page: first titles over figures, then text, never figures."""
        cells = [
            [row[column] for row in self.rows if len(row) > column + 1 or len(row) == len(self.title)]
            for column in range(len(self.title))
        ]
        widths = [max(map(len, [name, *column])) for name, column in zip(self.title, cells, strict=True)]
        least = [
            max(map(len, [*name.split(), *column])) if index in self.right else min(MIN_COLUMN, width)
            for index, (name, column, width) in enumerate(zip(self.title, cells, widths, strict=True))
        ]
        for columns in (self.right, set(range(len(widths))) - self.right):
            while sum(widths) + len(GAP) * (len(widths) - 1) > WIDTH:
                widest = max(columns, key=lambda column: (widths[column] > least[column], widths[column]), default=-1)
                if widest < 0 or widths[widest] <= least[widest]:
                    break
                widths[widest] -= 1
        return widths

    def _cells(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        columns = [wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
        return [
            GAP.join(
                piece.rjust(width) if column in self.right else piece.ljust(width)
                for column, (piece, width) in enumerate(zip(pieces, widths, strict=True))
            )
            for pieces in itertools.zip_longest(*columns, fillvalue="")
        ]

    def _note(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        *cells, note = row
        start = sum(widths[: len(cells)]) + len(GAP) * len(cells)
        notes = [piece for line in note.splitlines() for piece in wrap(line, WIDTH - start)]
        columns = [*(wrap(cell, width) for cell, width in zip(cells, widths, strict=False)), notes]
        return [
            GAP.join(piece.ljust(width) for piece, width in zip(pieces, [*widths[: len(cells)], 0], strict=True))
            for pieces in itertools.zip_longest(*columns, fillvalue="")
        ]

    def html(self) -> str:
        head = "".join(self._cell("th", name, column) for column, name in enumerate(self.title))
        body = "".join(f"<tr>{self._row_html(row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _row_html(self, row: Sequence[str]) -> str:
        if len(row) == len(self.title):
            return "".join(self._cell("td", cell, column) for column, cell in enumerate(row))
        *cells, note = row
        span = len(self.title) - len(cells)
        return "".join(self._cell("td", cell, column) for column, cell in enumerate(cells)) + (
            f"<td colspan='{span}' style='text-align:left;white-space:pre-wrap'>{html.escape(note)}</td>"
        )

    def _cell(self, tag: str, text: str, column: int) -> str:
        side = "right" if column in self.right else "left"
        return f"<{tag} style='text-align:{side}'>{html.escape(text)}</{tag}>"


class Sheet(abc.ABC):
    """Lines with a table below, for those that have both: prints as text, shows as HTML in a notebook."""

    @abc.abstractmethod
    def _lines(self) -> Lines: ...

    @abc.abstractmethod
    def _table(self) -> Table: ...

    def __str__(self) -> str:
        return f"{self._lines().text()}\n\n{self._table().text()}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._lines().html() + self._table().html()


def wrap(text: str, width: int) -> list[str]:
    """Lines of at most `width`, broken at spaces and after slashes; what is longer still is cut in its middle."""
    lines = [""]
    for piece in re.findall(r"\s*[^\s/]*/?", text):
        if len(lines[-1]) + len(piece) > width and lines[-1].strip():
            lines.append(piece.lstrip())
        else:
            lines[-1] += piece
    return [_shorten(line.rstrip(), width) for line in lines]


def _shorten(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    head = (width - 1) // 2
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"
