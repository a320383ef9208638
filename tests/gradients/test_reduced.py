"""Sums of devices become one sum: of a whole gradient, or of a stack of them layer by layer."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from traces import numbers

from cjax.gradients.reduced import by_layer, reduced, reduction

MESH = Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), ("data", "zero"))
AXES = ("data", "zero")


def test_a_reduction_scatters_where_the_dim_divides() -> None:
    none, split = PartitionSpec(None, None), PartitionSpec(("data", "zero"), None)
    assert reduction((8, 3), none, split, AXES, MESH).scatter == AXES
    for shape, placed in (((6, 3), split), ((8, 3), PartitionSpec(None, None))):
        how = reduction(shape, none, placed, AXES, MESH)
        assert how.scatter == () and how.placed == none, "a padded dim, or one that stays whole, is summed whole"
    how = reduction((3, 8), PartitionSpec(None, "data"), PartitionSpec(None, ("data", "zero")), ("zero",), MESH)
    assert (how.dim, how.scatter) == (1, ("zero",))


@pytest.mark.parametrize("placed", [PartitionSpec("zero", None), PartitionSpec(AXES, None), PartitionSpec(None, None)])
def test_sums_of_devices_are_added_up(placed: PartitionSpec) -> None:
    """Over all axes, be they scattered over one of them, over all or over none."""
    sums = numbers(4, 8, 3)
    how = reduction((8, 3), PartitionSpec(None, None), placed, AXES, MESH)
    (given,) = jax.jit(lambda g: reduced((g,), [how], [AXES], MESH))(sums)
    np.testing.assert_allclose(given, sums.sum(0), rtol=1e-5, atol=1e-6)
    assert given.sharding.is_equivalent_to(jax.sharding.NamedSharding(MESH, placed), 2)


@pytest.mark.parametrize("placed", [PartitionSpec(None, None, AXES), PartitionSpec(None, "zero", None)])
def test_a_layer_is_reduced_as_its_stack_is(placed: PartitionSpec) -> None:
    """And what is gathered of the parts that come of it is the whole."""
    sums, none = numbers(4, 5, 2, 8), PartitionSpec(None, None, None)
    how = reduction((5, 2, 8), none, placed, AXES, MESH)
    of = by_layer((5, 2, 8), how, AXES, MESH)
    assert of.whole == (5, 2, 8) and of.part == ((5, 2, 2) if placed[2] else (5, 1, 8))

    def inside(sums: jax.Array) -> Any:
        parts = jax.lax.map(of.reduce, sums[0])
        assert parts.shape == of.part
        return parts, jax.lax.map(of.gather, parts)

    run = jax.shard_map(
        inside, mesh=MESH, in_specs=PartitionSpec(AXES), out_specs=(placed, none), check_vma=False
    )  # fmt: skip
    for given in jax.jit(run)(sums):
        np.testing.assert_allclose(given, sums.sum(0), rtol=1e-5, atol=1e-6)


def test_a_layer_that_other_axes_split_is_reduced_in_its_shards() -> None:
    """The region around it is manual over the batch alone."""
    mesh = Mesh(np.array(jax.devices("cpu")[:8]).reshape(4, 2), ("data", "tensor"))
    sums, summed = numbers(4, 3, 8, 6), PartitionSpec(None, None, "tensor")
    how = reduction((3, 8, 6), summed, PartitionSpec(None, "data", "tensor"), ("data",), mesh)
    of = by_layer((3, 8, 6), how, ("data",), mesh)

    def inside(sums: jax.Array) -> Any:
        parts = jax.lax.map(of.reduce, sums[0])
        return parts, jax.lax.map(of.gather, parts)

    run = jax.shard_map(
        inside, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=(PartitionSpec(None, "data"), PartitionSpec()),
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    for given in jax.jit(run)(sums):
        np.testing.assert_allclose(given, sums.sum(0), rtol=1e-5, atol=1e-6)
