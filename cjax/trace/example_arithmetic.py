"""Arithmetic and reductions over examples: what becomes of sums, means and ratios, and which divisions make them."""

import math
from collections.abc import Callable
from dataclasses import replace

from cjax.trace.examples import FIXED, Context, Value, Weight

# A sum of transformed examples is the transformed sum.
_LINEAR_UNARY = frozenset(
    {"neg", "convert_element_type", "copy", "copy_p", "stop_gradient", "reduce_precision", "real", "name"}
    | {"optimization_barrier", "sharding_constraint", "device_put", "pvary"}
)
_CONSTANT: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y if y else math.nan,
    "max": max,
    "min": min,
    "neg": lambda x: -x,
}
_TINY = 1e-30


def elementwise(context: Context) -> Value:
    """One result element for each element of the operands, which may be scalars."""
    kinds = context.kinds()
    if not kinds:
        return _fixed(context)
    if "rows" in kinds:
        return _on_rows(context)
    if kinds & {"aggregate"} and not _is_guard(context):
        return _with_aggregate(context)
    name = context.name
    if name in _LINEAR_UNARY:
        return _kept(context, context.values[0])
    if name in _BINARY and len(context.values) == 2:
        return _BINARY[name](context, *context.values)
    if name in ("max", "select_n", "clamp"):
        return _guarded(context)
    return context.aggregate()


def _fixed(context: Context) -> Value:
    consts = [value.const for value in context.values]
    const = None
    if consts and None not in consts and context.name in _CONSTANT:
        const = _CONSTANT[context.name](*consts)
    elif context.name in _LINEAR_UNARY and consts:
        const = consts[0]
    # Negative indices are wrapped by a select whose first case is the index itself.
    kept = context.values[1] if context.name == "select_n" else context.values[0] if context.values else FIXED
    keeps = context.name in _LINEAR_UNARY or context.name == "select_n"
    if not keeps:
        return context.make(FIXED, const=const)
    return context.make(FIXED, const=const, iota=kept.iota, columns=kept.columns)


def _on_rows(context: Context) -> Value:
    rows = [value for value in context.values if value.kind == "rows"]
    if len({value.layout for value in rows}) > 1:
        return context.pairs()
    row, weights = rows[0], {value.weight for value in rows if value.weight}
    others = [value for value in context.values if value.kind not in ("rows", "fixed")]
    name = context.name
    if name == "div" and len(others) == 1 and context.values[0] is row and others[0] is context.values[1]:
        weight = _as_weight(context.eqn.invars[1], others[0])
        if weight and not weights:
            return context.rows(*row.layout, weight=weight)
    if name == "mul" and len(others) == 1 and others[0].kind == "inverse" and not weights:
        return context.rows(*row.layout, weight=others[0].weight)
    if others or len(weights) > 1:
        weighted = frozenset(value.origin or "weights" for value in rows if value.weight)
        coupled = context.coupled(row)
        return replace(coupled, couplings=coupled.couplings | weighted)
    if not weights:
        return context.rows(*row.layout, columns=row.columns if name in _LINEAR_UNARY else frozenset())
    weighted_rows = [value for value in context.values if value.weight]
    plain = [value for value in context.values if not value.weight]
    keeps = name in _LINEAR_UNARY or (name == "mul" and len(weighted_rows) == 1)
    keeps = keeps or (name == "div" and not context.values[1].weight) or (name in ("add", "sub") and not plain)
    keeps = keeps or (name == "select_n" and all(value.const == 0 for value in plain[1:]))
    if not keeps:
        return context.rows(*row.layout, couplings=frozenset({context.where}))
    return context.rows(*row.layout, weight=weights.pop())


def _kept(context: Context, value: Value) -> Value:
    """The same sum, mean or ratio in another variable."""
    if value.kind in ("sum", "mean"):
        return context.make(value, weight=_itself(context, value), const=None)
    total = context.out if value.kind == "ratio" and value.total is not None and context.name == "neg" else value.total
    return context.make(value, total=None if context.name == "neg" else total)


def _itself(context: Context, value: Value) -> Weight:
    """The weight that a sum would be, guards kept through conversions of dtype."""
    guarded = value.weight is not None and (value.weight.floor or value.weight.offset)
    if guarded and context.name in _LINEAR_UNARY and context.name != "neg":
        assert value.weight is not None
        return value.weight
    return Weight(context.out, is_mean=value.kind == "mean")


def _as_weight(atom: object, value: Value) -> Weight | None:
    """What `value` is as a denominator; none if it depends on parameters: its gradient would be needed as well."""
    if value.kind not in ("sum", "mean") or value.trained or value.couplings:
        return None
    return value.weight


def _with_aggregate(context: Context) -> Value:
    """A loss may add a term that is no mean (a router's balance): each micro-batch then computes its own."""
    kinds = context.kinds()
    if context.name in ("add", "sub", "add_any") and kinds & {"mean", "ratio"} and len(kinds) == 2:
        main = next(value for value in context.values if value.kind in ("mean", "ratio"))
        other = next(value for value in context.values if value.kind == "aggregate")
        return context.make(replace(main, couplings=main.couplings | {other.origin}), total=None)
    return context.aggregate()


