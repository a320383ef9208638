"""What is kept of a weight in fewer bytes, by its shape."""

import numpy as np
import pytest

from cjax.walk.quantized import Bits, structs_of


@pytest.mark.parametrize(
    ("shape", "num_inputs", "kind", "kept"),
    [
        ((6, 4, 2), 1, "int8", [((6, 8), np.int8), ((1, 8), np.float32)]),
        ((6, 4, 2), 2, "int8", [((24, 2), np.int8), ((1, 2), np.float32)]),
        ((256, 3), 1, "int4", [((128, 3), np.uint8), ((2, 3), np.float32)]),
        ((96, 3), 1, "int4", [((48, 3), np.uint8), ((3, 3), np.float32)]),  # blocks of 32
        ((24, 3), 1, "int4", [((12, 3), np.uint8), ((1, 3), np.float32)]),  # too short for a block
    ],
)
def test_shapes_of_values_and_scales(shape: tuple[int, ...], num_inputs: int, kind: Bits, kept: list) -> None:
    found = structs_of(shape, num_inputs, kind)
    assert found is not None and [(s.shape, s.dtype) for s in found] == kept


def test_an_odd_number_of_inputs_shares_no_bytes() -> None:
    assert structs_of((7, 4), 1, "int4") is None
    assert structs_of((7, 4), 1, "int8") is not None
