"""Sums over devices of weights' gradients, each on its way while the gradient of its product's input is made.

A layer's backward pass makes two products of each weight: its gradient, which devices add up, and the input's, which
the layer in front waits for. Left alone, XLA of JAX 0.12 puts the weights' gradients behind all else that a layer
computes, and nothing is left to hide the last of them under. Here nobody reads an input's gradient before the sum of
the weight's has arrived. So the weight's is made first. It needs nothing that ZeRO-3 gathers: the weight arrives
meanwhile.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.mesh import SCATTERED_TOGETHER
from cjax.sharding.products.region import constrained
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.classes import Scope
from cjax.trace.jaxpr.primitives import name_of, named

# Rows of a device that an H100 multiplies by a weight of 16 bits while the weight's gradient is all-reduced in its
# host. A reduce-scatter takes half as long, and with fewer rows, too, XLA hides less of it where nothing waits.
ROWS = 4096

_FORMS = named("convert_element_type transpose")


@dataclass(frozen=True)
class Sum:
    """Of a weight's gradient: the weight's shape, and where its sum over devices goes."""

    shape: tuple[int, ...]
    placement: PartitionSpec


class WeightSums:
    """Finds products with weights, and has the gradients of their other operands wait.

    Args:
      mesh: the mesh.
      sums: of weights that one product reads, by leaf.
    """

    def __init__(self, mesh: Mesh, sums: Mapping[int, Sum]) -> None:
        self._mesh, self._sums = mesh, sums
        self._products: dict[int, tuple[int, PartitionSpec]] = {}  # by id: the weight's place, and where its sum goes

    def find(self, eqns: Sequence[Equation], scope: Scope) -> None:
        """Remembers the products, of a jaxpr's equations or a layer's, with such a weight."""
        makers = {var: eqn for eqn in eqns for var in eqn.outvars} if self._sums else {}
        for eqn in eqns if self._sums else ():
            if name_of(eqn) == "dot_general":
                found = [(place, self._placement(eqn.invars[place], makers, scope)) for place in range(2)]
                weights = [(place, spec) for place, spec in found if spec is not None]
                if len(weights) == 1:
                    self._products[id(eqn)] = weights[0]

    def _placement(self, atom: Atom, makers: Mapping[Var, Equation], scope: Scope) -> PartitionSpec | None:
        """Where the sum of an operand's gradient goes, if that is such a weight, or a form of one."""
        order = list(range(len(atom.aval.shape)))
        while not isinstance(atom, Literal) and (maker := makers.get(atom)) is not None:
            if name_of(maker) not in _FORMS:
                return None
            if name_of(maker) == "transpose":
                order = [maker.params["permutation"][d] for d in order]
            atom = maker.invars[0]
        of = None if isinstance(atom, Literal) else self._sums.get(scope.origin.get(atom, -1))
        lead = 0 if of is None else len(of.shape) - len(order)  # a layer has lost the first dims
        if of is None or lead < 0 or of.shape[lead:] != atom.aval.shape:
            return None
        return PartitionSpec(*(of.placement[lead + d] for d in order))

    def beside(self, eqn: Equation, operands: list[Any]) -> list[Any]:
        """Operands of an equation; of such a product, as they are read where one's gradient waits for the other's."""
        place, spec = self._products.get(id(eqn), (0, None))
        if spec is None or jax.sharding.get_abstract_mesh().manual_axes:
            return operands
        weight, other = operands[place], operands[1 - place]
        shared = [d for dims in eqn.params["dimension_numbers"] for d in dims[1 - place]]
        rows = other.size / math.prod(other.shape[d] for d in shared) / self._mesh.size
        parts = math.prod(self._mesh.shape[a] for entry in spec for a in axes_of_entry(entry))
        is_small = weight.size * weight.dtype.itemsize < SCATTERED_TOGETHER  # these are added up together
        # Scattered in a group, sums are reduced over the groups behind that, which the input's gradient would wait for.
        if is_small or 1 < parts < self._mesh.size or parts == 1 and rows < ROWS:
            return operands
        other, weight = _waiting(self._mesh, spec, other, weight)
        return [weight, other] if place == 0 else [other, weight]


def _waiting(mesh: Mesh, spec: PartitionSpec, other: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same arrays. The gradient of `other` waits for that of `weight`, which is placed as `spec` says."""

    def forward(other: Any, weight: Any) -> tuple[tuple[jax.Array, jax.Array], tuple[None, ...]]:
        # Nobody reads the gradient of what is given, as a batch is, and it would be made to be waited with.
        return (other.value, weight.value), (None,) * other.perturbed

    def backward(wanted: tuple[None, ...], gradients: tuple[Any, Any]) -> tuple[Any, Any]:
        if any(isinstance(each, SymbolicZero) for each in gradients):
            return None, None
        of_other, of_weight = gradients
        of_weight = constrained(of_weight, mesh, spec)
        return lax.optimization_barrier((of_other, of_weight)) if wanted else (None, of_weight)

    same = jax.custom_vjp(lambda other, weight: (other, weight))
    same.defvjp(forward, backward, symbolic_zeros=True)
    return same(other, weight)
