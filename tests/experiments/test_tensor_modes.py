"""What finds sizes that fit counts by the formulas; tables and pictures are made of what is there."""

import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from flax import nnx
from shared.results import Results
from tensor_modes.measure import largest, measure
from tensor_modes.models import KINDS, Case, elements_received, linears
from tensor_modes.plots import write_plots
from tensor_modes.tables import large_partners, write_tables


@pytest.mark.aot
def test_what_is_measured_is_what_the_formula_says(tmp_path: Path) -> None:
    case = Case("small", "blocks", width=512, heads=8, layers=2, length=64, batch=8)
    results = Results(tmp_path / "results.jsonl")
    for plan in ("tensor=4", "tensor=2d:4"):
        row = measure(results, "a", case, plan)
        assert row["formula"] <= row["elements"] <= 1.01 * row["formula"]
        assert row["received"] == pytest.approx(sum(row["moved"].values()))
        assert 0 < row["exposed_s"] <= row["transfer_s"] and 0 < row["peak"] < row["limit"]
    assert large_partners(row) == row["partners"] == 2
    assert "can't split heads" in measure(results, "a", case, "tensor=16")["refused"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_model_computes_its_loss(kind: str) -> None:
    case = Case("small", kind, width=8, heads=2, layers=1, length=4, batch=2)
    loss = nnx.eval_shape(lambda batch: case.loss(case.build(nnx.Rngs(0)), batch), case.batch_shape)
    assert loss.shape == ()


def test_formulas_of_a_layer() -> None:
    tokens, width = 24, 10
    parts = [(tokens * k, k * n, tokens * n) for k, n in linears(width)]
    x, w, y = (sum(part) for part in zip(*parts, strict=True))
    assert elements_received("tensor=4", tokens, width) == 4 * (3 / 4) * tokens * width * 2
    assert elements_received("tensor=2d:9", tokens, width) == pytest.approx(3 * 2 / 9 * (x + w))
    assert elements_received("tensor=2.5d:8/2", tokens, width) == pytest.approx(3 / 4 * (x / 2 + w) + w / 4)
    assert elements_received("tensor=3d:27", tokens, width) == pytest.approx(2 / 27 * (3 * x + 3 * w + 2 * y))


@pytest.mark.parametrize("bend", [0.0, 2e-4])
@pytest.mark.parametrize("uncompilable", [0, 16])
def test_the_largest_size_is_found(bend: float, uncompilable: int) -> None:
    seen = []

    def peak_at(size: int) -> dict[str, Any]:
        if size == uncompilable:
            return {"failed": "no tiles"}
        seen.append(size)
        return {"peak": 7 + 0.31 * size + bend * size**2, "limit": 100.0}

    exact = max(n for n in range(0, 1000, 8) if 7 + 0.31 * n + bend * n**2 <= 100)
    found = largest(peak_at, 8, (16, 64), max_compiles=8)
    assert found["fits"] <= exact and (found["fails"] is None or found["fails"] > exact)
    assert found["fits"] >= 0.98 * exact
    assert len(seen) == len(set(seen)) == found["compiles"] <= 8


def test_tables_and_pictures_of_what_is_there(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    size = {"name": "GPT", "layers": 4, "width": 8, "heads": 2, "batch": 2, "length": 3}
    row = {"received": 2**30, "elements": 2**29, "formula": 2**29, "partners": 3, "peak": 2**31, "moved": {}}
    row |= {"compute_s": 0.25, "transfer_s": 0.5, "exposed_s": 0.125}
    for plan in ("tensor=4", "tensor=2.5d:8/2"):
        results.get({"part": "a", "plan": plan} | size, lambda: row)
    results.get({"part": "a", "plan": "tensor=16"} | size, lambda: {"refused": "2 heads do not divide by 16\nmore"})
    found = {"part": "b: largest", "name": "GPT", "field": "batch", "plan": "tensor=4"}
    results.get(found, lambda: {"fits": 5, "fails": 6})
    again = Results(results.path)
    assert again.rows == results.rows
    assert again.get({"part": "a", "plan": "tensor=4"}, lambda: pytest.fail("made twice")) == results.rows[0]

    text = write_tables(again, tmp_path)
    assert "| tensor=2.5d:8/2 | 1.000" in text and "25%" in text and "2 heads do not divide by 16 |" in text
    write_plots(again, tmp_path)
    pictures = sorted(path.name for path in tmp_path.glob("*.svg"))
    assert pictures == ["floor-gpt.svg", "largest-batch-gpt-batch.svg", "peak-gpt.svg", "received-gpt.svg"]
    for name in pictures:
        marks = ElementTree.parse(tmp_path / name).getroot()
        assert len(marks.findall("{*}rect")) == 1 + (1 if name.startswith("largest") else 2)


# -- the page ---------------------------------------------------------------------------------------------------------
KEPT = Path(__file__).parents[2] / "docs" / "results" / "tensor_parallel-2026-11-30"
PAGE = KEPT.parents[1] / "choosing.md"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
WAYS = ("tensor={}", "tensor={} sequence=gather", "sequence=all_to_all:{}", "sequence=ring:{}")


def tables(text: str) -> list[list[list[str]]]:
    """The cells of each table of Markdown, without its head."""
    blocks = re.findall(r"(?:^\|.*\n)+", text, re.M)
    return [[[cell.strip() for cell in line.strip("|").split("|")] for line in b.splitlines()[2:]] for b in blocks]


def is_rounded(shown: str, value: float, slack: float = 0.0) -> bool:
    """Whether a number of a page is `value` to the digits that it shows; zeros at its end are none."""
    digits = shown.replace(",", "")
    _, _, decimals = digits.partition(".")
    unit = 10.0 ** (-len(decimals) if decimals else len(digits) - len(digits.rstrip("0")))
    return abs(float(digits) - value) <= unit / 2 + slack + 1e-9


def figures(row: dict[str, Any]) -> list[tuple[float, float]]:
    """What a page may say of a measured row, each with how far it may be off."""
    compute, transfer, exposed = (1e3 * row[f"{name}_s"] for name in ("compute", "transfer", "exposed"))
    numbers = (row["received"] / 2**30, row["peak"] / 2**30, large_partners(row), row["batch"] * row["length"])
    return [(each, 0.0) for each in (*numbers, transfer, 100 * exposed / transfer, compute + exposed)]


def test_numbers_of_plans_in_docs_choosing_are_those_of_their_rows() -> None:
    results = Results(KEPT / "results.jsonl")
    rows = [row for part in ("a", "a: copies", "c") for row in results.of(part) if "peak" in row]
    rows = [row for row in rows if row["part"] != "c" or (row["batch"], row["length"]) == (64, 512)]
    known = [(f"`{row['plan']}`", figures(row)) for row in rows]
    crossings = re.findall(r"^\| (tensor=\S+) +\| (\d+\.\d\d) +\|$", (KEPT / "tables.md").read_text(), re.M)
    known += [(f"`{plan}`", [(by * float(x), by * 0.005) for by in (1, 1024, 8192)]) for plan, x in crossings]
    seen = 0
    for cells in (cells for table in tables(PAGE.read_text()) for cells in table):
        shown = [m[1] for cell in cells if (m := re.fullmatch(rf"({NUMBER})(?: %)?", cell))]
        if shown and (plans := [cell for cell in cells if cell.startswith("`")]):
            seen += 1
            assert any(
                plan == plans[0] and all(any(is_rounded(each, *figure) for figure in row) for each in shown)
                for plan, row in known
            ), f"{' | '.join(cells)}: no row of {KEPT.name} has these numbers"
    assert seen > 30


def test_largest_sizes_in_docs_choosing_are_those_that_were_found() -> None:
    results = Results(KEPT / "results.jsonl")
    models = [f"{row['fits']:,}" for row in results.of("b: largest")]
    found = {(row["plan"], row["field"]): f"{row['fits']:,}" for row in results.of("c: largest")}
    sentences = [found[way.format(num), what] for what in ("batch", "length") for num in (4, 8, 16) for way in WAYS]
    shown = [
        [number for row in table for cell in row[1:] for number in re.findall(NUMBER, re.sub("`.*?`", "", cell))]
        for table in tables(PAGE.read_text())
    ]
    assert models in shown and sentences in shown
