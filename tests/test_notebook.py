"""The notebooks of docs/ run from their first cell to their last, in the Python that runs the tests."""

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "docs").glob("*.ipynb"))
# Not ours: the event loops and sockets of the kernel's client.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


# A notebook's kernel, in which tracing and lowering cost what they cost in tests.
KERNEL = f"""
import runpy, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
import quick
sys.path.pop(0)
quick.few_collections()
quick.few_contexts()
runpy.run_module("ipykernel_launcher", run_name="__main__")
"""


def execute(notebook: Any, folder: Path) -> None:
    """Runs all cells in `folder`, in a kernel of its own."""
    # A kernel of its own name: `python3` may be another Python's.
    kernel = folder / "kernels" / "this_python" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    launch = [sys.executable, "-c", KERNEL, "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": launch, "display_name": "this Python", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # quicker compilation; nothing here is about speed
        place = {"metadata": {"path": str(folder)}}
        NotebookClient(notebook, timeout=300, kernel_name="this_python", resources=place).execute()


Run = Callable[[str], dict[str, str]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """What each code cell of a notebook shows, by the cell's first line."""

    @functools.cache
    def run(name: str) -> dict[str, str]:
        notebook = nbformat.read(ROOT / "docs" / f"{name}.ipynb", as_version=4)
        folder = tmp_path_factory.mktemp(name)
        execute(notebook, folder)
        assert name != "your_own_model" or os.listdir(folder / "checkpoint")
        return {cell.source.splitlines()[0]: shown(cell) for cell in notebook.cells if cell.cell_type == "code"}

    yield run


@pytest.fixture
def executed(run: Run) -> dict[str, str]:
    """docs/your_own_model.ipynb."""
    return run("your_own_model")


def shown(cell: Any) -> str:
    """Printed text, or the words of a table, one a line."""
    parts = []
    for each in cell.outputs:
        data = each.get("data", {})
        parts.append(each.get("text") or re.sub(r"(<[^>]+>)+", "\n", data.get("text/html", data.get("text/plain", ""))))
    return "".join(parts)


def output(executed: dict[str, str], start: str) -> str:
    """What the cell that begins so shows."""
    (text,) = [text for first, text in executed.items() if first.startswith(start)]
    return text


@pytest.mark.full
def test_finds_the_layers(executed: dict[str, str]) -> None:
    trace = output(executed, "program = cjax.parallelize")
    assert "3 x blocks/0" in trace and "no primitive" in trace
    assert all(dim in trace for dim in ("embed", "heads", "ffn", "vocab", "batch"))


@pytest.mark.full
def test_compares_five_plans_of_which_one_is_refused(executed: dict[str, str]) -> None:
    shown = output(executed, "program.compare").splitlines()
    plans = [line.removesuffix(" *") for line in shown if re.match("(data|zero|tensor)=", line)]
    assert plans == ["data=8", "zero=3", "tensor=4 zero=1", "data=4 tensor=2 zero=1", "tensor=3"]
    assert shown.count("yes") == 4 and any("needs a multiple of 3 devices" in line for line in shown)


@pytest.mark.full
def test_learns(executed: dict[str, str]) -> None:
    words = output(executed, "state = program.init").split()
    assert float(words[1]) > 4.5 and float(words[4]) < 3.2, words  # 7 bits a letter at first; letters alone cost 3.3


@pytest.mark.full
def test_agrees_with_one_device(executed: dict[str, str]) -> None:
    assert "agrees with one device" in output(executed, "check = program.check")


@pytest.mark.full
def test_goes_on_where_it_was(executed: dict[str, str]) -> None:
    before, after = output(executed, "program.save").splitlines()[0].removeprefix("before").split("after")
    assert number(before) == pytest.approx(number(after), rel=1e-5)
    assert "step=61" in output(executed, "program.save")


def number(text: str) -> float:
    return float(text.partition("Array(")[2].partition(",")[0])


# -- docs/pipelines_and_reports.ipynb ---------------------------------------------------------------------------------
def test_schedules_are_told_apart(run: Run) -> None:
    lines = output(run("pipelines_and_reports"), "for schedule in").splitlines()
    waits = [float(line.partition("waits")[2].partition("%")[0]) for line in lines]
    assert len(waits) == 4 and waits[2] < waits[1] == waits[0] and waits[3] < waits[1]


def test_the_pipelines_report_is_drawn_and_its_plan_is_right(run: Run) -> None:
    cells = run("pipelines_and_reports")
    report = output(cells, "program = cjax.parallelize")
    assert "over pipe" in report and "1f1b: 2 stages, 4 micro-batches" in report
    assert "'pipe':" in output(cells, "print(report.memory)")
    trained = output(cells, "state = program.init")
    assert "agrees with one device" in trained and learned(trained)
    assert "needs 8 layers for 8 stages" in output(cells, "# More stages")


# -- docs/real_weights_and_lora.ipynb ---------------------------------------------------------------------------------
@pytest.mark.full
def test_adapters_learn_and_the_rest_stays(run: Run) -> None:
    cells = run("real_weights_and_lora")
    assert "config.json" in output(cells, "import os") and "parameters are trained" in output(cells, "program = cjax")
    assert learned(output(cells, "losses = []"))
    checked = output(cells, "print(program.check")
    assert "agrees with one device" in checked and "unchanged: True" in checked


@pytest.mark.full
def test_merged_weights_give_the_same(run: Run) -> None:
    cells = run("real_weights_and_lora")
    adapted, merged = map(float, re.findall(r"\d+\.\d+", output(cells, "plain = Llama")))
    assert adapted == pytest.approx(merged, rel=1e-5)
    assert output(cells, "written = ").startswith("b")


def learned(text: str) -> bool:
    """Whether `loss a at first, b after` fell."""
    first, last = map(float, re.findall(r"loss ([\d.]+) at first, ([\d.]+) after", text)[0])
    return last < first - 0.2


# -- all of them ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_kept_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not [cell for cell in cells if cell.outputs or cell.execution_count]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_begins_with_how_to_install(path: Path) -> None:
    first = next(cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code").source
    extras = set(re.findall(r'%pip install .*"\.\.\[([\w,]+)\]"', first)[0].split(","))
    assert "notebook" in extras and "import cjax" in first and "cjax.simulate(8)" in first


def test_each_is_run() -> None:
    assert {path.stem for path in NOTEBOOKS} == {"your_own_model", "pipelines_and_reports", "real_weights_and_lora"}
