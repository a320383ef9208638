"""What is particular to Flax Linen: random streams, boxes around parameters, nested mappings."""

import re
from collections.abc import Callable, Mapping

import flax.linen as nn
import jax
from flax.core import meta
from flax.errors import InvalidRngError

from cjax.jax_compat.modules import missing_stream
from cjax.tree import PyTree, path_name

EVAL_HINT = (
    "Declare `train` in the loss, `def loss(model, batch, train)`, and hand it to the model "
    "(`deterministic=not train`, `use_running_average=not train`)."
)


def bridged(error: KeyError) -> Exception:
    """What is wrong where an NNX module within a Linen model (`nnx.bridge.to_linen`) asks for a stream of its own.

    In evaluation it would go on drawing from the stream that it was made with, and nobody would be told.
    """
    name = re.search(r"No RngStream named '(\w+)'", str(error))
    if name is None:
        return error
    return ValueError(
        "an NNX module within this Linen model (nnx.bridge.to_linen) draws from a random stream of its own, "
        f"{name[1]!r}, which cjax can neither give it nor take from it in evaluation. Take the dropout out of that "
        "module, into the Linen one around it, or write the whole model in NNX (nnx.bridge.ToNNX takes Linen modules)."
    )


def next_stream(error: InvalidRngError, known: list[str], train: bool) -> str:
    """The random stream that a module missed. Raises what is no question of a stream, or one already answered."""
    name = missing_stream(error)
    if name is None or name in known:
        raise error
    # Flax serves any missing stream from "params" if that is there, so giving it would give dropout too.
    if not train and (name == "params" or "drop" in name):
        raise ValueError(f"The loss draws from the random stream {name!r} during evaluation. {EVAL_HINT}") from error
    return name


def _is_box(node: object) -> bool:
    return isinstance(node, meta.AxisMetadata)


def unbox(tree: PyTree) -> PyTree:
    """Without the boxes that hold logical names: in a mesh context Flax would turn those names into constraints."""
    return jax.tree.map(lambda box: box.value if isinstance(box, nn.Partitioned) else box, tree, is_leaf=_is_box)


def box_names(tree: PyTree) -> dict[str, tuple[object, ...]]:
    boxes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)[0]
    return {path_name(path): box.names for path, box in boxes if isinstance(box, nn.Partitioned)}


def prune(tree: PyTree, keep: Callable[[str, PyTree], bool], path: tuple[str, ...] = ()) -> PyTree:
    """The nested mapping `tree` with only the leaves that `keep(path, leaf)` accepts; empty branches go too."""
    kept = {}
    for name, node in tree.items():
        inner = (*path, str(name))
        if isinstance(node, Mapping):
            node = prune(node, keep, inner)
            if node:
                kept[name] = node
        elif keep("/".join(inner), node.value if isinstance(node, nn.Partitioned) else node):
            kept[name] = node
    return type(tree)(kept)


def join(tree: Mapping[str, PyTree], other: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Undoes `prune`: the union of two nested mappings."""
    both = {name: join(tree[name], other[name]) for name in tree if name in other}
    return {**tree, **other, **both}
