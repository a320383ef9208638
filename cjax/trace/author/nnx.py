"""What is particular to Flax NNX: filters, modes of modules, random keys that models carry, names in metadata."""

from collections.abc import Sequence
from typing import cast

import jax
from flax import nnx

from cjax.trace.author.trained import Wrt, is_path_rule, matcher
from cjax.tree import PyTree, kind_of, leaf_names

Key = jax.Array

EVAL_HINT = (
    "although the model is in eval mode. Don't pass deterministic=False or use_running_average=False, or let them "
    "depend on `train`: `def loss(model, batch, train)`."
)


def param_filter(wrt: Wrt) -> nnx.filterlib.Filter:
    """What `nnx.split` takes. A regex or a plain function chooses among the nnx.Param; a filter speaks for itself."""
    if wrt is None:
        return nnx.Param
    if is_path_rule(wrt):
        matches = matcher(wrt)

        def among_params(path: tuple[object, ...], variable: object) -> bool:
            return isinstance(variable, nnx.Param) and matches("/".join(map(str, path)), variable.get_value())

        return among_params
    return nnx.filterlib.to_predicate(cast(nnx.filterlib.Filter, wrt))


def set_train(model: nnx.Module) -> None:
    """Puts those modules into training mode whose author left the mode open; a mode that was chosen stays."""
    for _, module in nnx.iter_modules(model):
        if getattr(module, "deterministic", False) is None:
            module.deterministic = False  # type: ignore[attr-defined]


def set_eval(model: nnx.Module) -> None:
    """Puts `model` in evaluation mode, in which updating statistics is an error."""
    model.eval()

    def refuse(variable: nnx.Variable[object], value: object) -> object:
        raise ValueError(f"The loss updates statistics ({kind_of(variable)}) during evaluation, {EVAL_HINT}")

    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.BatchStat):
            variable.set_metadata(on_set_value=refuse)


def rewritten(model: nnx.Module, after: PyTree, before: Sequence[PyTree]) -> dict[str, jax.Array]:
    """Parameters behind a loss that are not the arrays they were before: written, or handed through a transform.

    Not those of layers that Flax's own `WeightNorm` and `SpectralNorm` normalise, which write what they compute with:
    under cjax they stay as the optimizer has left them, and are normalised anew in each step.
    """
    given = {name: leaf for tree in before for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True)}
    normed = [
        "".join(f"{each}/" for each in path)
        for path, module in nnx.iter_modules(model)
        if isinstance(module, nnx.WeightNorm | nnx.SpectralNorm)
    ]
    found = {}
    for name, leaf in zip(leaf_names(after), jax.tree.leaves(after), strict=True):
        if name in given and leaf is not given[name] and not any(f"{name}/".startswith(each) for each in normed):
            found[name] = leaf
    return found


def check_not_random(used: list[bool], model_state: PyTree) -> None:
    """Raises if what was computed from `model_state` (used: which of its leaves mattered) depends on random numbers.

    Whether the streams have advanced is not the question: `nnx.split_rngs` draws for dropout that is switched off.
    """
    for name, is_used, is_key in zip(leaf_names(model_state), used, rng_key_leaves(model_state), strict=True):
        if is_used and is_key:
            raise ValueError(
                f"The loss depends on random numbers (dropout?) from {name} during evaluation, {EVAL_HINT} "
                "For randomness that belongs to the score, use `def loss(model, batch, key)`."
            )


def rng_key_leaves(state: PyTree) -> list[bool]:
    """For every leaf of `state`, whether it is a random key."""
    is_key: list[bool] = []
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        is_key += [isinstance(node, nnx.RngKey)] * len(jax.tree.leaves(node))
    return is_key


def random_leaves(state: PyTree) -> list[bool]:
    """For every leaf of `state`, whether it is a random key or counts what was drawn from one."""
    is_random: list[bool] = []
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        is_random += [isinstance(node, nnx.RngState)] * len(jax.tree.leaves(node))
    return is_random


def fold_keys(state: PyTree, index: jax.Array) -> PyTree:
    """`state` with `index` folded into every random key: each one of an array (a scanned stack has one per layer)."""

    def fold(keys: Key) -> Key:
        return jax.vmap(lambda key: jax.random.fold_in(key, index))(keys.reshape(-1)).reshape(keys.shape)

    leaves, treedef = jax.tree.flatten(state)
    return treedef.unflatten([fold(x) if key else x for x, key in zip(leaves, rng_key_leaves(state), strict=True)])


def restore_keys(state: PyTree, original: PyTree) -> PyTree:
    """`state` with the random keys of `original`."""
    leaves, treedef = jax.tree.flatten(state)
    pairs = zip(leaves, jax.tree.leaves(original), rng_key_leaves(state), strict=True)
    return treedef.unflatten([old if key else new for new, old, key in pairs])


def metadata_names(state: PyTree) -> dict[str, tuple[object, ...]]:
    """The author's axis names; Flax has called them three things."""
    names = {}
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        for spelling in ("out_sharding", "sharding", "sharding_names"):
            spec = metadata.get(spelling)
            if spec:
                names["/".join(map(str, path))] = tuple(getattr(spec, "spec", spec))
                break
    return names
