"""Products of one tensor with several weights, as one product, on a GPU by itself: queries, keys and values; a gate
and what it opens.

XLA merges the forward ones where they are small. The gradients of their input it leaves apart, each written to memory,
and adds them up wherever that sum is read. With their weights side by side they are one matmul's sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.mesh import on_gpus
from cjax.trace.dims.find import Scope
from cjax.trace.emit.precision import HIGH
from cjax.trace.jaxpr.groups import Group, make_group, waits_for_itself
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import variable_of


@dataclass(frozen=True)
class Merged:
    """Products of `var`, whose last `num_dims` dims are summed over, with weights."""

    var: Var
    num_dims: int


class MergedProducts:
    """Finds and evaluates such products.

    Args:
      mesh: the mesh.
      low: the dtype that matmuls are rounded to; None for those of float32, which are left as they are.
    """

    def __init__(self, mesh: Mesh, low: np.dtype | None) -> None:
        self._low = low if mesh.size == 1 and on_gpus(mesh) else None

    def find(
        self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, others: Sequence[Group[Any]]
    ) -> list[Group[Merged]]:
        """Groups of such products; arguments as for `JointProducts.find`."""
        if self._low is None:
            return []
        taken = {id(eqn) for group in others for eqn in group.eqns}
        together: dict[Any, list[Equation]] = {}
        for eqn in eqns:
            if name_of(eqn) == "dot_general" and id(eqn) not in taken and _fits(eqn, scope):
                key = variable_of(eqn, 0), eqn.params["dimension_numbers"][0][0], str(eqn.params["precision"])
                together.setdefault(key, []).append(eqn)
        found: list[Group[Merged]] = []
        for (var, summed, _), products in together.items():
            rows = var.aval.size // _summed_size(products[0])
            # Side by side, weights are copied: worth it where there are more rows to be read than columns.
            if len(products) < 2 or rows < sum(map(_columns, products)):
                continue
            group = make_group(products, eqns, results, Merged(var, len(summed)))
            if group is not None and not waits_for_itself(group, eqns, [*others, *found]):
                found.append(group)
        return found

    def evaluate(self, group: Group[Merged], ins: Sequence[Any]) -> list[jax.Array]:
        """The results of such a group."""
        values = dict(zip(group.ins, ins, strict=True))
        x = jnp.asarray(values[group.of.var]).astype(self._low)
        rows = x.shape[: x.ndim - group.of.num_dims]
        weights = [_flat(eqn, jnp.asarray(values[variable_of(eqn, 1)]).astype(self._low)) for eqn in group.eqns]
        sizes = [weight.shape[1] for weight in weights]
        numbers = (((len(rows),), (0,)), ((), ()))
        precision = group.eqns[0].params["precision"]
        merged = lax.dot_general(
            x.reshape(*rows, -1), jnp.concatenate(weights, 1), numbers, precision, preferred_element_type=self._low
        )
        parts: list[jax.Array] = _cut(merged, tuple(sizes))
        made = {
            eqn.outvars[0]: part.reshape(eqn.outvars[0].aval.shape) for eqn, part in zip(group.eqns, parts, strict=True)
        }
        return [made[var] for var in group.outs]


def _slices(merged: jax.Array, sizes: tuple[int, ...]) -> list[jax.Array]:
    """Parts along the last dim. Slices are made where they are read, so that it is the whole that a layer saves; and
    their gradients are put side by side, where those of slices would be added up as zeros for the most part."""
    ends = np.cumsum(sizes).tolist()
    return [lax.slice_in_dim(merged, end - size, end, axis=-1) for size, end in zip(sizes, ends, strict=True)]


def _cut_backward(sizes: tuple[int, ...], _: None, gradients: list[jax.Array]) -> tuple[jax.Array]:
    return (jnp.concatenate(gradients, -1),)


_cut = jax.custom_vjp(_slices, nondiff_argnums=(1,))
_cut.defvjp(lambda merged, sizes: (_slices(merged, sizes), None), _cut_backward)


def _fits(eqn: Equation, scope: Scope) -> bool:
    """Whether a product is of a tensor, over its last dims, with a weight, in the dtype that is rounded."""
    if any(isinstance(v, Literal) for v in eqn.invars):
        return False
    one, weight = variable_of(eqn, 0), variable_of(eqn, 1)
    (summed, _), batch = eqn.params["dimension_numbers"]
    last = tuple(range(one.aval.ndim - len(summed), one.aval.ndim))
    are_high = all(v.aval.dtype == HIGH for v in (one, weight, *eqn.outvars))
    return are_high and weight in scope.origin and one not in scope.origin and tuple(summed) == last and not any(batch)


def _summed_size(eqn: Equation) -> int:
    shape, (summed, _) = variable_of(eqn, 0).aval.shape, eqn.params["dimension_numbers"][0]
    return math.prod(shape[d] for d in summed)


def _columns(eqn: Equation) -> int:
    return variable_of(eqn, 1).aval.size // _summed_size(eqn)


def _flat(eqn: Equation, weight: jax.Array) -> jax.Array:
    """A weight as [what is summed over, the rest]."""
    _, summed = eqn.params["dimension_numbers"][0]
    free = [d for d in range(weight.ndim) if d not in summed]
    return weight.transpose(*summed, *free).reshape(math.prod(weight.shape[d] for d in summed), -1)
