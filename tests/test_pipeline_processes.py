"""A pipeline whose stages are two real processes, against the same steps in one."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from forked import Forks

import cjax
from cjax.models.gpt import GPT, gpt, loss

# By default layers of few equations: how stages meet is not a matter of what is in them.
CASES = [("layers", "pipeline=zero_bubble:2 microbatches=4 zero=3 data=2")]
if os.environ.get("CJAX_TEST_ALL") == "1":
    CASES += [
        ("gpt", "pipeline=zero_bubble:2 microbatches=4 zero=3 data=2"),
        ("gpt", "pipeline=1f1b:2 microbatches=4 tensor=2"),
    ]
PROCESS = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
from test_pipeline_processes import CASES, run
print(json.dumps([run(*case, jax.devices(), int(sys.argv[2]), 2) for case in CASES]))
"""


class Layers(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed, self.head = nnx.Embed(64, 32, rngs=rngs), nnx.Linear(32, 64, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(2)])

    def __call__(self, ids: jax.Array) -> jax.Array:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + nnx.tanh(block(x))
        return self.head(x)


def layers_loss(model: Layers, batch: dict[str, jax.Array]) -> jax.Array:
    logits = model(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def case(name: str) -> tuple[Callable[[nnx.Rngs], Any], Callable[[Any, Any], jax.Array]]:
    if name == "layers":
        return lambda rngs: Layers(rngs), layers_loss
    sizes = gpt("gpt-mini", vocab_size=64, num_layers=2, embed_dim=32, context=16)
    return lambda rngs: GPT(sizes, rngs=rngs), loss


def run(name: str, plan: str, devices: list, index: int, num_processes: int) -> list[float]:
    """The losses of three steps and of an evaluation; each process has its own rows of the batch."""
    build, measure = case(name)
    rows = np.random.default_rng(0).integers(0, 64, (8, 17), dtype=np.int32)
    mine = rows[index * 8 // num_processes : (index + 1) * 8 // num_processes]
    batch = {"inputs": mine[:, :-1], "targets": mine[:, 1:]}
    shape = {name: jax.ShapeDtypeStruct((8, 16), np.int32) for name in batch}
    program = cjax.parallelize(build, measure, optax.adam(1e-2), shape, plan, devices=devices)
    state, losses = program.init(0), []
    for _ in range(3):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return [*losses, float(program.evaluate(state, batch)["loss"])]


@pytest.mark.full
def test_two_processes_are_the_stages(forks: Forks) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    here = str(Path(__file__).parent)
    done = forks.together([["-c", PROCESS, address, str(index), here] for index in range(2)], [environment] * 2)
    assert [each.returncode for each in done] == [0, 0], "\n".join(each.stderr for each in done)
    given = [json.loads(each.stdout.splitlines()[-1]) for each in done]
    assert given[0] == given[1], "both processes are told the same"
    for (name, plan), losses in zip(CASES, given[0], strict=True):
        wanted = run(name, plan, jax.devices()[:4], 0, 1)
        assert losses == pytest.approx(wanted, rel=1e-5), (name, plan)
        assert losses[2] < losses[0] - 0.05
