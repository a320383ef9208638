import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.plan import Pipeline, Sequence, Tensor, Zero


@given(st.integers(1, 40), st.integers(1, 40))
def test_shapes_of_the_tensor_modes(side: int, depth: int) -> None:
    assert Tensor(side).axis_sizes() == {"tensor": side}
    assert Tensor(side**2, "2d").axis_sizes() == {"row": side, "col": side}
    assert Tensor(depth * side**2, "2.5d", depth).axis_sizes() == {"depth": depth, "row": side, "col": side}
    assert Tensor(side**3, "3d").axis_sizes() == {"i": side, "j": side, "k": side}


@given(st.integers(1, 5000), st.sampled_from(["2d", "3d"]))
def test_only_squares_and_cubes_fit(size: int, mode: str) -> None:
    power = int(mode[0])
    if any(side**power == size for side in range(1, 72)):
        assert math.prod(Tensor(size, mode).axis_sizes().values()) == size
    else:
        with pytest.raises(ValueError, match=f"tensor={mode}:{size}: {mode} needs"):
            Tensor(size, mode)


def test_nearest_sizes_are_named() -> None:
    with pytest.raises(ValueError, match=r"nearest that work: tensor=2d:4, tensor=2d:9"):
        Tensor(8, "2d")
    with pytest.raises(ValueError, match=r"nearest that work: tensor=2.5d:8/2, tensor=2.5d:18/2"):
        Tensor(12, "2.5d", depth=2)
    with pytest.raises(ValueError, match=r"nearest that work: tensor=3d:1, tensor=3d:8"):
        Tensor(4, "3d")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Tensor(4, depth=2), "only 2.5d has a depth"),
        (lambda: Tensor(4, "4d"), "tensor is one of 1d, 2d, 2.5d, 3d, not '4d'"),
        (lambda: Tensor(0), "at least 1, not 0"),
        (lambda: Tensor(True), "not True"),
        (lambda: Tensor(4.0), "not 4.0"),
        (lambda: Sequence(4, "gather"), "write sequence=gather"),
        (lambda: Pipeline(4, "gpipe", 2), "gpipe takes 1 chunks a stage; for more, pipeline=interleaved:4/2"),
        (lambda: Pipeline(4, "interleaved"), "interleaved takes 2 or more"),
        (lambda: Pipeline(4, "zero_bubble", 3), "zero_bubble takes 1 or 2"),
        (lambda: Pipeline(1, "interleaved", 2), "at least 2 stages"),
        (lambda: Zero(4), "stages are 0, 1, 2 and 3"),
        (lambda: Zero(0, 8), "write zero=0"),
        (lambda: Zero(3, 1), "at least 2, not 1"),
    ],
)
def test_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_numpy_integers_become_ints() -> None:
    assert type(Tensor(np.int64(4)).size) is int
    assert Pipeline(np.int32(4), "zero_bubble", np.int8(2)) == Pipeline(4, "zero_bubble", 2)
