"""Plans that walk over layers: as authors train their models, to the same bits wherever rows live, within a budget."""

import dataclasses
import errno
import gc
import hashlib
import math
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from contract import assert_trained_alike, source_of, subject, walking_program
from zoo import MODELS

import cjax
from cjax.optim import LossScale
from cjax.plan import Plan
from cjax.planner.choice.homes import choose_homes
from cjax.planner.choice.planning import Planning
from cjax.planner.hardware import hardware_of
from cjax.planner.homes import Homes, occupied
from cjax.program import Program
from cjax.program import walking as walking_room
from cjax.program.compose import compose
from cjax.program.composed import Given
from cjax.walk import files, walk, walker

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
pytestmark = pytest.mark.usefixtures("settled")
EVERYTHING = "offload=params+optimizer+gradients+activations"
# Models of every kind with layers, under all that a walk goes with.
PAIRS = [
    ("linen_decoder", f"zero=3 {EVERYTHING}"),
    ("linen_encoder_decoder", "data=4 tensor=2 zero=1 microbatches=2 offload=params+optimizer"),
    ("linen_part_frozen", "zero=2 microbatches=2 offload=params+optimizer"),
]
MORE = [
    ("linen_scan", f"data=8 {EVERYTHING}"),
    ("nnx_llama", "tensor=4 remat=block offload=optimizer"),
    ("linen_tied", f"zero=1/4 {EVERYTHING}"),
    ("linen_encoder", "sequence=ring:2 zero=3 offload=params+optimizer"),
    ("linen_masked_mean", "zero=2 microbatches=2 offload=activations"),
    ("linen_moe_soft", "data=8 offload=gradients"),
    ("linen_remat", "zero=3 microbatches=4 offload=params"),
    ("linen_vit", "tensor=2 offload=params+optimizer"),
    ("nnx_decoder", f"data=2 tensor=4 zero=3 {EVERYTHING}"),
    ("nnx_scan", "zero=2 offload=params+optimizer"),
    ("cjax_gpt", f"zero=3 microbatches=2 {EVERYTHING}"),
    ("cjax_t5", "tensor=4 offload=params+optimizer"),
]


@pytest.mark.parametrize(("name", "plan"), [*PAIRS, *MORE] if ALL else PAIRS)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    assert_trained_alike(name, plan)


def trained(program: Program, name: str, num_steps: int = 2) -> Any:
    state = program.init(3)
    for index in range(num_steps):
        state, _ = program.step(state, subject(name, False).batches[index % 2])
    return state


def digest(program: Program, state: Any) -> str:
    """Of all that a checkpoint would hold."""
    found = hashlib.sha256()
    for x in jax.tree.leaves(program.to_arrays(state)):
        is_key = jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
        found.update(np.asarray(jax.random.key_data(x) if is_key else x).tobytes())
    return found.hexdigest()


EVERY = ("linen_tied", f"zero=1 {EVERYTHING}")


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


