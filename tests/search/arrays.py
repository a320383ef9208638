"""Blocks of operations on whole arrays: lookups, sorting, Fourier, linear algebra, moving, number by number."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from search.elementwise import BINARY, CUMULATIVE, REDUCTIONS, UNARY, apply_binary, apply_unary
from search.registry import AXES, YES_NO, act, block, index_of


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
