"""Flax models of Hugging Face's transformers: their Linen modules, at tiny sizes, with random weights.

A `FlaxPreTrainedModel` wraps a Linen module and holds weights beside it; the module is what a trainer trains.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import transformers
from strangers.common import (
    CLASSES,
    LENGTH,
    ROWS,
    VOCAB,
    Stranger,
    cross_entropy,
    masked_words,
    next_words,
    pictures,
    random,
    sentence_pairs,
    tokens,
)

TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}


def module(name: str, **config: Any) -> Any:
    """The Linen module of transformers' `Flax` + `name`, computing in the precision of its weights."""
    cls = getattr(transformers, "Flax" + name)
    return cls(cls.config_class(**config), dtype=jnp.float64, _do_init=False).module


def positions(ids: Any) -> Any:
    return jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)


def masked(name: str, *extra: str, **config: Any) -> Stranger:
    """A masked language model; `extra` are what its module wants beside ids and mask."""

    def loss(model: Any, batch: Any) -> Any:
        ids = batch["ids"]
        given = {"types": jnp.zeros_like(ids), "positions": positions(ids), "heads": None}
        out = model(ids, batch["mask"], *(given[kind] for kind in extra))
        return cross_entropy(out.logits, batch["labels"], batch["hidden"])

    return Stranger(module(name, **{**TEXT, **config}), loss, masked_words())


def causal(name: str, *extra: str, config: dict[str, Any]) -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        ids = batch["ids"]
        given = {"positions": positions(ids)}
        return next_words(model(ids, batch["mask"], *(given[kind] for kind in extra)).logits, batch)

    return Stranger(module(name, **config), loss, tokens())


def classified(name: str, **config: Any) -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["images"], deterministic=False, return_dict=True)
        return cross_entropy(out.logits, batch["labels"])

    return Stranger(module(name, num_labels=CLASSES, **config), loss, pictures())


# -- encoders ---------------------------------------------------------------------------------------------------------
def bert() -> Stranger:
    return masked("BertForMaskedLM", "types", "positions", "heads")


def albert() -> Stranger:
    return masked("AlbertForMaskedLM", "types", "positions", embedding_size=16)


def roformer() -> Stranger:
    return masked("RoFormerForMaskedLM", "types", "heads", embedding_size=32)


def big_bird() -> Stranger:
    small = {"attention_type": "block_sparse", "block_size": 2, "num_random_blocks": 1}
    return masked("BigBirdForMaskedLM", "types", "positions", "heads", **small)


def electra() -> Stranger:
    """Replaced words are told from the author's own: one answer for each position."""

    def loss(model: Any, batch: Any) -> Any:
        ids = batch["ids"]
        out = model(ids, batch["mask"], jnp.zeros_like(ids), positions(ids), None)
        each = optax.sigmoid_binary_cross_entropy(out.logits, batch["hidden"].astype(out.logits.dtype))
        return jnp.sum(each * batch["mask"]) / jnp.sum(batch["mask"])

    return Stranger(module("ElectraForPreTraining", **{**TEXT, "embedding_size": 16}), loss, masked_words())


# -- decoders ---------------------------------------------------------------------------------------------------------
def gpt2() -> Stranger:
    config = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 32}
    return causal("GPT2LMHeadModel", "positions", config=config)


def gpt_neo() -> Stranger:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "intermediate_size": 48}
    kinds = {"attention_types": [[["global", "local"], 2]], "window_size": 4, "max_position_embeddings": 32}
    return causal("GPTNeoForCausalLM", "positions", config={**sizes, **kinds})


def gptj() -> Stranger:
    config = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 32}
    return causal("GPTJForCausalLM", "positions", config={**config, "rotary_dim": 4})


def llama() -> Stranger:
    return causal("LlamaForCausalLM", "positions", config={**TEXT, "num_key_value_heads": 2})


def gemma() -> Stranger:
    return causal("GemmaForCausalLM", "positions", config={**TEXT, "num_key_value_heads": 1, "head_dim": 8})


