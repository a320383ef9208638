"""What random models are made of: each block a function of activations [rows, positions, width] and of its parameters.

A block knows neither Linen nor NNX: `m` makes its parameters, state and random keys (models.py). What it is given
beside `x` is plain data, which its sampler draws, so that a model can be kept as a row. Blocks are grouped by what they
are there for: a family of primitives with gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from search.elementwise import (
    BINARY,
    CUMULATIVE,
    REDUCTIONS,
    UNARY,
    apply_binary,
    apply_unary,
)

Random = np.random.Generator
Config = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Block:
    """One kind. `run(m, x, **config)` gives activations of x's shape; `sample` draws a config."""

    run: Callable[..., jax.Array]
    choices: Config  # for each argument, what it may be
    couples: bool = False  # rows meet: micro-batches make other numbers
    random: bool = False
    state: bool = False
    integer: bool = False  # has a parameter of integers, which no gradient reaches
    only: str = ""  # "linen" or "nnx", where one of them alone has it

    def sample(self, rng: Random) -> Config:
        return {name: values[int(rng.integers(len(values)))] for name, values in self.choices.items()}


BLOCKS: dict[str, Block] = {}


def block(**choices: Any) -> Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]]:
    """Puts a function into the table. Of each of `choices` its sampler draws one; traits of `Block` go by."""
    traits = {field.name for field in dataclasses.fields(Block)} & choices.keys()
    kept = {name: choices.pop(name) for name in traits}

    def register(run: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        BLOCKS[run.__name__] = Block(run, choices, **kept)
        return run

    return register


def act(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) + 0.1 * x


def index_of(ids: jax.Array, size: int) -> jax.Array:
    return ids % size


SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16)
AXES = (-1, -2)  # the width, the positions
YES_NO = (False, True)


# -- products ---------------------------------------------------------------------------------------------------------
@block(hidden=SIZES, bias=YES_NO)
def mlp(m: Any, x: jax.Array, hidden: int, bias: bool) -> jax.Array:
    width = x.shape[-1]
    h = x @ m.param("up", (width, hidden)) + (m.param("up_bias", (hidden,)) if bias else 0)
    return act(h) @ m.param("down", (hidden, width))


@block(hidden=SIZES)
def flax_mlp(m: Any, x: jax.Array, hidden: int) -> jax.Array:
    return m.layer("down", "dense", act(m.layer("up", "dense", x, features=hidden)), features=x.shape[-1])


@block(hidden=SIZES)
def gated(m: Any, x: jax.Array, hidden: int) -> jax.Array:
    width = x.shape[-1]
    gate, up = x @ m.param("gate", (width, hidden)), x @ m.param("up", (width, hidden))
    return (jax.nn.silu(gate) * up) @ m.param("down", (hidden, width))


@block(a=SIZES, b=(1, 2, 3, 4, 5), out=("abe", "eab"))
def dense_general(m: Any, x: jax.Array, a: int, b: int, out: str) -> jax.Array:
    width = x.shape[-1]
    h = act(jnp.einsum("bsd,dij->bsij", x, m.param("inner", (width, a, b))))
    shape = {"abe": (a, b, width), "eab": (width, a, b)}[out]
    return jnp.einsum(f"bsij,{out.replace('a', 'i').replace('b', 'j')}->bse", h, m.param("outer", shape))


@block(rank=SIZES)
def bilinear(m: Any, x: jax.Array, rank: int) -> jax.Array:
    width = x.shape[-1]
    h = jnp.einsum("bsd,drk,btk->bstr", x, m.param("core", (width, rank, width)), x) / x.shape[1]
    return jnp.einsum("bstr,re->bse", h, m.param("out", (rank, width)))


@block(experts=SIZES, hidden=SIZES)
def experts_soft(m: Any, x: jax.Array, experts: int, hidden: int) -> jax.Array:
    width = x.shape[-1]
    gates = jax.nn.softmax(x @ m.param("router", (width, experts)))
    h = act(jnp.einsum("bsd,edf->ebsf", x, m.param("up", (experts, width, hidden))))
    return jnp.einsum("ebsf,efd,bse->bsd", h, m.param("down", (experts, hidden, width)), gates)


@block(experts=(2, 3, 4, 8), hidden=SIZES, top=(1, 2))
def experts_top(m: Any, x: jax.Array, experts: int, hidden: int, top: int) -> jax.Array:
    width = x.shape[-1]
    gates = jax.nn.softmax(x @ m.param("router", (width, experts)))
    best, chosen = lax.top_k(gates, top)
    weight = (jax.nn.one_hot(chosen, experts, dtype=x.dtype) * best[..., None]).sum(-2)
    h = act(jnp.einsum("bsd,edf->bsef", x, m.param("up", (experts, width, hidden))))
    return jnp.einsum("bsef,efd,bse->bsd", h, m.param("down", (experts, hidden, width)), weight)


@block(experts=(2, 3, 4), hidden=SIZES, capacity=(3, 8, 200), couples=True)
def experts_capacity(m: Any, x: jax.Array, experts: int, hidden: int, capacity: int) -> jax.Array:
    rows, length, width = x.shape
    flat = x.reshape(rows * length, width)
    gates = jax.nn.softmax(flat @ m.param("router", (width, experts)))
    best, chosen = gates.max(-1), jax.nn.one_hot(gates.argmax(-1), experts, dtype=jnp.int32)
    seat = (jnp.cumsum(chosen, 0) - 1) * chosen - (1 - chosen)
    dispatch = jax.nn.one_hot(seat, capacity, dtype=x.dtype)
    slots = jnp.einsum("nec,nd->ecd", dispatch, flat)
    h = act(jnp.einsum("ecd,edf->ecf", slots, m.param("up", (experts, width, hidden))))
    out = jnp.einsum("ecf,efd->ecd", h, m.param("down", (experts, hidden, width)))
    return jnp.einsum("nec,ecd,n->nd", dispatch, out, best).reshape(x.shape)


