"""Sizes from config.json: what is there, what is missing, and what can't be."""

from pathlib import Path
from typing import Any

import pytest

from cjax.models.transformers import config

PATH = Path("folder")


def read(model_type: str, architecture: str, **keys: Any) -> Any:
    _, found = config.read({"model_type": model_type, "architectures": [architecture], **keys}, PATH)
    return found[0]


def test_what_is_missing_means_what_it_means_to_transformers() -> None:
    """Which is not always what it means to us."""
    assert read("llama", "LlamaForCausalLM").norm_epsilon == 1e-6
    assert read("llama", "LlamaForCausalLM").context == 2048
    assert read("llama", "LlamaForCausalLM", rms_norm_eps=1e-5, max_position_embeddings=512).norm_epsilon == 1e-5
    assert read("vit", "ViTForImageClassification").num_classes == 2


def test_what_we_have_not_is_refused_with_every_reason() -> None:
    with pytest.raises(ValueError, match="(?s)hidden_act is 'gelu'; 'silu' is needed.*attention_bias is True"):
        read("llama", "LlamaForCausalLM", hidden_act="gelu", attention_bias=True)
    with pytest.raises(ValueError, match="rms_norm_eps is 'small'; a number is needed"):
        read("llama", "LlamaForCausalLM", rms_norm_eps="small")
