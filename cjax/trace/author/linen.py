"""What is particular to Flax Linen: sown collections, random streams, boxes around parameters, nested mappings."""

import contextvars
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
import jax
from flax.core import meta
from flax.errors import InvalidRngError

from cjax.tree import path_name

PyTree = Any

EVAL_HINT = (
    "Declare `train` in the loss, `def loss(model, batch, train)`, and hand it to the model "
    "(`deterministic=not train`, `use_running_average=not train`)."
)


_watchers: contextvars.ContextVar[tuple[set[str], ...]] = contextvars.ContextVar("sown", default=())
_lock = threading.Lock()
_num_watching = 0
_sow: Any = None  # Flax's own, while it is watched; None while it is not


@contextmanager
def sown_collections() -> Iterator[set[str]]:
    """The collections that are sown into while this is open, in this thread.

    After init they look like any other collection, but carried from step to step they would grow or add up, and Flax
    offers no way to tell them apart: so `sow` is watched. The first to come puts the watch there and the last to go
    takes it away, in whatever order they do.
    """
    global _num_watching, _sow
    sown = {"intermediates"}
    with _lock:
        if _sow is None:
            _sow, nn.Module.sow = nn.Module.sow, _watched  # type: ignore[method-assign]
        _num_watching += 1
    _watchers.set((*_watchers.get(), sown))
    try:
        yield sown
    finally:
        with _lock:
            _num_watching -= 1
            if _num_watching == 0 and nn.Module.sow is _watched:  # or else somebody has put another around it
                nn.Module.sow, _sow = _sow, None  # type: ignore[method-assign]
        _watchers.set(tuple(each for each in _watchers.get() if each is not sown))


def _watched(self: nn.Module, col: str, *args: Any, **kwargs: Any) -> bool:
    for sown in _watchers.get():
        sown.add(col)
    return (_sow or nn.Module.sow)(self, col, *args, **kwargs)  # the last may have gone while this was on its way


def missing_stream(error: InvalidRngError, known: list[str], train: bool) -> str:
    found = re.search(r'needs PRNG for "(.+?)"', str(error))
    if found is None or found[1] in known:
        raise error
    name = found[1]
    # Flax serves any missing stream from "params" if that is there, so giving it would give dropout too.
    if not train and (name == "params" or "drop" in name):
        raise ValueError(f"The loss draws from the random stream {name!r} during evaluation. {EVAL_HINT}") from error
    return name


def _is_box(node: Any) -> bool:
    return isinstance(node, meta.AxisMetadata)


def unbox(tree: PyTree) -> PyTree:
    """Without the boxes that hold logical names: in a mesh context Flax would turn those names into constraints."""
    return jax.tree.map(lambda box: box.value if isinstance(box, nn.Partitioned) else box, tree, is_leaf=_is_box)


def box_names(tree: PyTree) -> dict[str, tuple[Any, ...]]:
    boxes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_box)[0]
    return {path_name(path): box.names for path, box in boxes if isinstance(box, nn.Partitioned)}


def prune(tree: Any, keep: Callable[[str, Any], bool], path: tuple[str, ...] = ()) -> Any:
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


def join(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Undoes `prune`: the union of two nested mappings."""
    both = {name: join(tree[name], other[name]) for name in tree if name in other}
    return {**tree, **other, **both}
