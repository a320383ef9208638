"""The strangers by name: where each comes from, and the function that makes it. Imports none of them."""

import dataclasses

TRANSFORMERS = "transformers 4.57"
WRITTEN = "rewritten"
# Compared in float32: their authors fixed it for what goes from layer to layer, so that in float64 no two are alike.
NARROW = {"mamba2", "mamba3", "differential"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One stranger. `make` is `module:function` in this folder; it gives a `Stranger`."""

    name: str
    source: str
    what: str
    make: str

    @property
    def wide(self) -> bool:
        return self.name not in NARROW


def _rows(source: str, module: str, **named: str) -> list[Row]:
    return [Row(name, source, what, f"{module}:{name}") for name, what in named.items()]


ROWS = [
    *_rows(
        TRANSFORMERS,
        "hf",
        bert="masked words, padding",
        albert="layers that share their weights",
        roformer="rotary positions in an encoder",
        big_bird="block-sparse attention",
        electra="replaced words, found",
        gpt2="next words, padding",
        gpt_neo="global and local attention in turn",
        gptj="attention and MLP side by side",
        llama="grouped queries",
        gemma="one key head",
        bloom="slopes instead of positions",
        opt="embeddings narrower than the layers",
        bart="encoder and decoder",
        whisper="sound to words",
        vit="pictures",
        dinov2="pictures, layers scaled",
        beit="relative positions in pictures",
        resnet="BatchNorm",
        regnet="grouped convolutions, squeeze and excitation",
        clip="pictures and words of one batch, told apart",
        wav2vec2="sound, CTC",
        speech_encoder_decoder="sound to words, with an adapter",
    ),
    *_rows(
        "tunix",
        "packages",
        tunix_llama="rotary positions, grouped queries, one table",
        tunix_qwen_moe="experts, two for each word",
        tunix_gemma="local and global attention, four norms a layer",
    ),
    *_rows("mamba2-jax", "packages", mamba2="a state space in chunks, depthwise convolutions"),
    *_rows("mamba3-jax", "packages", mamba3="a state space that turns"),
    *_rows("recurrentgemma", "packages", griffin="gated recurrences and local attention"),
    *_rows("nano-moe-jax", "packages", nano_moe="experts stacked and gathered"),
    *_rows(
        "dantinox",
        "packages",
        differential="attention less attention",
        latent_experts="latent attention, latent experts",
    ),
    *_rows("diffusers 0.35", "packages", diffusion_unet="noise in pictures, cross-attention"),
    *_rows(
        WRITTEN,
        "signals",
        s4d="complex state space, FFT",
        s5="complex state space, parallel scan",
        wavenet="dilated convolutions, skips",
        gru_speech="GRUs both ways, CTC",
        lstm_translator="LSTM to LSTM, attention",
        graph_net="messages along edges",
        fourier_operator="complex weights of frequencies",
        radiance_field="products along rays",
        actor_critic="PPO",
    ),
    *_rows(
        WRITTEN,
        "images",
        convnext="depthwise convolutions, LayerNorm",
        big_transfer="weights standardised",
        efficientnet="depthwise convolutions, BatchNorm",
        mixer="MLPs over patches",
        swin="shifted windows",
        switch_transformer="experts with a capacity",
        autoencoder="variational",
        pixelcnn="masked weights",
        denoiser="UNet with time",
    ),
]
BY_NAME = {row.name: row for row in ROWS}
assert len(BY_NAME) == len(ROWS)
