"""A run that waits for its turn while those before it train."""

import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from cjax.job import Member
from cjax.job.beat import COMPILING, READY, Doing
from cjax.job.files import write_whole
from cjax.job.folder import JobFolder
from cjax.train import fit

from .conftest import SmallData, SmallProgram


class Program(SmallProgram):
    def __init__(self, doing: Doing) -> None:
        super().__init__()
        self.doing, self.compiled_while = doing, []
        self.restored: list[str] = []

    def restore(self, source: Any) -> Any:
        self.restored.append(Path(source).name)
        return super().restore(source)

    def compile(self) -> None:
        self.compiled_while.append(self.doing.phase)


def files(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize(("waits", "compiled"), [("fit", [COMPILING]), ("initialize", []), ("", [])])
def test_nothing_of_a_run_is_touched_before_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits: str, compiled: list[str]
) -> None:
    run, longer, doing = tmp_path / "run", tmp_path / "longer", Doing()
    fit(SmallProgram(), SmallData(), steps=6, folder=run)
    fit(SmallProgram(), SmallData(), steps=9, folder=longer)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')  # as who trains writes it just now
    state = JobFolder(run).state
    state.parent.mkdir()
    write_whole(state, '{"incarnation": 3, "next": 4}' if waits else '{"incarnation": 4}')
    for name in ("cjax.job.beat", "cjax.train.ahead", "cjax.train.fit"):
        monkeypatch.setattr(sys.modules[name], "member", lambda: Member(run, 4, 0, 0, waits))
        monkeypatch.setattr(sys.modules[name], "beating", lambda: doing)
    seen: list[Any] = []
    before = files(run)

    def hand_over() -> None:
        while doing.phase != READY:
            time.sleep(0.005)
        time.sleep(0.1)
        seen.append(files(run) == before)
        shutil.copytree(longer / "checkpoints" / "9", run / "checkpoints" / "9")
        write_whole(state, '{"incarnation": 4}')

    others = threading.Thread(target=hand_over)
    if waits:
        others.start()
    program, data = Program(doing), SmallData()
    result = fit(program, data, steps=12, folder=run, resume="auto")
    assert program.compiled_while == compiled and result.step == 12
    assert program.restored == ["rehearsal"] * len(compiled) + ["9" if waits else "6"]
    assert data.read[0] == 4 * (9 if waits else 6), "data begins where the others have stopped"
    if waits:
        others.join()
        assert seen == [True]
