"""Operations that a model may be made of, each by a small function of arrays: one row for each way in which a primitive
can be asked for. What the partitioner must do differs with groups, dilation, windows, batching dims and directions, so
each of those has rows of its own."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Operation:
    """`function` of arrays of these shapes: real numbers, or what `draws` has for a position: complex ones ("complex")
    or integers below a number."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]
    draws: tuple[tuple[int, Any], ...] = ()

    def operands(self) -> list[np.ndarray]:
        rng, kinds = np.random.default_rng(7), dict(self.draws)
        found = []
        for place, shape in enumerate(self.shapes):
            kind = kinds.get(place)
            if kind is None:
                found.append(rng.standard_normal(shape))
            elif kind == "complex":
                found.append(rng.standard_normal(shape) + 1j * rng.standard_normal(shape))
            else:
                found.append(rng.integers(0, kind, shape).astype(np.int32))
        return found


def op(name: str, function: Callable[..., Any], *shapes: Shape, **draws: Any) -> Operation:
    """A row; `x1=9` draws operand 1 as integers below 9, `x0="complex"` operand 0 as complex numbers."""
    return Operation(name, function, shapes, tuple((int(place[1:]), kind) for place, kind in draws.items()))


# -- convolutions -----------------------------------------------------------------------------------------------------
LAYOUTS = {
    1: (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW")),
    2: (("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")),
}


def conv(name: str, x: Shape, w: Shape, layout: int = 0, **params: Any) -> Operation:
    rank = len(x) - 2
    given = {"window_strides": (1,) * rank, "padding": "SAME"} | params
    return op(name, lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=LAYOUTS[rank][layout], **given), x, w)


CONVOLUTIONS = [
    conv("conv", (8, 6, 16), (3, 16, 24)),
    conv("conv channels first", (8, 16, 6), (24, 16, 3), 1),
    conv("conv 2d", (8, 5, 6, 8), (3, 2, 8, 16)),
    conv("conv strided", (8, 9, 16), (3, 16, 8), window_strides=(2,)),
    conv("conv dilated", (8, 9, 16), (3, 16, 8), rhs_dilation=(2,)),
    conv("conv of a dilated input", (8, 5, 16), (3, 16, 8), lhs_dilation=(2,), padding=[(2, 1)]),
    conv("conv causal", (8, 6, 16), (4, 16, 8), padding=[(3, 0)]),
    conv("conv cropped", (8, 9, 16), (3, 16, 8), padding=[(-1, -2)]),
    conv("conv patches", (8, 8, 8, 3), (4, 4, 3, 16), window_strides=(4, 4), padding="VALID"),
    conv("conv pointwise", (8, 6, 16), (1, 16, 8)),
    conv("conv depthwise", (8, 6, 16), (3, 1, 16), feature_group_count=16),
    conv("conv depthwise channels first", (8, 16, 6), (16, 1, 3), 1, feature_group_count=16),
    conv("conv depthwise causal", (8, 6, 16), (4, 1, 16), feature_group_count=16, padding=[(3, 0)]),
    conv("conv depthwise 2d", (8, 5, 6, 8), (3, 3, 1, 8), feature_group_count=8),
    conv("conv depthwise strided", (8, 9, 16), (3, 1, 16), feature_group_count=16, window_strides=(2,)),
    conv("conv depthwise dilated", (8, 9, 16), (3, 1, 16), feature_group_count=16, rhs_dilation=(2,)),
    conv("conv depthwise of a dilated input", (8, 5, 16), (3, 1, 16), feature_group_count=16, lhs_dilation=(2,),
         padding=[(1, 2)]),
    conv("conv depthwise multiplied", (8, 6, 8), (3, 1, 16), feature_group_count=8),
    conv("conv depthwise odd", (8, 6, 10), (3, 1, 10), feature_group_count=10),
    conv("conv grouped", (8, 6, 16), (3, 4, 24), feature_group_count=4),
    conv("conv grouped equal", (8, 6, 16), (3, 2, 16), feature_group_count=8),
    conv("conv grouped in two", (8, 6, 16), (3, 8, 8), feature_group_count=2),
    conv("conv grouped in three", (8, 6, 12), (3, 4, 24), feature_group_count=3),
    conv("conv grouped 2d strided", (8, 5, 6, 8), (3, 3, 2, 16), feature_group_count=4, window_strides=(2, 2)),
    conv("conv batch groups", (8, 6, 16), (3, 16, 8), batch_group_count=4),
    conv("conv batch groups all", (8, 6, 4), (3, 4, 8), batch_group_count=8),
    op("conv transpose", lambda x, w: lax.conv_transpose(x, w, (2,), "SAME"), (8, 6, 16), (3, 16, 8)),
    op("conv transpose 2d", lambda x, w: lax.conv_transpose(x, w, (2, 2), "VALID"), (8, 4, 3, 8), (3, 3, 8, 16)),
    op("conv of one kernel for each row",
       lambda x, w: jax.vmap(lambda a, b: lax.conv_general_dilated(
           a[None], b, (1,), "SAME", dimension_numbers=LAYOUTS[1][0])[0])(x, w), (8, 6, 4), (8, 3, 4, 8)),
    op("patches", lambda x: lax.conv_general_dilated_patches(
        x, (2, 2), (1, 1), "VALID", dimension_numbers=LAYOUTS[2][0]), (8, 5, 6, 4)),
    conv("conv complex", (8, 6, 16), (3, 16, 8)),
    conv("conv complex depthwise", (8, 6, 16), (3, 1, 16), feature_group_count=16),
]  # fmt: skip
CONVOLUTIONS[-2:] = [replace(each, draws=((0, "complex"), (1, "complex"))) for each in CONVOLUTIONS[-2:]]


