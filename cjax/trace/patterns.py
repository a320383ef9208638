"""How a loss is made of its examples, read off its trace: may micro-batches be averaged, and with what weight?"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

from cjax.trace.example_arithmetic import elementwise, reduction
from cjax.trace.example_rules import RULES
from cjax.trace.examples import FIXED, LOST, Atom, Context, Value, Weight
from cjax.trace.simplify import REMAT_NAMES, scan_counts


@dataclass(frozen=True)
class Lifted:
    """How the losses of micro-batches give the loss of the batch.

    kind is one of
      mean     their average is it
      ratio    it is `total / (max(weight, floor) + offset)` with totals and weights added up; where `total` is None,
               take each micro-batch's loss times its own `max(weight, floor) + offset` for it
      sum      the loss grows with the batch: refused
      coupled  the loss is no sum over examples: refused
      unknown  the trace could not be followed: their average, at the user's risk
    `reason` says it to people. `couplings` name where examples see statistics of the batch (BatchNorm, expert
    capacity): each micro-batch then has its own, which is allowed and reported.
    """

    kind: str
    reason: str
    total: Atom | None = None
    weight: Atom | None = None
    floor: float = 0.0
    offset: float = 0.0
    couplings: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        return self.kind in ("sum", "coupled")


def lift_mean(closed: ClosedJaxpr, batch_invars: set[int], num_params_invars: int) -> Lifted:
    """How micro-batches of a loss combine; the loss is the first result of a flat trace.

    Args:
        closed: the trace. Its first `num_params_invars` inputs are trained: a weight must not depend on them.
        batch_invars: positions of the inputs that are the batch; dim 0 of those that are no scalars is the batch.

    >>> import jax
    >>> trace = jax.make_jaxpr(lambda w, x: ((x * w) ** 2).mean())(2.0, jax.numpy.ones((4, 3)))
    >>> lift_mean(trace, {1}, 1).kind
    'mean'
    """
    return verdict(follow(closed, batch_invars, num_params_invars)[0])


def follow(closed: ClosedJaxpr, batch_invars: set[int], num_params_invars: int) -> list[Value]:
    """What each result of a flat trace has to do with the examples; arguments as for `lift_mean`."""
    jaxpr: Any = closed.jaxpr
    sizes = {jaxpr.invars[i].aval.shape[0] for i in batch_invars if jaxpr.invars[i].aval.shape}
    assert len(sizes) == 1, f"leaves of the batch differ in dim 0: {sizes}"
    values = []
    for position, var in enumerate(jaxpr.invars):
        if position in batch_invars and var.aval.shape:
            values.append(Value("rows"))
        else:
            values.append(replace(FIXED, trained=position < num_params_invars))
    consts = [_constant(const) for const in closed.consts]
    return _interpret(jaxpr, [*consts, *values], sizes.pop())


def verdict(loss: Value) -> Lifted:
    """What micro-batches of a loss are allowed, and how they combine."""
    couplings = tuple(sorted(loss.couplings))
    match loss.kind:
        case "fixed":
            return Lifted("mean", "does not depend on the batch")
        case "mean":
            return Lifted("mean", "a mean over the examples", couplings=couplings)
        case "ratio" if loss.weight is not None and loss.weight.atom.aval.shape == ():
            total = loss.total if loss.total is not None and loss.total.aval.shape == () else None
            weight = loss.weight
            reason = f"a sum over a weight that depends on the batch, at {loss.origin}"
            return Lifted("ratio", reason, total, weight.atom, weight.floor, weight.offset, couplings)
        case "sum":
            reason = (
                f"The loss is a sum over the examples ({loss.origin}), not a mean: it would change with the number of "
                "micro-batches. Take .mean(), divide by the number of examples, or return cjax.Mean(total, weight)."
            )
            return Lifted("sum", reason, couplings=couplings)
        case "pairs":
            reason = (
                f"Examples of the batch meet each other at {loss.origin}: a micro-batch would see fewer of them. "
                "Use microbatches=1."
            )
            return Lifted("coupled", reason, couplings=couplings)
        case "aggregate" | "rows" | "inverse":
            reason = (
                f"The loss is no mean over the examples: what was brought together at {loss.origin or 'its end'} goes "
                "through another function. Use microbatches=1, or return cjax.Mean(total, weight)."
            )
            return Lifted("coupled", reason, couplings=couplings)
    return Lifted("unknown", f"the examples are lost from sight at {loss.origin}", couplings=couplings)


def _constant(value: Any) -> Value:
    array = value if isinstance(value, np.ndarray | np.generic | int | float) else None
    if array is None or np.ndim(array) > 0 or np.asarray(array).dtype.kind not in "iuf":
        return FIXED
    return replace(FIXED, const=float(np.asarray(array)))


def _interpret(jaxpr: Any, values: Sequence[Value], batch: int) -> list[Value]:
    """The values of a jaxpr's results, from those of its constants and inputs."""
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

    def read(atom: Atom) -> Value:
        return _constant(np.asarray(atom.val)[()]) if type(atom) is Literal else env[atom]

    for eqn in jaxpr.eqns:
        context = Context(eqn, [read(atom) for atom in eqn.invars], batch)
        env.update(zip(eqn.outvars, _results(context), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(context: Context) -> list[Value]:
    eqn, name = context.eqn, context.name
    for kind in LOST:
        lost = next((value for value in context.values if value.kind == kind), None)
        if lost is not None:
            return [context.make(lost)] * len(eqn.outvars)
    if name in _CONTROL:
        return _CONTROL[name](context)
    if name in REMAT_NAMES or name in ("custom_jvp_call", "custom_vjp_call"):
        return _call(context, eqn.params["jaxpr"] if name in REMAT_NAMES else eqn.params["call_jaxpr"])
    return [_rule(context)] * len(eqn.outvars)


def _rule(context: Context) -> Value:
    name = context.name
    if name == "iota":
        return replace(FIXED, iota=context.eqn.params["dimension"])
    if name == "broadcast_in_dim" or (context.kinds() and name in RULES) or name in ("reshape", "concatenate"):
        return RULES[name](context)
    if name.startswith(("reduce_", "arg")) and "axes" in context.eqn.params:
        return reduction(context)
    shape = getattr(context.out.aval, "shape", None) if context.eqn.outvars else None
    if all(_broadcasts(getattr(atom.aval, "shape", ()), shape) for atom in context.eqn.invars):
        return elementwise(context)
    return context.unknown() if context.kinds() else context.make(FIXED)


def _broadcasts(shape: tuple[int, ...], result: tuple[int, ...] | None) -> bool:
    if shape == () or shape == result:
        return True
    if result is None or len(shape) != len(result):
        return False
    return all(size in (1, whole) for size, whole in zip(shape, result, strict=True))


def _call(context: Context, body: Any, values: Sequence[Value] | None = None) -> list[Value]:
    jaxpr = body.jaxpr if hasattr(body, "jaxpr") else body
    consts = [_constant(const) for const in getattr(body, "consts", ())]
    inner = _interpret(jaxpr, [*consts, *(context.values if values is None else values)], context.batch)
    results = []
    prefix = str(context.eqn.source_info.name_stack)
    for value, outvar in zip(inner, context.eqn.outvars, strict=True):
        if value.kind in ("sum", "mean"):
            value = replace(value, weight=Weight(outvar, is_mean=value.kind == "mean"))
        elif value.weight is not None:
            value = _outside(context, value, jaxpr)
        if value.origin and not value.origin.startswith(prefix):
            value = replace(value, origin=f"{prefix}/{value.origin}")
        results.append(replace(value, total=None))
    return results


def _outside(context: Context, value: Value, jaxpr: Any) -> Value:
    """A ratio's weight, which is a variable of the body, named by the equation's own variables."""
    assert value.weight is not None
    names = dict(zip(jaxpr.invars, context.eqn.invars, strict=False))
    results = zip(jaxpr.outvars, context.eqn.outvars, strict=True)
    names.update((inner, outer) for inner, outer in results if type(inner) is not Literal)
    if value.weight.atom in names:
        return replace(value, weight=replace(value.weight, atom=names[value.weight.atom]))
    return context.make(Value("unknown", origin=f"{context.where}, which hides the loss's weight"))


def _join(context: Context, x: Value, y: Value) -> Value:
    """What is known of a value that is either of two, as after a branch or another turn of a loop."""
    both = replace(context, values=[x, y])
    kinds = both.kinds()
    for kind in LOST:
        if kind in kinds:
            return both.make(next(value for value in (x, y) if value.kind == kind))
    if not kinds:
        return both.make(FIXED, const=x.const if x.const == y.const else None)
    if "rows" in kinds:
        rows = [value for value in (x, y) if value.kind == "rows"]
        if len({row.layout for row in rows}) > 1:
            return both.unknown()
        return both.coupled(rows[0])
    first = x if x.kind != "fixed" else y
    if kinds <= {"sum", "mean"}:
        return both.make(Value("mean" if kinds == {"mean"} else "sum", origin=first.origin))
    return both.make(first) if len(kinds) == 1 and x.weight == y.weight else both.aggregate()


def _loop(context: Context, body: Any, before: list[Value], carry: list[Value], after: list[Value]) -> list[Value]:
    """A body's results once what it hands on has settled."""
    for _ in range(8):
        results = _call(context, body, [*before, *carry, *after])
        joined = [_join(context, old, new) for old, new in zip(carry, results[: len(carry)], strict=True)]
        if joined == carry:
            return results
        carry = joined
    return [context.unknown()] * len(context.eqn.outvars)


def _scan(context: Context) -> list[Value]:
    num_consts, num_carry = scan_counts(context.eqn)
    consts, carry = context.values[:num_consts], context.values[num_consts : num_consts + num_carry]
    xs = []
    for value in context.values[num_consts + num_carry :]:
        if value.kind == "rows" and value.dim == 0:
            return [context.unknown()] * len(context.eqn.outvars)  # one example after the other
        xs.append(replace(value, dim=value.dim - 1, iota=None, columns=frozenset(), const=None))
    results = _loop(context, context.eqn.params["jaxpr"], consts, [replace(c, iota=None) for c in carry], xs)
    stacked = [replace(value, dim=value.dim + 1, const=None, iota=None) for value in results[num_carry:]]
    return [*results[:num_carry], *stacked]


def _while(context: Context) -> list[Value]:
    params = context.eqn.params
    cond_consts = context.values[: params["cond_nconsts"]]
    rest = context.values[params["cond_nconsts"] :]
    body_consts, carry = rest[: params["body_nconsts"]], rest[params["body_nconsts"] :]
    results = _loop(context, params["body_jaxpr"], body_consts, [replace(c, const=None, iota=None) for c in carry], [])
    condition = params["cond_jaxpr"]
    consts = [_constant(const) for const in condition.consts]
    (goes_on,) = _interpret(condition.jaxpr, [*consts, *cond_consts, *results], context.batch)
    return _conditioned(context, goes_on, results)


def _cond(context: Context) -> list[Value]:
    index, *operands = context.values
    results = _call(context, context.eqn.params["branches"][0], operands)
    for branch in context.eqn.params["branches"][1:]:
        others = _call(context, branch, operands)
        results = [_join(context, one, other) for one, other in zip(results, others, strict=True)]
    return _conditioned(context, index, results)


def _conditioned(context: Context, condition: Value, results: list[Value]) -> list[Value]:
    """Results that came about under a condition: one that the batch decides couples its examples."""
    if condition.kind == "fixed":
        return results
    origin = condition.origin or context.where
    return [
        replace(value, couplings=value.couplings | {origin}) if value.kind == "rows" else context.aggregate()
        for value in results
    ]


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
