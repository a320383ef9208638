"""An optax transformation on stored arrays, though it sees the user's own tree: one leaf per layer, logical shapes.

Its `init` and `update` are traced once on the user's tree; the traces are then evaluated on stacks of layers
(`cjax.trace.layers.vectorize`), where each layer keeps its own norms, ratios and factors.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.jax_compat.core import ClosedJaxpr, make_jaxpr
from cjax.sharding.storage.storage import StageRows, Storage, make_storage, stackable
from cjax.trace.dims.find import Dims, find_dims
from cjax.trace.dims.refine import refine
from cjax.trace.dims.refine_rules import Form, expand, whole
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.layers.vectorize import vectorize
from cjax.tree import PyTree, leaf_names

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True)
class StoredOptimizer:
    """An optimizer whose parameters and state are stored arrays.

    `init(params) -> state` and `update(grads, state, params, loss) -> (params, state)` take and return stored arrays;
    `storage` maps the state to what `optimizer.init` would have returned. `reads_loss`: whether an update depends on
    it, as that of `optax.contrib.reduce_on_plateau` does.
    """

    storage: Storage
    init: Callable[[Arrays], Arrays]
    update: Callable[[Arrays, Arrays, Arrays, jax.Array], tuple[Arrays, Arrays]]
    reads_loss: bool


@dataclass(frozen=True)
class TracedOptimizer:
    """An optimizer traced on the user's own tree, and where its state lives.

    Attributes:
      init: leaves of the parameters -> leaves of the state.
      update: leaves of (gradients, state, parameters), and the loss -> leaves of (parameters, state), and what `more`
        made.
      storage: of the state.
      owners: for each leaf of the state, (what it is, the parameter that it belongs to), or None.
      local: for each slot of the parameters, where the optimizer's part of one leaf of it lives.
      reads_loss: whether an update depends on the loss.

    Both traces are flat, and of leaves in the forms that slots have.
    """

    init: ClosedJaxpr
    update: ClosedJaxpr
    storage: Storage
    owners: tuple[tuple[str, int] | None, ...]
    local: tuple[PartitionSpec, ...]
    reads_loss: bool


def trace_optimizer(
    optimizer: optax.GradientTransformation,
    params_shape: PyTree,
    params: Storage,
    spec_of: Callable[[int], PartitionSpec],
    mesh: Mesh,
    more: Callable[[PyTree], tuple[jax.Array, ...]] = lambda grads: (),
    across_labels: bool = False,
) -> TracedOptimizer:
    """Trace an optimizer and decide where its state lives.

    Args:
      optimizer: any optax transformation.
      params_shape: the user's tree of parameters, as ShapeDtypeStructs.
      params: how they are stored.
      spec_of: placement of the optimizer's part of a parameter, by its index: like the parameter, and over the data
        axis under ZeRO.
      mesh: the mesh.
      more: numbers that an update gives besides, of the gradients.
      across_labels: whether state is stacked too that layers have under names of their own, as those that
        `optax.multi_transform` labels by layer do: an update layer by layer needs it, one of all at once does not.

    Raises:
      TypeError: `optimizer` is something else.
    """
    _check_kind(optimizer)
    with jax.numpy_dtype_promotion("standard"):  # optax adds integers to floats, as `strict` does not allow
        first, state_shape = make_jaxpr(optimizer.init, return_shape=True)(params_shape)
    owners = _owners(leaf_names(params_shape), leaf_names(state_shape))
    state_leaves = jax.tree.leaves(state_shape)
    param_groups = [slot.layer_leaves for slot in params.slots if slot.is_stack]
    stacks = _stacks(owners, param_groups)
    if across_labels:
        stacks += _unnamed_stacks(owners, param_groups, {leaf for group in stacks for leaf in group})
    groups = stackable(stacks, state_leaves)

    takes_loss = _takes_loss(optimizer)

    def step(grads: PyTree, state: PyTree, params: PyTree, loss: jax.Array) -> tuple[PyTree, PyTree, Arrays]:
        given = {"value": loss} if takes_loss else {}
        with _explained():
            updates, state = optimizer.update(grads, state, params, **given)
        return optax.apply_updates(params, updates), state, more(grads)

    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        closed, (_, new, _) = make_jaxpr(step, return_shape=True)(params_shape, state_shape, params_shape, scalar)
    _check_state(state_shape, new)
    closed = simplify(closed)
    reads_loss = any(closed.jaxpr.invars[-1] in eqn.invars for eqn in closed.jaxpr.eqns)
    forms = params.forms
    state_forms = _state_forms(closed, forms, params_shape, state_leaves, owners)
    scalars = closed.jaxpr.outvars[len(forms) + len(state_forms) :]
    outs = [*forms, *state_forms, *(whole(atom.aval.shape) for atom in scalars)]
    closed = refine(closed, [*forms, *state_forms, *forms, whole(())], outs)
    placements = _placements(closed, params_shape, state_leaves, owners, forms, state_forms, spec_of)
    rows_of = _state_rows(params, state_leaves, owners, groups)
    storage = make_storage(
        state_shape, groups, placements.__getitem__, mesh.shape, state_forms.__getitem__, rows_of.get
    )
    local = tuple(spec_of(slot.leaves[0]) for slot in params.slots)
    return TracedOptimizer(
        refine(simplify(first), forms, state_forms), closed, storage, tuple(owners), local, reads_loss
    )


def _takes_loss(optimizer: optax.GradientTransformation) -> bool:
    """Whether an update may be given the loss, as `optax.contrib.reduce_on_plateau` reads it, whatever its type says:
    `optax.MultiSteps` hands it on, `optax.contrib.sam` takes nothing else."""
    asked = inspect.signature(optimizer.update).parameters.values()
    return any(each.name == "value" or each.kind is inspect.Parameter.VAR_KEYWORD for each in asked)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """What a step can't hand to an update, and that it is the update's own error where it is another."""
    try:
        yield
    except TypeError as error:
        if "missing" not in str(error) or "argument" not in str(error):
            raise
        raise ValueError(
            f"the optimizer asks for more than a step has: {error}. An update is given gradients, state, parameters "
            "and `value`, the loss; one that evaluates the loss again, as line searches do, can't be part of a step. "
            "Of `optax.lbfgs`, write optax.lbfgs(learning_rate=0.1, linesearch=None)."
        ) from error
    except Exception as error:
        error.add_note("raised by the optimizer's update, called with gradients, state and parameters of this model")
        raise


def _check_state(state: PyTree, new: PyTree) -> None:
    """A step is one program, so that an update must give the state in the form that it got it in."""
    old, found = leaf_names(state), leaf_names(new)
    if len(old) == len(found):
        return
    others = sorted(set(old) ^ set(found))
    named = f" ({', '.join(others[:3])} on one side alone)" if others else ""
    raise ValueError(
        f"the optimizer's state has {len(old)} leaves from `init` and {len(found)} after an update, in other places"
        f"{named}: let `init` give all that an update keeps, zeros where nothing is known yet."
    )


def store_optimizer(
    optimizer: optax.GradientTransformation,
    params_shape: PyTree,
    params: Storage,
    spec_of: Callable[[int], PartitionSpec],
    mesh: Mesh,
) -> StoredOptimizer:
    """An optimizer on stored arrays, whose state lives where its parameter's part is updated.

    Args:
      optimizer, params_shape, params, spec_of, mesh: as `trace_optimizer` takes them.

    Raises:
      TypeError: `optimizer` is something else.
    """
    traced = trace_optimizer(optimizer, params_shape, params, spec_of, mesh)
    storage = traced.storage
    in_groups = _offset(params.groups, 0)
    num_params, num_state = len(params.forms), len(traced.owners)
    # Rows of a stage that have no layer are updated with the others: XLA would deal rows without them out evenly, and
    # float32 weights, gradients and moments would go from stage to stage and back in each step.
    of_params, of_state = [slot.spread for slot in params.slots], [slot.spread for slot in storage.slots]
    run = vectorize(
        traced.update,
        [
            *in_groups,
            *_offset(storage.groups, num_params),
            *_offset(params.groups, num_params + num_state),
            (2 * num_params + num_state,),
        ],
        [*in_groups, *_offset(storage.groups, num_params)],
        [*of_params, *of_state, *of_params, None],
        [*of_params, *of_state],
    )
    run_init = vectorize(traced.init, in_groups, storage.groups, of_params, of_state)
    local = tuple(slot.stacked(spec) for slot, spec in zip(params.slots, traced.local, strict=True))

    def constrain(arrays: Sequence[jax.Array]) -> list[jax.Array]:
        if mesh.size == 1:
            return list(arrays)
        return [
            lax.with_sharding_constraint(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, local, strict=True)
        ]

    def init(stored: Arrays) -> Arrays:
        return storage.fill(run_init(constrain(params.trim(stored))))

    def update(grads: Arrays, state: Arrays, stored: Arrays, loss: jax.Array) -> tuple[Arrays, Arrays]:
        # Each device updates its own part; whole parameters, if they are kept whole, are gathered at the very end.
        ins = [*constrain(params.trim(grads)), *storage.trim(state), *constrain(params.trim(stored))]
        outs = run([*ins, loss.astype(jnp.float32)])
        new_params = constrain(outs[: len(params.slots)])
        return params.fill(new_params), storage.fill(outs[len(params.slots) :])

    return StoredOptimizer(storage, init, update, traced.reads_loss)


def _check_kind(optimizer: Any) -> None:
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise TypeError(f"optimizer is {optimizer!r}; give an optax transformation, such as optax.adamw(1e-3).")


def _offset(groups: Sequence[tuple[int, ...]], by: int) -> list[tuple[int, ...]]:
    return [tuple(i + by for i in group) for group in groups]


def _owners(param_names: Sequence[str], state_names: Sequence[str]) -> list[tuple[str, int] | None]:
    """For each state leaf, (what it is, the parameter it belongs to): its path ends with the parameter's."""
    index = {name: i for i, name in enumerate(param_names) if name}
    owners: list[tuple[str, int] | None] = []
    for name in state_names:
        parts = name.split("/")
        suffixes = ("/".join(parts[k:]) for k in range(len(parts)))
        match = next((s for s in suffixes if s in index), None)
        owners.append(None if match is None else (name[: len(name) - len(match)], index[match]))
    return owners


