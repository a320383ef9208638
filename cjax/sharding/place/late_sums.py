"""Products whose results are added up before they are reduced (`cjax.sharding.layout.late`), on each device's parts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation, Params, Var
from cjax.mesh import TENSOR
from cjax.sharding.layout.late import Late, LateSums
from cjax.sharding.place.saved import saved
from cjax.sharding.products.region import in_region
from cjax.trace.dims.find import Scope
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.evaluate import equations, evaluate
from cjax.trace.jaxpr.groups import Group, variables
from cjax.trace.jaxpr.view import literal_of


def evaluate_late(
    group: Group[Late],
    ins: list[Any],
    sums: LateSums,
    scope: Scope,
    mesh: Mesh,
    given: Callable[[Equation, list[Any]], tuple[list[Any], Params]],
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
    apply = lambda eqn, read: bind(eqn, *given(eqn, read))  # noqa: E731
    if group.of.sums:
        return _added(group, ins, sums, scope, mesh, given, low, mark)

    def results(*shards: Any) -> list[jax.Array]:
        values: dict[Var, Any] = dict(zip(group.ins, shards, strict=True))
        run = lambda step, read: apply(step.of, read)  # noqa: E731
        evaluate(equations(group.eqns), values.__getitem__, values.update, lambda eqn, at: literal_of(eqn, at).val, run)
        return [values[var] for var in group.outs]

    def inside(*shards: Any) -> list[jax.Array]:
        return [y.astype(low) if low is not None and y.dtype == jnp.float32 else y for y in results(*shards)]

    outs = [(var, sums.entries(var, scope)) for var in group.outs]
    operands = [jnp.asarray(x) for x in ins]
    found = _reduced(inside, operands, [sums.entries(var, scope) for var in group.ins], [e for _, e in outs], mesh)
    wanted = jax.eval_shape(results, *operands)
    return [saved(mark(y).astype(like.dtype)) for y, like in zip(found, wanted, strict=True)]


def _added(
    group: Group[Late],
    ins: list[Any],
    sums: LateSums,
    scope: Scope,
    mesh: Mesh,
    given: Callable[[Equation, list[Any]], tuple[list[Any], Params]],
    low: Any,
    mark: Callable[[jax.Array], jax.Array],
) -> list[jax.Array]:
    """The sum of products and of what devices have whole: of the products first, which is reduced."""
    values: dict[Var, Any] = dict(zip(group.ins, ins, strict=True))
    products = [eqn for eqn in group.eqns if eqn.outvars[0] in group.of.parts]
    read = [(eqn, *given(eqn, [values[v] for v in variables(eqn)])) for eqn in products]  # rounded where they are made
    operands = [jnp.asarray(x) for _, each, _ in read for x in each]
    where = [sums.entries(v, scope) for eqn in products for v in eqn.invars]

    def inside(*shards: Any) -> list[jax.Array]:
        total = None
        for (eqn, _, params), one, other in zip(read, shards[::2], shards[1::2], strict=True):
            (part,) = bind(eqn, [one, other], params)
            part = part.astype(low) if low is not None and part.dtype == jnp.float32 else part
            total = part if total is None else total + part
        assert total is not None
        return [total]

    (first, *others) = [eqn.outvars[0] for eqn in products]
    (reduced,) = _reduced(inside, operands, where, [sums.entries(first, scope)], mesh)
    values |= {first: saved(mark(reduced))} | dict.fromkeys(others)
    apply = lambda eqn, read: bind(eqn, *given(eqn, read))  # noqa: E731
    for eqn in group.of.sums:
        one, other = (values[v] for v in variables(eqn))
        if one is not None and other is not None:
            values |= zip(eqn.outvars, apply(eqn, [one, other]), strict=True)
            continue
        # A product that was added before. What it is added to here is rounded as that sum would be.
        rest = other if one is None else one
        both = [reduced if x is None else x for x in (one, other)]
        (like,) = jax.eval_shape(functools.partial(apply, eqn), both)
        values[eqn.outvars[0]] = None if rest is None else jnp.asarray(rest).astype(like.dtype)
    return [values[var] for var in group.outs]


def _reduced(
    inside: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    where: Sequence[Sequence[tuple[str, ...]]],
    outs: Sequence[Sequence[tuple[str, ...]]],
    mesh: Mesh,
) -> list[jax.Array]:
    """Results of devices' shards, added up over the tensor axis; `where` and `outs` say which axes split which dims."""
    ins, made = ([PartitionSpec(*(axes or None for axes in each)) for each in some] for some in (where, outs))
    return in_region(inside, operands, ins, made, mesh, [(TENSOR,)] * len(made), as_is=True)
