"""Products of one tensor with several weights, as one product, on a GPU by itself: queries, keys and values; a gate
and what it opens.

XLA merges the forward ones where they are small. The gradients of their input it leaves apart, each written to memory,
and adds them up wherever that sum is read. With their weights side by side they are one matmul's sum.

Where each has a bias, the forward products stay apart: the vendor's matmul adds a bias as it goes and writes each
result where it is read, while the results of one product would be cut, and the biases added, by a kernel between. Their
gradients are put side by side for the backward products, and summed over the rows for the biases by the same kernel.
"""

import math
from collections.abc import Callable, Sequence, Set
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
    """Products of `var`, whose last `num_dims` dims are summed over, with weights.

    Args:
      biases: what is added to each of them, if there is something for each.
    """

    var: Var
    num_dims: int
    biases: tuple[Var, ...] = ()


def merges(mesh: Mesh, rounds: bool) -> bool:
    """Whether products are put side by side here where that pays, which leaves XLA nothing of it.

    Args:
      mesh: the mesh.
      rounds: whether matmuls are of 16 bits.
    """
    return rounds and mesh.size == 1 and on_gpus(mesh)


class MergedProducts:
    """Finds and evaluates such products.

    Args:
      mesh: the mesh.
      low: the dtype that matmuls are rounded to; None for those of float32, which are left as they are.
    """

    def __init__(self, mesh: Mesh, low: np.dtype | None) -> None:
        self._low = low if merges(mesh, low is not None) else None

    def find(
        self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, others: Sequence[Group[Any]]
    ) -> list[Group[Merged]]:
        """Groups of such products; arguments as for `JointProducts.find`."""
        if self._low is None:
            return []
        taken = {id(eqn) for group in others for eqn in group.eqns}
        elsewhere = (*results, *(v for eqn in eqns if id(eqn) in taken for v in eqn.invars))
        read = {v for v in elsewhere if not isinstance(v, Literal)}
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
            sums = _sums_with_biases(products, [eqn for eqn in eqns if id(eqn) not in taken], read, scope)
            merged = Merged(var, len(summed), tuple(bias for _, bias in sums))
            group = make_group([*products, *(eqn for eqn, _ in sums)], eqns, results, merged)
            if group is not None and not waits_for_itself(group, eqns, [*others, *found]):
                found.append(group)
        return found

    def evaluate(
        self, group: Group[Merged], ins: Sequence[Any], keep: Callable[[jax.Array], jax.Array]
    ) -> list[jax.Array]:
        """The results of such a group; `keep` saves for a layer's backward pass what a bias was added to."""
        values = dict(zip(group.ins, ins, strict=True))
        x = jnp.asarray(values[group.of.var]).astype(self._low)
        rows = x.shape[: x.ndim - group.of.num_dims]
        x = x.reshape(*rows, -1)
        products = [eqn for eqn in group.eqns if name_of(eqn) == "dot_general"]
        weights = [_flat(eqn, jnp.asarray(values[variable_of(eqn, 1)]).astype(self._low)) for eqn in products]
        precision = products[0].params["precision"]
        if group.of.biases:
            biases = [jnp.asarray(values[var]).astype(self._low).reshape(-1) for var in group.of.biases]
            parts = [keep(part) for part in _with_biases(precision, x, weights, biases)]
        else:
            merged = _product(x, jnp.concatenate(weights, 1), precision)
            parts = _cut(merged, tuple(weight.shape[1] for weight in weights))
        outs = [eqn.outvars[0] for eqn in products]
        if group.of.biases:
            outs = [_only_reader(out, group.eqns).outvars[0] for out in outs]
        made = {out: part.reshape(out.aval.shape) for out, part in zip(outs, parts, strict=True)}
        return [made[var] for var in group.outs]


def _product(x: jax.Array, weight: jax.Array, precision: Any) -> jax.Array:
    """[rows..., summed] times [summed, columns], in their dtype."""
    numbers = (((x.ndim - 1,), (0,)), ((), ()))
    return lax.dot_general(x, weight, numbers, precision, preferred_element_type=x.dtype)


def _apart(precision: Any, x: jax.Array, weights: list[jax.Array], biases: list[jax.Array]) -> list[jax.Array]:
    return [_product(x, weight, precision) + bias for weight, bias in zip(weights, biases, strict=True)]


def _apart_forward(
    precision: Any, x: jax.Array, weights: list[jax.Array], biases: list[jax.Array]
) -> tuple[list[jax.Array], Any]:
    return _apart(precision, x, weights, biases), (x, weights)


def _together_backward(precision: Any, saved: Any, gradients: list[jax.Array]) -> tuple[Any, ...]:
    x, weights = saved
    rows = tuple(range(x.ndim - 1))
    sizes = tuple(weight.shape[1] for weight in weights)
    gradient = _side_by_side(gradients, sizes)
    of_x = _product(gradient, jnp.concatenate(weights, 1).T, precision)
    of_weights = lax.dot_general(x, gradient, ((rows, rows), ((), ())), precision, preferred_element_type=x.dtype)
    of_biases = jnp.sum(gradient, rows)  # in float32, and rounded once
    return of_x, _slices(of_weights, sizes), _slices(of_biases, sizes)


def _side_by_side(arrays: Sequence[jax.Array], sizes: tuple[int, ...]) -> jax.Array:
    """Arrays along the last dim. XLA's kernel that concatenates makes nothing else, so that a sum over the rows would
    read all of them again; one that adds them, filled up with zeros, makes both."""
    ends, total = np.cumsum(sizes).tolist(), jnp.zeros((), arrays[0].dtype)
    for array, end, size in zip(arrays, ends, sizes, strict=True):
        edges = [(0, 0, 0)] * (array.ndim - 1) + [(end - size, ends[-1] - end, 0)]
        total = total + lax.pad(array, jnp.zeros((), array.dtype), edges)
    return total


_with_biases = jax.custom_vjp(_apart, nondiff_argnums=(0,))
_with_biases.defvjp(_apart_forward, _together_backward)


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


def _sums_with_biases(
    products: Sequence[Equation], eqns: Sequence[Equation], read: Set[Var], scope: Scope
) -> list[tuple[Equation, Var]]:
    """Of each product the equation that adds a bias to it, and the bias; none unless all have one. What is `read` by
    others than `eqns` has to be there as it is."""
    found: list[tuple[Equation, Var]] = []
    for product in products:
        (out,) = product.outvars
        readers = [eqn for eqn in eqns if out in eqn.invars]
        if len(readers) != 1 or out in read or name_of(readers[0]) != "add":
            return []
        others = [v for v in readers[0].invars if not isinstance(v, Literal) and v is not out]
        if len(others) != 1 or others[0] not in scope.origin or not _is_bias(others[0], product):
            return []
        found.append((readers[0], others[0]))
    return found


def _is_bias(var: Var, product: Equation) -> bool:
    """Whether a variable has a number for each column of a product, and is the same for all rows."""
    shape, num_summed = product.outvars[0].aval.shape, len(product.params["dimension_numbers"][0][1])
    num_rows = len(shape) - (variable_of(product, 1).aval.ndim - num_summed)
    return var.aval.dtype == HIGH and var.aval.shape == (1,) * num_rows + shape[num_rows:]


def _only_reader(var: Var, eqns: Sequence[Equation]) -> Equation:
    (reader,) = [eqn for eqn in eqns if var in eqn.invars]
    return reader


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
