"""Layers in host memory and on disk beside a GPU: the bits of those that stay on it, within the budget. `make
test-gpu`."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import optax
import pytest
from alive import alive
from benchmarks.models import TINY
from contract import digest

import cjax

pytestmark = pytest.mark.gpu
ROW = dataclasses.replace(
    TINY["gpt"], config=dataclasses.replace(TINY["gpt"].config, num_layers=8, embed_dim=512, context=256), seq=256
)
AWAY = "offload=params+optimizer+gradients+activations"
HOMES = {"host": AWAY, "disk": f"{AWAY} host=0B disk=1GiB", "some": "budget=160MiB"}
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)),
}


def walking(plan: str, optimizer: str, folder: Path | None = None) -> cjax.Program:
    return cjax.parallelize(
        ROW.build, ROW.loss, OPTIMIZERS[optimizer](), ROW.shapes(8), f"data=1 microbatches=2 precision=bfloat16 {plan}",
        devices=jax.devices("gpu")[:1], disk_folder=folder,
    )  # fmt: skip


def trained(program: cjax.Program, steps: int = 3) -> tuple[str, list[float], Any]:
    state, losses = program.init(0), []
    for _ in range(steps):
        state, metrics = program.step(state, ROW.batch_of(8, 0))
        losses.append(float(metrics["loss"]))
    return digest(program, state), losses, state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("homes", HOMES)
def test_every_home_has_the_same_bits(homes: str, optimizer: str, tmp_path: Path) -> None:
    wanted, losses, _ = trained(walking("budget=64GiB", optimizer))
    program = walking(HOMES[homes], optimizer, tmp_path)
    found, same, state = trained(program)
    assert same == losses and losses[-1] < losses[0] and found == wanted
    kinds = {x.sharding.memory_kind for x in jax.tree.leaves(state._rows) if isinstance(x, jax.Array)}
    assert kinds <= {"device", "pinned_host"}


def test_what_is_alive_on_the_device_stays_within_the_budget() -> None:
    program = walking(AWAY, "adamw")
    state, bytes_there = program.init(0), []
    for _ in range(3):
        state, metrics = program.step(state, ROW.batch_of(8, 0))
        jax.block_until_ready(metrics)
        for rows in state._rows.every:
            rows.settle()
        bytes_there.append(alive())
    walk = program.report().walk
    assert walk is not None and bytes_there[1] == bytes_there[2] < walk.peak


def test_a_walk_agrees_with_the_step_in_one_program() -> None:
    _, losses, _ = trained(walking(AWAY, "adamw"))
    _, wanted, _ = trained(walking("", "adamw"))
    assert losses == pytest.approx(wanted, rel=5e-3)


def test_evaluation_walks_too() -> None:
    program, plain = walking(AWAY, "adamw"), walking("", "adamw")
    batch = ROW.batch_of(8, 1)
    found, wanted = (made.evaluate(made.init(0), batch) for made in (program, plain))
    assert float(found["loss"]) == pytest.approx(float(wanted["loss"]), rel=2e-3)
