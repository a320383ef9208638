"""Blocks that layers of known models are: products, attention, convolutions, norms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from search.registry import SIZES, YES_NO, act, block


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


@block(hidden=SIZES, bias=YES_NO, order=("first", "between", "last"))
def branches(m: Any, x: jax.Array, hidden: int, bias: bool, order: str) -> jax.Array:
    """Two branches of one input, added to it and to their biases, in several orders."""
    width = x.shape[-1]
    one, two = (act(x @ m.param(f"up_{n}", (width, hidden))) @ m.param(f"down_{n}", (hidden, width)) for n in "ab")
    if bias:
        one, two = one + m.param("bias_a", (width,)), m.param("bias_b", (width,)) + two
    return {"first": lambda: x + one + two, "between": lambda: one + (x + two), "last": lambda: one + two + x}[order]()


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


@block(heads=(1, 2, 3, 4, 6), size=(1, 2, 3), order=("qkv", "heads"), packs=True)
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
