"""Where the examples' dim goes when dims are rearranged, contracted, gathered or windowed."""

import math
from collections.abc import Callable, Sequence

from cjax.trace.examples import FIXED, Context, Value, Weight


def reshape(context: Context) -> Value:
    value = context.values[0]
    if value.kind != "rows":
        return _not_rows(context, _reshaped_dim(context, value.iota))
    old, new = context.shape(0), context.out.aval.shape
    left = math.prod(old[: value.dim]) * value.outer
    before = 1
    for dim, size in enumerate(new):
        outer = left // before
        if left % before == 0 and before * size >= left * context.batch and size % (outer * context.batch) == 0:
            return context.rows(dim, outer, size // (outer * context.batch), weight=value.weight)
        before *= size
    return context.unknown()


def _reshaped_dim(context: Context, dim: int | None) -> int | None:
    """Where a dim is after size-one dims came or went."""
    if dim is None:
        return None
    sizes = [size for size in context.shape(0) if size != 1]
    if sizes != [size for size in context.out.aval.shape if size != 1] or context.shape(0)[dim] == 1:
        return None
    nth = sum(size != 1 for size in context.shape(0)[:dim])
    return [i for i, size in enumerate(context.out.aval.shape) if size != 1][nth]


def _not_rows(context: Context, iota: int | None = None) -> Value:
    """Moving elements about keeps a sum a sum."""
    value = context.values[0]
    if value.kind == "fixed":
        return context.make(FIXED, const=value.const, iota=iota)
    guarded = value.weight is not None and (value.weight.floor or value.weight.offset)
    if value.kind in ("sum", "mean") and not guarded:
        return context.make(value, weight=Weight(context.out, is_mean=value.kind == "mean"))
    return context.make(value)


def moved(destination: Callable[[Context, int], int | None]) -> Callable[[Context], Value]:
    """The rule of a primitive that moves whole dims: where does this one go? None if it does not survive."""

    def rule(context: Context) -> Value:
        value = context.values[0]
        if any(v.kind != "fixed" for v in context.values[1:]):
            return context.unknown()
        if value.kind != "rows":
            return _not_rows(context, None if value.iota is None else destination(context, value.iota))
        dim = destination(context, value.dim)
        return context.unknown() if dim is None else context.rows(dim, value.outer, value.inner, weight=value.weight)

    return rule


def _squeezed(context: Context, dim: int) -> int | None:
    gone = context.eqn.params["dimensions"]
    return None if dim in gone else dim - sum(other < dim for other in gone)


def _whole(context: Context, dim: int) -> int | None:
    """The dim itself, if all of it is still there."""
    return dim if context.out.aval.shape[dim] == context.shape(0)[dim] else None


def _untouched(parameter: str) -> Callable[[Context, int], int | None]:
    def destination(context: Context, dim: int) -> int | None:
        named = context.eqn.params[parameter]
        return None if dim in (named if isinstance(named, Sequence) else (named,)) else dim

    return destination


def _leading(num_trailing: int) -> Callable[[Context, int], int | None]:
    return lambda context, dim: dim if dim < len(context.shape(0)) - num_trailing else None


def along(parameter: str) -> Callable[[Context], Value]:
    """Cumulative sums and sorts: along the examples' dim, rows see the examples before them."""

    def rule(context: Context) -> Value:
        named = context.eqn.params.get(parameter, len(context.shape(0)) - 1)
        named = named if isinstance(named, Sequence) else (named,)
        rows = [value for value in context.values if value.kind == "rows"]
        if not rows:
            return FIXED if not context.kinds() else context.aggregate()
        if len({row.layout for row in rows}) > 1:
            return context.pairs()
        if rows[0].dim not in named:
            return context.coupled(rows[0])
        if context.name.startswith("cum"):
            return context.make(Value("rows", *rows[0].layout, couplings=frozenset({context.where})))
        return context.make(Value("aggregate", origin=context.where))

    return rule


def concatenate(context: Context) -> Value:
    dim = context.eqn.params["dimension"]
    rows = [value for value in context.values if value.kind == "rows"]
    sizes = [context.shape(operand)[dim] for operand in range(len(context.values))]
    columns: frozenset[int] = frozenset()
    if dim == len(context.out.aval.shape) - 1 and set(sizes) == {1}:
        columns = frozenset(i for i, value in enumerate(context.values) if value.iota is not None)
    if not rows:
        if context.kinds():
            return context.aggregate()
        iotas = {value.iota for value in context.values} - {None}
        return context.make(FIXED, columns=columns, iota=iotas.pop() if columns and len(iotas) == 1 else None)
    if len({(row.dim, row.inner) for row in rows}) > 1:
        return context.pairs()
    row = rows[0]
    if any(value.kind not in ("rows", "fixed") for value in context.values):
        return context.coupled(row)
    if dim != row.dim:
        counted = {value.iota for value in context.values} - {None}
        return context.rows(*row.layout, columns=columns if counted == {row.dim} else frozenset())
    if len(rows) < len(context.values):
        return context.unknown()
    return context.rows(row.dim, sum(value.outer for value in rows), row.inner)


def dot_general(context: Context) -> Value:
    x, y = context.values
    (contracting, batch_dims) = context.eqn.params["dimension_numbers"]
    kinds = context.kinds()
    if "rows" not in kinds:
        others = [value for value in context.values if value.kind != "fixed"]
        if len(others) == 1 and others[0].kind in ("sum", "mean"):
            return context.make(others[0], weight=None)
        return context.aggregate()
    places = [
        _dot_place(value, context.shape(side), contracting, batch_dims, side, len(context.shape(0)))
        for side, value in enumerate(context.values)
    ]
    if x.kind == y.kind == "rows":
        if places[0] != places[1] or x.layout[1:] != y.layout[1:]:
            return context.pairs()
        if places[0][0] == "contracted":
            return context.make(Value("sum", origin=context.where))
        return context.rows(places[0][1], x.outer, x.inner)
    side = 0 if x.kind == "rows" else 1
    row, other, (place, dim) = context.values[side], context.values[1 - side], places[side]
    if place == "contracted":
        return context.make(Value("sum", origin=context.where)) if other.kind == "fixed" else context.aggregate()
    made = context.coupled(row)
    return context.make(made, dim=dim)


def _dot_place(
    value: Value, shape: tuple[int, ...], contracting: Sequence, batch_dims: Sequence, side: int, lhs_rank: int
) -> tuple[str, int]:
    """Whether an operand's examples are contracted, batched or free, and at which dim: of both operands together for
    contracted and batched ones, of the result for free and batched ones."""
    if value.kind != "rows":
        return "none", 0
    if value.dim in contracting[side]:
        return "contracted", list(contracting[side]).index(value.dim)
    if value.dim in batch_dims[side]:
        return "batched", list(batch_dims[side]).index(value.dim)
    gone = {*contracting[side], *batch_dims[side]}
    nth = sum(dim not in gone for dim in range(value.dim))
    if side == 1:
        nth += lhs_rank - len(contracting[0]) - len(batch_dims[0])
    return ("free", "free of the other")[side], len(batch_dims[0]) + nth


def convolution(context: Context) -> Value:
    x, kernel = context.values
    numbers = context.eqn.params["dimension_numbers"]
    if x.kind != "rows" or kernel.kind == "rows" or x.dim != numbers.lhs_spec[0]:
        return context.unknown() if "rows" in context.kinds() else context.aggregate()
    if context.eqn.params["batch_group_count"] != 1:
        return context.unknown()
    return context.make(context.coupled(x), dim=numbers.out_spec[0])


def window(context: Context) -> Value:
    """Pooling: fine as long as no window reaches another example."""
    rows = [value for value in context.values if value.kind == "rows"]
    if not rows:
        return context.aggregate()
    if len({row.layout for row in rows}) > 1:
        return context.pairs()
    params = context.eqn.params
    if params["window_dimensions"][rows[0].dim] != 1 or params["window_strides"][rows[0].dim] != 1:
        return context.make(Value("rows", *rows[0].layout, couplings=frozenset({context.where})))
    return context.coupled(rows[0])


def gather(context: Context) -> Value:
    operand, indices = context.values
    numbers = context.eqn.params["dimension_numbers"]
    rank = len(context.out.aval.shape)
    index_dims = [dim for dim in range(rank) if dim not in numbers.offset_dims]  # in the result, of indices' own dims
    if "rows" not in context.kinds():
        if indices.kind == "fixed" and operand.kind in ("sum", "mean"):
            return context.make(operand)
        return context.aggregate()
    if operand.kind != "rows":
        made = context.coupled(indices)
        return context.make(made, dim=index_dims[indices.dim])
    if operand.dim in numbers.operand_batching_dims:
        paired = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(operand.dim)]
        if indices.kind == "rows" and indices.dim != paired:
            return context.pairs()
        return context.make(context.coupled(operand), dim=index_dims[paired])
    if operand.dim in numbers.start_index_map:
        column = list(numbers.start_index_map).index(operand.dim)
        counted = indices.dim if indices.kind == "rows" else indices.iota
        if column in indices.columns and counted is not None:  # x[arange(batch), ...]: each row its own
            return context.make(context.coupled(operand), dim=index_dims[counted])
        return context.make(Value("aggregate", origin=context.where)) if indices.kind != "fixed" else context.unknown()
    if context.eqn.params["slice_sizes"][operand.dim] != context.shape(0)[operand.dim]:
        return context.unknown()
    if indices.kind == "rows":
        return context.pairs()
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    nth = sum(dim not in gone for dim in range(operand.dim))
    return context.make(context.coupled(operand), dim=numbers.offset_dims[nth])


