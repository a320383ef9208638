"""Equations that devices' own shards of the operands can be put in: they give their shards of the result, or parts."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from cjax.jax_compat.core import Atom, Equation, Literal, Params
from cjax.mesh import TENSOR
from cjax.sharding.layout.layout import Layout
from cjax.sharding.products.addition import added_to_dim
from cjax.sharding.products.lookup import is_lookup
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.primitives import name_of, named
from cjax.trace.jaxpr.view import is_by_rows

# What is the same of a device's own shards, whose shapes are others than the trace says.
OF_SHARDS = named(
    "add sub add_any neg mul div convert_element_type transpose squeeze reshape reduce_sum gather scatter-add "
    "dot_general ragged_dot_general"
)
Entries = list[tuple[str, ...]]  # for each dim of a value, the axes that split it


class OwnShards:
    """Where a layout has the values of a trace, for what devices do with their own."""

    def __init__(self, dims: Dims, layout: Layout) -> None:
        self._dims, self._layout = dims, layout

    def entries(self, var: Atom, scope: Scope) -> Entries:
        """For each dim of a value, the axes that split it."""
        if isinstance(var, Literal):
            return [()] * len(np.shape(var.val))
        spec = self._layout.spec(self._dims.of(var, scope), var.aval.shape)
        return [tuple(a for a in axes_of_entry(entry) if self._layout.axis_sizes.get(a, 1) > 1) for entry in spec]

    def of(self, scope: Scope) -> Callable[[Atom], Entries]:
        """The same of a variable of `scope`."""
        return lambda var: self.entries(var, scope)

    def is_product(self, eqn: Equation, scope: Scope) -> bool:
        """Whether this sums over a dim of which devices along the tensor axis have parts."""
        if not (is_by_rows(eqn) or name_of(eqn) == "dot_general"):
            return False
        sides = [self.entries(v, scope) for v in eqn.invars[:2]]
        contracted, _ = _numbers(eqn)
        found = [[TENSOR in entries[d] for d in dims] for entries, dims in zip(sides, contracted, strict=True)]
        return found[0] == found[1] and any(found[0])

    def in_place(self, eqn: Equation, scope: Scope) -> bool:
        """Whether devices' shards of the operands give their shards of the result, or parts of them, of which none is
        split over the tensor axis."""
        made = self.entries(eqn.outvars[0], scope)
        return not any(TENSOR in axes for axes in made) and self.are_shards(eqn, scope)

    def are_shards(self, eqn: Equation, scope: Scope) -> bool:
        """The same, of results that may be split over it."""
        out, ins = eqn.outvars[0], [self.entries(v, scope) for v in eqn.invars]
        made, params = self.entries(out, scope), eqn.params
        if not all(self._is_even(v, entries) for v, entries in zip((*eqn.invars, out), (*ins, made), strict=True)):
            return False
        match name_of(eqn):
            case "dot_general" | "ragged_dot_general":
                return self._multiplies(eqn, ins, made)
            case "reduce_sum":
                gone = params["axes"]
                return made == [x for d, x in enumerate(ins[0]) if d not in gone] and not any(ins[0][d] for d in gone)
            case "squeeze":
                return made == [x for d, x in enumerate(ins[0]) if d not in params["dimensions"]]
            case "transpose":
                return made == [ins[0][d] for d in params["permutation"]]
            case "reshape":
                return ins[0][:1] == made[:1] and not any((*ins[0][1:], *made[1:]))
            case "gather":
                return _looks_up(eqn, ins, made) and not self._by_position(eqn, scope)
            case "scatter-add":
                return _adds(eqn, ins, made)
        return all(entries in ([], made) for entries in ins)

    def has_own_rows(self, eqn: Equation, axes: tuple[str, ...], scope: Scope) -> bool:
        """Whether `axes` split what a lookup looks up, or a scatter adds to, and the rows that do, in equal parts."""
        ins, made = [self.entries(v, scope) for v in eqn.invars], self.entries(eqn.outvars[0], scope)
        placed = _adds(eqn, ins, made) if name_of(eqn) == "scatter-add" else _looks_up(eqn, ins, made)
        even = all(map(self._is_even, (*eqn.invars, *eqn.outvars), (*ins, made)))
        return placed and even and ins[0][0] == ins[1][0] == axes

    def _by_position(self, eqn: Equation, scope: Scope) -> bool:
        """Whether a lookup is in positions, which a ring has in an order of its own."""
        classes = () if isinstance(eqn.invars[0], Literal) else self._dims.of(eqn.invars[0], scope)
        return bool(classes) and classes[looked_up_dim(eqn)] in self._layout.positions

    def _multiplies(self, eqn: Equation, ins: Sequence[Entries], made: Entries) -> bool:
        contracted, batched = ([*map(set, sides)] for sides in _numbers(eqn))
        if is_by_rows(eqn):
            if any(ins[1][0]) or any(ins[2]) or any({*axes} & {*ins[0][0]} for axes in ins[1]):
                return False
            batched = [set(), {0}]
        in_order = _numbers(eqn)[1]
        both = [[entries[d] for d in dims] for entries, dims in zip(ins, in_order, strict=False)]
        bound = [one | other for one, other in zip(contracted, batched, strict=True)]
        free = [
            axes for entries, dims in zip(ins, bound, strict=False) for d, axes in enumerate(entries) if d not in dims
        ]
        summed = {a for entries, dims in zip(ins, contracted, strict=False) for d in dims for a in entries[d]}
        return both[0] == both[1] and made == [*both[0], *free] and summed <= {TENSOR}

    def _is_even(self, var: Atom, entries: Entries) -> bool:
        sizes, shape = self._layout.axis_sizes, np.shape(var.val) if isinstance(var, Literal) else var.aval.shape
        return all(n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, entries, strict=True))


def of_shard(eqn: Equation, params: Params, shard: Sequence[int]) -> Params:
    """Parameters of an equation for a device's shard of its first operand, of that shape."""
    if name_of(eqn) != "reshape":
        return params
    whole, (first, *others) = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    return params | {"new_sizes": (first * shard[0] // whole[0], *others)}


def looked_up_dim(eqn: Equation) -> int:
    """The dim along which a lookup looks up whole slices, or a scatter adds them."""
    if name_of(eqn) == "scatter-add":
        dim = added_to_dim(eqn)
        assert dim is not None
        return dim
    (dim,) = eqn.params["dimension_numbers"].collapsed_slice_dims
    return dim


def _looks_up(eqn: Equation, ins: Sequence[Entries], made: Entries) -> bool:
    """Whether devices' rows of what is looked up are gathered for those that look up, where both are split."""
    if not is_lookup(eqn):
        return False
    dim, (*places, last) = looked_up_dim(eqn), ins[1]
    found = list(places)
    beside = [axes for d, axes in enumerate(ins[0]) if d != dim]
    for at, axes in zip(eqn.params["dimension_numbers"].offset_dims, beside, strict=True):
        found.insert(at, axes)
    split = [axes for axes in places if axes]
    return made == found and not last and (not ins[0][dim] or [ins[0][dim]] == split)


def _adds(eqn: Equation, ins: Sequence[Entries], made: Entries) -> bool:
    """Whether devices add their own rows to a stretch of others, or all to all."""
    dim, (operand, places, rows) = added_to_dim(eqn), ins
    if dim is None or made != operand:
        return False
    window = eqn.params["dimension_numbers"].update_window_dims
    slices = [rows[d] for d in window] == [axes for d, axes in enumerate(operand) if d != dim]
    batched = [axes for d, axes in enumerate(rows) if d not in window]
    split = [axes for axes in batched if axes]
    return slices and batched == places[:-1] and split == [operand[dim]] * bool(operand[dim])


def _numbers(eqn: Equation) -> tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]:
    """What a product contracts and goes over in batches."""
    if name_of(eqn) == "dot_general":
        return eqn.params["dimension_numbers"]
    return eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
