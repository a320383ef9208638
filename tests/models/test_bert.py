import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import by_hand as hand

from cjax.models.bert import BERT, BERTConfig, bert, classes_loss, masked_loss, presets

tiny = BERTConfig(num_layers=2, num_heads=3, embed_dim=12, mlp_dim=20, context=16, vocab_size=29, norm_epsilon=1e-3)
classes = dataclasses.replace(tiny, head="classes", pooling="first", num_classes=5)


def make(config: BERTConfig = tiny) -> BERT:
    return hand.generic(lambda: BERT(config, rngs=nnx.Rngs(0)))


def make_batch(length: int = 9) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, tiny.vocab_size, (2, length))
    targets = np.where(rng.random(tokens.shape) < 0.5, -100, tokens)
    present = np.arange(length) < np.array([length - 3, length])[:, None]
    types = rng.integers(0, 2, tokens.shape)
    return {"inputs": tokens, "targets": targets, "present": present, "types": types, "labels": np.array([3, 1])}


@pytest.mark.parametrize("name", presets)
@pytest.mark.parametrize("head", ["none", "masked", "classes"])
def test_every_preset_has_the_number_of_parameters_it_claims(name: str, head: str):
    config = bert(name, num_layers=1, head=head, pooling="first", tied=name != "bert-base")
    abstract = nnx.eval_shape(lambda: BERT(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))) == config.num_params


def test_published_sizes():
    assert bert("bert-base", head="none", pooling="first").num_params == 109_482_240
    assert bert("bert-large", head="none", pooling="first").num_params == 335_141_888
    assert bert("minilm-l6", pooling="first").num_params == 22_713_216


def reference_hidden(model: BERT, batch: dict[str, np.ndarray]) -> np.ndarray:
    rows, epsilon = [], model.config.norm_epsilon
    for tokens, present, types in zip(batch["inputs"], batch["present"], batch["types"], strict=True):
        x = hand.read(model.token_embed.embedding)[tokens] + hand.read(model.type_embed.embedding)[types]
        x = x + hand.read(model.position_embed.embedding)[: len(tokens)]
        x = hand.layer_norm(model.embed_norm, x, epsilon)
        for block in model.blocks:
            layer = block.attention
            query, key, value = (hand.linear(part, x) for part in (layer.query, layer.key, layer.value))
            seen = np.tile(present, (len(tokens), 1))
            mixed = hand.attend(query, key, value, (12 // 3) ** -0.5, seen=seen)
            x = hand.layer_norm(block.attention_norm, x + hand.linear(layer.out, mixed), epsilon)
            mlp = hand.linear(block.mlp.down, hand.gelu(hand.linear(block.mlp.up, x)))
            x = hand.layer_norm(block.mlp_norm, x + mlp, epsilon)
        rows.append(x)
    return np.stack(rows)


def call(model: BERT, batch: dict[str, np.ndarray]) -> jax.Array:
    return model(*(jnp.asarray(batch[name]) for name in ("inputs", "present", "types")))


@pytest.mark.full("True")
@pytest.mark.parametrize("tied", [True, False])
def test_masked_words_equal_the_architecture_written_by_hand(tied: bool):
    model, batch = make(dataclasses.replace(tiny, tied=tied)), make_batch()
    head = model.word_head
    x = hand.gelu(hand.linear(head.dense, reference_hidden(model, batch)))
    x = hand.layer_norm(head.norm, x, tiny.norm_epsilon)
    words = hand.read(model.token_embed.embedding).T if tied else hand.read(head.words.kernel)
    expected = x @ words + hand.read(head.bias)
    np.testing.assert_allclose(call(model, batch), expected, rtol=2e-4, atol=2e-4)
    found = nnx.jit(masked_loss)(model, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(found, hand.mean_loss(expected, batch["targets"]), rtol=1e-4)


@pytest.mark.parametrize("pooling", ["first", "mean"])
def test_classes_equal_the_architecture_written_by_hand(pooling: str):
    model, batch = make(dataclasses.replace(classes, pooling=pooling)), make_batch()
    hidden, present = reference_hidden(model, batch), batch["present"]
    if pooling == "first":
        pooled = np.tanh(hand.linear(model.pooler, hidden[:, 0]))
    else:
        pooled = np.stack([row[true].mean(0) for row, true in zip(hidden, present, strict=True)])
    expected = hand.linear(model.class_head, pooled)
    np.testing.assert_allclose(call(model, batch), expected, rtol=2e-4, atol=2e-4)
    value, aux = nnx.jit(classes_loss)(model, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_allclose(value, hand.mean_loss(expected, batch["labels"]), rtol=1e-4)
    assert aux["accuracy"] == (expected.argmax(-1) == batch["labels"]).mean()


def test_what_is_padded_makes_no_difference():
    model, batch = make(classes), make_batch()
    other = batch | {"inputs": np.where(batch["present"], batch["inputs"], 7)}
    assert (other["inputs"] != batch["inputs"]).any()
    np.testing.assert_array_equal(call(model, batch), call(model, other))


def test_without_a_head_hidden_states_come_out():
    model, batch = make(dataclasses.replace(tiny, head="none")), make_batch()
    np.testing.assert_allclose(call(model, batch), reference_hidden(model, batch), rtol=2e-4, atol=2e-4)


@pytest.mark.full("<lambda>-pooling='mean'")
@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: bert("bert-huge"), "bert-large"),
        (lambda: bert("bert-base", width=3), "embed_dim"),
        (lambda: BERTConfig(embed_dim=100, num_heads=12), "embed_dim=96"),
        (lambda: BERTConfig(head="words"), "'masked'"),
        (lambda: BERTConfig(head="classes"), "pooling='first'"),
        (lambda: BERTConfig(dropout=1.0), "below 1"),
        (lambda: make()(jnp.zeros([1, 17], jnp.int32)), "context of 16"),
        (lambda: make().pool(jnp.zeros([1, 3], jnp.int32)), "pooling='mean'"),
        (lambda: classes_loss(make(), make_batch()), "head='masked'"),
        (lambda: masked_loss(make(classes), make_batch()), "head='classes'"),
    ],
)
def test_bad_sizes_say_what_to_write(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()
