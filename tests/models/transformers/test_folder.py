"""Files of a folder: which tensors are in one."""

import json
from pathlib import Path

import numpy as np

from cjax.models.transformers.folder import open_tensors, write_folder

SIZES = {"a": 40, "b": 40, "c": 30, "d": 200, "e": 8}


def test_no_file_is_larger_than_it_may_be_but_for_one_large_tensor(tmp_path: Path) -> None:
    tensors = {name: np.full(size // 4, number, np.float32) for number, (name, size) in enumerate(SIZES.items())}
    write_folder(tmp_path, {}, SIZES, iter(tensors.items()), max_bytes=80)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(SIZES.values())}
    held: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        held.setdefault(file, []).append(name)
    assert list(held.values()) == [["a", "b"], ["c"], ["d"], ["e"]]
    found = open_tensors(tmp_path)
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(found[name][(slice(None),)], tensor)
