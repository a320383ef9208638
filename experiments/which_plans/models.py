"""The models that are asked about, each with its loss and the shapes of its batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cjax.models import bert, gpt, loss, masked_loss, t5, t5_loss, vit, vit_loss
from cjax.models.bert import BERT
from cjax.models.gpt import GPT
from cjax.models.t5 import T5
from cjax.models.vit import ViT

from .convolutions import ResNet
from .convolutions import loss as images_loss

Call = tuple[Any, Callable[..., Any], dict[str, Any]]  # model, loss, batch


@dataclass(frozen=True)
class Case:
    """A model and its batch.

    Args:
      model: its name, by which its kind is known.
      rows: examples of a batch.
      length: positions of one, of texts.
      sizes: fields of the model's configuration that are not those of its name.
    """

    model: str
    rows: int
    length: int = 1024
    sizes: tuple[tuple[str, int], ...] = ()

    @property
    def is_text(self) -> bool:
        return not self.model.startswith(("vit", "resnet"))

    @property
    def batch(self) -> str:
        """As tables say it."""
        return f"{self.rows:,} x {self.length:,}" if self.is_text else f"{self.rows:,} images"

    def call(self) -> Call:
        """What `parallelize` takes, but for an optimizer."""
        sizes: dict[str, Any] = dict(self.sizes)
        if self.model.startswith("resnet"):
            return ResNet(**sizes), images_loss, self._images(224)
        if self.model.startswith("vit"):
            picture = vit(self.model, **sizes)
            return lambda rngs: ViT(picture, rngs=rngs), vit_loss, self._images(picture.image_size)
        tokens = jax.ShapeDtypeStruct((self.rows, self.length), jnp.int32)
        batch = {"inputs": tokens, "targets": tokens}
        if self.model.startswith("t5"):
            pairs = t5(self.model, **sizes)
            return lambda rngs: T5(pairs, rngs=rngs), t5_loss, batch | {"source": tokens}
        if self.model.startswith("bert"):
            encoder = bert(self.model, **{"context": self.length} | sizes)
            return lambda rngs: BERT(encoder, rngs=rngs), masked_loss, batch
        decoder = gpt(self.model, **{"context": self.length} | sizes)
        return lambda rngs: GPT(decoder, rngs=rngs), loss, batch

    def _images(self, side: int) -> dict[str, Any]:
        images = jax.ShapeDtypeStruct((self.rows, side, side, 3), jnp.float32)
        return {"images": images, "labels": jax.ShapeDtypeStruct((self.rows,), jnp.int32)}
