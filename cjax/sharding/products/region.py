"""A function on each device's own shards of its operands, differentiated such that only the caller decides on sums.

`jax.shard_map` sums the gradient of an operand over all devices that share it, inside of the region. That is too early
and too much where the gradient is wanted in parts (ZeRO), or is to be added to others first. Here each device's shard
of such a sum comes back on a dim of its own, and the compiler, which sees what becomes of it, reduces or scatters.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.sharding.storage.storage import axes_of_entry


def in_region(
    function: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    mesh: Mesh,
    sums: Sequence[tuple[str, ...]] = (),
    alone: bool = False,
    differentiated: Callable[..., list[jax.Array]] | None = None,
    as_is: bool = False,
    waits: bool = False,
) -> list[jax.Array]:
    """The results of `function` on each device's shards.

    The backward pass runs `function` again on the operands as they are kept: what it gathers is not saved.

    Args:
      function: shards to shards; may use collectives over the axes that the specs name.
      operands: arrays; integers have no gradient.
      in_specs, out_specs: placements of operands and results; what a placement does not mention is alike on all.
      mesh: the mesh; in a manual region, the axes that are manual there are left out.
      sums: for each result the axes over which its shards are to be added up; none by default.
      differentiated: what the backward pass differentiates, where that is not `function` itself: the same values, by
        products that have a rule of their own. The forward pass has plain ones, by which policies know what to save.
      alone: leave no axis of the mesh to the compiler. Along those that nobody names, all devices do the same.
      as_is: whether devices' shares are added up in their own dtype; in float32 otherwise, if they are of less.
      waits: whether nobody reads the gradient of one operand before those of the others are made, which are computed
        while it is on its way.
    """
    context = jax.sharding.get_abstract_mesh()
    manual = set(context.manual_axes)
    ins = tuple(rest_of(spec, manual) for spec in in_specs)
    outs = tuple(rest_of(spec, manual) for spec in out_specs)
    summed = [tuple(a for a in axes if a not in manual) for axes in sums] or [()] * len(outs)
    named = {a for spec in (*ins, *outs) for entry in spec for a in axes_of_entry(entry)}.union(*summed)
    axes = tuple(a for a in mesh.axis_names if a in named)
    real = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]
    partial = [PartitionSpec(over or None, *spec) for over, spec in zip(summed, outs, strict=True)]
    # Where devices hold the same result, each has a share in its gradient, or it would count once for each of them.
    split = [{a for entry in spec for a in axes_of_entry(entry)} for spec in partial]
    copies = [math.prod(mesh.shape[a] for a in axes if a not in those) for those in split]
    over = {a for a in mesh.axis_names if a not in manual} if alone else set(axes)

    def total(shares: jax.Array) -> jax.Array:
        if shares.dtype == bool:
            return shares.any(0)
        # Whole numbers of few bits would come back as wider ones, of which `~x` and an overflow are others.
        whole = not jnp.issubdtype(shares.dtype, jnp.inexact)
        return lax.reduce(shares, np.zeros((), shares.dtype), lax.add, (0,)) if as_is or whole else shares.sum(0)

    def run(inside: Any, args: Any, specs: Any, results: Any) -> Any:
        if not over:
            return inside(*args)
        where = {} if manual else {"mesh": mesh}
        return jax.shard_map(
            inside, in_specs=specs, out_specs=results, axis_names=over, check_vma=False, **where
        )(*args)  # fmt: skip

    def forward(*operands: jax.Array) -> list[jax.Array]:
        found = run(lambda *parts: [y[None] for y in function(*parts)], operands, ins, partial)
        return [total(y) if axes else y[0] for y, axes in zip(found, summed, strict=True)]

    def backward(operands: tuple[jax.Array, ...], grads: list[jax.Array]) -> tuple[jax.Array | None, ...]:
        there = [i for i, grad in enumerate(grads) if grad.dtype != jax.dtypes.float0]  # results that are no integers

        def inside(parts: tuple[jax.Array, ...], grads: list[jax.Array]) -> list[jax.Array]:
            def of(*some: jax.Array) -> list[jax.Array]:
                whole = dict(zip(real, some, strict=True))
                results = (differentiated or function)(*(whole.get(i, part) for i, part in enumerate(parts)))
                return [results[i] for i in there]

            _, transposed = jax.vjp(of, *(parts[i] for i in real))
            shares = [grad / copies[i] if copies[i] > 1 else grad for i, grad in zip(there, grads, strict=True)]
            return [grad[None] for grad in transposed(shares)]

        given, specs = [grads[i] for i in there], [outs[i] for i in there]
        found = run(inside, (operands, given), (ins, specs), [_lead(axes, ins[i]) for i in real])
        found = lax.optimization_barrier(found) if waits else found
        by_operand = {i: total(grad) for i, grad in zip(real, found, strict=True)}
        return tuple(by_operand.get(i) for i in range(len(operands)))

    call = jax.custom_vjp(forward)
    call.defvjp(lambda *operands: (forward(*operands), operands), backward)
    return call(*operands)


def constrained(value: jax.Array, mesh: Mesh, spec: PartitionSpec) -> jax.Array:
    """`value` placed as `spec` says; where some axes of the mesh are manual, on what is left of it."""
    context = jax.sharding.get_abstract_mesh()
    if all(size == 1 or axis in context.manual_axes for axis, size in mesh.shape.items()):
        return value
    return lax.with_sharding_constraint(value, NamedSharding(context if context.manual_axes else mesh, spec))


def raised_on_cpu(operand: jax.Array, mesh: Mesh) -> jax.Array:
    """A bfloat16 operand as float32 on CPUs: XLA stops the process where bfloat16 is scattered in a region there, and
    has no kernels that multiply it and sum in float32."""
    low = operand.dtype in (jnp.bfloat16, jnp.float16) and mesh.devices.flat[0].platform == "cpu"
    return operand.astype(jnp.float32) if low else operand


def rest_of(spec: PartitionSpec, manual: set[str]) -> PartitionSpec:
    """`spec` without the axes that are manual already."""
    return PartitionSpec(*(tuple(a for a in axes_of_entry(e) if a not in manual) or None for e in spec))


def _lead(axes: tuple[str, ...], spec: PartitionSpec) -> PartitionSpec:
    used = {a for entry in spec for a in axes_of_entry(entry)}
    return PartitionSpec(tuple(a for a in axes if a not in used) or None, *spec)
