"""Plan + dims -> mesh axes: which dimension of which tensor is split over which axis.

Classes of dims get axes: the batch those of data parallelism, features those of the tensor mode (`one_d`, `grid`). What
is split and how follows for every tensor from the classes of its dims, and for a weight also from the matmul it is in.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from jax.sharding import PartitionSpec

from cjax.mesh import BATCH_AXES, EXPERT, PIPE, SEQUENCE, TENSOR
from cjax.plan import Axes
from cjax.plan import Sequence as SequencePlan
from cjax.sharding.layout import grid as grids
from cjax.sharding.layout.grid import Grid
from cjax.sharding.layout.kept import kept_whole
from cjax.sharding.layout.one_d import choose, scorers, whole_heads
from cjax.sharding.layout.rows import rows_of_all
from cjax.sharding.layout.shared import features_of, shared_experts
from cjax.sharding.storage.storage import as_spec, filled_up
from cjax.trace.attention.positions import positions
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.reading import Trace

NO_SEQUENCE = SequencePlan()


@dataclass(frozen=True)
class Layout:
    """Mesh axes by class of dims, and what could not be split and why."""

    axes_of: Mapping[int, tuple[str, ...]]
    axis_sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    whole: frozenset[tuple[int, int]] = frozenset()  # (class, size) of dims that stay whole: few key-value heads
    batch: int | None = None  # the class of the batch
    grid: Grid | None = None
    weights: Mapping[int, tuple[tuple[str, ...], ...]] = field(default_factory=dict)  # of products of the grid, by leaf
    positions: frozenset[int] = frozenset()  # classes of positions that a sequence is split by
    rows: frozenset[int] = frozenset()  # classes of rows that are no example's, which the batch's axes split
    scores: frozenset[int] = frozenset()  # weights, by leaf, that score experts: whole, and so are the scores
    experts: frozenset[int] = frozenset()  # classes of experts that data-parallel devices share out
    features: frozenset[int] = frozenset()  # classes of dims that such an expert multiplies or makes

    def spec(self, classes: Sequence[int], shape: Sequence[int], with_examples: bool = False) -> PartitionSpec:
        """The placement of a tensor with these classes. An axis serves one dim; dims too small for it stay whole.

        `with_examples`: of what is where the examples are, whatever it has of experts that are shared out.
        """
        if with_examples or self.features.isdisjoint(classes) and self.rows.isdisjoint(classes):
            classes = [-1 if c in self.experts else c for c in classes]
        used: set[str] = set()
        entries: list[tuple[str, ...]] = [()] * len(classes)
        # The batch comes after features, and after rows that all examples make: of an axis that features are on, it
        # takes the partner. Positions take what is left. Experts come before rows, which take the other axes.
        order = [(c in self.positions, c == self.batch, c not in self.experts) for c in classes]
        for d in sorted(range(len(classes)), key=order.__getitem__):
            c, size = classes[d], shape[d]
            axes = self.axes_of.get(c, ())
            if c == self.batch and self.grid is not None:
                axes = tuple(self.grid.partner.get(a, a) if a in used else a for a in axes)
            axes = tuple(a for a in axes if a not in used)
            if axes and (c, size) not in self.whole and size >= math.prod(self.axis_sizes[a] for a in axes):
                used.update(axes)
                entries[d] = axes
        return as_spec(entries)

    def weight_spec(self, leaf: int, classes: Sequence[int], shape: Sequence[int]) -> PartitionSpec:
        """The placement of a parameter."""
        found = self.weights.get(leaf)
        if found is not None:
            return as_spec(found)
        if leaf in self.scores:
            return PartitionSpec(*[None] * len(classes))
        return self.spec([-1 if c in self.positions else c for c in classes], shape)


def make_layout(
    trace: Trace,
    axis_sizes: Mapping[str, int],
    rules: Mapping[str, Axes],
    splits_batch: bool = True,
    sequence: SequencePlan = NO_SEQUENCE,
) -> Layout:
    """Decide the mesh axes of every class of dims.

    Args:
      trace: the model.
      axis_sizes: mesh axes and their sizes.
      rules: the user's own mapping, dim name or `leaf path:dim` to an axis or None; wins over what is found.
      splits_batch: whether devices get different examples; a ragged last batch all of them score.
      sequence: how positions are split.

    Raises:
      ValueError: a batch, query heads or lengths that an axis does not divide; a rule that matches nothing; positions
        to split in a model without attention.
    """
    axes_of: dict[int, tuple[str, ...]] = {}
    grid = grids.grid_of(axis_sizes)
    batch_axes = tuple(a for a in (*BATCH_AXES, *(grid.batch if grid else ())) if axis_sizes.get(a, 1) > 1)
    if trace.batch_class is not None and batch_axes and splits_batch:
        _require_batch(trace, {a: axis_sizes[a] for a in batch_axes}, grid)
        axes_of[trace.batch_class] = batch_axes
    ruled = _rules(trace, axis_sizes, rules)
    taken = set(ruled) | set(axes_of)
    shared, told = list[int](), list[str]()
    if axis_sizes.get(EXPERT, 1) > 1:
        shared, told = shared_experts(trace, axis_sizes[EXPERT], taken)
        axes_of.update(dict.fromkeys(shared, (EXPERT,)))
        taken |= {*shared}
    if grid is not None:
        found, notes = grids.assign(trace, grid, taken)
        axes_of.update({c: (axis,) for c, axis in found.items()})
        near = {c for ids in _meeting(trace) if ids & set(found) for c in ids}
        chosen, more = choose(trace, grid.size, taken | near, grid.mode)
        axes_of.update({c: (grid.features[0],) for c in chosen})
        notes += more + _kept_by_1d(trace, chosen, grid)
        size, split = grid.size, [*found, *chosen]
    else:
        size = axis_sizes.get(TENSOR, 1)
        split, notes = choose(trace, size, taken, str(size)) if size > 1 else ([], [])
        axes_of.update({c: (TENSOR,) for c in split})
    notes += told
    name = grid.mode if grid else str(size)
    nothing = (size > 1 or grid) and not split and not any(set(axes) - set(BATCH_AXES) for axes in ruled.values())
    if nothing:
        notes.append(f"tensor={name} splits nothing in this model: every device of the axis does the same work")
    rows: list[int] = []
    if grid is None and trace.batch_class in axes_of:
        rows, more = rows_of_all(trace, axis_sizes, batch_axes, {*taken, *split})
        axes_of.update(dict.fromkeys(rows, batch_axes))
        notes += more
    places, why = _positions(trace, axis_sizes, sequence)
    axes_of.update({c: axes for c, axes in places.items() if c not in axes_of})
    axes_of.update({c: axes for c, axes in ruled.items() if axes})
    notes += why
    whole = frozenset((c, n) for c in axes_of for n in whole_heads(trace, c, size))
    weights = _grid_weights(trace, grid, axes_of) if grid is not None else {}
    scores = scorers(trace, [] if grid else [*(c for c in split if c not in ruled), *shared])
    layout = Layout(
        axes_of, dict(axis_sizes), tuple(notes), whole, trace.batch_class, grid, weights, frozenset(places),
        frozenset(rows), scores, frozenset(shared), features_of(trace, shared),
    )  # fmt: skip
    if size == 1 or nothing:
        return layout
    leaves = [*trace.leaves_of("params"), *trace.leaves_of("frozen")]
    specs = {i: layout.weight_spec(i, trace.classes_of(i), trace.leaves[i].shape) for i in leaves}
    axes = tuple(a for a in axis_sizes if a not in (*BATCH_AXES, SEQUENCE, PIPE))
    return replace(layout, notes=(*notes, *kept_whole(trace, specs, axes, size, name, set(ruled))))


def _positions(
    trace: Trace, axis_sizes: Mapping[str, int], sequence: SequencePlan
) -> tuple[dict[int, tuple[str, ...]], list[str]]:
    """Axes for the classes of positions; what looks like an attention and could not be split by them."""
    if sequence == NO_SEQUENCE:
        return {}, []
    found, reasons = positions(trace)
    if not found:
        said = "; ".join(reasons) or "no softmax between two matmuls of activations was found"
        raise ValueError(
            f"sequence={sequence} splits the positions of attentions, and this model has none: {said}. "
            "Leave `sequence` out of the plan, or compute attention with cjax.attention."
        )
    axis = TENSOR if sequence.mode == "gather" else SEQUENCE
    size = axis_sizes[axis]
    if sequence.mode != "gather" and (few := min(found.values())) < size:
        raise ValueError(
            f"sequence={sequence} can't split {few} positions over {size} devices: write a size of {few} or less."
        )
    uneven = sorted({length for length in found.values() if length % size})
    filled = [f"{length} positions are filled up to {filled_up(length, size)} over {axis}" for length in uneven]
    split = {**_put_together(trace, found, size), **found}
    return {c: (axis,) for c in split}, [*filled, *(f"kept whole over {axis}: {reason}" for reason in reasons)]


def _put_together(trace: Trace, found: Mapping[int, int], size: int) -> dict[int, int]:
    """What positions are put together of before the first layer, patches behind a class token, each with its length:
    split too, where it is long enough."""
    classes = dict[int, int]()
    for eqn in trace.closed.jaxpr.eqns:
        if name_of(eqn) != "concatenate":
            continue
        dim = eqn.params["dimension"]
        if trace.dims.of(eqn.outvars[0], trace.dims.top)[dim] not in found:
            continue
        for var in variables(eqn):
            own, length = trace.dims.of(var, trace.dims.top), var.aval.shape[dim]
            if length >= size and trace.batch_class in own:
                classes[own[dim]] = length
    return classes


def _meeting(trace: Trace) -> list[set[int]]:
    """Classes that come together in an operand or a result of a matmul, or in a table."""
    dims = trace.dims
    tables = [set(trace.classes_of(leaf)) for leaf, _, _ in dims.tables]
    return tables + [{dims.class_of(d) for d in ids} for m in dims.matmuls for ids in (m.lhs, m.rhs, m.out)]


def _kept_by_1d(trace: Trace, chosen: Sequence[int], grid: Grid) -> list[str]:
    names = sorted(trace.names.get(c, "?") for c in chosen)
    return [f"{', '.join(names)} split as in 1d over {grid.features[0]}: no matmul of {grid.mode}"] if names else []


def _grid_weights(
    trace: Trace, grid: Grid, axes_of: Mapping[int, tuple[str, ...]]
) -> dict[int, tuple[tuple[str, ...], ...]]:
    """Axes for each dim of the weights that the grid multiplies or looks up in, from their heaviest use."""
    dims = trace.dims
    found: dict[int, tuple[float, tuple[tuple[str, ...], ...]]] = {}
    for m in filter(grids.is_product, dims.matmuls):
        leaf, ids = (m.rhs_origin, m.rhs) if m.lhs_origin is None else (m.lhs_origin, m.lhs)
        assert leaf is not None
        classes, contracted = [dims.class_of(d) for d in ids], m.contracting[m.lhs_origin is None]
        entries = grids.weight_entries(grid, axes_of, classes, [dims.size[d] for d in ids], contracted)
        if entries is None:
            continue
        work = math.prod(dims.size[d] for d in (*m.out, *m.contracted))
        placed = _on_leaf(classes, entries, trace.classes_of(leaf))
        if placed is not None and work > found.get(leaf, (0.0,))[0]:
            found[leaf] = (work, placed)
    for leaf, dim, rows in dims.tables:
        classes, shape = trace.classes_of(leaf), trace.leaves[leaf].shape
        looked_up = classes.index(dims.class_of(dim)) if dims.class_of(dim) in classes else None
        if leaf in found or looked_up is None or trace.batch_class not in [dims.class_of(d) for d in rows]:
            continue
        entries = [() if d == looked_up else axes_of.get(c, ()) for d, c in enumerate(classes)]
        if shape[looked_up] >= 4 * grid.size and any(entries):
            entries[looked_up] = (grid.weight,)
            found[leaf] = (0.0, tuple(entries))
    return {leaf: entries for leaf, (_, entries) in found.items()}


def _on_leaf(
    classes: Sequence[int], entries: Sequence[tuple[str, ...]], leaf: Sequence[int]
) -> tuple[tuple[str, ...], ...] | None:
    """Axes for the dims of a leaf from those of the form it is multiplied in; None where a split dim is not found."""
    lead = len(leaf) - len(classes)
    if lead >= 0 and list(leaf[lead:]) == list(classes):  # behind the layer dim of an author's own stack
        return (*[()] * lead, *entries)
    placed: list[tuple[str, ...]] = [()] * len(leaf)
    for c, axes in zip(classes, entries, strict=True):
        spots = [d for d, other in enumerate(leaf) if other == c and not placed[d]]
        if axes and not spots:
            return None
        if axes:
            placed[spots[0]] = tuple(axes)
    return tuple(placed)


def _require_batch(trace: Trace, axes: Mapping[str, int], grid: Grid | None) -> None:
    num_shards = math.prod(axes.values())
    who = f"{num_shards} data-parallel devices"
    more = ""
    if grid is not None:
        product = " x ".join(f"{a} {n}" for a, n in axes.items())
        who = f"{num_shards} devices ({product}; tensor={grid.mode} splits it too)"
        more = " or a smaller tensor size"
    for leaf in trace.leaves:
        if leaf.kind == "batch" and leaf.shape and leaf.shape[0] % num_shards:
            rows = leaf.shape[0]
            near = sorted({max(rows // num_shards, 1) * num_shards, (rows // num_shards + 1) * num_shards})
            inner = math.prod(n for a, n in axes.items() if a not in BATCH_AXES)
            sizes = [str(d) for d in range(1, num_shards + 1) if rows % (d * inner) == 0]
            works = f"a data size that divides {rows // inner}: {', '.join(sizes)}" if sizes else "fewer devices"
            raise ValueError(
                f"batch {leaf.name!r} has {rows} rows in each micro-batch, which {who} "
                f"can't share evenly. Use {' or '.join(map(str, near))} rows in each, or {works}{more}."
            )


def _rules(trace: Trace, axis_sizes: Mapping[str, int], rules: Mapping[str, Axes]) -> dict[int, tuple[str, ...]]:
    found: dict[int, tuple[str, ...]] = {}
    by_name = {name: c for c, name in trace.names.items()}
    for rule, axis in rules.items():
        axes = () if axis is None else (axis,) if isinstance(axis, str) else tuple(axis)
        if unknown := [a for a in axes if a not in axis_sizes]:
            raise ValueError(f"rules[{rule!r}] names {unknown[0]!r}; this plan's mesh has {', '.join(axis_sizes)}.")
        path, _, dim = rule.rpartition(":")
        leaf = next((i for i, leaf in enumerate(trace.leaves) if path and leaf.name.endswith(path)), None)
        if rule in by_name:
            found[by_name[rule]] = axes
        elif leaf is not None and dim.isdigit() and int(dim) < len(trace.user_classes_of(leaf)):
            found[trace.user_classes_of(leaf)[int(dim)]] = axes
        else:
            dims = ", ".join(sorted(set(by_name)))
            raise ValueError(
                f"rules[{rule!r}] matches nothing. Write a dim found in this model ({dims}) or a parameter's path and "
                f"dim, such as '{trace.leaves[0].name}:0'; print(program.trace) lists both."
            )
    return found
