import json
from pathlib import Path
from typing import Any

import pytest

from cjax.cluster.reading import JobParts, main, read

from .conftest import TRAINING

ASKED: dict[str, Any] = {
    "file": str(TRAINING), "function": "make", "arguments": [], "plan": "auto tensor=1 pipeline=1 sequence=1",
    "range": [1, 2], "all": [1, 2, 4], "card": "cpu", "batches": None,
}  # fmt: skip


def test_each_size_has_a_plan_and_a_speed() -> None:
    found = read(ASKED)
    assert [(each["devices"], each["plan"]) for each in found["speeds"]] == [
        (1, "data=1"),
        (2, "data=2"),
        (4, "data=4"),
    ]
    assert found["batch"] == 32 and all(each["samples_per_second"] > 0 for each in found["speeds"])


def test_a_batch_that_may_change_is_measured_whatever_the_devices() -> None:
    found = read(ASKED | {"batches": [32, 80], "plan": "auto"})
    assert {(each["devices"], each["batch"]) for each in found["speeds"]} == {
        (size, rows) for size in (1, 2, 4) for rows in (32, 64)
    }
    assert all("microbatches=2" in each["plan"] for each in found["speeds"])


def test_a_range_without_a_plan_says_which_there_are() -> None:
    with pytest.raises(ValueError, match="--devices 3:3 holds no legal plan; there are plans on 1, 2, 4 devices"):
        read(ASKED | {"range": [3, 3]})


def test_what_a_script_returns_is_checked(tmp_path: Path) -> None:
    script = tmp_path / "short.py"
    script.write_text("def make():\n    return 1, 2\n")
    with pytest.raises(ValueError, match=r"it should return \(model, loss, optimizer, data\)"):
        JobParts(script, "make")
    with pytest.raises(ValueError, match="training.py has no function nothing"):
        JobParts(TRAINING, "nothing")


def test_an_error_of_the_script_is_an_answer(tmp_path: Path) -> None:
    script, answer = tmp_path / "broken.py", tmp_path / "answer"
    script.write_text("import no_such_module\n")
    main(json.dumps(ASKED | {"file": str(script)}), str(answer))
    said = json.loads(answer.read_text())
    assert said["kind"] == "script" and "No module named 'no_such_module'" in said["error"]
