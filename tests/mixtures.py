"""Mixtures of experts as others write them: with seats for each group of tokens, by products; merged, by `vmap`; or
without seats, for which tokens are sorted by expert."""

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import lax
from zoo_linen import EMBED, FFN


def seats_of(gates: jax.Array, top: int, room: int) -> tuple[jax.Array, jax.Array]:
    """Who of a group is sent to which expert's seat, [group, token, expert, seat], and with which weight."""
    best, which = lax.top_k(gates, top)
    chosen = jax.nn.one_hot(which, gates.shape[-1])
    before = jnp.cumsum(chosen.reshape(len(gates), -1, gates.shape[-1]), 1).reshape(chosen.shape) - chosen
    seat = jax.nn.one_hot((before * chosen).sum(-1).astype(int), room)
    send = jnp.einsum("gske,gskc->gsec", chosen, seat)
    return send, send * jnp.einsum("gsk,gske->gse", best / best.sum(-1, keepdims=True), chosen)[..., None]


class Grouped(nn.Module):
    """GShard: each example is a group, experts have biases, and two are asked; some of what they make is dropped."""

    num: int = 4
    rate: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(nn.Dense(self.num)(x))
        send, back = seats_of(gates, 2, x.shape[1] * 2 // self.num)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up, down = (self.param(name, init, (self.num, *shape)) for name, shape in _SHAPES)
        bias = self.param("bias", nn.initializers.normal(0.1), (self.num, 1, 1, FFN))
        given = jnp.einsum("gsec,gsm->egcm", send, x)
        inner = jax.nn.gelu(jnp.einsum("egcm,emf->egcf", given, up) + bias)
        if self.rate:
            inner = nn.Dropout(self.rate, deterministic=False)(inner)
        return jnp.einsum("gsec,egcm->gsm", back, jnp.einsum("egcf,efm->egcm", inner, down))


class Merged(nn.Module):
    """Switch: one expert each, whose own function is mapped over them, on the seats of all groups in a row."""

    num: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        groups, length, width = x.shape
        gates, room = jax.nn.softmax(nn.Dense(self.num, use_bias=False)(x)), length // 2
        send, back = seats_of(gates, 1, room)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up, down = (self.param(name, init, (self.num, *shape)) for name, shape in _SHAPES)

        def expert(up: jax.Array, down: jax.Array, given: jax.Array) -> jax.Array:
            return nn.relu(given @ up) @ down

        given = jnp.einsum("gsec,gsm->egcm", send, x).reshape(self.num, groups * room, width)
        made = jax.vmap(expert)(up, down, given).reshape(self.num, groups, room, width)
        return jnp.einsum("gsec,egcm->gsm", back, made)


class Dropless(nn.Module):
    """Two experts a token, and none is ever full (Gale et al., MegaBlocks, 2023): tokens are sorted by expert. Gate and
    value are packed in one weight, and experts have biases, looked up by row."""

    num: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        best, which = lax.top_k(jax.nn.softmax(nn.Dense(self.num, use_bias=False)(tokens)), 2)
        expert = which.reshape(-1)
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=self.num)
        init, normal = nn.initializers.lecun_normal(batch_axis=0), nn.initializers.normal(0.1)
        both, down = (
            self.param("both", init, (self.num, EMBED, 2 * FFN)),
            self.param("down", init, (self.num, FFN, EMBED)),
        )
        biases = [self.param(f"bias_{n}", normal, (self.num, n)) for n in (2 * FFN, EMBED)]
        gate, up = jnp.split(lax.ragged_dot(tokens[order // 2], both, sizes) + biases[0][expert[order]], 2, axis=-1)
        made = lax.ragged_dot(nn.silu(gate) * up, down, sizes) + biases[1][expert[order]]
        made = made[jnp.argsort(order)].reshape(-1, 2, x.shape[-1])
        return (made * (best / best.sum(-1, keepdims=True))[..., None]).sum(1).reshape(x.shape)


class Sorted(nn.Module):
    """One expert a token, of a gate and a value apart. Experts are where a table says, as where they are balanced; so
    nobody knows that their numbers begin at zero, and the rows of all devices are put in one order."""

    num: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        gates = jax.nn.softmax(nn.Dense(self.num)(tokens))
        expert = jnp.roll(jnp.arange(self.num), 1)[gates.argmax(-1)]
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=self.num)
        init = nn.initializers.lecun_normal(batch_axis=0)
        gate, up, down = (
            self.param(name, init, (self.num, *shape)) for name, shape in (("gate", (EMBED, FFN)), *_SHAPES)
        )
        given = tokens[order]
        made = lax.ragged_dot(
            nn.silu(lax.ragged_dot(given, gate, sizes)) * lax.ragged_dot(given, up, sizes), down, sizes
        )
        return (made[jnp.argsort(order)] * gates.max(-1, keepdims=True)).reshape(x.shape)


class Scattered(nn.Module):
    """Two experts a token, of three, whose results are weighed as they are sorted, and added to zeros."""

    num: int = 3

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        tokens = x.reshape(-1, x.shape[-1])
        best, which = lax.top_k(jax.nn.softmax(nn.Dense(self.num, use_bias=False)(tokens)), 2)
        expert = which.reshape(-1)
        order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=self.num)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up, down = (self.param(name, init, (self.num, *shape)) for name, shape in _SHAPES)
        owner = order // 2
        made = lax.ragged_dot(nn.gelu(lax.ragged_dot(tokens[owner], up, sizes)), down, sizes)
        made = made * best.reshape(-1)[order][:, None]
        return jnp.zeros(tokens.shape, made.dtype).at[owner].add(made).reshape(x.shape)


_SHAPES = (("up", (EMBED, FFN)), ("down", (FFN, EMBED)))
