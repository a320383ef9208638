"""Where ZeRO splits a tensor further."""

import math

from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from cjax.sharding.layout.zero import SMALLEST, shard_over
from cjax.sharding.storage.storage import axes_of_entry

SIZES = {"data": 4, "zero": 8, "tensor": 2}


@st.composite
def placed_shape(draw: st.DrawFn) -> tuple[tuple[int, ...], P]:
    """A shape, and a placement that splits at most one of its dims."""
    shape = tuple(draw(st.lists(st.integers(1, 200), min_size=1, max_size=4)))
    at = draw(st.integers(0, len(shape)))
    return shape, P(*("tensor" if i == at and n >= 2 else None for i, n in enumerate(shape)))


@given(placed_shape(), st.sampled_from([("data",), ("zero",), ("data", "zero")]))
def test_laws(placed: tuple[tuple[int, ...], P], axes: tuple[str, ...]) -> None:
    shape, before = placed
    after = [*shard_over(before, shape, axes, SIZES)]
    after += [None] * (len(shape) - len(after))
    used = [axis for entry in after for axis in axes_of_entry(entry)]
    assert len(used) == len(set(used)), "an axis serves one dim"
    for old, new in zip([*before], after, strict=False):
        assert axes_of_entry(new)[: len(axes_of_entry(old))] == axes_of_entry(old), "what was split stays so"
    shards = [math.prod(SIZES[axis] for axis in axes_of_entry(entry)) for entry in after]
    num = math.prod(SIZES[axis] for axis in axes)
    changed = [i for i, (a, b) in enumerate(zip([*before], after, strict=True)) if a != b]
    assert len(changed) <= 1
    even = [i for i, n in enumerate(shape) if n % (num * (2 if before[i] else 1)) == 0]
    if changed:
        (i,) = changed
        assert math.prod(shards) == num * (2 if "tensor" in used else 1)
        padded = -(-shape[i] // shards[i]) * shards[i]
        assert padded == shape[i] if even else padded <= 1.25 * shape[i]
    else:
        assert not even, "a dim divides and was not split"
        assert math.prod(shape) < SMALLEST or max(shape) < 4 * num * 2


def test_the_outermost_dim_if_it_divides() -> None:
    """Parts of which lie one behind the other, as a gather puts them."""
    assert shard_over(P(None, None), (64, 256), ("data",), SIZES) == P("data", None)
    assert shard_over(P(None, None, None), (1, 64, 256), ("data",), SIZES) == P(None, "data", None)


def test_else_the_largest_that_divides() -> None:
    assert shard_over(P(None, None, None), (63, 64, 256), ("data",), SIZES) == P(None, None, "data")
    assert shard_over(P("tensor", None, None), (64, 64, 256), ("data",), SIZES) == P("tensor", None, "data")


def test_where_none_divides_the_largest_is_padded() -> None:
    assert shard_over(P(None, None), (33, 255), ("data",), SIZES) == P(None, "data")
    assert shard_over(P(None, None), (255, 33), ("data",), SIZES) == P("data", None)


def test_dims_that_no_axis_splits_come_first() -> None:
    assert shard_over(P(None, "tensor"), (64, 256), ("data",), SIZES) == P("data", "tensor")
    assert shard_over(P(None, "tensor"), (63, 256), ("data",), SIZES) == P(None, ("tensor", "data"))


def test_small_tensors_are_not_padded() -> None:
    assert shard_over(P(), (101,), ("data",), SIZES) == P()
    assert shard_over(P(None, None), (101, 33), ("data",), SIZES) == P("data", None)


def test_nothing_to_split() -> None:
    assert shard_over(P(), (), ("data",), SIZES) == P()
    assert shard_over(P("tensor"), (64,), ("data",), {"data": 1, "tensor": 2}) == P("tensor")
