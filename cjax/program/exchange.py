"""What programs of one model hand each other, and a loss that JAX's own transformations differentiate."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from cjax.program.composed import Composed
from cjax.program.keep import check_fits, store_leaves
from cjax.program.saving import MODEL, arrays_of, state_from, trees_of
from cjax.program.state import State, check_alive
from cjax.tree import PyTree, leaf_names


def adopted(composed: Composed, state: State, source: Any) -> State:
    """`state` with what `source` trains, and its running state; or with the parameters that a tree names.

    Raises:
      ValueError: parameters that this model has not, or of other shapes.
    """
    shelves = {"params": composed.shelves.params, "frozen": composed.shelves.frozen}
    own = dict(zip(shelves, trees_of(state, *MODEL[:2]).values(), strict=True))
    known = {name for tree in own.values() for name in leaf_names(tree)}
    changes: dict[str, Any] = {}
    if isinstance(source, State):
        check_alive(source)
        given, model_state = trees_of(source, "params", "carried").values()
        tree = check_fits(composed.shelves.model_state, model_state, "this state's model state (`carried`) is")
        changes["carried"] = tree
    else:
        given = source
    if isinstance(given, Mapping) and given.keys() <= known:
        values = dict(given)
    else:
        values = dict(zip(leaf_names(given), jax.tree.leaves(given), strict=True))
    unknown = [name for name in values if name not in known]
    if unknown or not values:
        what = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else "")
        raise ValueError(
            f"this model has no parameter {what or 'in an empty tree'}. Its names are such as "
            f"{', '.join(sorted(known)[:4])}; give a state of a program of the same model, a tree of parameters, or "
            "{path: array}."
        )
    for field, shelf in shelves.items():
        names, leaves = leaf_names(own[field]), jax.tree.leaves(own[field])
        if not values.keys() & set(names):
            continue
        tree = jax.tree.unflatten(
            shelf.treedef, [values.get(name, leaf) for name, leaf in zip(names, leaves, strict=True)]
        )
        changes[field] = check_fits(shelf, tree, "these parameters are")
    if composed.walker is not None:
        return state_from(composed, arrays_of(state) | changes)
    shelves["carried"] = composed.shelves.model_state
    fields = {"params": "_params", "frozen": "_frozen", "carried": "_model_state"}
    return dataclasses.replace(
        state, **{fields[name]: store_leaves(shelves[name], tree, composed.mesh) for name, tree in changes.items()}
    )


def differentiable(value_and_grad: Callable[[PyTree], tuple[jax.Array, PyTree]]) -> Callable[[PyTree], jax.Array]:
    """`params -> loss`, whose derivative is the one that comes with it."""

    @jax.custom_vjp
    def loss(params: PyTree) -> jax.Array:
        return value_and_grad(params)[0]

    def forward(params: PyTree) -> tuple[jax.Array, Any]:
        value, grads = value_and_grad(params)
        by_name = dict(zip(leaf_names(grads), jax.tree.leaves(grads), strict=True))
        return value, jax.tree.unflatten(jax.tree.structure(params), [by_name[name] for name in leaf_names(params)])

    def backward(grads: PyTree, cotangent: jax.Array) -> tuple[PyTree]:
        return (jax.tree.map(lambda g: (cotangent * g).astype(g.dtype), grads),)

    loss.defvjp(forward, backward)
    return loss
