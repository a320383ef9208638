"""The first values of a model, made as they are kept: nothing is whole on one device that is split between steps."""

from collections.abc import Callable

import jax

from cjax.jax_compat.core import make_jaxpr
from cjax.sharding.place.model import Arrays, ModelStorage
from cjax.sharding.storage.storage import Slot
from cjax.trace.author.capture import Capture
from cjax.trace.dims.refine import refine
from cjax.trace.dims.refine_rules import whole
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.layers.vectorize import vectorize

Born = Callable[[jax.Array], tuple[Arrays, Arrays, Arrays]]


def born(captured: Capture, storage: ModelStorage) -> Born:
    """`key -> stored (params, frozen, model_state)`: the author's init, each stack of layers made at once, so that
    compile time does not grow with depth."""
    trees = (storage.params, storage.frozen, storage.model_state)

    def init(key: jax.Array) -> tuple[Arrays, Arrays, Arrays]:
        closed = simplify(make_jaxpr(captured.init)(key))
        closed = refine(closed, [whole(key.shape)], [form for tree in trees for form in tree.forms])
        groups: list[tuple[int, ...]] = []
        offset = 0
        for tree in trees:
            groups += [tuple(i + offset for i in group) for group in tree.groups]
            offset += sum(map(len, tree.groups))
        outs = iter(vectorize(closed, [(0,)], groups)([key]))
        params, frozen, model_state = (tree.pad([_in_rows(slot, next(outs)) for slot in tree.slots]) for tree in trees)
        return params, frozen, model_state

    return init


def _in_rows(slot: Slot, array: jax.Array) -> jax.Array:
    """What init made: a stack has its rows' order already, a leaf that holds all layers has the author's."""
    return array if slot.is_stack else slot.in_row_order(array)
