"""Models for pipelines: layers that move what lies along split dims, so that XLA's partitioner permutes, gathers or
gives up, and two stacks of layers. Run as a script, it says of pairs of a model and a plan how far they are from one
device: python tests/stages.py "rolled:pipeline=1f1b:2 microbatches=4 tensor=2" ..., all layers by default.
"""

import sys
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from starts import begin, first_values

import cjax

WIDTH, HIDDEN, ROWS, LENGTH = 16, 24, 16, 6
Body = Callable[[Any, jax.Array], jax.Array]


def moved(move: Callable[[jax.Array], jax.Array]) -> Body:
    """A layer with something between its two matmuls."""

    def body(dense: Any, x: jax.Array) -> jax.Array:
        return dense(WIDTH)(move(nn.tanh(dense(HIDDEN)(x))))

    return body


def halves(dense: Any, x: jax.Array) -> jax.Array:
    a, b = jnp.split(dense(2 * HIDDEN)(x), 2, -1)
    return dense(WIDTH)(nn.silu(a) * b)


def rotated(h: jax.Array) -> jax.Array:
    heads = h.reshape(*h.shape[:-1], 4, HIDDEN // 4)
    a, b = jnp.split(heads, 2, -1)
    angles = jnp.arange(LENGTH)[:, None, None] * jnp.arange(1.0, a.shape[-1] + 1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).reshape(h.shape)


def by_size(h: jax.Array) -> jax.Array:
    return jnp.take_along_axis(h, jnp.argsort(h, -1), -1)


def written(h: jax.Array) -> jax.Array:
    return h.at[..., 3:9].set(h[..., 9:15]).at[:, 1].add(h[:, 0])


def interleaved(h: jax.Array) -> jax.Array:
    return jnp.stack([h[..., HIDDEN // 2 :], h[..., : HIDDEN // 2]], -1).reshape(h.shape)


def recurrent(h: jax.Array) -> jax.Array:
    def turn(carry: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = 0.5 * jnp.roll(carry, 1, -1) + x
        return carry, carry

    return jnp.moveaxis(lax.scan(turn, jnp.zeros_like(h[:, 0]), jnp.moveaxis(h, 1, 0))[1], 0, 1)


def state_space(h: jax.Array) -> jax.Array:
    a, b = jax.nn.sigmoid(h), h

    def combine(one: Any, two: Any) -> Any:
        return one[0] * two[0], one[1] * two[0] + two[1]

    return lax.associative_scan(combine, (a, b), axis=1)[1]


def attention(dense: Any, x: jax.Array) -> jax.Array:
    q, k, v = (each.reshape(*x.shape[:-1], 4, 6) for each in jnp.split(dense(3 * HIDDEN)(x), 3, -1))
    q, k = (each + 0.1 * jnp.concatenate([-each[..., 3:], each[..., :3]], -1) for each in (q, k))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    return dense(WIDTH)(jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(*x.shape[:-1], HIDDEN))


def experts(dense: Any, x: jax.Array) -> jax.Array:
    """Each position's own, by its number, of what all four give."""
    best = jnp.argmax(dense(4)(x), -1)
    ys = jnp.stack(jnp.split(dense(4 * WIDTH)(nn.tanh(dense(HIDDEN)(x))), 4, -1))
    return ys[best, jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])]


def dispatched(dense: Any, x: jax.Array) -> jax.Array:
    """To four experts with room for four positions each, and back."""
    gates = jax.nn.softmax(dense(4)(x))
    choice = jax.nn.one_hot(jnp.argmax(gates, -1), 4, dtype=x.dtype)
    place = jnp.cumsum(choice, 1) * choice - 1
    where = jax.nn.one_hot(place, 4, dtype=x.dtype) * choice[..., None]
    inside = jnp.einsum("bsec,bsd->ebcd", where, x)
    outside = dense(WIDTH)(nn.tanh(dense(HIDDEN)(inside)))
    return jnp.einsum("bsec,ebcd,bse->bsd", where, outside, gates)


def from_its_own(h: jax.Array) -> jax.Array:
    return lax.dynamic_slice_in_dim(h, (h[0, 0] > 0).astype(int) * 3, HIDDEN // 2, -1)


def by_table(dense: Any, x: jax.Array) -> jax.Array:
    """A row of a weight for each position, by what it is."""
    kernel = dense(HIDDEN)(jnp.eye(WIDTH))
    return dense(WIDTH)(nn.tanh(dense(HIDDEN)(x) + kernel[jnp.argmax(x, -1)] + kernel[:, jnp.arange(HIDDEN)[::-1]][0]))


def segments(dense: Any, x: jax.Array) -> jax.Array:
    """Sums over positions of a kind, and back to each."""
    h = nn.tanh(dense(HIDDEN)(x))
    kind = jnp.argmax(x[..., :3], -1)
    sums = jax.vmap(lambda h, kind: jax.ops.segment_sum(h, kind, 3)[kind])(h, kind)
    return dense(WIDTH)(h + sums)


def chosen(dense: Any, x: jax.Array) -> jax.Array:
    """By a weight, so that a stage may have a layer of one kind and the next stage one of the other."""
    h = nn.tanh(dense(HIDDEN)(x))
    return dense(WIDTH)(lax.cond(dense(1)(jnp.ones((1,), x.dtype))[0] > 0, lambda: jnp.roll(h, 1, -1), lambda: h))


BODIES: dict[str, Body] = {
    "plain": moved(lambda h: h),
    "halves": halves,
    "rolled": moved(lambda h: jnp.roll(h, 1, -1)),
    "rolled_rows": moved(lambda h: jnp.roll(h, 1, 1)),
    "flipped": moved(lambda h: jnp.flip(h, -1)),
    "shifted": moved(lambda h: jnp.pad(h[..., 1:], ((0, 0), (0, 0), (0, 1)))),
    "permuted": moved(lambda h: h[..., np.random.RandomState(0).permutation(HIDDEN)]),
    "by_size": moved(by_size),
    "sorted": moved(lambda h: jnp.sort(h, -1)),
    "top": moved(lambda h: lax.top_k(h, 6)[0]),
    "strided": moved(lambda h: h[..., ::2] * h[..., 1::2]),
    "interleaved": moved(interleaved),
    "rotated": moved(rotated),
    "written": moved(written),
    "summed": moved(lambda h: jnp.cumsum(h, -1)),
    "largest": moved(lambda h: lax.cummax(h, axis=2)),
    "turned": moved(lambda h: jnp.swapaxes(h.reshape(*h.shape[:2], 4, 6), -1, -2).reshape(h.shape)),
    "sliced_at": moved(lambda h: jax.vmap(from_its_own)(h).repeat(2, -1)),
    "recurrent": moved(recurrent),
    "state_space": moved(state_space),
    "windows": moved(lambda h: nn.avg_pool(h, (3,), padding="SAME")),
    "largest_near": moved(lambda h: nn.max_pool(h, (3,), padding="SAME")),
    "by_table": by_table,
    "segments": segments,
    "attention": attention,
    "experts": experts,
    "dispatched": dispatched,
    "chosen": chosen,
}


def dense(width: int) -> nn.Dense:
    return nn.Dense(width, param_dtype=jnp.float64)


class Net(nn.Module):
    """Four layers of one kind."""

    body: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = dense(WIDTH)(x)
        for _ in range(4):
            x = x + BODIES[self.body](dense, x)
        return dense(1)(x)[..., 0]


class Experts(nn.Module):
    """Equal experts side by side, which are a stack as well, in front of layers."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = dense(WIDTH)(x)
        ys = jnp.stack([dense(WIDTH)(nn.relu(dense(HIDDEN)(x))) for _ in range(5)])
        x = x + ys[jnp.argmax(x[..., :5], -1), jnp.arange(x.shape[0])[:, None], jnp.arange(x.shape[1])]
        for _ in range(4):
            x = x + dense(WIDTH)(nn.tanh(dense(HIDDEN)(x)))
        return dense(1)(x)[..., 0]


class Between(nn.Module):
    """Two stacks, with weights between them, one of which is read in front of the first as well; and what is made of
    it, once, by each layer of the second."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.normal(1.0), (WIDTH,), jnp.float64)
        x = dense(WIDTH)(x) * scale
        early = jnp.tanh(x)
        for _ in range(4):
            x = x + dense(WIDTH)(nn.tanh(dense(HIDDEN)(x)))
        x, gate = dense(WIDTH)(x * scale) + early, jnp.tanh(scale)
        for _ in range(4):
            x = x + gate * dense(WIDTH)(nn.silu(dense(HIDDEN)(x)) * x.mean(-1, keepdims=True))
        return dense(1)(x)[..., 0]


class Again(nn.Module):
    """Layers that are rows of weights, which are all read again behind them: by a penalty, and by a loop."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def own(name: str, *shape: int) -> jax.Array:
            return self.param(name, nn.initializers.normal(0.3), (4, *shape), jnp.float64)

        weights = own("up", WIDTH, HIDDEN), own("down", HIDDEN, WIDTH)
        penalty = sum(jnp.square(w).sum() for w in weights)
        x = dense(WIDTH)(x)
        for i in range(4):
            up, down = (w[i] for w in weights)
            x = x + jnp.tanh(x @ up) @ down
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, weights)
        return dense(1)(x)[..., 0] + 0.01 * penalty


class EncoderDecoder(nn.Module):
    """Each layer of the second stack reads what the first has made."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def attended(x: jax.Array, others: jax.Array) -> jax.Array:
            q, k, v = dense(WIDTH)(x), dense(WIDTH)(others), dense(WIDTH)(others)
            return dense(WIDTH)(jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / 4) @ v)

        made, x = dense(WIDTH)(x), dense(WIDTH)(jnp.flip(x, 1))
        for _ in range(4):
            made = made + attended(made, made)
            made = made + dense(WIDTH)(nn.tanh(dense(HIDDEN)(made)))
        made = made * nn.sigmoid(dense(WIDTH)(made))
        for _ in range(4):
            x = x + attended(x, x)
            x = x + attended(x, made)
            x = x + dense(WIDTH)(nn.tanh(dense(HIDDEN)(x)))
        return dense(1)(x)[..., 0]


MODELS: dict[str, nn.Module] = {name: Net(name) for name in BODIES}
MODELS |= {"side_by_side": Experts(), "between": Between(), "encoder_decoder": EncoderDecoder(), "again": Again()}


def error(name: str, plan: str, lockstep: bool = False) -> tuple[float, cjax.Program]:
    """How far off one device's the loss, its gradients and its evaluation are; stages may be told to go in lockstep."""
    model, x = MODELS[name], np.random.RandomState(0).randn(ROWS, LENGTH, 8)

    def loss(model: Any, x: Any) -> jax.Array:
        return (model(x) ** 2).mean()

    program = cjax.parallelize(model, loss, optax.sgd(0.1), x, plan)
    program._lockstep.needed |= lockstep
    state, params = begin(program), first_values(program)[0]
    value, grads = program.value_and_grad(state, x)
    wanted, others = jax.jit(jax.value_and_grad(lambda p: loss(model.bind({"params": p}), x)))(params)
    scored = program.evaluate(state, x)["loss"]
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(others), strict=True)
    off = max(float(np.linalg.norm(np.asarray(a) - b)) for a, b in pairs) / float(optax.tree.norm(others))
    return max(abs(float(value - wanted)), abs(float(scored - wanted)), off), program


if __name__ == "__main__":
    cjax.simulate(8)
    jax.config.update("jax_enable_x64", True)
    every = [f"{name}:pipeline=zero_bubble:2 microbatches=4 data=2 tensor=2" for name in MODELS]
    for name, plan in (case.split(":", 1) for case in sys.argv[1:] or every):
        try:
            off, program = error(name, plan.removesuffix(" lockstep"), plan.endswith(" lockstep"))
            print(f"{name}:{plan}: {off:.1e} lockstep={program._lockstep.needed}", flush=True)
        except ValueError as given:
            print(f"{name}:{plan}: refused: {given}", flush=True)
