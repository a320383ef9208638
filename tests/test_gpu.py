"""On an NVIDIA GPU: values and gradients are those of a CPU, the attention kernel is used and agrees with what it
stands for, memory is as predicted, checkpoints go to and fro. `make test-gpu`; otherwise none of it runs."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks.models import TINY, Row
from kernels import plain

import cjax
import cjax.sharding.place.model
from cjax.sharding.attention.kernel import cudnn

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


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("lengths", [(197, 197), (257, 257), (33, 35), (64, 77), (31, 128), (1, 77)])
@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (True, 9)])
def test_the_kernel_takes_any_length(lengths: tuple[int, int], causal: bool, window: int | None, biased: bool) -> None:
    """Values and gradients beside the formula in float32, of the same rounded operands; keys are shared by heads."""
    if causal and lengths[0] != lengths[1]:
        pytest.skip("a causal mask is of as many keys as queries")
    rng = np.random.default_rng(0)
    shapes = [(3, lengths[0], 4, 64), *[(3, lengths[1], 2, 64)] * 2, (1, 4, *lengths)]
    operands = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes[: 3 + biased]]
    weights = jnp.asarray(rng.normal(size=shapes[0]), jnp.float32)

    def total(kernel: Any, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        query, key, value, *bias = operands
        mixed = kernel(query, key, value, *(bias or [None]), scale=0.125, causal=causal, window=window)
        return jnp.sum(mixed.astype(jnp.float32) * weights), mixed

    def both(kernel: Any, operands: list[jax.Array]) -> list[np.ndarray]:
        over = tuple(range(len(operands)))
        (_, mixed), grads = jax.value_and_grad(functools.partial(total, kernel), over, has_aux=True)(*operands)
        return [np.asarray(x, np.float64) for x in (mixed, *grads)]

    with jax.default_device(gpu()), jax.default_matmul_precision("float32"):
        found = both(jax.jit(cudnn, static_argnames=("scale", "causal", "window")), operands)
        wanted = both(plain, [x.astype(jnp.float32) for x in operands])
    assert max(apart(a, b) for a, b in zip(found, wanted, strict=True)) < 0.01


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
