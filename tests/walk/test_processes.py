"""Two real processes keep rows together: each its own shards, and what was committed is what both have."""

import os
import socket
from pathlib import Path

from forked import Forks

PROCESS = """
import dataclasses, os, shutil, sys
from pathlib import Path
import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from cjax.walk.files import Folder
from cjax.walk.record import read_record, write_record
from cjax.walk.stores import make_rows

address, index, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, index)
mesh = Mesh(np.array(jax.devices()).reshape(4), ("a",))
shapes = [
    jax.ShapeDtypeStruct(size, "float32", sharding=NamedSharding(mesh, spec))
    for size, spec in (((8, 3), P("a")), ((5,), P()))
]
HOMES = ["device", "host", "disk"]


def row(seed):
    values = [np.random.default_rng((seed, k)).normal(size=shape.shape).astype("f") for k, shape in enumerate(shapes)]
    return values, tuple(
        jax.make_array_from_callback(shape.shape, shape.sharding, lambda index: value[index])
        for value, shape in zip(values, shapes)
    )


def check(rows, layer, seed):
    rows.ahead(layer)
    for x, value, shape in zip(rows.fetch(layer), row(seed)[0], shapes):
        assert x.sharding == shape.sharding and not x.is_fully_addressable
        for shard in x.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])


def opened(limit=None):
    folder = Folder(path, {}, limit)
    return folder, make_rows(shapes, HOMES, "params", folder=folder)


folder, rows = opened()
assert folder.resume() is None
for step in range(3):
    for layer in range(3):
        rows.put(layer, row(10 * step + layer)[1])
    folder.commit(step, {"step": np.array(step + 100 * index)})
    for layer in range(3):
        check(rows, layer, 10 * step + layer)
rows.close()
folder.close()
if index == 1:  # as if it had been killed before it had committed what the other has
    shutil.copyfile(path + "/commit.1.before", path + "/commit.1")
multihost_utils.sync_global_devices("killed")
folder, rows = opened(limit=None if index else 1 << 17)
known = folder.resume()
assert known == (1, {"step": 1 + 100 * index}), known
check(rows, 2, 12)
rows.put(2, row(40)[1])
try:
    folder.commit(2, {"large": np.zeros(0 if index else 1 << 20, np.int8)})
except (OSError, ValueError) as error:
    assert ("[0] could not commit" if index else "disk=0.1MiB is too little") in str(error), error
else:
    raise AssertionError("one has no place for it")
assert folder.resume() == known
rows.close()
folder.close()
try:
    Folder(path, {"model": "other"} if index else {})
except (OSError, ValueError) as error:
    assert ("another program" if index else "[1] could not open") in str(error), error
else:
    raise AssertionError("one is another program")
folder, rows = opened()
check(rows, 2, 12)


def reopened(change):
    rows.close()
    folder.close()
    if index == 1:  # as if it had been killed, or another's files were there
        change(Path(path + "/commit.1"))
    multihost_utils.sync_global_devices("changed")
    return opened()


# A step may be committed twice, of two runs: what all have is told by the commit.
for seed in (50, 60):
    rows.put(2, row(seed)[1])
    folder.commit(2, {"seed": np.array(seed)})
folder, rows = reopened(lambda record: os.replace(str(record) + ".before", record))
assert folder.resume() == (2, {"seed": 50}), folder.resume()
check(rows, 2, 50)
folder.commit(3, {})
run, number = folder._record.run, folder._record.number


def changed(**fields):
    def change(record):
        found, small = read_record(record)
        write_record(record, dataclasses.replace(found, **fields), small)
    return change


for fields, words in (({"run": "0" * 16}, "states of different runs"), ({"number": 1}, "more than one commit apart")):
    try:
        reopened(changed(**fields))
    except (OSError, ValueError) as error:
        alone = index and "number" in fields
        assert ("[0] could not open" if alone else words) in str(error), error
    else:
        raise AssertionError(words)
    folder.close()
    if index:
        changed(run=run, number=number)(Path(path + "/commit.1"))
# What only some have committed first is nobody's.
path += "-2"
folder, rows = opened()
rows.put(2, row(70)[1])
rows.put(0, row(70)[1])
rows.put(1, row(70)[1])
folder.commit(0, {})
folder, rows = reopened(lambda record: record.unlink())
assert folder.resume() is None and folder.step is None


# What is kept without a commit is kept by all: where one could not write, all are told.
def broken():
    if index == 0:
        raise OSError("no place")


folder.before_commit(broken)
try:
    folder.keep()
except OSError as error:
    assert ("[0] could not write" if index else "no place") in str(error), error
else:
    raise AssertionError("one could not write")
"""


def test_two_processes_keep_their_own_shards_and_go_back_together(tmp_path: Path, forks: Forks) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    scripts = [["-c", PROCESS, address, str(index), str(tmp_path / "rows")] for index in range(2)]
    done = forks.together(scripts, [environment] * 2)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
    names = {f"{name}.{index}{end}" for index in range(2) for name, end in (("commit", ""), ("lock", ""))}
    assert names <= {each.name for each in (tmp_path / "rows").iterdir()}
