"""Rows of which each device reads a copy of its own (`cjax.sharding.layout.copied_rows`), looked up and multiplied."""

from collections.abc import Callable
from typing import Any

import jax

from cjax.jax_compat.core import Equation, Params, Var
from cjax.sharding.layout.copied_rows import CopiedRows
from cjax.sharding.place.regions import Regions
from cjax.trace.jaxpr.groups import Group, variables


def evaluate_copied(
    group: Group[CopiedRows],
    ins: list[Any],
    regions: Regions,
    given: Callable[[Equation, list[Any]], tuple[list[Any], Params]],
    multiply: Callable[[Equation, list[Any], Params], jax.Array],
) -> list[jax.Array]:
    """The results of such a group's products.

    Args:
      group: the lookup and the products.
      ins: what they read.
      regions: where devices have their shards.
      given: operands, rounded, and parameters to evaluate one equation with.
      multiply: evaluates a product of copies, on a dim in front.
    """
    values: dict[Var, Any] = dict(zip(group.ins, ins, strict=True))
    lookup = group.of.lookup
    operands, _ = given(lookup, [values[var] for var in variables(lookup)])
    values[group.of.rows] = regions.look_up_apart(lookup, operands)
    for eqn in group.eqns:
        if eqn is not lookup:
            values[eqn.outvars[0]] = multiply(eqn, *given(eqn, [values[var] for var in variables(eqn)]))
    return [values[var] for var in group.outs]
