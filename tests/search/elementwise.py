"""Functions of one and of two numbers, by what they may be given: each with the primitive of JAX that it is for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Unary = Callable[[jax.Array], jax.Array]

# What brings any number into a function's domain, smoothly and far from its ends.
DOMAINS: dict[str, Unary] = {
    "all": lambda x: 1.3 * jnp.tanh(x),
    "positive": lambda x: 0.4 + jax.nn.softplus(jnp.clip(x, -5, 5)),
    "unit": lambda x: 0.8 * jnp.tanh(x),
    "above one": lambda x: 1.5 + jax.nn.softplus(jnp.clip(x, -5, 5)),
}

UNARY: dict[str, tuple[str, Unary]] = {
    **{
        name: ("all", getattr(lax, name))
        for name in (
            "abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh erf erfc exp exp2 expm1 floor logistic neg round "
            "sign sin sinh square tan tanh"
        ).split()
    },
    **{name: ("positive", getattr(lax, name)) for name in "digamma lgamma log log1p rsqrt sqrt reciprocal".split()},
    **{name: ("unit", getattr(lax, name)) for name in "acos asin atanh erf_inv".split()},
    "acosh": ("above one", lax.acosh),
    "integer_pow": ("all", lambda x: x**3),
    "integer_pow negative": ("positive", lambda x: x**-2),
    "relu": ("all", jax.nn.relu),
    "relu6": ("all", jax.nn.relu6),
    "gelu": ("all", jax.nn.gelu),
    "silu": ("all", jax.nn.silu),
    "elu": ("all", jax.nn.elu),
    "softplus": ("all", jax.nn.softplus),
    "leaky_relu": ("all", jax.nn.leaky_relu),
    "sinc": ("all", jnp.sinc),
    "clamp": ("all", lambda x: lax.clamp(-0.7, x, 0.9)),
    "stop_gradient": ("all", lambda x: x * lax.stop_gradient(x)),
    "convert": ("all", lambda x: x * (x > 0).astype(x.dtype) + x.astype(jnp.int32).astype(x.dtype)),
    "isfinite": ("all", lambda x: jnp.where(jnp.isfinite(x), x, 0.0)),
    "is_negative": ("all", lambda x: jnp.where(x < 0, 0.3 * x, x)),
    "nan_to_num": ("all", jnp.nan_to_num),
    "frexp": ("positive", lambda x: jnp.ldexp(x, 1) * 0.5),
    "copy": ("all", lambda x: jnp.copy(x) * 1.1),
    "reduce_precision": ("all", lambda x: lax.reduce_precision(x, 11, 40)),
    "barrier": ("all", lambda x: lax.optimization_barrier(x) * 0.9),
}


def counted(x: jax.Array) -> jax.Array:
    """Whole numbers that rounding does not change."""
    return lax.stop_gradient(jnp.floor(4 * x)).astype(jnp.uint32)


def mixed_bits(x: jax.Array, y: jax.Array) -> jax.Array:
    return ((y ^ 5) << 1 & 6) | lax.shift_right_arithmetic(x & 7, jnp.uint32(1))


BINARY: dict[str, tuple[str, Callable[[jax.Array, jax.Array], jax.Array]]] = {
    **{name: ("all", getattr(lax, name)) for name in "add sub mul max min atan2".split()},
    **{name: ("positive", getattr(lax, name)) for name in "div pow rem".split()},
    "igamma": ("positive", lambda a, x: lax.igamma(lax.stop_gradient(a), x)),
    "igammac": ("positive", lambda a, x: lax.igammac(lax.stop_gradient(a), x)),
    "polygamma": ("positive", lambda m, x: lax.polygamma(jnp.ones_like(m), x)),
    "betainc": ("positive", lambda a, x: lax.betainc(*map(lax.stop_gradient, (a, a + 1)), x / (1 + x))),
    "logaddexp": ("all", jnp.logaddexp),
    "hypot": ("positive", jnp.hypot),
    "select": ("all", lambda x, y: lax.select(x > y, x, 0.5 * y)),
    "select_n": ("all", lambda x, y: lax.select_n((x > 0).astype(jnp.int32) + (y > 0), x, y, x * y)),
    "where mask": ("all", lambda x, y: jnp.where((x > 0) & ~(y > 0) | (x < -0.5), x, y)),
    "xlogy": ("positive", jax.scipy.special.xlogy),
    "complex": ("all", lambda x, y: jnp.real(lax.complex(x, y) * lax.conj(lax.complex(y, x))) + abs(x + 1j * y)),
    "nextafter": ("all", lambda x, y: x + lax.nextafter(*map(lax.stop_gradient, (x, y)))),
    "xor": ("all", lambda x, y: x + mixed_bits(counted(x), counted(y)).astype(x.dtype)),
    "bits": ("all", lambda x, y: x * (lax.bitcast_convert_type(counted(y), jnp.int32) & 1).astype(x.dtype) + y),
    "lerp": ("all", lambda x, y: lax.fma(x, y, y) if hasattr(lax, "fma") else x * y + y),
}


def apply_unary(name: str, x: jax.Array) -> jax.Array:
    domain, fn = UNARY[name]
    return fn(DOMAINS[domain](x))


def apply_binary(name: str, x: jax.Array, y: jax.Array) -> jax.Array:
    domain, fn = BINARY[name]
    return fn(DOMAINS[domain](x), DOMAINS[domain](y))


REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": jnp.sum,
    "mean": jnp.mean,
    "max": jnp.max,
    "min": jnp.min,
    "prod": lambda x, axis, keepdims: jnp.prod(1 + 0.3 * jnp.tanh(x), axis, keepdims=keepdims),
    "var": jnp.var,
    "logsumexp": lambda x, axis, keepdims: jax.nn.logsumexp(x, axis, keepdims=keepdims),
    "argmax": lambda x, axis, keepdims: jnp.argmax(x, axis, keepdims=keepdims).astype(x.dtype) * 0.1,
    "argmin": lambda x, axis, keepdims: jnp.argmin(x, axis, keepdims=keepdims).astype(x.dtype) * 0.1,
    "any": lambda x, axis, keepdims: jnp.any(x > 0.8, axis, keepdims=keepdims).astype(x.dtype),
    "all": lambda x, axis, keepdims: jnp.all(x > -0.8, axis, keepdims=keepdims).astype(x.dtype),
    "norm": lambda x, axis, keepdims: jnp.sqrt(jnp.sum(x * x, axis, keepdims=keepdims) + 1e-3),
    "custom": lambda x, axis, keepdims: jnp.expand_dims(
        lax.reduce(x, x.dtype.type(0), lambda a, b: a + b, (axis % x.ndim,)), axis
    ),
}

CUMULATIVE: dict[str, Callable[..., jax.Array]] = {
    "cumsum": lax.cumsum,
    "cumprod": lambda x, axis, reverse: lax.cumprod(1 + 0.3 * jnp.tanh(x), axis, reverse),
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp,
}
