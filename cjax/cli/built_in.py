"""The models of `cjax.models` by name, as what `cjax.parallelize` takes: shapes alone, nothing is allocated."""

import difflib
from typing import Any

import jax
import optax

from cjax import models
from cjax.models.bert import presets as berts
from cjax.models.gpt import presets as gpts
from cjax.models.llama import presets as llamas
from cjax.models.t5 import presets as t5s
from cjax.models.vit import presets as vits

Parts = tuple[Any, Any, Any, Any]
FAMILIES = (gpts, llamas, berts, t5s, vits)
T5_LENGTH = 512  # its positions are relative; the length that it was trained with


def built_in(name: str, num_rows: int, length: int | None = None) -> Parts:
    """(model, loss, optimizer, batch) of a model that is called `name`.

    Args:
        name: such as gpt2-xl, llama-3-8b, bert-large, t5-base or vit-l16.
        num_rows: rows of the batch.
        length: tokens of a row; the model's context if not given.

    Raises:
        ValueError: no such model, with those that there are; a length for a model of images.
    """
    known = [each for family in FAMILIES for each in family]
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]}?" if near else "write a file.py:function, or one of these."
        raise ValueError(f"no model is called {name!r}; {hint} There are {', '.join(known)}")
    if name in vits:
        return _images(name, num_rows, length)
    make, loss, config = _text(name)
    shape = num_rows, length or getattr(config, "context", T5_LENGTH)
    tokens = jax.ShapeDtypeStruct(shape, "int32")
    batch = {"inputs": tokens, "targets": tokens} | ({"source": tokens} if name in t5s else {})
    return make, loss, optax.adamw(1e-3), batch


def _text(name: str) -> tuple[Any, Any, Any]:
    if name in gpts:
        config = models.gpt(name)
        return lambda rngs: models.GPT(config, rngs=rngs), models.loss, config
    if name in llamas:
        config = models.llama(name)
        return lambda rngs: models.Llama(config, rngs=rngs), models.llama_loss, config
    if name in t5s:
        config = models.t5(name)
        return lambda rngs: models.T5(config, rngs=rngs), models.t5_loss, config
    config = models.bert(name)
    if config.head != "masked":
        raise ValueError(f"{name} has no words to predict: it is for sentences; write bert-base or bert-large")
    return lambda rngs: models.BERT(config, rngs=rngs), models.masked_loss, config


def _images(name: str, num_rows: int, length: int | None) -> Parts:
    config = models.vit(name)
    if length is not None:
        raise ValueError(f"--seq is for models of text, and {name} reads images of {config.image_size} pixels")
    side = config.image_size
    images = jax.ShapeDtypeStruct((num_rows, side, side, config.num_channels), "float32")
    batch = {"images": images, "labels": jax.ShapeDtypeStruct((num_rows,), "int32")}
    return lambda rngs: models.ViT(config, rngs=rngs), models.vit_loss, optax.adamw(1e-3), batch
