"""Weights with several readers, a copy on each device: what devices add to the gradient stays theirs until its sum.

A tied table is looked up and multiplied. XLA's partitioner reduces each of both gradients where it is made, puts a
scatter on top of the other and reduces that again; and a product in a loop it reduces behind the loop, when what could
be added to it has been reduced as well. So readers of such a weight read copies of it, one for each device that has
rows of its own, on dims in front that the mesh's axes split: no device holds more than before, gradients of all readers
are added up device by device, and the copies' sum is the one reduction, or scatter, that there is.

And a small table may be large where it meets examples: T5's biases, looked up for each pair of positions, are larger
than their table by the square of the length. Such a weight's copies are carried on to there (`grown.py`), so that what
is summed over the devices is the gradient of the table.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.jax_compat.core import Equation, Literal, Params
from cjax.mesh import SEQUENCE
from cjax.sharding.layout.layout import Layout
from cjax.sharding.place.beside import Beside
from cjax.sharding.place.filled import uneven_dims
from cjax.sharding.place.grown import dims_of, grown, is_carried, meeting_dim
from cjax.sharding.products.lookup import find_own, is_lookup
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Scope
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import variable_of
from cjax.trace.reading import Trace


@dataclass(frozen=True)
class _Copied:
    """A weight as it is used, the copies of it, and where these live."""

    value: Any
    copies: jax.Array
    spec: PartitionSpec
    is_grown: bool  # carried on to where it meets examples; others have readers of their own


class Copies(Beside[_Copied]):
    """The weights of a trace that are read as copies, while it is evaluated."""

    def __init__(
        self, trace: Trace, layout: Layout, mesh: Mesh, is_low: bool = False, exchanges: bool = False
    ) -> None:  # fmt: skip
        super().__init__()
        self._dims, self._layout, self._mesh = trace.dims, layout, mesh
        multiplied = {leaf for m in trace.dims.matmuls for leaf in (m.lhs_origin, m.rhs_origin)}
        looked_up = [leaf for leaf, _, _ in trace.dims.tables]
        # Sums of products over a batch of weights are XLA's own to lose where it is not asked as `Placer.weight` does.
        batched = {leaf for m in trace.dims.matmuls if m.batched for leaf in (m.lhs_origin, m.rhs_origin)}
        self._tied = {leaf for leaf in looked_up if leaf in multiplied or looked_up.count(leaf) > 1} - batched
        rows = () if layout.batch is None else layout.axes_of.get(layout.batch, ())
        axes = [tuple(a for a in some if mesh.shape.get(a, 1) > 1) for some in (rows, (SEQUENCE,))]
        self._groups = [] if layout.grid is not None else [some for some in axes if some]
        self._tied |= self._heads(trace) - batched
        self._every = [tuple(a for some in self._groups for a in some)]
        # Where positions are split too, what is made of pairs of them is, but for attentions that exchange heads.
        is_whole = self._groups and (exchanges or not axes[1])
        self._grown = grown(trace, layout.batch) - self._tied - batched if is_whole else set[int]()
        if is_low:  # a device adds up its own rows in float32: rounded behind that, they take half the bytes to reduce
            self._tied |= set(looked_up) - self._grown - batched

    def _heads(self, trace: Trace) -> set[int]:
        """Weights of which each turn of a loop multiplies some rows of every device: a classifier's.

        XLA reduces their gradients behind the loop: in each micro-batch where these see all devices, and over all of
        them at once where ZeRO has groups. Elsewhere that is one sum as well, and what has an uneven dim is better
        filled up (`filled.py`).
        """
        found = set[int]()
        if not any(len(some) > 1 or SEQUENCE in some for some in self._groups):
            return found
        for m in self._dims.matmuls:
            split = [self._layout.axes_of.get(self._dims.class_of(dim), ()) for dim in m.out]
            if m.looped and not m.is_conv and all(some in split for some in self._groups):
                found |= {leaf for leaf in (m.lhs_origin, m.rhs_origin) if leaf is not None}
        return {leaf for leaf in found if not uneven_dims(trace.leaves[leaf].shape)}

    def wants(self, leaf: int) -> bool:
        """Whether a weight is read as copies."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        known = leaf in self._tied or leaf in self._grown
        return self._made is not None and known and bool(self._groups) and not manual

    def add(self, leaf: int, value: jax.Array, used: PartitionSpec, gradient: PartitionSpec) -> None:
        """Make copies of a weight that is ready for use, placed as `used`, their gradients' sum as `gradient`."""
        if self._made is None or any({*some} & set(axes_of_entry(e)) for some in self._groups for e in used):
            return
        groups = self._every if leaf in self._grown else self._groups  # who is carried on has one dim in front
        spec = PartitionSpec(*groups, *used)
        copies = _spread(self._mesh, tuple(groups), used, gradient)(value)
        self._made[id(value)] = _Copied(value, copies, spec, leaf in self._grown)

    def equation(self, eqn: Equation, ins: list[Any], scope: Scope, given: list[Any], params: Params) -> Any:
        """The result of an equation that reads copies; None for others.

        Args:
          eqn: the equation.
          ins: its operands.
          scope: the dims of its variables.
          given, params: operands and parameters as they are computed with.
        """
        places = [place for place, value in enumerate(ins) if self.has(value)]
        if len(places) != 1:
            return None
        (place,) = places
        of = self._of(ins[place])
        assert of is not None
        if of.is_grown:
            return self._repeated(eqn, of, given[place], scope) if name_of(eqn) == "broadcast_in_dim" else None
        if name_of(eqn) == "transpose":
            return self._transposed(eqn, of)
        if name_of(eqn) == "gather" and place == 0:
            return self._looked_up(eqn, of, ins[1], scope)
        if name_of(eqn) == "dot_general" and not isinstance(eqn.invars[1 - place], Literal):
            return self._multiplied(eqn, place, of, given, params, scope)
        return None

    def carry(
        self, eqn: Equation, ins: list[Any], given: list[Any], params: Params, outs: list[Any], scope: Scope
    ) -> None:
        """Copies of a result, where its equation reads a copy that is carried on; arguments as for `equation`."""
        place = self._carried_in(ins)
        if place is None or self._made is None or not is_carried(eqn, place):
            return
        (var,), of = eqn.outvars, self._made[id(ins[place])]
        whole = [-1 if c in self._layout.positions else c for c in self._dims.of(var, scope)]
        used = self._layout.spec(whole, var.aval.shape)
        taken = {axis for entry in used for axis in axes_of_entry(entry)}
        if self._examples(eqn, scope) or taken.intersection(*self._every):
            return
        values = [of.copies.astype(given[place].dtype) if i == place else x for i, x in enumerate(given)]
        # What is looked up often is added up in float32, as a table's rows are.
        is_wide = name_of(eqn) == "gather" and values[place].dtype in (jnp.bfloat16, jnp.float16)
        if is_wide:
            values[place] = values[place].astype(jnp.float32)

        def one(*operands: Any) -> Any:
            (found,) = bind_as_is(eqn, operands, params)
            return found

        copies = jax.vmap(one, in_axes=tuple(0 if i == place else None for i in range(len(given))))(*values)
        spec = PartitionSpec(*self._every, *used)
        placed = self._placed(copies.astype(outs[0].dtype), spec)
        self._made[id(outs[0])] = _Copied(outs[0], placed, spec, is_grown=True)

    def met(self, eqn: Equation, ins: list[Any], given: list[Any], scope: Scope) -> list[Any]:
        """Operands of an equation of which one may meet examples: each device's copy for its own. As for `equation`."""
        place = self._carried_in(ins)
        at = None if place is None else self._meeting(eqn, place, scope)
        if place is None or at is None or self._made is None:
            return given
        copies = self._made[id(ins[place])].copies.astype(given[place].dtype)
        ((some,), num) = self._groups, eqn.outvars[0].aval.shape[at]
        parts = jnp.moveaxis(copies, 0, at)
        shape = list(parts.shape)
        shape[at + 1] = num // self._size(some)
        repeated = jnp.broadcast_to(parts, shape).reshape(*shape[:at], num, *shape[at + 2 :])
        return [repeated if i == place else x for i, x in enumerate(given)]

    def apart(self, value: Any, dtype: Any) -> tuple[jax.Array, tuple[str, ...]] | None:
        """Copies of a value that are carried on, for whoever takes each device's own, and what splits their dim."""
        of = self._of(value)
        return (of.copies.astype(dtype), self._every[0]) if of is not None and of.is_grown else None

    def own(self, value: Any) -> tuple[Any, PartitionSpec]:
        """Copies of a value for who multiplies by it, and where their dims in front are; itself, where it has none."""
        of = self._of(value)
        if of is None or of.is_grown:
            return value, PartitionSpec()
        return of.copies, PartitionSpec(*of.spec[: len(self._groups)])

    def _carried_in(self, ins: list[Any]) -> int | None:
        """The one operand of an equation that has copies, if these are carried on."""
        places = [place for place, value in enumerate(ins) if self.has(value)]
        of = self._of(ins[places[0]]) if len(places) == 1 else None
        return places[0] if of is not None and of.is_grown else None

    def _examples(self, eqn: Equation, scope: Scope) -> list[int]:
        batch = self._layout.batch
        return [] if batch is None else dims_of(self._dims, eqn.outvars[0], scope, batch)

    def _meeting(self, eqn: Equation, place: int, scope: Scope) -> int | None:
        """The dim of examples of a result along which an operand is the same, if it alone is split as copies are."""
        dim, var = meeting_dim(eqn, place, self._examples(eqn, scope)), eqn.outvars[0]
        spec = self._layout.spec(self._dims.of(var, scope), var.aval.shape)
        return dim if dim is not None and self._places(spec, var.aval.shape, len(spec)) == [dim] else None

    def _repeated(self, eqn: Equation, of: _Copied, given: Any, scope: Scope) -> jax.Array | None:
        """A value repeated for all examples: each device's copy for its own."""
        at = self._meeting(eqn, 0, scope)
        if at is None:
            return None
        (some,), shape, dims = self._groups, list(eqn.params["shape"]), eqn.params["broadcast_dimensions"]
        num, shape[at] = shape[at], shape[at] // self._size(some)
        repeated = jax.vmap(lambda x: lax.broadcast_in_dim(x, shape, dims))(of.copies.astype(given.dtype))
        return jnp.moveaxis(repeated, 0, at).reshape(*shape[:at], num, *shape[at + 1 :])

    def _size(self, axes: tuple[str, ...]) -> int:
        return math.prod(self._mesh.shape[a] for a in axes)

    def _placed(self, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(self._mesh, spec))

    def _transposed(self, eqn: Equation, of: _Copied) -> jax.Array:
        assert self._made is not None
        (value,) = bind_as_is(eqn, [of.value])
        lead, order = len(self._groups), eqn.params["permutation"]
        copies = lax.transpose(of.copies, (*range(lead), *(lead + d for d in order)))
        spec = PartitionSpec(*of.spec[:lead], *(of.spec[lead + d] for d in order))
        self._made[id(value)] = _Copied(value, copies, spec, of.is_grown)
        return value

    def _looked_up(self, eqn: Equation, of: _Copied, indices: jax.Array, scope: Scope) -> jax.Array | None:
        if not is_lookup(eqn):
            return None
        if isinstance(eqn.invars[1], Literal):
            return None
        var, lead = variable_of(eqn, 1), len(self._groups)
        rows = self._layout.spec(self._dims.of(var, scope), var.aval.shape)
        split = [d for d, entry in enumerate(of.spec[lead:]) if entry]
        (dim,) = eqn.params["dimension_numbers"].collapsed_slice_dims
        if self._places(rows, var.aval.shape, len(rows) - 1) is None or split not in ([], [dim]):
            return None
        return find_own(eqn, of.copies, lead, indices, of.spec, rows, self._mesh)

    def _multiplied(
        self, eqn: Equation, place: int, of: _Copied, given: list[Any], params: Params, scope: Scope
    ) -> jax.Array | None:
        contracting, batched = eqn.params["dimension_numbers"]
        other = 1 - place
        var, x = variable_of(eqn, other), given[other]
        spec = self._layout.spec(self._dims.of(var, scope), var.aval.shape)
        at = self._places(spec, var.aval.shape, len(spec))
        bound = {*contracting[other], *batched[other]}
        if at is None or bound & set(at) or any(batched):
            return None
        free = [d for d in range(x.ndim) if d not in bound]
        before = len(eqn.invars[place].aval.shape) - len(contracting[place]) if other else 0
        behind = [before + free.index(d) for d in at]
        x = self._taken_apart(x, spec, at)

        def product(x: jax.Array, w: jax.Array) -> jax.Array:
            (found,) = bind_as_is(eqn, (w, x) if other else (x, w), params)
            return found

        for _ in self._groups:
            product = jax.vmap(product)
        return self._put_together(product(x, of.copies.astype(given[place].dtype)), behind)

    def _places(self, spec: PartitionSpec, shape: tuple[int, ...], num: int) -> list[int] | None:
        """The dims, of the first `num`, that are split as the copies are; None where some are not, or not evenly."""
        entries = [tuple(a for a in axes_of_entry(e) if self._mesh.shape[a] > 1) for e in spec]
        found = [next((d for d in range(num) if entries[d] == some), None) for some in self._groups]
        places = [d for d in found if d is not None]
        even = all(shape[d] % self._size(some) == 0 for d, some in zip(places, self._groups, strict=False))
        return places if len(places) == len(self._groups) and even else None

    def _taken_apart(self, x: jax.Array, spec: PartitionSpec, at: list[int]) -> jax.Array:
        """Each device's rows apart: a dim in front for each group of axes, which splits none of the others."""
        for index, (some, d) in enumerate(zip(self._groups, at, strict=True)):
            d, size = index + d, self._size(some)
            parts = x.reshape(*x.shape[:d], size, x.shape[d] // size, *x.shape[d + 1 :])
            x = jnp.moveaxis(parts, d, index)
        rest = [None if d in at else entry for d, entry in enumerate(spec)]
        return self._placed(x, PartitionSpec(*self._groups, *rest))

    def _put_together(self, y: jax.Array, behind: list[int]) -> jax.Array:
        for index in reversed(range(len(behind))):
            d = index + behind[index]  # of what is left once this group's own dim is gone
            parts = jnp.moveaxis(y, index, d)
            y = parts.reshape(*parts.shape[:d], parts.shape[d] * parts.shape[d + 1], *parts.shape[d + 2 :])
        return y


@functools.cache
def _spread(
    mesh: Mesh, groups: tuple[tuple[str, ...], ...], used: PartitionSpec, gradient: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    """Copies of a weight on a dim in front for each of `groups`, whose gradients are added up to one.

    Where ZeRO has parts over some of the axes, these come first: a sum over all axes that only some are to have parts
    of is one that XLA makes whole, and cuts.
    """
    scattered = {a for e in gradient for a in axes_of_entry(e)} - {a for e in used for a in axes_of_entry(e)}
    axes = [axis for some in groups for axis in some]
    sizes = [mesh.shape[axis] for axis in axes]
    first, last = ([axis for axis in axes if (axis in scattered) == wanted] for wanted in (True, False))

    def placed(value: jax.Array, lead: Sequence[Any], spec: PartitionSpec) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*lead, *spec)))

    def make(value: jax.Array) -> jax.Array:
        shape = [math.prod(mesh.shape[axis] for axis in some) for some in groups]
        return placed(jnp.broadcast_to(value, (*shape, *value.shape)), groups, used)

    def total(shares: jax.Array, dims: Sequence[int]) -> jax.Array:
        return lax.reduce(shares, jnp.zeros((), shares.dtype), lax.add, tuple(dims))  # in their own dtype

    def backward(_: None, shares: jax.Array) -> tuple[jax.Array]:
        if not first or not last:
            return (total(shares, range(len(groups))),)
        apart = placed(shares.reshape(*sizes, *shares.shape[len(groups) :]), axes, used)
        parts = total(apart, [axes.index(axis) for axis in first])
        return (total(placed(parts, last, gradient), range(len(last))),)

    spread = jax.custom_vjp(make)
    spread.defvjp(lambda value: (make(value), None), backward)
    return spread
