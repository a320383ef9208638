"""A pipeline whose stages are two real processes, against the same steps in one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import cjax
from cjax.models.gpt import GPT, gpt, loss

PLANS = ["pipeline=zero_bubble:2 microbatches=4 zero=3 data=2", "pipeline=1f1b:2 microbatches=4 tensor=2"]
PLANS = PLANS if os.environ.get("CJAX_TEST_ALL") == "1" else PLANS[:1]
PROCESS = """
import json, sys
import jax
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
sys.path.insert(0, sys.argv[3])
from test_pipeline_processes import PLANS, run
print(json.dumps([run(plan, jax.devices(), int(sys.argv[2]), 2) for plan in PLANS]))
"""


def run(plan: str, devices: list, index: int, num_processes: int) -> list[float]:
    """The losses of three steps and of an evaluation; each process has its own rows of the batch."""
    sizes = gpt("gpt-mini", vocab_size=64, num_layers=2, embed_dim=32, context=16)
    rows = np.random.default_rng(0).integers(0, 64, (8, 17), dtype=np.int32)
    mine = rows[index * 8 // num_processes : (index + 1) * 8 // num_processes]
    batch = {"inputs": mine[:, :-1], "targets": mine[:, 1:]}
    shape = {name: jax.ShapeDtypeStruct((8, 16), np.int32) for name in batch}
    program = cjax.parallelize(lambda rngs: GPT(sizes, rngs=rngs), loss, optax.adam(1e-2), shape, plan, devices=devices)
    state, losses = program.init(0), []
    for _ in range(3):
        state, metrics = program.step(state, batch)
        losses.append(float(metrics["loss"]))
    return [*losses, float(program.evaluate(state, batch)["loss"])]


def test_two_processes_are_the_stages() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    here = Path(__file__).parent
    running = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, address, str(index), here],
            env=environment, cwd=here.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240) for process in running]
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors for _, errors in said)
    given = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert given[0] == given[1], "both processes are told the same"
    for plan, losses in zip(PLANS, given[0], strict=True):
        wanted = run(plan, jax.devices()[:4], 0, 1)
        assert losses == pytest.approx(wanted, rel=1e-5), plan
        assert losses[2] < losses[0] - 0.05
