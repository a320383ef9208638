"""Runs on one GPU: what its hardware does is read, a run goes on from a snapshot to the same bits, and texts are those
of whole passes, from device and host memory alike. `make test-gpu`."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from benchmarks.models import TINY
from contract import digest
from models.test_generation import MODELS as TEXTS
from models.test_generation import by_whole_passes, make, make_tokens

import cjax
from cjax.models import save
from cjax.train import fit

pytestmark = pytest.mark.gpu
ROW = TINY["gpt"]
# What is read of a card, and between which numbers it is.
CARD = (
    ("power_watts", 10, 2000), ("temperature_celsius", 5, 110), ("energy_joules", 0, 1e12),
    ("memory_used_bytes", 2**20, 2**40), ("utilization_percent", -1, 101), ("memory_bandwidth_percent", -1, 101),
)  # fmt: skip


class Data:
    """As many batches as are asked for, the same ones from any start."""

    num_rows = 4

    def batches(self, start: int = 0) -> Any:
        while True:
            yield ROW.batch_of(self.num_rows, start)
            start += self.num_rows


def made(plan: str = "data=1 precision=bfloat16") -> cjax.Program:
    return cjax.parallelize(
        ROW.build, ROW.loss, optax.adamw(1e-3), ROW.shapes(Data.num_rows), plan, devices=jax.devices("gpu")[:1]
    )


def test_the_card_is_read(tmp_path: Path) -> None:
    result = fit(made(), Data(), steps=900, folder=tmp_path, hardware=0.25)
    lines = [json.loads(line) for line in (tmp_path / "system.jsonl").read_text().splitlines()]
    readings = [line for line in lines if "cpu_percent" in line]
    assert len(readings) > 3 and len(lines[0]["devices"]) == 1
    last, unknown = readings[-1], lines[0]["unknown"]
    for name, least, most in CARD:
        value = last[f"gpu0/{name}"]
        assert f"gpu0/{name}" in unknown if value is None else least < value < most, (name, value, unknown)
    assert last["gpu0/memory_used_bytes"] < last["gpu0/memory_total_bytes"]
    assert result.hardware is not None and result.hardware["gpu_joules"] > 0


def test_a_run_goes_on_from_a_snapshot(tmp_path: Path) -> None:
    program = made()
    whole = digest(program, fit(program, Data(), steps=12).state)
    kept = tmp_path / "run"
    fit(program, Data(), steps=8, folder=kept, snapshot_every=4, checkpoint_every=None)
    found = fit(program, Data(), steps=12, folder=kept, snapshot_every=4, resume="auto")
    assert digest(program, found.state) == whole


@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_those_of_whole_passes(name: str) -> None:
    with jax.default_matmul_precision("float32"):
        model, tokens = make(name), make_tokens(5)
        found = cjax.generate(model, jnp.asarray(tokens), 9, temperature=0)
        np.testing.assert_array_equal(found, by_whole_passes(model, tokens, 9))


@pytest.mark.parametrize("name", TEXTS)
def test_texts_of_a_folder_are_those_of_the_model(name: str, tmp_path: Path) -> None:
    with jax.default_matmul_precision("float32"):
        model, tokens = make(name), make_tokens(5)
        wanted = cjax.generate(model, jnp.asarray(tokens), 9, temperature=0)
        save(tmp_path, model)
        with cjax.StreamedModel(tmp_path, "offload=params", devices=jax.devices("gpu")[:1]) as streamed:
            np.testing.assert_array_equal(cjax.generate(streamed, tokens, 9, temperature=0), wanted)
            assert streamed.homes["weights"]["host"]
