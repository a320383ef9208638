"""The folder of a run on disk: files of rows, and a record of what was committed.

A row that must survive has two places in its file. One is current, which is what the last commit says; what is put goes
to the other. A commit waits until all is on the disk, and makes the new places the current ones by one rename: a
process may be killed at any moment, and what was committed last is whole. Each process has files of its own.

Only files that begin as ours do are ever written over or removed.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import numpy as np

from cjax.mesh import own_context, together
from cjax.planner.homes import Kind
from cjax.walk.agreeing import last_commits
from cjax.walk.direct import (
    BLOCK,
    BlockFile,
    allocate,
    cut_short,
    explained,
    shown,
    sync_names,
)
from cjax.walk.record import Committed, read_record, record_bytes, records_in, write_record
from cjax.walk.row_file import NOWHERE, RowFile

# Two places a row: what is put is durable at the next commit. One: what is put once, and what no other run reads.
_PLACES: Mapping[Kind, int] = {"params": 2, "opt": 2, "frozen": 1, "grads": 2, "inputs": 1}
_STATE: tuple[Kind, ...] = ("params", "opt", "frozen")
_OURS = b"cjax "
_MAGIC = _OURS + b"rows 1\n"
_LOCK = _OURS + b"lock 1\n"


class Folder:
    """The folder of one run; in it, each process sees to files of its own.

    Args:
        path: is made if it is missing, and so is the folder that it is in; the one above must be there.
        identity: what tells this program from others, in JSON's types: another program's state is refused.
        limit: how many bytes this process may have there (`disk=`).
        state: kinds of rows that a commit is about; others are gone with their process, and have one place.

    Raises:
        ValueError: the folder holds another program's state, or a damaged record.
        BlockingIOError: another process works with it.
        OSError: it can't be made, read or written.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as path, Folder(path, {"model": "mine"}) as folder:
        ...     folder.commit(3, {"count": np.array(3)})
        ...     folder.resume()
        (3, {'count': array(3)})
    """

    @own_context
    def __init__(
        self, path: str | Path, identity: Mapping[str, Any], limit: int | None = None, state: Collection[Kind] = _STATE
    ) -> None:
        self.path = Path(path).absolute()
        self.holder: Any = None  # whoever opened it notes here whose rows are in it
        self.num_bytes = 0  # that files of rows take
        self._index = jax.process_index()
        self._limit, self._state = limit, state
        self._files: dict[str, RowFile] = {}
        self._scratch: list[RowFile] = []
        self._settle: list[Callable[[], None]] = []
        self._guard = threading.Lock()
        given = {**identity, "processes": jax.process_count()}
        self._identity = json.dumps(given, sort_keys=True, default=str)
        self._unlock: Callable[[], object] | None = None
        self.is_closed = False
        self._is_between = False  # two commits: which of them a process that is killed leaves is not known
        self._record: Committed | None = None
        try:
            with together("open", self.path):
                self._unlock = weakref.finalize(self, os.close, self._locked())
                self._record = self._known()
            self._run = self._go_back()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Folder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- rows ---------------------------------------------------------------------------------------------------------
    def rows(self, kind: Kind, stack: int, num_rows: int, row_bytes: int, layout: str) -> RowFile:
        """The file of the rows of one kind of one stack, with what was committed if the folder has it.

        Args:
            kind: decides whether what is put outlives the process.
            stack: its number.
            num_rows: of this stack, that are on disk.
            row_bytes: whole blocks.
            layout: what else must be the same for a row to mean the same.

        Raises:
            ValueError: more bytes than `disk=` allows, or rows of another layout there.
            OSError: no place on the disk, no permission, a file that is not ours or was cut short.
        """
        assert kind in get_args(Kind) and row_bytes % BLOCK == 0 and num_rows
        name = f"{kind}-{stack}"
        is_state = kind in self._state
        places = _PLACES[kind] if is_state else 1
        size = BLOCK + num_rows * places * row_bytes
        self._reserve(name, size)
        path = self.path / f"{name}.{self._index}.rows"
        layout = hashlib.sha256(layout.encode()).hexdigest()
        first = self._first_bytes({"name": name, "rows": num_rows, "bytes": row_bytes, "layout": layout})
        current = NOWHERE * num_rows
        if self._record and is_state:
            current = self._committed(name, path, first, size)
        else:
            self._make(path, first, size)
        sums = self._record.sums.get(name, ()) if self._record else ()
        rows = RowFile(BlockFile(path), row_bytes, places, current, self._before_write, sums)
        if is_state:
            self._files[name] = rows
        else:
            # It has no name from now on: however this process ends, it leaves nothing of it.
            path.unlink()
            self._scratch.append(rows)
        self.num_bytes += size
        return rows

    def before_commit(self, settle: Callable[[], None]) -> None:
        """What is called before each commit: it returns when all that was put is written."""
        self._settle.append(settle)

    # -- commits ------------------------------------------------------------------------------------------------------
    @own_context
    def commit(self, step: int, small: Mapping[str, np.ndarray], note: Mapping[str, Any] | None = None) -> None:
        """Makes all rows that were put, `small` and `note`, what a run that is killed from now on is resumed with.

        Raises:
            ValueError: more bytes than `disk=` allows.
            OSError: it could not be written; what was committed before still is. Where it broke off in the last of its
                steps, between the two, this folder has to be opened anew.
        """
        self._refuse_between()
        unfinished = self._beside(".new")
        with together("commit", self.path):
            for settle in self._settle:
                settle()
            for file in self._files.values():
                file.sync()
            halves = {name: "".join(file.newest) for name, file in self._files.items()}
            number = self._record.number + 1 if self._record else 0
            sums = {name: file.sums for name, file in self._files.items()}
            record = Committed(step, number, self._identity, self._run, halves, note or {}, sums)
            self._reserve("the small arrays", num_records() * record_bytes(record, small))
            self._refuse_others(unfinished)
            try:
                write_record(unfinished, record, small)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
        # An interrupt in here too leaves it so: what is current then must not be guessed.
        self._is_between = True
        with together("commit", self.path), explained(f"{self.path} can't be written"):
            if jax.process_count() > 1 and self._beside("").exists():
                os.replace(self._beside(""), self._beside(".before"))
            os.replace(unfinished, self._beside(""))
            sync_names(self.path)
        # All processes have it: only now may what was current before be written over.
        self._record = record
        for file in self._files.values():
            file.keep()
        self._is_between = False

    def keep(self) -> None:
        """What was put stays until the next call, as it does behind a commit, while this process lives: nothing goes on
        from it after that. Where one process could not write, all raise."""
        with together("write", self.path):
            for settle in self._settle:
                settle()
            self._uncommit()
        for file in self._files.values():
            file.keep()

    def take_back(self, rows: Mapping[tuple[Kind, int], Collection[int]]) -> bool:
        """What was put of some rows since `keep` or `commit` was called last is no more; not to be called before either
        was. All others are what was put last.

        Args:
            rows: by kind and stack, of each file that has some.

        Returns:
            whether the rows can be used on: where one could not be read or written, none of their threads goes on.
        """
        failed = []
        for settle in self._settle:  # which waits in any case
            try:
                settle()
            except Exception as error:
                failed.append(error)
        for (kind, stack), which in rows.items():
            if which:
                self._files[f"{kind}-{stack}"].take_back(which)
        return not failed

    @property
    def others(self) -> list[Committed]:
        """What was committed in the folders beside this one."""
        found = records_in(self.path.parent, self._index)
        return [record for _, record in found if record.identity != self._identity]

    @property
    def step(self) -> int | None:
        """The step that was committed last."""
        return None if self._record is None else self._record.step

    @property
    def note(self) -> dict[str, Any]:
        """What was noted when it was committed."""
        return {} if self._record is None else dict(self._record.note)

    def resume(self) -> tuple[int, dict[str, np.ndarray]] | None:
        """What was committed last, its step and small arrays; None if nothing was. To be called when all rows are made.

        Raises:
            ValueError: the rows that were made from this folder are not those that were committed.
        """
        if self._record is None:
            return None
        if missing := sorted(set(self._record.halves) ^ set(self._files)):
            raise self._other_homes(missing[0])
        return self._record.step, read_record(self._beside(""))[1]

    def clear(self) -> None:
        """Removes this process's files from the folder; what was committed is gone. No rows may be in use."""
        self._uncommit()
        for file in (*self._files.values(), *self._scratch):
            file.close()
        self._files.clear()
        self._scratch.clear()
        self._settle.clear()
        self.num_bytes = 0
        self._remove_rows()

    def close(self) -> None:
        """Gives the folder back to other processes. No rows may be in use."""
        for file in (*self._files.values(), *self._scratch):
            file.close()
        self._files.clear()
        self._scratch.clear()
        if self._unlock is not None:
            self._unlock()
        self.is_closed = True

    # -- what is there ------------------------------------------------------------------------------------------------
    def _locked(self) -> int:
        """Makes the folder, and takes it for this process until that ends, however it does."""
        above = self.path.parent.parent
        if not above.is_dir():
            raise FileNotFoundError(
                errno.ENOENT,
                f"the folder {self.path.parent} can't be made: {above} is not there. Is its disk mounted? If so: "
                f"mkdir -p {above}",
            )
        path = self.path / f"lock.{self._index}"
        with explained(f"the folder {self.path} can't be used"):
            for folder in (self.path.parent, self.path):
                folder.mkdir(exist_ok=True)
            self._refuse_others(path)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            whose = os.pread(handle, 100, len(_LOCK)).decode(errors="replace").strip()
            os.close(handle)
            raise BlockingIOError(
                errno.EWOULDBLOCK,
                f"{self.path} is in use by process {whose or 'unknown'}: wait for its end, or name another folder",
            ) from error
        os.ftruncate(handle, 0)
        os.pwrite(handle, _LOCK + f"{os.getpid()}\n".encode(), 0)
        return handle

    def _known(self) -> Committed | None:
        """What was committed last. Where nothing was, rows that are there mean nothing, and go."""
        path, before = self._beside(""), self._beside(".before")
        self._refuse_others(path)
        if before.exists() and not path.exists():  # a commit was cut off between its two renames
            os.replace(before, path)
        if not path.exists():
            self._remove_rows()
            return None
        record, _ = read_record(path)
        if record.identity != self._identity:
            there, given = json.loads(record.identity), json.loads(self._identity)
            names = [name for name in sorted({*there, *given}) if there.get(name) != given.get(name)]
            differing = "; ".join(f"{name}: {there.get(name)!r:.80}, here {given.get(name)!r:.80}" for name in names)
            raise ValueError(
                f"{self.path} holds the state of another program, of step {record.step} ({differing}). Name another "
                "folder, or remove this one if nobody needs it"
            )
        return record

    def _go_back(self) -> str:
        """One process may have been killed before it had committed what others had: all go back to what all have.
        Commits are told apart by their numbers: a run that was taken over from elsewhere may commit a step twice, or
        an earlier one after a later one.

        Returns:
            the run's name, which all processes give their files.
        """
        mine = (self._record.number, self._record.run) if self._record else (-1, secrets.token_hex(8))
        numbers, runs = last_commits(*mine)
        last = min(numbers)
        with together("open", self.path):
            if last < 0 and max(numbers) == 0:  # the first commit was not everybody's: there is none
                self._uncommit()
                self._remove_rows()
                return runs[0]
            if last < 0 <= max(numbers):
                without = [process for process, number in enumerate(numbers) if number < 0]
                raise ValueError(
                    f"of the processes, {without} have no state in {self.path}, and the others have: name the folder "
                    "that all worked with, or another one"
                )
            if last >= 0 and len(set(runs)) > 1:
                raise ValueError(
                    f"in {self.path} processes have states of different runs: name the folder that all worked with, "
                    "or another one"
                )
            if mine[0] > last:
                before = read_record(self._beside(".before"))[0] if self._beside(".before").exists() else None
                if before is None or before.number != last:
                    raise ValueError(
                        f"in {self.path} processes are more than one commit apart ({numbers}), so that no state is "
                        "left that all have: go on from a checkpoint, with another folder"
                    )
                os.replace(self._beside(".before"), self._beside(""))
                sync_names(self.path)
                self._record = before
        return runs[0]

    def _committed(self, name: str, path: Path, first: bytes, size: int) -> str:
        """Which places of a file of rows are current, which is there and whole."""
        assert self._record is not None
        if name not in self._record.halves:
            raise self._other_homes(name)
        what = f"{path}, which holds rows of step {self._record.step}"
        if not path.exists():
            raise FileNotFoundError(
                errno.ENOENT, f"{what}, is not there. What it held is lost: restore a checkpoint, with another folder"
            )
        with explained(f"{what}, can't be read"), open(path, "rb") as file:
            found, there = file.read(len(first)), os.fstat(file.fileno()).st_size
        if there < size and first.startswith(found):
            raise cut_short(path, size)
        if found != first:
            if not found.startswith(self._start()):
                raise ValueError(f"{path} holds rows of another run than {self._beside('')}: one of the two was moved")
            raise self._other_homes(name)
        return self._record.halves[name]

    def _other_homes(self, name: str) -> ValueError:
        step = self._record.step if self._record else -1
        return ValueError(
            f"{self.path} holds the state of this program, of step {step}, but keeps {name} otherwise than this plan "
            "does: give the budget=, host=, disk= and offload= that it was made with, or another folder"
        )

    # -- files --------------------------------------------------------------------------------------------------------
    def _make(self, path: Path, first: bytes, size: int) -> None:
        """A file of rows that none is in yet. It has its name when its place on the disk is its own."""
        unfinished = path.with_name(path.name + ".new")
        for each in (path, unfinished):
            self._refuse_others(each)
            each.unlink(missing_ok=True)
        allocate(unfinished, size, first)
        os.replace(unfinished, path)

    def _start(self) -> bytes:
        return _MAGIC + f"{self._run}\n".encode()

    def _first_bytes(self, facts: Mapping[str, Any]) -> bytes:
        return (self._start() + json.dumps(facts).encode()).ljust(BLOCK, b"\0")

    def _remove_rows(self) -> None:
        for ending in (".rows", ".rows.new"):
            for path in sorted(self.path.glob(f"*.{self._index}{ending}")):
                if _is_ours(path):
                    path.unlink()

    def _before_write(self, is_current: bool) -> None:
        """Called by threads. What is committed and about to be written over is no state any more."""
        self._refuse_between()
        if is_current:
            self._uncommit()

    def _refuse_between(self) -> None:
        if self._is_between:
            raise OSError(
                errno.EIO,
                f"a commit to {self.path} broke off when it was about to be the current one: start again, with the "
                "same folder, and the run goes on from it or from the one before",
            )

    def _uncommit(self) -> None:
        with self._guard, explained(f"{self.path} can't be written"):
            if self._record is not None:
                for ending in (".before", ""):
                    self._beside(ending).unlink(missing_ok=True)
                sync_names(self.path)
                self._record = None

    def _reserve(self, name: str, size: int) -> None:
        total = self.num_bytes + size
        if self._limit is not None and total > self._limit:
            raise ValueError(
                f"disk={self._limit / 2**20:,.1f}MiB is too little: {shown(size)} for {name}, "
                f"{shown(total)} in all. Give disk={-(-total // 2**20)}MiB or more, or more by budget= or host=, so "
                "that less is on disk"
            )

    def _refuse_others(self, path: Path) -> None:
        if path.exists() and not _is_ours(path):
            raise FileExistsError(errno.EEXIST, f"{path} is in the way, and is no file of cjax's: move it away")

    def _beside(self, ending: str) -> Path:
        return self.path / f"commit.{self._index}{ending}"


def num_records() -> int:
    """How many a process keeps at once: the one that is current stays until the new one is there, and with several
    processes the one before it."""
    return 2 + (jax.process_count() > 1)


def _is_ours(path: Path) -> bool:
    """All our files begin so from the moment they have a size."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        first = file.read(len(_OURS))
    return first == _OURS or not first
