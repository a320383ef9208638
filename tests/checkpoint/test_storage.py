import resource
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.checkpoint import inspect, restore, save

from .conftest import assert_same, make_mesh, make_state


def abstract(tree, sharding=None):
    """Shapes only, so that nothing of the tree itself can find its way into what is restored."""

    def shape(leaf):
        if not isinstance(leaf, jax.Array):
            return leaf if not isinstance(leaf, np.ndarray) else np.zeros_like(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or leaf.sharding)

    return jax.tree.map(shape, tree)


def test_everything_comes_back_where_it_was(tmp_path: Path, state: dict):
    save(tmp_path / "c", state, {"plan": "zero=1", "data": {"samples": 80}})
    restored, meta = restore(tmp_path / "c", abstract(state))
    assert_same(restored, state)
    assert type(restored["step"]) is int
    assert meta["data"] == {"samples": 80} and meta["num_devices"] == 8
    for new, old in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        if isinstance(old, jax.Array):
            assert new.sharding == old.sharding
    np.testing.assert_array_equal(jax.random.bits(restored["key"]), jax.random.bits(state["key"]))


@pytest.mark.parametrize("shape, spec", [((2,), P("a")), ((3, 1), P(None, "a")), ((1,), P()), ((2, 4), P("b", "a"))])
def test_the_same_arrays_on_other_devices(tmp_path: Path, shape: tuple[int, ...], spec: P):
    value = np.arange(8 * 12, dtype=np.float32).reshape(8, 12)
    save(tmp_path / "c", {"w": jax.device_put(value, NamedSharding(make_mesh(4, 2), P("a", "b")))}, {})
    sharding = NamedSharding(make_mesh(*shape), spec)
    restored, _ = restore(tmp_path / "c", {"w": jax.ShapeDtypeStruct((8, 12), np.float32, sharding=sharding)})
    assert restored["w"].sharding == sharding
    np.testing.assert_array_equal(restored["w"], value)


def test_arrays_written_under_one_container_are_read_into_another(tmp_path: Path):
    save(tmp_path / "c", {"a": (np.ones(3), {"b": 2.5})}, {})
    restored, _ = restore(tmp_path / "c", {"a": [np.zeros(3), {"b": 0.0}]})
    assert restored["a"][0].tolist() == [1, 1, 1] and restored["a"][1]["b"] == 2.5


def test_a_part_may_be_left_unread(tmp_path: Path, state: dict):
    save(tmp_path / "c", state, {})
    wanted = {"params": abstract(state["params"])}
    restored, _ = restore(tmp_path / "c", wanted, ignore=("opt_state", "carried", "step", "key"))
    assert_same(restored, {"params": state["params"]})
    with pytest.raises(ValueError, match="only the checkpoint has  step int64"):
        restore(tmp_path / "c", wanted, ignore=("opt_state", "carried", "key"))


def test_saving_again_replaces(tmp_path: Path):
    for value in (1.0, 2.0):
        save(tmp_path / "c", {"w": np.full(3, value)}, {"step": int(value)})
    assert restore(tmp_path / "c", {"w": np.zeros(3)})[0]["w"].tolist() == [2, 2, 2]
    assert inspect(tmp_path / "c").step == 2
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(FileExistsError, match="holds no checkpoint"):
        save(tmp_path, {"w": np.ones(3)}, {})
    assert (tmp_path / "thesis.tex").read_text() == "years"


def test_another_model_is_refused_with_every_difference(tmp_path: Path, state: dict):
    save(tmp_path / "c", state, {})
    other = abstract(state)
    other["params"] = {
        "kernel": jax.ShapeDtypeStruct((8, 13), jnp.float32),
        "bias": jax.ShapeDtypeStruct((12,), jnp.float32),
        "scale": jax.ShapeDtypeStruct((2,), jnp.float32),
    }
    del other["carried"]["count"]
    with pytest.raises(ValueError) as error:
        restore(tmp_path / "c", other)
    for line in (
        "only the model has       params/scale float32[2]",
        "only the checkpoint has  carried/count int64[]",
        "params/kernel: float32[8, 13] in the model, float32[8, 12] in the checkpoint",
        "params/bias: float32[12] in the model, bfloat16[12] in the checkpoint",
        "cjax inspect",
    ):
        assert line in str(error.value)


def test_two_leaves_of_one_name_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="several arrays.*a/0"):
        save(tmp_path / "c", {"a": [np.ones(1)], "a/0": np.ones(1)}, {})


def data_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_changed_byte_anywhere_is_noticed(tmp_path: Path, state: dict):
    save(tmp_path / "c", state, {"plan": "zero=1"})
    files = data_files(tmp_path / "c")
    assert len(files) > 5
    for file in files:
        content = file.read_bytes()
        if not content:
            continue
        position = len(content) // 2
        file.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        with pytest.raises(ValueError, match="damaged"):
            restore(tmp_path / "c", abstract(state))
        file.write_bytes(content)
    assert_same(restore(tmp_path / "c", abstract(state))[0], state)


def test_cut_and_missing_files_are_listed_together(tmp_path: Path, state: dict):
    save(tmp_path / "c", state, {})
    files = [file for file in data_files(tmp_path / "c" / "arrays") if file.stat().st_size > 1]
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].unlink()
    with pytest.raises(ValueError, match="damaged, and nothing was restored") as error:
        restore(tmp_path / "c", abstract(state))
    assert f"{files[0].name} has" in str(error.value) and f"{files[1].name} is missing" in str(error.value)


def test_a_missing_checkpoint_names_its_neighbours(tmp_path: Path):
    save(tmp_path / "good", {"w": np.ones(3)}, {})
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*bad; in .* there is also: good"):
        restore(tmp_path / "bad", {"w": np.ones(3)})


def test_a_full_disk_leaves_what_was_there(tmp_path: Path):
    """A limit on the size of files stands in for the disk: the write fails in the same place, deep in the storage."""
    state = make_state()
    save(tmp_path / "c", state, {})
    large = {"w": jax.random.normal(jax.random.key(0), (512, 1024))}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written: it takes up to 2.0 MiB, [\d,.]+ MiB are free"):
            save(tmp_path / "c", large, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert_same(restore(tmp_path / "c", abstract(state))[0], state)
    save(tmp_path / "c", large, {})  # what was left behind is in nobody's way
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_meta_that_is_no_json_is_refused_before_anything_is_written(tmp_path: Path):
    with pytest.raises(ValueError, match="`meta` is kept as JSON.*set"):
        save(tmp_path / "c", {"w": np.ones(3)}, {"plan": {1, 2}})
    assert not list(tmp_path.iterdir())