@block(how=("scaled", "tanh", "norm", "standardised", "concatenated", "transposed", "product", "sliced", "symmetric"))
def function_of_weight(m: Any, x: jax.Array, how: str) -> jax.Array:
    width = x.shape[-1]
    w = m.param("kernel", (width, width))
    if how == "scaled":
        w = 0.5 * w
    elif how == "tanh":
        w = jnp.tanh(w)
    elif how == "norm":
        w = w / jnp.sqrt((w * w).sum(0) + 1e-6) * m.param("scale", (width,))
    elif how == "standardised":
        w = (w - w.mean(0)) / (w.std(0) + 0.5)
    elif how == "concatenated":
        w = jnp.concatenate([w, m.param("more", (width, 3))], 1)
        return (x @ w)[..., 2 : 2 + width]
    elif how == "transposed":
        w = w.T
    elif how == "product":
        w = w @ m.param("other", (width, width))
    elif how == "sliced":
        return x @ m.param("long", (width + 3, width + 2))[1:-2, 2:]
    else:
        w = w + w.T
    return x @ w


@block(rank=(1, 2, 3))
def low_rank(m: Any, x: jax.Array, rank: int) -> jax.Array:
    """LoRA's kind: a frozen matrix beside two small ones."""
    width = x.shape[-1]
    return x @ m.param("frozen", (width, width)) + x @ m.param("a", (width, rank)) @ m.param("b", (rank, width))


@block(times=(2, 3))
def applied_again(m: Any, x: jax.Array, times: int) -> jax.Array:
    w = m.param("kernel", (x.shape[-1],) * 2)
    for _ in range(times):
        x = act(x @ w)
    return x


@block(axes=((0, 1), (1, 0)), hidden=SIZES)
def mixer(m: Any, x: jax.Array, axes: tuple[int, int], hidden: int) -> jax.Array:
    length = x.shape[1]
    y = jnp.swapaxes(x, 1, 2) if axes[0] else jnp.moveaxis(x, 1, 2)
    y = act(y @ m.param("up", (length, hidden))) @ m.param("down", (hidden, length))
    return jnp.swapaxes(y, 1, 2)


@block(a=(2, 3, 4))
def folded(m: Any, x: jax.Array, a: int) -> jax.Array:
    """The width taken apart, padded first if it must, and mixed along one part."""
    rows, length, width = x.shape
    pad = -width % a
    y = jnp.pad(x, ((0, 0), (0, 0), (0, pad))).reshape(rows, length, a, -1)
    y = jnp.einsum("bsac,ae->bsec", y, m.param("mix", (a, a)))
    return y.reshape(rows, length, -1)[..., :width]


@block(groups=(2, 3, 4), width=(2, 3, 4))
def block_diagonal(m: Any, x: jax.Array, groups: int, width: int) -> jax.Array:
    h = (x @ m.param("up", (x.shape[-1], groups * width))).reshape(*x.shape[:2], groups, width)
    h = jnp.einsum("bsgw,gwv->bsgv", h, m.param("core", (groups, width, width)))
    return h.reshape(*x.shape[:2], -1) @ m.param("down", (groups * width, x.shape[-1]))


@block(experts=(2, 3), couples=True)
def ragged(m: Any, x: jax.Array, experts: int) -> jax.Array:
    """All positions of the batch in groups of their own sizes, each with a matrix of its own."""
    flat, each = x.reshape(-1, x.shape[-1]), x.shape[0] * x.shape[1] // (experts + 1)
    sizes = jnp.asarray([flat.shape[0] - each * (experts - 1)] + [each] * (experts - 1), jnp.int32)
    return lax.ragged_dot(flat, m.param("kernel", (experts, *x.shape[-1:] * 2)), sizes).reshape(x.shape)


@block(batch_dims=YES_NO)
def dot_general(m: Any, x: jax.Array, batch_dims: bool) -> jax.Array:
    width = x.shape[-1]
    if batch_dims:
        w = m.param("kernel", (x.shape[1], width, width))
        return jnp.moveaxis(lax.dot_general(x, w, (((2,), (1,)), ((1,), (0,)))), 0, 1)
    return lax.dot_general(x, m.param("kernel", (width, width)), (((2,), (1,)), ((), ())))


# -- attention --------------------------------------------------------------------------------------------------------
def softmax_mix(q: jax.Array, k: jax.Array, v: jax.Array, causal: bool) -> jax.Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    if causal:
        length = scores.shape[-1]
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)


@block(heads=(1, 2, 3, 4, 5, 8), size=(1, 2, 3, 4), causal=YES_NO)
def attention(m: Any, x: jax.Array, heads: int, size: int, causal: bool) -> jax.Array:
    width = x.shape[-1]
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, m.param(name, (width, heads, size))) for name in "qkv")
    return jnp.einsum("bshk,hkd->bsd", softmax_mix(q, k, v, causal), m.param("out", (heads, size, width)))


@block(heads=(2, 4), causal=YES_NO)
def flax_attention(m: Any, x: jax.Array, heads: int, causal: bool) -> jax.Array:
    mask = jnp.tril(jnp.ones((1, 1, x.shape[1], x.shape[1]), bool)) if causal else None
    return m.layer("attention", "attention", x, heads=heads, mask=mask)


