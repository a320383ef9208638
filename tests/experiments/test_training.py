"""The experiments that train a model to a known number, on a few steps of a smaller one."""

from pathlib import Path

import finetune_llama
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import train_gpt
import train_vit
from flax import nnx
from training.lora import LAYERS, AdaptedLinear, adapt, merge

from cjax.models import Llama, LlamaConfig, load

HERE = ["--tiny", "--devices", "8"]
SIZES = LlamaConfig(2, 4, 2, 16, 24, context=8, vocab_size=32)


@pytest.mark.full
def test_a_vit_learns_digits() -> None:
    assert train_vit.main([*HERE, "--plan", "data=2 tensor=2 zero=1"]) > 0.3  # one in ten by chance


def test_a_vit_of_images_that_are_no_squares(tmp_path: Path) -> None:
    np.savez(tmp_path / "wide.npz", images=np.arange(960, dtype=np.uint8).reshape(20, 6, 8), labels=np.arange(20) % 2)
    with pytest.raises(ValueError, match="6 x 8; a ViT takes squares: give --size 6"):
        train_vit.main([*HERE, "--data", str(tmp_path / "wide.npz"), "--batch", "4"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return file


@pytest.mark.full
def test_a_gpt_learns_text(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_gpt.main([*HERE, "--data", str(text)]) < 5.2  # guessing among 256 is 5.545
    assert "a sample:\n" in capsys.readouterr().out


@pytest.mark.full
def test_adapters_are_all_that_is_trained(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "merged"
    plans = ["--plan", "data=2 tensor=2 zero=1", "--compare", "data=1", "zero=3"]
    few = ["--layers", "query", "down", "--rate", "3e-2"]
    finetune_llama.main([*HERE, *few, "--data", str(text), "--out", str(out), *plans])
    said = capsys.readouterr().out
    before, unadapted = (
        float(said.split(word)[1].split()[0].rstrip(";")) for word in ("before: ", "without adapters ")
    )
    after = float(said.split("steps: ")[1].split()[0])
    assert before == pytest.approx(unadapted, abs=1e-6) and after < before - 0.02
    assert "640 parameters are trained" in said and "frozen weights that changed: 0 of 21" in said
    assert load(out, Llama).config.num_layers == 2


def adapted(layers: tuple[str, ...] = LAYERS) -> Llama:
    """With adapters that do something."""
    model = adapt(Llama(SIZES, rngs=nnx.Rngs(0)), 3, 6.0, layers, rngs=nnx.Rngs(1))
    for _, part in nnx.iter_modules(model):
        if isinstance(part, AdaptedLinear):
            part.lora.lora_b[...] = jax.random.normal(jax.random.key(2), part.lora.lora_b.shape) / 10
    return model


@pytest.mark.full
def test_a_fresh_adapter_changes_nothing() -> None:
    tokens, plain = jnp.arange(16).reshape(2, 8), Llama(SIZES, rngs=nnx.Rngs(0))
    expected = plain(tokens)
    model = adapt(plain, 3, 6.0, rngs=nnx.Rngs(1))
    np.testing.assert_array_equal(model(tokens), expected)
    assert np.abs(adapted()(tokens) - expected).max() > 1e-3


@pytest.mark.full("layers0", "layers1")
@pytest.mark.parametrize("layers", [LAYERS, ("query", "value"), ("down",)])
def test_merging_gives_a_plain_model_with_the_same_logits(layers: tuple[str, ...]) -> None:
    tokens, model = jnp.arange(16).reshape(2, 8), adapted(layers)
    merged = merge(model)
    assert not jax.tree.leaves(nnx.state(merged, nnx.LoRAParam)) and jax.tree.leaves(nnx.state(model, nnx.LoRAParam))
    assert not [part for _, part in nnx.iter_modules(merged) if isinstance(part, AdaptedLinear)]
    np.testing.assert_allclose(merged(tokens), model(tokens), rtol=1e-5, atol=1e-6)


def test_adapters_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="rank is 0"):
        adapt(Llama(SIZES, rngs=nnx.Rngs(0)), 0, 1.0, rngs=nnx.Rngs(1))
    with pytest.raises(ValueError, match="'head'.* write some of query, key"):
        adapt(Llama(SIZES, rngs=nnx.Rngs(0)), 1, 1.0, ["query", "head"], rngs=nnx.Rngs(1))
