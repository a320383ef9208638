"""Mixtures of experts as others write them: with seats for each group of tokens, by products; or merged, by `vmap`."""

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
    """GShard: each example is a group, experts have biases, and two are asked."""

    num: int = 4

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(nn.Dense(self.num)(x))
        send, back = seats_of(gates, 2, x.shape[1] * 2 // self.num)
        init = nn.initializers.lecun_normal(batch_axis=0)
        up, down = (self.param(name, init, (self.num, *shape)) for name, shape in _SHAPES)
        bias = self.param("bias", nn.initializers.normal(0.1), (self.num, 1, 1, FFN))
        given = jnp.einsum("gsec,gsm->egcm", send, x)
        made = jnp.einsum("egcf,efm->egcm", jax.nn.gelu(jnp.einsum("egcm,emf->egcf", given, up) + bias), down)
        return jnp.einsum("gsec,egcm->gsm", back, made)


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


_SHAPES = (("up", (EMBED, FFN)), ("down", (FFN, EMBED)))
