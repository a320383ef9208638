"""What of a state is in a folder comes back as it was."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.program.disk_state import check_same_update, placed, written


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
