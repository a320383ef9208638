"""How each primitive relates the dims of its operands and results.

A rule is `rule(dims, eqn, ins, outs, scope)`: `ins` and `outs` are one list of dim ids per operand and result. It
unites ids and may return False to say that it could not relate anything, which the trace then reports.
"""

import dataclasses
from typing import Any

from cjax.jax_compat.core import Equation, Literal
from cjax.trace.dims.classes import CutDim, Dims, Ids, Scope
from cjax.trace.dims.products import conv, dot_general, ragged_dot_general
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named
from cjax.trace.jaxpr.sources import GIVEN
from cjax.trace.jaxpr.view import cond_of, opened, scan_of, while_of

# Results that hold the same numbers as their first operand: a weight stays a weight through them.
KEEPS_ORIGIN = (having("view") - having("stops")) | named("slice dynamic_slice")


def elementwise(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> bool | None:
    shaped = [ids for ids in ins if ids]
    if any(len(ids) != len(out) for ids in shaped for out in outs):
        return False
    for out in outs:
        for ids in shaped:
            dims.unite_all(ids, out)


def nothing(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    """For primitives that make dims of their own out of parameters."""


def unrelated(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> bool | None:
    """For primitives of which nothing is known, or not this: shapes that agree say nothing."""
    return False if outs and any((*ins, *outs)) else None


def pairwise(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    """Results that are the operands one by one."""
    for ids, out in zip(ins, outs, strict=True):
        dims.unite_all(ids, out)


def batch_before(eqn: Equation) -> int | None:
    """How many leading dims all operands and results have in common, each element of which is worked on alone."""
    ndim = len(eqn.invars[0].aval.shape)
    if name_of(eqn) == "fft":
        return ndim - len(eqn.params["fft_lengths"])
    if name_of(eqn) == "tridiagonal_solve":  # the first operand is a diagonal
        return ndim - 1
    return ndim - 2 if facts_of(eqn).matrices else None


def leading_batch(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> bool | None:
    """Functions of matrices and transforms: what comes before is a batch, and their own dims become others."""
    count = batch_before(eqn)
    if count is None or any(len(ids) < count for ids in (*ins, *outs)):
        return False
    for ids in (*ins[1:], *outs):
        dims.unite_all(ins[0][:count], ids[:count])
    return None


def bitcast(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    """A dim more, or one fewer, at the end where bits of a number become several, or of several one."""
    shared = min(len(ins[0]), len(outs[0]))
    dims.unite_all(ins[0][:shared], outs[0][:shared])


def reduction(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    axes = eqn.params["axes"]
    for ids in ins:
        kept = [d for i, d in enumerate(ids) if i not in axes]
        for out in outs:
            if len(kept) == len(out):
                dims.unite_all(kept, out)


def broadcast_in_dim(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    dims.unite_all(ins[0], [outs[0][d] for d in eqn.params["broadcast_dimensions"]])


def transpose(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    dims.unite_all([ins[0][d] for d in eqn.params["permutation"]], outs[0])


def squeeze(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    gone = eqn.params["dimensions"]
    dims.unite_all([d for i, d in enumerate(ins[0]) if i not in gone], outs[0])


def reshape(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> bool | None:
    if eqn.params.get("dimensions") is not None:
        return False
    before, after = list(ins[0]), list(outs[0])
    while before and after:
        a, b = before.pop(0), after.pop(0)
        if dims.size[a] == dims.size[b]:
            dims.unite(a, b)
            continue
        if dims.size[a] == 1:
            after.insert(0, b)
            continue
        if dims.size[b] == 1:
            before.insert(0, a)
            continue
        left, right, x, y = [a], [b], dims.size[a], dims.size[b]
        while x != y:
            if x < y:
                left.append(before.pop(0))
                x *= dims.size[left[-1]]
            else:
                right.append(after.pop(0))
                y *= dims.size[right[-1]]
        if len(left) == 1:
            dims.factor(left[0], right)
        elif len(right) == 1:
            dims.factor(right[0], left)
        else:  # [a, b] -> [c, d] with no common factor: only the leading blocks can agree
            merged = dims.new(x)
            dims.factor(merged, left)
            dims.factor(merged, right)


def concatenate(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    for ids in ins:
        for position, (a, b) in enumerate(zip(ids, outs[0], strict=True)):
            if position != eqn.params["dimension"]:
                dims.unite(a, b)
            else:
                dims.joined.append(a)


def same_rank(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    """Slices, pads, updates: a dim that keeps its size is the same dim."""
    for out in outs:
        for ids in ins:
            if len(ids) == len(out):
                dims.unite_all(ids, out)


def slice_(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    dims.unite_all(ins[0], outs[0])
    starts, strides = eqn.params["start_indices"], eqn.params["strides"]
    for position, (a, b) in enumerate(zip(ins[0], outs[0], strict=True)):
        whole, part = dims.size[a], dims.size[b]
        if part == whole:
            continue
        even = 0 < part and whole % part == 0 and starts[position] % part == 0
        parts = whole // part if even and (strides is None or strides[position] == 1) else 0
        dims.cuts.append(CutDim(a, b, parts))
        if parts and part > 1:
            dims.packed[a] = parts


def split(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    axis = eqn.params["axis"]
    for out in outs:
        dims.unite_all([d for i, d in enumerate(ins[0]) if i != axis], [d for i, d in enumerate(out) if i != axis])
    sizes = [dims.size[out[axis]] for out in outs]
    if len(sizes) > 1:
        even = len(set(sizes)) == 1
        dims.cuts += [CutDim(ins[0][axis], out[axis], len(sizes) if even else 0) for out in outs]
        dims.packed[ins[0][axis]] = len(sizes)
    if len(set(sizes)) == 1:
        for out in outs[1:]:
            dims.unite(outs[0][axis], out[axis])


def unstack(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    axis = eqn.params["axis"]
    for out in outs:
        dims.unite_all([d for i, d in enumerate(ins[0]) if i != axis], out)
    dims.cuts += [CutDim(ins[0][axis], dims.new(1), len(outs)) for _ in outs]


def stack(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    axis = eqn.params["axis"]
    for ids in ins:
        dims.unite_all(ids, [d for i, d in enumerate(outs[0]) if i != axis])


def window(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    sizes = eqn.params["window_dimensions"]
    for ids in ins:
        if len(ids) == len(outs[0]):
            for size, a, b in zip(sizes, ids, outs[0], strict=True):
                if size == 1:
                    dims.unite_all([a], [b])


def gather(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    operand, indices = ins[0], ins[1]
    out = outs[0]
    kept = [i for i in range(len(operand)) if i not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    for position, i in zip(numbers.offset_dims, kept, strict=True):
        if sizes[i] == dims.size[operand[i]]:
            dims.unite(out[position], operand[i])
    looked_up = [out[i] for i in range(len(out)) if i not in numbers.offset_dims]
    dims.unite_all(looked_up, indices[:-1])
    for i, k in zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True):
        dims.unite_all([operand[i]], [indices[k]])
    source = eqn.invars[0]
    if not isinstance(source, Literal) and source in scope.origin and numbers.collapsed_slice_dims:
        dims.tables.append((scope.origin[source], operand[numbers.collapsed_slice_dims[0]], tuple(looked_up)))


def scatter(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    numbers = eqn.params["dimension_numbers"]
    operand, indices, updates = ins
    dims.unite_all(operand, outs[0])
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [i for i in range(len(operand)) if i not in gone]
    dims.unite_all([updates[p] for p in numbers.update_window_dims], [operand[i] for i in kept])
    rest = [d for i, d in enumerate(updates) if i not in numbers.update_window_dims]
    dims.unite_all(rest, indices[:-1])
    for i, k in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
        dims.unite_all([operand[i]], [indices[k]])


def top_k(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    for out in outs:
        dims.unite_all(ins[0], out)
        dims.unite_all(outs[0], out)


def sort(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    for ids in (*ins, *outs):
        dims.unite_all(ins[0], ids)


def leading(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    """Random keys: a result has the dims of its operand first, and fresh ones behind."""
    for ids in ins:
        for out in outs:
            shared = min(len(ids), len(out))
            dims.unite_all(ids[:shared], out[:shared])


# -- equations that hold jaxprs ---------------------------------------------------------------------------------
def _origins(eqn: Equation, scope: Scope) -> list[int | None]:
    return [None if isinstance(v, Literal) else scope.origin.get(v) for v in eqn.invars]


def _sources(eqn: Equation, scope: Scope) -> list[str | None]:
    return [GIVEN if isinstance(v, Literal) else scope.source.get(v) for v in eqn.invars]


def call(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> bool | None:
    inner = eqn.params[facts_of(eqn).body]
    jaxpr = opened(inner)
    if len(jaxpr.invars) != len(ins):
        return False
    scope.inner[id(eqn)], results = dims.call(jaxpr, ins, _origins(eqn, scope), _sources(eqn, scope))
    for result, out in zip(results, outs, strict=True):
        dims.unite_all(result, out)


def scan(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    loop = scan_of(eqn)
    inner = [ids if i < loop.first_x else ids[1:] for i, ids in enumerate(ins)]
    origins, before = _origins(eqn, scope), (len(dims.matmuls), len(dims.grouped))
    sources = _sources(eqn, scope)
    sources[loop.num_consts : loop.first_x] = [None] * loop.num_carry  # the next turn's may be made of the batch
    scope.inner[id(eqn)], results = dims.call(loop.body, inner, origins, sources)
    shared = {o for o in origins[: loop.first_x] if o is not None}
    for products, first in zip((dims.matmuls, dims.grouped), before, strict=True):
        for index, m in enumerate(products[first:], first):
            if {m.lhs_origin, m.rhs_origin} & shared:
                products[index] = dataclasses.replace(m, looped=True)
    for result, given, out in zip(loop.last(results), loop.carries(ins), loop.last(outs), strict=True):
        dims.unite_all(result, out)
        dims.unite_all(result, given)
    for result, out in zip(loop.ys(results), loop.ys(outs), strict=True):
        dims.unite_all(result, out[1:])
    layered = [ids[0] for ids, origin in zip(loop.xs(ins), loop.xs(origins), strict=True) if origin is not None]
    if layered:
        dims.layers += layered
        dims.layer_carries += [tuple(ids) for ids in loop.carries(ins)]
    turns = [ids[0] for ids in (*loop.xs(ins), *loop.ys(outs))]
    for turn in turns[1:]:
        dims.unite(turns[0], turn)


def while_(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    loop, origins, sources = while_of(eqn), _origins(eqn, scope), _sources(eqn, scope)
    carries = loop.carries(ins)
    scope.inner[id(eqn)], results = dims.call(
        loop.body,
        [*loop.consts(ins), *carries],
        [*loop.consts(origins), *loop.carries(origins)],
        [*loop.consts(sources), *(None for _ in carries)],  # nobody knows of what a turn makes them
    )
    for result, carry, out in zip(results, carries, outs, strict=True):
        dims.unite_all(result, out)
        dims.unite_all(carry, out)


def cond(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> None:
    inner = scope.inner[id(eqn)] = Scope()
    view = cond_of(eqn)
    origins, sources = view.given(_origins(eqn, scope)), view.given(_sources(eqn, scope))
    for branch in view.branches:
        found, results = dims.call(branch.jaxpr, view.given(ins), origins, sources)
        inner.ids.update(found.ids)
        inner.origin.update(found.origin)
        inner.source.update(found.source)
        inner.inner.update(found.inner)
        for result, out in zip(results, outs, strict=True):
            dims.unite_all(result, out)


RULES: dict[str, Any] = {
    **dict.fromkeys(having("elementwise") | having("cumulates") | named("random_gamma"), elementwise),
    **dict.fromkeys(having("same") - having("elementwise"), pairwise),
    **dict.fromkeys(having("makes"), nothing),
    **dict.fromkeys(having("reduces"), reduction),
    **dict.fromkeys(having("scatter"), scatter),
    **dict.fromkeys(having("matrices") | named("fft"), leading_batch),
    **dict.fromkeys(having("body"), call),
    **dict.fromkeys(named("reduce_window reduce_window_sum reduce_window_max reduce_window_min"), window),
    **dict.fromkeys(named("select_and_gather_add select_and_scatter select_and_scatter_add"), same_rank),
    **dict.fromkeys(named("pad dynamic_slice dynamic_update_slice rev tile"), same_rank),
    **dict.fromkeys(having("draws") | having("rekeys"), leading),
    **dict.fromkeys(named("top_k approx_top_k"), top_k),
    "bitcast_convert_type": bitcast,
    "broadcast_in_dim": broadcast_in_dim,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "concatenate": concatenate,
    "slice": slice_,
    "split": split,
    "stack": stack,
    "unstack": unstack,
    "dot_general": dot_general,
    "ragged_dot_general": ragged_dot_general,
    "conv_general_dilated": conv,
    "gather": gather,
    "sort": sort,
    "scan": scan,
    "while": while_,
    "cond": cond,
}
