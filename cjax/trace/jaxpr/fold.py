"""Scalar arithmetic on literals, evaluated on the host to the bits that the device would give."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from cjax.jax_compat.jaxprs import new_literal

Atom = Any  # Var or Literal; JAX declares their avals without shape and dtype


def _truncated_division(x: Any, y: Any) -> Any:
    if not np.issubdtype(x.dtype, np.integer):
        return np.divide(x, y)
    if y == 0:
        return None
    quotient = abs(int(x)) // abs(int(y))  # towards zero, where Python rounds down
    return np.asarray(quotient if (x < 0) == (y < 0) else -quotient).astype(x.dtype)


def _remainder(x: Any, y: Any) -> Any:
    return None if np.issubdtype(x.dtype, np.integer) and y == 0 else np.fmod(x, y)


def _square_root(x: Any) -> Any:
    return np.sqrt(x) if np.issubdtype(x.dtype, np.floating) else None


def _same(x: Any) -> Any:
    return x


# Only what IEEE 754 or integer arithmetic defines to the last bit: exp, erf and their kin differ between libraries.
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _truncated_division,
    "rem": _remainder,
    "neg": np.negative,
    "max": np.maximum,
    "min": np.minimum,
    "abs": np.abs,
    "sign": np.sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "sqrt": _square_root,
    "square": np.square,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "is_finite": np.isfinite,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "select_n": lambda which, *cases: cases[int(which)],
    "stop_gradient": _same,
    "copy": _same,
    "copy_p": _same,
    "broadcast_in_dim": _same,
    "reshape": _same,
    "squeeze": _same,
    "convert_element_type": _same,
}
_EXACT_DTYPES = frozenset(np.dtype(kind) for kind in ("float32", "float64", "bool")) | frozenset(
    np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)


def literal(value: Any, aval: Any) -> Literal | None:
    """The literal for a concrete scalar, or None for arrays, tracers and scalars that no literal can stand for."""
    if getattr(aval, "shape", None) != () or aval.dtype not in _EXACT_DTYPES or isinstance(value, jax.core.Tracer):
        return None
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return None
    scalar = np.asarray(value)[()]
    if not aval.weak_type:
        return new_literal(aval.dtype.type(scalar), aval)
    # A weak type survives only as a Python scalar, which has JAX's default width.
    kind = {"i": int, "f": float}.get(aval.dtype.kind)
    return None if kind is None or jnp.result_type(kind) != aval.dtype else new_literal(kind(scalar), aval)


def fold(eqn: JaxprEqn, invars: Sequence[Atom]) -> Literal | None:
    """The literal that a scalar equation on literals computes, or None where it has to stay an equation."""
    for atom in invars:
        if type(atom) is not Literal:
            return None
    name = eqn.primitive.name
    if name not in _ARITHMETIC or not invars:
        return None
    aval: Any = eqn.outvars[0].aval
    if aval.shape != () or any(a.aval.shape != () or a.aval.dtype not in _EXACT_DTYPES for a in invars):
        return None
    operands = [np.asarray(atom.val, dtype=atom.aval.dtype)[()] for atom in invars]
    if name == "convert_element_type" and not _converts_exactly(operands[0], aval.dtype):
        return None
    value = _ARITHMETIC[name](*operands)
    if value is None or any(map(_is_subnormal, [*operands, value])):
        return None
    return literal(value, aval)


def _is_subnormal(value: Any) -> bool:
    """Devices flush these to zero, or don't."""
    return value.dtype.kind == "f" and bool(0 < abs(value) < np.finfo(value.dtype).tiny)


def _converts_exactly(value: Any, dtype: np.dtype) -> bool:
    """Out of range, a float becomes an integer differently on each device."""
    if value.dtype.kind != "f" or dtype.kind not in "iu":
        return True
    limits = np.iinfo(dtype)
    return bool(np.isfinite(value)) and limits.min <= float(value) <= limits.max
