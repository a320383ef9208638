import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import by_hand as hand

from cjax.models.llama import Llama, LlamaConfig, frequencies, llama, loss, presets, rotate

tiny = LlamaConfig(
    num_layers=2, num_heads=6, num_kv_heads=2, embed_dim=10, mlp_dim=14, head_dim=4, context=16, vocab_size=29,
    rope_theta=50.0, rope_factor=4.0, rope_context=12,
)  # fmt: skip


def make(config: LlamaConfig = tiny) -> Llama:
    return hand.generic(lambda: Llama(config, rngs=nnx.Rngs(0)))


def make_tokens(length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, tiny.vocab_size, (2, length))


@pytest.mark.parametrize("name", presets)
def test_every_preset_has_the_number_of_parameters_it_claims(name: str):
    config = llama(name, num_layers=1)
    abstract = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))) == config.num_params


def test_published_sizes():
    counts = {name: config.num_params for name, config in presets.items()}
    assert counts["llama-2-7b"] == 6_738_415_616
    assert counts["llama-2-13b"] == 13_015_864_320
    assert counts["llama-2-70b"] == 68_976_648_192
    assert counts["llama-3-8b"] == counts["llama-3.1-8b"] == 8_030_261_248
    assert counts["llama-3-70b"] == 70_553_706_496
    assert counts["llama-3.2-1b"] == 1_235_814_400


def turned(x: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Each pair of numbers of x [sequence, heads, width] as a complex number, turned by its position."""
    half = x.shape[-1] // 2
    pairs = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * np.arange(len(x))[:, None] * rates)[:, None]
    return np.concatenate([pairs.real, pairs.imag], axis=-1)


def reference_logits(model: Llama, tokens: np.ndarray) -> np.ndarray:
    rows, rates, epsilon = [], frequencies(model.config), model.config.norm_epsilon
    causal = np.tril(np.ones([tokens.shape[1]] * 2))
    for row in tokens:
        x = hand.read(model.token_embed.embedding)[row]
        for block in model.blocks:
            y, layer = hand.rms_norm(block.attention_norm, x, epsilon), block.attention
            query, key = turned(hand.linear(layer.query, y), rates), turned(hand.linear(layer.key, y), rates)
            mixed = hand.attend(query, key, hand.linear(layer.value, y), model.config.width**-0.5, seen=causal)
            x = x + hand.linear(layer.out, mixed)
            y = hand.rms_norm(block.mlp_norm, x, epsilon)
            gate = hand.linear(block.mlp.gate, y)
            x = x + hand.linear(block.mlp.down, gate / (1 + np.exp(-gate)) * hand.linear(block.mlp.up, y))
        x = hand.rms_norm(model.norm, x, epsilon)
        tied = model.config.tied
        rows.append(x @ hand.read(model.token_embed.embedding).T if tied else hand.linear(model.head, x))
    return np.stack(rows)


@pytest.mark.full("changes0")
@pytest.mark.parametrize("changes", [{}, {"tied": True, "num_kv_heads": 6, "rope_factor": 1.0}])
def test_logits_and_loss_equal_the_architecture_written_by_hand(changes: dict):
    model, tokens = make(dataclasses.replace(tiny, **changes)), make_tokens(11)
    expected = reference_logits(model, tokens[:, :-1])
    targets = np.where(np.arange(10) < 3, -100, tokens[:, 1:])
    both = nnx.jit(lambda model, batch: (model(batch["inputs"]), loss(model, batch)))
    logits, found = both(model, {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(targets)})
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(found, hand.mean_loss(expected, targets), rtol=1e-4)


def test_the_width_of_heads_follows_the_sizes():
    assert llama("llama-2-7b", embed_dim=2048).width == 64
    assert llama("llama-3.2-1b", embed_dim=1024).width == 64


def test_scores_depend_on_distance_alone():
    rates = jnp.asarray(frequencies(tiny), jnp.float32)
    query, key = jax.random.normal(jax.random.key(0), [2, 1, 1, 1, tiny.width])
    angles = jnp.arange(9)[:, None] * rates
    turn = lambda x, i: rotate(x, angles[i : i + 1])  # noqa: E731
    score = lambda i, j: float((turn(query, i) * turn(key, j)).sum())  # noqa: E731
    assert score(3, 1) == pytest.approx(score(8, 6), rel=1e-4) and abs(score(3, 1) - score(3, 2)) > 1e-2


def test_long_wavelengths_are_stretched_and_short_ones_kept():
    """Llama 3.1: whole turns within 8192 / 4 positions stay, those above 8192 get 8 times longer."""
    plain, stretched = (frequencies(llama("llama-3.1-8b", rope_factor=factor)) for factor in (1.0, 8.0))
    wavelength = 2 * np.pi / plain
    ratio = plain / stretched
    np.testing.assert_allclose(ratio[wavelength < 2048], 1)
    np.testing.assert_allclose(ratio[wavelength > 8192], 8)
    between = ratio[(wavelength > 2048) & (wavelength < 8192)]
    assert len(between) > 2 and (np.diff(between) > 0).all() and 1 < between[0] and between[-1] < 8


def test_heads_are_a_dimension_of_the_projections():
    attention = Llama(tiny, rngs=nnx.Rngs(0)).blocks[0].attention
    assert attention.query.kernel.shape == (10, 6, 4) and attention.key.kernel.shape == (10, 2, 4)
    assert attention.out.kernel.shape == (6, 4, 10)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: llama("llama-4"), "llama-3-8b"),
        (lambda: llama("llama-3-8b", heads=3), "num_heads"),
        (lambda: LlamaConfig(num_heads=6, num_kv_heads=4), "num_heads=8"),
        (lambda: LlamaConfig(embed_dim=100, num_heads=32), "embed_dim=96"),
        (lambda: LlamaConfig(head_dim=5), "head_dim=6"),
        (lambda: LlamaConfig(rope_factor=0.5), "at least 1"),
        (lambda: LlamaConfig(rope_factor=8, rope_low=4, rope_high=1), "0 < rope_low < rope_high"),
        (lambda: LlamaConfig(mlp_dim=0), "at least 1"),
        (lambda: make()(jnp.zeros([1, 17], jnp.int32)), "context of 16"),
    ],
)
def test_bad_sizes_say_what_to_write(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
