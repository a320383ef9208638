"""Models in plain Flax NNX. They know nothing of devices, plans or cjax."""

from cjax.models.gpt import GPT, GPTConfig, generate, gpt, loss, presets

__all__ = ["GPT", "GPTConfig", "generate", "gpt", "loss", "presets"]
