"""An operation that XLA's partitioner gets wrong, on each device's own shards: split along what it does one by one.

A batch of convolutions, groups of channels, rows that are sorted or transformed: parts of such a dim need nothing of
each other. In a region that is manual over every axis a device computes its parts of them, forward and backward, and
nothing is left to partition; other dims are whole there.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as DeviceLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh, PartitionSpec

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal
from cjax.sharding.apart.faults import fault_of
from cjax.sharding.apart.lanes import Lane, lanes
from cjax.sharding.layout.layout import Layout
from cjax.sharding.products.region import in_region
from cjax.sharding.storage.storage import as_spec, axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.emit.emit import Emitter, Env, Hooks, bind
from cjax.trace.jaxpr.primitives import name_of, named
from cjax.trace.jaxpr.view import cond_of, open_bodies, while_of
from cjax.trace.reading import Trace


@dataclass(frozen=True)
class Shards:
    """How an equation is computed apart: placements of operands and results, the parameters that each device has, and
    over which axes results are added up."""

    ins: list[PartitionSpec]
    outs: list[PartitionSpec]
    params: dict[str, Any]
    sums: tuple[str, ...]


def apart(
    eqn: Equation,
    params: Mapping[str, Any],
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    sizes: Mapping[str, int],
) -> Shards:
    """How an equation is to be computed apart.

    Args:
      eqn: the equation.
      params: its parameters.
      in_specs, out_specs: where the layout has operands and results; a dim that needs all of its parts becomes whole.
      sizes: of the axes that are there to split by.
    """
    shapes = [[v.aval.shape for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
    entries: list[list[list[tuple[str, ...]]]] = [[[()] * len(shape) for shape in some] for some in shapes]
    local, used, summed = dict(params), set[str](), list[str]()
    for lane in lanes(eqn):
        axes = _axes(lane, in_specs, out_specs, used, sizes)
        used.update(axes)
        summed += axes if lane.outs == (None,) else ()
        for found, dims in zip(entries, (lane.ins, lane.outs), strict=True):
            for place, dim in enumerate(dims):
                if dim is not None:
                    found[place][dim] = axes
        if lane.param is not None:
            name, at = lane.param
            num = lane.count // math.prod(sizes[a] for a in axes)
            local[name] = num if at is None else (*local[name][:at], num, *local[name][at + 1 :])
    ins, outs = ([as_spec(of) for of in some] for some in entries)
    return Shards(ins, outs, local, tuple(summed))


def _axes(
    lane: Lane, ins: Sequence[PartitionSpec], outs: Sequence[PartitionSpec], used: set[str], sizes: Mapping[str, int]
) -> tuple[str, ...]:
    """The axes that a lane goes over: those that a dim of it is on, as far as they divide it. What is to be added up is
    split only where all operands are split already: a sum costs more than to bring an operand together."""
    found = []
    for specs, dims in ((outs, lane.outs), (ins, lane.ins)):
        for spec, dim in zip(specs, dims, strict=True):
            if dim is None:
                continue
            entry = axes_of_entry(spec[dim]) if dim < len(spec) else ()
            axes = [a for a in entry if a not in used and a in sizes]
            while axes and lane.count % math.prod(sizes[a] for a in axes):
                axes.pop()
            found.append(tuple(axes))
    if lane.outs == (None,) and len(set(found)) > 1:
        return ()
    return next((axes for axes in found if axes), ())


def evaluate_apart(eqn: Equation, ins: Sequence[jax.Array], parts: Shards, mesh: Mesh) -> list[jax.Array]:
    """The results of an equation, computed on each device's own shards.

    Args:
      eqn: the equation.
      ins: its operands.
      parts: how it is split, over axes of the mesh that are not manual already.
      mesh: the mesh.
    """

    def function(*operands: jax.Array) -> list[jax.Array]:
        if name_of(eqn) != "fft":
            return bind(eqn, operands, parts.params)
        return [row_major(y) for y in bind(eqn, [row_major(x) for x in operands], parts.params)]

    return in_region(function, ins, parts.ins, parts.outs, mesh, [parts.sums] * len(eqn.outvars), alone=True)


def row_major(x: jax.Array) -> jax.Array:
    """`x`, its last dim the one that is contiguous: XLA's transform on CPUs stops at any other layout, and XLA gives
    its operand one where what stands around a region is transposed."""
    return with_layout_constraint(x, DeviceLayout(tuple(range(x.ndim))))


def placements(atoms: Sequence[Atom], layout: Layout, dims: Dims, scope: Scope) -> list[PartitionSpec]:
    """Where the layout has these variables; literals are whole."""
    classes = [() if isinstance(v, Literal) else dims.of(v, scope) for v in atoms]
    return [layout.spec(c, v.aval.shape[: len(c)]) for c, v in zip(classes, atoms, strict=True)]


def brought_together(trace: Trace, layout: Layout) -> list[str]:
    """What is computed apart at a price: dims that are split, and are whole in such an operation."""
    found: dict[str, None] = {}

    def walk(jaxpr: Jaxpr, scope: Scope) -> None:
        for eqn in jaxpr.eqns:
            fault = fault_of(eqn)
            if fault is not None:
                ins, outs = (placements(some, layout, trace.dims, scope) for some in (eqn.invars, eqn.outvars))
                parts = apart(eqn, eqn.params, ins, outs, layout.axis_sizes)
                for var, spec, part in zip(eqn.invars, ins, parts.ins, strict=True):
                    for d, entry in enumerate(spec):
                        lost = set(axes_of_entry(entry)) - set(axes_of_entry(part[d]))
                        if lost and not isinstance(var, Literal):
                            name = trace.names.get(trace.dims.of(var, scope)[d], "a dim")
                            over = ", ".join(sorted(lost))
                            found[f"{fault.name} bring {name} together, which is split over {over}"] = None
            for body in open_bodies(eqn) if id(eqn) in scope.inner else ():
                walk(body, scope.inner[id(eqn)])

    walk(trace.closed.jaxpr, trace.dims.top)
    return list(found)


INSIDE = named("cond while")  # what `evaluate_inside` evaluates


class Inside(Hooks):
    """The hooks within an equation that stays one, a conditional or an unbounded loop."""

    def __init__(self, evaluate: Callable[[Any, list[Any], Scope], list[Any]]) -> None:
        self._evaluate = evaluate

    def equation(self, eqn: Equation, ins: list[Any], scope: Scope) -> list[Any]:
        return self._evaluate(eqn, ins, scope)


def evaluate_inside(eqn: Equation, ins: Sequence[Any], scope: Scope, hooks: Hooks) -> list[Any]:
    """The results of a conditional or an unbounded loop, whose equations are evaluated by `hooks`."""
    emitter, inner = Emitter(hooks), scope.inner.get(id(eqn), Scope())

    def function(body: ClosedJaxpr) -> Callable[..., list[Any]]:
        def run(*args: Any) -> list[Any]:
            env = Env(inner)
            env.values.update(zip(body.jaxpr.constvars, body.consts, strict=True))
            env.values.update(zip(body.jaxpr.invars, args, strict=True))
            emitter.body(body.jaxpr, env)
            return [jnp.asarray(emitter.read(env, v), v.aval.dtype) for v in body.jaxpr.outvars]

        return run

    if name_of(eqn) == "cond":
        view = cond_of(eqn)
        return lax.switch(jnp.asarray(view.which(ins), jnp.int32), list(map(function, view.branches)), *view.given(ins))
    loop = while_of(eqn)
    asks, turn, asked, consts = function(loop.condition), function(loop.closed), loop.asked(ins), loop.consts(ins)
    carries = [jnp.asarray(x) for x in loop.carries(ins)]
    return lax.while_loop(lambda c: asks(*asked, *c)[0], lambda c: turn(*consts, *c), carries)
