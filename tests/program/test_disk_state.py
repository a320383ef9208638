"""What of a state is in a folder comes back as it was."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.program.disk_state import HeldState, check_same_update, placed, written


class Rows:
    """Rows whose threads end when they are closed; the disk may be full then."""

    def __init__(self, is_full: bool = False) -> None:
        self.is_full, self.is_closed = is_full, False

    def close(self) -> None:
        self.is_closed = True
        if self.is_full:
            raise OSError(28, "no space left on device")


def test_a_state_that_is_given_up_can_not_be_used_and_all_its_rows_are_closed(caplog: pytest.LogCaptureFixture) -> None:
    held = SimpleNamespace(every=[Rows(), Rows(is_full=True), Rows(), Rows()])
    holder, step = HeldState(cast(Any, held)), jnp.zeros(())
    holder.note(step)
    del held.every[2]  # who drops a state has its memory back
    holder.give_up()
    assert step.is_deleted() and [rows.is_closed for rows in held.every] == [True] * 3
    assert "rows could not be moved: [Errno 28] no space left" in caplog.text


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_keys_come_back_with_their_generator(impl: str) -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    keys = jax.random.split(jax.random.key(3, impl=impl), 8)
    arrays = [
        jax.device_put(keys, NamedSharding(mesh, PartitionSpec("data"))),
        jax.device_put(jnp.arange(5.0), NamedSharding(mesh, PartitionSpec())),
    ]
    found = written(arrays)
    for i, array in enumerate(arrays):
        again = placed(found, i, jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding))
        assert again.dtype == array.dtype and again.sharding.is_equivalent_to(array.sharding, again.ndim)
        jax.tree.map(np.testing.assert_array_equal, *(written([x])["0"] for x in (again, array)))


@pytest.mark.parametrize(
    ("note", "words"),
    [
        ({}, r"Finish it with that one .*state = program.restore\(before.resume\(\)\)\. Or go on from a checkpoint"),
        (
            {"how": "cjax train --resume runs/mine"},
            r"all options as they were, cjax train --resume runs/mine, and interrupt that after a step \(Ctrl-C\)",
        ),
    ],
)
def test_who_comes_with_another_optimizer_is_told_what_to_type(note: Any, words: str) -> None:
    folder: Any = SimpleNamespace(path=Path("/scratch/rows"), step=7, note=note)
    check_same_update(folder, b"one", b"one")
    with pytest.raises(ValueError, match=f"^/scratch/rows holds this run after step 7, .*another optimizer.*{words}"):
        check_same_update(folder, b"one", b"other")
