"""Rows in groups, each multiplied by its group's weight (`lax.ragged_dot`), on each device's own rows.

XLA's partitioner brings all rows together, and every device multiplies them all. A device's rows are a stretch of them,
so that of each group it has a stretch too, which may be empty.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation, Params
from cjax.sharding.products.region import in_region
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.primitives import name_of


def is_by_rows(eqn: Equation) -> bool:
    """Whether an equation multiplies rows, its first operand's dim 0, by the weight of the group that each is in.

    >>> import jax.numpy as jnp
    >>> rows, weights, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([4, 2])
    >>> is_by_rows(jax.make_jaxpr(lax.ragged_dot)(rows, weights, sizes).jaxpr.eqns[-1])
    True
    """
    if name_of(eqn) != "ragged_dot_general" or eqn.params["group_offset"] is not None:
        return False
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    ((contracted, _), (batched, _)) = numbers.dot_dimension_numbers
    groups, rows = tuple(numbers.rhs_group_dimensions), tuple(numbers.lhs_ragged_dimensions)
    return groups == rows == (0,) and not batched and 0 not in contracted


def multiply_rows(
    eqn: Equation, operands: Sequence[jax.Array], params: Params, axes: tuple[str, ...], mesh: Mesh
) -> list[jax.Array]:
    """The results of such an equation, whose rows `axes` split.

    Args:
      eqn: the equation.
      operands: rows, weights by group, and how many rows each group has: those of the first come first.
      params: its parameters.
      axes: of the mesh; they divide the rows.
      mesh: the mesh.
    """

    def inside(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> list[jax.Array]:
        number = jnp.zeros((), sizes.dtype)
        for axis in axes:
            number = number * mesh.shape[axis] + lax.axis_index(axis).astype(sizes.dtype)
        first, ends = number * len(rows), jnp.cumsum(sizes)
        own = jnp.minimum(ends, first + len(rows)) - jnp.maximum(ends - sizes, first)
        return bind(eqn, (rows, weights, jnp.maximum(own, 0).astype(sizes.dtype)), params)

    specs = [PartitionSpec(axes), PartitionSpec(), PartitionSpec()]
    return in_region(inside, operands, specs, specs[:1], mesh, alone=True)
