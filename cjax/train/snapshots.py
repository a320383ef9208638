"""Copies of a run's state in the memory of its hosts, which outlive the processes: what a restart goes on from first.

Each process copies what its own devices hold to host memory while the next step runs, and a thread writes it into a
file below /dev/shm. A step counts where all processes have theirs. Two are kept, so that one is whole at all times.
With peers, each also gives its file to a process of another host, and a step counts where every part is somewhere.
"""

import concurrent.futures
import contextlib
import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import SingleDeviceSharding

from cjax.checkpoint.part import describe_part, read_part, remove_unfinished, write_part
from cjax.checkpoint.rows import key_impl
from cjax.job.files import read_object, write_whole
from cjax.mesh import own_context, together
from cjax.program import State
from cjax.train.peers import Peers, tell_all

_logger = logging.getLogger("cjax")
_HOST = "pinned_host"
_KEPT = 2  # steps; a third is there while it is being written
_MEMORY = Path("/dev/shm")
_NOTE = "snapshots.json"  # in the folder of the run: which snapshots are its own


class Snapshots:
    """The snapshots of one run.

    With several processes each makes the same calls.

    Args:
        run: its folder.
        shape: a state of placed shapes.
        plan: of the program.
        every: steps between two.
        folder: where they go: of this host, and such as outlives a process; host memory if not given.
        is_new: that the run begins, so that what an earlier one left here is nobody's.
        has_peers: each process also keeps what another one holds.

    Attributes:
        place: the folder of this run's.
        num_bytes: that those of this process take at most, what it keeps for another included.
        seconds: that they have held up the training.

    Raises:
        OSError: there is no room for them.
    """

    def __init__(
        self,
        run: Path,
        shape: State,
        plan: str,
        every: int,
        folder: str | Path | None = None,
        is_new: bool = False,
        has_peers: bool = False,
    ):
        self._run, self._every = run, every
        self._leaves, self._treedef = jax.tree.flatten(shape)
        self._pieces = [_pieces(_plain(leaf)) for leaf in self._leaves]
        self._rank, self._count = jax.process_index(), jax.process_count()
        self._layout = self._layout_of(plan)
        root = Path(folder) if folder is not None else _MEMORY if _MEMORY.is_dir() else run / "snapshots"
        name = hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:12]
        known = None if is_new else (read_object(run / _NOTE) or {}).get("token")
        token, self._start = _of_first(secrets.randbits(31) if known is None else known, secrets.randbits(31))
        self.place = root / f"cjax-{os.getuid()}-{name}-{token}"
        self._others = [each for each in root.glob(f"cjax-{os.getuid()}-{name}-*") if each != self.place]
        self.seconds = 0.0
        own = sum(_size(_plain(leaf), index) for leaf, found in self._each() for index in found)
        self._peers: Peers | None = None
        if has_peers and self._count > 1:
            self._peers = Peers(self.place, _KEPT, {"layout": self._layout, "bytes": own})
        held = 0 if self._peers is None else self._peers.told[self._peers.source]["bytes"]
        self.num_bytes = (_KEPT + 1) * (own + held)
        try:
            with together("make room for snapshots", self.place):
                self._make_room(own, held)
                if self._rank == 0:
                    write_whole(run / _NOTE, json.dumps({"token": token, "place": str(self.place)}))
        except BaseException:
            self._hang_up()
            raise
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "snapshot")
        self._pending: concurrent.futures.Future[None] | None = None

    def _each(self) -> Any:
        return zip(self._leaves, self._pieces, strict=True)

    def _layout_of(self, plan: str) -> str:
        """What has to be the same for bytes to be read back as they are."""
        held = [
            [str(leaf.shape), str(leaf.dtype), str(leaf.sharding.spec), [*map(str, found)]]
            for leaf, found in self._each()
        ]
        said = [plan, self._rank, self._count, jax.device_count(), str(self._treedef.num_leaves), held]
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()

    def _make_room(self, own: int, held: int) -> None:
        for other in self._others:  # of a run that had the same folder before
            shutil.rmtree(other, ignore_errors=True)
        self.place.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self.place.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{self.place} belongs to somebody else: give snapshot_folder=")
        remove_unfinished(self.place)
        if (self.place / "peers").is_dir():
            remove_unfinished(self.place / "peers")
        there = sum(file.stat().st_size for file in self._files())
        free = shutil.disk_usage(self.place).free + there
        also = f", and the {held / 2**20:,.0f} MiB of a peer" if held else ""
        if free < self.num_bytes:
            raise OSError(
                errno.ENOSPC,
                f"snapshots of this process take {self.num_bytes / 2**20:,.0f} MiB ({_KEPT + 1} times the "
                f"{own / 2**20:,.0f} MiB that its devices hold{also}), and {free / 2**20:,.0f} MiB are free in "
                f"{self.place.parent}: give snapshot_folder=, on a disk of this host, or leave out snapshot_every=",
            )

    # -- writing ------------------------------------------------------------------------------------------------------
    def is_due(self, step: int) -> bool:
        return step % self._every == 0

    @own_context
    def begin(self, state: State, step: int, said: Mapping[str, Any]) -> None:
        """Begins to copy; when it returns, the state may be given to the next step.

        Args:
            state: which.
            step: behind which it is.
            said: what else goes on from there, in JSON's types.

        Raises:
            OSError: the one before could not be written, or given to a peer; this one is begun all the same.
        """
        begun, failed = time.perf_counter(), None
        try:
            self.wait()
        except OSError as error:
            failed = error
        for old in sorted(self._own())[:-_KEPT]:
            self._file(*old).unlink(missing_ok=True)
        datas = []
        for leaf, (_, found) in zip(jax.tree.leaves(state), self._each(), strict=True):
            shards = {shard.device: shard.data for shard in _bits(leaf).addressable_shards}
            datas += [shards[devices[0]] for devices in found.values()]
        homes = [SingleDeviceSharding(next(iter(data.devices())), memory_kind=_HOST) for data in datas]
        # Not where it was: the next step writes over that.
        copies = jax.device_put(datas, homes, may_alias=False)
        whole = {**said, "step": step, "layout": self._layout}
        self._pending = self._thread.submit(self._write, self._file(step, self._start), whole, copies)
        self.seconds += time.perf_counter() - begun
        if failed is not None:
            raise failed

    def _write(self, file: Path, said: Mapping[str, Any], copies: list[jax.Array]) -> None:
        with jax.transfer_guard("allow"):  # a thread of its own has the guard that JAX was configured with
            write_part(file, said, [np.asarray(copy) for copy in copies])
        if self._peers is not None:
            self._peers.put(file)

    def wait(self) -> None:
        """Returns when the last one is written, and given to the peer.

        Raises:
            OSError: it could not be.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def _file(self, step: int, start: int) -> Path:
        return self.place / f"{step}-{start}-{self._rank}"

    def _own(self) -> list[tuple[int, int]]:
        """Step and start of those that this process has, whole ones or not."""
        names = [file.name.split("-") for file in self.place.glob(f"[0-9]*-[0-9]*-{self._rank}")]
        return [(int(step), int(start)) for step, start, _ in names]

    def _files(self) -> Iterator[Path]:
        """All that this process has: its own, and what it keeps for another."""
        yield from self.place.glob(f"[0-9]*-[0-9]*-{self._rank}")
        if self._peers is not None:
            yield from (self.place / "peers").glob(f"[0-9]*-[0-9]*-{self._peers.source}")

    # -- going on -----------------------------------------------------------------------------------------------------
    def newest(self, after: int) -> tuple[int, int] | None:
        """Step and start of the last one of which the part of each process is there, behind a step; None if there is
        none. Others are of no use to anybody, and go."""
        layouts = {self._rank: self._layout} if self._peers is None else dict(enumerate(self._layouts(self._peers)))
        mine = []
        for file in self._there():
            (step, start, rank), said = map(int, file.name.split("-")), describe_part(file)
            if said is not None and rank in layouts and said.get("layout") == layouts[rank] and step > after:
                mine.append((step, start, rank))
        holders: dict[tuple[int, int], dict[int, list[int]]] = {}
        for process, held in enumerate([mine] if self._count == 1 else tell_all(mine)):
            for step, start, rank in held:
                holders.setdefault((step, start), {}).setdefault(rank, []).append(process)
        found = max((key for key, parts in holders.items() if len(parts) == self._count), default=None)
        if found is not None and self._peers is not None and not self._fetch(self._peers, found, holders[found]):
            found = None
        for other in [*self._files(), *self._there()]:
            if found is None or not other.name.startswith(f"{found[0]}-{found[1]}-"):
                other.unlink(missing_ok=True)
        return found

    @staticmethod
    def _layouts(peers: Peers) -> list[str]:
        return [each["layout"] for each in peers.told]

    def _there(self) -> list[Path]:
        """Those on this host, or without peers of this process."""
        if self._peers is None:
            return [*self._files()]
        return [file for place in (self.place, self.place / "peers") for file in place.glob("[0-9]*-[0-9]*-[0-9]*")]

    def _fetch(self, peers: Peers, found: tuple[int, int], holders: Mapping[int, list[int]]) -> bool:
        """Gets what this process has not, from who keeps it, and has that kept again; whether all have theirs then."""
        problem = ""
        try:
            if self._part(found) is None:
                peers.get(holders[self._rank][0], self._file(*found))
            part = self._part(found)
            if part is not None and peers.keeper not in holders[self._rank]:
                peers.put(part)  # or the next host that is lost would be one too many
        except OSError as error:
            problem = str(error)
        problems = [each for each in tell_all(problem) if each]
        if problems:
            _logger.warning("cjax: the snapshot of step %d is not read, because %s", found[0], problems[0])
        return not problems

    def _part(self, found: tuple[int, int]) -> Path | None:
        """Where on this host this process's part is."""
        name = self._file(*found).name
        files = [self.place / name, *([] if self._peers is None else [self.place / "peers" / name])]
        return next((file for file in files if (describe_part(file) or {}).get("layout") == self._layout), None)

    @own_context
    def read(self, found: tuple[int, int]) -> tuple[State, dict[str, Any]]:
        """The state, to the bit, and what was said beside it."""
        file = self._part(found)
        said = None if file is None else describe_part(file)
        assert file is not None and said is not None, "newest has just read it"
        pieces = iter(read_part(file))
        arrays = []
        for leaf, places in self._each():
            plain = _plain(leaf)
            shards = []
            for index, devices in places.items():
                piece = next(pieces).view(plain.dtype).reshape(_shape(plain.shape, index))
                shards += [jax.device_put(piece, device) for device in devices]
            array = jax.make_array_from_single_device_arrays(plain.shape, plain.sharding, shards)
            is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
            arrays.append(jax.random.wrap_key_data(array, impl=key_impl(leaf)) if is_key else array)
        return jax.tree.unflatten(self._treedef, arrays), said

    def forget(self) -> None:
        """The run went back, or has been kept elsewhere: none of them is of it any more."""
        with contextlib.suppress(OSError):  # then it is not there, which is all that is asked for
            self.wait()
        if self._peers is not None:
            tell_all("nothing more comes")  # of what was on its way
        for file in self._files():
            file.unlink(missing_ok=True)

    def close(self, is_kept: bool = False) -> None:
        """Ends the thread; where the run is kept elsewhere, removes all."""
        self._thread.shutdown()
        if is_kept:
            self.forget()
            for place in (self.place / "peers", self.place):
                with contextlib.suppress(OSError):  # others may have theirs there still
                    place.rmdir()
        self._hang_up()

    def _hang_up(self) -> None:
        peers, self._peers = self._peers, None
        if peers is not None:
            peers.close()


