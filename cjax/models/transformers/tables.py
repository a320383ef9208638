"""What Hugging Face's folders call the sizes and arrays of our models: data alone, read by `weights`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from cjax.models.bert import BERT, BERTConfig
from cjax.models.gpt import GPT, GPTConfig
from cjax.models.llama import Llama, LlamaConfig
from cjax.models.t5 import T5, T5Config
from cjax.models.vit import ViT, ViTConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """One array of each layer, or of the model.

    Attributes:
        ours: its path in our model; `{i}` is the number of a layer.
        theirs: its name in the file.
        dims: its layout there and here; see `layout`.
        part: which of the pieces that are stored together.
        copies: other names under which it is stored as well.
        or_else: a name to read when the file has none of these.
    """

    ours: str
    theirs: str
    dims: str
    part: int = 0
    copies: tuple[str, ...] = ()
    or_else: str | None = None


@dataclasses.dataclass(frozen=True)
class WeightTable:
    """One kind of model.

    Attributes:
        kind: our class.
        config: the class of its sizes.
        model_type: what config.json calls it.
        architectures: each class of theirs, with the fields of our config that it implies; if a class may come with
            several, the first that the tensors fit.
        read: field of our config -> keys of config.json, the first that is there counts; a dot leads into a group.
        write: key of config.json -> attribute of our config. A group in which all have their defaults is left out.
        values: values of config.json that mean another value to us, by key.
        defaults: what a missing key means, where that is not our config's default.
        required: keys that must be missing or have one of these values, since we have nothing else.
        constants: keys that are the same for all models.
        prefix: begins their names, unless the file is of a model without a head,
        bare: which are these.
        rows: where each array is.
        ignored: regexes of names that hold nothing that we need.
    """

    kind: type
    config: Callable[..., Any]
    model_type: str
    architectures: Mapping[str, tuple[Mapping[str, Any], ...]]
    read: Mapping[str, tuple[str, ...]]
    write: Mapping[str, str]
    constants: Mapping[str, Any]
    rows: tuple[Row, ...]
    values: Mapping[str, Mapping[Any, Any]] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    bare: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


def _dense(ours: str, theirs: str, dims: str = "out in -> in out", bias: str = "out -> out") -> tuple[Row, ...]:
    return (Row(f"{ours}/kernel", f"{theirs}.weight", dims), Row(f"{ours}/bias", f"{theirs}.bias", bias))


def _norm(ours: str, theirs: str) -> tuple[Row, ...]:
    return (Row(f"{ours}/scale", f"{theirs}.weight", "x -> x"), Row(f"{ours}/bias", f"{theirs}.bias", "x -> x"))


def _to_heads(ours: str, theirs: str) -> tuple[Row, ...]:
    return _dense(ours, theirs, "(heads width) embed -> embed heads width", "(heads width) -> heads width")


def _embed(ours: str, theirs: str) -> Row:
    return Row(f"{ours}/embedding", theirs, "id embed -> id embed")


_FROM_HEADS = "embed (heads width) -> heads width embed"
_HEADS_TO = "(heads width) embed -> embed heads width"
_HEAD = Row("head/kernel", "lm_head.weight", "vocab embed -> embed vocab")

_gpt = WeightTable(
    kind=GPT,
    config=GPTConfig,
    model_type="gpt2",
    architectures={"GPT2LMHeadModel": ({},), "GPT2Model": ({},)},
    read={
        "num_layers": ("n_layer",), "num_heads": ("n_head",), "embed_dim": ("n_embd",), "mlp_dim": ("n_inner",),
        "context": ("n_positions",), "vocab_size": ("vocab_size",), "tied": ("tie_word_embeddings",),
    },
    write={
        "n_layer": "num_layers", "n_head": "num_heads", "n_embd": "embed_dim", "n_inner": "mlp_dim",
        "n_positions": "context", "vocab_size": "vocab_size", "tie_word_embeddings": "tied",
        "resid_pdrop": "dropout", "embd_pdrop": "dropout",
    },
    constants={"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "attn_pdrop": 0.0},
    required={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    },
    prefix="transformer.",
    bare=("GPT2Model",),
    rows=(
        _embed("token_embed", "transformer.wte.weight"),
        _embed("position_embed", "transformer.wpe.weight"),
        *(
            row
            for part, name in enumerate(("query", "key", "value"))
            for row in (
                Row(f"blocks/{{i}}/attention/{name}/kernel", "transformer.h.{i}.attn.c_attn.weight",
                    "embed (3 heads width) -> embed heads width", part),
                Row(f"blocks/{{i}}/attention/{name}/bias", "transformer.h.{i}.attn.c_attn.bias",
                    "(3 heads width) -> heads width", part),
            )
        ),
        *_dense("blocks/{i}/attention/out", "transformer.h.{i}.attn.c_proj",
                "(heads width) embed -> heads width embed"),
        *_norm("blocks/{i}/attention_norm", "transformer.h.{i}.ln_1"),
        *_dense("blocks/{i}/mlp/up", "transformer.h.{i}.mlp.c_fc", "in out -> in out"),
        *_dense("blocks/{i}/mlp/down", "transformer.h.{i}.mlp.c_proj", "in out -> in out"),
        *_norm("blocks/{i}/mlp_norm", "transformer.h.{i}.ln_2"),
        *_norm("norm", "transformer.ln_f"),
        _HEAD,
    ),
    ignored=(r"lm_head\.weight", r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),
)  # fmt: skip

_bert = WeightTable(
    kind=BERT,
    config=BERTConfig,
    model_type="bert",
    architectures={
        "BertForMaskedLM": ({"head": "masked", "pooling": "none"},),
        "BertForSequenceClassification": ({"head": "classes", "pooling": "first"},),
        "BertModel": tuple({"head": "none", "pooling": pooling} for pooling in ("first", "none", "mean")),
    },
    read={
        "num_layers": ("num_hidden_layers",), "num_heads": ("num_attention_heads",), "embed_dim": ("hidden_size",),
        "mlp_dim": ("intermediate_size",), "context": ("max_position_embeddings",), "vocab_size": ("vocab_size",),
        "num_types": ("type_vocab_size",), "norm_epsilon": ("layer_norm_eps",),
        "num_classes": ("num_labels", "id2label"), "tied": ("tie_word_embeddings",),
    },
    write={
        "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "hidden_size": "embed_dim",
        "intermediate_size": "mlp_width", "max_position_embeddings": "context", "vocab_size": "vocab_size",
        "type_vocab_size": "num_types", "layer_norm_eps": "norm_epsilon", "num_labels": "num_classes",
        "tie_word_embeddings": "tied", "hidden_dropout_prob": "dropout",
    },
    constants={"hidden_act": "gelu", "attention_probs_dropout_prob": 0.0},
    required={
        "hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,),
        "add_cross_attention": (False,),
    },
    prefix="bert.",
    bare=("BertModel",),
    rows=(
        _embed("token_embed", "bert.embeddings.word_embeddings.weight"),
        _embed("position_embed", "bert.embeddings.position_embeddings.weight"),
        _embed("type_embed", "bert.embeddings.token_type_embeddings.weight"),
        *_norm("embed_norm", "bert.embeddings.LayerNorm"),
        *_to_heads("blocks/{i}/attention/query", "bert.encoder.layer.{i}.attention.self.query"),
        *_to_heads("blocks/{i}/attention/key", "bert.encoder.layer.{i}.attention.self.key"),
        *_to_heads("blocks/{i}/attention/value", "bert.encoder.layer.{i}.attention.self.value"),
        *_dense("blocks/{i}/attention/out", "bert.encoder.layer.{i}.attention.output.dense", _FROM_HEADS),
        *_norm("blocks/{i}/attention_norm", "bert.encoder.layer.{i}.attention.output.LayerNorm"),
        *_dense("blocks/{i}/mlp/up", "bert.encoder.layer.{i}.intermediate.dense"),
        *_dense("blocks/{i}/mlp/down", "bert.encoder.layer.{i}.output.dense"),
        *_norm("blocks/{i}/mlp_norm", "bert.encoder.layer.{i}.output.LayerNorm"),
        *_dense("pooler", "bert.pooler.dense"),
        *_dense("word_head/dense", "cls.predictions.transform.dense"),
        *_norm("word_head/norm", "cls.predictions.transform.LayerNorm"),
        Row("word_head/words/kernel", "cls.predictions.decoder.weight", "vocab embed -> embed vocab"),
        Row("word_head/bias", "cls.predictions.decoder.bias", "x -> x", copies=("cls.predictions.bias",)),
        *_dense("class_head", "classifier"),
    ),
    ignored=(
        r"(bert\.)?embeddings\.position_ids", r"cls\.predictions\.decoder\.weight", r"cls\.predictions\.bias",
        r"cls\.seq_relationship\..*", r"bert\.pooler\..*",
    ),
)  # fmt: skip
_vit = WeightTable(
    kind=ViT,
    config=ViTConfig,
    model_type="vit",
    architectures={"ViTForImageClassification": ({},)},
    read={
        "num_layers": ("num_hidden_layers",), "num_heads": ("num_attention_heads",), "embed_dim": ("hidden_size",),
        "mlp_dim": ("intermediate_size",), "image_size": ("image_size",), "patch_size": ("patch_size",),
        "num_channels": ("num_channels",), "num_classes": ("num_labels", "id2label"),
        "norm_epsilon": ("layer_norm_eps",),
    },
    write={
        "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "hidden_size": "embed_dim",
        "intermediate_size": "mlp_width", "image_size": "image_size", "patch_size": "patch_size",
        "num_channels": "num_channels", "num_labels": "num_classes", "layer_norm_eps": "norm_epsilon",
        "hidden_dropout_prob": "dropout",
    },
    constants={"hidden_act": "gelu", "attention_probs_dropout_prob": 0.0, "qkv_bias": True},
    defaults={"num_classes": 2},
    required={"hidden_act": ("gelu",), "qkv_bias": (True,)},
    rows=(
        Row("class_token", "vit.embeddings.cls_token", "1 1 embed -> embed"),
        Row("position_embed", "vit.embeddings.position_embeddings", "1 position embed -> position embed"),
        *_dense("patch_embed", "vit.embeddings.patch_embeddings.projection",
                "embed channel row column -> row column channel embed"),
        *_norm("blocks/{i}/attention_norm", "vit.encoder.layer.{i}.layernorm_before"),
        *_to_heads("blocks/{i}/attention/query", "vit.encoder.layer.{i}.attention.attention.query"),
        *_to_heads("blocks/{i}/attention/key", "vit.encoder.layer.{i}.attention.attention.key"),
        *_to_heads("blocks/{i}/attention/value", "vit.encoder.layer.{i}.attention.attention.value"),
        *_dense("blocks/{i}/attention/out", "vit.encoder.layer.{i}.attention.output.dense", _FROM_HEADS),
        *_norm("blocks/{i}/mlp_norm", "vit.encoder.layer.{i}.layernorm_after"),
        *_dense("blocks/{i}/mlp/up", "vit.encoder.layer.{i}.intermediate.dense"),
        *_dense("blocks/{i}/mlp/down", "vit.encoder.layer.{i}.output.dense"),
        *_norm("norm", "vit.layernorm"),
        *_dense("head", "classifier"),
    ),
)  # fmt: skip

_llama = WeightTable(
    kind=Llama,
    config=LlamaConfig,
    model_type="llama",
    architectures={"LlamaForCausalLM": ({},)},
    read={
        "num_layers": ("num_hidden_layers",), "num_heads": ("num_attention_heads",),
        "num_kv_heads": ("num_key_value_heads", "num_attention_heads"), "embed_dim": ("hidden_size",),
        "mlp_dim": ("intermediate_size",), "head_dim": ("head_dim",), "context": ("max_position_embeddings",),
        "vocab_size": ("vocab_size",), "norm_epsilon": ("rms_norm_eps",), "tied": ("tie_word_embeddings",),
        "rope_theta": ("rope_parameters.rope_theta", "rope_theta"),
        "rope_factor": ("rope_parameters.factor", "rope_scaling.factor"),
        "rope_low": ("rope_parameters.low_freq_factor", "rope_scaling.low_freq_factor"),
        "rope_high": ("rope_parameters.high_freq_factor", "rope_scaling.high_freq_factor"),
        "rope_context": (
            "rope_parameters.original_max_position_embeddings", "rope_scaling.original_max_position_embeddings",
        ),
    },
    # The older form of rotary positions, which every version of transformers reads.
    write={
        "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads", "num_key_value_heads": "num_kv_heads",
        "hidden_size": "embed_dim", "intermediate_size": "mlp_dim", "head_dim": "width",
        "max_position_embeddings": "context", "vocab_size": "vocab_size", "rms_norm_eps": "norm_epsilon",
        "tie_word_embeddings": "tied", "rope_theta": "rope_theta", "rope_scaling.factor": "rope_factor",
        "rope_scaling.low_freq_factor": "rope_low", "rope_scaling.high_freq_factor": "rope_high",
        "rope_scaling.original_max_position_embeddings": "rope_context",
    },
    constants={
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "rope_scaling.rope_type": "llama3",
    },
    defaults={"norm_epsilon": 1e-6, "context": 2048},
    required={
        "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,),
        "rope_parameters.rope_type": ("default", "llama3"), "rope_scaling.rope_type": ("default", "llama3"),
        "rope_scaling.type": ("default", "llama3"), "rope_parameters.partial_rotary_factor": (1.0,),
    },
    prefix="model.",
    rows=(
        _embed("token_embed", "model.embed_tokens.weight"),
        Row("blocks/{i}/attention_norm/scale", "model.layers.{i}.input_layernorm.weight", "x -> x"),
        Row("blocks/{i}/attention/query/kernel", "model.layers.{i}.self_attn.q_proj.weight", _HEADS_TO),
        Row("blocks/{i}/attention/key/kernel", "model.layers.{i}.self_attn.k_proj.weight", _HEADS_TO),
        Row("blocks/{i}/attention/value/kernel", "model.layers.{i}.self_attn.v_proj.weight", _HEADS_TO),
        Row("blocks/{i}/attention/out/kernel", "model.layers.{i}.self_attn.o_proj.weight", _FROM_HEADS),
        Row("blocks/{i}/mlp_norm/scale", "model.layers.{i}.post_attention_layernorm.weight", "x -> x"),
        Row("blocks/{i}/mlp/gate/kernel", "model.layers.{i}.mlp.gate_proj.weight", "out in -> in out"),
        Row("blocks/{i}/mlp/up/kernel", "model.layers.{i}.mlp.up_proj.weight", "out in -> in out"),
        Row("blocks/{i}/mlp/down/kernel", "model.layers.{i}.mlp.down_proj.weight", "out in -> in out"),
        Row("norm/scale", "model.norm.weight", "x -> x"),
        _HEAD,
    ),
    ignored=(r"lm_head\.weight", r".*rotary_emb\.inv_freq"),
)  # fmt: skip


def _t5_mlp(ours: str, theirs: str) -> tuple[Row, ...]:
    names = {"up": "wi", "gate": "wi_0", "linear": "wi_1", "down": "wo"}
    return (
        *(
            Row(f"{ours}/mlp/{our}/kernel", f"{theirs}.DenseReluDense.{their}.weight", "out in -> in out")
            for our, their in names.items()
        ),
        Row(f"{ours}/mlp_norm/scale", f"{theirs}.layer_norm.weight", "x -> x"),
    )


def _t5_attention(ours: str, theirs: str, name: str) -> tuple[Row, ...]:
    names = {"query": "q", "key": "k", "value": "v"}
    return (
        *(Row(f"{ours}/{our}/kernel", f"{theirs}.{name}.{their}.weight", _HEADS_TO) for our, their in names.items()),
        Row(f"{ours}/out/kernel", f"{theirs}.{name}.o.weight", _FROM_HEADS),
        Row(f"{ours}_norm/scale", f"{theirs}.layer_norm.weight", "x -> x"),
    )


_T5_BIAS = "block.0.layer.0.SelfAttention.relative_attention_bias.weight"

_t5 = WeightTable(
    kind=T5,
    config=T5Config,
    model_type="t5",
    architectures={"T5ForConditionalGeneration": ({},)},
    read={
        "num_layers": ("num_layers",), "num_decoder_layers": ("num_decoder_layers", "num_layers"),
        "num_heads": ("num_heads",), "head_dim": ("d_kv",), "embed_dim": ("d_model",), "mlp_dim": ("d_ff",),
        "vocab_size": ("vocab_size",), "num_buckets": ("relative_attention_num_buckets",),
        "max_distance": ("relative_attention_max_distance",), "norm_epsilon": ("layer_norm_epsilon",),
        "gated": ("feed_forward_proj",), "tied": ("scale_decoder_outputs", "tie_word_embeddings"),
    },
    write={
        "num_layers": "num_layers", "num_decoder_layers": "decoder_layers", "num_heads": "num_heads",
        "d_kv": "head_dim", "d_model": "embed_dim", "d_ff": "mlp_dim", "vocab_size": "vocab_size",
        "relative_attention_num_buckets": "num_buckets", "relative_attention_max_distance": "max_distance",
        "layer_norm_epsilon": "norm_epsilon", "feed_forward_proj": "gated", "tie_word_embeddings": "tied",
        "dropout_rate": "dropout",
    },
    values={"feed_forward_proj": {"relu": False, "gated-gelu": True}},
    constants={"is_encoder_decoder": True, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1},
    required={"feed_forward_proj": ("relu", "gated-gelu")},
    rows=(
        _embed("token_embed", "shared.weight"),
        _embed("encoder_bias/table", f"encoder.{_T5_BIAS}"),
        *_t5_attention("encoder/{i}/attention", "encoder.block.{i}.layer.0", "SelfAttention"),
        *_t5_mlp("encoder/{i}", "encoder.block.{i}.layer.1"),
        Row("encoder_norm/scale", "encoder.final_layer_norm.weight", "x -> x"),
        _embed("decoder_bias/table", f"decoder.{_T5_BIAS}"),
        *_t5_attention("decoder/{i}/attention", "decoder.block.{i}.layer.0", "SelfAttention"),
        *_t5_attention("decoder/{i}/cross", "decoder.block.{i}.layer.1", "EncDecAttention"),
        *_t5_mlp("decoder/{i}", "decoder.block.{i}.layer.2"),
        Row("decoder_norm/scale", "decoder.final_layer_norm.weight", "x -> x"),
        # transformers 5 leaves out a classifier that equals the embedding, although it isn't scaled as a tied one is.
        dataclasses.replace(_HEAD, or_else="shared.weight"),
    ),
    ignored=(
        r"lm_head\.weight", r"(en|de)coder\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
    ),
)  # fmt: skip

tables: tuple[WeightTable, ...] = (_gpt, _bert, _vit, _llama, _t5)
