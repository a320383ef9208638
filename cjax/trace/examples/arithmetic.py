"""Arithmetic and reductions over examples: what becomes of sums, means and ratios, and which divisions make them."""

import math
from collections.abc import Callable
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import Equation
from cjax.trace.examples.values import FIXED, LOST, Atom, Context, Place, RowWeight, Value, power_of
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named

_SAME = having("same")
# A sum of transformed examples is the transformed sum.
_ADDS = having("adds") | named("sub")
_LINEAR_UNARY = _SAME | named("neg real imag conj")
# One result element for each element of the operands. Of anything else shapes that agree say nothing. The same numbers
# elsewhere on the devices are such too, where the operand is one; so are draws, each of its own element's parameters.
ELEMENTWISE = having("elementwise") | _SAME | named("random_gamma")
_CASTS = named("convert_element_type")
_CONSTANT: dict[str, Callable[..., float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y if y else math.nan,
    "max": max,
    "min": min,
    "neg": lambda x: -x,
    "sqrt": lambda x: math.sqrt(x) if x >= 0 else math.nan,
}
_TINY = 1e-30


def _cuts(eqn: Equation) -> bool:
    """Whether an equation makes whole numbers of what may be none, or numbers of a few bits."""
    old, new = (getattr(atom.aval, "dtype", np.dtype(bool)) for atom in (eqn.invars[0], eqn.outvars[0]))
    if not isinstance(old, np.dtype) or not isinstance(new, np.dtype):
        return False  # keys
    whole = not jnp.issubdtype(new, jnp.inexact)
    if name_of(eqn) == "div":
        return whole
    if not facts_of(eqn).rounds or old.kind == "b":
        return False
    is_small = new.itemsize < (4 if whole else 2)
    return name_of(eqn) not in _CASTS or is_small or (whole and jnp.issubdtype(old, jnp.inexact))


def cut_to_whole(context: Context, value: Value) -> Value:
    """`value`, unless its equation makes whole numbers of what grows with the rows: parts' do not add up to the
    whole's."""
    if not context.eqn.invars or not context.eqn.outvars or not _cuts(context.eqn):
        return value
    if value.kind == "fixed":
        grows = any(v.power for v in context.values)
        return context.make(FIXED, taints=frozenset({context.here}) if grows else frozenset(), iota=value.iota)
    if value.kind == "rows":
        grow = any(v.power or v.weight for v in context.values)
        return context.meeting(replace(value, power=0, weight=None)) if grow else value
    return value if value.kind in LOST else context.aggregate()


def elementwise(context: Context) -> Value:
    """One result element for each element of the operands, which may be scalars."""
    kinds = context.kinds()
    if not kinds:
        return _fixed(context)
    if "rows" in kinds:
        return _on_rows(context)
    name, values = context.name, context.values
    # Sums and means next to a number that knows how many rows there are. Multiplied by it or divided they are followed
    # below, which is how a sum becomes a mean; anything else, x.sum() + n say, is no mean of the parts' results.
    if any(v.taints for v in values) or (name not in ("mul", "div") and any(v.power for v in values)):
        return context.aggregate()
    # `where(weight == 0, 1, weight)` guards a division. The test is remembered for that, and is good for nothing else.
    if name in ("eq", "ne", "gt", "le") and values[0].kind in ("sum", "mean") and values[1].const == 0:
        return replace(context.aggregate(), test=name, weight=values[0].weight)
    if name == "select_n" and values[0].test:
        return _where_zero(context)
    # Before the linear rules, which would take it for a sum.
    if kinds & {"aggregate"}:
        return _with_aggregate(context)
    if name in _LINEAR_UNARY:
        return _kept(context, values[0])
    if name in _BINARY and len(values) == 2:
        return _BINARY[name](context, *values)
    return _floored(context) if name == "max" else context.aggregate()


def _fixed(context: Context) -> Value:
    """Of values that are the same whatever the batch holds: a number and its twin where both are known, and how the
    result grows with the rows."""
    name, values = context.name, context.values
    if name in _SAME and len(values) == 1:
        return context.make(values[0])
    if name == "lt" and values[0].iota is not None and values[1].const == 0:
        return context.make(FIXED, test="lt")
    if name == "select_n" and values[0].test == "lt" and values[1].iota is not None:
        # Negative indices are wrapped by a select whose first case is the index itself.
        return context.make(FIXED, iota=values[1].iota, columns=values[1].columns)
    # An author's arithmetic with shapes (`x.shape[0] * x.shape[1]`) reaches the trace as constants, or as equations on
    # them. With the number on both numbers of rows at hand, what it grows as is asked of the numbers, not of the
    # equation.
    if values and name in _CONSTANT and all(v.const is not None and v.twin is not None for v in values):
        const = _CONSTANT[name](*(v.const for v in values))
        twin = _CONSTANT[name](*(v.twin for v in values))
        power = power_of(const, twin, context.ratio)
        if power is not None and not math.isnan(const):
            return context.make(FIXED, const=const, twin=twin, power=power)
    powers = [v.power for v in values]
    if name == "mul":
        return context.make(FIXED, power=sum(powers))
    if name == "div":
        return context.make(FIXED, power=powers[0] - powers[1])
    if name == "neg":
        return context.make(FIXED, power=powers[0])
    # Otherwise there is no telling how the result goes with the number of rows.
    return context.make(FIXED, taints=frozenset({context.here}) if any(powers) else frozenset())


def _on_rows(context: Context) -> Value:
    """Of rows, with each other or with what is fixed: rows again, with what they were divided by and how they grow."""
    name, values = context.name, context.values
    # Examples in different dims ([n, 1] against [1, n]) are compared each with every other.
    rows = [value for value in values if value.kind == "rows"]
    if len({value.layout for value in rows}) > 1:
        return context.pairs()
    row = rows[0]
    if name in _SAME and len(values) == 1:
        return row
    # Rows divided by a weight are a ratio once they are summed; how that is done first and the sum after must not
    # matter. A second weight, or a division that is not the last thing done to the rows, is not followed: the examples
    # then see a statistic of the batch.
    others = [value for value in values if value.kind not in ("rows", "fixed")]
    weights = {value.weight for value in rows if value.weight}
    power = _row_power(context)
    if name == "div" and len(others) == 1 and others[0] is values[1] and not weights and power is not None:
        weight = _as_weight(values[1])
        if weight:
            return replace(context.rows(*row.layout), weight=weight, power=power)
    if name == "mul" and len(others) == 1 and others[0].kind == "inverse" and not weights and power is not None:
        return replace(context.rows(*row.layout), weight=others[0].weight, power=power)
    made = context.coupled(row)
    if power is None or (weights and not _keeps_weight(context)):
        return context.meeting(made)
    return replace(made, power=power, weight=weights.pop() if weights else None)


def _row_power(context: Context) -> int | None:
    """How the rows of a result grow with their number; None if in no simple way."""
    powers, name = [value.power for value in context.values], context.name
    if name == "mul":
        return sum(powers)
    if name == "div":
        return powers[0] - powers[1]
    if name in _LINEAR_UNARY:
        return powers[0]
    if name in _ADDS or name == "select_n":
        # A zero grows as anything: `where(mask, x / n, 0)` is as x / n.
        cases = context.values[1:] if name == "select_n" else context.values
        found = {value.power for value in cases if value.const != 0}
        if len(found) <= 1 and (name != "select_n" or not powers[0]):
            return found.pop() if found else 0
    # exp(x / n), say: on a micro-batch it is another number for the same row.
    return None if any(powers) else 0


def _keeps_weight(context: Context) -> bool:
    """Whether what is made of rows that were divided by a weight is the same divided by it."""
    name = context.name
    weights = {value.weight for value in context.values if value.weight and value.kind == "rows"}
    weighted = [value for value in context.values if value.kind == "rows" and value.weight]
    if any(value.kind not in ("rows", "fixed") for value in context.values):
        return False
    if name in _LINEAR_UNARY:
        return True
    if name == "mul":
        return len(weighted) == 1
    if name == "div":
        return not (context.values[1].kind == "rows" and context.values[1].weight)
    if name in _ADDS:
        return len(weights) == 1 and len(weighted) == len(context.values)
    # x / w where a mask says so, else a number: divided by w it is that number only if it is zero.
    cases = [value for value in context.values[1:] if value not in weighted]
    return name == "select_n" and len(weights) == 1 and all(value.const == 0 for value in cases)


def _kept(context: Context, value: Value) -> Value:
    """The same sum, mean or ratio in another variable."""
    if value.kind in ("sum", "mean"):
        return context.make(value, weight=RowWeight(context.out, is_mean=value.kind == "mean"), const=None)
    if context.name in _SAME:
        return context.make(value)
    return context.make(value, total=None) if value.kind in ("ratio", "mixed") else context.aggregate()


def _as_weight(value: Value) -> RowWeight | None:
    """What `value` is as a denominator; none if it depends on parameters: its gradient would be needed as well."""
    # Denominators of the batch are handed to each part as constants (`Trace.shared`) or added up beside the totals,
    # both without a gradient. One that depends on parameters has a gradient, which would be lost in silence.
    if value.kind not in ("sum", "mean", "weight") or value.trained or value.couplings:
        return None
    return value.weight


def _with_aggregate(context: Context) -> Value:
    """A model may hand out a term that is no mean (a router's balance): each micro-batch then computes its own."""
    kinds, name, values = context.kinds(), context.name, context.values
    made = context.aggregate()
    origins = frozenset(v.origin for v in values if v.kind == "aggregate" and v.origin)
    adds, others = name in _ADDS, kinds - {"aggregate"}
    if adds and others & {"sum", "mixed"}:
        return context.make(Value("mixed", origin=made.origin))
    # The term is kept as a coupling, not refused here: inside the model each micro-batch may have its own, as BatchNorm
    # has; `verdict` refuses it if it was made in the loss. With a ratio, the weight stays that of the ratio.
    if adds and others & {"mean", "ratio"}:
        main = next(v for v in values if v.kind in others)
        couplings = main.couplings | origins
        weight = main.weight if main.kind == "ratio" else None
        return context.make(main, couplings=couplings, total=None, blended=True, weight=weight)
    scales = name == "mul" and any(v.kind == "fixed" for v in values)
    scales = scales or (name == "div" and values[1].kind == "fixed")
    if made.origin is not None and not others and (adds or scales or name in _LINEAR_UNARY):
        return replace(made, origin=Place(made.origin.text, all(origin.inside for origin in origins)))
    return made


def _add(context: Context, x: Value, y: Value) -> Value:
    """`x + y` and `x - y`, of which at least one is made of all examples."""
    kinds = {x.kind, y.kind}
    if "fixed" in kinds:
        return _shifted(context, *((y, x) if x.kind == "fixed" else (x, y)))
    # Two sums make a sum, two means a mean. A sum and a mean added up grow as neither does: parts' results can be put
    # together for each alone, not for both at once.
    if kinds <= {"sum", "mean"} and len(kinds) == 1:
        return context.make(x, weight=RowWeight(context.out, is_mean=x.kind == "mean"))
    if kinds <= {"mean", "ratio"}:
        return context.make(x if x.kind == "ratio" else y, total=None, blended=True)
    if kinds & {"sum", "mixed"} and kinds <= {"sum", "mean", "ratio", "mixed"}:
        summed = x if x.kind in ("sum", "mixed") else y
        return context.make(Value("mixed", origin=summed.origin))
    return context.aggregate()


def _shifted(context: Context, value: Value, constant: Value) -> Value:
    """A value of all examples and a constant: for a mean just that, for a sum a denominator kept from zero."""
    if value.kind == "ratio":
        return context.make(value, total=None)
    # For a mean, adding a constant to each part's is adding it to the whole's. For a sum it is not: a constant would be
    # added once a part. But `count + 1e-6` is a denominator, to be guarded once the counts are added up.
    weight, subtracts = value.weight, context.name == "sub"
    if constant.const == 0 and not (subtracts and context.values[0] is constant) and value.kind != "weight":
        return _kept(context, value) if value.kind in ("sum", "mean") else context.make(value)
    if weight is not None and constant.const is not None and not (subtracts and context.values[0] is constant):
        weight = replace(weight, offset=weight.offset + (-constant.const if subtracts else constant.const))
    else:
        weight = None
    if value.kind == "mean":
        return context.make(value, weight=weight)
    if value.kind in ("sum", "weight") and weight is not None:
        return context.make(value, kind="weight", weight=weight)
    if value.kind in ("sum", "mixed"):
        return context.make(Value("mixed", origin=value.origin))
    return context.aggregate()


def _mul(context: Context, x: Value, y: Value) -> Value:
    """`x * y`, of which at least one is made of all examples."""
    if x.kind == "fixed" or y.kind == "fixed":
        value, factor = (y, x) if x.kind == "fixed" else (x, y)
        return _scaled(context, value, factor.power, factor.const == 1)
    kinds = {x.kind, y.kind}
    if "inverse" in kinds and kinds & {"sum", "mean"}:
        # x.sum() * (1 / w) is x.sum() / w; with another numerator than 1 (2 / w) the sum alone is not the ratio's total
        # any more.
        inverse, value = (x, y) if x.kind == "inverse" else (y, x)
        made = _ratio(context, context.eqn.invars[0 if value is x else 1], value, inverse.weight)
        return made if inverse.const == 1 else replace(made, total=None)
    return context.aggregate()


def _div(context: Context, x: Value, y: Value) -> Value:
    """`x / y`, of which at least one is made of all examples: a mean if `y` counts the rows, a ratio if it is a
    weight."""
    if y.kind == "fixed":
        return _scaled(context, x, -y.power, y.const == 1)
    weight = _as_weight(y)
    if weight is None:
        return context.aggregate()
    if x.kind == "fixed" and not x.power:
        return context.make(Value("inverse", weight=weight, origin=y.origin, const=x.const))
    if x.kind in ("sum", "mean"):
        return _ratio(context, context.eqn.invars[0], x, weight)
    return context.aggregate()


def _ratio(context: Context, total: Atom, value: Value, weight: RowWeight | None) -> Value:
    # A sum over a mean (or the reverse) grows with the batch, as a ratio does not.
    if weight is None or (value.kind == "mean") != weight.is_mean:
        return context.aggregate()
    return context.make(Value("ratio", weight=weight, total=total, origin=value.origin))


def _scaled(context: Context, value: Value, power: int, is_one: bool) -> Value:
    """A sum divided by the number of examples, or of their elements, is a mean."""
    if value.kind in ("sum", "mean"):
        return context.make(context.sum((value.kind == "sum") + power, RowWeight(context.out)), origin=value.origin)
    if power == 0 and value.kind == "ratio":
        return context.make(value, total=value.total if is_one else None)
    if power == 0 and value.kind in ("mixed", "inverse"):
        return context.make(value, const=value.const if is_one else None)
    return context.aggregate()


_BINARY: dict[str, Callable[[Context, Value, Value], Value]] = {
    "add": _add,
    "add_any": _add,
    "sub": _add,
    "mul": _mul,
    "div": _div,
}


def _where_zero(context: Context) -> Value:
    """`where(weight == 0, 1, weight)` and its kin. Only of what depends on no parameters; else it is no sum."""
    test, *cases = context.values
    if len(cases) != 2:
        return context.aggregate()
    when_zero, otherwise = reversed(cases) if test.test in ("eq", "le") else cases
    # Both what is tested and what is taken must be the same weight, unguarded before: then the guard is that of the
    # whole batch, put on after counts were added up. Any other choice by a sum of examples is a step function of the
    # batch, and no parts' results make up the whole's.
    weight = _as_weight(otherwise)
    if weight is None or weight.is_guarded or when_zero.const is None or when_zero.power or test.weight is None:
        return context.aggregate()
    if otherwise.kind not in ("sum", "mean") or test.weight != weight:
        return context.aggregate()
    below = test.test in ("le", "gt")
    return context.make(otherwise, kind="weight", weight=replace(weight, zero=when_zero.const, below=below))


def _floored(context: Context) -> Value:
    """`max(weight, 1)`: a denominator kept from zero. Only of what depends on no parameters; else it is no sum."""
    # As a denominator: 0 tokens in one micro-batch must not become 1 of its own in the sum of all. As a value it is
    # refused, being no sum: max(a, 1) + max(b, 1) is not max(a + b, 1).
    sums = [value for value in context.values if value.kind in ("sum", "mean")]
    constants = [value.const for value in context.values if value.kind == "fixed"]
    weight = _as_weight(sums[0]) if len(sums) == 1 else None
    # Below zero it is no guard, which would keep the sum from zero.
    if weight is None or weight.is_guarded or not constants or constants[0] is None or constants[0] < 0:
        return context.aggregate()
    return context.make(sums[0], kind="weight", weight=replace(weight, floor=max(constants[0], _TINY)))


def reduction(context: Context) -> Value:
    """`reduce_*`, `arg*`: dims of the operand go."""
    value, axes = context.values[0], context.eqn.params["axes"]
    is_sum = context.name == "reduce_sum"
    grows = bool(context.grows(0) & set(axes))
    if value.kind == "fixed":
        return _fixed_reduction(context, value, is_sum, grows)
    # Adding up the elements of a sum over examples gives one; their maximum does not.
    if value.kind != "rows":
        if not is_sum or value.kind not in ("sum", "mean") or grows:
            return context.aggregate()
        return context.make(value, weight=RowWeight(context.out, is_mean=value.kind == "mean"))
    # Each row is reduced by itself. Where rows are divided by a weight or n, only sums keep that factor in front.
    if value.dim not in axes:
        dim = value.dim - sum(axis < value.dim for axis in axes)
        if is_sum:
            return context.moved(value, dim, value.outer, value.inner)
        made = context.rows(dim, value.outer, value.inner)
        return context.meeting(made) if value.weight or value.power else made
    if not is_sum:
        return context.aggregate()
    # The division came first: sum(x / w) is sum(x) / w if w grows as the sum does, and no ratio otherwise.
    if value.weight is not None:
        if value.power != (-1 if value.weight.is_mean else 0):
            return context.aggregate()
        return context.make(Value("ratio", weight=value.weight, origin=context.here))
    return context.sum(1 + value.power, RowWeight(context.out))


def _count(eqn: Equation) -> int:
    """How many elements a reduction brings together in each of its result."""
    return math.prod(eqn.invars[0].aval.shape) // max(1, math.prod(eqn.outvars[0].aval.shape))


def _fixed_reduction(context: Context, value: Value, is_sum: bool, grows: bool) -> Value:
    """Of what is fixed: n times a number where it is summed over n rows."""
    if value.const is not None and value.twin is not None and context.twin is not None:
        const, twin = (
            number * _count(eqn) if is_sum else number
            for number, eqn in ((value.const, context.eqn), (value.twin, context.twin))
        )
        power = power_of(const, twin, context.ratio)
        if power is not None and (is_sum or facts_of(context.eqn).extreme):
            return context.make(FIXED, const=const, twin=twin, power=power)
    # What is added up along the rows without being known number for number (a mask by position, say) is another number
    # with other rows.
    tainted = grows or bool(value.power and not is_sum)
    return context.make(FIXED, power=value.power, taints=frozenset({context.here}) if tainted else frozenset())
