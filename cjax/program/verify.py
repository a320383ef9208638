"""A plan against the author's own computation, and no training under one that is wrong."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from cjax.plan import Pipeline, Plan, Sequence, Tensor
from cjax.planner.hardware import hardware_of
from cjax.program.batches import own_copy, place_batch, table_limits
from cjax.program.check import Check, Outcome, compare, on_host
from cjax.program.compose import compose
from cjax.program.composed import Composed
from cjax.program.keep import store_leaves
from cjax.program.lockstep import Lockstep
from cjax.program.reference import Inputs, perturbed, reference_of
from cjax.program.saving import MODEL, trees_of
from cjax.program.state import State
from cjax.program.walking import walking_of
from cjax.tree import PyTree


class MismatchError(RuntimeError):
    """A plan that computes other gradients than the author's model does on one device.

    Attributes:
      check: what is off, and by how much.
      agreed: plans that were tried instead, and agree.
    """

    def __init__(self, check: Check, agreed: tuple[str, ...], redrawn: bool = False) -> None:
        self.check, self.agreed = check, agreed
        lines = "\n".join(f"  {each}" for each in check.wrong[:5])
        more = f"\n  and {len(check.wrong) - 5} more" if len(check.wrong) > 5 else ""
        instead = "No other plan that was tried agrees either; microbatches=1 and one device are what you can trust."
        if agreed:
            instead = "These agree: " + "; ".join(f'plan="{plan}"' for plan in agreed) + "."
        report = f"{instead} Please report the plan, the model and this message to the authors of cjax."
        if redrawn:
            report = (
                "Nor does it compute the same twice: it asks for another computation each time it is traced, as with "
                "numbers of np.random, of a clock or of a counter. Under jax.jit one of these would stand for all "
                "steps; draw from `key`, def loss(model, batch, key), or from nnx.Rngs."
            )
        super().__init__(
            f"plan {check.plan!r} does not compute what this model computes on {check.reference}:\n{lines}{more}\n"
            f"Nothing was trained. {report}"
        )


class DoesNotFit(MemoryError):
    """The model is too large for the one device that it would be compared on."""


def check_plan(composed: Composed, state: State, batch: PyTree) -> Check:
    """The plan against the author's code on the first of its devices.

    Args:
      composed: of the program.
      state: of a program of this model, under any plan.
      batch: of the shapes that the program was made for.

    Raises:
      DoesNotFit: the model is too large for one device.
      ValueError: there are several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            "check compares with one device, and of several processes none has the whole batch. Check the plan on as "
            "many virtual devices of one process: cjax run --devices N script.py."
        )
    device, plan = composed.mesh.devices.flat[0], composed.plan
    inputs = _inputs(state, batch)
    trees, given = inputs[:3], inputs[3]
    held = sum(x.nbytes for x in jax.tree.leaves(trees[:1])), _bytes_on(device, state)
    _must_fit(composed, 2 * held[0] + held[1])  # before anything is compiled for it
    inputs = jax.device_put(inputs, jax.sharding.SingleDeviceSharding(device))
    reference = reference_of(composed)
    run, itemsize, size = reference.compiled(inputs)
    _must_fit(composed, size + held[1])
    theirs = reference(run, inputs)
    itemsize = min(itemsize, _BYTES.get(plan.precision, 8), _BYTES.get(plan.reduce or "", 8))
    rounded = [reference(run, (perturbed(inputs[0], itemsize), *inputs[1:]))]
    if plan.precision != "float32":  # and decisions, such as a router's, may fall otherwise in either
        alone = Plan(precision=plan.precision, microbatches=reference.num, loss=plan.loss)
        rounded.append(outcome(compose(composed.given, alone, [device]), state, trees, given))
    mine = outcome(composed, state, trees, given)
    if itemsize == 2:  # aux counts decisions, mostly, and of these rounding changes whole ones
        theirs = dataclasses.replace(theirs, aux={})
    if plan.microbatches > reference.num:  # statistics take the micro-batches in order
        theirs = dataclasses.replace(theirs, model_state=None)
    where = "one device"
    if reference.num > 1:
        where += f" in the same {reference.num} micro-batches ({reference.why})"
    params, grads = on_host(trees[0]), on_host(theirs.grads)
    scale = sum(float(np.sum(np.abs(params[name] * grad))) for name, grad in grads.items())
    return compare(str(plan), mine, theirs, rounded, itemsize, scale, where)


def _inputs(state: State, batch: PyTree) -> Inputs:
    """What the author's code is given."""
    params, frozen, model_state = trees_of(state, *MODEL).values()
    given = jax.tree.map(lambda leaf: own_copy(np.asarray(leaf)), batch)
    return params, frozen, model_state, given, jax.random.fold_in(state._key, state.step)


_BYTES = {"bfloat16": 2, "float16": 2}  # float32 leaves a model its own numbers, which may be wider


