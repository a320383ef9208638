import collections
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from starts import begin

import cjax
from cjax.program.batches import batch_structs, global_shape, join_processes

from .conftest import Net, Words, assert_same, loss, make, on_host, refusal, rows, tokens

X, Y = rows()["x"], rows()["y"]

WRONG: dict[str, tuple[Any, list[str]]] = {
    "rows": (rows(16), ["'x' is float32[16, 5]", "made for float32[8, 5]", "parallelize", "evaluate"]),
    "features": ({"x": X[:, :4], "y": Y}, ["'x' is float32[8, 4]", "float32[8, 5]"]),
    "dtype": ({"x": X.astype(np.int32), "y": Y}, ["'x' is int32[8, 5]", "made for float32[8, 5]"]),
    "a leaf less": ({"x": X}, ["the leaves x;", "saw x, y", "call parallelize"]),
    "a leaf more": ({"x": X, "y": Y, "z": Y}, ["the leaves x, y, z;", "saw x, y."]),
    "a tuple": ((X, Y), ["the leaves 0, 1;", "saw x, y."]),
    "lists": ({"x": X.tolist(), "y": Y}, ["x/0/0, x/0/1", "(41 in all)", "np.asarray"]),
    "another mapping": (collections.OrderedDict(y=Y, x=X), ["the form PyTreeDef(CustomNode(OrderedDict"]),
    "nothing": (None, ["this batch is a NoneType", "saw x, y."]),
    "text": ({"x": "a", "y": Y}, ["'x' is <U1[]", "float32[8, 5]"]),
}


def test_a_batch_that_is_an_array_has_no_name() -> None:
    program = make("data=8", loss=lambda model, x: model(x).mean(), batch=X)
    state = program.init(0)
    for batch, said in ((rows(16)["x"], "this batch is float32[16, 5]"), (rows(), "saw an array alone")):
        assert said in refusal(lambda batch=batch: program.step(state, batch))


@pytest.mark.parametrize("name", WRONG)
def test_another_batch_is_refused_and_costs_no_state(program: cjax.Program, name: str) -> None:
    batch, said = WRONG[name]
    state = begin(program)
    for call in (program.step, program.value_and_grad):
        message = refusal(lambda call=call: call(state, batch))
        assert not [text for text in said if text not in message], message
    program.params(state)


def test_a_state_is_not_a_batch(program: cjax.Program) -> None:
    state = begin(program)
    said = refusal(lambda: program.step(rows(), state), TypeError)  # type: ignore[arg-type]
    assert "the state comes first, as in program.step(state, batch)" in said


def test_a_loader_is_not_a_batch(program: cjax.Program) -> None:
    assert "next(batches)" in refusal(lambda: program.step(begin(program), (rows() for _ in range(2))), TypeError)


@pytest.mark.usefixtures("no_compiling")
def test_it_is_refused_before_the_step_compiles() -> None:
    program = make("data=8")
    state = begin(program)
    assert "float32[16, 5]" in refusal(lambda: program.step(state, rows(16)))


