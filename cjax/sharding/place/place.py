"""A layout applied to a trace: constraints on the tensors that matter, weights made ready for use, remat.

GSPMD fills in the rest. What is pinned: results of matmuls, convolutions and lookups, and what is handed from layer to
layer. A weight is gathered where it is used, never saved for the backward pass in that form, and its gradient is
reduced to the placement that its optimizer state has.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Atom, Equation, Literal, Params, Var
from cjax.mesh import BATCH_AXES, PIPE, SEQUENCE, on_gpus
from cjax.plan import Sequence as SequencePlan
from cjax.sharding.apart.apart import INSIDE, Inside, apart, evaluate_apart, evaluate_inside, placements, row_major
from cjax.sharding.apart.faults import holds, holds_apart, is_apart
from cjax.sharding.apart.lanes import is_looked_up, reorders
from cjax.sharding.attention.kernel import Fused, Kernel, attend_fused, fused_groups
from cjax.sharding.attention.split import attend
from cjax.sharding.attention.where import Apart
from cjax.sharding.layout.copied_rows import CopiedRows
from cjax.sharding.layout.late import Late
from cjax.sharding.layout.layout import NO_SEQUENCE, Layout
from cjax.sharding.place.arranged import arranged
from cjax.sharding.place.concatenated import concatenate, neighbours_of
from cjax.sharding.place.copies import Copies
from cjax.sharding.place.exchanged import Exchanges, Sends
from cjax.sharding.place.filled import Filled
from cjax.sharding.place.for_gpus import hands_on_rows, make_again, remade
from cjax.sharding.place.grid_products import GridProducts
from cjax.sharding.place.grouped import GroupedProducts
from cjax.sharding.place.in_turn import InTurn
from cjax.sharding.place.joint import Joint, JointProducts
from cjax.sharding.place.lookups import Lookups
from cjax.sharding.place.merged import Merged, MergedProducts
from cjax.sharding.place.on_shards import OnShards
from cjax.sharding.place.own_rows import OwnRows
from cjax.sharding.place.partial import PartialProducts
from cjax.sharding.place.running import running_sum, split_along, whole_along
from cjax.sharding.place.saved import checkpointed, gathered, has_complex, keep_sum, kept, saved, with_bias
from cjax.sharding.place.told import tell
from cjax.sharding.place.weight_sums import WeightSums
from cjax.sharding.products.lookup import in_int32, look_up_whole
from cjax.sharding.products.region import constrained, raised_on_cpu
from cjax.sharding.storage.storage import as_spec, axes_of_entry
from cjax.trace.attention.find import Attention
from cjax.trace.attention.positions import attention_groups, in_parts
from cjax.trace.dims.find import Scope
from cjax.trace.emit.emit import Hooks, bind, number
from cjax.trace.emit.precision import LOWS, MATMULS, Lowering, rounded_leaves
from cjax.trace.jaxpr.compared import compared, extreme
from cjax.trace.jaxpr.evaluate import Step, equations, evaluate
from cjax.trace.jaxpr.evenly import found_evenly
from cjax.trace.jaxpr.groups import Changed, Group
from cjax.trace.jaxpr.primitives import facts_of, name_of, named
from cjax.trace.jaxpr.view import is_by_rows
from cjax.trace.reading import Trace

# Evaluates an equation that draws random numbers for other rows than its own; None for all other equations.
DrawOnShard = Callable[[Equation, list[Any]], list[Any] | None]

PINNED = MATMULS | named("gather")


@dataclass(frozen=True)
class WeightPlacement:
    """Placements of one weight: as used, as its gradient leaves the backward pass, and as it is stored, if otherwise
    than it is used; and whether it is saved for the backward pass as it is used."""

    used: PartitionSpec
    gradient: PartitionSpec
    stored: PartitionSpec | None = None
    saved: bool = False


class Placer(Hooks):
    """The hooks that place a trace on a mesh."""

    def __init__(
        self,
        trace: Trace,
        layout: Layout,
        mesh: Mesh,
        weights: Mapping[int, WeightPlacement],
        precision: str = "float32",
        remat: str = "none",
        gathers: bool = False,
        draw: DrawOnShard | None = None,
        sequence: SequencePlan = NO_SEQUENCE,
        kernel: Kernel | None = None,
        waits: bool = True,
        unrolls: int = 0,
        sums_ahead: bool = False,
        abreast: bool = False,
        weight_sums: WeightSums | None = None,
    ) -> None:
        self._trace, self._layout, self._mesh, self._weights = trace, layout, mesh, weights
        self._lowering = Lowering(trace.closed, LOWS[precision]) if precision in LOWS else None
        self._remat, self._gathers, self._draw, self._sequence = remat, gathers, draw, sequence
        self._kernel: Kernel | None = kernel
        self.unrolls, self.sums_ahead = unrolls, sums_ahead
        exchanges = sequence.size > 1 and sequence.mode == "all_to_all"
        self.copies = Copies(trace, layout, mesh, self._lowering is not None, exchanges)
        self._products = GridProducts(trace.dims, layout, mesh, self._lowering, self.copies, waits)
        self._own_rows = OwnRows(trace.dims, layout, mesh)
        self.lookups = Lookups(trace, layout, mesh, self._lowering, self.copies, self._own_rows)
        self.filled = Filled(trace, mesh)
        self.gathered: dict[int, jax.Array] = {}  # by the first leaf of a stack that layers have gathered
        self._arranged = arranged(trace) if mesh.shape.keys() - BATCH_AXES else frozenset[Var]()
        self._grouped = GroupedProducts(trace.dims, layout, mesh, remat, self._own_rows)
        self._exchanges = Exchanges(Sends(trace.dims, layout), self.constrain, remat == "none")
        self._partial = PartialProducts(trace.dims, layout, mesh, abreast)
        self._on_shards = OnShards(
            trace, layout, mesh, self._lowering, self.copies, self._grouped, self._own_rows, self._partial.mark
        )
        self._joint = JointProducts(trace, layout, self._lowering, waits)
        self._weight_sums = weight_sums or WeightSums(mesh, {})
        self._merged = MergedProducts(mesh, self._lowering.low if self._lowering else None)
        self._has_complex = has_complex(trace.closed.jaxpr)
        self._with_bias = with_bias(trace.closed.jaxpr)
        dims = trace.dims
        self._tables = {leaf for leaf, _, _ in dims.tables}
        self._rounded = rounded_leaves(dims)
        self._compared = compared(trace.closed.jaxpr)
        self._evenly = found_evenly(trace.closed.jaxpr) if mesh.size == 1 else {}
        self._on_gpus = on_gpus(mesh)
        self._remade = remade(trace.closed.jaxpr, trace.runs) if self._on_gpus else frozenset[int]()
        self._by_rows = self._on_gpus and hands_on_rows(trace)
        self._looped = {o for m in dims.matmuls if m.looped for o in (m.lhs_origin, m.rhs_origin)}
        self._batched = {o for m in dims.matmuls if m.batched for o in (m.lhs_origin, m.rhs_origin)}

    def constrain(self, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        return constrained(value, self._mesh, spec)

    def spec_of_batch(self, var: Var, scope: Scope) -> PartitionSpec:
        """The placement of what is given; of what is arranged anew, that in which the batch is given."""
        spec = self._layout.spec(self._trace.dims.of(var, scope), var.aval.shape)
        if var not in self._arranged:
            return spec
        return as_spec(tuple(a for a in axes_of_entry(entry) if a in BATCH_AXES) for entry in spec)

    def weight(self, leaf: int, value: jax.Array) -> jax.Array:
        placement = self._weights.get(leaf)
        if placement is None:
            return value
        rounds = self._lowering is not None and leaf in self._rounded and value.dtype == "float32"
        low = self._lowering.low if self._lowering is not None and rounds else None
        lead = len(placement.used) - value.ndim  # a layer of the author's own stack has lost its first dims
        placements = placement.used, placement.gradient, placement.stored or placement.used
        used, gradient, stored = (PartitionSpec(*spec[lead:]) for spec in placements)
        if self._mesh.size == 1 and low is None:
            return self.filled.ready(leaf, value)
        # The gradient of a lookup in a split table is not made in any further parts but at the price of copies.
        # That of a loop is summed up whole: scattered at once, it would be reduced in each turn.
        whole = leaf in self._looped or (leaf in self._tables and any(used)) or self._sums_wrong(leaf, used, gradient)
        copied = self.copies.wants(leaf)
        summed = used if whole and not copied else gradient
        ready = _ready(self._mesh, stored, used, summed, gradient, low)(value)
        ready = gathered(ready, lambda value: self.constrain(value, used)) if placement.saved else ready
        if copied:
            self.copies.add(leaf, ready, used, gradient)
        elif not any(used):
            return self.filled.ready(leaf, ready, gradient, self.constrain)
        return ready

    def taken(self, value: jax.Array | InTurn) -> tuple[jax.Array, jax.Array | None]:
        if not isinstance(value, InTurn):
            return value, None
        weights = value.taken()
        if value.gather is None:
            return weights, None
        weights = gathered(weights, lambda weights: weights)
        return weights, weights

    def handed_out_stack(self, leaf: int, stack: jax.Array) -> None:
        self.gathered[leaf] = stack

    def knows(self, value: object) -> bool:
        return self.copies.has(value) or self.filled.has(value)

    def handed(self, values: list[Any]) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
        return self.filled.handed(values)

    def _sums_wrong(self, leaf: int, used: PartitionSpec, gradient: PartitionSpec) -> bool:
        """Whether XLA's partitioner would lose a part of a sum (JAX 0.10.2 and 0.12.0.1).

        It does where a product's batch dim, of experts or groups, is split, what is summed over is split over two axes
        or more, and the result is asked for with its batch dim split over one of these as well: ZeRO's share of an
        expert that a tensor axis splits already. Asked for as the operands are, and split behind that, it is right.
        """
        if leaf not in self._batched or sum(size > 1 for size in self._mesh.shape.values()) < 3:
            return False
        pairs = zip(map(axes_of_entry, used), map(axes_of_entry, gradient), strict=True)
        return any(axes and axes != wanted for axes, wanted in pairs)

    def equation(self, eqn: Equation, ins: list[Any], scope: Scope, alone: bool = True) -> list[Any]:
        """The results of an equation; `alone`: whether no other reads what it reads together with it."""
        if not eqn.outvars:
            return tell(eqn, ins, self._mesh)
        ins = list(in_int32(eqn, ins))
        in_order = self._own_rows.sorted(eqn, ins)
        if in_order is not None:
            return in_order
        drawn = self._draw(eqn, ins) if self._draw else None
        if drawn is not None:
            return drawn
        found = self.lookups.find(eqn, ins, scope, self._indexed)
        indexed = self._indexed(eqn, ins, scope) if found is None and name_of(eqn) != "gather" else None
        if indexed is not None:
            return indexed
        ins = self._exchanges.fetched(eqn, self._joint.read(eqn, ins) if alone else ins, scope)
        given, params = self._lowering.given(eqn, ins, scope) if self._lowering else (ins, eqn.params)
        is_copied = any(map(self.copies.has, ins))
        if found is None:
            found = (
                self.copies.equation(eqn, ins, scope, given, params) if is_copied else self._by_filled(eqn, ins, scope)
            )
        read = ins
        if found is not None:
            outs = [found]
        else:
            ins = self.copies.met(eqn, read, given, scope) if is_copied else given
            if id(eqn) in self._compared:
                outs = [extreme(jnp.asarray(ins[0]), tuple(params["axes"]), name_of(eqn))]
            elif id(eqn) in self._remade:
                outs = [make_again(eqn, jnp.asarray(ins[0]))]
            else:
                ins = self._weight_sums.beside(eqn, self._joint.beside(eqn, ins, scope) if alone else ins)
                outs = self._partial.marked(eqn, self._evaluate(eqn, ins, scope, params), scope)
                outs = kept(eqn, outs, self._remat)
        if id(eqn) in self._with_bias:
            outs = [keep_sum(outs[0], ins, self._remat)]
        if name_of(eqn) in PINNED or self._meets_rows(eqn, scope):
            outs = self._exchanges.sent(eqn, outs, scope)
            outs = [self._pin(var, out, scope, eqn) for var, out in zip(eqn.outvars, outs, strict=True)]
        elif eqn.outvars[0] in self._arranged:
            outs = [self.constrain(outs[0], self.spec_of_batch(eqn.outvars[0], scope))]
        if is_copied:
            self.copies.carry(eqn, read, given, params, outs, scope)
        self.filled.transposed(eqn, read, outs)
        return outs

    def _by_filled(self, eqn: Equation, ins: list[Any], scope: Scope) -> jax.Array | None:
        """The result of a product with a weight that is filled up; None for all others."""
        lowering = self._lowering
        given = (lambda some: lowering.given(eqn, some, scope)) if lowering else (lambda some: (some, eqn.params))
        return self.filled.product(eqn, ins, given)

    def _meets_rows(self, eqn: Equation, scope: Scope) -> bool:
        """Whether examples and rows that all of them make first meet in a result: in who is sent where. Otherwise XLA
        would split that by examples, and exchange it between all devices where it is multiplied."""

        def has_both(var: Atom) -> bool:
            found = () if isinstance(var, Literal) else self._trace.dims.of(var, scope)
            return self._layout.batch in found and not self._layout.rows.isdisjoint(found)

        return bool(self._layout.rows) and any(map(has_both, eqn.outvars)) and not any(map(has_both, eqn.invars))

    def _evaluate(self, eqn: Equation, ins: list[Any], scope: Scope, params: Params | None = None) -> list[Any]:
        """The results of an equation: by XLA, or without it where it would get them wrong."""
        given: Params = params or eqn.params
        if is_by_rows(eqn):
            return self._grouped.multiply(eqn, ins, given, scope)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        if all(size == 1 or axis in manual for axis, size in self._mesh.shape.items()):
            times = self._evenly.get(id(eqn))
            return look_up_whole(eqn, ins, given, times) if name_of(eqn) == "gather" else bind(eqn, ins, given)
        if name_of(eqn) in INSIDE and (holds_apart(eqn) or holds(eqn, self._is_off_grid)):
            return evaluate_inside(eqn, ins, scope, Inside(self._evaluate))
        ins = self._off_grid(eqn, ins, scope)
        axes = split_along(eqn, self._layout, self._trace.dims, scope)
        if (found := self._by_stretches(eqn, ins, axes, scope)) is not None:
            return [found]
        if facts_of(eqn).cumulates and not axes:
            return [whole_along(eqn, jnp.asarray(ins[0]), given, self._mesh)]
        if facts_of(eqn).scatter:
            # Of one element behind one of a stretch, XLA (JAX 0.10.2, 0.11.2) puts more than that where devices' parts
            # end, if it sees both at once.
            changed = lax.optimization_barrier(jnp.asarray(ins[0]))
            ins = self._in_equal_parts(eqn, [changed, *ins[1:]], scope)
        # `slogdet` has a derivative of its own, which no hook sees, and which puts rows back in order by a gather.
        is_hidden = self._may_stop() and holds(eqn, reorders)
        # Of the largest of each row XLA gathers all rows first, where tensors are split by more than those.
        ranks = name_of(eqn) == "top_k" or bool(axes)
        if not is_apart(eqn) and not holds_apart(eqn) and not is_hidden and not ranks:
            return look_up_whole(eqn, ins, given) if name_of(eqn) == "gather" else bind(eqn, ins, given)
        return self._apart(eqn, ins, scope, given)

    def _by_stretches(self, eqn: Equation, ins: list[Any], axes: tuple[str, ...], scope: Scope) -> jax.Array | None:
        """The result of a concatenation along split positions, or of a running sum along a dim that `axes` split, for
        which devices send each other a little; None for all others."""
        neighbours = neighbours_of(eqn, self._layout, self._trace.dims, scope)
        if not axes and (neighbours is None or neighbours.axis in jax.sharding.get_abstract_mesh().manual_axes):
            return None
        (out,), arrays = eqn.outvars, [jnp.asarray(x) for x in ins]
        spec = self._layout.spec(self._trace.dims.of(out, scope), out.aval.shape)
        if neighbours is None:
            return running_sum(eqn, arrays[0], axes, spec, self._mesh)
        return concatenate(eqn, arrays, neighbours, spec, self._mesh)

    def _apart(self, eqn: Equation, ins: list[Any], scope: Scope, params: Params) -> list[Any]:
        """The results of an equation on each device's own shards."""
        atoms, dims = (eqn.invars, eqn.outvars), self._trace.dims
        in_specs, out_specs = (placements(some, self._layout, dims, scope) for some in atoms)
        manual = jax.sharding.get_abstract_mesh().manual_axes
        sizes = {axis: size for axis, size in self._mesh.shape.items() if axis not in manual}
        return evaluate_apart(eqn, ins, apart(eqn, params, in_specs, out_specs, sizes), self._mesh)

    def _is_off_grid(self, eqn: Equation) -> bool:
        return self._layout.grid is not None and name_of(eqn) in MATMULS

    def _off_grid(self, eqn: Equation, ins: list[Any], scope: Scope) -> list[Any]:
        """Operands of a matmul that is left to the compiler, weights without the axis along which the grid splits them:
        with the batch on that axis too, XLA's partitioner has been seen to sum gradients over the wrong devices."""
        if not self._is_off_grid(eqn):
            return ins
        found = list(ins)
        for i, (var, value) in enumerate(zip(eqn.invars, ins, strict=True)):
            if not isinstance(var, Literal) and scope.origin.get(var) in self._layout.weights:
                found[i] = self.constrain(value, self._layout.spec(self._trace.dims.of(var, scope), value.shape))
        return found

    def _in_equal_parts(self, eqn: Equation, ins: list[Any], scope: Scope) -> list[Any]:
        """What a scatter is told to put where, with as much of it on each device: what fills up the last device's part
        would be put somewhere too (XLA of JAX 0.10.2 and 0.12.0.1)."""
        found, numbers = list(ins), eqn.params["dimension_numbers"]
        sizes = [size for size in self._mesh.shape.values() if size > 1]
        for place, others in ((1, (len(eqn.invars[1].aval.shape) - 1,)), (2, numbers.update_window_dims)):
            var = eqn.invars[place]
            shape = var.aval.shape
            dims = [d for d in range(len(shape)) if d not in others]
            if isinstance(var, Literal) or all(shape[d] % size == 0 for d in dims for size in sizes):
                continue
            spec = self.lookups.even(self._layout.spec(self._trace.dims.of(var, scope), shape), shape, dims)
            found[place] = self.constrain(jnp.asarray(ins[place]), spec)
        return found

    def _may_stop(self) -> bool:
        """Whether some axes are manual and of the others the compiler could take several: at a gather, a scatter or a
        sort it could stop the process."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        left = [axis for axis, size in self._mesh.shape.items() if size > 1 and axis not in manual]
        return bool(manual) and len(left) >= (1 if PIPE in manual else 2)

    def _indexed(self, eqn: Equation, ins: list[Any], scope: Scope) -> list[Any] | None:
        """The results of a gather, a scatter or a sort where the compiler could stop the process."""
        if not self._may_stop() or not is_looked_up(eqn):
            return None
        given = [self._lowering.raised(x, v) if self._lowering else x for x, v in zip(ins, eqn.invars, strict=True)]
        raised = [raised_on_cpu(jnp.asarray(x), self._mesh) for x in given]
        found = self._apart(eqn, raised, scope, eqn.params)
        outs = [x.astype(v.aval.dtype) for v, x in zip(eqn.outvars, found, strict=True)]
        if self._lowering is None or name_of(eqn) != "gather":
            return outs
        # In the dtype that a lookup without a pipeline has: in float32, all that is added to it would be float32 too.
        low = jnp.asarray(self._lowering.given(eqn, ins, scope)[0][0]).dtype
        return [x.astype(low) if x.dtype == jnp.float32 and low == self._lowering.low else x for x in outs]

    def groups(self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope) -> list[Group[Any]]:
        self._own_rows.find(eqns, results, scope)
        self._weight_sums.find(eqns, scope)
        groups = self._products.find(eqns, results, scope)
        if self._sequence.size > 1 or self._kernel is not None:
            found = attention_groups(self._trace, eqns, results, scope)
            apart = self._sequence.size > 1
            groups += in_parts(self._trace, found, scope) if apart else fused_groups([group.of for group in found])
        groups = [*groups, *self._on_shards.find(eqns, results, scope, groups)]
        groups = [*groups, *self._joint.find(eqns, results, scope, groups)]
        return [*groups, *self._merged.find(eqns, results, scope, groups)]

    def group(self, group: Group[Any], ins: list[Any], changed: Changed, scope: Scope) -> list[Any]:
        if isinstance(group.of, Joint):
            return self._joint.evaluate(group, ins, lambda eqn, read: self.equation(eqn, read, scope, alone=False))
        if isinstance(group.of, Merged):
            return self._merged.evaluate(group, ins, saved if self._remat == "none" else lambda part: part)
        if isinstance(group.of, Late | CopiedRows):
            found = self._on_shards.evaluate(group, ins, changed, scope)
            outs = self._one_by_one(group, ins, changed, scope) if found is None else found
        elif isinstance(group.of, Attention):
            outs = self.attended(group.of, ins, changed, scope)
        elif isinstance(group.of, Fused):
            outs = self._fused(group, ins, changed, scope)
        else:
            outs = self._products.evaluate(group, ins, scope)
        return [self._pin(var, out, scope) for var, out in zip(group.outs, outs, strict=True)]

    def attended(
        self, attention: Attention, ins: list[Any], changed: Changed, scope: Scope, in_order: bool = False
    ) -> list[Any]:
        """The result of an attention whose positions are split."""
        given, spec = self._of_attention(attention, ins, scope)
        return attend(
            attention, given, changed, mesh=self._mesh, mode=self._sequence.mode, axis=SEQUENCE, spec=spec,
            in_order=in_order, apart=self._copies_of(ins, given),
        )  # fmt: skip

    def _copies_of(self, ins: list[Any], given: list[Any]) -> list[Apart]:
        """Copies of an attention's inputs, in the dtypes in which they are given."""
        return [self.copies.apart(x, as_given.dtype) for x, as_given in zip(ins, given, strict=True)]

    def _fused(self, group: Group[Any], ins: list[Any], changed: Changed, scope: Scope) -> list[Any]:
        """The result of an attention by a kernel, or by the author's equations where the kernel doesn't take it."""
        assert self._kernel is not None
        values = dict(zip(group.ins, ins, strict=True))
        attention = group.of.attention
        read = [values[var] for var in attention.group.ins]
        given, spec = self._of_attention(attention, read, scope)
        apart = self._copies_of(read, given)
        outs = attend_fused(group.of, given, changed, mesh=self._mesh, spec=spec, kernel=self._kernel, apart=apart)
        return self._one_by_one(group, ins, changed, scope) if isinstance(outs, str) else outs

    def _one_by_one(self, group: Group[Any], ins: list[Any], changed: Changed, scope: Scope) -> list[Any]:
        """The results of a group, by its author's equations."""
        values = dict(zip(group.ins, ins, strict=True))

        def apply(step: Step[Equation, Any], read: list[Any]) -> list[Any]:
            return self.equation(step.of, read, scope)

        evaluate(equations(group.eqns), values.__getitem__, values.update, number(changed), apply)
        return [values[var] for var in group.outs]

    def _of_attention(self, attention: Attention, ins: list[Any], scope: Scope) -> tuple[list[Any], PartitionSpec]:
        """Inputs in the dtypes to compute in, and the placement of the query."""
        products = {node.var for node in (attention.query, attention.key, attention.value)}
        if (low := self._lowering) is not None:
            ins = [
                x.astype(low.low) if var in products and var.aval.dtype == "float32" else low.raised(x, var)
                for var, x in zip(attention.group.ins, ins, strict=True)
            ]
        var = attention.query.var
        return ins, self._layout.spec(self._trace.dims.of(var, scope), var.aval.shape)

    def carry(self, var: Var, value: jax.Array, scope: Scope) -> jax.Array:
        value = self._pin(var, value, scope)
        return row_major(value) if self._by_rows and value.ndim == 3 else value

    def _pin(self, var: Var, value: jax.Array, scope: Scope, eqn: Equation | None = None) -> jax.Array:
        if value.ndim == 0 or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        dims, read = self._trace.dims, eqn.invars if eqn is not None else ()
        weights = [v for v in read if isinstance(v, Var) and scope.origin.get(v) in self._layout.scores]
        scored = {c for weight in weights for c in dims.of(weight, scope)}
        spec = self._layout.spec([-1 if c in scored else c for c in dims.of(var, scope)], value.shape)
        if eqn is not None and name_of(eqn) == "gather":  # unequal parts stop XLA at its gradient
            offsets = eqn.params["dimension_numbers"].offset_dims
            spec = self.lookups.even(spec, value.shape, [d for d in range(value.ndim) if d not in offsets])
        return self.constrain(value, spec)

    def layer(self, body: Callable[..., Any]) -> Callable[..., Any]:
        # Inside a scan the loop itself keeps XLA from merging the second computation with the first.
        return checkpointed(body, self._remat, self._has_complex, prevent_cse=self.unrolls > 0)

    def block(self, body: Callable[..., Any]) -> Callable[..., Any]:
        return body if self._remat == "none" else checkpointed(body, self._remat, self._has_complex)

    @property
    def remakes_weights(self) -> bool:
        """Whether weights in use differ from weights kept, and so are made again in the backward pass."""
        return self._gathers or self._lowering is not None

    def whole(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The whole loss, where no loop over layers does it layer by layer."""
        loops = self._trace.runs or self._trace.dims.layer_carries
        if loops or not self.remakes_weights:
            return function
        return checkpointed(function, "none", self._has_complex, prevent_cse=True)


@functools.cache
def _ready(
    mesh: Mesh, stored: PartitionSpec, used: PartitionSpec, summed: PartitionSpec, gradient: PartitionSpec, low: Any
) -> Callable[[jax.Array], jax.Array]:
    """A weight as it is used, whose gradient is summed in one placement and comes back, in float32, in another: that of
    the optimizer's state."""

    def make(value: jax.Array) -> jax.Array:
        # First, which leaves half the bytes to gather; XLA would else take the rounding to where the whole is read.
        rounded = value if low is None else value.astype(low)
        if low is not None and stored != used:
            rounded = constrained(rounded, mesh, stored)
        return constrained(rounded, mesh, used)

    def forward(value: jax.Array) -> tuple[jax.Array, None]:
        return make(value), None  # not `ready(value)`: as one call it would be saved, copies and all

    def backward(_: None, gradient_: jax.Array) -> tuple[jax.Array]:
        gradient_ = gradient_ if summed == gradient else constrained(gradient_, mesh, summed)
        return (constrained(gradient_ if low is None else gradient_.astype("float32"), mesh, gradient),)

    ready = jax.custom_vjp(make)
    ready.defvjp(forward, backward)
    return ready
