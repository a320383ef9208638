"""A GPT so small that its sizes can be worked out by hand; no two of its dims are of one size."""

import functools

import jax

from cjax.models import GPT, loss
from cjax.models.gpt import GPTConfig
from cjax.trace.author.capture import capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource

ROWS, SEQ, EMBED, HEADS, MLP, VOCAB, LAYERS = 16, 64, 48, 4, 160, 200, 3
CONFIG = GPTConfig(
    num_layers=LAYERS, num_heads=HEADS, embed_dim=EMBED, mlp_dim=MLP, vocab_size=VOCAB, context=SEQ
)  # fmt: skip
TOKENS = {name: jax.ShapeDtypeStruct((ROWS, SEQ), "int32") for name in ("inputs", "targets")}


@functools.cache
def gpt() -> Trace:
    return TraceSource(capture(lambda rngs: GPT(CONFIG, rngs=rngs), loss, TOKENS), TOKENS).read()
