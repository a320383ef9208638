"""Rows that are no example's: what experts are sent out of the whole batch, so many to each.

They are made of all examples, and no dim of theirs is the batch's. Left alone, each data-parallel device would multiply
all of them by all experts, as many times over as there are devices. Shared among them, each makes some of the rows, of
all examples, which are gathered for it; and what comes back is scattered to those who have the examples. Where examples
and rows meet, in who is sent where, it is the rows that are split: with the examples split, XLA scatters and gathers
the rows themselves, of which there are more.
"""

import math
from collections.abc import Mapping, Sequence

from cjax.jax_compat.core import Equation, Literal
from cjax.sharding.layout.one_d import find_products
from cjax.sharding.products.addition import added_to_dim
from cjax.sharding.products.lookup import is_lookup
from cjax.trace.dims.classes import Matmul, Scope
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import variable_of
from cjax.trace.reading import Trace

# So many times what is found may be looked up, or XLA has less to move: devices look in their own parts, and add up.
MOST = 2


def rows_of_all(
    trace: Trace, axis_sizes: Mapping[str, int], axes: Sequence[str], taken: set[int]
) -> tuple[list[int], list[str]]:
    """Classes of such rows that the batch's axes split, and what there is to say about others.

    Args:
      trace: the model.
      axis_sizes: mesh axes and their sizes.
      axes: those of the batch.
      taken: classes that have their place already.
    """
    dims, size = trace.dims, math.prod(axis_sizes[axis] for axis in axes)
    never = taken | {c for leaf in range(len(trace.leaves)) for c in trace.classes_of(leaf)}
    never |= {c for product in find_products(trace)[0] for c in product.weight}
    # What examples have, too, a mean over all of them may have left: positions, which are the batch's to split.
    multiplied = [{dims.class_of(d) for d in _rows(m)} for m in dims.matmuls]
    never = never.union(*(classes for classes in multiplied if trace.batch_class in classes))
    chosen: set[int] = set()
    left: dict[int, int] = {}
    for m in sorted(dims.matmuls, key=lambda m: -math.prod(dims.size[d] for d in (*m.out, *m.contracted))):
        free = {dims.class_of(d): dims.size[d] for d in _rows(m) if d not in m.contracted}
        if trace.batch_class in free or chosen & free.keys():
            continue
        found = {c: num for c, num in free.items() if c not in never and num >= size}
        even = [c for c, num in found.items() if num % size == 0]
        if even:
            chosen.add(max(even, key=lambda c: (found[c], -c)))
        else:
            left |= found
    notes = [
        f"{num} rows that all examples make together are multiplied by each of {size} data-parallel devices: "
        f"as many as {size} divides would be shared"
        for c, num in sorted(left.items())
        if c not in chosen
    ]
    return sorted(chosen), notes


def is_among_rows(eqn: Equation, trace: Trace, scope: Scope) -> bool:
    """Whether a gather finds for each of the batch's rows one of the others, as where tokens are put in order for
    experts, or back: of rows as many as there are, so that a device needs most others' for its own.

    Args:
      eqn: an equation.
      trace: the model.
      scope: of the equation's variables.
    """
    if name_of(eqn) != "gather" or not is_lookup(eqn) or any(isinstance(var, Literal) for var in eqn.invars):
        return False
    rows, indices = (trace.dims.of(variable_of(eqn, place), scope) for place in (0, 1))
    (dim,) = eqn.params["dimension_numbers"].collapsed_slice_dims
    of_batch = trace.batch_class is not None and rows[dim] == trace.batch_class and trace.batch_class in indices[:-1]
    is_small = eqn.invars[0].aval.size <= MOST * eqn.outvars[0].aval.size
    return of_batch and is_small and variable_of(eqn, 0) not in scope.origin


def adds_among_rows(eqn: Equation, trace: Trace, scope: Scope) -> bool:
    """Whether a scatter adds each of the batch's rows to one of others, as where tokens come back from experts.

    Args:
      eqn, trace, scope: as for `is_among_rows`.
    """
    dim = None if any(isinstance(var, Literal) for var in eqn.invars) else added_to_dim(eqn)
    if dim is None or trace.batch_class is None:
        return False
    rows, places = (trace.dims.of(variable_of(eqn, place), scope) for place in (0, 1))
    is_small = eqn.invars[0].aval.size <= MOST * eqn.invars[2].aval.size
    return rows[dim] == trace.batch_class and trace.batch_class in places[:-1] and is_small


def _rows(m: Matmul) -> Sequence[int]:
    """The dims of what a weight multiplies, if it depends on the batch."""
    if m.weight is None:
        return ()
    other = m.lhs if m.weight is m.rhs else m.rhs
    return other if m.of_batch[other is m.rhs] else ()