def outcome(composed: Composed, state: State, trees: tuple[PyTree, PyTree, PyTree], batch: PyTree) -> Outcome:
    """What this program computes from a state of any plan, of which `trees` are the user's own."""
    if composed.walker is not None:
        return _walked_outcome(composed, state, trees, batch)
    storage = composed.storage
    stored: Any = (state._params, state._frozen, state._model_state)
    if state._shelves is not composed.shelves:
        shelves = (storage.params, storage.frozen, storage.model_state)
        stored = [store_leaves(shelf, tree, composed.mesh) for shelf, tree in zip(shelves, trees, strict=True)]
    run, placed = Lockstep(composed).gradients(), place_batch(composed, batch, table_limits(composed.trace))
    key, step, scaling = jax.device_put((state._key, state.step, state._scaling), composed.whole)
    loss, aux, grads, model_state = run(*stored, key, step, scaling, placed)
    for _ in range(7):
        norms = [float(jax.numpy.abs(g).max()) for g in grads if g.size] if composed.scaling else []
        if np.isfinite(norms).all():
            break
        # A step would be skipped and the factor lowered; what is asked here is whether its gradients are right.
        scaling = scaling._replace(scale=scaling.scale / 16)
        loss, aux, grads, model_state = run(*stored, key, step, scaling, placed)
    return Outcome(float(loss), aux, storage.params.load(grads), storage.model_state.load(model_state))


def _walked_outcome(composed: Composed, state: State, trees: Iterable[PyTree], batch: PyTree) -> Outcome:
    """The same of a program that walks; with rows of its own, since a run's are on the way."""
    params, frozen, model_state = trees
    stored = store_leaves(composed.shelves.model_state, model_state, composed.mesh)
    small = jax.device_put((state.step, state._key, state._scaling, state._noise), composed.whole)
    walking = walking_of(composed)
    begun = walking.beside({"params": params, "frozen": frozen}, stored, small)
    placed = place_batch(composed, batch, table_limits(composed.trace))
    loss, aux, grads, new = walking.value_and_grad(begun, placed)
    for _ in range(7):
        found = [np.asarray(g) for g in jax.tree.leaves(grads) if g.size and composed.scaling is not None]
        if np.isfinite([float(np.abs(g).max()) for g in found]).all():
            break
        begun = dataclasses.replace(begun, _scaling=begun._scaling._replace(scale=begun._scaling.scale / 16))
        loss, aux, grads, new = walking.value_and_grad(begun, placed)
    return Outcome(float(loss), aux, grads, composed.shelves.model_state.load(new))


def _bytes_on(device: Any, tree: PyTree) -> int:
    leaves = [x for x in jax.tree.leaves(tree) if not jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(s.data.nbytes for x in leaves for s in x.addressable_shards if s.device == device)


def _must_fit(composed: Composed, size: int) -> None:
    device = hardware_of(list(composed.mesh.devices.flat))
    limit = device.memory * (composed.mesh.size if device.name == "cpu" else 1)  # virtual devices share one memory
    if size > limit:
        raise DoesNotFit(
            f"the model does not fit one device, where it would be compared: it needs {size / 2**30:.3g} GiB, and a "
            f"{device.name} has {limit / 2**30:.3g}. Check a smaller model of the same kind."
        )


# -- before the first step --------------------------------------------------------------------------------------------
def verify(composed: Composed, state: State, batch: PyTree) -> Check | str:
    """The check of a plan on few rows of a batch; or why there is none.

    Raises:
      MismatchError: the plan computes something else.
    """
    if jax.process_count() > 1:
        return "not verified: several processes train it, and none has the whole batch"
    try:
        check = _checked(composed, state, batch)
    except DoesNotFit as error:
        return f"not verified: {error}"
    if not check.ok:
        if not reference_of(composed).is_the_same_again(_inputs(state, batch)):
            raise MismatchError(check, (), redrawn=True)
        raise MismatchError(check, _that_agree(composed, state, batch))
    return check


def told(found: Check | str) -> str:
    """What a report says of `verify`."""
    return found if isinstance(found, str) else f"verified: {found}"


def _checked(composed: Composed, state: State, batch: PyTree) -> Check:
    few, rows = _on_few_rows(composed, batch)
    return check_plan(few, state, rows)


def _on_few_rows(composed: Composed, batch: PyTree) -> tuple[Composed, PyTree]:
    """The program for as few rows as its plan allows, two for each part: of a single one JAX makes other programs."""
    layout, rows = composed.storage.layout, next(x.shape[0] for x in jax.tree.leaves(composed.batch_shape) if x.shape)
    axes = layout.axes_of.get(composed.trace.batch_class, ()) if composed.trace.batch_class is not None else ()
    shards = math.prod(composed.mesh.shape[axis] for axis in axes)
    num = 2 * composed.plan.microbatches * shards
    if num >= rows:
        return composed, batch
    devices = list(composed.mesh.devices.flat)
    try:
        few = compose(composed.given, composed.plan, devices, composed.line.schedule if composed.line else None, num)
    except Exception:  # the author's loss may know the number of rows by heart; then all of them are compared
        return composed, batch
    return few, jax.tree.map(lambda x: x[:num] if np.ndim(x) else x, batch)


def _that_agree(composed: Composed, state: State, batch: PyTree) -> tuple[str, ...]:
    """Up to two simpler plans for the same devices that compute the right thing."""
    plan, found = dataclasses.replace(composed.plan, data=-1), []
    simpler = [
        dataclasses.replace(plan, overlap=1),
        dataclasses.replace(plan, pipeline=Pipeline()),
        dataclasses.replace(plan, tensor=Tensor(), sequence=Sequence(), rules={}),
        Plan(zero=plan.zero, precision=plan.precision),
        Plan(precision=plan.precision),
    ]
    devices = list(composed.mesh.devices.flat)
    for candidate in dict.fromkeys(simpler):
        if len(found) == 2 or candidate == plan:
            continue
        try:
            agrees = _checked(compose(composed.given, candidate, devices), state, batch).ok
        except Exception:  # refused, or broken in a way of its own: it is no advice
            continue
        if agrees:
            found.append(str(candidate))
    return tuple(found)