def _add(context: Context, x: Value, y: Value) -> Value:
    if x.kind == "fixed" or y.kind == "fixed":
        value, constant = (y, x) if x.kind == "fixed" else (x, y)
        if value.kind in ("mean", "ratio"):
            made = context.make(value, total=None)
            if value.kind == "mean":
                return replace(made, weight=_offset(context, value, constant))
            return made
        if value.kind == "sum":
            return context.make(value, weight=_offset(context, value, constant))
        return context.aggregate()
    if x.kind == y.kind and x.kind in ("sum", "mean"):
        return context.make(x, weight=Weight(context.out, is_mean=x.kind == "mean"), later=max(x.later, y.later))
    if "sum" in (x.kind, y.kind) and {x.kind, y.kind} <= {"sum", "mean", "ratio"}:
        return context.make(Value("sum", origin=x.origin or y.origin, weight=Weight(context.out)))
    if {x.kind, y.kind} == {"mean", "ratio"}:
        return context.make(x if x.kind == "ratio" else y, total=None)
    if x.kind == y.kind == "ratio":
        if x.weight == y.weight:
            return context.make(x, total=None)
        return context.make(Value("unknown", origin=f"{context.where}: two ratios with different weights"))
    return context.aggregate()


def _offset(context: Context, value: Value, constant: Value) -> Weight:
    if context.name == "add" and constant.const is not None and value.weight and not value.weight.offset:
        return replace(value.weight, offset=constant.const)
    return Weight(context.out, is_mean=value.kind == "mean")


def _mul(context: Context, x: Value, y: Value) -> Value:
    if x.kind == "fixed" or y.kind == "fixed":
        value, factor = (y, x) if x.kind == "fixed" else (x, y)
        return _scaled(context, value, None if not factor.const else 1 / factor.const)
    kinds = {x.kind, y.kind}
    if "inverse" in kinds and kinds & {"sum", "mean"}:
        inverse, value = (x, y) if x.kind == "inverse" else (y, x)
        atom = context.eqn.invars[0 if value is x else 1]
        return _ratio(context, atom, value, inverse.weight)
    return context.aggregate()


def _div(context: Context, x: Value, y: Value) -> Value:
    if y.kind == "fixed":
        return _scaled(context, x, y.const)
    weight = _as_weight(context.eqn.invars[1], y)
    if weight is None:
        return context.aggregate()
    if x.kind == "fixed":
        return context.make(Value("inverse", weight=weight, origin=y.origin))
    if x.kind in ("sum", "mean"):
        return _ratio(context, context.eqn.invars[0], x, weight)
    return context.aggregate()


def _ratio(context: Context, total: object, value: Value, weight: Weight | None) -> Value:
    if weight is None or weight.is_mean != (value.kind == "mean"):
        return context.make(Value("sum", origin=value.origin, weight=Weight(context.out)))
    return context.make(Value("ratio", weight=weight, total=total, origin=value.origin))  # type: ignore[arg-type]


def _scaled(context: Context, value: Value, divisor: float | None) -> Value:
    """A sum divided by the number of examples, or of their elements, is a mean."""
    if value.kind == "sum":
        count = round(divisor) if divisor and math.isfinite(divisor) and abs(divisor) < 2**53 else 0
        whole = count != 0 and abs(divisor - count) <= 1e-5 * abs(count) if divisor else False
        if whole and value.later > 1 and abs(count) == value.later:
            return context.make(value, later=1, weight=Weight(context.out))  # the mean over what came after
        kind = "mean" if whole and count % context.batch == 0 else "sum"
        return context.make(value, kind=kind, weight=Weight(context.out, is_mean=kind == "mean"))
    if value.kind == "mean":
        return context.make(value, weight=Weight(context.out, is_mean=True))
    if value.kind in ("ratio", "inverse"):
        is_one = divisor == 1.0
        if value.kind == "inverse" and not is_one:
            return context.aggregate()
        return context.make(value, total=value.total if is_one else None)
    return context.aggregate()


_BINARY: dict[str, Callable[[Context, Value, Value], Value]] = {
    "add": _add,
    "add_any": _add,
    "sub": _add,
    "mul": _mul,
    "div": _div,
}


def _is_guard(context: Context) -> bool:
    """`where(weight == 0, 1, weight)` and its kin: the condition is a comparison of the weight."""
    return context.name == "select_n" and context.values[0].kind == "aggregate" and not context.values[0].trained


def _guarded(context: Context) -> Value:
    """`max(weight, 1)`: a denominator kept from zero. Only of what depends on no parameters; else it is no sum."""
    sums = [value for value in context.values if value.kind in ("sum", "mean")]
    constants = [value.const for value in context.values if value.kind == "fixed"]
    if len(sums) != 1 or sums[0].trained or sums[0].weight is None or not constants or constants[0] is None:
        return context.aggregate()
    if context.name == "select_n" and context.values[0].kind == "fixed":
        return context.aggregate()
    floor = _TINY if context.name == "select_n" else constants[0]
    return context.make(sums[0], weight=replace(sums[0].weight, floor=floor))


def reduction(context: Context) -> Value:
    """`reduce_*`, `arg*`: dims of the operand go."""
    value, axes = context.values[0], context.eqn.params["axes"]
    is_sum = context.name in ("reduce_sum", "reduce_sum_p")
    if value.kind == "fixed":
        count = math.prod(context.shape(0)[axis] for axis in axes)
        const = value.const if value.const is None or not is_sum else value.const * count
        return context.make(FIXED, const=const)
    if value.kind != "rows":
        if not is_sum or value.kind not in ("sum", "mean"):
            return context.aggregate()
        count = math.prod(context.shape(0)[axis] for axis in axes)
        weight = Weight(context.out, is_mean=value.kind == "mean")
        return context.make(value, later=value.later * count, weight=weight)
    if value.dim not in axes:
        dim = value.dim - sum(axis < value.dim for axis in axes)
        return context.rows(dim, value.outer, value.inner, weight=value.weight)
    if not is_sum:
        return context.make(Value("aggregate", origin=context.where))
    if value.weight is not None:
        return context.make(Value("ratio", weight=value.weight, origin=context.where))
    return context.make(Value("sum", origin=context.where, weight=Weight(context.out)))