# -- windows, orders, running sums ------------------------------------------------------------------------------------
def pool(kind: str, window: Shape, strides: Shape, padding: Any = "VALID", **more: Any) -> Callable[..., Any]:
    start = {"max": -np.inf, "min": np.inf, "sum": 0.0}[kind]
    computation = {"max": lax.max, "min": lax.min, "sum": lax.add}[kind]
    return lambda x: lax.reduce_window(x, x.dtype.type(start), computation, window, strides, padding, **more)


def both_orders(x: jax.Array, y: jax.Array) -> list[jax.Array]:
    return list(lax.sort((x, y), dimension=1, num_keys=1))


X3 = (8, 6, 16)
WINDOWS = [
    op("max pool", pool("max", (1, 2, 1), (1, 2, 1)), X3),
    op("max pool overlapping", pool("max", (1, 3, 1), (1, 2, 1), "SAME"), X3),
    op("max pool 2d", pool("max", (1, 2, 3, 1), (1, 2, 2, 1)), (8, 6, 7, 8)),
    op("min pool", pool("min", (1, 3, 1), (1, 1, 1), "SAME"), X3),
    op("average pool", pool("sum", (1, 2, 1), (1, 2, 1)), X3),
    op("average pool same", pool("sum", (1, 3, 1), (1, 1, 1), "SAME"), X3),
    op("sum of dilated windows", pool("sum", (1, 2, 1), (1, 1, 1), window_dilation=(1, 2, 1)), X3),
    op("sum of windows of a dilated input", pool("sum", (1, 2, 1), (1, 1, 1), base_dilation=(1, 2, 1)), X3),
    op("windows over rows", pool("sum", (2, 1, 1), (1, 1, 1), "SAME"), X3),
    op("windows over channels", pool("sum", (1, 1, 5), (1, 1, 1), "SAME"), X3),
    op("max over rows and channels", pool("max", (2, 1, 2), (2, 1, 2)), X3),
    op("select and scatter", jax.grad(lambda x: (pool("max", (1, 3, 1), (1, 2, 1))(x) ** 2).sum()), X3),
    op("reverse", lambda x: x[::-1] * x[:, ::-1], X3),
    op("reverse channels", lambda x: x[..., ::-1] * 2, X3),
    op("roll", lambda x: jnp.roll(x, 1, 0) + jnp.roll(x, 3, 2), X3),
    op("roll positions", lambda x: jnp.roll(x, -2, 1), X3),
    *(op(f"{name} {axis}", lambda x, f=f, axis=axis: f(x, axis), X3)
      for name, f in (("cumsum", lax.cumsum), ("cummax", lax.cummax), ("cummin", lax.cummin),
                      ("cumlogsumexp", lax.cumlogsumexp), ("cumprod", lax.cumprod)) for axis in (0, 1, 2)),
    op("cumsum reversed", lambda x: lax.cumsum(x, 1, reverse=True), X3),
    op("cumsum of rows reversed", lambda x: lax.cumsum(x, 0, reverse=True), X3),
    op("cumsum of complex numbers", lambda x: lax.cumsum(x, 0), X3, x0="complex"),
    *(op(f"sort {axis}", lambda x, axis=axis: jnp.sort(x, axis), X3) for axis in (0, 1, 2)),
    op("sort pairs", both_orders, (8, 16), (8, 16)),
    op("sort by two keys", lambda x, y: list(lax.sort((jnp.round(x), y), dimension=0, num_keys=2)), (8, 16), (8, 16)),
    *(op(f"argsort {axis}", lambda x, axis=axis: jnp.argsort(x, axis) * x, X3) for axis in (0, 2)),
    op("top_k", lambda x: lax.top_k(x, 3), X3),
    op("top_k of two dims", lambda x: lax.top_k(x, 4), (8, 16)),
    op("argmax rows", lambda x: jnp.argmax(x, 0) * x, X3),
    op("argmin channels", lambda x: jnp.argmin(x, 2)[..., None] * x, X3),
    op("max of rows", lambda x: x.max(0), X3),
    op("min of channels", lambda x: x.min(2), X3),
    op("product", lambda x: x.prod(2) + x.prod((0, 2)), X3),
    op("median", lambda x: jnp.median(x, 2), X3),
    op("quantile", lambda x: jnp.quantile(x, 0.3, axis=0), X3),
    op("any and all", lambda x: jnp.where((x > 0).any(2, keepdims=True) & (x > -2).all(0, keepdims=True), x, 0), X3),
    op("associative scan", lambda a, b: lax.associative_scan(
        lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (jnp.tanh(a), b), axis=1), X3, X3),
    op("associative scan of rows", lambda x: lax.associative_scan(jnp.add, x, axis=0), X3),
    op("associative scan complex", lambda a, b: lax.associative_scan(
        lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (a / (1 + abs(a)), b), axis=1)[1], X3, X3,
       x0="complex", x1="complex"),
]  # fmt: skip


