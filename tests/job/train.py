"""What jobs of these tests run: least squares by two layers, whose state counts how often each sample was seen."""

import json
import os
import sys
import time
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import cjax
from cjax.job import member
from cjax.train import fit

SAMPLES, BATCH = 16384, 8
DTYPE = jnp.float64 if jax.config.read("jax_enable_x64") else jnp.float32
BETWEEN_FAILURES = 300.0  # seconds


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, index: jax.Array, train: bool) -> tuple[jax.Array, jax.Array]:
        seen = self.param("seen", nn.initializers.zeros, (SAMPLES,), DTYPE)
        first, second = nn.Dense(8, param_dtype=DTYPE), nn.Dense(1, param_dtype=DTYPE)
        y = second(nn.tanh(first(nn.Dropout(0.1, deterministic=not train)(x))))
        return y[:, 0], seen[index]


def loss(model: Net, batch: dict[str, jax.Array], train: bool) -> jax.Array:
    y, seen = model(batch["x"], batch["index"], train)
    # The derivative by `seen` is one for each time that a sample is in the batch.
    return jnp.mean((y - batch["y"]) ** 2 + seen)


class Samples:
    """Each sample once an epoch, in an order of its own."""

    identity = {"made": "of numbers"}

    def __init__(self, shard: tuple[int, int], pause: float) -> None:
        self.shard, self.pause = shard, pause
        self.order = np.random.default_rng(0).permutation(SAMPLES)

    def batches(self, start: int = 0):
        index, count = self.shard
        while True:
            rows = self.order[np.arange(start, start + BATCH) % SAMPLES]
            time.sleep(self.pause)
            yield make(rows[index * BATCH // count : (index + 1) * BATCH // count])
            start += BATCH

    def validation(self):
        for start in range(0, 32, BATCH):
            time.sleep(self.pause)
            index, count = self.shard
            rows = np.arange(start, start + BATCH)
            yield make(rows[index * BATCH // count : (index + 1) * BATCH // count])


def make(rows: np.ndarray) -> dict[str, np.ndarray]:
    x = np.stack([np.sin(rows + 1.0), np.cos(rows * 1.7)], axis=1).astype(DTYPE)
    return {"x": x, "y": x @ np.array([1.0, -2.0], DTYPE), "index": rows.astype(np.int32)}


def main(steps: int, pause: float, plan: str, every: int | None, snapshots: str) -> int:
    cjax.initialize()
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), make(np.arange(BATCH)))
    moments = optax.multi_transform(
        {"net": optax.adam(1e-2), "seen": optax.sgd(float(BATCH))},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "seen" if "seen" in jax.tree_util.keystr(path) else "net", params
        ),
    )
    mine, plans = member(), plan.split("|")  # one for each start, in turn
    program = cjax.parallelize(Net(), loss, moments, shapes, plans[mine.incarnation % len(plans) if mine else 0])
    data = Samples(program.data_shard, pause)
    folder = os.environ.get("FOLDER") if mine is None else None
    number, _, peers = snapshots.partition(":")
    memory = mine.folder / f"memory-{mine.rank}" if peers and mine else None  # as if each were on a host of its own
    result = fit(
        program, data, steps=steps, folder=folder, log_every=1, resume=None if mine else "auto",
        checkpoint_every="auto" if every is None else every, between_failures=BETWEEN_FAILURES,
        evaluate_every=every or 50, snapshot_every=int(number) or None, snapshot_folder=memory,
        snapshot_peers=bool(peers),
    )  # fmt: skip
    if result.exit_code:
        return result.exit_code
    place = Path(folder or mine.folder)
    params = jax.tree.map(lambda a: multihost_utils.process_allgather(a, tiled=True), program.params(result.state))
    if jax.process_index() == 0:
        leaves = {jax.tree_util.keystr(path): a for path, a in jax.tree_util.tree_leaves_with_path(params)}
        np.savez(place / "final.npz", **leaves)
        print(json.dumps({"loss": result.loss, "samples": result.samples}))
    return 0


if __name__ == "__main__":
    every = None if sys.argv[4] == "auto" else int(sys.argv[4])
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), sys.argv[3], every, sys.argv[5]))
