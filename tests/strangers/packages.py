"""Flax models of other packages, at tiny sizes, with random weights."""

import importlib
import importlib.util
import sys
import types
from typing import Any

import jax.numpy as jnp
from flax import nnx
from strangers.common import ROWS, VOCAB, Stranger, cross_entropy, next_words, random, tokens, wide


def submodule(package: str, name: str) -> Any:
    """`package.name`, without running the package's own __init__, which imports trainers and what they need."""
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        assert spec and spec.submodule_search_locations, package
        hull = types.ModuleType(package)
        hull.__path__ = list(spec.submodule_search_locations)
        sys.modules[package] = hull
    return importlib.import_module(f"{package}.{name}")


# -- tunix: NNX decoders ----------------------------------------------------------------------------------------------
def tunix(kind: str, cls: str, **config: Any) -> Stranger:
    module = submodule("tunix", f"models.{kind}.model")

    def loss(model: Any, batch: Any) -> Any:
        ids, length = batch["ids"], batch["ids"].shape[1]
        causal = jnp.tril(jnp.ones((length, length), bool))[None] & (batch["mask"][:, None, :] > 0)
        places = jnp.broadcast_to(jnp.arange(length), ids.shape)
        return next_words(model(ids, places, None, causal)[0], batch)

    sizes = {"num_layers": 2, "embed_dim": 32, "hidden_dim": 48, "num_heads": 4, "head_dim": 8, "num_kv_heads": 2}
    model = getattr(module, cls)(module.ModelConfig(**{**sizes, **config}), rngs=nnx.Rngs(0))
    return Stranger(wide(model), loss, tokens())


def tunix_llama() -> Stranger:
    return tunix("llama3", "Llama3", vocab_size=VOCAB, rope_theta=10_000, norm_eps=1e-5, weight_tying=True)


def tunix_qwen_moe() -> Stranger:
    """Each token goes to 2 of 4 experts, all of which compute it."""
    sizes = {"vocab_size": VOCAB, "rope_theta": 10_000, "norm_eps": 1e-6, "num_experts": 4, "num_experts_per_tok": 2}
    return tunix("qwen3", "Qwen3", dtype=jnp.float64, **sizes)


def tunix_gemma() -> Stranger:
    """Local attention in five layers of six, norms before and behind, queries and keys normed."""
    return tunix("gemma3", "Gemma3", num_embed=VOCAB, sliding_window_size=4, num_layers=6, param_dtype=jnp.float32)


# -- state spaces and recurrences -------------------------------------------------------------------------------------
def mamba2() -> Stranger:
    module = importlib.import_module("mamba2_jax")
    config = module.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=8,
        head_dim=16,
        chunk_size=6,
        num_hidden_layers=2,
        residual_in_fp32=False,
    )
    model = module.Mamba2ForCausalLM(config, rngs=nnx.Rngs(0))
    return Stranger(wide(model), lambda model, batch: next_words(model(batch["ids"])["logits"], batch), tokens())


def mamba3() -> Stranger:
    module = importlib.import_module("mamba3_jax")
    config = module.Mamba3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        state_size=8,
        head_dim=16,
        chunk_size=6,
        num_hidden_layers=2,
        residual_in_fp32=False,
    )
    model = module.Mamba3ForCausalLM(config, rngs=nnx.Rngs(0))
    return Stranger(wide(model), lambda model, batch: next_words(model(batch["ids"])["logits"], batch), tokens())


def griffin() -> Stranger:
    """Two gated linear recurrences for each local attention, each block recomputed."""
    module, common = importlib.import_module("recurrentgemma.jax"), importlib.import_module("recurrentgemma.common")
    kinds = common.TemporalBlockType
    config = common.GriffinConfig(
        vocab_size=VOCAB,
        width=32,
        mlp_expanded_width=48,
        num_heads=4,
        block_types=(kinds.RECURRENT, kinds.RECURRENT, kinds.ATTENTION) * 2,
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=6,
        logits_soft_cap=30.0,
        scan_type=common.ScanType.ASSOCIATIVE_NATIVE,
    )

    def loss(model: Any, batch: Any) -> Any:
        places = jnp.broadcast_to(jnp.arange(batch["ids"].shape[1], dtype=jnp.int32), batch["ids"].shape)
        return next_words(model(batch["ids"], places)[0], batch)

    return Stranger(module.Griffin(config), loss, tokens())


# -- others -----------------------------------------------------------------------------------------------------------
def nano_moe() -> Stranger:
    """Experts are stacked and gathered; what balances them is a product of means over all tokens, inside the model."""
    submodule("nano_moe", "config")
    config = submodule("nano_moe", "config").NanoMoEConfig(
        vocab_size=VOCAB, n_layers=2, n_heads=4, d_model=32, d_ff=48, n_experts=4, block_size=16, dropout_rate=0.0
    )

    def loss(model: Any, batch: Any) -> Any:
        logits, balance = model(batch["ids"])
        return cross_entropy(logits[:, :-1], batch["ids"][:, 1:]) + config.aux_loss_coeff * balance

    return Stranger(submodule("nano_moe", "model").NanoMoE(config), loss, tokens(), apart=True)


def differential() -> Stranger:
    """Attention as the difference of two, grouped queries."""
    core, model = submodule("dantinox", "core.config"), submodule("dantinox", "core.model")
    config = core.ModelConfig(
        dim=32, n_heads=4, num_blocks=2, vocab_size=VOCAB, max_context=16, attention="gqa", kv_heads=2,
        differential=True, expansion=2,
    )  # fmt: skip
    made = model.Transformer(config, rngs=nnx.Rngs(0))
    return Stranger(wide(made), lambda model, batch: next_words(model(batch["ids"]).logits, batch), tokens())


def latent_experts() -> Stranger:
    """Multi-head latent attention and experts in a latent space, balanced by its author's loss."""
    core, model = submodule("dantinox", "core.config"), submodule("dantinox", "core.model")
    config = core.ModelConfig(
        dim=32, n_heads=4, num_blocks=2, vocab_size=VOCAB, max_context=16, attention="mla", down_dim_q=16,
        down_dim_kv=16, rope_dim=4, ffn="moe", expansion=2, moe_latent=True, moe_latent_dim=16,
    )  # fmt: skip

    def loss(model: Any, batch: Any) -> Any:
        out = model(batch["ids"])
        return cross_entropy(out.logits[:, :-1], batch["ids"][:, 1:]) + 0.1 * out.aux_loss

    return Stranger(wide(model.Transformer(config, rngs=nnx.Rngs(0))), loss, tokens(), apart=True)


def diffusion_unet() -> Stranger:
    """Stable Diffusion's UNet: noise found in a picture, given the time and a text."""
    module = importlib.import_module("diffusers.models.unets.unet_2d_condition_flax")
    model = module.FlaxUNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        attention_head_dim=4,
        cross_attention_dim=16,
        dtype=jnp.float64,
    )

    def loss(model: Any, batch: Any) -> Any:
        found = model(batch["noisy"], batch["time"], batch["text"]).sample
        return jnp.mean((found - batch["noise"]) ** 2)

    rng = random()
    noise, picture = rng.normal(size=(2, ROWS, 4, 8, 8)).astype("float32")
    batch = {
        "noise": noise,
        "noisy": 0.6 * noise + 0.8 * picture,
        "time": rng.integers(0, 1000, ROWS).astype("int32"),
        "text": rng.normal(size=(ROWS, 6, 16)).astype("float32"),
    }
    return Stranger(model, loss, batch)
