"""Products whose results are added up before they are reduced (`cjax.sharding.layout.late`), on each device's parts."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation, Var
from cjax.mesh import TENSOR
from cjax.sharding.layout.late import Late, LateSums
from cjax.sharding.place.saved import saved
from cjax.sharding.products.region import in_region
from cjax.trace.dims.find import Scope
from cjax.trace.jaxpr.evaluate import equations, evaluate
from cjax.trace.jaxpr.groups import Group
from cjax.trace.jaxpr.view import literal_of


def evaluate_late(
    group: Group[Late],
    ins: list[Any],
    sums: LateSums,
    scope: Scope,
    mesh: Mesh,
    apply: Callable[[Equation, list[Any]], list[Any]],
    low: Any = None,
) -> list[jax.Array]:
    """The results of such a group.

    Args:
      group: what `sums` has found.
      ins: what it reads.
      scope: the dims of its variables.
      mesh: the mesh.
      apply: evaluates one equation, of whatever shards.
      low: the dtype that products are stored in, and so that sums of them are reduced in; None for their own.
    """

    def results(*shards: Any) -> list[jax.Array]:
        values: dict[Var, Any] = dict(zip(group.ins, shards, strict=True))
        run = lambda step, read: apply(step.of, read)  # noqa: E731
        evaluate(equations(group.eqns), values.__getitem__, values.update, lambda eqn, at: literal_of(eqn, at).val, run)
        return [values[var] for var in group.outs]

    def inside(*shards: Any) -> list[jax.Array]:
        return [y.astype(low) if low is not None and y.dtype == jnp.float32 else y for y in results(*shards)]

    def specs(some: Sequence[Var]) -> list[PartitionSpec]:
        return [PartitionSpec(*(axes or None for axes in sums.entries(var, scope))) for var in some]

    operands = [jnp.asarray(x) for x in ins]
    over = [(TENSOR,)] * len(group.outs)
    found = in_region(inside, operands, specs(group.ins), specs(group.outs), mesh, over, as_is=True)
    wanted = jax.eval_shape(results, *operands)
    return [saved(y.astype(like.dtype)) for y, like in zip(found, wanted, strict=True)]
