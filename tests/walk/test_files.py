"""What a folder on disk survives, what it refuses, and that nothing but its own files is ever touched."""

import dataclasses
import errno
import gc
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from forked import Forks
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from cjax.walk import files
from cjax.walk.direct import BLOCK, buffer
from cjax.walk.files import Folder
from cjax.walk.record import Committed, look, read_record, write_record
from cjax.walk.row_file import checksum

pytestmark = pytest.mark.usefixtures("settled")

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
ROWS = 3


def filled(value: int, blocks: int = 2) -> np.ndarray:
    data = buffer(blocks * BLOCK)
    data[:] = value
    return data


def value_of(rows: files.RowFile, row: int, blocks: int = 2) -> int:
    data = buffer(blocks * BLOCK)
    rows.read(row, data)
    assert (data == data[0]).all()
    return int(data[0])


def opened(folder: Folder, kind: Any = "params", rows: int = ROWS, blocks: int = 2, layout: str = "") -> files.RowFile:
    return folder.rows(kind, 0, rows, blocks * BLOCK, layout)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder that holds a state of step 3."""
    with Folder(tmp_path / "rows", {"model": "mine"}) as folder:
        rows = opened(folder)
        for row in range(ROWS):
            rows.write(row, filled(row + 1))
        folder.commit(3, {"count": np.array(3)})
    return tmp_path / "rows"


def again(path: Path, **options: Any) -> Folder:
    return Folder(path, {"model": "mine"}, **options)


def values(path: Path) -> tuple[int, list[int]]:
    """The step of a folder, and what its rows hold."""
    with again(path) as folder:
        rows = opened(folder)
        known = folder.resume()
        assert known is not None and known[1]["count"] == known[0]
        return known[0], [value_of(rows, row) for row in range(ROWS)]


# -- what a commit promises -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("seed", "kills"), [(1, 5), *([(seed, 20) for seed in range(2, 7)] if ALL else [])])
def test_a_run_that_is_killed_anywhere_goes_on_with_the_same_bits(
    seed: int, kills: int, tmp_path: Path, forks: Forks
) -> None:
    killed = Path(__file__).parent / "killed.py"
    done = forks.run([str(killed), str(tmp_path), str(seed), str(kills)], {**os.environ, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= kills


def flipped(file: Path, place: int) -> None:
    """One bit of it, as a disk may do that nobody looks after."""
    with open(file, "r+b") as opened:
        opened.seek(place)
        (byte,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([byte ^ 16]))


def test_a_row_that_the_disk_has_changed_is_an_error_and_no_number(path: Path) -> None:
    flipped(path / "params-0.0.rows", BLOCK + (1 * 2 + 0) * 2 * BLOCK + 5000)  # of row 1 the place that was written
    with again(path) as folder:
        rows = opened(folder)
        assert value_of(rows, 0) == 1
        with pytest.raises(OSError, match=r"params-0\.0\.rows is damaged: of row 1.*restore a checkpoint") as error:
            value_of(rows, 1)
        assert error.value.errno == errno.EIO
        rows.write(1, filled(7))
        assert value_of(rows, 1) == 7
        folder.commit(4, {"count": np.array(4)})
    assert values(path) == (4, [1, 7, 3])
    with again(path) as folder:
        scratch = opened(folder, "grads")  # what nobody goes on from, in a step's time
        scratch.write(0, filled(1))
        handle = next(Path("/proc/self/fd").glob(f"{scratch._file._handle}"))
        flipped(handle, BLOCK)
        with pytest.raises(OSError, match="damaged: of row 0"):
            value_of(scratch, 0)


def test_rows_of_before_there_were_checksums_are_read_and_have_one_when_they_are_written(path: Path) -> None:
    record, small = read_record(path / "commit.0")
    assert all(isinstance(x, int) for x in record.sums["params-0"])
    write_record(path / "commit.0", dataclasses.replace(record, sums={}), small)
    assert values(path) == (3, [1, 2, 3])
    with again(path) as folder:
        rows = opened(folder)
        rows.write(2, filled(9))
        folder.commit(4, {"count": np.array(4)})
    (sums,) = read_record(path / "commit.0")[0].sums.values()
    assert sums[:2] == [None, None] and sums[2] == checksum(filled(9))


def test_what_was_put_and_not_committed_is_as_if_it_had_not_been(path: Path) -> None:
    with again(path) as folder:
        rows = opened(folder)
        rows.write(0, filled(9))
        rows.write(1, filled(9))
        rows.write(1, filled(10))
        assert [value_of(rows, row) for row in range(ROWS)] == [9, 10, 3]
    assert values(path) == (3, [1, 2, 3])
    with again(path) as folder:
        rows = opened(folder)
        for step in range(4, 8):
            rows.write(step % ROWS, filled(step * 10))
            folder.commit(step, {"count": np.array(step)})
    assert values(path) == (7, [60, 70, 50])


def test_a_commit_waits_for_what_was_put_then_for_the_disk_and_renames_last(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def watch(name: str) -> None:
        real = getattr(os, name)

        def watched(*args: Any, **options: Any) -> Any:
            order.append(name)
            return real(*args, **options)

        monkeypatch.setattr(os, name, watched)

    with again(path) as folder:
        opened(folder)
        folder.before_commit(lambda: order.append("settle"))
        for name in ("fdatasync", "fsync", "replace"):
            watch(name)
        folder.commit(4, {"count": np.array(4)})
    assert order == ["settle", "fdatasync", "fsync", "replace", "fsync"]


def test_rows_that_are_written_over_in_place_end_what_was_committed(tmp_path: Path) -> None:
    """Frozen rows have one place: half of new ones must not pass for the old."""
    with again(tmp_path / "rows") as folder:
        frozen = opened(folder, "frozen")
        for row in range(ROWS):
            frozen.write(row, filled(row))
        folder.commit(0, {})
    with again(tmp_path / "rows") as folder:
        frozen = opened(folder, "frozen")
        assert folder.resume() == (0, {}) and value_of(frozen, 1) == 1
        frozen.write(1, filled(7))
        assert folder.resume() is None
        assert [value_of(frozen, row) for row in range(ROWS)] == [0, 7, 2]
    with again(tmp_path / "rows") as folder:
        assert folder.resume() is None


def test_what_no_other_run_reads_leaves_nothing(tmp_path: Path) -> None:
    with again(tmp_path / "rows") as folder:
        rows = opened(folder, "inputs")
        rows.write(1, filled(4))
        assert value_of(rows, 1) == 4
        assert folder.num_bytes == BLOCK * (1 + 2 * ROWS)
        assert sorted(each.name for each in (tmp_path / "rows").iterdir()) == ["lock.0"]
        rows.forget(1)
        with pytest.raises(AssertionError, match="never put, or forgotten"):
            value_of(rows, 1)


small_arrays = arrays_of.arrays(
    st.sampled_from([np.dtype(name) for name in ("f4", "f8", "f2", "i1", "u4", "?", "c8")]),
    arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)


@settings(max_examples=20)
@given(small=st.dictionaries(st.text(max_size=5), small_arrays, max_size=4))
def test_small_arrays_come_back_as_they_were(small: dict[str, np.ndarray]) -> None:
    small["low"] = np.frombuffer(bytes(range(6)), jnp.bfloat16)
    small["turned"] = np.arange(6).reshape(2, 3).T
    record = Committed(5, 7, '{"a": 1}', "run", {"params-0": "01-"})
    with tempfile.TemporaryDirectory() as folder:
        write_record(Path(folder, "commit"), record, small)
        found, arrays = read_record(Path(folder, "commit"))
        assert look(Path(folder, "commit")) == record and look(Path(folder, "none")) is None
    assert found == record and list(arrays) == list(small)
    for name, array in small.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert arrays[name].tobytes() == array.tobytes() and arrays[name].flags.writeable


# -- what is refused --------------------------------------------------------------------------------------------------
def test_another_program_is_refused_and_told_apart(path: Path) -> None:
    with pytest.raises(ValueError, match=r"another program, of step 3 \(model: 'mine', here 'yours'\).*another folder"):
        Folder(path, {"model": "yours"})
    assert values(path) == (3, [1, 2, 3])


def test_a_folder_in_use_is_refused_until_its_process_ends(path: Path) -> None:
    with again(path):
        with pytest.raises(BlockingIOError, match=f"in use by process {os.getpid()}"):
            again(path)
    again(path).close()


def test_what_nobody_has_any_more_is_closed(path: Path) -> None:
    """And not before: a thread would write to whatever file has its number by then."""
    folder = again(path)
    rows = opened(folder)
    del folder
    gc.collect()
    with pytest.raises(BlockingIOError):
        again(path)
    assert value_of(rows, 2) == 3
    handles = len(os.listdir("/proc/self/fd"))
    del rows
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == handles - 2
    assert values(path) == (3, [1, 2, 3])


def test_a_missing_disk_is_not_made_up(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"disk is not there. Is its disk mounted\? If so: mkdir -p .*disk$"):
        again(tmp_path / "disk" / "run" / "rows")
    assert not any(tmp_path.iterdir())
    again(tmp_path / "run" / "rows").close()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="can't be used"):
        again(tmp_path / "file")


def damage_end(file: Path) -> None:
    os.truncate(file, file.stat().st_size - BLOCK)


def damage_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "error", "says"),
    [
        ("params-0.0.rows", damage_end, OSError, r"cut short: it has .* are needed.*restore a checkpoint"),
        ("params-0.0.rows", Path.unlink, FileNotFoundError, "rows of step 3, is not there.*restore a checkpoint"),
        ("commit.0", damage_byte, ValueError, "damaged.*restore a checkpoint"),
        ("commit.0", lambda file: os.truncate(file, 30), ValueError, "damaged"),
    ],
)
def test_damage_is_seen(
    path: Path, name: str, damage: Callable[[Path], None], error: type[Exception], says: str
) -> None:
    damage(path / name)
    with pytest.raises(error, match=says):
        values(path)


def test_files_of_two_runs_are_not_mixed(path: Path) -> None:
    other = path.with_name("other")
    with again(other) as folder:
        rows = opened(folder)
        for row in range(ROWS):
            rows.write(row, filled(50))
        folder.commit(3, {"count": np.array(3)})
    os.replace(other / "params-0.0.rows", path / "params-0.0.rows")
    with pytest.raises(ValueError, match="holds rows of another run"):
        values(path)


def test_a_file_that_is_cut_short_while_it_is_used_is_seen(path: Path) -> None:
    with again(path) as folder:
        rows = opened(folder)
        os.truncate(path / "params-0.0.rows", 2 * BLOCK)
        with pytest.raises(OSError, match="cut short"):
            value_of(rows, 2)


@pytest.mark.parametrize("changed", [{"rows": 2}, {"blocks": 3}, {"layout": "other"}, {"kind": "opt"}])
def test_rows_of_another_plan_are_refused(path: Path, changed: dict[str, Any]) -> None:
    with again(path) as folder, pytest.raises(ValueError, match="keeps .* otherwise.*budget="):
        opened(folder, **changed)
    with again(path) as folder, pytest.raises(ValueError, match="keeps params-0 otherwise"):
        folder.resume()  # rows that nobody asked for
    assert values(path) == (3, [1, 2, 3])


def test_no_more_is_asked_of_the_disk_than_was_given(tmp_path: Path) -> None:
    with again(tmp_path / "rows", limit=20 * BLOCK) as folder:
        with pytest.raises(
            ValueError, match=r"disk=0.1MiB is too little: 84.0 KiB for opt-0, 84.0 KiB in all. Give disk=1MiB or more"
        ):
            opened(folder, "opt", rows=5)
        rows = opened(folder)
        rows.write(0, filled(1))
        folder.commit(1, {})
        with pytest.raises(ValueError, match="for the small arrays"):
            folder.commit(2, {"large": np.zeros(4 * BLOCK, np.int8)})
        known = folder.resume()
        assert known is not None and known[0] == 1
        assert sum(each.stat().st_size for each in (tmp_path / "rows").iterdir()) <= 20 * BLOCK


@pytest.fixture
def no_large_files() -> Iterator[None]:
    """The kernel refuses to make a file longer than 4 blocks."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_told_before_the_first_step(tmp_path: Path, no_large_files: None) -> None:
    with again(tmp_path / "rows") as folder:
        with pytest.raises(OSError, match=r"params-0.*can't be made: it takes 52.0 KiB, .* free in"):
            opened(folder)
        assert sorted(each.name for each in (tmp_path / "rows").iterdir()) == ["lock.0"]


