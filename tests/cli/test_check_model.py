from pathlib import Path

import pytest

from cjax.cli import main
from cjax.cli.check_model import cover

# A model, and three faults: a gradient doubled under tensor parallelism, a crash and a hang of the process on
# micro-batches.
FILE = """
import dataclasses, os, time
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from cjax.program import compose as composition

true = composition.build_gradients


def faulty(loss, *rest):
    built = true(loss, *rest)

    def doubled(*args):
        graded = built.gradients(*args)
        return dataclasses.replace(graded, grads=(graded.grads[0] * 2, *graded.grads[1:]))

    return dataclasses.replace(built, gradients=doubled) if loss.plan.tensor.size > 1 else built


composition.build_gradients = faulty


def loss(model, batch):
    if len(batch["x"]) == 8:
        print("F0000 file.cc:1] Check failed: rows != 8", flush=True)
        os.abort()
    if len(batch["x"]) == 4:
        time.sleep(60)
    return jnp.square(model(batch["x"])).mean()


def make():
    return nn.Dense(4), loss, optax.sgd(0.1), {"x": jax.ShapeDtypeStruct((16, 4), "float32")}


def broken():
    raise KeyError("no data here")


def dies():
    os.abort()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(FILE)
    return str(tmp_path / "net.py")


def test_every_plan_is_a_row_whatever_becomes_of_it(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    plans = ["data=-1", "microbatches=2", "tensor=2", "tensor=3"]
    assert main(["check-model", f"{file}:make", "--plans", *plans, "--devices", "cpu:8"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "data=-1 agrees" in out
    assert "microbatches=2 crashed the process died of SIGABRT: F0000 file.cc:1] Check failed: rows != 8" in out
    assert "tensor=2 DIFFERS" in out and "gradient of bias is off" in out and "2 times as large" in out
    assert "tensor=3 refused" in out and "1 of 4 plans agree with one device, 2 differ or crash" in out


def test_a_plan_that_hangs_is_given_up(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", f"{file}:make", "--plans", "microbatches=4", "--devices", "1", "--timeout", "3"]) == 1
    assert "nothing came of it in 3 seconds" in " ".join(capsys.readouterr().out.split())


def test_what_cannot_be_checked_is_said(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-model", f"{file}:broken", "--devices", "1"]) == 1
    said = capsys.readouterr().err
    assert "no data here" in said and "line " in said and "Traceback" not in said
    assert main(["check-model", f"{file}.no.py:make", "--devices", "1"]) == 1
    assert capsys.readouterr().err == f"cjax check-model: there is no Python file {file}.no.py\n"
    assert main(["check-model", f"{file}:dies", "--devices", "1"]) == 1
    assert "can't be made ready" in capsys.readouterr().err
    assert main(["check-model", "gpt2"]) == 1
    assert "file.py:function" in capsys.readouterr().err


def test_the_plans_by_default_are_those_that_the_devices_allow() -> None:
    assert [plan for plan in cover(2) if "tensor" in plan] == ["tensor=2 zero=1"]
    assert not [plan for plan in cover(1) if "=2:" in plan or "tensor" in plan]