# -- places ------------------------------------------------------------------------------------------------------------
PLACES = [
    op("rows of a table", lambda t, i: t[i], (16, 8), (8, 6), x1=16),
    op("take", lambda t, i: jnp.take(t, i, axis=1), (16, 8), (8, 6), x1=8),
    op("take fill", lambda t, i: t.at[i].get(mode="fill", fill_value=0.5), (16, 8), (8, 6), x1=20),
    op("take along channels", lambda x, i: jnp.take_along_axis(x, i, 2), X3, (8, 6, 4), x1=16),
    op("take along rows", lambda x, i: jnp.take_along_axis(x, i, 0), X3, (4, 6, 16), x1=8),
    op("take along positions", lambda x, i: jnp.take_along_axis(x, i[..., None], 1), X3, (8, 4), x1=6),
    op("pick one", lambda x, i: jnp.take_along_axis(x, i[..., None], 2)[..., 0], X3, (8, 6), x1=16),
    op("rows by row", lambda x, i: x[jnp.arange(8)[:, None], i], X3, (8, 3), x1=6),
    op("gather with batching dims", lambda x, i: jax.vmap(lambda a, k: a[k])(x, i), X3, (8, 3), x1=6),
    op("two indices", lambda x, i, j: x[i, :, j], X3, (5,), (5,), x1=8, x2=16),
    op("gather of windows", lambda x, i: jax.vmap(lambda k: lax.dynamic_slice_in_dim(x, k, 3, 1))(i), X3, (4,), x1=4),
    op("permuted rows", lambda x, i: x[i], X3, (8,), x1=8),
    op("scatter rows", lambda x, u, i: x.at[i].set(u), X3, (1, 6, 16), (1,), x2=8),
    op("scatter add", lambda x, u, i: x.at[i].add(u), X3, (5, 6, 16), (5,), x2=8),
    op("scatter add channels", lambda x, u, i: x.at[:, :, i].add(u), X3, (8, 6, 5), (5,), x2=16),
    op("scatter mul", lambda x, u, i: x.at[i].multiply(u, unique_indices=True), X3, (1, 6, 16), (1,), x2=8),
    op("scatter max", lambda x, u, i: x.at[i].max(u), X3, (5, 6, 16), (5,), x2=8),
    op("scatter min channels", lambda x, u, i: x.at[..., i].min(u), X3, (8, 6, 5), (5,), x2=16),
    op("scatter with batching dims", lambda x, u, i: jax.vmap(lambda a, b, k: a.at[k].add(b))(x, u, i),
       X3, (8, 3, 16), (8, 3), x2=6),
    op("segment sum", lambda x, i: jax.ops.segment_sum(x, i, 5), X3, (8,), x1=5),
    op("segment max", lambda x, i: jax.ops.segment_max(x, i, 3), X3, (8,), x1=3),
    op("one hot", lambda x, i: jax.nn.one_hot(i, 16) * x, X3, (8, 6), x1=16),
    op("dynamic slice", lambda x, i: lax.dynamic_slice_in_dim(x, i, 4, 0), X3, (), x1=4),
    op("dynamic slice channels", lambda x, i: lax.dynamic_slice_in_dim(x, i, 8, 2), X3, (), x1=8),
    op("dynamic update", lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 0), X3, (2, 6, 16), (), x2=6),
    op("dynamic update channels", lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i, 2),
       X3, (8, 6, 4), (), x2=12),
    op("slice rows", lambda x: x[2:7], X3),
    op("slice channels", lambda x: x[..., 3:11], X3),
    op("slice strided", lambda x: x[::2, 1::2, ::3], X3),
    op("halves multiplied", lambda x: x[..., :8] * x[..., 8:], X3),
    op("split", lambda x: lax.split(x, (5, 11), 2), X3),
    op("split rows", lambda x: jnp.split(x, 2), X3),
    op("split even", lambda x: [a * (k + 1) for k, a in enumerate(jnp.split(x, 4, 2))], X3),
    op("concatenate rows", lambda x, y: jnp.concatenate([x, y]), X3, (4, 6, 16)),
    op("concatenate channels", lambda x, y: jnp.concatenate([x, y, x], 2), X3, (8, 6, 5)),
    op("stack", lambda x, y: jnp.stack([x, y], 1), X3, X3),
    op("unstack", lambda x: [a * (k + 1) for k, a in enumerate(jnp.unstack(x, axis=2))], (8, 6, 4)),
    op("pad", lambda x: jnp.pad(x, ((0, 0), (1, 2), (3, 0))), X3),
    op("pad rows", lambda x: jnp.pad(x, ((2, 1), (0, 0), (0, 0)), constant_values=1.5), X3),
    op("pad negative", lambda x: lax.pad(x, x.dtype.type(0), ((-1, 2, 0), (0, 0, 0), (2, -3, 0))), X3),
    op("pad interior", lambda x: lax.pad(x, x.dtype.type(0.5), ((0, 0, 1), (1, 1, 2), (0, 0, 1))), X3),
    op("pad reflect", lambda x: jnp.pad(x, ((0, 0), (2, 2), (1, 1)), mode="reflect"), X3),
    op("reshape merges", lambda x: jnp.sin(x.reshape(48, 16)), X3),
    op("reshape splits channels", lambda x: jnp.sin(x.reshape(8, 6, 4, 4)).sum(2), X3),
    op("reshape mixes", lambda x: jnp.sin(x.reshape(6, 8, 16)), X3),
    op("flatten", lambda x: x.reshape(-1), X3),
    op("transpose", lambda x: x.transpose(2, 0, 1), X3),
    op("repeat", lambda x: jnp.repeat(x, 3, axis=2), X3),
    op("tile", lambda x: jnp.tile(x, (2, 1, 3)), X3),
    op("iota", lambda x: x * lax.broadcasted_iota(x.dtype, X3, 0) + lax.broadcasted_iota(x.dtype, X3, 2), X3),
    op("triangle", lambda x: jnp.tril(x) + jnp.triu(x, 3), X3),
    op("diagonal", lambda x: jnp.diagonal(x, axis1=0, axis2=2), X3),
    op("resize", lambda x: jax.image.resize(x, (8, 9, 16), "linear"), X3),
    op("resize nearest", lambda x: jax.image.resize(x, (8, 12, 16), "nearest"), X3),
    op("rounded", lambda x: lax.reduce_precision(x, 8, 7), X3),
    op("clamp", lambda x: jnp.clip(x, -0.5, 0.7), X3),
]  # fmt: skip


