"""On an NVIDIA GPU: values and gradients are those of a CPU, the attention kernel is used and agrees with what it
stands for, memory is as predicted, checkpoints go to and fro. `make test-gpu`; otherwise none of it runs."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from benchmarks.models import TINY, Row

import cjax
import cjax.sharding.place.model

pytestmark = pytest.mark.gpu
PADDED = {"bert padded": "bert", "t5 padded": "t5"}
NAMES = [*TINY, *PADDED]


def row_of(name: str) -> tuple[Row, dict[str, np.ndarray]]:
    row = TINY[PADDED.get(name, name)]
    batch = row.batch_of(8, 1)
    if name in PADDED:
        text = batch["source" if "source" in batch else "inputs"]
        lengths = np.random.default_rng(0).integers(3, text.shape[1], len(text))
        batch["present"] = (np.arange(text.shape[1]) < lengths[:, None]).astype(np.int32)
    return row, batch


def program(name: str, plan: str, device: Any) -> cjax.Program:
    row, batch = row_of(name)
    return cjax.parallelize(row.build, row.loss, optax.adamw(1e-3), batch, plan, devices=[device])


def gradients(made: cjax.Program, name: str) -> tuple[float, np.ndarray]:
    loss, grads = made.value_and_grad(made.init(0), row_of(name)[1])
    return float(loss), np.concatenate([np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(grads)])


def apart(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def gpu() -> Any:
    return jax.devices("gpu")[0]


@pytest.mark.parametrize("name", NAMES)
def test_float32_is_a_cpus(name: str) -> None:
    with jax.default_matmul_precision("float32"):
        (loss, grads), (wanted, there) = (
            gradients(program(name, "data=1", device), name) for device in (gpu(), jax.devices("cpu")[0])
        )
    assert abs(loss - wanted) < 1e-5 * abs(wanted) and apart(grads, there) < 1e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_the_kernel_is_used_and_rounds_no_more(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = f"data=1 precision={precision}"
    _, wanted = gradients(program(name, "data=1", jax.devices("cpu")[0]), name)
    fused = program(name, plan, gpu())
    assert cjax.audit(fused.lower().compile()).attention_kernels
    _, by_kernel = gradients(fused, name)
    monkeypatch.setattr(cjax.sharding.place.model, "kernel_for", lambda mesh: None)
    _, as_written = gradients(program(name, plan, gpu()), name)
    assert apart(by_kernel, wanted) < 1.5 * apart(as_written, wanted)


def test_memory_is_as_predicted_and_does_not_move() -> None:
    row = dataclasses.replace(TINY["gpt"], config=dataclasses.replace(TINY["gpt"].config, embed_dim=1024, context=512))
    row = dataclasses.replace(row, seq=512)
    made = cjax.parallelize(
        row.build, row.loss, optax.adamw(1e-3), row.shapes(32), "precision=bfloat16", devices=[gpu()]
    )
    # On the device already: of batches that are on their way, there are as many as the host is ahead.
    state, batch = made.init(0), jax.device_put(row.batch_of(32, 0), gpu())
    used = []
    for step in range(100):
        state, metrics = made.step(state, batch)
        if step in (10, 99):
            jax.block_until_ready(metrics)
            used.append(gpu().memory_stats()["peak_bytes_in_use"])
    assert used[0] == used[1]
    assert abs(made.report().memory.total - used[1]) < 0.05 * used[1]


@pytest.mark.parametrize("there", [True, False])
def test_checkpoints_go_to_a_cpu_and_back(there: bool, tmp_path: Path) -> None:
    cpu = jax.devices("cpu")[0]
    first, second = (program("gpt", "data=1", device) for device in ((gpu(), cpu) if there else (cpu, gpu())))
    state, _ = first.step(first.init(0), row_of("gpt")[1])
    first.save(tmp_path / "kept", state)
    again = second.restore(tmp_path / "kept")
    for a, b in zip(jax.tree.leaves(first.params(state)), jax.tree.leaves(second.params(again)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert int(again.step) == 1
