"""The matmuls of a trace that a layout spreads, evaluated by `cjax.sharding.products.matmul`."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from cjax.sharding.layout.layout import Layout
from cjax.sharding.layout.spreads import Spreads, weight_at
from cjax.sharding.place.copies import Copies
from cjax.sharding.place.saved import saved
from cjax.sharding.products.matmul import Spread, multiply
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.emit.precision import Lowering
from cjax.trace.jaxpr.groups import Group
from cjax.trace.jaxpr.view import variable_of


class GridProducts:
    """Finds and evaluates the products that a layout spreads."""

    def __init__(
        self, dims: Dims, layout: Layout, mesh: Mesh, lowering: Lowering | None, copies: Copies, waits: bool
    ) -> None:
        self._mesh, self._lowering, self._copies, self._waits = mesh, lowering, copies, waits
        self.find = Spreads(dims, layout).find

    def evaluate(self, group: Group[dict[int, Spread]], ins: list[Any], scope: Scope) -> list[jax.Array]:
        """The results of such a group."""
        values = dict(zip(group.ins, ins, strict=True))
        xs, ws, leads, spreads, dtypes = [], [], [], [], []
        for eqn in group.eqns:
            pair, dtype = [values[variable_of(eqn, i)] for i in range(2)], eqn.outvars[0].aval.dtype
            at, spread = weight_at(eqn, scope), group.of[id(eqn)]
            copies, lead = self._copies.own(pair[at])
            if self._lowering is not None:
                pair, dtype = self._lowering.operands(eqn, pair)
            x, w = self._padded(pair[1 - at], copies.astype(pair[at].dtype), spread, len(lead))
            xs.append(x)
            ws.append(w)
            leads.append(lead)
            spreads.append(spread)
            dtypes.append(dtype)
        # Zeros added to a contracted dim change nothing, so that all share the operand padded most; of others' the
        # results are cut.
        most = [max(sizes) for sizes in zip(*(x.shape for x in xs), strict=True)]
        x = jnp.pad(xs[0], [(0, n - size) for n, size in zip(most, xs[0].shape, strict=True)])
        ws = [_as_long_as(x, w, spread, len(lead)) for w, spread, lead in zip(ws, spreads, leads, strict=True)]
        precision = group.eqns[0].params["precision"]
        ys = multiply(x, ws, spreads, self._mesh, precision=precision, leads=leads, waits=self._hides(spreads))
        results = {}
        for eqn, y, spread, dtype in zip(group.eqns, ys, spreads, dtypes, strict=True):
            if weight_at(eqn, scope) == 0:
                num_x = len(spread.x) - len(spread.contracted[0])
                y = jnp.transpose(y, (*range(num_x, y.ndim), *range(num_x)))
            (out,) = eqn.outvars
            # A product may be a sum over pieces of its operands. Layers save this result, not each piece's.
            results[out] = saved(y[tuple(slice(size) for size in out.aval.shape)].astype(dtype))
        return [results[var] for var in group.outs]

    def _hides(self, spreads: Sequence[Spread]) -> bool:
        """Whether an input's gradient is to wait for those of the weights: these take a matmul and nothing else, no
        scatter as in a grid, and no sum over devices that have other rows, which would be waited for as well."""
        own = spreads[0].gather_x
        stay = own is not None and all(spread.gather_w is None for spread in spreads)
        axes = {axis for entry in spreads[0].x for axis in axes_of_entry(entry)}
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return self._waits and stay and own is not None and axes.difference(manual) == {own.axis}

    def _padded(self, x: jax.Array, w: jax.Array, spread: Spread, lead: int) -> tuple[jax.Array, jax.Array]:
        """Operands with zeros added so that every axis divides its dim; the batch does already, and so do the `lead`
        dims of copies in front of a weight."""
        more_x, more_w = [0] * x.ndim, [0] * w.ndim
        free = [d for d in range(x.ndim) if d not in spread.contracted[0]]
        for place, d in enumerate(free):
            # Positions come split and are gathered, or are scattered, as the result has them.
            more_x[d] = -x.shape[d] % math.lcm(self._shards(spread.x[d]), self._shards(spread.y[place]))
        pairs = dict(zip(spread.contracted[1], spread.contracted[0], strict=True))
        for d, entry in enumerate(spread.w):
            shards = self._shards(entry)
            if d in pairs:
                shards = math.lcm(shards, self._shards(spread.x[pairs[d]]))
                more_x[pairs[d]] = -x.shape[pairs[d]] % shards
            more_w[lead + d] = -w.shape[lead + d] % shards
        x, w = (jnp.pad(v, [(0, n) for n in more]) if any(more) else v for v, more in ((x, more_x), (w, more_w)))
        return x, w

    def _shards(self, entry: Any) -> int:
        return math.prod(self._mesh.shape[a] for a in axes_of_entry(entry))


def _as_long_as(x: jax.Array, w: jax.Array, spread: Spread, lead: int) -> jax.Array:
    """`w` with zeros added to the dims, behind `lead` others, that are contracted with those of `x`."""
    more = [0] * w.ndim
    for place, d in zip(*spread.contracted, strict=True):
        more[lead + d] = x.shape[place] - w.shape[lead + d]
    return jnp.pad(w, [(0, n) for n in more]) if any(more) else w
