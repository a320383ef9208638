"""Two real processes walk together: what each has on disk is committed by both, and goes to any plan and back."""

import os
import socket
import sys
from pathlib import Path

import pytest
from forked import Forks

PROCESS = """
import os
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import cjax

address, index, root, scans = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "scan"
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(address, 2, index)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.Dense(16)(nn.relu(nn.Dense(32)(x)))
        return (x, None) if scans else x


class Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        if scans:
            x, _ = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=4)()(x, None)
        else:
            for _ in range(4):
                x = Block()(x)
        return nn.Dense(8)(x)


def loss(model, batch):
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


rng = np.random.default_rng(0)
whole = {"x": rng.normal(size=(8, 16)).astype("f"), "y": rng.integers(0, 8, 8).astype("int32")}
batch = {name: rows[4 * index : 4 * index + 4] for name, rows in whole.items()}
DISK = "zero=3 offload=params+optimizer+gradients host=0B disk=10MB"  # clipped, updates wait for the next step


def made(plan):
    optimizer = optax.chain(optax.clip_by_global_norm(1e-2), optax.adam(1e-2)) if scans else optax.adam(1e-2)
    return cjax.parallelize(Net(), loss, optimizer, whole, plan, disk_folder=root / "rows")


def values(program, state):
    found = []
    for x in jax.tree.leaves(program.to_arrays(state)):
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        is_whole = not isinstance(x, jax.Array) or x.is_fully_addressable
        found.append(np.asarray(x if is_whole else multihost_utils.process_allgather(x, tiled=True)))
    return found


def check(program, state, wanted, what):
    for x, y in zip(values(program, state), wanted, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=what)


disk = made(DISK)
state = disk.init(0)
for _ in range(2):
    state, metrics = disk.step(state, batch)
two = values(disk, state)
disk.save(root / "disk", state)
again = made(DISK)
check(again, again.resume(), two, "resumed")
host, plain = disk.replan("data=4 offload=params+optimizer"), disk.replan("zero=3")
on_host, on_devices = host.restore(root / "disk"), plain.restore(root / "disk")
check(host, on_host, two, "a checkpoint to host memory")
check(plain, on_devices, two, "a checkpoint to devices")
state = again.resume()
check(host, host.restore(state), two, "disk to host memory")
check(plain, plain.restore(on_host), two, "host memory to devices")
check(again, again.restore(on_devices), two, "devices to disk")
plain.save(root / "plain", on_devices)
check(host, host.restore(root / "plain"), two, "a checkpoint of devices to host memory")
arrays, _ = cjax.checkpoint.restore(root / "disk", host.abstract_state())
check(host, host.from_arrays(arrays), two, "arrays")
state, _ = again.step(again.resume(), batch)
assert bool(state._rows.due) == scans
three = values(again, state)
again._walking._release()
multihost_utils.sync_global_devices("released")
if index:  # as if it had been killed before it had committed what the other has
    (record,) = (root / "rows").glob("cjax-*/commit.1.before")
    os.replace(record, record.with_name("commit.1"))
multihost_utils.sync_global_devices("killed")
last = made(DISK)
state = last.resume()
assert int(state.step) == 2
check(last, state, two, "both went back")
state, _ = last.step(state, batch)
check(last, state, three, "and on")
"""


@pytest.mark.full
@pytest.mark.parametrize("layers", ["list", "scan"])
def test_two_processes_go_on_together(layers: str, tmp_path: Path, forks: Forks) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}
    processes = [["-c", PROCESS, address, str(index), str(tmp_path), layers] for index in range(2)]
    done = forks.together(processes, [environment] * 2)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
