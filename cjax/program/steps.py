"""The jitted functions of a program. Each is made once, from its parts."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from cjax.gradients import Evaluated, Graded, mean
from cjax.mesh import compiler_options
from cjax.optim import LossScaleState, count_skipped, measure_noise, noise_scale
from cjax.program.composed import Composed, new_state
from cjax.program.state import Arrays, State
from cjax.sharding.place.for_gpus import most_apart
from cjax.sharding.place.merged import merges
from cjax.sharding.storage.optimizer import StoredOptimizer
from cjax.sharding.storage.storage import Slot, axes_of_entry
from cjax.tree import PyTree

Metrics = dict[str, Any]


_LARGE = 2**20  # elements of a layer's gradient, from which a kernel of its own pays


def _of_passes(composed: Composed) -> dict[str, bool | int | str] | None:
    """What a program with the passes over a batch in it is compiled with."""
    plan = composed.plan
    scatters = plan.zero_stage > 0 and composed.choice.local is None
    saves_gathered = plan.remat == "block" and composed.gathers_in_turn
    leaves_apart = plan.overlap > 1 or merges(composed.mesh, plan.precision != "float32")
    return compiler_options(composed.mesh, scatters, leaves_apart, saves_gathered)


def make_init(composed: Composed) -> Any:
    """`key -> State`, each array born where it lives."""

    def init(key: jax.Array) -> State:
        return new_state(composed, *composed.init(key), key)

    return jax.jit(init, out_shardings=composed.state_shardings, compiler_options=compiler_options(composed.mesh))


def make_trees(composed: Composed) -> Any:
    """`key -> stored (params, frozen, model_state)`: what the model's own init makes, without the optimizer's state."""
    placed = composed.state_shardings
    return jax.jit(
        composed.init, out_shardings=(placed._params, placed._frozen, placed._model_state),
        compiler_options=compiler_options(composed.mesh),
    )  # fmt: skip


def make_adopt(composed: Composed) -> Any:
    """`(params, frozen, model_state, key) -> State` from stored arrays."""

    def adopt(params: Arrays, frozen: Arrays, model_state: Arrays, key: jax.Array) -> State:
        return new_state(composed, params, frozen, model_state, key)

    return jax.jit(
        adopt, out_shardings=composed.state_shardings, donate_argnums=(0, 1, 2),
        compiler_options=compiler_options(composed.mesh),
    )  # fmt: skip


def make_step(composed: Composed, lockstep: bool = False) -> Any:
    """`(state, batch) -> (state, metrics)`; gives up the state. `lockstep` as in `cjax/program/lockstep.py`."""

    def step(state: State, batch: PyTree) -> tuple[State, Metrics]:
        graded = _gradients(composed, *gradient_inputs(state), batch, lockstep)
        out, loss = graded.out, mean(graded.out.total, graded.out.weight)
        new, norm, finite = _updated(composed, state, graded.grads, loss)
        model_state = _keep_if(finite, out.model_state, state._model_state)
        metrics: Metrics = {"loss": loss, "grad_norm": norm, "skipped": 1 - finite.astype(jnp.int32)}
        if composed.scaling is not None:
            metrics["loss_scale"] = state._scaling.scale
        noise = state._noise
        if graded.part_square is not None:
            rows = next(leaf.shape[0] for leaf in jax.tree.leaves(composed.batch_shape) if leaf.shape)
            now = measure_noise(noise, graded.part_square, jnp.square(norm), graded.num_parts, rows)
            noise = _keep_if(finite, now, noise)
            metrics["noise_scale"] = noise_scale(noise)
        if composed.trace.aux_is_mean:
            metrics["aux"] = aux_means(composed, out)
        return dataclasses.replace(new, _model_state=model_state, _noise=noise), metrics

    shardings = composed.state_shardings
    return jax.jit(
        step, donate_argnums=0, in_shardings=(shardings, composed.batch_shardings), out_shardings=(shardings,
        composed.whole), compiler_options=_of_passes(composed),
    )  # fmt: skip


def gradient_inputs(state: State) -> tuple[Arrays, Arrays, Arrays, jax.Array, jax.Array, LossScaleState]:
    """What gradients read of a state, so that nobody needs an optimizer's state to ask for them."""
    return state._params, state._frozen, state._model_state, state._key, state.step, state._scaling