def test_a_disk_that_is_full_at_a_commit_leaves_the_last_one(path: Path, no_large_files: None) -> None:
    with again(path) as folder:
        rows = opened(folder)
        with pytest.raises(OSError, match="commit.0.new can't be written: it takes") as caught:
            folder.commit(4, {"count": np.array(4), "large": np.zeros(5 * BLOCK, np.int8)})
        assert caught.value.errno == errno.EFBIG and not (path / "commit.0.new").exists()
        assert [value_of(rows, row) for row in range(ROWS)] == [1, 2, 3]
    assert values(path) == (3, [1, 2, 3])


@pytest.mark.parametrize("name", ["fdatasync", "fsync", "replace"])
def test_a_disk_that_fails_at_a_commit_leaves_the_last_one(
    path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    with again(path) as folder:
        rows = opened(folder)
        rows.write(0, filled(9))
        with monkeypatch.context() as patched:
            patched.setattr(os, name, fails(errno.EIO))
            with pytest.raises(OSError, match="can't be written") as caught:
                folder.commit(4, {"count": np.array(4)})
        assert caught.value.errno == errno.EIO
    assert values(path) == (3, [1, 2, 3])


@pytest.mark.parametrize("error", [OSError(errno.EIO, "broken"), KeyboardInterrupt()])
def test_a_commit_that_broke_off_behind_its_rename_is_not_guessed_about(
    path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The new state has the name: writing on, over what this process thinks is free, would spoil it."""

    def broken(folder: Path) -> None:
        raise error

    with again(path) as folder:
        rows = opened(folder)
        rows.write(0, filled(9))
        with monkeypatch.context() as patched:
            patched.setattr(files, "sync_names", broken)
            with pytest.raises(type(error)):
                folder.commit(4, {"count": np.array(4)})
        for call in (lambda: rows.write(0, filled(10)), lambda: folder.commit(5, {})):
            with pytest.raises(OSError, match="broke off.*start again, with the same folder"):
                call()
    assert values(path) == (4, [9, 2, 3])


def fails(number: int) -> Callable[..., Any]:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    return failing


def test_no_permission_is_said(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernel would say it: tests may run as root, who may do anything."""
    with again(path) as folder, monkeypatch.context() as patched:
        patched.setattr(os, "open", fails(errno.EACCES))
        with pytest.raises(PermissionError, match=r"params-0.* can't be opened \(Permission denied\)"):
            opened(folder)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fails(errno.EACCES))
        with pytest.raises(PermissionError, match="can't be used"):
            again(path)
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", fails(errno.EROFS))
        with pytest.raises(OSError, match="new can't be used .Read-only"):
            again(tmp_path / "new")


# -- what is whose ----------------------------------------------------------------------------------------------------
def test_only_our_own_files_are_removed(path: Path) -> None:
    theirs = {"notes.txt": "cjax is fine", "data.0.rows": "mine", "x.0.rows.new": "mine too", "commit.1": "of another"}
    for name, text in theirs.items():
        (path / name).write_text(text)
    (path / "folder.0.rows").mkdir()
    (path / "left-9.0.rows").write_bytes(b"cjax rows 1\nof a run that was killed before its first commit")
    with again(path) as folder:
        opened(folder)
        folder.clear()
        assert folder.resume() is None
    again(path).close()
    assert {each.name for each in path.iterdir()} == {*theirs, "folder.0.rows", "lock.0"}
    assert all((path / name).read_text() == text for name, text in theirs.items())


@pytest.mark.parametrize("name", ["lock.0", "commit.0", "commit.0.new", "params-0.0.rows", "params-0.0.rows.new"])
def test_a_file_of_the_users_that_is_in_the_way_stays(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(FileExistsError, match=f"{name} is in the way.*move it away"):
        with again(folder) as found:
            opened(found)
            found.commit(0, {})
    assert (folder / name).read_text() == "mine"


# -- reading and writing ----------------------------------------------------------------------------------------------
def refuses_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: str, flags: int, *args: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no such thing here")
        return real(path, flags, *args)

    monkeypatch.setattr(os, "open", refusing)


def refuses_direct_later(monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: (monkeypatch.setattr(os, "preadv", real), fails(errno.EINVAL)())[1])


def a_block_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("preadv", "pwritev"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda f, parts, at, real=real: real(f, [parts[0][:BLOCK]], at))


@pytest.mark.parametrize("kind", [lambda _: None, refuses_direct, refuses_direct_later, a_block_at_a_time])
def test_rows_are_the_same_on_any_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Callable[[pytest.MonkeyPatch], None]
) -> None:
    kind(monkeypatch)
    with again(tmp_path / "rows") as folder:
        rows = opened(folder)
        random = filled(0)
        random[:] = np.frombuffer(np.random.default_rng(0).bytes(random.size), np.uint8)
        rows.write(2, random)
        rows.write(1, filled(5))
        folder.commit(0, {})
        found = filled(0)
        rows.read(2, found)
        assert (found == random).all() and value_of(rows, 1) == 5


def test_a_disk_that_takes_nothing_more_is_full(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with again(path) as folder:
        rows = opened(folder)
        for number in (errno.ENOSPC, errno.EIO):
            with monkeypatch.context() as patched:
                patched.setattr(os, "pwritev", fails(number))
                with pytest.raises(OSError, match="8,192 bytes are left to write") as caught:
                    rows.write(0, filled(9))
            assert caught.value.errno == number
            with pytest.raises(AssertionError, match="never put"):  # half of it may be there
                value_of(rows, 0)
    assert values(path) == (3, [1, 2, 3])
