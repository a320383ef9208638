"""How one layer of a stored stack is kept: a row has an array of each of its slots."""

import dataclasses

from jax.sharding import PartitionSpec

from cjax.sharding.storage.storage import Slot


def num_layers(slot: Slot) -> int:
    """The layers that a slot holds: its leaves, or dim 0 of the one leaf that its author stacked."""
    return len(slot.leaves) if slot.is_stack else slot.shape[0]


def layer_slot(slot: Slot) -> Slot:
    """The slot that one layer's array would have: with the dims, the padding and the placement of a single layer.

    >>> import jax.numpy as jnp
    >>> from cjax.sharding.storage.storage import Slot
    >>> both = Slot((0,), (2, 3), jnp.float32, (2, 4), PartitionSpec(None, "data"), (1, 1))
    >>> layer_slot(both).stored_shape, layer_slot(both).stored_spec
    ((4,), P('data',))
    """
    assert slot.rows is None, "of a pipeline"
    if slot.is_stack:
        return dataclasses.replace(slot, leaves=slot.leaves[:1])
    assert slot.form[0] == 1 and slot.padded[0] == slot.shape[0] and not slot.spec[0], "layers that are split"
    inner = PartitionSpec(*slot.spec[1:])
    return dataclasses.replace(slot, shape=slot.shape[1:], padded=slot.padded[1:], spec=inner, form=slot.form[1:])