def _stacks(owners: Sequence[tuple[str, int] | None], param_groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    by_owner = {owner: leaf for leaf, owner in enumerate(owners) if owner is not None}
    kinds = sorted({owner[0] for owner in owners if owner is not None})
    stacks = []
    for group in param_groups:
        for kind in kinds:
            members = [by_owner.get((kind, i)) for i in group]
            if all(m is not None for m in members):
                stacks.append(tuple(m for m in members if m is not None))
    return stacks


def _unnamed_stacks(
    owners: Sequence[tuple[str, int] | None], param_groups: Sequence[tuple[int, ...]], taken: set[int]
) -> list[tuple[int, ...]]:
    """What is left of layers' state, in the order that each has it in."""
    left: dict[int, list[int]] = {}
    for leaf, owner in enumerate(owners):
        if owner is not None and leaf not in taken:
            left.setdefault(owner[1], []).append(leaf)
    stacks: list[tuple[int, ...]] = []
    for group in param_groups:
        members = [left.get(param, []) for param in group]
        if len(set(map(len, members))) == 1:
            stacks += zip(*members, strict=True)
    return stacks


def _state_rows(
    params: Storage,
    state_leaves: Sequence[Any],
    owners: Sequence[tuple[str, int] | None],
    groups: Sequence[tuple[int, ...]],
) -> dict[int, StageRows]:
    """The rows of state whose parameter's layers are spread over the stages of a pipeline, by its first leaf."""
    slots = {leaf: slot for slot in params.slots for leaf in slot.leaves if slot.rows is not None}
    found: dict[int, StageRows] = {}
    stacked = {group[0] for group in groups}
    for i, (leaf, owner) in enumerate(zip(state_leaves, owners, strict=True)):
        slot = slots.get(owner[1]) if owner else None
        if slot is None or slot.rows is None:
            continue
        holds_all = not slot.is_stack and leaf.shape[:1] == slot.shape[:1]
        if i in stacked if slot.is_stack else holds_all:
            found[i] = slot.rows
    return found


def _state_forms(
    closed: ClosedJaxpr,
    forms: Sequence[Form],
    params_shape: PyTree,
    state_leaves: Sequence[Any],
    owners: Sequence[tuple[str, int] | None],
) -> list[Form]:
    """State of a parameter with packed dims is taken apart as it is: were it whole, each update would gather both."""
    leaves = jax.tree.leaves(params_shape)
    state_forms = [whole(leaf.shape) for leaf in state_leaves]
    if not any(max(form, default=1) > 1 for form in forms):
        return state_forms
    dims = find_dims(closed)
    for i, (leaf, owner) in enumerate(zip(state_leaves, owners, strict=True)):
        if owner is None or max(forms[owner[1]], default=1) == 1:
            continue
        shape, form = leaves[owner[1]].shape, forms[owner[1]]
        if tuple(leaf.shape) == tuple(shape):
            state_forms[i] = form
            continue
        keys = zip(dims.inputs[owner[1]], shape, strict=True)
        parts = {(dims.class_of(d), n): num for (d, n), num in zip(keys, form, strict=True)}
        own = zip(dims.inputs[len(leaves) + i], leaf.shape, strict=True)
        state_forms[i] = tuple(parts.get((dims.class_of(d), n), 1) for d, n in own)
    return state_forms


def _placements(
    closed: ClosedJaxpr,
    params_shape: PyTree,
    state_leaves: Sequence[Any],
    owners: Sequence[tuple[str, int] | None],
    forms: Sequence[Form],
    state_forms: Sequence[Form],
    spec_of: Callable[[int], PartitionSpec],
) -> list[PartitionSpec]:
    """State of a parameter's shape lies as the parameter does; factors of it by the dims they have in common."""
    shapes = [expand(leaf.shape, form) for leaf, form in zip(jax.tree.leaves(params_shape), forms, strict=True)]
    dims: Dims | None = None
    specs = []
    for leaf, form, owner in zip(state_leaves, state_forms, owners, strict=True):
        shape = expand(leaf.shape, form)
        if owner is None or not shape:
            specs.append(PartitionSpec(*[None] * len(shape)))
        elif shape == shapes[owner[1]]:
            specs.append(spec_of(owner[1]))
        else:
            dims = dims or find_dims(closed)
            own = dims.inputs[len(shapes) + len(specs)]
            param = owner[1]
            specs.append(_shared_dims(dims, own, dims.inputs[param], spec_of(param), shape, shapes[param]))
    return specs


def _shared_dims(
    dims: Dims,
    own: Sequence[int],
    param: Sequence[int],
    spec: PartitionSpec,
    shape: Sequence[int],
    param_shape: Sequence[int],
) -> PartitionSpec:
    entry_of = {(dims.class_of(d), n): entry for d, n, entry in zip(param, param_shape, [*spec], strict=False) if entry}
    used: list[Any] = []
    for d, n in zip(own, shape, strict=True):
        entry = entry_of.get((dims.class_of(d), n))
        used.append(None if entry in used else entry)
    return PartitionSpec(*used)
