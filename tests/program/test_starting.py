from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx

import cjax

from .conftest import assert_same, make, on_host, refusal, rows

KERNEL = np.arange(48, dtype=np.float32).reshape(16, 3)


# -- keys -------------------------------------------------------------------------------------------------------------
def test_equal_seeds_give_equal_states(program: cjax.Program) -> None:
    first = on_host(program.to_arrays(program.init(5)))
    for key in (5, np.int64(5), jax.random.key(5), jax.random.PRNGKey(5)):
        assert_same(first, on_host(program.to_arrays(program.init(key))))
    other = on_host(program.params(program.init(6)))
    assert not np.array_equal(first["params"]["Dense_0"]["kernel"], other["Dense_0"]["kernel"])


def test_a_key_can_be_used_again(program: cjax.Program) -> None:
    for key in (jax.random.key(5), jax.random.PRNGKey(5)):
        for _ in range(2):
            program.step(program.init(key), rows())


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("0", "not str"),
        (0.5, "not float"),
        (2**63, "a seed has 64 bits at most"),
        (None, "not NoneType"),
        (jax.numpy.zeros(2), "not float32[2]"),
        (lambda: jax.random.split(jax.random.key(0)), "not key<fry>[2]"),
        (lambda: jax.random.key(0, impl="rbg"), "not key<rbg>[]"),
    ],
)
def test_what_is_no_key_is_refused(program: cjax.Program, key: Any, said: str) -> None:
    message = refusal(lambda: program.init(key() if callable(key) else key))
    assert said in message and "init(0)" in message


# -- given parameters -------------------------------------------------------------------------------------------------
PARTS: dict[str, Callable[[], Any]] = {
    "a path": lambda: {"Dense_0/kernel": KERNEL},
    "a tree": lambda: {"Dense_0": {"kernel": KERNEL}},
    "wider": lambda: {"Dense_0/kernel": KERNEL.astype(np.float64)},
    "on a device": lambda: {"Dense_0/kernel": jax.device_put(KERNEL, jax.devices()[5])},
    "a callable": lambda: {"Dense_0/kernel": lambda index: KERNEL[index]},
}


@pytest.mark.full("other_plan-a path")
@pytest.mark.parametrize("form", PARTS)
@pytest.mark.parametrize("plan", ["program", "other_plan"])
def test_a_part_of_the_parameters_can_be_given(plan: str, form: str, request: pytest.FixtureRequest) -> None:
    program = request.getfixturevalue(plan)
    given = on_host(program.params(program.init(3, params=PARTS[form]())))
    wanted = on_host(program.params(program.init(3)))
    wanted["Dense_0"]["kernel"] = KERNEL
    assert_same(given, wanted)


def test_all_of_them_can_be_given_and_train(program: cjax.Program, other_plan: cjax.Program) -> None:
    params = program.params(program.init(3))
    for each in (program, other_plan):
        state = each.init(4, params=params)
        assert_same(on_host(each.params(state)), on_host(params))
    state, _ = program.step(program.init(4, params=params), rows())
    assert state.step == 1


def test_everything_wrong_is_listed_at_once(program: cjax.Program) -> None:
    wrong = {
        "Dense_0/bias": np.ones(4),
        "Dense_7/kernel": np.ones(3),
        "Dense_1/kernel": np.ones((16, 5)),
        "Dense_0/kernel": lambda index: np.ones(7, np.float32),
        "Dense_1/bias": "hello",
    }
    message = refusal(lambda: program.init(0, params=wrong))
    for text in (
        "Dense_0/bias: [4] given, [3] needed",
        "Dense_7/kernel: this model has no such parameter",
        "Dense_1/kernel: [16, 5] given, [5, 16] needed",
        "Dense_0/kernel: a callable gives the part of [16, 3]",
        "Dense_1/bias: [] given, [16] needed",
        "Dense_0/bias, Dense_0/kernel",
    ):
        assert text in message, message
    both = refusal(lambda: program.init(0, params={"Dense_0/bias": np.ones(4), "Dense_0/kernel": KERNEL * 1j}))
    assert "Dense_0/bias: [4] given, [3] needed" in both and "Dense_0/kernel: complex64 given, float32 needed" in both
    assert "not a tree" not in message and "an int" in refusal(lambda: program.init(0, params=3), TypeError)


