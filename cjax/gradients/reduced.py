"""From gradients that each device has added up by itself to one sum of all, of which each has what it updates.

Once for all (`reduced`); or layer by layer within the backward pass that adds the last ones (`by_layer`), beside which
they are sent.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.sharding.products.region import raised_on_cpu
from cjax.sharding.storage.storage import axes_of_entry

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Reduction:
    """How the gradient of one stored array is reduced: from a sum on each device to one placed sum.

    `summed` is its placement before, the batch axes aside, and `placed` after. Over the axes `scatter`, each device
    gets its part of dim `dim`; over all others that share the batch, every device the whole. Sums are in `dtype`; None:
    the gradient's own.
    """

    summed: PartitionSpec
    placed: PartitionSpec
    dim: int
    scatter: tuple[str, ...]
    dtype: str | None = None


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
        # Only where the new axes follow the ones that split the dim already is a device's piece of the sum a piece of
        # its own piece; anything else has to be moved, and is summed whole first.
        scatter = new[len(old) :]
        if not scatter or new[: len(old)] != old or not set(scatter) <= set(axes):
            continue
        shards = 1
        for axis in new:
            shards *= mesh.shape[axis]
        # A reduce-scatter hands out equal pieces; a dim that does not divide into them is summed whole.
        if size % shards == 0:
            return Reduction(summed, placed, dim, scatter)
    return Reduction(summed, summed, 0, ())


def reduced(grads: Arrays, reductions: Sequence[Reduction], axes: Sequence[tuple[str, ...]], mesh: Mesh) -> Arrays:
    """Gradients from the devices' own sums, which dim 0 tells apart.

    Args:
      grads: [devices along its axes, ...] each; of no axes without that dim, and it stays as it is.
      reductions: how each is reduced.
      axes: over which mesh axes each is.
      mesh: the mesh.
    """
    mine = [(i, how, over) for i, (how, over) in enumerate(zip(reductions, axes, strict=True)) if over]
    if not mine:
        return grads

    def reduce(grads: Arrays) -> Arrays:
        return tuple(_reduce(g[0], how, over, mesh) for g, (_, how, over) in zip(grads, mine, strict=True))

    # Manual over all axes: the partitioner gathers what the others split before it scatters over some.
    before = tuple(PartitionSpec(over, *how.summed) for _, how, over in mine)
    after = tuple(how.placed for _, how, _ in mine)
    run = jax.shard_map(reduce, mesh=mesh, in_specs=(before,), out_specs=after, check_vma=False)
    found = dict(zip([i for i, *_ in mine], run(tuple(grads[i] for i, *_ in mine)), strict=True))
    return tuple(found.get(i, g) for i, g in enumerate(grads))


def _reduce(grad: jax.Array, how: Reduction, axes: tuple[str, ...], mesh: Mesh) -> jax.Array:
    """The sum over devices of one gradient: scattered where it can be, whole elsewhere."""
    kept = grad.dtype
    # `reduce=float32` under bfloat16: devices' sums would otherwise be rounded again at each addition.
    grad = grad if how.dtype is None else raised_on_cpu(grad.astype(how.dtype), mesh)
    if how.scatter:
        grad = lax.psum_scatter(grad, how.scatter, scatter_dimension=how.dim, tiled=True)
    rest = tuple(axis for axis in axes if axis not in how.scatter)
    return (lax.psum(grad, rest) if rest else grad).astype(kept)


@dataclass(frozen=True)
class ByLayer:
    """How layers of a stack gather their weights, and reduce their gradients, one by one.

    Args:
      whole: the stack's shape.
      part: the shape of what a device gets of it.
      gather: from a device's part of a layer to the layer.
      reduce: from a layer's sum on each device to its part of the sum over all.
    """

    whole: tuple[int, ...]
    part: tuple[int, ...]
    gather: Callable[[jax.Array], jax.Array]
    reduce: Callable[[jax.Array], jax.Array]


def by_layer(shape: Sequence[int], how: Reduction, axes: tuple[str, ...], mesh: Mesh) -> ByLayer:
    """A reduction layer by layer, and what undoes its scattering, in a region that is manual over `axes`.

    Args:
      shape: of the stack.
      how: the stack is reduced.
      axes: over which mesh axes.
      mesh: the mesh.
    """
    part = list(shape)
    part[how.dim] //= math.prod(mesh.shape[axis] for axis in how.scatter)
    others = {axis for axis, size in mesh.shape.items() if size > 1 and axis not in axes}

    def of_layer(run: Callable[[jax.Array, int], jax.Array]) -> Callable[[jax.Array], jax.Array]:
        """From a function of a layer and the dim of it that is scattered."""

        def each(layer: jax.Array) -> jax.Array:
            lead = len(shape) - layer.ndim
            spec = PartitionSpec(*how.summed[lead:])
            dim = how.dim - lead
            one: Callable[[jax.Array], jax.Array] = lambda layer: run(layer, dim)  # noqa: E731
            if not others:
                return one(layer)
            # As in `reduced`, manual over all axes.
            within = jax.sharding.get_abstract_mesh()
            return jax.shard_map(
                one, mesh=within, in_specs=(spec,), out_specs=spec, axis_names=others, check_vma=False
            )(layer)  # fmt: skip

        return each

    def gather(layer: jax.Array, dim: int) -> jax.Array:
        return lax.all_gather(layer, how.scatter, axis=dim, tiled=True)

    def reduce(layer: jax.Array, dim: int) -> jax.Array:
        return _reduce(layer, dataclasses.replace(how, dim=dim), axes, mesh)

    return ByLayer(tuple(shape), tuple(part), of_layer(gather), of_layer(reduce))