def scatter(context: Context) -> Value:
    operand, indices, updates = context.values
    numbers = context.eqn.params["dimension_numbers"]
    rows = [value for value in context.values if value.kind == "rows"]
    if not rows:
        return context.aggregate()
    rank = len(context.shape(0))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_dims = [dim for dim in range(rank) if dim not in gone]
    dim = operand.dim if operand.kind == "rows" else None
    if dim is None and updates.kind == "rows" and updates.dim in numbers.update_window_dims:
        dim = window_dims[list(numbers.update_window_dims).index(updates.dim)]
    if dim is not None and dim in window_dims and dim not in numbers.scatter_dims_to_operand_dims:
        if indices.kind != "rows":
            return context.make(context.coupled(rows[0]), dim=dim)
        return context.pairs()
    if numbers.operand_batching_dims and indices.kind in ("rows", "fixed"):
        for target, source in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
            if (operand.kind == "rows" and operand.dim == target) or (indices.kind == "rows" and indices.dim == source):
                return context.make(context.coupled(rows[0]), dim=target)
    for column in indices.columns:
        return context.make(context.coupled(rows[0]), dim=numbers.scatter_dims_to_operand_dims[column])
    if operand.kind == "fixed" and context.name in ("scatter-add", "scatter_add"):
        return context.make(Value("sum", origin=context.where))
    return context.make(Value("aggregate", origin=context.where))


