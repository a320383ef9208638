"""What is particular to Flax NNX: filters, modes of modules, random keys that models carry, names in metadata."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import nnx

from cjax.trace.trained import is_path_rule, matcher

PyTree = Any
Key = jax.Array


@contextmanager
def quick_attribute_errors(tracers: PyTree) -> Iterator[None]:
    """Keeps tracing linear in the number of random draws and statistics, where JAX makes it quadratic.

    NNX asks each new value of a Variable for its `sharding`. Up to JAX 0.11 a tracer answers with an AttributeError
    whose text, which nobody reads, takes a search through the whole trace (9 s for the constructor of 48 layers).
    """
    kinds = {type(leaf) for leaf in jax.tree.leaves(tracers) if isinstance(leaf, jax.core.Tracer)}
    slow = [kind for kind in kinds if "sharding" not in vars(kind)] if jax.__version_info__ < (0, 12) else []

    def sharding(self: Any) -> Any:
        raise AttributeError("A tracer has no sharding: see `jax.typeof(x).sharding`.")

    for kind in slow:
        kind.sharding = property(sharding)
    try:
        yield
    finally:
        for kind in slow:
            del kind.sharding


def param_filter(wrt: Any) -> Any:
    """What `nnx.split` takes. A regex or a plain function chooses among the nnx.Param; a filter speaks for itself."""
    if wrt is None:
        return nnx.Param
    if is_path_rule(wrt):
        matches = matcher(wrt)

        def among_params(path: tuple[Any, ...], variable: Any) -> bool:
            return isinstance(variable, nnx.Param) and matches("/".join(map(str, path)), variable.get_value())

        return among_params
    return nnx.filterlib.to_predicate(wrt)


def set_train(model: nnx.Module) -> set[type]:
    """Puts those modules into training mode whose author left the mode open; a mode that was chosen stays."""
    for _, module in nnx.iter_modules(model):
        if getattr(module, "deterministic", False) is None:
            module.deterministic = False  # type: ignore[attr-defined]
    return set()


def set_eval(model: nnx.Module) -> set[type]:
    """Puts `model` in evaluation mode. The set returned fills with the kinds of state that the loss writes to."""
    model.eval()
    written: set[type] = set()

    def watch(variable: Any, value: Any) -> Any:
        written.add(type(variable))
        return value

    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.RngCount | nnx.BatchStat):
            hooks = variable.get_metadata().get("on_set_value", ())
            variable.set_metadata(on_set_value=(*(hooks if isinstance(hooks, tuple) else (hooks,)), watch))
    return written


def check_unwritten(written: set[type], carried: PyTree, after: PyTree) -> None:
    """Raises if evaluation drew random numbers or updated statistics.

    A write alone is no proof (`nnx.split_rngs` draws, then restores), nor is another value: `nnx.scan` returns all it
    was given as new arrays. Both together are.
    """
    kept = dict(nnx.to_flat_state(carried))
    for path, variable in nnx.to_flat_state(after):
        if type(variable) in written and path in kept and variable.get_value() is not kept[path].get_value():
            what = "draws random numbers (dropout?)" if isinstance(variable, nnx.RngCount) else "updates statistics"
            name = "/".join(map(str, path))
            raise ValueError(
                f"The loss {what} during evaluation, at {name}, although the model is in eval mode. Don't pass "
                "deterministic=False or use_running_average=False, or let them depend on `train`: "
                "`def loss(model, batch, train)`."
            )


def rng_key_leaves(state: PyTree) -> list[bool]:
    """For every leaf of `state`, whether it is a random key."""
    is_key: list[bool] = []
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable)):
        is_key += [isinstance(node, nnx.RngKey)] * len(jax.tree.leaves(node))
    return is_key


def fold_key(keys: Key, index: Any) -> Key:
    """`index` folded into a key, or into each key of an array (the layers of a scanned stack have one each)."""
    folded = jax.vmap(lambda key: jax.random.fold_in(key, index))(keys.reshape(-1))
    return folded.reshape(keys.shape)


def metadata_names(state: PyTree) -> dict[str, tuple[Any, ...]]:
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