@block(heads=(1, 2, 3, 4, 6), size=(1, 2, 3), order=("qkv", "heads"))
def packed_attention(m: Any, x: jax.Array, heads: int, size: int, order: str) -> jax.Array:
    rows, length, width = x.shape
    packed = x @ m.param("packed", (width, 3 * heads * size))
    if order == "qkv":
        q, k, v = (part.reshape(rows, length, heads, size) for part in jnp.split(packed, 3, -1))
    else:
        q, k, v = (packed.reshape(rows, length, heads, 3, size)[:, :, :, i] for i in range(3))
    return softmax_mix(q, k, v, True).reshape(rows, length, -1) @ m.param("out", (heads * size, width))


@block(heads=(2, 4, 8), groups=(1, 2), size=(2, 3))
def grouped_attention(m: Any, x: jax.Array, heads: int, groups: int, size: int) -> jax.Array:
    width = x.shape[-1]
    q = jnp.einsum("bsd,dhk->bshk", x, m.param("q", (width, heads, size)))
    k, v = (jnp.einsum("bsd,dhk->bshk", x, m.param(name, (width, groups, size))) for name in "kv")
    k, v = (jnp.repeat(part, heads // groups, 2) for part in (k, v))
    return jnp.einsum("bshk,hkd->bsd", softmax_mix(q, k, v, True), m.param("out", (heads, size, width)))


@block(heads=(1, 2, 3), size=(2, 3))
def linear_attention(m: Any, x: jax.Array, heads: int, size: int) -> jax.Array:
    width = x.shape[-1]
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, m.param(name, (width, heads, size))) for name in "qkv")
    q, k = jax.nn.softplus(q), jax.nn.softplus(k)
    state = jnp.cumsum(jnp.einsum("bshk,bshv->bshkv", k, v), 1)
    mixed = jnp.einsum("bshk,bshkv->bshv", q, state) / jnp.einsum("bshk,bshk->bsh", q, jnp.cumsum(k, 1))[..., None]
    return jnp.einsum("bshk,hkd->bsd", mixed, m.param("out", (heads, size, width)))


@block(heads=(1, 2, 4))
def rotary_attention(m: Any, x: jax.Array, heads: int) -> jax.Array:
    width, size = x.shape[-1], 4
    angles = jnp.arange(x.shape[1])[:, None] * 0.5 ** jnp.arange(size // 2)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]

    def turn(y: jax.Array) -> jax.Array:
        a, b = jnp.split(y, 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, m.param(name, (width, heads, size))) for name in "qkv")
    return jnp.einsum("bshk,hkd->bsd", softmax_mix(turn(q), turn(k), v, False), m.param("out", (heads, size, width)))


