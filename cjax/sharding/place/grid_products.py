"""The matmuls of a trace that are multiplied by `cjax.sharding.products.matmul`: found, those of one input together,
and evaluated. They are the products of a grid, and under `sequence=gather` those between which positions are split over
the tensor axis: one side gathers them, the other scatters (Korthikanti et al., 2022)."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Equation, Literal
from cjax.mesh import TENSOR
from cjax.sharding.layout.grid import Operand, spread_of
from cjax.sharding.layout.layout import Layout
from cjax.sharding.products.matmul import Move, Spread, multiply
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.emit.precision import Lowering
from cjax.trace.jaxpr.groups import Group, make_group
from cjax.trace.jaxpr.view import variable_of


class GridProducts:
    """Finds and evaluates the products of a layout's grid."""

    def __init__(self, dims: Dims, layout: Layout, mesh: Mesh, lowering: Lowering | None) -> None:
        self._dims, self._layout, self._mesh, self._lowering = dims, layout, mesh, lowering
        self._gathers = any(layout.axes_of.get(c) == (TENSOR,) for c in layout.positions)

    def find(self, eqns: Sequence[Any], results: Sequence[Any], scope: Scope) -> list[Group[dict[int, Spread]]]:
        """Groups of matmuls with a weight each, that share the activation."""
        if self._layout.grid is None and not self._gathers:
            return []
        together: dict[Any, list[tuple[Any, Spread]]] = {}
        for eqn in eqns:
            spread = self._spread(eqn, scope)
            if spread is not None:
                x = eqn.invars[1 - self._weight_of(eqn, scope)]
                key = (x, spread.gather_x, str(spread.x), str(eqn.params["precision"]))
                together.setdefault(key, []).append((eqn, spread))
        groups = []
        for found in together.values():
            members = [eqn for eqn, _ in found]
            spreads = {id(eqn): spread for eqn, spread in found}
            whole = make_group(members, eqns, results, spreads)
            alone = [make_group([eqn], eqns, results, spreads) for eqn in members] if whole is None else [whole]
            groups += [group for group in alone if group is not None]
        return groups

    def evaluate(self, group: Group[dict[int, Spread]], ins: list[Any], scope: Scope) -> list[jax.Array]:
        """The results of such a group."""
        values = dict(zip(group.ins, ins, strict=True))
        xs, ws, spreads, dtypes = [], [], [], []
        for eqn in group.eqns:
            pair, dtype = [values[variable_of(eqn, i)] for i in range(2)], eqn.outvars[0].aval.dtype
            if self._lowering is not None:
                pair, dtype = self._lowering.operands(eqn, pair)
            at, spread = self._weight_of(eqn, scope), group.of[id(eqn)]
            x, w = self._padded(pair[1 - at], pair[at], spread)
            xs.append(x)
            ws.append(w)
            spreads.append(spread)
            dtypes.append(dtype)
        # Zeros added to a contracted dim change nothing, so that all share the operand padded most.
        x = max(xs, key=lambda x: x.size)
        ws = [_as_long_as(x, w, spread) for w, spread in zip(ws, spreads, strict=True)]
        ys = multiply(x, ws, spreads, self._mesh, precision=group.eqns[0].params["precision"])
        results = {}
        for eqn, y, spread, dtype in zip(group.eqns, ys, spreads, dtypes, strict=True):
            if self._weight_of(eqn, scope) == 0:
                num_x = len(spread.x) - len(spread.contracted[0])
                y = jnp.transpose(y, (*range(num_x, y.ndim), *range(num_x)))
            (out,) = eqn.outvars
            results[out] = y[tuple(slice(size) for size in out.aval.shape)].astype(dtype)
        return [results[var] for var in group.outs]

    def _weight_of(self, eqn: Equation, scope: Scope) -> int:
        """Which operand is the weight."""
        return int(eqn.invars[1] in scope.origin) if not isinstance(eqn.invars[1], Literal) else 0

    def _spread(self, eqn: Equation, scope: Scope) -> Spread | None:
        layout = self._layout
        if eqn.primitive.name != "dot_general":
            return None
        (contracting, batched) = eqn.params["dimension_numbers"]
        literal = any(isinstance(v, Literal) for v in eqn.invars)
        leaves = [] if literal else [scope.origin[v] for v in eqn.invars if v in scope.origin]
        if any(batched) or len(leaves) != 1 or (layout.grid is not None and leaves[0] not in layout.weights):
            return None
        at = self._weight_of(eqn, scope)
        x, w = (self._operand(eqn.invars[i], scope) for i in (1 - at, at))
        contracted = tuple(contracting[1 - at]), tuple(contracting[at])
        if layout.grid is None:
            return self._between(x, w, contracted)
        return spread_of(layout.grid, layout.axes_of, layout.batch, x, w, contracted)

    def _between(self, x: Operand, w: Operand, contracted: tuple[tuple[int, ...], tuple[int, ...]]) -> Spread | None:
        """Of a matmul of 1D whose input or result has its positions split: gathered before, or scattered after."""
        place = next((d for d, c in enumerate(x.classes) if c in self._layout.positions), None)
        if place is None or place in contracted[0] or x.shape[place] % self._mesh.shape[TENSOR]:
            return None
        x_free = [d for d in range(len(x.shape)) if d not in contracted[0]]
        w_free = [d for d in range(len(w.shape)) if d not in contracted[1]]
        y = [x.spec[d] for d in x_free] + [w.spec[d] for d in w_free]
        at = x_free.index(place)
        if TENSOR in axes_of_entry(x.spec[place]) and any(TENSOR in axes_of_entry(w.spec[d]) for d in w_free):
            y[at] = tuple(a for a in axes_of_entry(x.spec[place]) if a != TENSOR) or None
            return Spread(contracted, x.spec, w.spec, PartitionSpec(*y), Move(TENSOR, place), None)
        pairs = zip(*contracted, strict=True)
        if any(TENSOR in axes_of_entry(x.spec[i]) and TENSOR in axes_of_entry(w.spec[j]) for i, j in pairs):
            y[at] = (*axes_of_entry(x.spec[place]), TENSOR)
            return Spread(contracted, x.spec, w.spec, PartitionSpec(*y), None, None, Move(TENSOR, at))
        return None

    def _operand(self, var: Any, scope: Scope) -> Operand:
        classes, shape = self._dims.of(var, scope), var.aval.shape
        return Operand(self._layout.spec(classes, shape), classes, shape)

    def _padded(self, x: jax.Array, w: jax.Array, spread: Spread) -> tuple[jax.Array, jax.Array]:
        """Operands with zeros added so that every axis divides its dim; the batch does already."""
        more_x, more_w = [0] * x.ndim, [0] * w.ndim
        pairs = dict(zip(spread.contracted[1], spread.contracted[0], strict=True))
        for d, entry in enumerate(spread.w):
            shards = self._shards(entry)
            if d in pairs:
                shards = math.lcm(shards, self._shards(spread.x[pairs[d]]))
                more_x[pairs[d]] = -x.shape[pairs[d]] % shards
            more_w[d] = -w.shape[d] % shards
        x, w = (jnp.pad(v, [(0, n) for n in more]) if any(more) else v for v, more in ((x, more_x), (w, more_w)))
        return x, w

    def _shards(self, entry: Any) -> int:
        return math.prod(self._mesh.shape[a] for a in axes_of_entry(entry))


def _as_long_as(x: jax.Array, w: jax.Array, spread: Spread) -> jax.Array:
    """`w` with zeros added to the dims that are contracted with those of `x`."""
    more = [0] * w.ndim
    for place, d in zip(*spread.contracted, strict=True):
        more[d] = x.shape[place] - w.shape[d]
    return jnp.pad(w, [(0, n) for n in more]) if any(more) else w
