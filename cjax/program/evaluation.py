"""Scoring a model: the loss in evaluation mode, or any function of the model, over one batch or many."""

import contextlib
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from cjax.mesh import compiler_options
from cjax.program.batches import check_indices, check_tree, global_shape, join_processes, table_sizes
from cjax.program.state import Arrays, Parts, State, batch_shardings
from cjax.sharding.layout import make_layout
from cjax.sharding.model import place_loss
from cjax.trace.combine import denominator, lift, loss_total
from cjax.trace.reading import Trace, trace_loss

PyTree = Any
Function = Callable[[Any, PyTree], PyTree]


class Evaluator:
    """Compiled evaluations of one program, by the shapes of the batch and the function."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._compiled: dict[Any, tuple[Trace, Any, dict[int, int]]] = {}

    def __call__(self, state: State, batches: Iterable[PyTree], function: Function | None) -> PyTree:
        """The exact weighted mean over `batches`; arrays that `function` returns are joined along their rows."""
        sums: list[Any] = []
        tree: Any = None
        for batch in batches:
            if function is None:
                check_tree(batch, self._parts.batch_shape)
            shape = global_shape(batch)
            trace, run, limits = self._compile(shape, function)
            check_indices(batch, limits)
            rows = next((leaf.shape[0] for leaf in jax.tree.leaves(shape) if leaf.shape), 1)
            batch = join_processes(batch, batch_shardings(self._parts.mesh, shape))
            outs = run(state._params, state._frozen, state._carried, batch, state._key)
            outs = _weighed(trace, list(outs), rows)
            sums = outs if not sums else [_join(a, b) for a, b in zip(sums, outs, strict=True)]
            tree = trace
        if tree is None:
            raise ValueError("evaluate got no batch; give at least one. (An iterator that was read before is empty.)")
        if tree.ratio is not None:
            sums[0] = (sums[0][0], denominator(tree.ratio, sums[0][1]))
        values = [_value(total, weight) for total, weight in sums]
        aux = jax.tree.unflatten(tree.aux_tree, values[1:] if tree.num_loss else values)
        if function is not None:
            return aux
        return {"loss": values[0], "aux": aux} if tree.aux_is_mean else {"loss": values[0]}

    def lower(self) -> jax.stages.Lowered:
        """The loss in evaluation mode on the batch that the program was made for, lowered."""
        parts, shape = self._parts, self._parts.state_shape
        run = self._compile(parts.batch_shape, None)[1]
        return run.lower(shape._params, shape._frozen, shape._carried, parts.with_batch(parts.batch_shape), shape._key)

    def _compile(self, shape: PyTree, function: Function | None) -> tuple[Trace, Any, dict[int, int]]:
        leaves, treedef = jax.tree.flatten(shape)
        key = (function, treedef, tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves))
        if key not in self._compiled:
            self._compiled[key] = self._make(shape, function)
        return self._compiled[key]

    def _make(self, shape: PyTree, function: Function | None) -> tuple[Trace, Any, dict[int, int]]:
        parts = self._parts
        call = None if function is None else lambda model, batch, key, train: (None, function(model, batch))
        trace = trace_loss(parts.capture, shape, 1, train=False, call=call, forms=parts.trace.forms)
        if trace.num_loss == 1:
            # A ratio (a masked mean, say) adds up exactly as total and weight; what adds up in no way counts by rows.
            with contextlib.suppress(ValueError):
                trace = lift(trace)
        sizes = dict(parts.mesh.shape)
        layout, rows = parts.storage.layout, parts.trace.batch_class
        shards = math.prod(sizes[axis] for axis in layout.axes_of.get(rows, ())) if rows is not None else 1
        # A ragged last batch: each device scores all of it, which is exact and costs one batch.
        ragged = any(leaf.shape and leaf.shape[0] % shards for leaf in jax.tree.leaves(shape))
        layout = make_layout(trace, sizes, parts.plan.rules, not ragged, parts.plan.sequence)
        loss = place_loss(trace, parts.storage, parts.plan, parts.mesh, layout)
        num_results = len(trace.closed.jaxpr.outvars) - len(trace.leaves_of("carried"))

        def run(params: Arrays, frozen: Arrays, carried: Arrays, batch: PyTree, key: jax.Array) -> list[jax.Array]:
            return loss(params, frozen, carried, jax.tree.leaves(batch), key, jnp.int32(0))[:num_results]

        shardings = parts.state_shardings
        jitted = jax.jit(
            run,
            in_shardings=(
                shardings._params,
                shardings._frozen,
                shardings._carried,
                batch_shardings(parts.mesh, shape),
                parts.whole,
            ),
            out_shardings=parts.whole,
            compiler_options=compiler_options(parts.mesh),
        )
        return trace, jitted, table_sizes(trace)


def _weighed(trace: Trace, outs: list[jax.Array], rows: int) -> list[tuple[Any, Any]]:
    """Pairs of total and weight: a plain scalar counts as many times as the batch has rows, an array not at all."""
    pairs: list[tuple[Any, Any]] = []
    results = iter(outs)
    if trace.num_loss == 2:
        total, weight = next(results), next(results)
        pairs.append((loss_total(trace.ratio, total, weight), weight))
    elif trace.num_loss == 1:
        pairs.append((next(results) * rows, rows))
    for is_mean in trace.aux_is_mean:
        value = next(results)
        if is_mean:
            pairs.append((value, next(results)))
        else:
            pairs.append((value * rows, rows) if value.ndim == 0 else ([value], None))
    return pairs


def _join(a: tuple[Any, Any], b: tuple[Any, Any]) -> tuple[Any, Any]:
    return (a[0] + b[0], None if a[1] is None else a[1] + b[1])


def _value(total: Any, weight: Any) -> Any:
    if weight is None:
        return total[0] if len(total) == 1 else jnp.concatenate(total)
    return total / weight


