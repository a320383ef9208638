"""1D tensor parallelism (Megatron, Shoeybi et al., 2019): which classes of dims to split over one axis.

Classes are split such that no weight is split twice: heads, ffn and vocabulary of a transformer. A class that a weight
contracts costs one all-reduce of that matmul's result. A class that two activations contract (head_dim, the keys'
sequence) is not split, with one exception: experts, each of which has weights of its own. What is sent to an expert and
what it makes then stay on its device (GShard, Lepikhin et al., 2020), and only the sum of each token's results is
reduced. Among the sets of classes allowed, the one is taken that splits the most arithmetic, and among those the one
that moves the least.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from cjax.sharding.layout.independent import best_set
from cjax.trace.attention.positions import positions
from cjax.trace.dims.find import Dims, Matmul
from cjax.trace.reading import Trace, once

FEW = 0.05  # of all weights: as much may stay whole without a word
TINY = 0.01  # of all weights: a table of which every device has all takes no memory to speak of
# Numbers that a product sums over, from which dividing them is worth reducing the result: an element of it takes 7.8 ps
# on H100s in one host (16 bits, 450 GB/s), a multiplication 2.7 fs, of which seven in eight are saved in two passes.
SUMMED = 1600


@dataclass(frozen=True)
class Product:
    """All matmuls of one kind: classes of the weight, those it contracts, and sizes."""

    weight: tuple[int, ...]
    contracted: frozenset[int]
    batched: frozenset[int]
    size: int  # elements of the weights
    work: int  # multiply-adds
    moved_in: int  # elements of the activation read, all-reduced in the backward pass if a free dim is split
    moved_out: int  # elements of the result, all-reduced in the forward pass if a contracted dim is split


def choose(trace: Trace, size: int, excluded: set[int], tensor: str) -> tuple[list[int], list[str]]:
    """The classes to split `size` ways, and what there is to say about others.

    Args:
      trace: the model.
      size: of the axis.
      excluded: classes that have their place already.
      tensor: as the plan writes it, for messages.

    Raises:
      ValueError: heads that the axis does not divide.
    """
    dims = trace.dims
    products, between = find_products(trace)
    forbidden = set(excluded) | whole_classes(trace, between).keys()
    heads = {dims.class_of(d) for m in between if m.contracted for d in m.batched}
    heads -= {c for product in products for c in product.batched}  # experts, and no heads
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
                raise undivided(trace, c, largest, tensor)
            continue
        blocked = blocked_by(trace, c, size, forbidden, c in heads, tensor)
        if blocked:
            notes.append(blocked)
        else:
            candidates.append(c)
    chosen = _best(products, between, dims, candidates, experts_of(trace))
    chosen = [c for c in chosen if c not in _scores(trace, products, chosen, sizes)]
    looked_up = {dims.class_of(dim) for _, dim, _ in dims.tables}
    chosen = [c for c in chosen if not _is_reduced_for_little(c, products, TINY if c in looked_up else FEW)]
    for d, parts in sorted(dims.packed.items()):
        c = dims.class_of(d)
        if c in work and not any(c in p.weight and set(p.weight) & {*chosen, *excluded} for p in products):
            notes.append(f"{trace.names.get(c, '?')} ({dims.size[d]}) packs {parts} tensors in one and is kept whole")
    return chosen, sorted(set(notes)) + _small_heads(trace, [c for c in chosen if c in heads], size)


def whole_classes(trace: Trace, between: Sequence[Matmul]) -> dict[int, str]:
    """Classes that are never split, and why.

    Args:
      trace: the model.
      between: its matmuls of activations.
    """
    dims, experts = trace.dims, experts_of(trace)
    contracted = {dims.class_of(d) for m in between for d in m.contracted} - experts
    found = dict.fromkeys(contracted, "is summed over between two activations")
    found |= dict.fromkeys(trace.part_classes, "counts the tensors packed in it")
    return found | {dims.class_of(d): "packs several tensors" for d in dims.packed}


@once
def experts_of(trace: Trace) -> frozenset[int]:
    """Classes of experts: for each of them a weight of its own multiplies what was sent to it.

    Queries and keys of an attention may have such weights too. Their scores have to meet, so they are left out; as is
    what one activation has twice, of which devices would have blocks on the diagonal alone.
    """
    dims = trace.dims
    weighed, between = find_products(trace)
    found = {c for product in weighed for c in product.batched}
    if not found:
        return frozenset()
    for m in between:
        for ids in (m.lhs, m.rhs, m.out):
            classes = [dims.class_of(d) for d in ids]
            found -= {c for c in classes if classes.count(c) > 1}
    return frozenset(found - positions(trace)[0].keys())


def _scores(
    trace: Trace, products: Sequence[Product], chosen: Sequence[int], sizes: Mapping[int, Set[int]]
) -> set[int]:
    """Those of the chosen classes that are scores of experts, of which only the best are looked at: one for each expert
    that is split or that tokens are sorted for, and in no weight but with what is contracted. They stay whole, see
    `scorers`."""
    experts = experts_of(trace)
    numbers = {max(sizes[c]) for c in chosen if c in experts}
    numbers |= {trace.dims.size[d] for m in trace.dims.grouped for d in m.batched}
    found = {c for c in chosen if c not in experts and max(sizes[c]) in numbers}
    return found - {c for p in products for c in p.weight if {*p.weight} - p.contracted != {c}}


def _is_reduced_for_little(c: int, products: Sequence[Product], few: float) -> bool:
    """Whether all that a class divides are sums over few numbers by `few` of all weights, as of a ViT's patches, or
    lookups in a small table, as of experts' biases: whole, these take less time than it takes to reduce what the parts
    give."""
    mine = [p for p in products if c in p.weight]
    are_few = sum(p.size for p in mine) <= few * sum(p.size for p in products)
    return are_few and all(c in p.contracted and p.work < SUMMED * p.moved_out for p in mine)


def scorers(trace: Trace, chosen: Iterable[int]) -> frozenset[int]:
    """Weights that score experts for each token, by leaf. They stay whole where `chosen`, the classes that are split,
    has the experts: every device needs all scores to know who is sent where, and they cost next to nothing. Of split
    ones each device would have a part of the gradient of all tokens, to be reduced for it alone where the experts' own
    has gone another way by then, and maxima and sums over experts would be reduced too.

    Args:
      trace: the model.
      chosen: classes that are split.
    """
    dims, experts = trace.dims, experts_of(trace) & frozenset(chosen)
    scoring, others = set[int](), set[int]()
    for m in dims.matmuls if experts else ():
        for leaf, ids, places in zip((m.lhs_origin, m.rhs_origin), (m.lhs, m.rhs), m.contracting, strict=True):
            free = {dims.class_of(d) for i, d in enumerate(ids) if i not in places}
            if leaf is not None:
                (scoring if len(free) == 1 and free <= experts and not m.batched else others).add(leaf)
    return frozenset(scoring - others)


@once
def find_products(trace: Trace) -> tuple[list[Product], list[Matmul]]:
    """The weight matmuls, equal ones merged, and the matmuls between activations."""
    dims = trace.dims
    merged: dict[tuple[object, ...], Product] = {}
    between = []
    tables = [_lookup(trace, leaf, dim, rows) for leaf, dim, rows in dims.tables]
    for m in (*dims.matmuls, *map(_of_one_group, dims.grouped), *(t for t in tables if t is not None)):
        weight = m.weight
        if weight is None:
            between.append(m)
            continue
        other, leaf = (m.rhs, m.lhs_origin) if weight is m.lhs else (m.lhs, m.rhs_origin)

        def elements(ids: Sequence[int]) -> int:
            return math.prod(dims.size[d] for d in ids)

        product = Product(
            tuple(dims.class_of(d) for d in weight),
            frozenset(dims.class_of(d) for d in m.contracted),
            frozenset(dims.class_of(d) for d in m.batched),
            elements(weight) if leaf is None else math.prod(trace.leaves[leaf].shape),  # with a convolution's window
            elements(m.out) * elements(m.contracted),
            elements(other),
            elements(m.out),
        )
        key = (product.weight, product.contracted)
        old = merged.get(key)
        if old is not None:
            product = dataclasses.replace(
                product,
                size=product.size + old.size,
                work=product.work + old.work,
                moved_in=product.moved_in + old.moved_in,
                moved_out=product.moved_out + old.moved_out,
            )
        merged[key] = product
    return list(merged.values()), between


def _of_one_group(m: Matmul) -> Matmul:
    """Rows in groups, each of which meets one group's weight: no dim that is batched, and no more arithmetic than one
    weight for all would take."""
    (groups,) = m.batched
    return dataclasses.replace(m, rhs=tuple(d for d in m.rhs if d != groups), batched=())


def _lookup(trace: Trace, leaf: int, dim: int, rows: Sequence[int]) -> Matmul | None:
    """A table looked up by the batch's own tokens, as the one-hot matmul it stands for. Tables of positions, which do
    not grow with the batch, are cheaper whole: their result would be all-reduced for nothing."""
    dims = trace.dims
    if trace.batch_class not in [dims.class_of(d) for d in rows]:
        return None
    table = dims.inputs[leaf][-2:]  # behind the layer dim of an author's own stack
    rest = [d for d in table if dims.class_of(d) != dims.class_of(dim)]
    return Matmul((*rows, dim), tuple(table), (dim,), (), (*rows, *rest), None, leaf, ((len(rows),), (0,)))


def _best(
    products: Sequence[Product],
    between: Sequence[Matmul],
    dims: Dims,
    candidates: Sequence[int],
    experts: frozenset[int],
) -> list[int]:
    """The candidates that split the most arithmetic, of these sets the one that moves the least, then the smallest.

    At first none where a weight would be split along two classes. What is left whole then, one of three convolutions
    in a row, comes after: between two classes that are split, what is made along the one is added up into parts along
    the other. One class may be on both sides of a weight in the same way, as the state of a recurrent cell is.
    """
    shared, worth = [], _worth(products, candidates)
    for m in between:
        batched = {dims.class_of(d) for d in m.batched}
        shared.append((batched, (math.prod(dims.size[d] for d in (*m.out, *m.contracted)), 0, 0)))
        for c, moved in _moved_by_experts(m, dims, frozenset(experts & worth.keys())):
            split, before, count = worth[c]
            worth[c] = split, before - moved, count
    chosen = best_set(worth, [p.weight for p in products], shared)
    left = [p for p in products if not set(p.weight) & set(chosen)]
    if sum(p.size for p in left) <= FEW * sum(p.size for p in products):
        return chosen
    return chosen + best_set(_worth(left, [c for c in candidates if c not in chosen]), [p.weight for p in left], [])


def _worth(products: Sequence[Product], candidates: Sequence[int]) -> dict[int, tuple[int, int, int]]:
    """By class: the arithmetic that it splits, minus the elements that it moves, and minus one."""
    worth = {c: [0, 0, -1] for c in candidates}
    for p in products:
        for c in set(p.weight) & worth.keys():
            worth[c][0] += p.work
            worth[c][1] -= p.moved_out if c in p.contracted else 0 if c in p.batched else p.moved_in
            worth[c][1] -= p.moved_in if p.weight.count(c) > 1 else 0
    return {c: (split, moved, count) for c, (split, moved, count) in worth.items()}


def _moved_by_experts(m: Matmul, dims: Dims, experts: frozenset[int]) -> Iterator[tuple[int, int]]:
    """Elements reduced for a matmul of activations where experts are split: of each token's results, added up over
    experts; and in the backward pass of the gradient of tokens that were sent to several."""
    for c in experts:
        is_in, elements = [], []
        for ids in (m.lhs, m.rhs):
            is_in.append(c in [dims.class_of(d) for d in ids])
            elements.append(math.prod(dims.size[d] for d in ids))
        if all(is_in) and c in [dims.class_of(d) for d in m.contracted]:
            yield c, math.prod(dims.size[d] for d in m.out)
        elif any(is_in) and not all(is_in):
            yield c, elements[is_in.index(False)]


def blocked_by(trace: Trace, c: int, size: int, forbidden: set[int], is_heads: bool, tensor: str) -> str | None:
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
        if s.size in whole_heads(trace, c, size):
            continue
        if is_heads:
            raise undivided(trace, c, s.major_size, tensor)
        return f"{name} ({s.size} = {s.major_size} x {s.size // s.major_size}) is kept whole: {size} does not divide it"
    if is_heads:
        counts = {dims.size[d] for m in dims.matmuls for d in m.batched if dims.class_of(d) == c}
        count = max(counts, default=size)
        if count % size and count > 1 and not any(s for s in dims.splits if dims.class_of(s.whole) == c):
            raise undivided(trace, c, count, tensor)
    return None


def whole_heads(trace: Trace, c: int, size: int) -> set[int]:
    """Sizes of dims [heads * head_dim] of class `c` whose heads are too few for the axis, beside others that are not:
    key-value heads, each of which serves a group of devices, so that every device keeps them."""
    splits = [s for s in trace.dims.splits if trace.dims.class_of(s.whole) == c]
    most = max((s.major_size for s in splits), default=0)
    if most % size:
        return set()
    return {s.size for s in splits if s.major_size < size and size % s.major_size == 0 and s.size != most}


def undivided(trace: Trace, c: int, count: int, tensor: str) -> ValueError:
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    mode, _, size = tensor.rpartition(":")
    depth = int(size.partition("/")[2] or 1)
    part = f"/{depth}" if depth > 1 else ""
    power = {"": 1, "3d": 3}.get(mode, 2)
    works = [f"{mode}:{depth * d**power}{part}" if mode and d > 1 else str(d) for d in divisors]
    return ValueError(
        f"tensor={tensor} can't split {trace.names.get(c, '?')}: this model has {count}. "
        f"Write a tensor size that divides it: {', '.join(works)}."
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
        if c in chosen and s.size in whole_heads(trace, c, size):
            counts[s.major_size] = trace.names.get(c, "?")
    return [
        f"{count} key-value {name} on {size} devices: each is kept by {size // count} of them"
        for count, name in sorted(counts.items())
    ]
