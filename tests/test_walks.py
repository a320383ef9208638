"""Plans that walk over layers: as authors train their models, to the same bits wherever rows live, within a budget."""

import dataclasses
import errno
import functools
import gc
import math
import operator
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from alive import alive
from contract import assert_trained_alike, digest, subject, trained, walking_program
from zoo import MODELS

import cjax
from cjax.planner.choice.homes import choose_homes
from cjax.planner.choice.planning import Planning
from cjax.planner.hardware import hardware_of
from cjax.planner.homes import Homes, occupied
from cjax.program import walking as walking_room
from cjax.tree import PyTree
from cjax.walk import files, walk, walker

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
pytestmark = pytest.mark.usefixtures("settled")
EVERYTHING = "offload=params+optimizer+gradients+activations"
# Models of every kind with layers, under all that a walk goes with.
PAIRS = [
    ("linen_decoder", f"zero=3 microbatches=2 {EVERYTHING}"),
    ("linen_part_frozen", "data=4 tensor=2 zero=1 microbatches=2 offload=params+optimizer"),
]
MORE = [
    ("linen_decoder", f"zero=3 {EVERYTHING}"),
    ("linen_encoder_decoder", "data=8 offload=params+optimizer"),
    ("linen_encoder_decoder", "data=4 tensor=2 zero=1 microbatches=2 offload=params+optimizer"),
    ("linen_part_frozen", "zero=2 microbatches=2 offload=params+optimizer"),
    ("linen_scan", f"data=8 {EVERYTHING}"),
    ("nnx_llama", "tensor=4 remat=block offload=optimizer"),
    ("linen_tied", f"zero=1/4 {EVERYTHING}"),
    ("linen_encoder", "sequence=ring:2 zero=3 offload=params+optimizer"),
    ("linen_masked_mean", "zero=2 microbatches=2 offload=activations"),
    ("linen_moe_soft", "data=8 offload=gradients"),
    ("linen_remat", "zero=3 microbatches=2 offload=params"),
    ("linen_vit", "tensor=2 offload=params+optimizer"),
    ("nnx_decoder", f"data=2 tensor=4 zero=3 {EVERYTHING}"),
    ("nnx_scan", "zero=2 offload=params+optimizer"),
    ("cjax_gpt", f"zero=3 microbatches=2 {EVERYTHING}"),
    ("cjax_t5", "tensor=4 offload=params+optimizer"),
]


@pytest.mark.parametrize(("name", "plan"), [*PAIRS, *MORE] if ALL else PAIRS)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    assert_trained_alike(name, plan)


EVERY = ("linen_tied", f"zero=1 {EVERYTHING}")


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan"), [EVERY, *PAIRS, *MORE] if ALL else [EVERY])
def test_wherever_rows_live_the_bits_are_the_same(name: str, plan: str, tmp_path: Path) -> None:
    rest = " ".join(word for word in plan.split() if not word.startswith("offload="))
    first = walking_program(name, f"{rest} budget=1GiB", tmp_path)
    was = digest(first, trained(first, name))
    assert first._walking is not None and first._walking.homes.used == {"device"}
    # With room in host memory for a row or two, rows of one kind and stack have several homes.
    room = f"host={max(row.host for rows in first._walking.measured.sizes['params'] for row in rows) + 1}B disk=1GiB"
    found: dict[str, set[str]] = {
        EVERYTHING: {"host"},
        "offload=params+optimizer host=0B disk=1GiB": {"device", "disk"},
        f"offload=params+optimizer+gradients {room}": {"device", "host", "disk"},
        f"{EVERYTHING} {room}": {"host", "disk"},
    }
    if plan == EVERY[1]:
        found["budget=330kB host=30kB disk=9MB"] = {"device", "disk"}
    for homes, used in found.items():
        program = walking_program(name, f"{rest} {homes}", tmp_path)
        assert program._walking is not None
        assert used <= program._walking.homes.used, homes
        assert digest(program, trained(program, name)) == was, homes