# -- transforms and matrices -------------------------------------------------------------------------------------------
def definite(x: jax.Array) -> jax.Array:
    return x @ x.mT + 3 * jnp.eye(x.shape[-1], dtype=x.dtype)


M3, M4 = (8, 6, 6), (8, 2, 4, 4)
MATRICES = [
    *(op(f"fft {axis}", lambda x, axis=axis: jnp.fft.fft(x, axis=axis), X3, x0="complex") for axis in (0, 1, 2)),
    op("ifft", lambda x: jnp.fft.ifft(x, axis=1), X3, x0="complex"),
    *(op(f"rfft {axis}", lambda x, axis=axis: jnp.fft.rfft(x, axis=axis), X3) for axis in (0, 1, 2)),
    *(op(f"irfft {axis}", lambda x, axis=axis: jnp.fft.irfft(x, axis=axis), X3, x0="complex") for axis in (0, 1, 2)),
    op("rfft2", lambda x: jnp.fft.rfft2(x, axes=(1, 2)), X3),
    op("fft2", lambda x: jnp.fft.fft2(x, axes=(1, 2)).real, X3),
    op("fftn", lambda x: jnp.fft.fftn(x), X3, x0="complex"),
    op("long convolution", lambda x, k: jnp.fft.irfft(
        jnp.fft.rfft(x, 12, axis=1) * jnp.fft.rfft(k, 12, axis=0), 12, axis=1), X3, (6, 16)),
    op("cholesky", lambda x: jnp.linalg.cholesky(definite(x)), M3),
    op("cholesky of one", lambda x: jnp.linalg.cholesky(definite(x)), (8, 8)),
    op("triangular solve", lambda a, b: lax.linalg.triangular_solve(
        jnp.tril(definite(a)), b, left_side=True, lower=True), M3, (8, 6, 16)),
    op("triangular solve right", lambda a, b: lax.linalg.triangular_solve(
        jnp.tril(definite(a)), b, left_side=False, lower=True, transpose_a=True), M3, (8, 16, 6)),
    op("triangular solve of one", lambda a, b: jax.scipy.linalg.solve_triangular(jnp.tril(definite(a)), b, lower=True),
       (8, 8), (8, 16)),
    op("solve", lambda a, b: jnp.linalg.solve(definite(a), b), M3, (8, 6, 16)),
    op("solve of one", lambda a, b: jnp.linalg.solve(definite(a), b), (8, 8), (8, 16)),
    op("lu", lambda x: lax.linalg.lu(definite(x))[0], M3),
    op("qr", lambda x: jnp.linalg.qr(definite(x)), M3),
    op("qr of one", lambda x: jnp.linalg.qr(definite(x))[1], (8, 8)),
    op("eigh", lambda x: jnp.linalg.eigvalsh(definite(x)), M3),
    op("eigh vectors", lambda x: abs(jnp.linalg.eigh(definite(x))[1]), M3),
    op("svd", lambda x: jnp.linalg.svd(definite(x), compute_uv=False), M4),
    op("svd vectors", lambda x: abs(jnp.linalg.svd(definite(x), full_matrices=False)[0]), M3),
    op("inverse", lambda x: jnp.linalg.inv(definite(x)), M4),
    op("determinant", lambda x: jnp.linalg.slogdet(definite(x))[1], M3),
    op("matrix exponential", lambda x: jax.scipy.linalg.expm(x / 9), (4, 4, 4)),
    op("matrix power", lambda x: jnp.linalg.matrix_power(x, 3), M3),
    op("tridiagonal", lambda d, e, b: lax.linalg.tridiagonal_solve(
        e.at[..., 0].set(0), d + 8, (e[..., ::-1]).at[..., -1].set(0), b), (8, 6), (8, 6), (8, 6, 4)),
    op("product of all", lambda x, y: jnp.einsum("bij,bjk->ki", x, y), M3, M3),
    op("batched product", lambda x, y: jnp.einsum("bij,bjk->bik", x, y), M3, (8, 6, 16)),
    op("outer product", lambda x, y: jnp.einsum("bi,bj->bij", x, y), (8, 6), (8, 16)),
    op("transposed product", lambda x, y: jnp.einsum("bsi,bsj->ij", x, y), X3, (8, 6, 4)),
    op("complex product", lambda x, w: x @ w, X3, (16, 8), x0="complex", x1="complex"),
    op("ragged product", lambda x, w: lax.ragged_dot(x, w, jnp.array([3, 5], jnp.int32)), (8, 16), (2, 16, 24)),
    op("product with sums of squares", lambda x, w: (x @ w) / jnp.linalg.norm(w, axis=0), X3, (16, 8)),
    op("softmax", lambda x: jax.nn.softmax(x, 2) + jax.nn.softmax(x, 1), X3),
    op("logsumexp", lambda x: jax.nn.logsumexp(x, 0), X3),
    op("norm", lambda x: (x - x.mean(2, keepdims=True)) / jnp.sqrt(x.var(2, keepdims=True) + 1e-3), X3),
    op("loop", lambda x: lax.scan(lambda c, a: (jnp.tanh(c + a), c * a), x[:, 0], x.transpose(1, 0, 2)), X3),
    op("loop over rows", lambda x: lax.scan(lambda c, a: (jnp.tanh(c + a), c * a), x[0], x), X3),
    op("loop with a product", lambda x, w: lax.scan(
        lambda c, a: (jnp.tanh(c @ w + a), c), x[:, 0], x.transpose(1, 0, 2)), X3, (16, 16)),
    op("conditional", lambda x, w: lax.cond(x.sum() > 0, lambda: x @ w, lambda: x @ w.T), X3, (16, 16)),
    op("loop of depthwise convs", lambda x, w: lax.scan(lambda c, k: (jnp.tanh(lax.conv_general_dilated(
        c, k, (1,), "SAME", dimension_numbers=LAYOUTS[1][0], feature_group_count=16)), None), x, w)[0],
       X3, (2, 3, 1, 16)),
    op("conditional depthwise conv", lambda x, w: lax.cond(x.sum() > 99, lambda: x, lambda: lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=LAYOUTS[1][0], feature_group_count=16)), X3, (3, 1, 16)),
    op("map over rows", lambda x, w: lax.map(lambda a: jnp.tanh(a @ w), x), X3, (16, 8)),
    op("random by key", lambda x: x * jax.random.uniform(jax.random.key(3), X3, x.dtype), X3),
]  # fmt: skip

OPERATIONS = [*CONVOLUTIONS, *WINDOWS, *PLACES, *MATRICES]