def make_value_and_grad(composed: Composed, lockstep: bool = False) -> Any:
    """`(*gradient_inputs(state), batch) -> (loss, aux, stored gradients, stored model_state)`."""

    def value_and_grad(
        params: Arrays,
        frozen: Arrays,
        model_state: Arrays,
        key: jax.Array,
        step: jax.Array,
        scaling: Any,
        batch: PyTree,
    ) -> tuple[jax.Array, PyTree, Arrays, Arrays]:
        graded = _gradients(composed, params, frozen, model_state, key, step, scaling, batch, lockstep)
        out = graded.out
        return mean(out.total, out.weight), aux_means(composed, out), graded.grads, out.model_state

    storage, whole = composed.storage, composed.whole
    slots = storage.params.slots
    if composed.plan.zero_stage >= 2:
        # What optimizer state is padded for, and weights are not, stays where these are.
        sizes = composed.mesh.shape
        parts = [(slot, storage.state_specs[slot.leaves[0]]) for slot in slots]
        slots = tuple(dataclasses.replace(s, spec=spec) if _divides(s, spec, sizes) else s for s, spec in parts)
    placed = dataclasses.replace(storage.params, slots=slots)
    given = composed.state_shardings
    trees = (given._params, given._frozen, given._model_state)
    return jax.jit(
        value_and_grad,
        in_shardings=(*trees, whole, whole, given._scaling, composed.batch_shardings),
        out_shardings=(whole, whole, placed.shardings(composed.mesh), given._model_state),
        compiler_options=_of_passes(composed),
    )


def _divides(slot: Slot, spec: PartitionSpec, sizes: Mapping[str, int]) -> bool:
    """Whether devices would have equal parts of a stored array."""
    pairs = zip(slot.padded, spec, strict=True)
    return all(n % math.prod(sizes[axis] for axis in axes_of_entry(entry)) == 0 for n, entry in pairs)


def make_update(composed: Composed) -> Any:
    """`(state, stored gradients, loss) -> (state, metrics)`; gives up the state."""

    def update(state: State, grads: Arrays, loss: jax.Array) -> tuple[State, Metrics]:
        new, norm, finite = _updated(composed, state, grads, loss)
        return new, {"grad_norm": norm, "skipped": 1 - finite.astype(jnp.int32)}

    return jax.jit(
        update, donate_argnums=0, out_shardings=(composed.state_shardings, composed.whole),
        compiler_options=compiler_options(composed.mesh),
    )  # fmt: skip


def _gradients(
    composed: Composed,
    params: Arrays,
    frozen: Arrays,
    model_state: Arrays,
    key: jax.Array,
    step: jax.Array,
    scaling: LossScaleState,
    batch: PyTree,
    lockstep: bool,
) -> Graded:
    key = jax.random.fold_in(key, step)
    scale = None if composed.scaling is None else scaling.scale / composed.loss_size
    more = {"lockstep": True} if lockstep else {}
    return composed.gradients(params, frozen, model_state, batch, key, scale, **more)


def _updated(composed: Composed, state: State, grads: Arrays, loss: jax.Array) -> tuple[State, jax.Array, jax.Array]:
    """The state after one update. A step that is not finite changes only its number, so that a NaN never costs the
    last good state.

    GPUs select: the select is fused into the update, which reads both anyway, while a branch would hold up the host
    until the gradients are there. CPUs branch: their compiler would repeat a part of the update for each select.
    """
    assert isinstance(composed.optimizer, StoredOptimizer)
    update, old = composed.optimizer.update, (state._params, state._opt)
    norm = optax.tree.norm(_by_layer(composed, grads))
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if composed.mesh.devices.flat[0].platform == "cpu":
        params, opt = jax.lax.cond(finite, lambda: update(grads, old[1], old[0], loss), lambda: old)
    else:
        params, opt = _keep_if(finite, update(grads, old[1], old[0], loss), old)
    follow = count_skipped if composed.scaling is None else composed.scaling.adjust
    scaling = follow(state._scaling, finite)
    return dataclasses.replace(state, step=state.step + 1, _params=params, _opt=opt, _scaling=scaling), norm, finite


def _by_layer(composed: Composed, grads: Arrays) -> list[jax.Array]:
    """Gradients for their norm: layer by layer where each was made by itself, as XLA reads a stack of them at a third
    of the memory's rate (an H100, JAX 0.11.2)."""
    most, found = most_apart(composed.plan, composed.mesh), list[jax.Array]()
    for grad, slot in zip(grads, composed.storage.params.slots, strict=True):
        apart = 1 < len(slot.leaves) <= most and grad[0].size >= _LARGE
        found += list(grad) if apart else [grad]
    return found


def _keep_if(finite: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    return jax.tree.map(lambda n, o: o if n is o else jnp.where(finite, n, o), new, old)


def aux_means(composed: Composed, out: Evaluated) -> PyTree:
    """The user's aux, each part averaged as it says."""
    return jax.tree.unflatten(composed.trace.aux_tree, [mean(total, weight) for total, weight in out.aux])