@pytest.mark.full("data=8 offload=params+optimizer+gradients+activations host=0B disk=20MB")
@pytest.mark.parametrize(
    "plan",
    [
        "zero=1 budget=300kB",
        pytest.param(f"data=8 {EVERYTHING}", marks=pytest.mark.full),
        f"data=8 {EVERYTHING} host=0B disk=20MB",
    ],
)
def test_a_device_never_holds_more_than_was_said(plan: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name = "linen_tied"
    program = walking_program(name, plan, tmp_path)
    state = trained(program, name)
    assert state._held.every and not state._rows.due, "nothing is counted as there that a step only left behind"
    gc.collect()
    parts = program._walking
    said = occupied(parts.measured.sizes, parts.measured.peaks, parts.homes)
    # What other tests have kept, and this one's own state is counted by `said`.
    own = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
        if not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    )
    resident = sum(said.device.values()) - said.device["inputs"] - said.device["grads"]
    before, most = alive() - own - resident, 0
    assert program.plan.budget is None or said.peak <= program.plan.budget

    def watched(function: Any) -> Any:
        def rows(*args: Any) -> Any:
            nonlocal most
            for each in function(*args):
                most = max(most, alive() - before)
                yield each

        return rows

    def watched_update(*args: Any) -> Any:
        nonlocal most
        most = max(most, alive() - before)
        new = update(*args)
        most = max(most, alive() - before)
        return new

    optimizer = parts._walker.optimizer
    assert optimizer is not None and bool(parts.homes.fused) == ("disk" in plan)
    assert bool(parts.homes.deferred) == ("disk" not in plan)
    update = optimizer.update_row
    monkeypatch.setattr(optimizer, "update_row", watched_update)
    for room in (walk, walker):
        monkeypatch.setattr(room, "in_turn", watched(walk.in_turn))
    for batch in subject(name, False).batches:  # the second makes what is due of the first
        state, _ = program.step(state, batch)
    assert 0 < most <= said.peak


def test_a_run_goes_on_from_its_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plan, name = "zero=1 offload=params+optimizer host=0B disk=10MB", "linen_tied"
    program = walking_program(name, plan, tmp_path)
    assert program.resume() is None
    state = trained(program, name)
    was = digest(program, state)
    again = walking_program(name, plan, tmp_path)  # takes the folder over, as a process that comes after would
    with pytest.raises(ValueError, match="after step 2: go on with state = program.resume"):
        again.init(0)
    resumed = again.resume()
    assert resumed is not None and int(resumed.step) == 2 and digest(again, resumed) == was
    with pytest.raises(ValueError, match="given up"):
        program.step(state, subject(name, False).batches[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwritev", full)
        with pytest.raises(OSError, match=r"No space left on device"):
            again.step(resumed, subject(name, False).batches[0])
        with pytest.raises(ValueError, match="given up"):
            again.step(resumed, subject(name, False).batches[0])
    resumed = again.resume()  # as soon as there is room, in the same process too
    assert resumed is not None and int(resumed.step) == 2 and digest(again, resumed) == was
    assert walking_program(name, plan.replace("10MB", "11MB"), tmp_path).resume() is None
    assert f"a run of this model after step 2, under another plan, {program.plan} on 8 devices" in caplog.text


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_state_that_is_dropped_is_on_the_devices_no_more(tmp_path: Path) -> None:
    """With layers on disk too, whose folder knows the rows and they it: nobody waits for Python's collector."""
    program = walking_program("linen_tied", "zero=1 offload=optimizer host=0B disk=10MB", tmp_path)
    batch = subject("linen_tied", False).batches[0]
    gc.collect()
    before = len(jax.live_arrays())
    gc.disable()
    try:
        state, metrics = program.step(program.init(0), batch)
        for rows in state._held.every:  # pyright: ignore
            rows.settle()  # what threads are at is theirs until they are done
        del rows  # pyright: ignore
        assert len(jax.live_arrays()) > before + 10
        del state, metrics
        assert len(jax.live_arrays()) == before
        assert int(program.init(0).step) == 0  # whoever comes next has the folder
        del program
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()


@pytest.mark.full
def test_another_budget_in_the_middle_of_a_run(tmp_path: Path) -> None:
    name = "linen_tied"
    first = walking_program(name, "zero=1 offload=params+optimizer")
    state = trained(first, name)
    was = digest(first, state)
    for plan in ("zero=3 budget=260kB", "tensor=2", f"data=8 {EVERYTHING}"):
        other = first.replan(plan)
        moved = other.restore(state)
        assert digest(other, moved) == was
    other, another = (first.replan(plan) for plan in ("zero=1 budget=300kB", "zero=3 budget=300kB"))
    assert other._composed.walker is first._composed.walker, "nothing of it is compiled again"
    assert another._composed.walker is not first._composed.walker
    parts = [first.replan(f"zero=1 microbatches=2 offload={homes}") for homes in ("params", "optimizer")]
    assert parts[0]._composed.walker is parts[1]._composed.walker
    first.save(tmp_path / "kept", state)
    last = first.replan("zero=3 offload=optimizer")
    assert digest(last, last.restore(tmp_path / "kept")) == was


def test_a_step_that_is_not_finite_changes_nothing() -> None:
    name = "linen_tied"
    program = walking_program(name, f"zero=1 {EVERYTHING}")
    state = program.init(0)
    was = jax.tree.map(np.asarray, program.params(state))
    batch = jax.tree.map(np.asarray, subject(name, False).batches[0])
    grads = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), was)
    state = program.update(state, grads, 1.0)
    jax.tree.map(np.testing.assert_array_equal, program.params(state), was)
    state, metrics = program.step(state, batch)
    assert int(state.step) == 2 and int(metrics["skipped"]) == 0


