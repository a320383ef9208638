"""What a newcomer types wrong, and what is answered: what was given, what is needed, what to type. Nothing compiles."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax

from .conftest import Net, Words, loss, make, refusal, rows, tokens, word_loss

pytestmark = pytest.mark.usefixtures("no_compiling")


class Attention(nn.Module):
    num_heads: int = 6

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.Embed(24, 24)(x)
        return nn.Dense(24)(h + nn.MultiHeadDotProductAttention(num_heads=self.num_heads)(h, h))


def contrast(model: Any, batch: Any) -> Any:
    z = model(batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(len(z))).mean()


def knows_eight(model: Any, batch: Any) -> Any:
    return (model(batch["x"]) - jnp.ones((8, 3))).mean()


def total(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).sum()


def per_row(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)


PARTS = "data=4 tensor=2 microbatches=2"
CASES: dict[str, tuple[dict[str, Any], type[Exception], list[str]]] = {
    "devices": ({"plan": "data=3"}, ValueError, ["needs 3 devices", "8 are here", 'devices="h100:3"', "simulate(3)"]),
    "tensor": ({"plan": "tensor=3"}, ValueError, ["a multiple of 3", "8 are here", 'plan="tensor=2"', 'plan="auto"']),
    "group": ({"plan": "zero=3/3"}, ValueError, ["groups of 3", "data=8", "zero=3/2 or zero=3/4"]),
    "batch": ({"plan": "data=8", "batch": rows(12)}, ValueError, ["12 rows", "8 data-parallel", "Use 8 or 16 rows"]),
    "microbatches": ({"plan": "microbatches=3"}, ValueError, ["microbatches=3", "8 rows", "6 or 9", "of 1, 2, 4"]),
    "parts": ({"plan": "data=8 microbatches=2"}, ValueError, ["'x' has 4 rows in each", "8 rows in each", "1, 2, 4."]),
    "heads": (
        {"plan": "tensor=4", "model": Attention(), "loss": word_loss, "batch": tokens()},
        ValueError, ["tensor=4", "heads", "has 6", "1, 2, 3, 6"],
    ),
    "square": ({"plan": "tensor=2d:8"}, ValueError, ["2d needs q*q", "tensor=2d:4"]),
    "no attention": ({"plan": "sequence=ring:2"}, ValueError, ["none", "Leave `sequence` out", "cjax.attention"]),
    "grid rows": ({"plan": "tensor=2d:4 microbatches=4"}, ValueError, ["2 rows", "row 2", "tensor=2d:4"]),
    "grid heads": (
        {"plan": "tensor=2d:4 data=2", "model": Attention(3), "loss": word_loss, "batch": tokens()},
        ValueError, ["tensor=2d:4", "heads", "has 3", "2d:9"],
    ),
    "typo": ({"plan": "tensro=2"}, ValueError, ["tensro=2\n", "^^^^^^", "did you mean tensor=2"]),
    "plan a number": ({"plan": 8}, TypeError, ["8, an int", '"data=4 tensor=2"', '"auto"']),
    "plan nothing": ({"plan": None}, TypeError, ["None", "cjax.Plan(...)"]),
    "loss of rows": ({"loss": per_row}, ValueError, ["shape (8,)", "jnp.mean", "cjax.Mean"]),
    "loss of nothing": ({"loss": lambda model, batch: None}, ValueError, ["NoneType", "return a scalar"]),
    "loss sum": ({"plan": PARTS, "loss": total}, ValueError, ["sum", ".mean()", "cjax.Mean"]),
    "loss pairs": ({"plan": PARTS, "loss": contrast}, ValueError, ["meet", "(dot_general)", "microbatches=1"]),
    "wrt": ({"wrt": "Dense_9"}, ValueError, ["'Dense_9' matches no parameter", "Dense_0/kernel"]),
    "rule": ({"plan": 'tensor=2 rules={"vocab":"tensor"}'}, ValueError, ["rules['vocab']", "Dense_0/bias:0", "trace"]),
    "rule's axis": (
        {"plan": 'tensor=2 rules={"batch":"tensro"}'}, ValueError, ["rules['batch'] names 'tensro'", "data, tensor"],
    ),
    "optimizer": ({"optimizer": 1e-3}, TypeError, ["a float", "optax.adamw(1e-3)", "None"]),
    "optimizer uncalled": ({"optimizer": optax.adam}, TypeError, ["function adam", "optax.adamw(1e-3)"]),
    "target": ({"devices": "h900:8"}, ValueError, ["'h900'", "h100", "did you mean h200", "cjax.Cluster(card, 64)"]),
    "class": ({"model": Net}, TypeError, ["class Net", "`Net(...)`"]),
    "nnx class": ({"model": nnx.Linear}, TypeError, ["class Linear", "`lambda rngs: Linear(..., rngs=rngs)`"]),
    "no batch": ({"batch": None}, ValueError, ["no rows", "np.zeros((8, 5)"]),
    "no rows": ({"batch": rows(0)}, ValueError, ["no rows"]),
    "a million million rows": (
        {"batch": {"x": jax.ShapeDtypeStruct((10**12, 5), jnp.float32)}},
        ValueError, ["1,000,000,000,000 rows", "one step"],
    ),
    "a device twice": (
        {"plan": "data=2", "devices": [jax.devices("cpu")[3]] * 2}, ValueError, ["cpu:3 twice", "jax.devices()"],
    ),
    "lists": ({"batch": [[1.0, 2.0], [3.0, 4.0]]}, ValueError, ["single numbers", "np.zeros"]),
    "words": ({"batch": {"x": np.array(["a"] * 8)}}, TypeError, ["'x'", "array of <U1", "ShapeDtypeStruct"]),
    "a loader": ({"batch": (rows() for _ in range(2))}, TypeError, ["a generator", "Give one batch"]),
    "uneven": ({"batch": {"x": rows(8)["x"], "y": rows(16)["y"]}}, ValueError, ["x 8, y 16", "Repeat"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_it_is_said_before_anything_compiles(name: str) -> None:
    arguments, error, said = CASES[name]
    message = refusal(lambda: make(**arguments), error)
    assert not [text for text in said if text not in message], message


def test_a_loss_that_fails_on_a_micro_batch_says_that_it_was_one() -> None:
    with pytest.raises(Exception) as raised:
        make("data=4 tensor=2 microbatches=2", loss=knows_eight)
    assert "(8, 3)" in str(raised.value) and "one of 2 micro-batches" in str(raised.value)
    make("data=4 tensor=2", loss=knows_eight)


def test_plans_that_do_not_fit_leave_a_program_as_it_was(program: cjax.Program) -> None:
    for plan in ("data=3", "tensro=2", "microbatches=3"):
        refusal(lambda plan=plan: program.replan(plan))
    refusal(lambda: program.replan(8), TypeError)  # type: ignore[arg-type]
    assert str(program.plan) == "data=8 zero=1"


def test_compare_keeps_a_row_for_what_is_refused() -> None:
    table = make().compare(["data=3", "microbatches=3"])
    assert [row.report for row in table.candidates] == [None, None]
    assert "8 are here" in str(table.candidates[0].reason)


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INTERNAL: RET_CHECK"), AssertionError(), TypeError("x")])
def test_compare_goes_on_behind_a_plan_that_does_not_compile(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: cjax.Program) -> Any:
        raise error

    monkeypatch.setattr(cjax.Program, "report", fail)
    table = make().compare(["data=8", "data=3"])
    assert [row.report for row in table.candidates] == [None, None]
    assert type(error).__name__ in table.candidates[0].reason and str(error) in table.candidates[0].reason
    assert "8 are here" in table.candidates[1].reason
    assert "RET_CHECK" in str(table) or "RET_CHECK" not in str(error)
    assert 'compare(["data=8", ...])' in refusal(lambda: make().compare("data=8"), TypeError).replace("'", '"')


def test_compare_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: cjax.Program) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(cjax.Program, "report", fail)
    with pytest.raises(KeyboardInterrupt):
        make().compare(["data=8"])


def test_a_model_may_be_given_as_shapes_alone() -> None:
    batch = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in rows().items()}
    program = make(cjax.Plan(data=4, tensor=2), batch=batch, model=Net())
    assert str(program.plan) == "data=4 tensor=2" and "Program('data=4 tensor=2', 8 x cpu)" == repr(program)
    assert str(make("tensor=2", loss=loss).plan) == str(make(cjax.Plan(tensor=2)).plan)
    assert make(model=Words(), loss=word_loss, batch=tokens()).plan.zero_stage == 1