SOUND: dict[str, tuple[Any, str]] = {
    "nan": (np.where(KERNEL == 7, np.nan, KERNEL), "Dense_0/kernel: 1 of 48 are NaN"),
    "infinite": (np.where(KERNEL > 40, np.inf, KERNEL), "Dense_0/kernel: 7 of 48 are infinite"),
    "too large for float32": (KERNEL.astype(np.float64) * 1e300, "are infinite (as float32)"),
    "complex": (KERNEL * 1j, "Dense_0/kernel: complex64 given, float32 needed"),
    "text": (np.full((16, 3), "a"), "Dense_0/kernel: <U1 given, float32 needed"),
    "a callable's": (lambda index: np.full((16, 3), np.nan, np.float32)[index], "48 of 48 are NaN"),
}


@pytest.mark.parametrize("name", SOUND)
def test_values_that_are_no_numbers_are_refused(program: cjax.Program, name: str) -> None:
    value, said = SOUND[name]
    assert said in refusal(lambda: program.init(0, params={"Dense_0/kernel": value}))


def test_a_layer_of_a_stack_can_be_given_alone() -> None:
    class Tower(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(4):
                x = nn.relu(nn.Dense(5)(x))
            return nn.Dense(3)(x)

    program = make("data=8", model=Tower(), optimizer=None)
    assert max(len(slot.leaves) for slot in program._composed.shelves.params.slots) >= 4
    wanted = on_host(program.params(program.init(3)))
    for layer in ("Dense_0", "Dense_2"):
        given = on_host(program.params(program.init(3, params={f"{layer}/kernel": np.ones((5, 5), np.float32)})))
        assert_same(given, {**wanted, layer: {**wanted[layer], "kernel": np.ones((5, 5))}})


def test_optimizers_that_copy_parameters_start_from_the_given_ones() -> None:
    program = make("data=8 zero=1", optimizer=optax.contrib.schedule_free_adamw(1e-2))
    arrays = program.to_arrays(program.init(0, params={"Dense_0/kernel": KERNEL}))
    copies = [leaf for leaf in jax.tree.leaves(arrays["opt_state"]) if np.array_equal(leaf, KERNEL)]
    assert len(copies) == 1


def test_frozen_parameters_can_be_given() -> None:
    program = make("data=8", wrt="Dense_0", optimizer=None)
    state = program.init(0, params={"Dense_1/bias": np.arange(16)})
    assert_same(program.model(state).variables["params"]["Dense_1"]["bias"], np.arange(16.0))


def test_an_nnx_state_is_a_tree_like_any_other() -> None:
    program = make("data=8", model=lambda rngs: nnx.Linear(5, 3, rngs=rngs), optimizer=None)
    model = nnx.Linear(5, 3, rngs=nnx.Rngs(8))
    state = program.init(0, params=nnx.state(model))
    assert_same(program.model(state)(rows()["x"]), model(rows()["x"]), 1e-5)


# -- safetensors ------------------------------------------------------------------------------------------------------
def test_a_file_or_a_folder_of_safetensors(program: cjax.Program, tmp_path: Path) -> None:
    safetensors.numpy.save_file({"Dense_0.kernel": KERNEL}, tmp_path / "1.safetensors")
    safetensors.numpy.save_file({"Dense_1.bias": np.arange(16, dtype=np.float16)}, tmp_path / "2.safetensors")
    one = program.params(program.init(3, params=tmp_path / "1.safetensors"))
    assert_same(one["Dense_0"]["kernel"], KERNEL)
    both = program.params(program.init(3, params=str(tmp_path)))
    assert_same(both["Dense_0"]["kernel"], KERNEL)
    assert_same(both["Dense_1"]["bias"], np.arange(16.0, dtype=np.float32))


def test_files_that_do_not_fit_or_are_cut_are_named(program: cjax.Program, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    safetensors.numpy.save_file({"Dense_0.kernel": KERNEL[:2], "head.bias": KERNEL}, file)
    message = refusal(lambda: program.init(0, params=file))
    assert "head/bias: this model has no such" in message and "[2, 3] given, [16, 3] needed" in message
    safetensors.numpy.save_file({"Dense_0.kernel": np.where(KERNEL > 45, np.nan, KERNEL)}, file)
    assert "Dense_0/kernel: 2 of 48 are NaN" in refusal(lambda: program.init(0, params=file))
    file.write_bytes(file.read_bytes()[:-20])
    message = refusal(lambda: program.init(0, params=file))
    assert str(file) in message and "download it again" in message
    for path in (tmp_path / "nothing.safetensors", tmp_path / "nowhere"):
        said = refusal(lambda path=path: program.init(0, params=path), FileNotFoundError)
        assert said == f"no safetensors file at {path}"
    program.save(tmp_path / "saved", program.init(0))
    said = refusal(lambda: program.init(0, params=tmp_path / "saved"), FileNotFoundError)
    assert said.endswith("(it is a checkpoint: program.restore(path))")
