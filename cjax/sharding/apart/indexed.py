"""Gathers, scatters and sorts on each device's own shards: split along the dims that they leave in their places.

In a region that is manual over some axes of the mesh, a stage of a pipeline among them, XLA's partitioner stops the
process at some of these where it could split them over several axes, also at those that the derivatives of a sort, of
eigenvalues and of triangular factors are made of. In a region that is manual over all axes nothing is left to split:
dims that are looked into are whole there.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.jax_compat.core import Equation
from cjax.sharding.products.region import in_region, raised_on_cpu
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.primitives import having, named

# For each dim of an array a name, the same for dims that go together; None for those that have to be whole.
Dims = list[Hashable]


def evaluate_indexed(
    eqn: Equation, ins: Sequence[jax.Array], in_specs: Sequence[PartitionSpec], mesh: Mesh
) -> list[jax.Array] | None:
    """The results of such an equation, in a region that is manual over some axes; None for all other equations.

    Args:
      eqn: the equation.
      ins: its operands.
      in_specs: where the layout has them.
      mesh: the mesh.
    """
    if eqn.primitive.name not in DIMS:
        return None
    in_dims, out_dims = DIMS[eqn.primitive.name](eqn)
    context: Any = jax.sharding.get_abstract_mesh()
    left = tuple(a for a in mesh.axis_names if a not in context.manual_axes)
    axes_of = _axes(eqn, in_dims, in_specs, left, mesh)
    if not axes_of:
        whole = [lax.with_sharding_constraint(x, NamedSharding(context, PartitionSpec())) for x in ins]
        outs = bind_as_is(eqn, whole)
        return [lax.with_sharding_constraint(x, NamedSharding(context, PartitionSpec())) for x in outs]
    specs, results = (
        [PartitionSpec(*(axes_of.get(name) for name in dims)) for dims in some] for some in (in_dims, out_dims)
    )
    params = dict(eqn.params)
    if eqn.primitive.name == "gather":
        shards = [math.prod(mesh.shape[a] for a in axes_of.get(name, ())) for name in in_dims[0]]
        sizes = params["slice_sizes"]
        params["slice_sizes"] = tuple(n if n == 1 else n // num for n, num in zip(sizes, shards, strict=True))
    named = {a for axes in axes_of.values() for a in axes}
    others = tuple(a for a in left if a not in named)
    # Is there only for the axes that it names, which the region would leave to the partitioner.
    rest = jnp.zeros(math.prod(mesh.shape[a] for a in others), jnp.int32)

    def run(which: list[int], given: Sequence[jax.Array]) -> list[jax.Array]:
        def local(*parts: jax.Array) -> list[jax.Array]:
            outs = bind_as_is(eqn, parts[:-1], params)
            return [outs[i] for i in which]

        raised = [raised_on_cpu(x, mesh) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in given]
        found = in_region(
            local, [*raised, rest], [*specs, PartitionSpec(others or None)], [results[i] for i in which], mesh
        )
        return [x.astype(eqn.outvars[i].aval.dtype) for i, x in zip(which, found, strict=True)]

    real = [i for i, v in enumerate(eqn.outvars) if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    rest_of = [i for i in range(len(eqn.outvars)) if i not in real]
    found = dict(zip(real, run(real, ins), strict=True)) if real else {}
    if rest_of:  # integers, of which nothing goes back
        found |= dict(zip(rest_of, run(rest_of, [lax.stop_gradient(x) for x in ins]), strict=True))
    return [found[i] for i in range(len(eqn.outvars))]


def reorders(eqn: Equation) -> bool:
    """Whether an equation's derivative gathers what the equation has put in another order."""
    return eqn.primitive.name in _REORDERS


