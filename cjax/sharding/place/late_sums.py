"""Products whose results are added up before they are reduced (`cjax.sharding.layout.late`), on each device's parts."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import Equation, Params, Var
from cjax.mesh import TENSOR
from cjax.sharding.layout.late import Late
from cjax.sharding.layout.shards import of_shard
from cjax.sharding.place.regions import Regions
from cjax.sharding.place.saved import saved
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.evaluate import Step, equations, evaluate
from cjax.trace.jaxpr.groups import Group, variables
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import is_by_rows, literal_of

Given = Callable[[Equation, list[Any]], tuple[list[Any], Params]]
# A product of rows in groups, of operands that are given: devices' parts, on a dim in front.
Apart = Callable[[Equation, list[Any], Params], jax.Array]


def evaluate_late(group: Group[Late], ins: list[Any], regions: Regions, given: Given, apart: Apart) -> list[jax.Array]:
    """The results of such a group.

    Args:
      group: what `LateSums` has found.
      ins: what it reads.
      regions: where devices have their shards.
      given: operands, rounded, and parameters to evaluate one equation with, of whatever shards.
      apart: evaluates products of rows in groups.
    """
    return _added(group, ins, given, regions) if group.of.sums else _linear(group, ins, given, regions, apart)


def _linear(group: Group[Late], ins: list[Any], given: Given, regions: Regions, apart: Apart) -> list[jax.Array]:
    """The results of products and of what is linear in them. Products of rows in groups are kept in parts for the
    backward pass, which are as many bytes as their sum; that of others makes them again."""
    outside, own = dict(zip(group.ins, ins, strict=True)), set[Var]()
    pending, dtypes = list[Equation](), list[Any]()
    moves = [eqn for eqn in group.eqns if name_of(eqn) in ("gather", "scatter-add")]
    axes = {eqn.outvars[0]: regions.axes_of_rows(eqn) for eqn in moves}  # in a region, all are manual

    def bound(step: Step[Equation, Any], operands: list[Any]) -> list[Any]:
        eqn = step.of
        operands, params = given(
            eqn, [_of_the_first(x) if at in group.of.fed else x for x, at in zip(operands, step.reads, strict=True)]
        )
        if name_of(eqn) == "gather":
            looked_up, places = map(jnp.asarray, operands)
            return [regions.look_up(eqn, looked_up, places, axes[eqn.outvars[0]])]
        if name_of(eqn) == "scatter-add":
            return [regions.add(eqn, *map(jnp.asarray, operands), axes=axes[eqn.outvars[0]])]
        return bind(eqn, operands, of_shard(eqn, params, jnp.shape(operands[0])))

    def evaluated(outs: Sequence[Var], run: Callable[..., list[jax.Array]]) -> list[jax.Array]:
        """What `run` has of the equations that were put off."""
        eqns = [*pending]
        made = {var for eqn in eqns for var in eqn.outvars}
        read = [*dict.fromkeys(var for eqn in eqns for var in variables(eqn) if var not in made)]

        def results(*shards: Any) -> list[jax.Array]:
            values: dict[Var, Any] = dict(zip(read, shards, strict=True))
            literal = lambda eqn, at: literal_of(eqn, at).val  # noqa: E731
            evaluate(equations(eqns), values.__getitem__, values.update, literal, bound)
            dtypes[:] = [values[var].dtype for var in outs]
            return [values[var] for var in outs]

        pending.clear()
        return run(results, [outside[var] for var in read], read, outs, frozenset(own))

    for at, eqn in enumerate(group.eqns):
        # What is gathered from other rows' devices is kept, too, and not gathered again.
        gathers = name_of(eqn) == "gather" and axes[eqn.outvars[0]] and not regions.own.has(eqn)
        if not is_by_rows(eqn) and not gathers:
            pending.append(eqn)
            continue
        if gathers and eqn.invars[0] not in outside:
            later = {var for each in group.eqns[at:] for var in variables(each)}.union(group.outs)
            outs = [var for each in pending for var in each.outvars if var in later]
            outside |= zip(outs, evaluated(outs, regions.parts), strict=True)
            own.update(outs)
        operands, params = given(eqn, [outside[var] for var in variables(eqn)])
        (out,) = eqn.outvars
        outside[out] = regions.look_up_apart(eqn, operands, True) if gathers else apart(eqn, operands, params)
        own.add(out)
    found = evaluated(group.outs, regions.summed)
    return [saved(y.astype(dtype)) for y, dtype in zip(found, dtypes, strict=True)]


def _of_the_first(whole: jax.Array) -> jax.Array:
    """What every device has whole, as parts that add up to it."""
    return jnp.where(jax.lax.axis_index(TENSOR) == 0, whole, 0)


def _added(group: Group[Late], ins: list[Any], given: Given, regions: Regions) -> list[jax.Array]:
    """The sum of products and of what devices have whole: of the products first, which is reduced."""
    values: dict[Var, Any] = dict(zip(group.ins, ins, strict=True))
    products = [eqn for eqn in group.eqns if eqn.outvars[0] in group.of.parts]
    read = [(eqn, *given(eqn, [values[v] for v in variables(eqn)])) for eqn in products]  # rounded where they are made

    def total(*shards: Any) -> list[jax.Array]:
        operands = zip(shards[::2], shards[1::2], strict=True)
        parts = [bind(eqn, [*pair], params)[0] for (eqn, _, params), pair in zip(read, operands, strict=True)]
        return [functools.reduce(operator.add, parts)]

    first, *others = [eqn.outvars[0] for eqn in products]
    operands, where = [x for _, each, _ in read for x in each], [v for eqn in products for v in eqn.invars]
    (of_products,) = regions.summed(total, operands, where, [first])
    values |= {first: saved(of_products)} | dict.fromkeys(others)
    apply = lambda eqn, read: bind(eqn, *given(eqn, read))  # noqa: E731
    for eqn in group.of.sums:
        one, other = (values[v] for v in variables(eqn))
        if one is not None and other is not None:
            values |= zip(eqn.outvars, apply(eqn, [one, other]), strict=True)
            continue
        # A product that was added before. What it is added to here is rounded as that sum would be.
        rest = other if one is None else one
        both = [of_products if x is None else x for x in (one, other)]
        (like,) = jax.eval_shape(functools.partial(apply, eqn), both)
        values[eqn.outvars[0]] = None if rest is None else jnp.asarray(rest).astype(like.dtype)
    return [values[var] for var in group.outs]