def alive() -> int:
    """Bytes of arrays on one device."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.live_arrays()
        if not x.is_deleted()
        and x.sharding.memory_kind != "pinned_host"
        and not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


@pytest.mark.parametrize(
    "plan", ["zero=1 budget=300kB", f"data=8 {EVERYTHING}", f"data=8 {EVERYTHING} host=0B disk=20MB"]
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


CLIPPED = optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(1e-2, momentum=0.9))


@pytest.mark.parametrize(
    ("optimizer", "loss_scale"),
    [
        (optax.sgd(1e-2), LossScale(initial=2.0**32, backoff=2.0**-24)),
        pytest.param(CLIPPED, None, marks=pytest.mark.full),
    ],
    ids=["overflow", "clipped"],
)
def test_the_disk_has_the_bits_of_host_memory(optimizer: Any, loss_scale: LossScale | None, tmp_path: Path) -> None:
    """Of a step that overflows too, which is taken back where layers had been updated; and clipped by the norm of all,
    which none of them can be before it is known."""
    name = "linen_tied"
    precision = "float32" if loss_scale is None else "float16"
    found = []
    for homes in ("host=0B disk=10MB", ""):
        given = Given(source_of(name), optimizer, loss_scale, disk_folder=tmp_path)
        plan = f"zero=3 microbatches=2 precision={precision} offload=params+optimizer {homes}"
        program = Program(compose(given, Plan.parse(plan).resolve(8), jax.devices()))
        parts = program._walking
        assert parts is not None
        assert len(parts.homes.fused) == (sum(parts._walker.lengths) if homes and loss_scale else 0)
        state, skipped = program.init(3), []
        for index in range(3):
            state, metrics = program.step(state, subject(name, False).batches[index % 2])
            skipped.append(int(metrics["skipped"]))
        assert skipped == ([0, 0, 0] if loss_scale is None else [1, 0, 0])
        found.append(digest(program, state))
    assert found[0] == found[1]


def clipped(plan: str, folder: Path | None = None, rate: float = 1e-2) -> Program:
    """A model whose update is clipped by the norm of all gradients, which none of its layers can be before it."""
    optimizer = CLIPPED if rate == 1e-2 else optax.chain(optax.clip_by_global_norm(1e-2), optax.sgd(rate, momentum=0.9))
    given = Given(source_of("linen_tied"), optimizer, None, disk_folder=folder)
    return Program(compose(given, Plan.parse(plan).resolve(8), jax.devices()))


def test_an_update_that_is_due_is_made_for_whoever_looks(tmp_path: Path) -> None:
    """A step leaves the update of layers that are away to the next one's forward pass: beside one that has all layers
    on the devices, and leaves nothing."""
    batches, on_disk = subject("linen_tied", False).batches, ON_DISK.replace("10MB", "12MB")
    plain = clipped("zero=1 budget=64MiB")
    found, state = [], plain.init(3)
    for index in range(4):
        found.append(digest(plain, state))
        state, metrics = plain.step(state, batches[index % 2])
        assert not state._rows.due and metrics["skipped"] == 0  # pyright: ignore
    program = clipped(on_disk, tmp_path)
    parts = program._walking
    assert parts is not None
    walker, deferred = parts._walker, parts.homes.deferred
    assert len(deferred) == sum(walker.lengths) and not parts.homes.fused

    def due(state: Any) -> bool:
        assert set(state._rows.due) in (set(), set(deferred))
        return bool(state._rows.due)

    state: Any = program.init(3)
    state, _ = program.step(state, batches[0])
    assert due(state) and "step" in repr(state) and due(state), "a look at its name changes nothing"
    state = assert_moves_what_is_said(program, state, batches[1], 4, 3)
    assert due(state)

    # A process that comes after finds it due, and so does one that comes after this.
    with pytest.raises(ValueError, match="another optimizer.*before.resume"):
        clipped(on_disk, tmp_path, rate=1e-3).resume()
    for _ in range(2):
        program = clipped(on_disk, tmp_path)
        state = program.resume()
        assert due(state) and digest(program, state) == found[2] and not due(state)
    # What looks at a state leaves what a killed run goes on from.
    program = clipped(on_disk, tmp_path)
    state = program.resume()
    loss, grads = program.value_and_grad(state, batches[1])
    assert not due(state)
    state = clipped(on_disk, tmp_path).resume()
    assert due(state) and digest(program, state) == found[2]
    state = program.resume()

    # Whatever breaks off, and wherever: the state is whole, or given up.
    def breaking(function: Any, at: int) -> Any:
        calls = 0

        def broken(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise RuntimeError("the power went off")
            return function(*args)

        return broken

    for rows in (state._rows.inputs[0], state._rows.grads[0]):  # in the middle of a pass: some updates are made by then
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="went off"):
            patch.setattr(rows, "put", breaking(rows.put, 2))
            program.step(state, batches[0])
    assert digest(program, state) == found[2]
    state, _ = program.step(state, batches[0])
    assert due(state) and digest(program, state) == found[3]
    state = program.update(state, grads, loss)
    assert due(state) and int(state.step) == 4
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="went off"):
        patch.setattr(state._rows.opt[0], "put", breaking(state._rows.opt[0].put, 1))
        program.params(state)
    with pytest.raises(ValueError, match="given up"):
        program.params(state)
    was = digest(program, program.resume())

    # In host memory, and where some layers have nothing away.
    for homes in ("offload=optimizer+gradients", "budget=330kB host=30kB disk=12MB"):
        other = clipped(f"zero=1 {homes}", tmp_path)
        assert other._walking is not None and other._walking.homes.deferred, homes
        state = other.init(3)
        for index in range(3):
            state, _ = other.step(state, batches[index % 2])
        assert state._rows.due and digest(other, state) == found[3]
        state = other.update(state, grads, loss)
        assert digest(other, state) == was
        state, metrics = other.step(state, jax.tree.map(lambda x: x, batches[0]))
        state = other.update(state, jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), grads), loss)
        assert not state._rows.due


def test_of_a_state_with_updates_due_no_copy_is_used_and_none_is_lost() -> None:
    """A copy's layers would be those of the state it was copied from, which go on with that one's steps."""
    batch = subject("linen_tied", False).batches[0]
    program = clipped("zero=1 offload=optimizer+gradients")
    state: Any = program.step(program.init(3), batch)[0]
    for copied in (jax.tree.map(jax.numpy.copy, state), jax.jit(lambda state: state)(state)):
        for use in (program.params, lambda copied: program.step(copied, batch), program.restore):
            with pytest.raises(ValueError, match="copy of a state.*program.to_arrays"):
                use(copied)
    was = digest(program, jax.tree.map(lambda x: x, state))  # the same arrays: the same state
    assert digest(program, program.from_arrays(program.to_arrays(state))) == was

    nans = jax.tree.map(lambda x: np.full(x.shape, np.nan, x.dtype), program.params(state))
    for rows in state._rows.every:
        rows.settle()
    gc.collect()
    before = len(jax.live_arrays())
    state = program.update(state, nans)
    for rows in state._rows.every:
        rows.settle()
    gc.collect()
    assert len(jax.live_arrays()) == before, "gradients that are not finite are not kept: no budget counts them"

    class Interrupted(dict[Any, Any]):
        def pop(self, key: Any) -> Any:  # pyright: ignore
            super().pop(key)
            raise KeyboardInterrupt

    state, _ = program.step(state, batch)
    broken = dataclasses.replace(state, _rows=dataclasses.replace(state._rows, due=Interrupted(state._rows.due)))
    with pytest.raises(KeyboardInterrupt):
        program.params(broken)
    with pytest.raises(ValueError, match="given up"):
        program.params(state)


def assert_moves_what_is_said(program: Program, state: Any, batch: Any, reads: int, writes: int) -> Any:
    """A step moves so many rows of each layer from and to the disk, in as many bytes as the report says."""
    moved: dict[str, int] = dict.fromkeys(("read", "write"), 0)
    calls = dict(moved)
    with pytest.MonkeyPatch.context() as patch:
        for what in list(moved):
            whole = getattr(files.RowFile, what)

            def counted(self: Any, row: int, data: Any, what: str = what, whole: Any = whole) -> None:
                moved[what] += data.size
                calls[what] += 1
                whole(self, row, data)

            patch.setattr(files.RowFile, what, counted)
        state, _ = program.step(state, batch)
        for rows in state._rows.every:
            rows.settle()
    use = program.report().walk
    assert use is not None
    assert program._walking is not None
    num = sum(program._walking._walker.lengths)
    layers = [each for each in use.classes if each.name != "the rest"]  # which is no row
    said_read, said_written = (sum(getattr(each, of) for each in layers) for of in ("disk_read", "disk_written"))
    for what, said, rows in (("read", said_read, reads), ("write", said_written, writes)):
        assert calls[what] == rows * num
        # Whole blocks, and in these small rows each part of an array begins at a multiple of 128 bytes.
        assert said <= moved[what] <= 1.25 * said, (what, said, moved[what])
    assert bool(next(each for each in use.classes if each.name == "gradients").disk_written) == (writes == 3)
    return state


def test_what_a_fused_step_moves_is_what_the_report_says(tmp_path: Path) -> None:
    name = "linen_tied"
    program = walking_program(name, ON_DISK, tmp_path)
    assert_moves_what_is_said(program, trained(program, name, 1), subject(name, False).batches[0], 3, 2)


def test_gradients_are_those_of_one_program() -> None:
    name, batch = "linen_tied", subject("linen_tied", False).batches[0]
    found = []
    for plan in (f"zero=1 {EVERYTHING}", "zero=1"):
        program = walking_program(name, plan)
        found.append(program.value_and_grad(program.init(0), batch))
    assert float(found[0][0]) == pytest.approx(float(found[1][0]), rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), found[0][1], found[1][1])


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
