"""Products whose results are added up before they are reduced (`cjax.sharding.layout.late`), on each device's parts."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Atom, Equation, Params, Var
from cjax.mesh import TENSOR
from cjax.sharding.layout.late import Late, LateSums
from cjax.sharding.place.saved import saved
from cjax.sharding.products.region import in_region
from cjax.trace.dims.find import Scope
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.evaluate import equations, evaluate
from cjax.trace.jaxpr.groups import Group, variables
from cjax.trace.jaxpr.view import literal_of

Parts = Callable[..., list[jax.Array]]  # devices' shards of operands to their parts of results
Given = Callable[[Equation, list[Any]], tuple[list[Any], Params]]
# Such parts, added up over the tensor axis: of operands that stand for these variables, the results that do for those.
Reduced = Callable[[Parts, Sequence[Any], Sequence[Atom], Sequence[Var]], list[jax.Array]]


def evaluate_late(
    group: Group[Late],
    ins: list[Any],
    sums: LateSums,
    scope: Scope,
    mesh: Mesh,
    given: Given,
    low: Any = None,
    mark: Callable[[jax.Array], jax.Array] = lambda reduced: reduced,
) -> list[jax.Array]:
    """The results of such a group.

    Args:
      group: what `sums` has found.
      ins: what it reads.
      scope: the dims of its variables.
      mesh: the mesh.
      given: operands, rounded, and parameters to evaluate one equation with, of whatever shards.
      low: the dtype that products are stored in, and so that sums of them are reduced in; None for their own.
      mark: says of a result that devices have parts of it, which are added up before it can be read.
    """

    def reduced(parts: Parts, operands: Sequence[Any], read: Sequence[Atom], made: Sequence[Var]) -> list[jax.Array]:
        def inside(*shards: Any) -> list[jax.Array]:
            return [y.astype(low) if low is not None and y.dtype == jnp.float32 else y for y in parts(*shards)]

        def specs(some: Sequence[Atom]) -> list[PartitionSpec]:
            return [PartitionSpec(*(axes or None for axes in sums.entries(var, scope))) for var in some]

        over = [(TENSOR,)] * len(made)
        found = in_region(inside, list(map(jnp.asarray, operands)), specs(read), specs(made), mesh, over, as_is=True)
        return list(map(mark, found))

    return (_added if group.of.sums else _linear)(group, ins, given, reduced)


def _linear(group: Group[Late], ins: list[Any], given: Given, reduced: Reduced) -> list[jax.Array]:
    """The results of products and of what is linear in them."""

    def results(*shards: Any) -> list[jax.Array]:
        values: dict[Var, Any] = dict(zip(group.ins, shards, strict=True))
        run = lambda step, read: bind(step.of, *given(step.of, read))  # noqa: E731
        evaluate(equations(group.eqns), values.__getitem__, values.update, lambda eqn, at: literal_of(eqn, at).val, run)
        return [values[var] for var in group.outs]

    found, wanted = reduced(results, ins, group.ins, group.outs), jax.eval_shape(results, *map(jnp.asarray, ins))
    return [saved(y.astype(like.dtype)) for y, like in zip(found, wanted, strict=True)]


def _added(group: Group[Late], ins: list[Any], given: Given, reduced: Reduced) -> list[jax.Array]:
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
    (of_products,) = reduced(total, operands, where, [first])
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