def update_slice(context: Context) -> Value:
    """`dynamic_update_slice`: both keep the examples' dim whole."""
    rows = [value for value in context.values[:2] if value.kind == "rows"]
    if len(rows) == 0 or len({row.layout for row in rows}) > 1 or any(v.kind != "fixed" for v in context.values[2:]):
        return context.aggregate() if not rows else context.unknown()
    dim = rows[0].dim
    return context.coupled(rows[0]) if context.shape(0)[dim] == context.shape(1)[dim] else context.unknown()


RULES: dict[str, Callable[[Context], Value]] = {
    "reshape": reshape,
    "broadcast_in_dim": moved(lambda context, dim: context.eqn.params["broadcast_dimensions"][dim]),
    "transpose": moved(lambda context, dim: list(context.eqn.params["permutation"]).index(dim)),
    "squeeze": moved(_squeezed),
    "slice": moved(_whole),
    "dynamic_slice": moved(_whole),
    "pad": moved(_whole),
    "rev": moved(_untouched("dimensions")),
    "split": moved(_untouched("axis")),
    "fft": moved(lambda context, dim: _leading(len(context.eqn.params["fft_lengths"]))(context, dim)),
    "dynamic_update_slice": update_slice,
    "concatenate": concatenate,
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "gather": gather,
    "sort": along("dimension"),
    "top_k": along("dimension"),
    "approx_top_k": along("reduction_dimension"),
    **{f"cum{kind}": along("axis") for kind in ("sum", "prod", "max", "min", "logsumexp")},
    **{name: scatter for name in ("scatter", "scatter-add", "scatter_add", "scatter-mul", "scatter_mul")},
    **{name: scatter for name in ("scatter-min", "scatter_min", "scatter-max", "scatter_max")},
    **{f"reduce_window{kind}": window for kind in ("", "_sum", "_max", "_min")},
    "select_and_gather_add": window,
    **{name: moved(_leading(2)) for name in ("cholesky", "qr", "svd", "eigh", "lu", "schur", "eig")},
    **{f"random_{name}": moved(lambda context, dim: dim) for name in ("wrap", "unwrap", "seed", "bits", "split")},
    "bitcast_convert_type": moved(lambda context, dim: dim),
}
