"""ZeRO: which further dim of a parameter, its gradient and its optimizer state is split over the data axis.

Stage 1 splits optimizer state, 2 gradients too, 3 parameters too (Rajbhandari et al., ZeRO, 2020). All three use one
placement, so that an update is local: the first stage that splits a thing moves the boundary, not the shards.
"""

import math
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

SMALLEST = 1024  # elements; padding a smaller tensor so that it divides costs more than it saves


def shard_over(
    spec: PartitionSpec, shape: Sequence[int], axes: tuple[str, ...], axis_sizes: Mapping[str, int]
) -> PartitionSpec:
    """`spec` with one more dim split over `axes`: the outermost if it divides, else the largest that does, else padded.

    Parts of the outermost dim lie one behind the other in memory, as a gather puts them and a reduce-scatter takes
    them. For any other dim XLA transposes what it gathers, and under ZeRO-3 the float32 weights of all layers, in front
    of the loop over them: a copy of what ZeRO has split, once more on each device.

    Args:
      spec: placement of the tensor so far.
      shape: its logical shape, the layer dim of a stack not counted.
      axes: the mesh axes of ZeRO.
      axis_sizes: sizes of all mesh axes.
    """
    num = math.prod(axis_sizes[a] for a in axes)
    entries = [*spec, *[None] * (len(shape) - len(spec))]
    if num == 1 or not shape:
        return spec

    def taken(i: int) -> tuple[str, ...]:
        entry = entries[i]
        return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)

    def shards(i: int) -> int:
        return num * math.prod(axis_sizes[a] for a in taken(i))

    # A dim that no axis splits yet comes first: two axes on one dim make the gathers of both interleave.
    outermost = next((i for i, size in enumerate(shape) if size > 1), 0)
    order = sorted(range(len(shape)), key=lambda i: (bool(taken(i)), i != outermost, -shape[i]))
    best = next((i for i in order if shape[i] % shards(i) == 0), None)
    if best is None and math.prod(shape) >= SMALLEST:
        largest = sorted(order, key=lambda i: (bool(taken(i)), -shape[i]))
        best = next((i for i in largest if shape[i] >= 4 * shards(i)), None)
    if best is None:
        return spec
    entry = (*taken(best), *axes)
    entries[best] = entry if len(entry) > 1 else next(iter(entry))
    return PartitionSpec(*entries)
