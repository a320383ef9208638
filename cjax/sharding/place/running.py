"""Running sums, maxima and products along a dim of which devices have stretches.

XLA's partitioner goes through a stretch element by element, with seven kernels for each (JAX 0.12.0.1), or brings all
stretches together first (0.10.2). For a sum a device needs no more of the others than what their stretches come to.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation, Params
from cjax.sharding.layout.layout import Layout
from cjax.sharding.products.lookup import LOW_DTYPES, first_of
from cjax.sharding.products.region import constrained, in_region
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.primitives import facts_of, name_of


def split_along(eqn: Equation, layout: Layout, dims: Dims, scope: Scope) -> tuple[str, ...]:
    """The axes that split the dim along which an equation goes; none for an equation that goes along no dim.

    Args:
      eqn: the equation.
      layout: which axes split what.
      dims: the trace's.
      scope: where the equation stands.
    """
    if not facts_of(eqn).cumulates:
        return ()
    (out,) = eqn.outvars
    manual = jax.sharding.get_abstract_mesh().manual_axes
    entry = layout.spec(dims.of(out, scope), out.aval.shape)[eqn.params["axis"]]
    return tuple(a for a in axes_of_entry(entry) if layout.axis_sizes.get(a, 1) > 1 and a not in manual)


def running_sum(
    eqn: Equation, x: jax.Array, axes: tuple[str, ...], spec: PartitionSpec, mesh: Mesh
) -> jax.Array | None:
    """The result of a `cumsum` along a dim that `axes` split; None for all other equations, and where a dim is split
    in unequal parts.

    Args:
      eqn: the equation.
      x: its operand.
      axes: what `split_along` has found.
      spec: placement of the operand and of the result.
      mesh: the mesh.
    """
    sizes = [math.prod(mesh.shape[a] for a in axes_of_entry(entry)) for entry in spec]
    if not axes or name_of(eqn) != "cumsum" or any(n % size for n, size in zip(x.shape, sizes, strict=True)):
        return None
    dim, reverse = eqn.params["axis"], eqn.params["reverse"]

    def inside(part: jax.Array) -> list[jax.Array]:
        wide = part.astype(jnp.float32) if part.dtype in LOW_DTYPES else part
        own = lax.cumsum(wide, dim, reverse)
        total = lax.index_in_dim(own, 0 if reverse else -1, dim)
        totals = lax.all_gather(total, axes)
        number, others = first_of(axes, 1, mesh), lax.broadcasted_iota(jnp.int32, totals.shape, 0)
        before = others > number if reverse else others < number
        return [(own + jnp.where(before, totals, 0).sum(0)).astype(part.dtype)]

    return in_region(inside, [x], [spec], [spec], mesh, alone=True)[0]


def whole_along(eqn: Equation, x: jax.Array, params: Params, mesh: Mesh) -> jax.Array:
    """The result of an equation that goes along a dim which no axis splits; nor may the compiler, which splits what is
    made of split values as they are, whatever it is. Other dims are its own to choose.

    Args:
      eqn: the equation.
      x: its operand.
      params: its parameters, as they stand or others.
      mesh: the mesh.
    """
    free = PartitionSpec.UNCONSTRAINED
    spec = PartitionSpec(*(None if dim == eqn.params["axis"] else free for dim in range(x.ndim)))
    (found,) = bind(eqn, [constrained(x, mesh, spec)], params)
    return constrained(found, mesh, spec)
