"""Loss and gradients of a whole batch, or of its parts one after the other.

`plain` differentiates the whole batch at once. The others run it in parts, one after the other, and add up the
gradients; a part takes every m-th row, so that each device's rows of a part are rows it already has. `micro_batched`
lets every part see all devices, whose gradients are reduced part by part; `locally_accumulated` keeps every device to
its own rows until the last part, and reduces once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.sharding.storage import axes_of_entry

PyTree = Any
Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Evaluated:
    """What one pass over (a part of) a batch gives; `weight` is None where parts simply average."""

    total: jax.Array
    weight: jax.Array | None
    aux: list[tuple[jax.Array, jax.Array | None]]
    carried: Arrays


jax.tree_util.register_dataclass(Evaluated, ["total", "weight", "aux", "carried"], [])

Loss = Callable[[Arrays, Arrays, Arrays, PyTree, jax.Array, jax.Array], Evaluated]
Gradients = Callable[[Arrays, Arrays, Arrays, PyTree, jax.Array], tuple[Evaluated, Arrays]]
Denominator = Callable[[jax.Array], jax.Array]


def mean(total: jax.Array, weight: jax.Array | None) -> jax.Array:
    """total / weight; the total where there is no weight. Nothing counted is a mean of zero, not NaN."""
    if weight is None:
        return total
    return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))


def plain(loss: Loss) -> Gradients:
    """Gradients of the loss of a whole batch."""

    def gradients(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: jax.Array) -> Any:
        def scalar(params: Arrays) -> tuple[jax.Array, Evaluated]:
            out = loss(params, frozen, carried, batch, key, jnp.int32(0))
            weight = None if out.weight is None else lax.stop_gradient(out.weight)
            return mean(out.total, weight), out

        (_, out), grads = jax.value_and_grad(scalar, has_aux=True)(params)
        return out, grads

    return gradients


def micro_batched(
    loss: Loss, num_microbatches: int, constrain: Callable[[PyTree], PyTree], denominator: Denominator
) -> Gradients:
    """Gradients of a batch run in parts.

    Args:
      loss: of one part; its last argument is the part's index.
      num_microbatches: how many parts.
      constrain: placement of the batch after it was cut, part index first.
      denominator: what the sum of all totals is divided by, from the sum of all weights.
    """

    def gradients(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: jax.Array) -> Any:
        sums, grads = _sum_parts(loss, num_microbatches, constrain, params, frozen, carried, batch, key)
        return averaged(sums, grads, num_microbatches, denominator)

    return gradients


@dataclass(frozen=True)
class Reduction:
    """How the gradient of one stored array is reduced: from a sum on each device to one placed sum.

    `summed` is its placement before, the batch axes aside, and `placed` after. Over the axes `scatter`, each device
    gets its part of dim `dim`; over all others that share the batch, every device the whole.
    """

    summed: PartitionSpec
    placed: PartitionSpec
    dim: int
    scatter: tuple[str, ...]


def reduction(
    shape: Sequence[int], summed: PartitionSpec, placed: PartitionSpec, axes: tuple[str, ...], mesh: Mesh
) -> Reduction:
    """The way from `summed` to `placed`: a reduce-scatter where the dim divides evenly, else a whole sum.

    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> reduction((8, 3), PartitionSpec(None, None), PartitionSpec("data", None), ("data",), mesh).scatter
    ('data',)
    """
    for dim, (size, before, after) in enumerate(zip(shape, summed, placed, strict=True)):
        old, new = axes_of_entry(before), axes_of_entry(after)
        scatter = new[len(old) :]
        if not scatter or new[: len(old)] != old or not set(scatter) <= set(axes):
            continue
        shards = 1
        for axis in new:
            shards *= mesh.shape[axis]
        if size % shards == 0:
            return Reduction(summed, placed, dim, scatter)
    return Reduction(summed, summed, 0, ())


def locally_accumulated(
    loss: Loss,
    num_microbatches: int,
    axes: tuple[str, ...],
    reductions: Sequence[Reduction],
    mesh: Mesh,
    denominator: Denominator,
) -> Gradients:
    """Gradients of a batch run in parts, each device on its own rows; reduced once, after the last part.

    Args:
      loss: of one device's rows of a part; its last argument is the part's index.
      num_microbatches: how many parts.
      axes: the mesh axes that split the batch. All others stay with the compiler.
      reductions: of each stored array's gradient.
      mesh: the mesh.
      denominator: what the sum of all totals is divided by, from the sum of all weights.
    """
    num_shards = 1
    for axis in axes:
        num_shards *= mesh.shape[axis]

    def inside(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: jax.Array) -> Any:
        sums, grads = _sum_parts(loss, num_microbatches, lambda parts: parts, params, frozen, carried, batch, key)
        totals = lax.psum((sums.total, sums.weight, sums.aux), axes)
        return totals, sums.carried, tuple(g[None] for g in grads)  # a dim that tells the devices' sums apart

    def gradients(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: jax.Array) -> Any:
        whole = PartitionSpec()
        rows = jax.tree.map(lambda leaf: PartitionSpec(axes) if leaf.ndim else whole, batch)
        # Without varying types: with them, the gradient of what all devices share would be summed at every part.
        run = jax.shard_map(
            inside, mesh=mesh, in_specs=(whole, whole, whole, rows, whole), axis_names=set(axes), check_vma=False,
            out_specs=(whole, whole, PartitionSpec(axes)),
        )  # fmt: skip
        (total, weight, aux), carried, grads = run(params, frozen, carried, batch, key)
        grads = reduced(grads, reductions, [axes] * len(grads), mesh)
        sums = Evaluated(total, weight, aux, carried)
        return averaged(sums, grads, num_microbatches * num_shards, denominator)

    return gradients


def reduced(
    grads: Arrays, reductions: Sequence[Reduction], axes: Sequence[tuple[str, ...]], mesh: Mesh
) -> Arrays:
    """Gradients from the devices' own sums, which dim 0 tells apart.

    Args:
      grads: [devices along its axes, ...] each.
      reductions: how each is reduced.
      axes: over which mesh axes each is.
      mesh: the mesh.
    """

    def reduce(grads: Arrays) -> Arrays:
        return tuple(_reduce(g[0], how, over) for g, how, over in zip(grads, reductions, axes, strict=True))

    # Manual over all axes: the partitioner gathers what the others split before it scatters over some.
    before = tuple(PartitionSpec(over, *how.summed) for how, over in zip(reductions, axes, strict=True))
    after = tuple(how.placed for how in reductions)
    return jax.shard_map(reduce, mesh=mesh, in_specs=(before,), out_specs=after, check_vma=False)(grads)


def _reduce(grad: jax.Array, how: Reduction, axes: tuple[str, ...]) -> jax.Array:
    if how.scatter:
        grad = lax.psum_scatter(grad, how.scatter, scatter_dimension=how.dim, tiled=True)
    rest = tuple(axis for axis in axes if axis not in how.scatter)
    return lax.psum(grad, rest) if rest else grad


def cut_rows(leaf: jax.Array, num_microbatches: int) -> jax.Array:
    """Rows by micro-batch: every m-th row is one's."""
    rows = leaf.reshape(leaf.shape[0] // num_microbatches, num_microbatches, *leaf.shape[1:])
    return jnp.moveaxis(rows, 1, 0)


def _sum_parts(
    loss: Loss,
    num_microbatches: int,
    constrain: Callable[[PyTree], PyTree],
    params: Arrays,
    frozen: Arrays,
    carried: Arrays,
    batch: PyTree,
    key: jax.Array,
) -> tuple[Evaluated, Arrays]:
    """All parts one after the other: what they give and their gradients, added up."""
    leaves, treedef = jax.tree.flatten(batch)
    parts = constrain([cut_rows(leaf, num_microbatches) for leaf in leaves if leaf.ndim])

    def one(sums: Any, x: Any) -> Any:
        index, rows = x
        old_grads, old, carried = sums
        rows = iter(rows)
        part = jax.tree.unflatten(treedef, [next(rows) if leaf.ndim else leaf for leaf in leaves])

        def scalar(params: Arrays) -> tuple[jax.Array, Evaluated]:
            out = loss(params, frozen, carried, part, key, index)
            return out.total, out

        (_, out), grads = jax.value_and_grad(scalar, has_aux=True)(params)
        new = (out.total, out.weight, out.aux)
        grads, new = jax.tree.map(jnp.add, (old_grads, old), (grads, new))
        return (grads, new, out.carried), None

    shape = jax.eval_shape(loss, params, frozen, carried, _first(leaves, parts, treedef), key, jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (params, (shape.total, shape.weight, shape.aux)))
    (grads, (total, weight, aux), carried), _ = lax.scan(
        one, (zeros[0], zeros[1], carried), (jnp.arange(num_microbatches, dtype=jnp.int32), parts)
    )
    return Evaluated(total, weight, aux, carried), grads


def averaged(sums: Evaluated, grads: Arrays, num_parts: int, denominator: Denominator) -> tuple[Evaluated, Arrays]:
    """The loss and gradients of the whole from the sums over its parts."""
    # Without a weight each part is a mean over equally many rows: their sum is over their number.
    weight = None if sums.weight is None else denominator(sums.weight)
    divisor = num_parts if weight is None else jnp.where(weight == 0, 1, weight)
    grads = jax.tree.map(lambda g: g / jnp.asarray(divisor, g.dtype), grads)
    total = sums.total / num_parts if weight is None else sums.total
    aux = [(t / num_parts if w is None else t, w) for t, w in sums.aux]
    return Evaluated(total, weight, aux, sums.carried), grads


def _first(leaves: list[jax.Array], parts: list[jax.Array], treedef: Any) -> PyTree:
    shapes = iter([jax.ShapeDtypeStruct(p.shape[1:], p.dtype) for p in parts])
    return jax.tree.unflatten(treedef, [next(shapes) if leaf.ndim else leaf for leaf in leaves])
