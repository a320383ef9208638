"""A T5 that makes what its decoder reads of the encoder's text for all layers ahead of the first, as many models do: it
passes the layers, and is none of theirs."""

from typing import Any

import jax

from cjax.models import T5
from cjax.models.cross_entropy import cross_entropy


def ahead_loss(model: T5, batch: Any) -> jax.Array:
    source = model.remember(model.encode(batch["source"]))
    return cross_entropy(model.decode(batch["inputs"], source), batch["targets"], model.classify)
