"""Where the examples' dim goes when dims are rearranged, contracted, gathered or windowed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from jax import lax

from cjax.trace.examples.arithmetic import ELEMENTWISE, cut_to_whole, elementwise, reduction
from cjax.trace.examples.values import FIXED, Context, RowWeight, Value, growing
from cjax.trace.jaxpr.primitives import facts_of, having, named


def reshape(context: Context) -> Value:
    """Where the examples' dim is after a reshape: merged into another, or taken out of one."""
    value = context.values[0]
    if value.kind != "rows":
        return _not_rows(context, _reshaped_dim(context, value.iota))
    old, new = context.shape(0), context.out.aval.shape
    left = math.prod(old[: value.dim]) * value.outer
    before = 1
    for dim, size in enumerate(new):
        outer = left // before
        # The first dim that holds all of the examples, whatever else was merged into it: outer * batch * inner. Where
        # none does, examples were cut across, and which element is whose is lost.
        if left % before == 0 and before * size >= left * context.batch and size % (outer * context.batch) == 0:
            return context.moved(value, dim, outer, size // (outer * context.batch))
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
        # What is drawn, transformed or seen as other numbers is not the number that it is made of.
        same = facts_of(context.eqn).moves and all(
            v.const == value.const for v in context.values if context.name == "pad"
        )
        if same:
            return context.make(FIXED, const=value.const, twin=value.twin, power=value.power, iota=iota)
        return context.make(FIXED, taints=frozenset({context.here}) if value.power else frozenset(), iota=iota)
    if value.kind in ("sum", "mean"):
        return context.make(value, weight=RowWeight(context.out, is_mean=value.kind == "mean"))
    return context.make(value, total=None, test="")


def moved(destination: Callable[[Context, int], int | None]) -> Callable[[Context], Value]:
    """The rule of a primitive that moves whole dims: where does this one go? None if it does not survive."""

    def rule(context: Context) -> Value:
        value = context.values[0]
        if any(v.kind != "fixed" for v in context.values[1:]):
            return context.unknown()
        if value.kind != "rows":
            iota = None if value.iota is None else destination(context, value.iota)
            # A determinant of a mean is no mean of determinants.
            if value.kind != "fixed" and (context.name in _NOT_LINEAR or context.name == "pad"):
                return context.aggregate()
            return _not_rows(context, iota)
        dim = destination(context, value.dim)
        if dim is None:
            return context.unknown()
        # The factor of rows that were divided by n or by a weight does not come out of these: a determinant of x / n is
        # not 1 / n of x's, and what is padded in was not divided.
        if context.name in _NOT_LINEAR or (context.name == "pad" and context.values[1].const != 0):
            return context.rows(dim, value.outer, value.inner)
        return context.moved(value, dim, value.outer, value.inner)

    return rule


def _squeezed(context: Context, dim: int) -> int | None:
    gone = context.eqn.params["dimensions"]
    return None if dim in gone else dim - sum(other < dim for other in gone)


def _whole(context: Context, dim: int) -> int | None:
    """The dim itself, if all of it is still there."""
    return dim if context.out.aval.shape[dim] == context.shape(0)[dim] else None


def _unpadded(context: Context, dim: int) -> int | None:
    """The dim itself, if nothing is put around it. Cut as much at one end as was put at the other, it is as long."""
    return dim if tuple(context.eqn.params["padding_config"][dim]) == (0, 0, 0) else None


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
        named = context.eqn.params.get(parameter, context.eqn.params.get("axis", len(context.shape(0)) - 1))
        named = named if isinstance(named, Sequence) else (named,)
        rows = [value for value in context.values if value.kind == "rows"]
        if not rows:
            return context.make(FIXED) if not context.kinds() else context.aggregate()
        if len({row.layout for row in rows}) > 1:
            return context.pairs()
        if rows[0].dim not in named:
            return context.coupled(rows[0])
        # Each row sees those before it, so a micro-batch's rows see fewer: noted, and refused in a loss. A sort mixes
        # them for good.
        if facts_of(context.eqn).cumulates:
            return context.meeting(context.rows(*rows[0].layout))
        return context.aggregate()

    return rule


def concatenate(context: Context) -> Value:
    """Joined along another dim, examples stay apart; along their own, there are several to a row of the batch. Columns
    of indices are joined here too."""
    dim = context.eqn.params["dimension"]
    rows = [value for value in context.values if value.kind == "rows"]
    sizes = [context.shape(operand)[dim] for operand in range(len(context.values))]
    columns: frozenset[int] = frozenset()
    if dim == len(context.out.aval.shape) - 1 and set(sizes) == {1}:
        columns = frozenset(i for i, value in enumerate(context.values) if value.iota is not None)
        # `x[arange(n), arange(n) % 3]`: a column that knows each row's number beside the one that may.
        others = [value for i, value in enumerate(context.values) if i not in columns]
        if len(columns) > 1 or any(value.taints for value in others):
            columns = frozenset()
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
    if len({value.layout for value in rows}) > 1 and dim != row.dim:
        return context.pairs()
    if dim != row.dim:
        counted = {value.iota for value in context.values} - {None}
        columns = columns if counted == {row.dim} else frozenset()
        # [[0, labels[0]], [1, labels[1]], ...]: indices of which one column counts rows.
        made = context.make(Value("rows", *row.layout, columns=columns), ignoring=tuple(columns))
        # Numbers of rows do no harm as indices; in any other use they tell.
        return replace(_alike(context, made), taints=frozenset().union(*(context.values[i].taints for i in columns)))
    # Examples and something fixed joined along the examples' dim: a micro-batch would have as many of the fixed ones as
    # the whole.
    if len(rows) < len(context.values):
        return context.unknown()
    return _alike(context, context.rows(row.dim, sum(value.outer for value in rows), row.inner))


def dot_general(context: Context) -> Value:
    """A product in which the examples' dim is contracted (a sum over them), batched or left alone (each row its
    own)."""
    x, y = context.values
    (contracting, batch_dims) = context.eqn.params["dimension_numbers"]
    kinds = context.kinds()
    if "rows" not in kinds:
        others = [value for value in context.values if value.kind != "fixed"]
        plain = not any(value.power for value in context.values) and not any(map(context.grows, (0, 1)))
        if len(others) == 1 and others[0].kind in ("sum", "mean") and plain:
            return context.make(others[0], weight=None)
        return context.aggregate() if others else context.make(FIXED)
    places = [
        _dot_place(value, context.shape(side), contracting, batch_dims, side, len(context.shape(0)))
        for side, value in enumerate(context.values)
    ]
    if x.kind == y.kind == "rows":
        # Both have examples and they are not paired row by row: scores of all against all, as of a contrastive loss.
        if places[0] != places[1] or x.layout[1:] != y.layout[1:]:
            return context.pairs()
        if places[0][0] == "contracted":
            return context.sum(1 + x.power + y.power)
        return _product(context, context.rows(places[0][1], x.outer, x.inner))
    side = 0 if x.kind == "rows" else 1
    row, other, (place, dim) = context.values[side], context.values[1 - side], places[side]
    # Contracting the examples' dim with what is fixed is a sum over examples with fixed weights; with a statistic of
    # theirs it is none.
    if place == "contracted":
        return context.sum(1 + x.power + y.power) if other.kind == "fixed" else context.aggregate()
    made = _product(context, context.coupled(row, dim=dim))
    # The other operand, which holds no examples, is contracted over a dim that is longer with more rows.
    if side == 0 and context.grows(1) & set(contracting[1]):
        return context.unknown()
    return made


def _product(context: Context, made: Value) -> Value:
    """What a product of rows, or of rows and what is fixed, keeps of how they were scaled."""
    weights = [value.weight for value in context.values if value.kind == "rows" and value.weight]
    power = sum(value.power for value in context.values if value.kind in ("rows", "fixed"))
    return replace(made, power=power, weight=weights[0] if len(weights) == 1 else None)


def _alike(context: Context, made: Value) -> Value:
    """What joined rows keep of how they were scaled: all in one way, or they are not."""
    weights = {value.weight for value in context.values if value.const != 0}
    powers = {value.power for value in context.values if value.const != 0}
    if len(weights) > 1 or len(powers) > 1:
        return context.meeting(made)
    return replace(made, weight=weights.pop(), power=powers.pop()) if weights else made


def _dot_place(
    value: Value,
    shape: tuple[int, ...],
    contracting: Sequence[Sequence[int]],
    batch_dims: Sequence[Sequence[int]],
    side: int,
    lhs_rank: int,
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


def stack(context: Context) -> Value:
    """`stack`: a dim more, along which the operands lie one behind the other."""
    axis, rows = context.eqn.params["axis"], [value for value in context.values if value.kind == "rows"]
    if not rows:
        return context.aggregate() if context.kinds() else context.make(FIXED)
    if len({value.layout for value in rows}) > 1:
        return context.pairs()
    dim = rows[0].dim + (axis <= rows[0].dim)
    made = context.coupled(rows[0], dim=dim)
    return made if len(rows) < len(context.values) and made.couplings else _alike(context, made)


def _unstacked(context: Context, dim: int) -> int | None:
    axis = context.eqn.params["axis"]
    return None if dim == axis else dim - (axis < dim)


def convolution(context: Context) -> Value:
    """Images side by side are examples; anything else that holds them is not followed."""
    x, kernel = context.values
    numbers = context.eqn.params["dimension_numbers"]
    if x.kind != "rows" or kernel.kind == "rows" or x.dim != numbers.lhs_spec[0]:
        return context.unknown() if "rows" in context.kinds() else context.aggregate()
    # It makes groups of the batch's rows.
    if context.eqn.params["batch_group_count"] != 1:
        return context.unknown()
    return context.coupled(x, dim=numbers.out_spec[0])


def window(context: Context) -> Value:
    """Pooling: fine as long as no window reaches another example."""
    rows = [value for value in context.values if value.kind == "rows"]
    if not rows:
        return context.aggregate()
    if len({row.layout for row in rows}) > 1:
        return context.pairs()
    params, dim = context.eqn.params, rows[0].dim
    moves = tuple(params["padding"][dim]) != (0, 0) or params.get("base_dilation", {dim: 1})[dim] != 1
    if params["window_dimensions"][dim] != 1 or params["window_strides"][dim] != 1 or moves:
        return context.meeting(context.coupled(rows[0]))
    return context.coupled(rows[0])


def gather(context: Context) -> Value:
    """Lookups: of rows in a table, of each example's own elements, or among the examples."""
    operand, indices = context.values
    numbers = context.eqn.params["dimension_numbers"]
    rank = len(context.out.aval.shape)
    index_dims = [dim for dim in range(rank) if dim not in numbers.offset_dims]  # in the result, of indices' own dims
    if indices.kind == "rows" and indices.dim >= len(index_dims):
        return context.unknown()
    if "rows" not in context.kinds():
        if indices.kind == "fixed" and operand.kind in ("sum", "mean"):
            return context.make(operand, weight=None)
        return context.aggregate() if context.kinds() else context.make(FIXED)
    if operand.kind != "rows":
        return context.coupled(indices, dim=index_dims[indices.dim], columns=frozenset())
    if operand.dim in numbers.operand_batching_dims:
        paired = numbers.start_indices_batching_dims[list(numbers.operand_batching_dims).index(operand.dim)]
        if indices.kind == "rows" and (indices.dim != paired or indices.layout[1:] != operand.layout[1:]):
            return context.pairs()
        return context.coupled(operand, dim=index_dims[paired])
    # Indices choose among examples. Row i of row i is fine whatever the batch is cut into; which others they choose,
    # nobody knows before it runs.
    if operand.dim in numbers.start_index_map:
        counted = _own_rows(context, operand, indices, list(numbers.start_index_map).index(operand.dim))
        if counted is not None:  # x[arange(batch), ...]: each row its own
            return context.coupled(operand, ignoring=(1,), dim=index_dims[counted])
        # Neighbours of each example among the others. With indices of other dims beside, rows may be each one's own
        # (`x[best, arange(batch)]`), which is not followed.
        if indices.kind == "rows" and len(numbers.start_index_map) == 1:
            return context.pairs()
        return context.aggregate() if indices.kind != "fixed" else context.unknown()
    # Some of the examples, at a place that is fixed: x[:4] of a micro-batch are other examples.
    if context.eqn.params["slice_sizes"][operand.dim] != context.shape(0)[operand.dim]:
        return context.unknown()
    if indices.kind == "rows":
        return context.pairs()
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    nth = sum(dim not in gone for dim in range(operand.dim))
    return context.coupled(operand, dim=numbers.offset_dims[nth])


def _own_rows(context: Context, operand: Value, indices: Value, column: int) -> int | None:
    """The dim of `indices` that counts rows, if in this column row i names row i."""
    # Everything has to be true for "row i names row i": this column counts, as far as there are rows, along the dim
    # that holds them. A permutation of the rows or every second one is refused, since cutting the batch would change
    # what is chosen.
    columns = indices.columns
    if indices.iota is not None and context.shape(1)[-1] == 1:
        columns = frozenset({0})
    counted = indices.dim if indices.kind == "rows" else indices.iota
    if column not in columns or counted is None or counted >= len(context.shape(1)) - 1:
        return None
    if context.shape(1)[counted] != context.shape(0)[operand.dim] or operand.outer != 1 or operand.inner != 1:
        return None
    return counted


def scatter(context: Context) -> Value:
    """The reverse of `gather`: each example's own elements are written, or all examples are added up by place."""
    operand, indices, updates = context.values
    numbers = context.eqn.params["dimension_numbers"]
    rows = [value for value in context.values if value.kind == "rows"]
    if not rows:
        return context.aggregate() if context.kinds() else context.make(FIXED)
    if len({value.layout[1:] for value in rows}) > 1:
        return context.pairs()
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_dims = [dim for dim in range(len(context.shape(0))) if dim not in gone]
    dim = operand.dim if operand.kind == "rows" else None
    window_of = dict(zip(window_dims, numbers.update_window_dims, strict=True))
    # Examples in the window go along with it, whole or not at all; scattered along another dim they stay apart.
    if updates.kind == "rows" and updates.dim in numbers.update_window_dims:
        there = window_dims[list(numbers.update_window_dims).index(updates.dim)]
        if dim not in (None, there):
            return context.pairs()
        dim = there
    if dim is not None and dim in window_of and dim not in numbers.scatter_dims_to_operand_dims:
        if context.shape(2)[window_of[dim]] != context.shape(0)[dim]:
            return context.unknown()
        return context.pairs() if indices.kind == "rows" else context.coupled(rows[0], dim=dim)
    if numbers.operand_batching_dims and indices.kind in ("rows", "fixed"):
        for target, source in zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True):
            if (operand.kind == "rows" and operand.dim == target) or (indices.kind == "rows" and indices.dim == source):
                return context.coupled(rows[0], dim=target)
    if (made := _scattered_by_row(context, numbers)) is not None:
        return made
    # Adding what is examples' own onto zeros, at places of their own (a segment sum), is a sum over examples.
    # Onto anything else it is a sum and a constant, and a place that is written twice without adding keeps one example.
    own = {indices.kind, updates.kind} <= {"rows", "fixed"}
    adds = bool(facts_of(context.eqn).linear_with) and operand.const == 0 and own
    return context.sum(1 + updates.power) if adds and not context.grows(0) else context.aggregate()


def _scattered_by_row(context: Context, numbers: lax.ScatterDimensionNumbers) -> Value | None:
    """`x.at[arange(batch), ...]`: row i of the updates goes to row i."""
    operand, indices, updates = context.values
    targets = numbers.scatter_dims_to_operand_dims
    counted = indices.dim if indices.kind == "rows" else indices.iota
    for column in indices.columns:
        target = targets[column]
        own = updates.kind == "fixed" or updates.dim == counted
        own = own and (operand.kind == "fixed" or operand.dim == target)
        if own and counted is not None and context.shape(1)[counted] == context.shape(0)[target] == context.batch:
            row = next(value for value in context.values if value.kind == "rows")
            return context.coupled(row, ignoring=(1,), dim=target, columns=frozenset())
    return None


def update_slice(context: Context) -> Value:
    """`dynamic_update_slice`: both keep the examples' dim whole."""
    rows = [value for value in context.values[:2] if value.kind == "rows"]
    if len(rows) == 0 or len({row.layout for row in rows}) > 1 or any(v.kind != "fixed" for v in context.values[2:]):
        return (context.aggregate() if context.kinds() else context.make(FIXED)) if not rows else context.unknown()
    dim = rows[0].dim
    return context.coupled(rows[0]) if context.shape(0)[dim] == context.shape(1)[dim] else context.unknown()


# What these make of a row that was divided by a weight is not divided by it.
_OF_MATRICES = having("matrices") - named("triangular_solve tridiagonal_solve")
_NOT_LINEAR = _OF_MATRICES | named("bitcast_convert_type")


def solve(context: Context) -> Value:
    """Systems of equations, one for each element of the leading dims."""
    rows = [value for value in context.values if value.kind == "rows"]
    if not rows:
        return context.aggregate() if context.kinds() else context.make(FIXED)
    if len({row.layout for row in rows}) > 1:
        return context.pairs()
    return context.coupled(rows[0]) if rows[0].dim < len(context.shape(0)) - 2 else context.unknown()


RULES: dict[str, Callable[[Context], Value]] = {
    "reshape": reshape,
    "broadcast_in_dim": moved(lambda context, dim: context.eqn.params["broadcast_dimensions"][dim]),
    "transpose": moved(lambda context, dim: list(context.eqn.params["permutation"]).index(dim)),
    "squeeze": moved(_squeezed),
    "slice": moved(_whole),
    "dynamic_slice": moved(_whole),
    "pad": moved(_unpadded),
    "tile": moved(_whole),
    "rev": moved(_untouched("dimensions")),
    "split": moved(_untouched("axis")),
    "stack": stack,
    "unstack": moved(_unstacked),
    "fft": moved(lambda context, dim: _leading(len(context.eqn.params["fft_lengths"]))(context, dim)),
    "dynamic_update_slice": update_slice,
    "concatenate": concatenate,
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "gather": gather,
    "sort": along("dimension"),
    "top_k": along("dimension"),
    "approx_top_k": along("reduction_dimension"),
    **dict.fromkeys(having("cumulates"), along("axis")),
    **dict.fromkeys(having("scatter"), scatter),
    **dict.fromkeys(having("window") - named("select_and_scatter select_and_scatter_add"), window),
    **dict.fromkeys(_OF_MATRICES, moved(_leading(2))),
    "triangular_solve": solve,
    **dict.fromkeys(
        having("draws") | having("rekeys") | named("bitcast_convert_type"), moved(lambda context, dim: dim)
    ),
}


def apply_rule(context: Context) -> Value:
    """What an equation without a body makes of its operands."""
    name = context.name
    if name == "iota":
        return replace(FIXED, iota=context.eqn.params["dimension"])
    if name in RULES:
        return RULES[name](context)
    if facts_of(context.eqn).reduces:
        return reduction(context)
    shape = getattr(context.out.aval, "shape", None) if context.eqn.outvars else None
    aligned = all(_broadcasts(getattr(atom.aval, "shape", ()), shape) for atom in context.eqn.invars)
    if aligned and name in ELEMENTWISE:
        return cut_to_whole(context, elementwise(context))
    return context.unknown() if context.kinds() else context.make(FIXED)


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...] | None) -> bool:
    if shape == () or shape == result:
        return True
    if result is None or len(shape) != len(result):
        return False
    return all(size in (1, whole) for size, whole in zip(shape, result, strict=True))


def as_rows(context: Context) -> Value | None:
    """Of an equation of what is fixed: its result as rows, if it makes each of the same row of its operands and of
    nothing else; rows are what there is more of with more rows of the batch. None if it does not.

    An operand is the same along such a dim, unless the dim was merged with another: then it has its layout.
    """
    merged = any(value.is_merged for value in context.values)
    values: list[Value] = []
    for operand, value in enumerate(context.values):
        dims = context.grows(operand)
        if not dims or (merged and not value.is_merged):
            values.append(value)
            continue
        (dim, outer, inner), size = (value.layout if merged else (min(dims), 1, 1)), context.shape(operand)[min(dims)]
        times = size // (context.batch * inner)
        if len(dims) > 1 or size % (context.batch * inner) or (merged and times != outer):
            return None
        values.append(Value("rows", dim, times, inner))
    made, twins = apply_rule(replace(context, values=values)), () if context.twin is None else context.twin.outvars
    grown = [growing(var, twin) for var, twin in zip(context.eqn.outvars, twins, strict=False)]
    if made.kind != "rows" or made.couplings or any(dims != {made.dim} for dims in grown):
        return None
    return made
