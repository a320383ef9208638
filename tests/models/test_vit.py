import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import by_hand as hand

from cjax.models.vit import ViT, ViTConfig, loss, presets, vit

tiny = ViTConfig(
    num_layers=2, num_heads=3, embed_dim=12, mlp_dim=20, image_size=6, patch_size=3, num_channels=2, num_classes=5,
    norm_epsilon=1e-3,
)  # fmt: skip


def make() -> ViT:
    return hand.generic(lambda: ViT(tiny, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", presets)
def test_every_preset_has_the_number_of_parameters_it_claims(name: str):
    config = vit(name, num_layers=1)
    abstract = nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract))) == config.num_params


def test_published_sizes():
    assert vit("vit-b16").num_params == 86_567_656
    assert vit("vit-l16").num_params == 304_326_632
    assert round(vit("vit-h14").num_params / 1e6) == 632
    assert 1000 < vit("vit-g14").num_params / 1e6 < 1020


@pytest.mark.full("768")
@pytest.mark.parametrize("width", [32, 768])
def test_a_fresh_model_has_signals_of_one_size_at_any_width(width: int):
    # Of Xavier's, a product of a normalised stream is of the size of its input; of a fixed 0.02 that depends on width.
    config = ViTConfig(1, 4, width, image_size=8, patch_size=2, num_channels=1, num_classes=3)
    block = ViT(config, rngs=nnx.Rngs(0)).blocks[0]
    x = jax.random.normal(jax.random.key(1), (2, 17, width))
    np.testing.assert_allclose(jnp.std(block.attention.query(x)), 1, rtol=0.1)
    np.testing.assert_allclose(jnp.std(block.mlp.up(x)), (2 / 5) ** 0.5, rtol=0.1)  # 2 / (1 + 4) of four times as wide


def reference_logits(model: ViT, images: np.ndarray) -> np.ndarray:
    rows, size, epsilon = [], tiny.patch_size, tiny.norm_epsilon
    for image in images:
        corners = [(i, j) for i in range(0, 6, size) for j in range(0, 6, size)]
        kernel, bias = hand.read(model.patch_embed.kernel), hand.read(model.patch_embed.bias)
        patches = [np.tensordot(image[i : i + size, j : j + size], kernel, 3) + bias for i, j in corners]
        x = np.stack([hand.read(model.class_token), *patches]) + hand.read(model.position_embed)
        for block in model.blocks:
            y, layer = hand.layer_norm(block.attention_norm, x, epsilon), block.attention
            mixed = hand.attend(*(hand.linear(part, y) for part in (layer.query, layer.key, layer.value)), scale=0.5)
            x = x + hand.linear(layer.out, mixed)
            y = hand.linear(block.mlp.up, hand.layer_norm(block.mlp_norm, x, epsilon))
            x = x + hand.linear(block.mlp.down, hand.gelu(y))
        rows.append(hand.linear(model.head, hand.layer_norm(model.norm, x, epsilon)[0]))
    return np.stack(rows)


def test_logits_and_loss_equal_the_architecture_written_by_hand():
    model, labels = make(), np.array([4, 1, 1])
    images = np.random.default_rng(0).normal(size=(3, 6, 6, 2)).astype(np.float32)
    expected = reference_logits(model, images)
    both = nnx.jit(lambda model, batch: (model(batch["images"]), *loss(model, batch)))
    logits, value, aux = both(model, {"images": jnp.asarray(images), "labels": jnp.asarray(labels)})
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(value, hand.mean_loss(expected, labels), rtol=1e-4)
    assert aux["accuracy"] == np.float32((expected.argmax(-1) == labels).mean())


@pytest.mark.full("<lambda>-must be \\\\[2\\\\]")
@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: vit("vit-b32"), "vit-b16"),
        (lambda: vit("vit-b16", width=3), "embed_dim"),
        (lambda: ViTConfig(image_size=225), "image_size=224"),
        (lambda: ViTConfig(embed_dim=100, num_heads=12), "embed_dim=96"),
        (lambda: ViTConfig(num_classes=0), "at least 1"),
        (lambda: ViTConfig(image_size=28, patch_size=8), "write image_size=32, or another patch_size"),
        (lambda: make()(jnp.zeros([2, 6, 7, 2])), r"\[batch, 6, 6, 2\], not \[2, 6, 7, 2\]; make them 6 x 6"),
        (lambda: make()(jnp.zeros([2, 9, 9, 1])), "build the model with image_size=9, num_channels=1"),
        (lambda: make()(jnp.zeros([2, 6, 6])), r"images\[..., None\]"),
        (lambda: loss(make(), {"images": jnp.zeros([2, 6, 6, 2]), "labels": jnp.zeros([3], int)}), r"must be \[2\]"),
    ],
)
def test_bad_sizes_say_what_to_write(build, message: str):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("label", [5, -1])
def test_a_label_out_of_range_gives_nan(label: int):
    value, _ = loss(make(), {"images": jnp.zeros([2, 6, 6, 2]), "labels": jnp.array([0, label])})
    assert jnp.isnan(value)