def discard(run: Path) -> None:
    """Of a run that goes on without snapshots: what earlier ones left would be of another past."""
    if (run / _NOTE).exists():
        note = read_object(run / _NOTE) or {}
        if Path(note.get("place", "")).name.startswith("cjax-"):
            shutil.rmtree(note["place"], ignore_errors=True)
        (run / _NOTE).unlink(missing_ok=True)


def _of_first(*numbers: int) -> tuple[int, ...]:
    if jax.process_count() == 1:
        return numbers
    return tuple(int(number) for number in multihost_utils.broadcast_one_to_all(np.array(numbers, np.int32)))


def _plain(leaf: Any) -> Any:
    """The shape of what is kept of a leaf: of a random key its bits."""
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    bits = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(bits.shape, bits.dtype, sharding=leaf.sharding)


def _bits(leaf: jax.Array) -> jax.Array:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


_Index = tuple[tuple[int, int], ...]


def _pieces(leaf: Any) -> dict[_Index, list[Any]]:
    """What this process's devices hold of an array: which stretch of each dim, and who holds it."""
    found: dict[_Index, list[Any]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        stretch = tuple(each.indices(size)[:2] for each, size in zip(index, leaf.shape, strict=True))
        found.setdefault(stretch, []).append(device)
    return found


def _shape(shape: tuple[int, ...], index: _Index) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in index)


def _size(leaf: Any, index: _Index) -> int:
    return int(np.prod(_shape(leaf.shape, index), dtype=np.int64)) * np.dtype(leaf.dtype).itemsize
