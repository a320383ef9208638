"""A process that writes a checkpoint is killed at each step of it: the last whole one is found, whichever it is."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
from forked import Forks

from cjax.checkpoint import Checkpointer, inspect, restore, save
from cjax.checkpoint.description import FILE_NAME, checkpoint_steps

# Forked before a backend starts, each child is killed at another of the operations that change what the folder holds.
KILLED = """
import os, shutil, signal, sys
import numpy as np
from cjax.checkpoint import Checkpointer, save

kind, root = sys.argv[1:]
EVENTS = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def write(folder):
    if kind == "same name":
        save(folder + "/ck", {"w": np.full(3, 2.0)}, {"step": 2})
    else:
        with Checkpointer(folder, keep=1) as checkpoints:
            checkpoints.save(2, {"w": np.full(3, 2.0)}, {})


def before(folder):
    if kind == "same name":
        save(folder + "/ck", {"w": np.full(3, 1.0)}, {"step": 1})
    else:
        with Checkpointer(folder, keep=1) as checkpoints:
            checkpoints.save(1, {"w": np.full(3, 1.0)}, {})


def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


first = root + "/first"
os.mkdir(first)
assert child(lambda: before(first)) == 0
for number in range(1, 1000):
    folder = f"{root}/{number:03}"
    shutil.copytree(first, folder)

    def work():
        count = 0

        def hook(event, args):
            nonlocal count
            if event in EVENTS and str(args[0]).startswith(folder) or event == "os.rmdir":
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        write(folder)

    status = child(work)
    assert status in (0, signal.SIGKILL), status
    if status == 0:
        break
"""


@pytest.fixture(scope="module", params=["same name", "run"])
def killed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forks: Forks
) -> tuple[str, list[Path]]:
    """Folders in which a second checkpoint was being written, each cut off one operation later; the last is done."""
    root = tmp_path_factory.mktemp("killed")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = forks.run(["-c", KILLED, request.param, str(root)], environment)
    assert done.returncode == 0, done.stderr
    return request.param, sorted(folder for folder in root.iterdir() if folder.name != "first")


def value(folder: Path, kind: str) -> float:
    if kind == "same name":
        return float(restore(folder / "ck", {"w": np.zeros(3)})[0]["w"][0])
    with Checkpointer(folder, keep=1) as checkpoints:
        return float(checkpoints.restore(None, {"w": np.zeros(3)})[0]["w"][0])


@pytest.mark.full("same name")
def test_the_last_whole_one_is_found_wherever_the_process_was_killed(killed: tuple[str, list[Path]]) -> None:
    kind, folders = killed
    values = [value(folder, kind) for folder in folders]
    assert values == sorted(values) and set(values) == {1.0, 2.0}, values
    assert len(folders) > 8
    for folder, found in zip(folders, values, strict=True):
        assert inspect(folder / "ck" if kind == "same name" else folder).step == found


@pytest.mark.full("same name")
def test_the_next_save_leaves_nothing_over(killed: tuple[str, list[Path]], tmp_path: Path) -> None:
    kind, folders = killed
    left = {entry.name.partition(".")[2] for folder in folders for entry in folder.iterdir()}
    assert left == {"", "unfinished", "replaced" if kind == "same name" else "removed"}
    for folder in folders:
        if kind == "same name":
            save(folder / "ck", {"w": np.full(3, 3.0)}, {"step": 3})
        else:
            with Checkpointer(folder, keep=1) as checkpoints:
                checkpoints.save(3, {"w": np.full(3, 3.0)}, {})
        assert [entry.name for entry in folder.iterdir()] == ["ck" if kind == "same name" else "3"]
        assert value(folder, kind) == 3.0


@pytest.fixture
def between(tmp_path: Path) -> Path:
    """What a kill between the two renames leaves: the old one aside, the new one whole, and nothing of the name."""
    save(tmp_path / "ck", {"w": np.full(3, 1.0)}, {"step": 1})
    os.rename(tmp_path / "ck", tmp_path / "ck.replaced")
    save(tmp_path / "new", {"w": np.full(3, 2.0)}, {"step": 2})
    os.rename(tmp_path / "new", tmp_path / "ck.unfinished")
    return tmp_path


def test_it_is_said_which_one_is_read(between: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert value(between, "same name") == 2.0
    assert "being replaced" in caplog.text and "ck.unfinished" in caplog.text
    assert sorted(entry.name for entry in between.iterdir()) == ["ck.replaced", "ck.unfinished"]


@pytest.mark.parametrize("loss", ["description", "file", "cut"])
def test_a_new_one_that_is_not_whole_leaves_the_old_one(between: Path, loss: str) -> None:
    files = [file for file in (between / "ck.unfinished" / "arrays").rglob("*") if file.is_file()]
    file = max(files, key=lambda file: file.stat().st_size)
    if loss == "description":
        (between / "ck.unfinished" / FILE_NAME).unlink()
    elif loss == "file":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-1])
    assert value(between, "same name") == 1.0
    save(between / "other", {"w": np.ones(3)}, {})
    assert "there is also: ck" in str(pytest.raises(FileNotFoundError, restore, between / "none", {}).value)


def test_a_part_of_one_is_named_and_may_be_written_over(tmp_path: Path) -> None:
    save(tmp_path / "ck", {"w": np.ones(3)}, {})
    (tmp_path / "ck" / FILE_NAME).unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{tmp_path / 'ck'} holds no whole checkpoint")):
        restore(tmp_path / "ck", {"w": np.ones(3)})
    save(tmp_path / "ck", {"w": np.full(3, 4.0)}, {})
    assert value(tmp_path, "same name") == 4.0


def test_half_of_a_removed_step_goes_with_the_next_save(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, {"w": np.ones(3)}, {}, wait=True)
        (tmp_path / "1" / FILE_NAME).unlink()
        assert checkpoint_steps(tmp_path) == [2]
        checkpoints.save(3, {"w": np.ones(3)}, {}, wait=True)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["2", "3"]


@pytest.mark.parametrize("ending", ["unfinished", "replaced"])
def test_what_is_no_checkpoint_is_in_the_way_and_stays(tmp_path: Path, ending: str) -> None:
    thesis = tmp_path / f"ck.{ending}" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years")
    with pytest.raises(FileExistsError, match=f"ck.{ending} is in the way"):
        save(tmp_path / "ck", {"w": np.ones(3)}, {})
    assert thesis.read_text() == "years"


def test_a_name_that_cannot_be_taken_keeps_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "ck", {"w": np.full(3, 1.0)}, {})
    rename = os.replace

    def refuse(source: Path, target: Path) -> None:
        if str(source).endswith(".unfinished"):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OSError, match="Permission denied"):
        save(tmp_path / "ck", {"w": np.full(3, 2.0)}, {})
    assert value(tmp_path, "same name") == 1.0 and (tmp_path / "ck").is_dir()
