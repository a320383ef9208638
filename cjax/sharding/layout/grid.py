"""2D, 2.5D and 3D tensor parallelism on a trace: which axes split which classes, and how each matmul is spread.

Every activation has one dim of features, split over one axis, and its batch over the others. In 2d and 2.5d features
are always on `col`. In 3d a matmul takes features on one of `j` and `k` and gives features on the other, so that the
classes of dims are of two colours: what layers hand on (embed) is on `k`; heads, ffn and vocabulary are on `j`.

Weights that are contracted along a split class and make another are spread as `cjax.sharding.products.matmul` says.
All others - convolutions, recurrent cells, experts, matmuls of which one side is too small to split - are left to
constraints.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from cjax.mesh import COL, DEPTH, ROW, I, J, K
from cjax.sharding.layout.one_d import blocked_by
from cjax.sharding.products.matmul import Move, Spread
from cjax.sharding.storage.storage import as_spec, axes_of_entry
from cjax.trace.dims.find import Matmul
from cjax.trace.reading import Trace


@dataclass(frozen=True)
class Grid:
    """The axes of a tensor mode.

    Args:
      mode: as the plan writes it, "2d:4".
      size: q or l, devices along each axis but `depth`.
      features: the axes that split features; first the one for what layers hand on.
      batch: the axes that split the batch beside those of data parallelism, while features are on the first.
      weight: the axis that splits weights once more, along which they are gathered for use.
    """

    mode: str
    size: int
    features: tuple[str, ...]
    batch: tuple[str, ...]
    weight: str

    @property
    def partner(self) -> dict[str, str]:
        """For each axis of features, the axis on which a matmul puts what it makes of them."""
        first, last = self.features[0], self.features[-1]
        return {first: last, last: first}


def grid_of(axis_sizes: Mapping[str, int]) -> Grid | None:
    """The grid among the axes of a mesh, if there is one."""
    if axis_sizes.get(COL, 1) > 1:
        q, depth = axis_sizes[COL], axis_sizes.get(DEPTH)
        mode = f"2d:{q * q}" if depth is None else f"2.5d:{depth * q * q}" + (f"/{depth}" if depth > 1 else "")
        return Grid(mode, q, (COL,), (ROW,) if depth is None else (DEPTH, ROW), ROW)
    if axis_sizes.get(I, 1) > 1:
        return Grid(f"3d:{axis_sizes[I] ** 3}", axis_sizes[I], (K, J), (I, J), I)
    return None


def is_product(m: Matmul) -> bool:
    """Whether a matmul is one of an activation and a weight that its layer uses once."""
    return (m.lhs_origin is None) != (m.rhs_origin is None) and not (m.batched or m.is_conv or m.looped)


def is_between(m: Matmul) -> bool:
    """Whether a matmul is one of two activations."""
    return m.lhs_origin is None and m.rhs_origin is None


def assign(trace: Trace, grid: Grid, excluded: set[int]) -> tuple[dict[int, str], list[str]]:
    """The axis of each class of features, and what there is to say about the rest.

    Raises:
      ValueError: heads that the grid does not divide.
    """
    dims = trace.dims
    between = [m for m in dims.matmuls if is_between(m)]
    forbidden = excluded | {dims.class_of(d) for m in between for d in m.contracted} | trace.part_classes
    forbidden |= {dims.class_of(d) for d in dims.packed}
    heads = {dims.class_of(d) for m in between if m.contracted for d in m.batched}
    work: dict[int, list[float]] = {}
    for m in dims.matmuls:
        weight = m.rhs if m.lhs_origin is None else m.lhs
        for c in {dims.class_of(d) for d in weight} if not is_between(m) else ():
            of = work.setdefault(c, [0.0, 0.0])
            amount = math.prod(dims.size[d] for d in (*m.out, *m.contracted))
            of[0] += amount
            of[1] += amount * is_product(m)
    largest: dict[int, int] = {}
    for d in (d for ids in dims.inputs for d in ids):
        largest[dims.class_of(d)] = max(largest.get(dims.class_of(d), 0), dims.size[d])
    together = [{dims.class_of(d) for d in ids} for m in dims.matmuls for ids in _activations(m)]
    chosen: list[int] = []
    notes = []
    for c in sorted(work, key=lambda c: (-work[c][1], c)):
        if c in forbidden or largest.get(c, 0) < grid.size or 2 * work[c][1] < work[c][0]:
            continue
        if blocked := blocked_by(trace, c, grid.size, forbidden, c in heads, grid.mode):
            notes.append(blocked)
        elif not any(c in ids and other in ids for ids in together for other in chosen):
            chosen.append(c)
    params = [ids for leaf, ids in zip(trace.leaves, dims.inputs, strict=True) if leaf.kind == "params"]
    few = {dims.size[d] for ids in params for d in ids if dims.class_of(d) in heads and dims.class_of(d) in chosen}
    few = {n for n in few if 1 < n < grid.size}
    notes += [f"{n} key-value heads are kept whole: {grid.mode} has {grid.size} a side" for n in sorted(few)]
    return _coloured(trace, grid, chosen), notes


def _activations(m: Matmul) -> Iterator[tuple[int, ...]]:
    yield m.out
    for ids, origin in ((m.lhs, m.lhs_origin), (m.rhs, m.rhs_origin)):
        if origin is None:
            yield ids


def _coloured(trace: Trace, grid: Grid, chosen: Sequence[int]) -> dict[int, str]:
    """Axes such that matmuls lead from one to the other; the heaviest come first, where they contradict each other."""
    if len(grid.features) == 1:
        return dict.fromkeys(chosen, grid.features[0])
    dims = trace.dims
    edges: dict[tuple[int, int], float] = {}
    for m in filter(is_product, dims.matmuls):
        weight = [dims.class_of(d) for d in (m.rhs if m.lhs_origin is None else m.lhs)]
        contracted = {dims.class_of(d) for d in m.contracted}
        ends = [[c for c in chosen if c in contracted], [c for c in chosen if c in weight and c not in contracted]]
        if all(ends):
            amount = math.prod(dims.size[d] for d in (*m.out, *m.contracted))
            key = (ends[0][0], ends[1][0])
            edges[key] = edges.get(key, 0.0) + amount
    colours: dict[int, str] = {}
    waiting = sorted(edges, key=lambda e: -edges[e])
    for start in sorted(chosen, key=lambda c: c not in trace.stream):
        colours.setdefault(start, grid.features[0])
        known = True
        while known:
            known = False
            for a, b in (ends for e in waiting for ends in (e, e[::-1])):
                if a in colours and b not in colours:
                    colours[b] = grid.partner[colours[a]]
                    known = True
                    break
    return colours


def crosses(grid: Grid, table: Sequence[tuple[str, ...]], rows: Sequence[tuple[str, ...]], dim: int) -> bool:
    """Whether a lookup could move what it finds across the grid, in place of the table that it looks in.

    Args:
      grid: the grid.
      table: the axes of its dims, as it is used.
      rows: those of the indices' dims.
      dim: of the table, that is looked up.
    """
    (across, *more), wanted = grid.features, [grid.weight] * 2
    wanted[dim] = across
    is_last = [bool(axes) and axes[-1] == grid.weight for axes in rows]
    return not more and list(table) == [(axis,) for axis in wanted] and sum(is_last) == 1


def weight_entries(
    grid: Grid, axes_of: Mapping[int, tuple[str, ...]], classes: Sequence[int], shape: Sequence[int],
    contracted: Sequence[int],
) -> list[tuple[str, ...]] | None:  # fmt: skip
    """Axes for each dim of a weight, by which of its dims are contracted; None if it is no product of the grid."""
    found = _ends(grid, axes_of, classes, shape, contracted)
    if found is None:
        return None
    (summed, axis), (free, _) = found
    made = grid.partner[axis]
    entries: list[tuple[str, ...]] = [()] * len(classes)
    entries[summed] = () if grid.weight == ROW else (axis,)
    entries[free] = (made,)
    # Gathered for use, so that any dim will do; along the one contracted, transfers can be cut into steps.
    order = [summed, *(d for d in contracted if d != summed), *(d for d in range(len(shape)) if d not in contracted)]
    for d in order:
        if shape[d] % (grid.size ** (1 + len(entries[d]))) == 0:
            entries[d] = (*entries[d], grid.weight)
            return entries
    if shape[summed] >= 4 * grid.size ** (1 + len(entries[summed])):
        entries[summed] = (*entries[summed], grid.weight)
    return entries


def _ends(
    grid: Grid, axes_of: Mapping[int, tuple[str, ...]], classes: Sequence[int], shape: Sequence[int],
    contracted: Sequence[int],
) -> tuple[tuple[int, str], tuple[int, str]] | None:  # fmt: skip
    """The dim of a weight that is contracted and split, and the one that it makes and that is; each with its axis."""

    def first(positions: Sequence[int]) -> tuple[int, str] | None:
        for d in positions:
            axes = axes_of.get(classes[d], ())
            if len(axes) == 1 and axes[0] in grid.features and shape[d] >= grid.size:
                return d, axes[0]
        return None

    summed, free = first(contracted), first([d for d in range(len(classes)) if d not in contracted])
    return None if summed is None or free is None else (summed, free)


@dataclass(frozen=True)
class Operand:
    """One side of a matmul: placement (of an activation), classes and shape."""

    spec: PartitionSpec
    classes: tuple[int, ...]
    shape: tuple[int, ...]


def spread_of(
    grid: Grid, axes_of: Mapping[int, tuple[str, ...]], batch: int | None, x: Operand, w: Operand,
    contracted: tuple[tuple[int, ...], tuple[int, ...]],
) -> Spread | None:  # fmt: skip
    """How the grid spreads the product of an activation and a weight; None where that is left to the compiler.

    Args:
      grid: the grid.
      axes_of: mesh axes of each class.
      batch: the class of the batch.
      x: the activation.
      w: the weight; its spec is not read.
      contracted: dims of `x` and of `w` that are summed over.
    """
    entries = weight_entries(grid, axes_of, w.classes, w.shape, contracted[1])
    ends = _ends(grid, axes_of, w.classes, w.shape, contracted[1])
    if entries is None or ends is None or batch not in x.classes:
        return None
    (w_dim, axis), _ = ends
    x_dim = dict(zip(contracted[1], contracted[0], strict=True))[w_dim]
    rows = x.classes.index(batch)
    if axes_of_entry(x.spec[x_dim]) != (axis,) or rows in contracted[0]:
        return None
    split = next((d for d, axes in enumerate(entries) if grid.weight in axes), None)
    x_free = [d for d in range(len(x.shape)) if d not in contracted[0]]
    w_free = [d for d in range(len(w.shape)) if d not in contracted[1]]
    made, y_rows = grid.partner[axis], x_free.index(rows)
    y = [axes_of_entry(x.spec[d]) for d in x_free] + [entries[d] for d in w_free]
    y = [tuple(a for a in axes if a != grid.weight or d == y_rows) for d, axes in enumerate(y)]
    gather_w = None if split is None else Move(grid.weight, split)
    w_spec = as_spec(entries)
    if grid.weight == ROW:
        return Spread(contracted, x.spec, w_spec, as_spec(y), Move(axis, x_dim), gather_w)
    if y[y_rows][-1:] != (made,):
        return None
    y[y_rows] = (*y[y_rows][:-1], axis)
    return Spread(contracted, x.spec, w_spec, as_spec(y), Move(made, rows), gather_w, Move(axis, y_rows))