ON_DISK = "zero=1 offload=params+optimizer+gradients host=0B disk=10MB"
PARTLY = "zero=1 offload=params+optimizer+gradients host=900kB disk=12MB"  # some layers are fused, others deferred


@pytest.mark.parametrize("plan", [pytest.param(ON_DISK, marks=pytest.mark.full), PARTLY])
def test_layers_updated_in_the_backward_pass_go_back_where_a_step_fails(plan: str, tmp_path: Path) -> None:
    name = "linen_tied"
    batches = [jax.tree.map(np.asarray, batch) for batch in subject(name, False).batches]
    program = walking_program(name, plan, tmp_path)
    parts = program._walking
    assert parts is not None
    fused, walker = parts.homes.fused, parts._walker
    assert fused and (len(fused) == sum(walker.lengths)) == (plan == ON_DISK)
    assert bool(parts.homes.deferred) == (plan == PARTLY) and len({*fused, *parts.homes.deferred}) == sum(
        walker.lengths
    )
    plain = walking_program(name, "zero=1 offload=optimizer")
    other = trained(plain, name, 1)
    was = digest(plain, other)
    state: Any = trained(program, name, 1)
    # What was due of the others is made by then, in files in which fused layers have rows too.
    assert set(state._rows.due) == parts.homes.deferred

    # The last layer that the backward pass comes to can't be computed: all others of the stack have new rows by then.
    average, calls = walker.programs.average[0], 0

    def broken(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == walker.lengths[0]:
            raise RuntimeError("the power of layer 0 went off")
        return average(*args)

    walker.programs.average[0] = broken  # pyright: ignore
    with pytest.raises(RuntimeError, match="went off"):
        program.step(state, batches[1])
    walker.programs.average[0] = average
    assert not state.step.is_deleted() and not state._rows.due and digest(program, state) == was

    # The norm overflows when all layers have been updated.
    optimizer = walker.optimizer
    assert optimizer is not None
    join, rows = optimizer.join, [np.asarray(x) for x in state._held.params[0].fetch(0)]
    optimizer.join = lambda *args: {**join(*args), "finite": jax.numpy.bool_(False)}  # pyright: ignore
    state, metrics = program.step(state, batches[1])
    optimizer.join = join
    assert metrics["skipped"] == 1
    for x, y in zip(state._held.params[0].fetch(0), rows, strict=True):
        np.testing.assert_array_equal(x, y)
    state, _ = program.step(state, batches[1])
    other = plain.update(other, jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), plain.params(other)), 1.0)
    other, _ = plain.step(other, batches[1])
    assert digest(program, state) == digest(plain, other)

    # Where somebody interrupts while a state goes back, nobody goes on with what is half of each.
    def interrupted(*_: Any) -> bool:
        raise KeyboardInterrupt

    walker.programs.average[0], calls = broken, 0  # pyright: ignore
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(files.Folder, "take_back", interrupted)
        program.step(state, batches[1])
    walker.programs.average[0] = average
    assert state.step.is_deleted()