PLACES: dict[str, Any] = {
    "numpy": lambda x: x,
    "wide": lambda x: x.astype(np.float64),
    "jax": jnp.asarray,
    "one device": lambda x: jax.device_put(x, jax.devices()[3]),
    "two devices": lambda x: jax.device_put(
        x, jax.NamedSharding(jax.make_mesh((2,), ("a",), devices=jax.devices()[:2]), jax.P("a"))
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_arrays_may_live_anywhere(program: cjax.Program, place: str) -> None:
    wanted, _ = program.value_and_grad(begin(program), rows())
    batch = jax.tree.map(PLACES[place], rows())
    _, metrics = program.step(begin(program), batch)
    assert_same(metrics["loss"], wanted, 1e-6)
    assert_same(batch, rows())


# -- forms ------------------------------------------------------------------------------------------------------------
def mixed() -> dict[str, Any]:
    return {
        **rows(),
        "mask": np.array([1, 0, 1, 1, 1, 0, 1, 1], bool),
        "pixels": np.arange(40, dtype=np.uint8).reshape(8, 5),
        "index": np.arange(8),
        "scale": np.float32(2),
        "shift": 3,
    }


def mixed_loss(model: Any, batch: Any) -> Any:
    error = (model(batch["x"] + batch["pixels"] / 255.0) * batch["scale"] - batch["y"] + batch["shift"]) ** 2
    error = error.mean(-1) * (1 + batch["index"])
    return (error * batch["mask"]).sum() / batch["mask"].sum()


@pytest.mark.full("data=4 tensor=2 zero=2 microbatches=2")
@pytest.mark.parametrize("plan", ["data=4 tensor=2 zero=1", "data=4 tensor=2 zero=2 microbatches=2"])
def test_leaves_may_be_integers_booleans_and_single_numbers(plan: str) -> None:
    ends = []
    for text, devices in ((plan, None), ("microbatches=2" if "micro" in plan else "data=1", jax.devices()[:1])):
        program = make(text, loss=mixed_loss, batch=mixed(), devices=devices)
        _, metrics = program.step(begin(program), mixed())
        ends.append(on_host(metrics))
    assert_same(*ends, 1e-5)
    assert np.isfinite(ends[0]["loss"])


def test_a_batch_may_be_a_tuple_a_list_or_an_array() -> None:
    def pair_loss(model: Any, batch: Any) -> Any:
        return loss(model, {"x": batch[0], "y": batch[1]})

    whole = make("data=8", optimizer=None)
    wanted = whole.evaluate(begin(whole), rows())["loss"]
    for batch in ((X, Y), [X, Y]):
        program = make("data=8", loss=pair_loss, batch=batch, optimizer=None)
        state = begin(program)
        assert_same(program.evaluate(state, batch)["loss"], wanted, 1e-6)
        assert_same(program.evaluate(state, [batch, batch])["loss"], wanted, 1e-6)
        other = list(batch) if isinstance(batch, tuple) else tuple(batch)
        message = refusal(lambda program=program, other=other: program.value_and_grad(begin(program), other))
        assert "[*, *]" in message and "(*, *)" in message


def test_structs_are_of_what_jax_makes_of_it() -> None:
    given = {"a": np.zeros((4, 2)), "b": np.zeros(4, np.int64), "c": 1.5, "d": jnp.zeros(4, "bfloat16")}
    structs = batch_structs(given)
    assert {k: (v.shape, v.dtype.name) for k, v in structs.items()} == {
        "a": ((4, 2), "float32"), "b": ((4,), "int32"), "c": ((), "float32"), "d": ((4,), "bfloat16"),
    }  # fmt: skip
    assert global_shape(np.zeros((4, 2))) == jax.ShapeDtypeStruct((4, 2), np.float32)


# -- tokens -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["numpy", "jax", "one device"])
@pytest.mark.parametrize(("leaf", "token"), [("x", 24), ("y", 77), ("x", -25), ("x", -1), ("y", -1)])
def test_tokens_outside_the_vocabulary_are_named(words: cjax.Program, leaf: str, token: int, place: str) -> None:
    batch = tokens()
    batch[leaf] = batch[leaf].copy()
    batch[leaf][2, 1] = token
    batch = jax.tree.map(PLACES[place], batch)
    state = begin(words)
    for call in (words.step, words.value_and_grad, words.evaluate):
        message = refusal(lambda call=call: call(state, batch))
        assert f"{leaf!r} holds {token} at [2, 1]" in message and "table of 24 rows" in message
        assert ("room for" in message) == (token >= 0 or token < -24) and "tokenizer" in message
        assert "jnp.where(labels < 0, 0, labels)" in message if token < 0 else f"room for {token + 1}" in message
    words.params(state)


class Columns(nn.Module):
    """What a row clicked, who it was, when: numbers in one array, each with a table of its own."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        found = [nn.Embed(size, 4)(x[:, i]) for i, size in enumerate((7, 90, 24))]
        return nn.Dense(1)(jnp.concatenate(found, axis=-1))[:, 0]


def test_columns_have_tables_of_their_own() -> None:
    rng = np.random.default_rng(0)
    batch = {"x": np.stack([rng.integers(0, size, 8) for size in (7, 90, 24)], 1), "y": np.ones(8, np.float32)}
    batch["x"][3] = (6, 89, 23)
    program = make("data=8", model=Columns(), batch=batch, optimizer=None)
    state = begin(program)
    assert np.isfinite(program.evaluate(state, jax.tree.map(jnp.asarray, batch))["loss"])
    assert np.isfinite(program.evaluate(state, batch)["loss"])
    batch["x"][3] = (6, 89, 24)
    for place in ("numpy", "jax"):
        message = refusal(lambda place=place: program.evaluate(state, jax.tree.map(PLACES[place], batch)))
        assert "'x' holds 24 at [3, 2], outside a table of 24 rows" in message


@pytest.mark.parametrize("dtype", [np.int64, np.float64, np.int32])
def test_an_array_that_is_filled_anew_in_place_is_read_anew(dtype: Any) -> None:
    """JAX keeps what it makes of an int64 array, by its identity, and gives that to whoever brings the array again."""
    array, sharding = np.zeros((8, 3), dtype), NamedSharding(jax.make_mesh((8,), ("data",)), PartitionSpec("data"))
    for number in range(4):
        array[:] = number
        taken = join_processes({"x": array}, {"x": sharding})["x"]
        assert not np.shares_memory(taken, array) and taken.dtype == jax.dtypes.canonicalize_dtype(dtype)
        np.testing.assert_array_equal(jax.device_put(taken, sharding), np.full((8, 3), number))


@pytest.mark.full
@pytest.mark.parametrize(("plan", "num_devices"), [("data=1", 1), ("tensor=2", 8)])
def test_a_batch_is_its_owners_again_when_the_step_has_returned(plan: str, num_devices: int) -> None:
    """JAX reads an aligned array of NumPy where it lies, and the step runs on behind the call."""
    x, y = _aligned((512, 1024)), _aligned((512, 1))
    net = nn.Sequential([nn.Dense(1024), nn.relu, nn.Dense(1024), nn.relu, nn.Dense(1)])
    program = make(plan, model=net, batch={"x": x, "y": y}, devices=jax.devices()[:num_devices])

    def losses(hands_over: Any) -> list[float]:
        state, found = begin(program), []
        for number in range(4):
            x[:], y[:] = np.linspace(-1, number, x.size).reshape(x.shape), 1 + number
            state, metrics = program.step(state, hands_over({"x": x, "y": y}))
            x[:], y[:] = 0, 0
            found.append(metrics["loss"])
        return [float(loss) for loss in found]

    own = losses(lambda batch: jax.tree.map(np.copy, batch))
    assert all(own) and losses(lambda batch: batch) == own


def _aligned(shape: tuple[int, ...]) -> np.ndarray:
    """A float32 array where JAX's CPU devices can read it without a copy."""
    room = np.empty(4 * math.prod(shape) + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + 4 * math.prod(shape)].view(np.float32).reshape(shape)


def test_a_batch_that_is_filled_anew_in_place_is_trained_and_checked_anew() -> None:
    batch = {"x": np.zeros((8, 3), np.int64), "y": np.ones(8)}
    program = make("data=8", model=Columns(), batch=batch)
    state = begin(program)
    for number in range(3):
        batch["x"][:] = number
        batch["y"][:] = number
        new = {"x": np.full((8, 3), number, np.int32), "y": np.full(8, number, np.float32)}
        assert program.check(state, batch).ok
        assert program.loss(state, batch) == program.loss(state, new)
        assert program.evaluate(state, batch)["loss"] == program.evaluate(state, new)["loss"]


def test_an_array_on_the_devices_is_looked_at_once_and_stays_there(
    words: cjax.Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, fetched = begin(words), []
    monkeypatch.setattr(jax, "device_get", lambda tree, get=jax.device_get: fetched.append(tree) or get(tree))
    batch = jax.tree.map(jnp.asarray, tokens())
    for _ in range(3):
        words.value_and_grad(state, batch)
    assert len(fetched) == 1 and sum(x.size for x in jax.tree.leaves(fetched)) == 4
    words.value_and_grad(state, jax.tree.map(jnp.asarray, tokens()))
    assert len(fetched) == 2


def masked_word_loss(model: Any, batch: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
    return (losses * (batch["y"] >= 0)).sum() / jnp.maximum((batch["y"] >= 0).sum(), 1)


def test_negative_labels_that_the_loss_masks_are_taken() -> None:
    program = make("data=4 tensor=2", model=Words(), loss=masked_word_loss, batch=tokens(), optimizer=None)
    batch = tokens()
    batch["y"] = np.where(np.arange(32).reshape(8, 4) % 3 == 0, -1, batch["y"])
    state = begin(program)
    wanted = masked_word_loss(program.model(state), batch)
    for place in ("numpy", "jax"):
        placed = jax.tree.map(PLACES[place], batch)
        assert_same(program.evaluate(state, placed)["loss"], wanted, 1e-5)
    batch["x"] = np.where(batch["y"] < 0, -1, batch["x"])
    assert "'x' holds -1 at [0, 0]" in refusal(lambda: program.evaluate(state, batch))


def test_tokens_inside_it_are_taken_in_any_width(words: cjax.Program) -> None:
    batch = {name: x.astype(np.int64) for name, x in tokens().items()}
    _, metrics = words.step(begin(words), batch)
    assert_same(metrics["loss"], words.evaluate(begin(words), tokens())["loss"], 1e-6)
    narrow = {name: x.astype(np.uint8) for name, x in batch.items()}
    assert "uint8[8, 4]" in refusal(lambda: words.step(begin(words), narrow))


def test_a_sharded_axis_does_not_change_what_a_model_gets() -> None:
    program = make("data=2 tensor=4", model=Net(), optimizer=None)
    assert_same(program.value_and_grad(begin(program), rows())[0], loss(program.model(begin(program)), rows()), 1e-6)


def test_leaves_with_other_numbers_of_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="first dim of every leaf of a batch counts its rows.*: x 4, y 5"):
        batch_structs({"x": np.ones((4, 3), np.float32), "y": np.ones(5, np.float32), "z": np.float32(1)})


def test_what_is_traced_and_what_is_torchs_is_refused(program: cjax.Program) -> None:
    state = begin(program)
    with pytest.raises(TypeError, match=r"batch 'x' is traced: .*outside of jax.jit, grad, vmap and scan"):
        jax.jit(lambda batch: program.step(state, batch)[1])(rows())

    class Tensor:
        """As torch's is, to whoever asks."""

        shape, dtype = X.shape, "torch.float32"

        def detach(self) -> "Tensor":
            return self

        def numpy(self) -> np.ndarray:
            return X

    for call in (program.step, program.evaluate):
        with pytest.raises(TypeError, match=r"batch 'x' is a Tensor of torch: give x.numpy\(\)"):
            call(state, {"x": Tensor(), "y": Y})
    program.step(state, rows())  # which no refusal has taken


def test_a_random_key_is_no_data() -> None:
    with pytest.raises(TypeError, match=r"batch 'k' is a random key.*def loss\(model, batch, key\)"):
        batch_structs({"x": np.ones((4, 3), np.float32), "k": jax.random.split(jax.random.key(0), 4)})
