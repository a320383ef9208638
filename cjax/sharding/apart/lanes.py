"""Along which dims an equation does one by one what it does, so that devices may do it apart."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cjax.jax_compat.core import Equation
from cjax.sharding.apart.faults import WINDOWED
from cjax.trace.jaxpr.primitives import having, name_of, named


@dataclass(frozen=True)
class Lane:
    """Dims that are split together: one of each operand and of each result, or None of those that all parts read.

    Where no result has such a dim, what the parts make of it is added up.
    """

    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]
    count: int  # of what can be apart: rows, or groups
    param: tuple[str, int | None] | None = None  # that says how many there are, and at which place in it


def lanes(eqn: Equation) -> list[Lane]:
    """What an equation does one by one, in order of importance."""
    return _LANES.get(name_of(eqn), _nothing)(eqn)


def is_looked_up(eqn: Equation) -> bool:
    """Whether an equation is a gather, a scatter or a sort, or its derivative makes one.

    In a region that is manual over some axes of the mesh, a stage of a pipeline among them, XLA's partitioner stops the
    process at some of these where it could split them over several of the others.
    """
    return name_of(eqn) in _LOOKED_UP


def reorders(eqn: Equation) -> bool:
    """Whether an equation's derivative gathers what the equation has put in another order."""
    return name_of(eqn) in _REORDERS


def _nothing(eqn: Equation) -> list[Lane]:
    return []


def _convolution(eqn: Equation) -> list[Lane]:
    numbers, (x_var, w_var) = eqn.params["dimension_numbers"], eqn.invars
    x, w, y = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups, batches = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    if batches > 1:
        return [Lane((x[0], w[0]), (y[1],), batches, ("batch_group_count", None))]
    rows = Lane((x[0], None), (y[0],), x_var.aval.shape[x[0]])
    if groups > 1:
        return [rows, Lane((x[1], w[0]), (y[1],), groups, ("feature_group_count", None))]
    made = Lane((None, w[0]), (y[1],), w_var.aval.shape[w[0]])
    read = Lane((x[1], w[1]), (None,), w_var.aval.shape[w[1]])
    return [rows, made, read, *_untouched(eqn)]


def _untouched(eqn: Equation) -> list[Lane]:
    """Lanes along which a convolution has a window of one and moves nothing."""
    numbers, (x, w) = eqn.params["dimension_numbers"], eqn.invars
    each = zip(*(eqn.params[name] for name in ("window_strides", "padding", "lhs_dilation")), strict=True)
    dims = zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], numbers.out_spec[2:], each, strict=True)
    return [
        Lane((a, None), (c,), x.aval.shape[a])
        for a, b, c, (stride, padding, dilation) in dims
        if w.aval.shape[b] == 1 and stride == 1 and tuple(padding) == (0, 0) and dilation == 1
    ]


def _all_but(eqn: Equation, dims: Sequence[int]) -> list[Lane]:
    """Lanes of an equation whose operands and results all have the same dims, and which works along some of them."""
    shape = eqn.invars[0].aval.shape
    num_in, num_out = len(eqn.invars), len(eqn.outvars)
    return [Lane((d,) * num_in, (d,) * num_out, n) for d, n in enumerate(shape) if d not in dims]


def _windows(eqn: Equation) -> list[Lane]:
    """Dims in which windows are of one and nothing moves."""
    sizes, p = eqn.params["window_dimensions"], eqn.params
    rank, ones = len(sizes), (1,) * len(sizes)
    each = zip(sizes, p["window_strides"], p["padding"], p.get("base_dilation", ones), strict=True)
    still = [d for d, (n, stride, pad, base) in enumerate(each) if (n, stride, tuple(pad), base) == (1, 1, (0, 0), 1)]
    ins, outs = ([len(v.aval.shape) == rank for v in some] for some in (eqn.invars, eqn.outvars))
    count = eqn.outvars[0].aval.shape
    return [Lane(tuple(d if has else None for has in ins), (d,) * len(outs), count[d]) for d in still]


def _scatter(eqn: Equation) -> list[Lane]:
    """Dims of windows that are as wide as the operand, and rows that are looked up each in its own.

    Other rows stay together: whatever is written to one place has to be there at once.
    """
    numbers = eqn.params["dimension_numbers"]
    shape, updates = eqn.invars[0].aval.shape, eqn.invars[2].aval.shape
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(shape)) if d not in gone]
    found = [
        Lane((d, None, at), (d,), shape[d])
        for d, at in zip(kept, numbers.update_window_dims, strict=True)
        if shape[d] == updates[at] and d not in numbers.scatter_dims_to_operand_dims
    ]
    rows = [d for d in range(len(updates)) if d not in numbers.update_window_dims]  # in the order of the indices' dims
    batching = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    return found + [Lane((d, at, rows[at]), (d,), shape[d]) for d, at in batching]


def _gather(eqn: Equation) -> list[Lane]:
    """Dims that slices are as wide as, and rows: what is looked up in one table needs nothing of the others."""
    numbers, (operand, indices) = eqn.params["dimension_numbers"], eqn.invars
    shape, widths = operand.aval.shape, eqn.params["slice_sizes"]
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    kept = [d for d in range(len(shape)) if d not in gone]
    found = [
        Lane((d, None), (at,), shape[d], ("slice_sizes", d))
        for d, at in zip(kept, numbers.offset_dims, strict=True)
        if shape[d] == widths[d] and d not in numbers.start_index_map
    ]
    rows = [d for d in range(len(eqn.outvars[0].aval.shape)) if d not in numbers.offset_dims]
    own = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    return found + [Lane((own.get(at), at), (d,), indices.aval.shape[at]) for at, d in enumerate(rows)]


def _matrices(eqn: Equation) -> list[Lane]:
    """Of an equation that takes matrices one by one, all but the last two dims."""
    shape = eqn.invars[0].aval.shape[:-2]
    return [Lane((d,) * len(eqn.invars), (d,) * len(eqn.outvars), n) for d, n in enumerate(shape)]


def _pad(eqn: Equation) -> list[Lane]:
    shape = eqn.invars[0].aval.shape
    padding = eqn.params["padding_config"]
    return [Lane((d, None), (d,), n) for d, n in enumerate(shape) if tuple(padding[d]) == (0, 0, 0)]


_REORDERS = named("eig lu")
_LOOKED_UP: Mapping[str, Callable[[Equation], list[Lane]]] = {
    "gather": _gather,
    **dict.fromkeys(having("scatter"), _scatter),
    "sort": lambda eqn: _all_but(eqn, [eqn.params["dimension"]]),
    **dict.fromkeys(_REORDERS, _matrices),
    "top_k": lambda eqn: _all_but(eqn, [eqn.params["axis"]]),
    "approx_top_k": _nothing,  # JAX's derivative of it has the shape of the whole
}
_LANES = _LOOKED_UP | {
    "conv_general_dilated": _convolution,
    **dict.fromkeys(WINDOWED, _windows),
    "fft": lambda eqn: _all_but(eqn, range(eqn.invars[0].aval.ndim)[-len(eqn.params["fft_lengths"]) :]),
    "pad": _pad,
}