# -- convolutions and windows -----------------------------------------------------------------------------------------
@block(channels=(2, 4, 6, 8), kernel=(1, 2, 3), dilation=(1, 2), groups=(1, 2), bias=YES_NO)
def conv1d(m: Any, x: jax.Array, channels: int, kernel: int, dilation: int, groups: int, bias: bool) -> jax.Array:
    h = x @ m.param("up", (x.shape[-1], channels))
    h = lax.conv_general_dilated(
        h, m.param("kernel", (kernel, channels // groups, channels)), (1,), "SAME", rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=groups,
    )  # fmt: skip
    h = act(h + m.param("bias", (channels,)) if bias else h)
    return h @ m.param("down", (channels, x.shape[-1]))


@block(kernel=(2, 3), causal=YES_NO)
def depthwise(m: Any, x: jax.Array, kernel: int, causal: bool) -> jax.Array:
    padding = [(kernel - 1, 0)] if causal else "SAME"
    return lax.conv_general_dilated(
        x, m.param("kernel", (kernel, 1, x.shape[-1])), (1,), padding,
        dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=x.shape[-1],
    )  # fmt: skip


@block(kernel=(2, 3), features=(2, 3, 8))
def flax_conv(m: Any, x: jax.Array, kernel: int, features: int) -> jax.Array:
    h = act(m.layer("conv", "conv", x, features=features, kernel=kernel))
    return m.layer("down", "dense", h, features=x.shape[-1])


@block(channels=(1, 2, 3, 4), strides=(1, 2), groups=(1, 2), transpose=YES_NO)
def conv2d(m: Any, x: jax.Array, channels: int, strides: int, groups: int, transpose: bool) -> jax.Array:
    """Positions and width as an image of two channels, made smaller if it is strided, and larger again."""
    inner = channels * groups
    image = jnp.stack([x, x[:, ::-1]], -1)
    h = lax.conv_general_dilated(
        image, m.param("kernel", (3, 2, 2 // groups, inner)), (strides,) * 2, "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups,
    )  # fmt: skip
    if transpose:
        h = lax.conv_transpose(
            act(h), m.param("back", (2, 2, inner, 1)), (strides,) * 2, "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip
        return h[:, : x.shape[1], : x.shape[2], 0]
    return x + jnp.einsum("bhwc,c->b", act(h), m.param("out", (inner,)))[:, None, None] / (h.shape[1] * h.shape[2])


@block(how=("max", "avg", "min", "sum", "flax max", "flax avg"), window=(2, 3), stride=(1, 2))
def pool(m: Any, x: jax.Array, how: str, window: int, stride: int) -> jax.Array:
    x = x * m.param("scale", (x.shape[-1],))
    if how.startswith("flax"):
        y = m.pool(how[5:], x, window, stride)
    else:
        first, op = {"max": (-np.inf, lax.max), "min": (np.inf, lax.min)}.get(how, (0.0, lax.add))
        y = lax.reduce_window(x, np.asarray(first, x.dtype), op, (1, window, 1), (1, stride, 1), "SAME")
        y = y / window if how == "avg" else y
    return jnp.repeat(y, stride, 1)[:, : x.shape[1]]


@block(kernel=(2, 3))
def patches(m: Any, x: jax.Array, kernel: int) -> jax.Array:
    y = lax.conv_general_dilated_patches(x, (kernel,), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))
    return y @ m.param("down", (y.shape[-1], x.shape[-1]))


# -- norms ------------------------------------------------------------------------------------------------------------
@block(how=("layer", "rms", "l2", "flax layer", "flax rms", "positions"))
def norm(m: Any, x: jax.Array, how: str) -> jax.Array:
    if how.startswith("flax"):
        return m.layer("norm", how[5:] + "_norm", x)
    axis = 1 if how == "positions" else -1
    centred = x - x.mean(axis, keepdims=True) if how in ("layer", "positions") else x
    square = (centred * centred).sum if how == "l2" else (centred * centred).mean
    return centred * lax.rsqrt(square(axis, keepdims=True) + 1e-2) * m.param("scale", (x.shape[-1],))


@block(groups=(2, 3))
def group_norm(m: Any, x: jax.Array, groups: int) -> jax.Array:
    h = (x @ m.param("up", (x.shape[-1], 4 * groups))).reshape(*x.shape[:2], groups, 4)
    h = (h - h.mean((1, 3), keepdims=True)) * lax.rsqrt(h.var((1, 3), keepdims=True) + 1e-2)
    return h.reshape(*x.shape[:2], -1) @ m.param("down", (4 * groups, x.shape[-1]))


@block(momentum=(0.5, 0.9), couples=True, state=True)
def batch_norm(m: Any, x: jax.Array, momentum: float) -> jax.Array:
    return m.layer("norm", "batch_norm", x, momentum=momentum)


# -- embeddings, gathers, scatters ------------------------------------------------------------------------------------
@block(vocab=(3, 7, 8, 11, 16))
def embed(m: Any, x: jax.Array, vocab: int) -> jax.Array:
    return x + m.param("embedding", (vocab, x.shape[-1]))[index_of(m.ids, vocab)]


@block(vocab=(5, 8, 16))
def flax_embed(m: Any, x: jax.Array, vocab: int) -> jax.Array:
    return x * m.layer("embedding", "embed", index_of(m.ids, vocab), num=vocab, features=x.shape[-1])


@block(vocab=(5, 8, 13))
def tied(m: Any, x: jax.Array, vocab: int) -> jax.Array:
    table = m.param("embedding", (vocab, x.shape[-1]))
    return jax.nn.softmax((x + table[index_of(m.ids, vocab)]) @ table.T) @ table


@block(vocab=(5, 8))
def one_hot(m: Any, x: jax.Array, vocab: int) -> jax.Array:
    return x + jax.nn.one_hot(index_of(m.ids, vocab), vocab, dtype=x.dtype) @ m.param("table", (vocab, x.shape[-1]))


@block(reach=(2, 5))
def relative_bias(m: Any, x: jax.Array, reach: int) -> jax.Array:
    length = x.shape[1]
    distance = jnp.clip(jnp.arange(length)[:, None] - jnp.arange(length), -reach, reach) + reach
    bias = m.param("table", (2 * reach + 1, 3))[distance]
    return jnp.einsum("qk,bkd->bqd", jax.nn.softmax(bias.mean(-1)), x)


@block(axis=AXES, mode=("clip", "fill", "wrap"))
def take(m: Any, x: jax.Array, axis: int, mode: str) -> jax.Array:
    size = x.shape[axis]
    index = np.arange(size) * 3 % size
    return jnp.take(x * m.param("scale", (x.shape[-1],)), index, axis, mode=mode)


@block(axis=AXES)
def take_along(m: Any, x: jax.Array, axis: int) -> jax.Array:
    x = x @ m.param("kernel", (x.shape[-1],) * 2)
    index = index_of(m.ids[..., None] + jnp.arange(x.shape[-1]), x.shape[axis])
    return jnp.take_along_axis(x, index, axis)


@block(batched=YES_NO)
def gather_positions(m: Any, x: jax.Array, batched: bool) -> jax.Array:
    x = x @ m.param("kernel", (x.shape[-1],) * 2)
    index = index_of(m.ids, x.shape[1])
    if batched:
        return jax.vmap(lambda row, i: row[i])(x, index)
    return x[jnp.arange(x.shape[0])[:, None], index]


@block(how=("add", "set", "max", "min", "mul", "subtract"), axis=AXES)
def scatter(m: Any, x: jax.Array, how: str, axis: int) -> jax.Array:
    size = x.shape[axis]
    index = np.unique(np.arange(size) * 2 % size)
    x = jnp.moveaxis(x, axis, 1)
    update = act(x[:, : len(index)] * m.param("scale", ()))
    return jnp.moveaxis(getattr((x * 0.9).at[:, index], how)(update, unique_indices=True), 1, axis)


@block(how=("segment_sum", "segment_max", "at add"), number=(2, 3, 5))
def segments(m: Any, x: jax.Array, how: str, number: int) -> jax.Array:
    """Positions with one number are added up, and the sum is looked up again, as in a graph's messages."""
    x = x @ m.param("kernel", (x.shape[-1],) * 2)

    def one(row: jax.Array, ids: jax.Array) -> jax.Array:
        if how == "at add":
            return jnp.zeros((number, row.shape[-1]), row.dtype).at[ids].add(row)[ids]
        summed = getattr(jax.ops, how)(1 + 0.1 * row, ids, number)
        return jnp.where(jnp.isfinite(summed), summed, 0.0)[ids]

    return jax.vmap(one)(x, index_of(m.ids, number))


@block(number=(3, 7), couples=True)
def graph(m: Any, x: jax.Array, number: int) -> jax.Array:
    """Nodes of the whole batch: rows meet."""
    flat, ids = (x @ m.param("kernel", (x.shape[-1],) * 2)).reshape(-1, x.shape[-1]), index_of(m.ids, number).ravel()
    summed = jax.ops.segment_sum(flat, ids, number) / flat.shape[0]
    return x + (summed @ m.param("out", (x.shape[-1],) * 2))[ids].reshape(x.shape)


@block(axis=AXES, size=(1, 2))
def dynamic_slice(m: Any, x: jax.Array, axis: int, size: int) -> jax.Array:
    axis, size = axis % 3, min(size, x.shape[axis])
    x = x @ m.param("kernel", (x.shape[-1],) * 2)
    start = jnp.int32(x.shape[axis] - size)
    piece = lax.dynamic_slice_in_dim(x, start, size, axis)
    return lax.dynamic_update_slice_in_dim(x, act(piece), jnp.int32(0), axis)


# -- sorting ----------------------------------------------------------------------------------------------------------
@block(axis=AXES, how=("sort", "argsort", "top_k", "keys", "descending", "approx"))
def sort(m: Any, x: jax.Array, axis: int, how: str) -> jax.Array:
    x = jnp.moveaxis(x @ m.param("kernel", (x.shape[-1],) * 2), axis, -1)
    size = x.shape[-1]
    if how == "sort":
        y = jnp.sort(x, -1)
    elif how == "argsort":
        y = jnp.take_along_axis(jnp.tanh(x), jnp.argsort(x, -1), -1)
    elif how in ("top_k", "approx"):
        k = max(1, size // 2)
        best, where = lax.top_k(x, k) if how == "top_k" else lax.approx_max_k(x, k)
        y = jnp.tanh(x) * 0.1 + best.sum(-1, keepdims=True) + jnp.take_along_axis(x, where, -1).mean(-1, keepdims=True)
    elif how == "keys":
        y = lax.sort((x, jnp.sin(x), x * x), dimension=-1, num_keys=1)[1]
    else:
        y = jnp.sort(x, -1, descending=True) * jnp.arange(1, size + 1)
    return jnp.moveaxis(y, -1, axis)


@block(q=(0.3, 0.5))
def quantile(m: Any, x: jax.Array, q: float) -> jax.Array:
    return x - jnp.quantile(x * m.param("scale", (x.shape[-1],)), q, axis=-1, keepdims=True)


# -- cumulative, Fourier, linear algebra ------------------------------------------------------------------------------
@block(how=tuple(CUMULATIVE), axis=AXES, reverse=YES_NO, dense=YES_NO)
def cumulative(m: Any, x: jax.Array, how: str, axis: int, reverse: bool, dense: bool) -> jax.Array:
    if dense:
        x = x @ m.param("kernel", (x.shape[-1],) * 2)
    return CUMULATIVE[how](x, axis=axis % 3, reverse=reverse) / x.shape[axis]


@block(axis=AXES, how=("rfft", "fft", "fft2", "fftn dense", "hfft"))
def fourier(m: Any, x: jax.Array, axis: int, how: str) -> jax.Array:
    size = x.shape[axis]
    if how == "fft2":
        return jnp.fft.fft2(x * m.param("scale", (x.shape[-1],))).real / (size + 1)
    if how == "fftn dense":
        return jnp.abs(jnp.fft.fft(x @ m.param("kernel", (x.shape[-1],) * 2), axis=axis) + 0.5) / size
    if how == "hfft":
        return jnp.fft.ifft(x * m.param("scale", (x.shape[-1],)), axis=axis).imag
    if how == "fft":
        return jnp.fft.ifft(jnp.fft.fft(x, axis=axis) * m.param("filter", (x.shape[-1],))[None, None], axis=axis).real
    y = jnp.fft.rfft(x, axis=axis)
    shape = (y.shape[1], 1) if axis == -2 else (y.shape[2],)
    y = y * lax.complex(m.param("real", shape), m.param("imaginary", shape))
    return jnp.fft.irfft(y, size, axis=axis)


def gram(m: Any, x: jax.Array) -> jax.Array:
    """Positive definite matrices [rows, width, width], well apart from singular ones."""
    y = jnp.tanh(x @ m.param("kernel", (x.shape[-1],) * 2))
    return jnp.einsum("bsd,bse->bde", y, y) / x.shape[1] + jnp.diag(1.0 + jnp.arange(x.shape[-1]))


LINALG = "cholesky solve triangular qr inv slogdet eigvalsh eigh svd expm lu eig tridiagonal of_weight".split()


@block(how=tuple(LINALG))
def linalg(m: Any, x: jax.Array, how: str) -> jax.Array:
    a, eye = gram(m, x), jnp.eye(x.shape[-1], dtype=x.dtype)
    right = jnp.swapaxes(x, 1, 2)  # [rows, width, positions]
    if how == "of_weight":
        w = m.param("other", (x.shape[-1],) * 2)
        return x @ jnp.linalg.inv(w @ w.T + eye)
    if how == "solve":
        return jnp.swapaxes(jnp.linalg.solve(a, right), 1, 2)
    if how == "triangular":
        return jnp.swapaxes(lax.linalg.triangular_solve(jnp.tril(a), right, left_side=True, lower=True), 1, 2)
    if how == "tridiagonal":
        zero, side = jnp.zeros_like(x[:, :1, 0]), jnp.diagonal(0.1 * a, 1, 1, 2)
        lower, upper = jnp.concatenate([zero, side], 1), jnp.concatenate([side, zero], 1)
        middle = jnp.diagonal(a, 0, 1, 2)
        return jnp.swapaxes(lax.linalg.tridiagonal_solve(lower, middle, upper, right), 1, 2)
    if how in ("slogdet", "eigvalsh", "eig"):
        if how == "eig":
            value = jnp.sort(jnp.linalg.eigvals(a).real, -1)
        else:
            value = jnp.linalg.slogdet(a)[1][:, None] if how == "slogdet" else jnp.linalg.eigvalsh(a)
        return x + 0.1 * value[:, None]
    if how == "lu":
        matrix = jnp.triu(lax.linalg.lu(a)[0])
    elif how == "qr":
        matrix = jnp.linalg.qr(a)[1]
    elif how == "eigh":
        values, vectors = jnp.linalg.eigh(a)
        matrix = jnp.einsum("bij,bj,bkj->bik", vectors, jnp.sqrt(values), vectors)
    elif how == "svd":
        matrix = jnp.linalg.svd(a, compute_uv=False)[:, None] * eye
    elif how == "expm":
        matrix = jax.scipy.linalg.expm(0.1 * a)
    else:
        matrix = {"cholesky": jnp.linalg.cholesky, "inv": jnp.linalg.inv}[how](a)
    return jnp.einsum("bsd,bde->bse", x, matrix) / x.shape[-1]


# -- moving -----------------------------------------------------------------------------------------------------------
MOVES = "pad interior slice strided roll flip split stack transpose tile repeat reshape concat squeeze tril".split()


@block(how=tuple(MOVES), axis=AXES, dense=YES_NO)
def move(m: Any, x: jax.Array, how: str, axis: int, dense: bool) -> jax.Array:
    axis = axis % 3
    x = x @ m.param("kernel", (x.shape[-1],) * 2) if dense else x * m.param("scale", (x.shape[-1],))
    size = x.shape[axis]
    one = [(0, 0, 0)] * 3
    if how == "pad":
        one[axis] = (2, -1, 0)
        return lax.slice_in_dim(lax.pad(x, x.dtype.type(0.3), one), 0, size, axis=axis)
    if how == "interior":
        one[axis] = (1, 2, 1)
        return lax.slice_in_dim(lax.pad(x, x.dtype.type(0), one), 1, 1 + size, axis=axis)
    if how == "slice":
        part = lax.slice_in_dim(x, size // 2, size, axis=axis)
        return x + part.mean(axis, keepdims=True)
    if how == "strided":
        return x + lax.slice_in_dim(x, 0, size, 2, axis).sum(axis, keepdims=True)
    if how == "roll":
        return jnp.roll(x, 1, axis)
    if how == "flip":
        return jnp.flip(x, axis)
    if how in ("split", "concat"):
        a, b = jnp.split(x, [size // 2], axis)
        return jnp.concatenate([b, act(a)], axis)
    if how == "stack":
        return jnp.stack([x, jnp.sin(x)], axis).sum(axis) + jnp.stack([x, x * x], 0)[1]
    if how == "transpose":
        return jnp.transpose(act(jnp.transpose(x, (2, 0, 1))), (1, 2, 0)) * 0.7
    if how == "tile":
        return lax.slice_in_dim(jnp.tile(x, (1, 2, 2)[:axis] + (3,) + (1,) * (2 - axis)), size, 2 * size, axis=axis)[
            :, : x.shape[1], : x.shape[2]
        ]
    if how == "repeat":
        return lax.slice_in_dim(jnp.repeat(x, 2, axis), 0, size, axis=axis)
    if how == "reshape":
        return act(x.reshape(x.shape[0], -1)).reshape(x.shape[0], x.shape[2], x.shape[1]).swapaxes(1, 2)
    if how == "squeeze":
        return jnp.expand_dims(lax.index_in_dim(x, size - 1, axis, keepdims=False), axis) + x
    return jnp.tril(x) + 0.1 * x


# -- one number at a time, and reductions -----------------------------------------------------------------------------
@block(name=tuple(UNARY), dense=YES_NO)
def unary(m: Any, x: jax.Array, name: str, dense: bool) -> jax.Array:
    x = x @ m.param("kernel", (x.shape[-1],) * 2) if dense else x * m.param("scale", (x.shape[-1],))
    return apply_unary(name, x)


@block(name=tuple(BINARY), other=("dense", "vector", "positions"))
def binary(m: Any, x: jax.Array, name: str, other: str) -> jax.Array:
    if other == "dense":
        y = x @ m.param("kernel", (x.shape[-1],) * 2)
    else:
        y = jnp.broadcast_to(m.param("b", (x.shape[-1],) if other == "vector" else (x.shape[1], 1)), x.shape)
    return apply_binary(name, x * m.param("scale", ()), y)


@block(name=tuple(REDUCTIONS), axis=AXES, dense=YES_NO)
def reduction(m: Any, x: jax.Array, name: str, axis: int, dense: bool) -> jax.Array:
    y = x @ m.param("kernel", (x.shape[-1], 6 if axis == -1 else x.shape[-1])) if dense else x
    return x * m.param("scale", (x.shape[-1],)) + REDUCTIONS[name](y, axis=axis, keepdims=True)


# -- loops and conditions ---------------------------------------------------------------------------------------------
@block(hidden=SIZES, reverse=YES_NO, unroll=(1, 2), how=("simple", "gru", "remat"))
def recurrent(m: Any, x: jax.Array, hidden: int, reverse: bool, unroll: int, how: str) -> jax.Array:
    width = x.shape[-1]
    w, u = m.param("input", (width, hidden)), m.param("hidden", (hidden, hidden))
    g = m.param("gate", (width, hidden)) if how == "gru" else None

    def turn(h: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        new = jnp.tanh(row @ w + h @ u)
        new = new if g is None else h + jax.nn.sigmoid(row @ g) * (new - h)
        return new, new

    first = jnp.zeros((x.shape[0], hidden), x.dtype)
    body = jax.checkpoint(turn) if how == "remat" else turn
    _, out = lax.scan(body, first, jnp.swapaxes(x, 0, 1), reverse=reverse, unroll=unroll)
    return jnp.swapaxes(out, 0, 1) @ m.param("down", (hidden, width))


@block(kind=("lstm", "gru"), hidden=(2, 3, 8))
def flax_recurrent(m: Any, x: jax.Array, kind: str, hidden: int) -> jax.Array:
    return m.layer("down", "dense", m.layer("cell", kind, x, features=hidden), features=x.shape[-1])


@block(how=("fori", "while", "scan params", "map", "map rows", "associative", "cumulative scan"))
def loop(m: Any, x: jax.Array, how: str) -> jax.Array:
    width = x.shape[-1]
    w = m.param("kernel", (width, width))
    if how == "fori":
        return lax.fori_loop(0, 3, lambda i, y: act(y @ w) + 0.1 * i, x)
    if how == "while":  # no gradient goes through: it counts
        def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
            return (carry[0] < 4) & (jnp.abs(carry[1]).max() < 100)

        count, _ = lax.while_loop(more, lambda c: (c[0] + 1, 1.5 * c[1]), (jnp.int32(0), lax.stop_gradient(w)))
        return (x @ w) * (1 + 0.1 * count.astype(x.dtype))
    if how == "scan params":
        stacked = m.param("stacked", (3, width, width))
        return lax.scan(lambda y, k: (act(y @ k), None), x @ w, stacked)[0]
    if how == "map":
        return jnp.moveaxis(lax.map(lambda part: act(part @ w), jnp.moveaxis(x, 1, 0)), 0, 1)
    if how == "map rows":
        return lax.map(lambda row: act(row @ w), x)
    decay = jax.nn.sigmoid(x @ w)
    if how == "associative":
        def join(a: Any, b: Any) -> Any:
            return a[0] * b[0], b[0] * a[1] + b[1]

        return lax.associative_scan(join, (decay, x), axis=1)[1]
    return lax.associative_scan(jnp.maximum, decay, axis=1, reverse=True)


@block(how=("cond param", "cond data", "switch", "select rows", "cond state free"))
def condition(m: Any, x: jax.Array, how: str) -> jax.Array:
    width = x.shape[-1]
    w, v = m.param("kernel", (width, width)), m.param("other", (width, width))
    if how == "cond param":
        return lax.cond(w[0, 0] > 0, lambda y: act(y @ w), lambda y: y @ v, x)
    if how == "cond data":
        return jax.vmap(lambda row: lax.cond(row[0, 0] > 0, lambda y: act(y @ w), lambda y: y @ v, row))(x)
    if how == "switch":
        branches = [lambda y: y @ w, lambda y: act(y @ v), lambda y: y]
        return lax.switch((jnp.abs(w[0, 0]) * 10).astype(jnp.int32) % 3, branches, x)
    if how == "select rows":
        return jnp.where((m.ids[:, :1] % 2 == 0)[..., None], x @ w, x @ v)
    return lax.cond(jnp.linalg.norm(v) > 1.0, lambda: x @ w, lambda: jnp.sin(x @ v))


@block(policy=("nothing", "dots", "everything"))
def remat(m: Any, x: jax.Array, policy: str) -> jax.Array:
    policies = jax.checkpoint_policies
    chosen = {"nothing": policies.nothing_saveable, "dots": policies.dots_saveable, "everything": None}[policy]
    w, v = m.param("up", (x.shape[-1], 5)), m.param("down", (5, x.shape[-1]))
    return jax.checkpoint(lambda x, w, v: act(jnp.sin(x @ w)) @ v, policy=chosen)(x, w, v)


# -- custom derivatives -----------------------------------------------------------------------------------------------
@jax.custom_vjp
def reversed_gradient(x: jax.Array) -> jax.Array:
    return x


reversed_gradient.defvjp(lambda x: (x, None), lambda _, g: (-0.3 * g,))


@jax.custom_vjp
def straight_through(x: jax.Array) -> jax.Array:
    return jnp.round(2 * x) / 2


straight_through.defvjp(lambda x: (straight_through(x), x), lambda x, g: (g * (jnp.abs(x) < 1),))


@jax.custom_vjp
def own_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def _own_back(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    return g @ saved[1].T, 1.5 * jnp.einsum("bsd,bse->de", saved[0], g)


own_matmul.defvjp(lambda x, w: (x @ w, (x, w)), _own_back)


@jax.custom_jvp
def own_softplus(x: jax.Array) -> jax.Array:
    return jnp.logaddexp(x, 0.0)


own_softplus.defjvp(lambda primals, tangents: (own_softplus(primals[0]), tangents[0] * jax.nn.sigmoid(primals[0])))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def clipped_gradient(x: jax.Array, limit: float) -> jax.Array:
    return x


clipped_gradient.defvjp(lambda x, limit: (x, None), lambda limit, _, g: (jnp.clip(g, -limit, limit),))


@jax.custom_batching.custom_vmap
def own_batching(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


@own_batching.def_vmap
def _own_batching(size: int, batched: Any, x: jax.Array) -> tuple[jax.Array, bool]:
    return jnp.sin(x), True


@block(how=("reversed", "straight", "matmul", "jvp", "clipped", "implicit", "batching", "composite", "name", "linear"))
def custom(m: Any, x: jax.Array, how: str) -> jax.Array:
    w = m.param("kernel", (x.shape[-1],) * 2)
    if how == "matmul":
        return own_matmul(x, w)
    y = x @ w
    if how == "implicit":
        shape = jnp.tanh(w) * 0.3 + 2 * jnp.eye(x.shape[-1], dtype=x.dtype)
        return lax.custom_linear_solve(
            lambda v: v @ shape, y, lambda _, b: jnp.linalg.solve(shape.T, b.reshape(-1, b.shape[-1]).T).T.reshape(
                b.shape), lambda _, b: jnp.linalg.solve(shape, b.reshape(-1, b.shape[-1]).T).T.reshape(b.shape),
        )  # fmt: skip
    if how == "clipped":
        return clipped_gradient(y, 0.01)
    if how == "batching":
        return y + jax.vmap(own_batching)(lax.stop_gradient(x))
    if how == "composite":
        return y * lax.composite(jnp.sin, "own.sine")(lax.stop_gradient(x))
    if how == "name":
        named = jax.checkpoint_policies.save_only_these_names("kept")
        return jax.checkpoint(lambda v: jnp.sin(checkpoint_name(jnp.tanh(v), "kept")), policy=named)(y)
    if how == "linear":
        return jax.custom_derivatives.linear_call(lambda scale, v: v * scale, lambda scale, v: v * scale, w[0], y)
    return {"reversed": reversed_gradient, "straight": straight_through, "jvp": own_softplus}[how](y)


# -- complex numbers --------------------------------------------------------------------------------------------------
@block(states=(2, 3, 4, 5), how=("scan", "associative", "kernel"))
def complex_ssm(m: Any, x: jax.Array, states: int, how: str) -> jax.Array:
    width, length = x.shape[-1], x.shape[1]
    rate = lax.complex(-0.2 - jax.nn.softplus(m.param("decay", (states,))), 2 * m.param("turn", (states,)))
    step = jnp.exp(rate)
    b = lax.complex(m.param("b_real", (width, states)), m.param("b_imag", (width, states)))
    c = lax.complex(m.param("c_real", (states, width)), m.param("c_imag", (states, width)))
    if how == "kernel":
        powers = step[:, None] ** jnp.arange(length)
        kernel = jnp.einsum("dn,nl,ne->lde", b, powers, c).real
        gaps = np.arange(length)[:, None] - np.arange(length)
        return jnp.einsum("qkde,bkd->bqe", jnp.where((gaps >= 0)[..., None, None], kernel[np.abs(gaps)], 0), x)
    u = x.astype(c.dtype) @ b
    if how == "associative":
        steps = jnp.broadcast_to(step, u.shape)
        h = lax.associative_scan(lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (steps, u), axis=1)[1]
    else:
        first = jnp.zeros((x.shape[0], states), c.dtype)
        h = lax.scan(lambda h, v: (step * h + v,) * 2, first, jnp.moveaxis(u, 1, 0))[1]
        h = jnp.moveaxis(h, 0, 1)
    return (h @ c).real


@block(how=("magnitude", "angle", "product", "polar", "parameter"))
def complex_dense(m: Any, x: jax.Array, how: str) -> jax.Array:
    width = x.shape[-1]
    if how == "parameter":
        z = x.astype(jnp.complex128) @ m.param("kernel", (width, width), dtype="complex128")
    else:
        z = x @ lax.complex(m.param("real", (width, width)), m.param("imag", (width, width)))
    if how == "magnitude":
        return jnp.abs(z + 2)
    if how == "angle":
        return jnp.angle(z + 3)
    if how == "polar":
        return (jnp.exp(1j * z.real) * z).imag
    return (z * z.conj() + 1j * jnp.tanh(z.imag)).real


# -- random, state, integers ------------------------------------------------------------------------------------------
@block(how=("dropout", "normal", "bernoulli", "gumbel", "uniform", "gamma", "permutation", "flax", "flax broadcast"), random=True)
def noise(m: Any, x: jax.Array, how: str) -> jax.Array:
    x = x @ m.param("kernel", (x.shape[-1],) * 2)
    if how.startswith("flax"):
        return m.layer("drop", "dropout", x, rate=0.3, broadcast=how == "flax broadcast")
    key = m.key()
    if key is None:
        return x
    if how == "normal":
        key = jax.random.wrap_key_data(jax.random.key_data(key))
        return x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
    if how == "gumbel":
        return jax.nn.softmax(x + jax.random.gumbel(key, x.shape, x.dtype))
    if how == "gamma":
        return x + 0.1 * jax.random.gamma(key, 1 + jnp.abs(x), dtype=x.dtype)
    if how == "permutation":
        first, second = jax.random.split(key)
        return jax.random.permutation(first, x, 2) + 0.1 * jax.random.normal(second, x.shape, x.dtype)
    if how == "uniform":
        return x * jax.random.uniform(key, x.shape, x.dtype)
    return jnp.where(jax.random.bernoulli(key, 0.7, x.shape if how == "dropout" else x.shape[:2] + (1,)), x / 0.7, 0)


@block(how=("ema", "counter kept"), couples=True, state=True)
def remembered(m: Any, x: jax.Array, how: str) -> jax.Array:
    """State that training keeps and does not read."""
    y = x @ m.param("kernel", (x.shape[-1],) * 2)
    if how == "ema":
        m.keep("mean", (x.shape[-1],), lambda old: 0.9 * old + 0.1 * lax.stop_gradient(y).mean((0, 1)))
    else:
        m.keep("largest", (), lambda old: jnp.maximum(old, lax.stop_gradient(y).max()))
    return y


@block(integer=True)
def integer_permutation(m: Any, x: jax.Array) -> jax.Array:
    """A frozen permutation among the parameters."""
    return jnp.take(x, m.integers("index", x.shape[-1]), axis=-1) @ m.param("kernel", (x.shape[-1],) * 2)
