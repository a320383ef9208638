"""Plan + dims -> mesh axes: which dimension of which tensor is split over which axis.

1D tensor parallelism splits classes of dims such that no weight is split twice: heads, ffn and vocabulary of a
transformer. A class that a weight contracts costs one all-reduce of that matmul's result; a class that two activations
contract (head_dim, the keys' sequence) is never split. Among the sets of classes allowed, the one is taken that splits
the most arithmetic, and among those the one that moves the least.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

from cjax.mesh import BATCH_AXES, TENSOR
from cjax.plan import Axes
from cjax.trace.dims import Dims, Matmul
from cjax.trace.reading import Trace

MAX_CHOICES = 12  # classes tried in all combinations; models with more keep their smallest weights whole


@dataclass(frozen=True)
class Layout:
    """Mesh axes by class of dims, and what could not be split and why."""

    axes_of: Mapping[int, tuple[str, ...]]
    axis_sizes: Mapping[str, int]
    notes: tuple[str, ...] = ()
    whole: frozenset[tuple[int, int]] = frozenset()  # (class, size) of dims that stay whole: few key-value heads

    def spec(self, classes: Sequence[int], shape: Sequence[int]) -> PartitionSpec:
        """The placement of a tensor with these classes. An axis serves one dim; dims too small for it stay whole."""
        used: set[str] = set()
        entries: list[tuple[str, ...] | str | None] = []
        for c, size in zip(classes, shape, strict=True):
            axes = tuple(a for a in self.axes_of.get(c, ()) if a not in used)
            if not axes or (c, size) in self.whole or size < math.prod(self.axis_sizes[a] for a in axes):
                entries.append(None)
                continue
            used.update(axes)
            entries.append(axes if len(axes) > 1 else next(iter(axes)))
        return PartitionSpec(*entries)


def make_layout(trace: Trace, axis_sizes: Mapping[str, int], rules: Mapping[str, Axes]) -> Layout:
    """Decide the mesh axes of every class of dims.

    Args:
      trace: the model.
      axis_sizes: mesh axes and their sizes.
      rules: the user's own mapping, dim name or `leaf path:dim` to an axis or None; wins over what is found.

    Raises:
      ValueError: a batch or query heads that an axis does not divide; a rule that matches nothing.
    """
    axes_of: dict[int, tuple[str, ...]] = {}
    notes: list[str] = []
    batch_axes = tuple(a for a in BATCH_AXES if axis_sizes.get(a, 1) > 1)
    if trace.batch_class is not None and batch_axes:
        _require_batch(trace, math.prod(axis_sizes[a] for a in batch_axes))
        axes_of[trace.batch_class] = batch_axes
    ruled = _rules(trace, axis_sizes, rules)
    size = axis_sizes.get(TENSOR, 1)
    if size > 1:
        chosen, notes = _choose(trace, size, excluded=set(ruled) | set(axes_of))
        axes_of.update({c: (TENSOR,) for c in chosen})
        if not chosen and not any(TENSOR in axes for axes in ruled.values()):
            notes.append(f"tensor={size} splits nothing in this model: every device of the axis does the same work")
    axes_of.update({c: axes for c, axes in ruled.items() if axes})
    whole = {(c, n) for c in axes_of for n in _whole_heads(trace, c, size)}
    return Layout(axes_of, dict(axis_sizes), tuple(notes), frozenset(whole))


def _require_batch(trace: Trace, num_shards: int) -> None:
    for leaf in trace.leaves:
        if leaf.kind == "batch" and leaf.shape and leaf.shape[0] % num_shards:
            rows = leaf.shape[0]
            near = sorted({max(rows // num_shards, 1) * num_shards, (rows // num_shards + 1) * num_shards})
            raise ValueError(
                f"batch {leaf.name!r} has {rows} rows in each micro-batch, which {num_shards} data-parallel devices "
                f"can't share evenly. Use {' or '.join(map(str, near))} rows in each, or a data size that divides "
                f"{rows}: {', '.join(str(d) for d in range(1, num_shards + 1) if rows % d == 0)}."
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


@dataclass(frozen=True)
class _Product:
    """All matmuls of one kind: classes of the weight, those it contracts, and sizes."""

    weight: tuple[int, ...]
    contracted: frozenset[int]
    batched: frozenset[int]
    work: int  # multiply-adds
    moved_in: int  # elements of the activation read, all-reduced in the backward pass if a free dim is split
    moved_out: int  # elements of the result, all-reduced in the forward pass if a contracted dim is split


def _choose(trace: Trace, size: int, excluded: set[int]) -> tuple[list[int], list[str]]:
    dims = trace.dims
    products, between = _products(trace)
    forbidden = set(excluded)
    for m in between:
        forbidden |= {dims.class_of(d) for d in m.contracted}
    forbidden |= {dims.class_of(d) for d in dims.packed} | trace.part_classes
    heads = {dims.class_of(d) for m in between if m.contracted for d in m.batched}
    heads -= {c for product in products for c in product.batched}  # experts, each with weights of its own
    notes, candidates = [], []
    work: dict[int, int] = {}
    sizes: dict[int, set[int]] = {}
    for ids in dims.inputs:
        for d in ids:
            sizes.setdefault(dims.class_of(d), {0}).add(dims.size[d])
    for product in products:
        for c in product.weight:
            work[c] = work.get(c, 0) + product.work
    for c in sorted(work, key=lambda c: (-work[c], c)):
        if c in forbidden or c in trace.stream:
            continue
        largest = max(sizes.get(c, {0}))
        if largest < size:
            if c in heads and largest > 1:
                raise _undivided(trace, c, largest, size)
            continue
        blocked = _blocked(trace, c, size, forbidden, is_heads=c in heads)
        if blocked:
            notes.append(blocked)
        else:
            candidates.append(c)
    candidates = candidates[:MAX_CHOICES]
    best: tuple[tuple[float, float, int], list[int]] = ((0.0, 0.0, 0), [])
    for count in range(1, len(candidates) + 1):
        for chosen in itertools.combinations(candidates, count):
            score = _score(products, between, dims, frozenset(chosen))
            if score is not None and (score[0], score[1], -count) > best[0]:
                best = ((score[0], score[1], -count), list(chosen))
    chosen = best[1]
    for d, parts in sorted(dims.packed.items()):
        c = dims.class_of(d)
        if c in work and not any(c in p.weight and set(p.weight) & set(chosen) for p in products):
            notes.append(f"{trace.names.get(c, '?')} ({dims.size[d]}) packs {parts} tensors in one and is kept whole")
    return chosen, sorted(set(notes)) + _small_heads(trace, [c for c in chosen if c in heads], size)


def _products(trace: Trace) -> tuple[list[_Product], list[Matmul]]:
    """The weight matmuls, equal ones merged, and the matmuls between activations."""
    dims = trace.dims
    merged: dict[tuple[object, ...], _Product] = {}
    between = []
    tables = [_lookup(trace, leaf, dim, rows) for leaf, dim, rows in dims.tables]
    for m in (*dims.matmuls, *(t for t in tables if t is not None)):
        if m.lhs_origin is None and m.rhs_origin is None:
            between.append(m)
            continue
        weight, other = (m.lhs, m.rhs) if m.rhs_origin is None else (m.rhs, m.lhs)

        def elements(ids: Sequence[int]) -> int:
            return math.prod(dims.size[d] for d in ids)

        product = _Product(
            tuple(dims.class_of(d) for d in weight),
            frozenset(dims.class_of(d) for d in m.contracted),
            frozenset(dims.class_of(d) for d in m.batched),
            elements(m.out) * elements(m.contracted),
            elements(other),
            elements(m.out),
        )
        key = (product.weight, product.contracted)
        old = merged.get(key)
        if old is not None:
            product = dataclasses.replace(
                product,
                work=product.work + old.work,
                moved_in=product.moved_in + old.moved_in,
                moved_out=product.moved_out + old.moved_out,
            )
        merged[key] = product
    return list(merged.values()), between


def _lookup(trace: Trace, leaf: int, dim: int, rows: Sequence[int]) -> Matmul | None:
    """A table looked up by the batch's own tokens, as the one-hot matmul it stands for. Tables of positions, which do
    not grow with the batch, are cheaper whole: their result would be all-reduced for nothing."""
    dims = trace.dims
    if trace.batch_class not in [dims.class_of(d) for d in rows]:
        return None
    table = dims.inputs[leaf][-2:]  # behind the layer dim of an author's own stack
    rest = [d for d in table if dims.class_of(d) != dims.class_of(dim)]
    return Matmul((*rows, dim), tuple(table), (dim,), (), (*rows, *rest), None, leaf)


def _score(
    products: Sequence[_Product], between: Sequence[Matmul], dims: Dims, chosen: frozenset[int]
) -> tuple[float, float] | None:
    """(arithmetic split, minus elements moved), or None where a weight would be split twice."""
    split, moved = 0.0, 0.0
    for p in products:
        hits = [c for c in p.weight if c in chosen]
        if len(hits) > 1:
            return None
        if hits:
            split += p.work
            if hits[0] in p.contracted:
                moved += p.moved_out
            elif hits[0] not in p.batched:
                moved += p.moved_in
    for m in between:
        if any(dims.class_of(d) in chosen for d in m.batched):
            split += math.prod(dims.size[d] for d in (*m.out, *m.contracted))
    return split, -moved


def _blocked(trace: Trace, c: int, size: int, forbidden: set[int], is_heads: bool) -> str | None:
    """Why class `c` can't be split `size` ways, if so. Heads that don't divide are the user's to change: refused."""
    dims = trace.dims
    name = trace.names.get(c, "?")
    for s in dims.splits:
        if dims.class_of(s.whole) != c or s.major_size % size == 0:
            continue
        minor = s.minor[0]
        grouped = size % s.major_size == 0 and dims.size[minor] % (size // s.major_size) == 0
        if grouped and dims.class_of(minor) not in forbidden:
            continue  # key-value heads fewer than the axis: each serves a group of devices
        if s.size in _whole_heads(trace, c, size):
            continue
        if is_heads:
            raise _undivided(trace, c, s.major_size, size)
        return f"{name} ({s.size} = {s.major_size} x {s.size // s.major_size}) is kept whole: {size} does not divide it"
    if is_heads:
        counts = {dims.size[d] for m in dims.matmuls for d in m.batched if dims.class_of(d) == c}
        count = max(counts, default=size)
        if count % size and count > 1 and not any(s for s in dims.splits if dims.class_of(s.whole) == c):
            raise _undivided(trace, c, count, size)
    return None


def _whole_heads(trace: Trace, c: int, size: int) -> set[int]:
    """Sizes of dims [heads * head_dim] of class `c` whose heads are too few for the axis, beside others that are not:
    key-value heads, each of which serves a group of devices, so that every device keeps them."""
    splits = [s for s in trace.dims.splits if trace.dims.class_of(s.whole) == c]
    most = max((s.major_size for s in splits), default=0)
    if most % size:
        return set()
    return {s.size for s in splits if s.major_size < size and size % s.major_size == 0 and s.size != most}


def _undivided(trace: Trace, c: int, count: int, size: int) -> ValueError:
    divisors = [str(d) for d in range(1, count + 1) if count % d == 0]
    return ValueError(
        f"tensor={size} can't split {trace.names.get(c, '?')}: this model has {count}. "
        f"Write a tensor size that divides it: {', '.join(divisors)}."
    )


def _small_heads(trace: Trace, chosen: Sequence[int], size: int) -> list[str]:
    counts = {}
    for leaf, ids in zip(trace.leaves, trace.dims.inputs, strict=True):
        for d in ids if leaf.kind == "params" else ():
            c = trace.dims.class_of(d)
            if c in chosen and 1 < trace.dims.size[d] < size:
                counts[trace.dims.size[d]] = trace.names.get(c, "?")
    for s in trace.dims.splits:
        c = trace.dims.class_of(s.whole)
        if c in chosen and s.size in _whole_heads(trace, c, size):
            counts[s.major_size] = trace.names.get(c, "?")
    return [
        f"{count} key-value {name} on {size} devices: each is kept by {size // count} of them"
        for count, name in sorted(counts.items())
    ]
