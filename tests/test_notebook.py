"""docs/your_own_model.ipynb runs from its first cell to its last, in the Python that runs the tests."""

import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "your_own_model.ipynb"
# Not ours: the event loops and sockets of the kernel's client.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each code cell shows, by the cell's first line."""
    folder = tmp_path_factory.mktemp("notebook")
    # A kernel of its own name: `python3` may be another Python's.
    kernel = folder / "kernels" / "this_python" / "kernel.json"
    kernel.parent.mkdir(parents=True)
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel.write_text(json.dumps({"argv": launch, "display_name": "this Python", "language": "python"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_PATH", str(folder))
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("IPYTHONDIR", str(folder / "ipython"))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")  # quicker compilation; nothing here is about speed
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        client = NotebookClient(
            notebook, timeout=300, kernel_name="this_python", resources={"metadata": {"path": str(folder)}}
        )
        client.execute()
        assert os.listdir(folder / "checkpoint")
        yield {cell.source.splitlines()[0]: shown(cell) for cell in notebook.cells if cell.cell_type == "code"}


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


def test_finds_the_layers(executed: dict[str, str]) -> None:
    trace = output(executed, "program = cjax.parallelize")
    assert "3 x blocks/0" in trace and "no primitive" in trace
    assert all(dim in trace for dim in ("embed", "heads", "ffn", "vocab", "batch"))


def test_compares_five_plans_of_which_one_is_refused(executed: dict[str, str]) -> None:
    shown = output(executed, "program.compare").splitlines()
    plans = [line.removesuffix(" *") for line in shown if re.match("(data|zero|tensor)=", line)]
    assert plans == ["data=8", "zero=3", "tensor=4 zero=1", "data=4 tensor=2 zero=1", "tensor=3"]
    assert shown.count("yes") == 4 and any("needs a multiple of 3 devices" in line for line in shown)


def test_learns(executed: dict[str, str]) -> None:
    words = output(executed, "state = program.init").split()
    assert float(words[1]) > 4.5 and float(words[4]) < 3.2, words  # 7 bits a letter at first; letters alone cost 3.3


def test_agrees_with_one_device(executed: dict[str, str]) -> None:
    assert "agrees with one device" in output(executed, "check = program.check")


def test_goes_on_where_it_was(executed: dict[str, str]) -> None:
    before, after = output(executed, "program.save").splitlines()[0].removeprefix("before").split("after")
    assert number(before) == pytest.approx(number(after), rel=1e-5)
    assert "step=61" in output(executed, "program.save")


def number(text: str) -> float:
    return float(text.partition("Array(")[2].partition(",")[0])


def test_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not [cell for cell in notebook.cells if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]
