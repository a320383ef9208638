import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import by_hand as hand

from cjax.models.t5 import T5, T5Config, buckets, loss, presets, t5

tiny = T5Config(
    num_layers=2, num_decoder_layers=1, num_heads=3, head_dim=4, embed_dim=10, mlp_dim=14, vocab_size=29, num_buckets=8,
    max_distance=10, norm_epsilon=1e-3,
)  # fmt: skip


def make(config: T5Config = tiny) -> T5:
    return hand.generic(lambda: T5(config, rngs=nnx.Rngs(0)), 0.25)


def make_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    source, inputs, targets = (rng.integers(0, tiny.vocab_size, (2, n)) for n in (13, 6, 6))
    present = np.arange(13) < np.array([9, 13])[:, None]
    return {"source": source, "inputs": inputs, "targets": np.where(targets < 4, -100, targets), "present": present}


@pytest.mark.parametrize("name", presets)
@pytest.mark.parametrize("changes", [{}, {"gated": True, "tied": False}])
def test_every_preset_has_the_number_of_parameters_it_claims(name: str, changes: dict):
    config = t5(name, num_layers=1, num_decoder_layers=2, **changes)
    abstract = nnx.eval_shape(lambda: T5(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))) == config.num_params


def test_published_sizes():
    counts = {name: config.num_params for name, config in presets.items()}
    assert counts["t5-small"] == 60_506_624 and counts["t5-base"] == 222_903_552
    assert counts["t5-large"] == 737_668_096
    assert counts["t5-3b"] == 2_851_598_336 and counts["t5-11b"] == 11_307_321_344


def test_the_decoder_is_as_deep_as_the_encoder_unless_told_otherwise():
    assert t5("t5-small", num_layers=2).decoder_layers == 2
    assert t5("t5-small", num_decoder_layers=2).decoder_layers == 2


def kind_of(distance: int, both_ways: bool, num: int = 32, furthest: int = 128) -> int:
    """The bucket of a key at `distance` from its query, by the paper's words: exact, then logarithmic."""
    if both_ways:
        num //= 2
        offset, size = (num if distance > 0 else 0), abs(distance)
    else:
        offset, size = 0, max(-distance, 0)
    if size < num // 2:
        return offset + size
    octaves = math.log(size / (num // 2)) / math.log(furthest / (num // 2))
    return offset + min(num - 1, num // 2 + int(octaves * (num - num // 2) + 1e-6))


@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets(both_ways: bool):
    table = buckets(T5Config(), both_ways)
    expected = [kind_of(-size, both_ways) for size in range(129)]
    np.testing.assert_array_equal(table, expected)
    assert table[-1] == (15 if both_ways else 31)


def bias(layer, queries: int, keys: int, config: T5Config) -> np.ndarray:
    table = hand.read(layer.table.embedding)
    kinds = [
        [kind_of(j - i, layer.both_ways, config.num_buckets, config.max_distance) for j in range(keys)]
        for i in range(queries)
    ]
    return table[np.array(kinds)].transpose(2, 0, 1)


def feed(block, x: np.ndarray, epsilon: float) -> np.ndarray:
    y = hand.rms_norm(block.mlp_norm, x, epsilon)
    if hasattr(block.mlp, "gate"):
        inner = hand.tanh_gelu(hand.linear(block.mlp.gate, y)) * hand.linear(block.mlp.linear, y)
    else:
        inner = np.maximum(hand.linear(block.mlp.up, y), 0)
    return x + hand.linear(block.mlp.down, inner)


def mix(layer, y: np.ndarray, memory: np.ndarray, seen: np.ndarray, extra) -> np.ndarray:
    query, key, value = hand.linear(layer.query, y), hand.linear(layer.key, memory), hand.linear(layer.value, memory)
    return hand.linear(layer.out, hand.attend(query, key, value, 1.0, extra, seen))


def reference_logits(model: T5, batch: dict[str, np.ndarray]) -> np.ndarray:
    rows, config, epsilon = [], model.config, model.config.norm_epsilon
    embed = hand.read(model.token_embed.embedding)
    for source, target, present in zip(batch["source"], batch["inputs"], batch["present"], strict=True):
        x, seen = embed[source], np.tile(present, (len(source), 1))
        for block in model.encoder:
            y = hand.rms_norm(block.attention_norm, x, epsilon)
            x = x + mix(block.attention, y, y, seen, bias(model.encoder_bias, len(source), len(source), config))
            x = feed(block, x, epsilon)
        memory = hand.rms_norm(model.encoder_norm, x, epsilon)
        x, causal = embed[target], np.tril(np.ones([len(target)] * 2))
        for block in model.decoder:
            y = hand.rms_norm(block.attention_norm, x, epsilon)
            x = x + mix(block.attention, y, y, causal, bias(model.decoder_bias, len(target), len(target), config))
            y = hand.rms_norm(block.cross_norm, x, epsilon)
            x = x + mix(block.cross, y, memory, np.tile(present, (len(target), 1)), 0.0)
            x = feed(block, x, epsilon)
        x = hand.rms_norm(model.decoder_norm, x, epsilon)
        rows.append(x @ embed.T / math.sqrt(config.embed_dim) if config.tied else hand.linear(model.head, x))
    return np.stack(rows)


@pytest.mark.full("changes0")
@pytest.mark.parametrize("changes", [{}, {"gated": True, "tied": False}])
def test_logits_and_loss_equal_the_architecture_written_by_hand(changes: dict):
    model, batch = make(dataclasses.replace(tiny, **changes)), make_batch()
    expected = reference_logits(model, batch)
    given = jax.tree.map(jnp.asarray, batch)
    both = nnx.jit(lambda model, b: (model(b["source"], b["inputs"], b["present"]), loss(model, b)))
    logits, found = both(model, given)
    np.testing.assert_allclose(logits, expected, rtol=5e-4, atol=5e-4)
    np.testing.assert_allclose(found, hand.mean_loss(expected, batch["targets"]), rtol=1e-4)


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: t5("t5-tiny"), "t5-small"),
        (lambda: t5("t5-base", width=3), "embed_dim"),
        (lambda: T5Config(num_buckets=6), "multiple of 4"),
        (lambda: T5Config(max_distance=16), "above 16"),
        (lambda: T5Config(num_heads=0), "at least 1"),
        (lambda: T5Config(dropout=-0.1), "at least 0"),
    ],
)
def test_bad_sizes_say_what_to_write(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
