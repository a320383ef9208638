"""Values put one behind another along split positions: a class token in front of patches.

Of 65 positions over 8 devices each has 9, where it had 8 of the 64 patches, so that some go to the neighbour. XLA puts
whole examples together for that, and gathers the gradient whole on every device: ten times what a device has of the
patches (JAX 0.12). Here each device sends the rows that its neighbour needs, and gets their gradient back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation
from cjax.sharding.layout.layout import Layout
from cjax.sharding.products.region import in_region
from cjax.sharding.storage.storage import axes_of_entry, filled_up
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import name_of


@dataclass(frozen=True)
class Sent:
    """Rows of an operand that devices send: the first of what each has to the device before it, or the last to the one
    behind it."""

    operand: int
    step: int  # -1 or 1
    rows: int


@dataclass(frozen=True)
class Neighbours:
    """How operands come together along a dim that devices split.

    Args:
      dim: the dim.
      axis: the mesh axis that splits it.
      size: devices along it.
      split: of each operand, whether it is split too; the others are whole on every device.
      sent: what goes to neighbours.
      rows: int[size, n], for each device which rows of what it has are its n rows of the result: of its own part of
        each operand, then of what it receives, in the order of `sent`, then one of zeros.
    """

    dim: int
    axis: str
    size: int
    split: tuple[bool, ...]
    sent: tuple[Sent, ...]
    rows: np.ndarray


def neighbours_of(eqn: Equation, layout: Layout, dims: Dims, scope: Scope) -> Neighbours | None:
    """How the operands of a concatenation along a split dim come together; None for all other equations, and where a
    device needs rows of others than its neighbours.

    Args:
      eqn: the equation.
      layout: which axes split what.
      dims: the trace's.
      scope: where the equation stands.
    """
    if name_of(eqn) != "concatenate":
        return None
    dim: int = eqn.params["dimension"]
    *entries, out = (
        list(map(axes_of_entry, layout.spec(dims.of(v, scope), v.aval.shape))) for v in (*variables(eqn), *eqn.outvars)
    )
    axes, along = out.pop(dim), {own.pop(dim) for own in entries}
    if len(axes) != 1 or along - {(), axes} or any(own != out for own in entries):
        return None
    size = layout.axis_sizes[axes[0]]
    return neighbours(dim, axes[0], size, [v.aval.shape[dim] for v in eqn.invars])


def neighbours(dim: int, axis: str, size: int, lengths: Sequence[int]) -> Neighbours | None:
    """The same for operands of some lengths along a dim, of which some are split.

    >>> neighbours(1, "sequence", 4, [1, 8]).sent
    (Sent(operand=1, step=-1, rows=2),)
    """
    # What is made of patches in front of a token is of a class of its own, and wherever XLA finds best: here, in parts.
    split = [n >= size for n in lengths]
    parts = [filled_up(n, size) // size if is_split else n for n, is_split in zip(lengths, split, strict=True)]
    width = filled_up(sum(lengths), size) // size
    wanted = [(i, row) for i, n in enumerate(lengths) for row in range(n)]
    # Which operand and which row of it is each row of the result, device by device.
    mine = [wanted[r * width : (r + 1) * width] for r in range(size)]
    sent: dict[tuple[int, int], int] = {}
    for r, some in enumerate(mine):
        for i, row in some:
            s, at = divmod(row, parts[i]) if split[i] else (r, row)
            if abs(r - s) > 1:
                return None
            if s != r:
                sent[i, r - s] = max(sent.get((i, r - s), 0), at + 1 if r < s else parts[i] - at)
    order = tuple(Sent(i, step, rows) for (i, step), rows in sorted(sent.items()))
    starts = np.cumsum([0, *parts, *(each.rows for each in order)])
    table = np.full((size, width), starts[-1])
    for r, some in enumerate(mine):
        for k, (i, row) in enumerate(some):
            s, at = divmod(row, parts[i]) if split[i] else (r, row)
            if s == r:
                table[r, k] = starts[i] + at
                continue
            place = next(j for j, each in enumerate(order) if (each.operand, each.step) == (i, r - s))
            first = parts[i] - order[place].rows if r > s else 0
            table[r, k] = starts[len(parts) + place] + at - first
    return Neighbours(dim, axis, size, tuple(split), order, table)


def concatenate(
    eqn: Equation, ins: Sequence[jax.Array], neighbours: Neighbours, spec: PartitionSpec, mesh: Mesh
) -> jax.Array:
    """The result of a concatenation whose operands come together so.

    Args:
      eqn: the equation.
      ins: its operands.
      neighbours: how.
      spec: placement of the result.
      mesh: the mesh.
    """
    dim, axis = neighbours.dim, neighbours.axis
    whole = PartitionSpec(*(None if d == dim else entry for d, entry in enumerate(spec)))
    padded = [
        _filled(x, dim, filled_up(x.shape[dim], neighbours.size)) if is_split else x
        for x, is_split in zip(ins, neighbours.split, strict=True)
    ]

    def local(*parts: jax.Array) -> list[jax.Array]:
        there = [_sent(parts[each.operand], each, neighbours) for each in neighbours.sent]
        rows = jnp.concatenate([*parts, *there], axis=dim)
        return [_picked(rows, neighbours.rows, lax.axis_index(axis), dim)]

    specs = [spec if is_split else whole for is_split in neighbours.split]
    (found,) = in_region(local, padded, specs, (spec,), mesh, as_is=True)
    return lax.slice_in_dim(found, 0, eqn.outvars[0].aval.shape[dim], axis=dim)


def _filled(value: jax.Array, dim: int, length: int) -> jax.Array:
    return jnp.pad(value, [(0, length - n if d == dim else 0) for d, n in enumerate(value.shape)])


def _sent(part: jax.Array, sent: Sent, neighbours: Neighbours) -> jax.Array:
    """What a device receives of its neighbour's part."""
    first = 0 if sent.step < 0 else part.shape[neighbours.dim] - sent.rows
    rows = lax.slice_in_dim(part, first, first + sent.rows, axis=neighbours.dim)
    pairs = [(s, s + sent.step) for s in range(neighbours.size) if 0 <= s + sent.step < neighbours.size]
    return lax.ppermute(rows, neighbours.axis, pairs)


def _picked(value: jax.Array, rows: np.ndarray, device: jax.Array, dim: int) -> jax.Array:
    """A device's rows of the result: none twice, so that their gradient is picked too, and not added up."""
    num = value.shape[dim]
    back = np.full((len(rows), num + 1), rows.shape[1])
    for r, k in np.ndindex(*rows.shape):
        back[r, rows[r, k]] = k

    def pick(value: jax.Array, table: np.ndarray, device: jax.Array) -> jax.Array:
        # Behind the last row, what stands for no row: zeros.
        return jnp.take(_filled(value, dim, value.shape[dim] + 1), jnp.asarray(table)[device], axis=dim, mode="clip")

    picked = jax.custom_vjp(lambda value, device: pick(value, rows, device))
    picked.defvjp(
        lambda value, device: (pick(value, rows, device), device),
        lambda device, gradient: (pick(gradient, back[:, :num], device), None),
    )
    return picked(value, device)
