"""Kinds that no package brings, written anew: convolutional nets, windows, mixers, experts, generators of pictures."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from strangers.common import CLASSES, ROWS, Stranger, cross_entropy, pictures, random, tokens, wide


def picture_loss(model: Any, batch: Any) -> Any:
    return cross_entropy(model(batch["images"]), batch["labels"])


# -- ConvNeXt (Liu et al., 2022). NNX ---------------------------------------------------------------------------------
class NextBlock(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.depthwise = nnx.Conv(width, width, (5, 5), feature_group_count=width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.scale = nnx.Param(jnp.full((width,), 0.1))

    def __call__(self, x: Any) -> Any:
        return x + self.scale[...] * self.down(nnx.gelu(self.up(self.norm(self.depthwise(x)))))


class NextNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, widths: tuple[int, ...] = (8, 16)) -> None:
        self.stem = nnx.Conv(3, widths[0], (2, 2), strides=2, rngs=rngs)
        self.stages = nnx.List(nnx.List(NextBlock(width, rngs) for _ in range(2)) for width in widths)
        self.merge = nnx.Conv(widths[0], widths[1], (2, 2), strides=2, rngs=rngs)
        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for width in widths)
        self.head = nnx.Linear(widths[1], CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.stages[0]:
            x = block(x)
        x = self.merge(self.norms[0](x))
        for block in self.stages[1]:
            x = block(x)
        return self.head(self.norms[1](x.mean((1, 2))))


def convnext() -> Stranger:
    return Stranger(wide(NextNet(nnx.Rngs(0))), picture_loss, pictures())


# -- Big Transfer's ResNet (Kolesnikov et al., 2020): weights standardised, groups normed -----------------------------
class StandardisedConv(nn.Module):
    width: int
    size: int = 3
    stride: int = 1

    @nn.compact
    def __call__(self, x: Any) -> Any:
        shape = (self.size, self.size, x.shape[-1], self.width)
        kernel = self.param("kernel", nn.initializers.lecun_normal(), shape)
        kernel = kernel - kernel.mean((0, 1, 2))
        kernel = kernel / jnp.sqrt(jnp.var(kernel, (0, 1, 2)) + 1e-8)
        return jax.lax.conv_general_dilated(
            x, kernel, (self.stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


class Standardised(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = StandardisedConv(16)(x)
        for width, stride in ((16, 1), (16, 1), (24, 2), (24, 1)):
            y = nn.relu(nn.GroupNorm(4)(x))
            rest = x if width == x.shape[-1] and stride == 1 else StandardisedConv(width, 1, stride)(y)
            y = StandardisedConv(width, 1)(y)
            y = StandardisedConv(width, 3, stride)(nn.relu(nn.GroupNorm(4)(y)))
            x = rest + y
        return nn.Dense(CLASSES)(nn.relu(nn.GroupNorm(4)(x)).mean((1, 2)))


def big_transfer() -> Stranger:
    return Stranger(Standardised(), picture_loss, pictures(8))


# -- EfficientNet (Tan and Le, 2019): depthwise between wide and narrow, channels weighed, BatchNorm ------------------
class Inverted(nn.Module):
    width: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Any) -> Any:
        wide = 3 * x.shape[-1]
        y = nn.swish(nn.BatchNorm(use_running_average=False)(nn.Conv(wide, (1, 1), use_bias=False)(x)))
        y = nn.Conv(wide, (3, 3), self.stride, feature_group_count=wide, use_bias=False)(y)
        y = nn.swish(nn.BatchNorm(use_running_average=False)(y))
        weights = nn.Dense(wide)(nn.swish(nn.Dense(4)(y.mean((1, 2), keepdims=True))))
        y = nn.Conv(self.width, (1, 1), use_bias=False)(y * nn.sigmoid(weights))
        y = nn.BatchNorm(use_running_average=False)(y)
        return x + y if y.shape == x.shape else y


class Efficient(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.swish(nn.BatchNorm(use_running_average=False)(nn.Conv(8, (3, 3), 2, use_bias=False)(x)))
        for width, stride in ((8, 1), (8, 1), (12, 2), (12, 1)):
            x = Inverted(width, stride)(x)
        return nn.Dense(CLASSES)(x.mean((1, 2)))


def efficientnet() -> Stranger:
    return Stranger(Efficient(), picture_loss, pictures(), apart=True)


# -- MLP-Mixer (Tolstikhin et al., 2021) ------------------------------------------------------------------------------
class Mixer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.Conv(24, (4, 4), 4)(x)
        x = x.reshape(x.shape[0], -1, 24)
        for _ in range(2):
            y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
            x = x + jnp.swapaxes(nn.Dense(16)(nn.gelu(nn.Dense(20)(y))), 1, 2)
            x = x + nn.Dense(24)(nn.gelu(nn.Dense(40)(nn.LayerNorm()(x))))
        return nn.Dense(CLASSES)(nn.LayerNorm()(x).mean(1))


def mixer() -> Stranger:
    return Stranger(Mixer(), picture_loss, pictures())


# -- Swin (Liu et al., 2021): attention in windows that every second layer shifts. NNX --------------------------------
class WindowBlock(nnx.Module):
    def __init__(self, width: int, heads: int, window: int, shift: int, rngs: nnx.Rngs) -> None:
        self.heads, self.window, self.shift = heads, window, shift
        self.norms = nnx.List(nnx.LayerNorm(width, rngs=rngs) for _ in range(2))
        self.packed = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.bias = nnx.Param(0.02 * jax.random.normal(rngs.params(), ((2 * window - 1) ** 2, heads)))
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        y = jnp.roll(self.norms[0](x), (-self.shift, -self.shift), (1, 2))
        y = jnp.roll(self.attend(y), (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))

    def attend(self, x: Any) -> Any:
        rows, side, _, width = x.shape
        w, number = self.window, side // self.window
        cut = x.reshape(rows, number, w, number, w, width).transpose(0, 1, 3, 2, 4, 5).reshape(-1, w * w, width)
        q, k, v = jnp.moveaxis(self.packed(cut).reshape(-1, w * w, 3, self.heads, width // self.heads), 2, 0)
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / (width // self.heads) ** 0.5
        places = np.stack(np.meshgrid(np.arange(w), np.arange(w), indexing="ij"), -1).reshape(-1, 2)
        apart = places[:, None] - places[None] + w - 1
        bias = self.bias[apart[..., 0] * (2 * w - 1) + apart[..., 1]].transpose(2, 0, 1)
        # What the shift brought from the other side of the picture is not seen.
        lines = np.roll(np.arange(side) // w + (np.arange(side) >= side - self.shift) * self.shift, 0)
        region = lines[:, None] * 100 + lines[None]
        region = region.reshape(number, w, number, w).transpose(0, 2, 1, 3).reshape(-1, w * w)
        seen = jnp.asarray(region[:, :, None] == region[:, None, :])[None, :, None]
        scores = (scores + bias).reshape(rows, number**2, self.heads, w * w, w * w)
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9)).reshape(-1, self.heads, w * w, w * w)
        y = jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(-1, w * w, width)
        y = self.out(y).reshape(rows, number, number, w, w, width)
        return y.transpose(0, 1, 3, 2, 4, 5).reshape(rows, side, side, width)


class Windows(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.stem = nnx.Conv(3, 16, (2, 2), strides=2, rngs=rngs)
        self.blocks = nnx.List(WindowBlock(16, 4, 4, shift, rngs) for shift in (0, 2))
        self.merge = nnx.Linear(64, 32, use_bias=False, rngs=rngs)
        self.later = nnx.List(WindowBlock(32, 4, 2, shift, rngs) for shift in (0, 1))
        self.head = nnx.Linear(32, CLASSES, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        corners = [x[:, i::2, j::2] for i in range(2) for j in range(2)]
        x = self.merge(jnp.concatenate(corners, -1))
        for block in self.later:
            x = block(x)
        return self.head(x.mean((1, 2)))


def swin() -> Stranger:
    return Stranger(wide(Windows(nnx.Rngs(0))), picture_loss, pictures())


# -- Switch Transformer (Fedus et al., 2022): each word to one expert, experts with a capacity ------------------------
class Switch(nn.Module):
    experts: int = 4
    hidden: int = 40

    @nn.compact
    def __call__(self, x: Any) -> Any:
        rows, length, width = x.shape
        capacity = 2 * rows * length // self.experts // 3
        flat = x.reshape(-1, width)
        shares = nn.softmax(nn.Dense(self.experts, use_bias=False)(flat))
        chosen = jax.nn.one_hot(jnp.argmax(shares, -1), self.experts, dtype=x.dtype)
        place = (jnp.cumsum(chosen, 0) - 1) * chosen
        sent = chosen[..., None] * jax.nn.one_hot(place.sum(-1).astype(int), capacity, dtype=x.dtype)[:, None]
        up = self.param("up", nn.initializers.lecun_normal(batch_axis=0), (self.experts, width, self.hidden))
        down = self.param("down", nn.initializers.lecun_normal(batch_axis=0), (self.experts, self.hidden, width))
        inside = nn.relu(jnp.einsum("nec,nw,ewh->ech", sent, flat, up))
        back = sent * jnp.max(shares, -1)[:, None, None]
        y = jnp.einsum("nec,ech,ehw->nw", back, inside, down).reshape(x.shape)
        return y, self.experts * jnp.sum(chosen.mean(0) * shares.mean(0))


class SwitchDecoder(nn.Module):
    @nn.compact
    def __call__(self, ids: Any) -> Any:
        x, balance = nn.Embed(70, 32)(ids), 0.0
        x = x + self.param("places", nn.initializers.normal(0.02), (ids.shape[1], 32))
        for _ in range(2):
            x = x + nn.SelfAttention(4)(nn.LayerNorm()(x), nn.make_causal_mask(ids))
            y, more = Switch()(nn.LayerNorm()(x))
            x, balance = x + y, balance + more
        return nn.Dense(70)(nn.LayerNorm()(x)), balance


def switch_transformer() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        logits, balance = model(batch["ids"])
        return cross_entropy(logits[:, :-1], batch["ids"][:, 1:]) + 0.01 * balance

    return Stranger(SwitchDecoder(), loss, tokens(), apart=True)


# -- generators -------------------------------------------------------------------------------------------------------
class Autoencoder(nnx.Module):
    """Kingma and Welling, 2014. NNX. The noise comes with the batch."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.read = nnx.Sequential(nnx.Linear(64, 32, rngs=rngs), nnx.relu)
        self.mean, self.log = nnx.Linear(32, 6, rngs=rngs), nnx.Linear(32, 6, rngs=rngs)
        self.write = nnx.Sequential(nnx.Linear(6, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 64, rngs=rngs))

    def __call__(self, x: Any, noise: Any) -> Any:
        y = self.read(x)
        mean, log = self.mean(y), self.log(y)
        return self.write(mean + noise * jnp.exp(0.5 * log)), mean, log


