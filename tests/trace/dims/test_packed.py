import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import cjax
from cjax.trace.dims.find import find_dims
from cjax.trace.dims.packed import packed_forms
from cjax.trace.jaxpr.simplify import simplify

X, W, B = jnp.ones((2, 5, 4)), jnp.ones((4, 24)), jnp.ones(24)


def forms(function, *weights, x=X):
    closed = simplify(jax.make_jaxpr(function)(*weights, x))
    return packed_forms(find_dims(closed, len(weights)), len(weights))


def dense(w, b, x):
    return x @ w + b


def heads(y):
    return y.reshape(2, 5, 3, 2, 4)


@pytest.mark.parametrize(
    "cut",
    [
        lambda y: jnp.split(y, 3, axis=-1),
        lambda y: (y[..., :8], y[..., 8:16], y[..., 16:]),
        lambda y: [heads(y)[:, :, i] for i in range(3)],
        lambda y: list(heads(y).transpose(2, 0, 3, 1, 4)),
        lambda y: jnp.split(heads(y), 3, axis=2),
        lambda y: jnp.unstack(heads(y), axis=2),
    ],
    ids=["split", "slices", "indexed", "unpacked", "split_heads", "unstack"],
)
def test_kernel_and_bias_of_queries_keys_and_values(cut):
    assert forms(lambda w, b, x: cut(dense(w, b, x)), W, B) == {0: (1, 3), 1: (3,)}


def test_in_the_authors_own_loop_and_remat():
    def layers(w, x):
        def layer(carry, kernel):
            gate, value = jnp.split(carry @ kernel, 2, axis=-1)
            return carry + (gate * value)[..., :4], None

        return jax.lax.scan(jax.checkpoint(layer), x, w)

    assert forms(layers, jnp.ones((6, 4, 24))) == {0: (1, 1, 2)}


def gated(w, v, x):
    gate, value = jnp.split(x @ w, 2, axis=-1)
    return (jax.nn.silu(gate) * value) @ v


def test_gate_and_value():
    assert forms(gated, W, jnp.ones((12, 4))) == {0: (1, 2)}


def rotary(y):
    a, b = jnp.split(y, 2, axis=-1)
    return jnp.concatenate([a - b, a + b], axis=-1)


@pytest.mark.parametrize(
    "function",
    [
        lambda w, x: jnp.split(x @ w, [12, 18], axis=-1),  # unequal: grouped queries
        lambda w, x: (jnp.split(x @ w, 3, axis=-1), jnp.split(x @ w, 2, axis=-1)),  # two ways
        lambda w, x: rotary(x @ w),  # joined again
        lambda w, x: rotary((x @ w).reshape(2, 5, 3, 8)),  # halves of a head
        lambda w, x: ((x @ w)[..., :12], (x @ w) @ w.T),  # read whole too
        lambda w, x: (x @ w).reshape(2, 5, 3, 8),  # heads
        lambda w, x: (x @ w).reshape(2, 5, 2, 3, 4)[:, :, :, 0],  # heads first: they can be split as they are
        lambda w, x: jnp.split(jnp.tensordot(x, w.reshape(4, 2, 12), 1), 2, axis=-1),  # heads are a dim of their own
        lambda w, x: (x @ w)[..., 0],
    ],
)
def test_what_is_not_packed(function):
    assert forms(function, W) == {}


class Gated(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate, value = jnp.split(nn.Dense(2 * 24, name="packed")(x), 2, axis=-1)
        return nn.Dense(8)(nn.silu(gate) * value)


def squared(model, batch):
    return jnp.square(model(batch["x"])).mean()


def test_parts_are_split_where_they_are_kept_and_moved_nowhere():
    batch = {"x": jnp.ones((16, 8))}
    program = cjax.parallelize(Gated(), squared, optax.adamw(1e-3), batch, "data=2 tensor=4")
    state = program.init(0)
    packed = [x for x in jax.tree.leaves(state) if x.shape in [(8, 2, 24), (2, 24)]]
    assert len(packed) == 2 * 3  # parameters and both moments
    assert all(x.addressable_shards[0].data.shape[-2:] == (x.shape[-2], 6) for x in packed)
    text = program.lower().compile().as_text()
    assert text is not None and not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
    assert program.params(state)["packed"]["kernel"].shape == (8, 48)
    one = cjax.parallelize(Gated(), squared, optax.adamw(1e-3), batch, "data=1", devices=jax.devices()[:1])
    assert program.check(state, batch).is_close
    for a, b in zip(*(jax.tree.leaves(p.params(p.step(p.init(0), batch)[0])) for p in (program, one)), strict=True):
        assert jnp.allclose(jax.device_get(a), jax.device_get(b), rtol=1e-5, atol=1e-6)