class Gated(nn.Module):
    """What all layers read is made of a weight, once."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gate = jnp.tanh(self.param("gate", nn.initializers.normal(1.0), (16,)))
        x = nn.Dense(16)(x)
        for _ in range(3):
            x = x + gate * nn.Dense(16)(nn.tanh(nn.Dense(24)(x)))
        return nn.Dense(1)(x)


def test_gradients_are_those_of_one_program() -> None:
    x, found = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), []
    for plan in (f"zero=1 microbatches=2 {EVERYTHING}", "zero=1 microbatches=2"):
        program = cjax.parallelize(Gated(), lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1), x, plan)
        assert (program._walking is not None) == (EVERYTHING in plan)
        found.append(program.value_and_grad(program.init(0), x))
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found[0][1], found[1][1])


def by_product() -> optax.GradientTransformation:
    """Gradients by the product of their largest elements, which each leaf's number waits for the last one's."""

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        product = functools.reduce(operator.mul, [1 + jnp.abs(g).max() for g in jax.tree.leaves(updates)])
        return jax.tree.map(lambda g: -g / product, updates), state

    return optax.GradientTransformation(lambda params: (), update)


@pytest.mark.full("by_product")
@pytest.mark.parametrize("make", [functools.partial(optax.sm3, 0.1), by_product], ids=["sm3", "by_product"])
def test_what_optimizers_keep_of_a_leaf_is_that_leafs(make: Callable[[], optax.GradientTransformation]) -> None:
    """`sm3` keeps a list for each leaf, under no layer's name."""
    x, found = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32), []
    for plan in ("data=8 offload=optimizer", "data=8"):
        program = cjax.parallelize(Gated(), lambda model, x: (model(x) ** 2).mean(), make(), x, plan)
        state = program.init(0)
        for _ in range(2):
            state, _ = program.step(state, x)
        found.append(program.params(state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), *found)


@pytest.mark.parametrize(
    ("name", "plan", "words"),
    [
        ("nnx_mlp", "data=8 offload=optimizer", "no layers that repeat were found"),
        ("linen_tied", "zero=1 budget=90kB", r"budget=90kB is less than a device needs at least.*write budget="),
        ("linen_tied", "zero=1 budget=0", r"budget=0B is less than a device needs at least.*write budget=[1-9]\d+KiB"),
        ("linen_tied", "zero=1 offload=optimizer host=1kB", "host"),
        ("linen_tied", "zero=1 offload=optimizer host=0B disk=10MB", "disk_folder="),
    ],
)
def test_what_cannot_be_had_says_what_to_write(name: str, plan: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        walking_program(name, plan).init(0)


def test_remat_is_said_to_change_nothing() -> None:
    (note,) = walking_program("linen_tied", "zero=1 remat=block offload=params")._composed.notes
    assert "remat=block changes nothing under budget= and offload=" in note
    assert not walking_program("linen_tied", "zero=1 offload=params")._composed.notes


def test_no_noise_of_parts() -> None:
    model, loss, batch = MODELS["linen_tied"].make(np.float32)
    with pytest.raises(ValueError, match="leave measure_noise out"):
        cjax.parallelize(model, loss, optax.adam(1e-3), batch, "data=8 offload=optimizer", measure_noise=True)


def test_homes_are_those_of_the_fastest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is known how fast devices and their links are."""
    walking = walking_program("linen_tied", "zero=1 budget=300kB")._walking
    assert walking is not None and walking._seconds is None
    known = dataclasses.replace(hardware_of(jax.devices()), pcie_bandwidth=1e9, f32_flops=1e10)
    monkeypatch.setattr(Planning, "known", lambda *_: known)
    seen: list[Homes] = []

    def watched(*args: Any, seconds: Any, **more: Any) -> Homes:
        return choose_homes(*args, seconds=lambda homes: (seen.append(homes), seconds(homes))[1], **more)

    monkeypatch.setattr(walking_room, "choose_homes", watched)
    seconds, homes = walking._seconds, walking.homes
    assert seconds is not None and len(seen) == 2 and homes in seen
    assert 0 < seconds(homes) == min(map(seconds, seen))
