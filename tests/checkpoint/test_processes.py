"""Two real processes write one checkpoint together, and one process reads it."""

import os
import socket
from pathlib import Path

import jax
import numpy as np
from forked import Forks
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.checkpoint import inspect, restore

from .conftest import make_mesh

PROCESS = """
import sys
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import os
from cjax.checkpoint import Checkpointer, restore, save
from cjax.checkpoint.storage import meet

address, index, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, index)
mesh = Mesh(np.array(jax.devices()).reshape(4), ("a",))
value = np.arange(24, dtype=np.float32).reshape(8, 3)
split, whole = NamedSharding(mesh, P("a")), NamedSharding(mesh, P())
tree = {
    "w": jax.make_array_from_callback((8, 3), split, lambda index: value[index]),
    "b": jax.make_array_from_callback((3,), whole, lambda index: value[0][index]),
    "key": jax.jit(lambda: jax.random.key(4), out_shardings=whole)(),
    "step": 2,
}
arrays = {name: jax.ShapeDtypeStruct(tree[name].shape, tree[name].dtype, sharding=whole) for name in ("w", "b", "key")}
shape = {**arrays, "step": 0}
with Checkpointer(folder, keep=1) as checkpoints:
    checkpoints.save(1, tree, {"plan": "data=4"})
    checkpoints.save(2, tree, {"plan": "data=4"})
    restored, _ = checkpoints.restore(None, shape)
    assert checkpoints.latest() == 2
    np.testing.assert_array_equal(restored["w"].addressable_shards[0].data, value)
same = folder + "/same"
for _ in range(2):
    save(same, tree, {})
if index == 0:
    os.rename(same, same + ".replaced")  # as if killed before the new one took the name
meet()
np.testing.assert_array_equal(restore(same, shape)[0]["w"].addressable_shards[0].data, value)
meet()
save(same, tree, {})
"""


def test_two_processes_write_and_one_reads(tmp_path: Path, forks: Forks):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [["-c", PROCESS, address, str(index), str(tmp_path)] for index in range(2)]
    done = forks.together(processes, [environment] * 2)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "same"]
    assert inspect(tmp_path).meta["num_processes"] == 2 and inspect(tmp_path).meta["num_devices"] == 4
    sharding = NamedSharding(make_mesh(8), P("a"))
    shape = {
        "w": jax.ShapeDtypeStruct((8, 3), np.float32, sharding=sharding),
        "b": np.zeros(3, np.float32),
        "key": jax.random.key(0),
        "step": 0,
    }
    restored, _ = restore(tmp_path / "2", shape)
    np.testing.assert_array_equal(restored["w"], np.arange(24).reshape(8, 3))
    np.testing.assert_array_equal(restored["b"], np.arange(3))
    np.testing.assert_array_equal(jax.random.key_data(restored["key"]), jax.random.key_data(jax.random.key(4)))