def _axes(
    eqn: Equation, in_dims: Sequence[Dims], in_specs: Sequence[PartitionSpec], left: Sequence[str], mesh: Mesh
) -> dict[Hashable, tuple[str, ...]]:
    """The axes over which each name's dims are split, as the first operand has them, where that divides."""
    found: dict[Hashable, tuple[str, ...]] = {}
    used: set[str] = set()
    for var, names, spec in zip(eqn.invars, in_dims, in_specs, strict=True):
        for d, (name, entry) in enumerate(zip(names, spec, strict=False)):
            axes = tuple(a for a in axes_of_entry(entry) if a in left and a not in used)
            divides = var.aval.shape[d] % math.prod(mesh.shape[a] for a in axes) == 0
            if name is not None and name not in found and axes and divides:
                found[name] = axes
                used.update(axes)
    return found


def _gather(eqn: Equation) -> tuple[list[Dims], list[Dims]]:
    numbers, (operand, indices) = eqn.params["dimension_numbers"], eqn.invars
    shape, sizes = operand.aval.shape, eqn.params["slice_sizes"]
    looked_into = {*numbers.start_index_map, *(d for d, n in enumerate(shape) if sizes[d] != n)}
    table: Dims = [None if d in looked_into else ("slice", d) for d in range(len(shape))]
    rows: Dims = [("row", d) for d in range(indices.aval.ndim - 1)]
    for d, at in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        table[d] = rows[at] = ("both", d)
    slices = iter(
        name for d, name in enumerate(table)
        if d not in numbers.collapsed_slice_dims and d not in numbers.operand_batching_dims
    )  # fmt: skip
    behind, out = iter(rows), len(eqn.outvars[0].aval.shape)
    return [table, [*rows, None]], [[next(slices) if d in numbers.offset_dims else next(behind) for d in range(out)]]


def _scatter(eqn: Equation) -> tuple[list[Dims], list[Dims]]:
    numbers, (operand, indices, updates) = eqn.params["dimension_numbers"], eqn.invars
    shape, ndim = operand.aval.shape, updates.aval.ndim
    windows = (updates.aval.shape[d] for d in numbers.update_window_dims)
    absent = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    sizes = {d: next(windows) for d in range(len(shape)) if d not in absent}
    into = numbers.scatter_dims_to_operand_dims
    whole: Dims = [("slice", d) if sizes.get(d) == n and d not in into else None for d, n in enumerate(shape)]
    rows: Dims = [None] * (indices.aval.ndim - 1)  # whatever is written to one place has to be there together
    for d, at in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        whole[d] = rows[at] = ("both", d)
    window, behind = iter([whole[d] for d in sizes]), iter(rows)
    written = [next(window) if d in numbers.update_window_dims else next(behind) for d in range(ndim)]
    return [whole, [*rows, None], written], [whole]


def _along(eqn: Equation, dim: int) -> tuple[list[Dims], list[Dims]]:
    """Of an equation that works along one dim, and whose operands and results have all others in common."""
    dims: Dims = [None if d == dim else d for d in range(eqn.invars[0].aval.ndim)]
    return [dims] * len(eqn.invars), [dims] * len(eqn.outvars)


def _matrices(eqn: Equation) -> tuple[list[Dims], list[Dims]]:
    """Of an equation that takes matrices one by one."""
    num = eqn.invars[0].aval.ndim - 2

    def dims(v: Any) -> Dims:
        return [*range(num), *[None] * (v.aval.ndim - num)]

    return [dims(v) for v in eqn.invars], [dims(v) for v in eqn.outvars]


_REORDERS = named("eig lu")

DIMS: Mapping[str, Callable[[Any], tuple[list[Dims], list[Dims]]]] = {
    "gather": _gather,
    **dict.fromkeys(having("scatter"), _scatter),
    "sort": lambda eqn: _along(eqn, eqn.params["dimension"]),
    **dict.fromkeys(_REORDERS, _matrices),
    "top_k": lambda eqn: _along(eqn, eqn.params["axis"]),
    # JAX's derivative of it has the shape of the whole: nothing is split.
    "approx_top_k": lambda eqn: ([[None] * eqn.invars[0].aval.ndim], [[None] * v.aval.ndim for v in eqn.outvars]),
}
