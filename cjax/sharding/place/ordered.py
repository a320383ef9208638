"""A trace placed with its positions in a ring's order: values turned where an equation asks for another order."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from cjax.jax_compat.core import Atom, Equation, Var
from cjax.mesh import SEQUENCE
from cjax.sharding.attention.random import draw_in_order
from cjax.sharding.attention.zigzag import from_zigzag, to_zigzag, zigzag
from cjax.sharding.place.order import Order, Turned
from cjax.sharding.place.place import Placer
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.attention.find import Attention
from cjax.trace.dims.find import Scope
from cjax.trace.emit.emit import Values
from cjax.trace.jaxpr.groups import Changed
from cjax.trace.jaxpr.primitives import name_of


class OrderedPlacer(Placer):
    """The hooks of a placer, for values that are held as an `Order` says.

    Args:
      order: of the values.
      others: of a `Placer`.
    """

    def __init__(self, order: Order, *others: Any) -> None:
        super().__init__(*others)
        self._order = order
        self._arranged = frozenset()  # what is given is put in the ring's order where devices have positions of it

    def given(self, leaf: int, value: jax.Array) -> jax.Array:
        """A leaf of the batch, as the trace holds it."""
        var, top = self._trace.closed.jaxpr.invars[leaf], self._trace.dims.top
        return self._turned(Turned(var, None, self._order.dim(var, top)), value, top)

    def equation(self, eqn: Equation, ins: Values, scope: Scope, alone: bool = True) -> Values:
        asked, given = self._order.asked(eqn, scope)
        pairs = zip(eqn.invars, ins, asked, strict=True)
        ins = [self._turned(Turned(atom, self._order.dim(atom, scope), dim), x, scope) for atom, x, dim in pairs]
        outs = None
        if any(dim is not None for dim in given) and self._order.is_numbered(eqn, scope):
            outs = self._numbered(eqn, ins, scope)
            given = given if outs is not None else [None] * len(given)
        outs = super().equation(eqn, ins, scope, alone) if outs is None else outs
        made = zip(eqn.outvars, given, outs, strict=True)
        return [self._turned(Turned(var, dim, self._order.dim(var, scope)), x, scope) for var, dim, x in made]

    def attended(
        self, attention: Attention, ins: list[Any], changed: Changed, scope: Scope, in_order: bool = False
    ) -> list[Any]:
        asked, given = self._order.asked_of(attention, self._mesh.shape[SEQUENCE])
        # Bounds of a mask whose numbers differ by layer are not those that the order was chosen by.
        if any((id(eqn), i) in changed for eqn, _ in attention.steps.values() for i in range(len(eqn.invars))):
            asked, given = dict.fromkeys(asked), None
        ins = [
            self._turned(Turned(var, self._order.dim(var, scope), asked[var]), x, scope)
            for var, x in zip(attention.group.ins, ins, strict=True)
        ]
        (out,) = super().attended(attention, ins, changed, scope, given is not None)
        (var,) = attention.group.outs
        return [self._turned(Turned(var, given, self._order.dim(var, scope)), out, scope)]

    def handed_out(self, own: Atom, var: Var, value: jax.Array, scope: Scope) -> jax.Array:
        return self._turned(Turned(var, self._order.dim(own, scope), self._order.dim(var, scope)), value, scope)

    def looped(self, eqn: Equation, values: Values, scope: Scope) -> Values:
        left = self._order.left(eqn, scope)
        return [self._turned(turned, value, scope) for turned, value in zip(left, values, strict=True)]

    def _numbered(self, eqn: Equation, ins: Values, scope: Scope) -> Values | None:
        """What is made of the numbers of positions, which are there in the ring's order."""
        (var,) = eqn.outvars
        dim, shape = self._order.place(var, scope), var.aval.shape
        assert dim is not None
        order = zigzag(shape[dim], self._mesh.shape[SEQUENCE])
        if name_of(eqn) == "iota":
            return [lax.broadcast_in_dim(jnp.asarray(order, var.aval.dtype), shape, [dim])]
        if self._draw is not None and self._draw(eqn, ins) is not None:
            return None
        drawn = draw_in_order(eqn, ins[0], dim, order)
        return None if drawn is None else [drawn]

    def _turned(self, turned: Turned, value: jax.Array, scope: Scope) -> jax.Array:
        for dim, is_there in ((turned.before, True), (turned.after, False)):
            if dim is not None and turned.before != turned.after:
                value = self._exchanged(turned.atom, jnp.asarray(value), dim, is_there, scope)
        return value

    def _exchanged(self, atom: Atom, value: jax.Array, dim: int, is_there: bool, scope: Scope) -> jax.Array:
        """A value with the ring's order along a dim, or without."""
        assert isinstance(atom, Var)
        spec = self._layout.spec(self._trace.dims.of(atom, scope), value.shape)
        spec = self.lookups.even(spec, value.shape, range(value.ndim))
        entries = [tuple(a for a in axes_of_entry(entry) if a != SEQUENCE) or None for entry in spec]
        entries[dim] = (SEQUENCE,)
        spec, size = PartitionSpec(*entries), self._mesh.shape[SEQUENCE]
        context = jax.sharding.get_abstract_mesh()
        axes = {a for entry in spec for a in axes_of_entry(entry)} - {*context.manual_axes}

        def exchange(x: jax.Array) -> jax.Array:
            return (from_zigzag if is_there else to_zigzag)(x, dim, SEQUENCE, size)

        return jax.shard_map(
            exchange, mesh=context if context.manual_axes else self._mesh, in_specs=spec, out_specs=spec,
            axis_names=axes, check_vma=False,
        )(value)  # fmt: skip
