"""Which plan is fastest: a small model asked from end to end, and a page made of it."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from shared.results import Results
from which_plans.asking import Asking
from which_plans.flavours import BEST, COMBINED, FLAVOURS, autos
from which_plans.largest import Sizes, largest
from which_plans.models import Case
from which_plans.page import page_of, write_page
from which_plans.settings import NVLINK, PCIE, constants

from cjax.machines import Cluster

TINY = Case("gpt-mini", 16, 32, (("num_layers", 2), ("vocab_size", 64)))


def test_every_flavour_fixes_its_own_words_alone() -> None:
    for flavour in (*FLAVOURS, *COMBINED):
        for auto in autos(flavour, 64, is_pure=False):
            assert (
                auto.fixed["precision"] == "bfloat16" and "remat" not in auto.fixed and "microbatches" not in auto.fixed
            )
    assert not autos("tensor=3d", 4, is_pure=True)
    assert [auto.fixed["tensor"].size for auto in autos("tensor", 4, is_pure=False)] == [2, 4]


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of a tiny GPT under the name of a large one, as the page looks for it."""
    path = tmp_path_factory.mktemp("which") / "rows.log"
    results = Results(path)
    constants(results)
    asking = Asking(results, TINY)
    asking.ask("one", NVLINK, 1, "data")
    for cluster in (NVLINK, PCIE):
        for flavour in ("data", "zero=1", "tensor", "tensor=3d", "pipeline=1f1b", BEST):
            asking.ask("size", cluster, 2, flavour)
    for rate in (1e9, 100e9):
        for flavour in ("data", "tensor", "pipeline=1f1b", BEST):
            asking.ask("link", Cluster("a100-40gb", cards_per_host=2, host_bandwidth=rate), 2, flavour)
    largest(results, Sizes("rows", {16: asking}), NVLINK, 2, "data")
    return path


@pytest.mark.full
def test_rows_say_what_a_plan_takes_or_why_there_is_none(log: Path) -> None:
    rows = {(row["part"], row["cluster"], row["flavour"]): row for row in Results(log).rows if "flavour" in row}
    data, best = (rows["size", "a100-40gb", name] for name in ("data", BEST))
    assert data["plan"] == "data=2 precision=bfloat16" and data["gib"] < data["limit"]
    assert data["s"] == pytest.approx(sum(data["parts"].values()), rel=1e-3)
    assert data["low"] < data["s"] < data["high"]
    assert best["s"] == min(
        row["s"] for (part, card, _), row in rows.items() if part == "size" and card == "a100-40gb" and "s" in row
    )
    assert "no such arrangement" in rows["size", "a100-40gb", "tensor=3d"]["refused"]


@pytest.mark.full
def test_the_page_has_every_number_from_the_rows(log: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_page(Results(log), page, log)
    text = page.read_text()
    assert "# Which plan is fastest" in text and "## The reports' two findings" in text
    assert "fitted on" in text and "Never measured" in text
    assert "{" not in text and "nan" not in text
    size = next(row for row in Results(log).rows if row.get("flavour") == "data" and row["part"] == "size")
    assert f"{1e3 * size['s']:,.0f} ({1e3 * size['low']:,.0f}-{1e3 * size['high']:,.0f})" in text
    pictures = list(log.with_suffix("").glob("*.svg"))
    assert pictures and all(ElementTree.parse(picture).getroot().tag.endswith("svg") for picture in pictures)


def test_the_page_that_stands_is_of_its_log() -> None:
    """A page whose log was asked anew, or whose sentences were changed, and which was not written again."""
    docs = Path(__file__).parents[2] / "docs"
    place = "results/which-plan-2026-11-29"
    assert (docs / "which-plan.md").read_text() == page_of(Results(docs / f"{place}.log"), place), (
        "type: python experiments/which_plan.py --parts"
    )
