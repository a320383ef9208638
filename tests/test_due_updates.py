"""Updates of layers that are away, left to the next step or made in the backward pass: bits, and bytes that move."""

import dataclasses
import gc
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from contract import digest, subject, trained, walking_program

from cjax.optim import LossScale
from cjax.program import Program
from cjax.walk import files

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
pytestmark = pytest.mark.usefixtures("settled")
ON_DISK = "zero=1 offload=params+optimizer+gradients host=0B disk=10MB"
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
        plan = f"zero=3 microbatches=2 precision={precision} offload=params+optimizer {homes}"
        program = walking_program(name, plan, tmp_path, optimizer, loss_scale)
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
    return walking_program("linen_tied", plan, folder, optimizer)


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
    for homes in ("budget=330kB host=30kB disk=12MB", *(["offload=optimizer+gradients"] if ALL else [])):
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


@pytest.mark.full
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


@pytest.mark.full
def test_what_a_fused_step_moves_is_what_the_report_says(tmp_path: Path) -> None:
    name = "linen_tied"
    program = walking_program(name, ON_DISK, tmp_path)
    assert_moves_what_is_said(program, trained(program, name, 1), subject(name, False).batches[0], 3, 2)
