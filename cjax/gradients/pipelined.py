"""Gradients of a batch whose parts go through a pipeline of stages."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.gradients.accumulated import (
    Arrays,
    Denominator,
    Evaluated,
    Graded,
    Gradients,
    Scale,
    averaged,
    cut_rows,
    square_of,
)
from cjax.gradients.reduced import Reduction, reduced
from cjax.mesh import PIPE
from cjax.pipeline.execute import Executor
from cjax.pipeline.forward import Forward
from cjax.sharding.place.staged import StagedModel
from cjax.tree import PyTree

RunForward = Callable[[Arrays, Arrays, Arrays, PyTree, jax.Array], list[jax.Array]]


def forwarded(model: StagedModel, forward: Forward, num_microbatches: int, mesh: Mesh, lockstep: bool) -> RunForward:
    """Results of a loss whose micro-batches go through a pipeline forwards: `(params, frozen, model_state, batch,
    key)`, as stored -> the results, micro-batches first. All of them see the model state as it is. `lockstep` as of
    `Executor`."""

    def inside(params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array) -> list[jax.Array]:
        rows = _rows(batch, num_microbatches)

        def given(index: Any) -> list[Any]:
            return model.given(frozen, model_state, rows(index), key, jnp.asarray(index, jnp.int32))

        outs = forward(model.shared(params), model.stacks(params, frozen), given, lockstep)
        return [_from_one(x) for x in outs]

    def run(params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array) -> list[jax.Array]:
        whole = PartitionSpec()
        return jax.shard_map(
            inside, mesh=mesh, axis_names={PIPE}, check_vma=False, out_specs=whole,
            in_specs=(model.stage_specs("params"), model.stage_specs("frozen"), whole, whole, whole),
        )(params, frozen, model_state, batch, key)  # fmt: skip

    return run


def _from_one(value: jax.Array) -> jax.Array:
    """What one stage has, and all others have zeros of, on all."""
    # A sum, as nobody else has anything: which stage it was is not known to the program that all of them run.
    summed = lax.psum(value.astype(jnp.int32) if value.dtype == bool else value, PIPE)
    return summed.astype(value.dtype)


def _rows(batch: PyTree, num_microbatches: int) -> Callable[[Any], list[Any]]:
    """The leaves of a micro-batch, by its index."""
    leaves = jax.tree.leaves(batch)
    parts = [cut_rows(leaf, num_microbatches) if leaf.ndim else leaf for leaf in leaves]

    def rows(index: Any) -> list[Any]:
        return [
            lax.dynamic_index_in_dim(x, index, keepdims=False) if leaf.ndim else x
            for x, leaf in zip(parts, leaves, strict=True)
        ]

    return rows


def _inputs(
    model: StagedModel,
    num_microbatches: int,
    params: Arrays,
    frozen: Arrays,
    model_state: Arrays,
    batch: PyTree,
    key: Any,
) -> tuple[Callable[[Any], list[Any]], Arrays]:
    """What stages read of a micro-batch, by its index; and the model state after the last."""
    rows = _rows(batch, num_microbatches)

    def advance(model_state: Arrays, index: Any) -> tuple[Arrays, Arrays]:
        # Of whichever rows, here the first: counters go by the call, and what goes by examples is the stages' own.
        return model.next_model_state(params, frozen, model_state, rows(0), key, index), model_state

    # Ahead of the pipeline, for all micro-batches: stages are at different ones in the same tick, and each needs the
    # counts that its own would have found.
    new, history = lax.scan(advance, model_state, jnp.arange(num_microbatches, dtype=jnp.int32))

    def given(index: Any) -> list[Any]:
        now = tuple(lax.dynamic_index_in_dim(x, index, keepdims=False) for x in history)
        return model.given(frozen, now, rows(index), key, jnp.asarray(index, jnp.int32))

    return given, new


def pipelined(
    model: StagedModel,
    executor: Executor,
    num_microbatches: int,
    axes: tuple[str, ...],
    reductions: Sequence[Reduction],
    mesh: Mesh,
    denominator: Denominator,
    measures: bool = False,
) -> Gradients:
    """Gradients of a batch whose parts go through a pipeline; the function takes also `lockstep`, see `Executor`.

    Args:
      model: the loss in stages, of one part or of one device's rows of it.
      executor: runs the stages.
      num_microbatches: how many parts.
      axes: mesh axes that split the batch and are manual too: their gradients are reduced once, at the end. Empty if
        the compiler deals with them, at every part.
      reductions: of each stored array's gradient, over these axes and the stages.
      mesh: the mesh.
      denominator: what the sum of all totals is divided by, from the sum of all weights.
      measures: whether the gradients of the parts that `axes` make are measured too.
    """
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    over = model.summed_over(axes)

    def inside(
        lockstep: bool, params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array, scale: Scale
    ) -> Any:
        given, new = _inputs(model, num_microbatches, params, frozen, model_state, batch, key)
        results, own, stacks, states = executor(
            model.shared(params), model.stacks(params, frozen), given, scale, lockstep
        )
        # Results are the last stage's, gradients of what all stages have are each one's share: zeros elsewhere, so that
        # a sum is right for both.
        totals = lax.psum(results, (*axes, PIPE))
        new = model.with_states(new, lax.psum(states, PIPE))
        grads = model.stored_gradients(own, stacks)
        # A dim that tells the devices' sums apart.
        return totals, new, tuple(g[None] if some else g for g, some in zip(grads, over, strict=True))

    def gradients(
        params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array, scale: Scale,
        lockstep: bool = False,
    ) -> Graded:  # fmt: skip
        whole = PartitionSpec()
        batch_specs = jax.tree.map(lambda leaf: PartitionSpec(axes or None) if leaf.ndim else whole, batch)
        grad_specs = (
            PartitionSpec(*([some] if some else []), *([PIPE] if is_stack else []))
            for some, is_stack in zip(over, model.in_stacks, strict=True)
        )
        run = jax.shard_map(
            functools.partial(inside, lockstep), mesh=mesh, axis_names={*axes, PIPE}, check_vma=False,
            in_specs=(model.stage_specs("params"), model.stage_specs("frozen"), whole, batch_specs, whole, whole),
            out_specs=(whole, whole, tuple(grad_specs)),
        )  # fmt: skip
        (total, weight, aux), new, grads = run(params, frozen, model_state, batch, key, scale)
        square = None
        if measures:
            # Each of the batch's shards apart; the stages' shares of what they all have belong together.
            own = (
                g if is_stack else g.reshape(num_shards, -1, *g.shape[1:]).sum(1)
                for g, is_stack in zip(grads, model.in_stacks, strict=True)
            )
            square = square_of(tuple(own))
        grads = reduced(grads, reductions, over, mesh)
        sums = Evaluated(total, weight, aux, new)
        return averaged(sums, grads, num_microbatches * num_shards, denominator, scale, (square, num_shards))

    return gradients