def autoencoder() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        logits, mean, log = model(batch["x"], batch["noise"])
        rebuilt = optax.sigmoid_binary_cross_entropy(logits, batch["x"]).sum(-1)
        apart = -0.5 * jnp.sum(1 + log - mean**2 - jnp.exp(log), -1)
        return jnp.mean(rebuilt + apart)

    rng = random()
    x = (rng.random((ROWS, 64)) < 0.3).astype("float32")
    batch = {"x": x, "noise": rng.normal(size=(ROWS, 6)).astype("float32")}
    return Stranger(wide(Autoencoder(nnx.Rngs(0))), loss, batch)


class MaskedConv(nn.Module):
    """A convolution that sees pixels above and to the left alone (van den Oord et al., 2016)."""

    width: int
    sees_itself: bool = True

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (3, 3, x.shape[-1], self.width))
        mask = np.zeros((3, 3, 1, 1))
        mask[0], mask[1, 0], mask[1, 1] = 1, 1, self.sees_itself
        y = jax.lax.conv_general_dilated(
            x, kernel * mask.astype(kernel.dtype), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return y + self.param("bias", nn.initializers.zeros, (self.width,))


class PixelNet(nn.Module):
    @nn.compact
    def __call__(self, levels: Any) -> Any:
        x = MaskedConv(32, sees_itself=False)(nn.one_hot(levels, 8))
        for _ in range(3):
            value, gate = jnp.split(MaskedConv(64)(nn.relu(x)), 2, -1)
            x = x + jnp.tanh(value) * nn.sigmoid(gate)
        return MaskedConv(8)(nn.relu(x))


def pixelcnn() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        return cross_entropy(model(batch), batch)

    return Stranger(PixelNet(), loss, random().integers(0, 8, (ROWS, 6, 6)).astype("int32"))


class Denoiser(nn.Module):
    """A UNet that knows the time (Ho et al., 2020)."""

    width: int = 16

    @nn.compact
    def __call__(self, x: Any, time: Any) -> Any:
        waves = time[:, None] * jnp.exp(-jnp.arange(8) * 1.0)
        when = nn.Dense(self.width)(nn.swish(nn.Dense(32)(jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], -1))))
        x = nn.Conv(self.width, (3, 3))(x)
        left = []
        for width in (self.width, 2 * self.width):
            x = self.residual(x, when, width)
            left.append(x)
            x = nn.Conv(width, (3, 3), 2)(x)
        x = x + self.attention(nn.GroupNorm(4)(x))
        for kept in reversed(left):
            x = jax.image.resize(x, (*kept.shape[:3], x.shape[-1]), "nearest")
            x = self.residual(jnp.concatenate([x, kept], -1), when, kept.shape[-1])
        return nn.Conv(3, (3, 3))(nn.swish(nn.GroupNorm(4)(x)))

    def residual(self, x: Any, when: Any, width: int) -> Any:
        y = nn.Conv(width, (3, 3))(nn.swish(nn.GroupNorm(4)(x)))
        y = y + nn.Dense(width)(nn.swish(when))[:, None, None]
        y = nn.Conv(width, (3, 3))(nn.swish(nn.GroupNorm(4)(y)))
        return y + (x if x.shape[-1] == width else nn.Conv(width, (1, 1))(x))

    def attention(self, x: Any) -> Any:
        flat = x.reshape(x.shape[0], -1, x.shape[-1])
        return nn.SelfAttention(4)(flat).reshape(x.shape)


def denoiser() -> Stranger:
    def loss(model: Any, batch: Any) -> Any:
        share = batch["share"][:, None, None, None]
        noisy = jnp.sqrt(share) * batch["images"] + jnp.sqrt(1 - share) * batch["noise"]
        return jnp.mean((model(noisy, batch["share"] * 100) - batch["noise"]) ** 2)

    rng = random()
    images = pictures(8)["images"]
    batch = {"images": images, "noise": rng.normal(size=images.shape).astype("float32")}
    return Stranger(Denoiser(), loss, {**batch, "share": rng.uniform(0.1, 0.9, ROWS).astype("float32")})
