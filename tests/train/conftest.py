"""A program small enough to train in a test: least squares by momentum, one weight vector, on one device."""

import dataclasses
import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, SingleDeviceSharding

from cjax import checkpoint
from cjax.report.step import FlopCount, MemoryUse, Report

TRUTH = np.array([1.0, -2.0, 0.5], np.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["step", "w", "momentum", "key"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class SmallState:
    step: jax.Array
    w: jax.Array
    momentum: jax.Array
    key: jax.Array

    @property
    def _scaling(self) -> SimpleNamespace:
        return SimpleNamespace(num_skipped=0)  # what is poisoned is poisoned behind the steps that a test resumes at


@functools.partial(jax.jit, donate_argnums=0)
def _step(state: SmallState, batch: dict[str, jax.Array]) -> tuple[SmallState, dict[str, Any]]:
    noise = 0.01 * jax.random.normal(jax.random.fold_in(state.key, state.step), state.w.shape)

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((batch["x"] @ (w + noise) - batch["y"]) ** 2)

    value, grad = jax.value_and_grad(loss)(state.w)
    finite = jnp.isfinite(value)
    momentum = jnp.where(finite, 0.5 * state.momentum + grad, state.momentum)
    w = jnp.where(finite, state.w - 0.05 * momentum, state.w)
    metrics = {"loss": value, "grad_norm": jnp.linalg.norm(grad), "skipped": 1 - finite.astype(jnp.int32)}
    return SmallState(state.step + 1, w, momentum, state.key), {**metrics, "aux": {"mean": jnp.mean(w)}}


class SmallProgram:
    """What `fit` uses of a `cjax.Program`, and nothing else."""

    plan = SimpleNamespace(precision="float32")
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    data_shard = (0, 1)
    loss_scale = None

    def __init__(self, plan: str = "data=1") -> None:
        self.plan = type("P", (), {"precision": "float32", "__str__": lambda _: plan})()
        self.num_steps = 0
        self.learned: tuple[float, ...] = ()

    def learn(self, step_seconds: tuple[float, ...]) -> None:
        self.learned = step_seconds

    def init(self, seed: int = 0) -> SmallState:
        return SmallState(jnp.int32(0), jnp.zeros(3), jnp.zeros(3), jax.random.key(seed))

    def step(self, state: SmallState, batch: dict[str, np.ndarray]) -> tuple[SmallState, dict[str, Any]]:
        self.num_steps += 1
        return _step(state, batch)

    def evaluate(self, state: SmallState, batches: Any) -> dict[str, jax.Array]:
        losses = [jnp.mean((batch["x"] @ state.w - batch["y"]) ** 2) for batch in batches]
        return {"loss": jnp.mean(jnp.stack(losses)), "aux": {"off": jnp.abs(state.w[0] - TRUTH[0])}}

    def to_arrays(self, state: SmallState) -> dict[str, Any]:
        tree = {"params": {"w": state.w}, "opt_state": (state.momentum,), "step": state.step, "key": state.key}
        return jax.tree.map(jnp.copy, tree)

    def to_rows(self, state: SmallState) -> tuple[dict[str, Any], None]:
        return self.to_arrays(state), None

    def restore(self, path: Path) -> SmallState:
        return self.from_arrays(checkpoint.restore(path, self.abstract_state())[0])

    def abstract_state(self) -> dict[str, Any]:
        shape = jax.eval_shape(lambda: self.to_arrays(self.init()))
        sharding = SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shape)

    def from_arrays(self, tree: dict[str, Any]) -> SmallState:
        return SmallState(tree["step"], tree["params"]["w"], tree["opt_state"][0], tree["key"])

    def meta(self, state: SmallState) -> dict[str, Any]:
        return {"plan": str(self.plan), "step": int(state.step)}

    def report(self) -> Report:
        return Report(str(self.plan), "1 x cpu", MemoryUse(params=12, optimizer=12), flops=FlopCount(model=60))


class SmallData:
    """Rows made from their global index, so that a row says which one it is; some can be poisoned."""

    identity = {"made": "of numbers"}

    def __init__(self, batch_size: int = 4, poisoned: tuple[int, ...] = ()) -> None:
        self.batch_size, self.poisoned = batch_size, poisoned
        self.read: list[int] = []

    def batches(self, start: int = 0):
        while True:
            rows = np.arange(start, start + self.batch_size)
            self.read.append(start)
            yield self.make(rows)
            start += self.batch_size

    def make(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        x = np.stack([np.sin(rows + 1.0), np.cos(rows * 1.7), np.sin(rows * 0.3)], axis=1).astype(np.float32)
        x[np.isin(rows, self.poisoned)] = np.nan
        return {"x": x, "y": x @ TRUTH}

    def validation(self):
        return [self.make(np.arange(1000, 1008))]


@pytest.fixture
def program() -> SmallProgram:
    return SmallProgram()