def bloom() -> Stranger:
    return causal("BloomForCausalLM", config={"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4})


def opt() -> Stranger:
    sizes = {"ffn_dim": 48, "word_embed_proj_dim": 16}
    return causal("OPTForCausalLM", "positions", config={**TEXT, **sizes})


# -- encoder-decoders -------------------------------------------------------------------------------------------------
def translated(name: str, **more: Any) -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        ids, target = batch["ids"], batch["target"]
        out = model(ids, batch["mask"], target, batch["target_mask"], positions(ids), positions(target))
        return cross_entropy(out.logits, batch["labels"], batch["target_mask"])

    return Stranger(module(name, **{**SEQ2SEQ, **more}), loss, sentence_pairs())


def bart() -> Stranger:
    return translated("BartForConditionalGeneration")


def whisper() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        target = batch["target"]
        out = model(batch["sound"], target, batch["target_mask"], positions(target))
        return cross_entropy(out.logits, batch["labels"], batch["target_mask"])

    pairs = sentence_pairs()
    sound = random().normal(size=(ROWS, 10, 2 * LENGTH)).astype("float32")
    kept = {name: pairs[name] for name in ("target", "target_mask", "labels")}
    sizes = {"num_mel_bins": 10, "max_source_positions": LENGTH, "max_target_positions": 16}
    config = {key: value for key, value in SEQ2SEQ.items() if key != "max_position_embeddings"}
    return Stranger(module("WhisperForConditionalGeneration", **config, **sizes), loss, {**kept, "sound": sound})


# -- pictures and sound -----------------------------------------------------------------------------------------------
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def vit() -> Stranger:
    return classified("ViTForImageClassification", **VISION, **STILL)


def dinov2() -> Stranger:
    return classified("Dinov2ForImageClassification", **VISION, **STILL, mlp_ratio=2)


def beit() -> Stranger:
    kind = {"drop_path_rate": 0.0, "use_relative_position_bias": True}
    return classified("BeitForImageClassification", **VISION, **STILL, **kind)


def resnet() -> Stranger:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 2], "layer_type": "basic"}
    return apart(classified("ResNetForImageClassification", **sizes))


def regnet() -> Stranger:
    sizes = {"embedding_size": 8, "hidden_sizes": [16, 24], "depths": [2, 2], "groups_width": 8}
    return apart(classified("RegNetForImageClassification", **sizes))


def apart(stranger: Stranger) -> Stranger:
    """With BatchNorm: each micro-batch has statistics of its own."""
    return Stranger(stranger.model, stranger.loss, stranger.batch, apart=True)


def clip() -> Stranger:
    """Pictures and sentences of one batch are told from each other."""

    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["ids"], batch["images"], batch["mask"], positions(batch["ids"]), return_dict=True)
        pairs = jnp.arange(batch["ids"].shape[0])
        return (cross_entropy(out.logits_per_text, pairs) + cross_entropy(out.logits_per_image, pairs)) / 2

    text = {**TEXT, "projection_dim": 16}
    vision = {**VISION, "projection_dim": 16}
    model = module("CLIPModel", text_config=text, vision_config=vision, projection_dim=16)
    return Stranger(model, loss, {**tokens(), "images": pictures()["images"]})


WAVES: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": (16, 16),
    "conv_kernel": (4, 3),
    "conv_stride": (3, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 4,
    "do_stable_layer_norm": True,
    "feat_extract_norm": "layer",
}


def wav2vec2() -> Stranger:
    """Speech, with CTC as its loss."""

    def loss(model: Any, batch: Any) -> Any:
        logits = model(batch["waves"], batch["mask"], return_dict=True).logits
        silent = jnp.zeros(logits.shape[:2], logits.dtype)
        return optax.ctc_loss(logits, silent, batch["letters"], batch["no letter"]).mean()

    rng = random()
    batch = {
        "waves": rng.normal(size=(ROWS, 76)).astype("float32"),
        "mask": np.ones((ROWS, 76), "int32"),
        "letters": rng.integers(1, 12, (ROWS, 4)).astype("int32"),
        "no letter": (np.arange(4) >= rng.integers(2, 5, (ROWS, 1))).astype("float32"),
    }
    return Stranger(module("Wav2Vec2ForCTC", **WAVES), loss, batch)


def speech_encoder_decoder() -> Stranger:
    """wav2vec2 with an adapter in front of a BERT that decodes."""

    def loss(model: Any, batch: Any) -> Any:
        target = batch["target"]
        out = model(batch["waves"], batch["mask"], target, batch["target_mask"], positions(target))
        return cross_entropy(out.logits, batch["labels"], batch["target_mask"])

    encoder = transformers.Wav2Vec2Config(**{**WAVES, "add_adapter": True, "num_adapter_layers": 1})
    decoder = transformers.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.FlaxSpeechEncoderDecoderModel.module_class(config, dtype=jnp.float64)
    pairs = sentence_pairs()
    kept = {name: pairs[name] for name in ("target", "target_mask", "labels")}
    waves = {"waves": random().normal(size=(ROWS, 76)).astype("float32"), "mask": np.ones((ROWS, 76), "int32")}
    return Stranger(model, loss, {**kept, **waves})
