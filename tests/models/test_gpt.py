import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import by_hand as hand

from cjax.models import GPT, GPTConfig, generate, gpt, loss, presets

tiny = GPTConfig(num_layers=2, num_heads=3, embed_dim=12, mlp_dim=20, context=16, vocab_size=29)


def make(config: GPTConfig = tiny, seed: int = 0) -> GPT:
    return GPT(config, rngs=nnx.Rngs(seed))


def make_tokens(length: int, batch: int = 2) -> jax.Array:
    return jax.random.randint(jax.random.key(7), [batch, length], 0, tiny.vocab_size)


@pytest.mark.parametrize("name", presets)
def test_every_preset_has_the_number_of_parameters_it_claims(name: str):
    config = gpt(name, num_layers=2)  # Flax builds deep models slowly under a trace; each layer is the same
    abstract = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))) == config.num_params


def test_published_sizes():
    millions = {name: round(gpt(name).num_params / 1e6) for name in presets}
    assert (millions["gpt2"], millions["gpt2-medium"], millions["gpt2-large"]) == (124, 355, 774)
    assert millions["gpt2-xl"] == 1558
    assert 174_000 < millions["gpt3-175b"] < 176_000


def test_heads_are_a_dimension_of_the_projections():
    attention = make().blocks[1].attention
    assert attention.query.kernel.shape == (12, 3, 4)
    assert attention.out.kernel.shape == (3, 4, 12)


def reference_logits(model: GPT, tokens: np.ndarray) -> np.ndarray:
    """The same network by hand in NumPy, float64, one head and one row at a time."""
    read = lambda variable: np.asarray(variable[...], np.float64)  # noqa: E731

    def norm(layer: nnx.LayerNorm, x: np.ndarray) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * read(layer.scale) + read(layer.bias)

    def attend(layer, x: np.ndarray) -> np.ndarray:
        total = np.zeros_like(x) + read(layer.out.bias)
        for head in range(tiny.num_heads):
            query, key, value = (
                x @ read(p.kernel)[:, head] + read(p.bias)[head] for p in (layer.query, layer.key, layer.value)
            )
            for t in range(len(x)):
                scores = np.exp(key[: t + 1] @ query[t] / np.sqrt(tiny.head_dim))
                total[t] += (scores / scores.sum() @ value[: t + 1]) @ read(layer.out.kernel)[head]
        return total

    def feed(layer, x: np.ndarray) -> np.ndarray:
        hidden = x @ read(layer.up.kernel) + read(layer.up.bias)
        hidden = 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3)))
        return hidden @ read(layer.down.kernel) + read(layer.down.bias)

    rows = []
    for row in tokens:
        x = read(model.token_embed.embedding)[row] + read(model.position_embed.embedding)[: len(row)]
        for block in model.blocks:
            x = x + attend(block.attention, norm(block.attention_norm, x))
            x = x + feed(block.mlp, norm(block.mlp_norm, x))
        rows.append(norm(model.norm, x) @ read(model.token_embed.embedding).T)
    return np.stack(rows)


def make_generic() -> GPT:
    return hand.generic(make)


def test_logits_equal_the_architecture_written_by_hand():
    model, tokens = make_generic(), make_tokens(11)
    np.testing.assert_allclose(model(tokens), reference_logits(model, np.asarray(tokens)), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("chunk", [4, 128])
def test_loss_is_the_mean_cross_entropy(chunk: int):
    model, tokens = make_generic(), make_tokens(12)
    batch = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}
    logits = reference_logits(model, np.asarray(batch["inputs"]))
    picked = np.take_along_axis(logits, np.asarray(batch["targets"])[..., None], -1)[..., 0]
    expected = (np.log(np.exp(logits).sum(-1)) - picked).mean()
    found = nnx.jit(lambda model, batch: loss(model, batch, chunk=chunk))(model, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_starts_near_the_uniform_guess():
    tokens = make_tokens(16)
    first = nnx.jit(loss)(make(), {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
    assert abs(first - np.log(tiny.vocab_size)) < 0.1


def test_dropout_is_random_in_training_and_absent_in_evaluation():
    tokens = make_tokens(9)
    plain, dropped = make(), make(dataclasses.replace(tiny, dropout=0.5))
    assert not np.allclose(dropped(tokens), dropped(tokens))
    nnx.update(dropped, nnx.state(plain, nnx.Param))
    dropped.eval()
    np.testing.assert_array_equal(dropped(tokens), plain(tokens))


def test_a_model_without_dropout_carries_no_random_state():
    assert not jax.tree.leaves(nnx.state(make(), nnx.RngState))


def test_greedy_samples_equal_a_loop_written_by_hand_past_the_context():
    model = make_generic()
    text = np.asarray(make_tokens(5))
    made = generate(model, jnp.asarray(text), 20, jax.random.key(0), temperature=0)
    run = nnx.jit(lambda model, window: model(window))
    for _ in range(20):
        window = text[:, -tiny.context :]
        length = window.shape[1]
        window = np.pad(window, ((0, 0), (0, tiny.context - length)))  # what comes later is not seen: one shape for all
        logits = run(model, jnp.asarray(window))[:, length - 1]
        text = np.concatenate([text, np.argmax(logits, -1)[:, None]], axis=1)
    np.testing.assert_array_equal(made, text)


@pytest.mark.full
def test_top_k_samples_only_the_likeliest():
    model, tokens = make_generic(), make_tokens(4, batch=64)
    made = generate(model, tokens, 1, jax.random.key(1), temperature=5.0, top_k=3)[:, -1]
    best = jnp.argsort(model(tokens)[:, -1], axis=-1)[:, -3:]
    ranks = np.argmax(np.asarray(best) == np.asarray(made)[:, None], axis=1)
    assert (np.asarray(best) == np.asarray(made)[:, None]).any(axis=1).all()
    assert set(ranks.tolist()) == {0, 1, 2}


def test_sampling_leaves_the_model_in_training_mode():
    model = make(dataclasses.replace(tiny, dropout=0.5))
    generate(model, make_tokens(3), 2, jax.random.key(0))
    assert model.dropout.deterministic is False


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: gpt("gpt2-huge"), "gpt2-xl"),
        (lambda: gpt("gpt2", width=3), "embed_dim"),
        (lambda: GPTConfig(embed_dim=100, num_heads=12), "embed_dim=96"),
        (lambda: GPTConfig(dropout=1.0), "below 1"),
        (lambda: GPTConfig(num_layers=0), "at least 1"),
        (lambda: make()(jnp.zeros([1, 17], jnp.int32)), "context of 16"),
        (lambda: generate(make(), jnp.zeros([1, 0], jnp.int32), 1, jax.random.key(0)), "length >= 1"),
        (lambda: generate(make(), make_tokens(2), 1, jax.random.key(0), top_k=30), "top_k"),
    ],
)
def test_bad_sizes_say_what_to_write(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
