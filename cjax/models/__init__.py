"""Models in plain Flax NNX. They know nothing of devices, plans or cjax."""

from cjax.models.bert import BERT, BERTConfig, bert, classes_loss, masked_loss
from cjax.models.cross_entropy import cross_entropy
from cjax.models.generation import generate
from cjax.models.gpt import GPT, GPTConfig, gpt, loss, presets
from cjax.models.llama import Llama, LlamaConfig, llama
from cjax.models.llama import loss as llama_loss
from cjax.models.t5 import T5, T5Config, t5
from cjax.models.t5 import loss as t5_loss
from cjax.models.transformers.weights import config_of, load, readers, save
from cjax.models.vit import ViT, ViTConfig, vit
from cjax.models.vit import loss as vit_loss

__all__ = [
    "BERT", "GPT", "T5", "BERTConfig", "GPTConfig", "Llama", "LlamaConfig", "T5Config", "ViT", "ViTConfig", "bert",
    "classes_loss", "config_of", "cross_entropy", "generate", "gpt", "llama", "llama_loss", "load", "loss",
    "masked_loss", "presets", "readers", "save", "t5", "t5_loss", "vit", "vit_loss",
]  # fmt: skip
