"""What people switch on to look for a bug, or have around all of their code, is no error from inside of cjax."""

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import cjax

from .conftest import assert_same, make, refusal, rows

pytestmark = pytest.mark.usefixtures("settled")
STRICT: dict[str, Any] = {
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_check_tracer_leaks": True,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_disable_jit": True,
    "jax_transfer_guard": "disallow",
    "jax_debug_key_reuse": True,
}


@contextlib.contextmanager
def switched_on(**flags: Any) -> Iterator[None]:
    before = {name: getattr(jax.config, name) for name in flags}
    # A guard that is not set is None, and can't be set to that again.
    before = {name: "allow" if "guard" in name and value is None else value for name, value in before.items()}
    try:
        for name, value in flags.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def everything(plan: str, folder: Path) -> list[Any]:
    """What every method gives, as NumPy arrays."""
    # Four devices: without jit each operation is a program on each of them.
    program = make(plan, optimizer=optax.adamw(1e-2), devices=jax.devices()[:4])
    state = program.init(0)
    params = program.params(state)
    state = program.init(1, params={"Dense_0/bias": np.arange(3, dtype=np.float32)})
    found: list[Any] = [params, program.evaluate(state, rows())]
    value, grads = program.value_and_grad(state, rows())
    found += [value, grads, program.evaluate(state, rows(), lambda model, batch: model(batch["x"]))]
    program.save(folder / plan, state)
    state = program.restore(folder / plan)
    state = program.update(state, grads)
    state, metrics = program.step(state, jax.tree.map(jax.device_put, rows()))
    state, more = program.step(state, rows())
    adam = state.find_opt_states(optax.ScaleByAdamState)
    found += [metrics, more, adam, program.params(state), repr(state) and program.check(state, rows()).loss]
    return jax.device_get(found)


def test_everything_works_with_all_of_it_on(tmp_path: Path) -> None:
    plan = "data=2 tensor=2 zero=1 microbatches=2"
    wanted = everything(plan, tmp_path / "usual")
    mesh = jax.make_mesh((8,), ("mine",))
    gc.freeze()  # what was made by now; each look for leaks goes through all the rest
    with switched_on(**STRICT), jax.set_mesh(mesh):
        found = everything(plan, tmp_path / "strict")
        assert jax.config.values["jax_transfer_guard"] == "disallow" and not jax.sharding.get_abstract_mesh().empty
    assert_same(found, wanted, 1e-5)


def test_weights_that_were_made_under_a_mesh_come_along() -> None:
    with jax.set_mesh(jax.make_mesh((8,), ("mine",))):
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "mine"))
        model = nnx.Linear(5, 8, kernel_init=init, rngs=nnx.Rngs(0))
        batch = {"x": rows()["x"], "y": np.zeros((8, 8), np.float32)}
        program = make("data=4 tensor=2", model=model, batch=batch)
        state, _ = program.step(program.init(0), batch)
        kernel = np.asarray(jax.device_get(program.params(state)["kernel"][...]))
    alone = make("data=1", model=nnx.Linear(5, 8, kernel_init=nnx.initializers.lecun_normal(), rngs=nnx.Rngs(0)),
                 batch=batch, devices=jax.devices()[:1])  # fmt: skip
    wanted, _ = alone.step(alone.init(0), batch)
    np.testing.assert_allclose(kernel, alone.params(wanted)["kernel"][...], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("flag", "value"), [("jax_debug_nans", np.nan), ("jax_debug_infs", np.inf)])
def test_a_loss_that_is_nan_is_told_where_it_is_asked_for(program: cjax.Program, flag: str, value: float) -> None:
    batch = rows()
    batch["y"] = np.where(np.arange(3) == 2, np.float32(value), batch["y"])
    state = program.init(0)
    with switched_on(**{flag: True}):
        for call in (program.value_and_grad, program.evaluate, program.step):
            message = refusal(lambda call=call: call(state, batch), FloatingPointError)
            assert flag in message and f"program.{call.__name__} gave" in message
        program.evaluate(program.init(0), rows())
    assert not np.isfinite(program.step(program.init(0), batch)[1]["loss"]), "without the flag, `skipped` says it"


def test_the_guard_is_still_about_the_lines_around(program: cjax.Program) -> None:
    with jax.transfer_guard("disallow"):
        state, metrics = program.step(program.init(0), rows())
        with pytest.raises(Exception, match="Disallowed host-to-device"):
            jnp.add(metrics["loss"], np.ones(3, np.float32))
    assert state.step == 1
