"""Scalar arithmetic on literals, evaluated on the host to the bits that the device would give."""

from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, Aval, Equation, Literal
from cjax.jax_compat.jaxprs import new_literal
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named

Scalar = np.number | np.bool_  # what NumPy makes of an array without dims


def _divides(x: Scalar, y: Scalar) -> bool:
    """Not by an integer zero, of which each device makes something else."""
    return not np.issubdtype(x.dtype, np.integer) or y != 0


# What a scalar has to be for the vocabulary's NumPy function to be right: other numbers stay with the device.
_DEFINED: dict[str, Callable[..., bool]] = {
    "div": _divides,
    "rem": _divides,
    "sqrt": lambda x: np.issubdtype(x.dtype, np.floating),
}
_KEEPS_SCALARS = having("view") - named("name")
_EXACT_DTYPES = frozenset(np.dtype(kind) for kind in ("float32", "float64", "bool")) | frozenset(
    np.dtype(f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
)


def literal(value: ArrayLike, aval: Aval) -> Literal | None:
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


def fold(eqn: Equation, invars: Sequence[Atom]) -> Literal | None:
    """The literal that a scalar equation on literals computes, or None where it has to stay an equation."""
    literals = [atom for atom in invars if type(atom) is Literal]
    if len(literals) != len(invars):
        return None
    name, arithmetic = name_of(eqn), facts_of(eqn).numpy
    if not invars or (arithmetic is None and name not in _KEEPS_SCALARS):
        return None
    aval = eqn.outvars[0].aval
    if aval.shape != () or any(a.aval.shape != () or a.aval.dtype not in _EXACT_DTYPES for a in literals):
        return None
    operands = [_scalar(atom.val, atom.aval.dtype) for atom in literals]
    if name == "convert_element_type" and not _converts_exactly(operands[0], aval.dtype):
        return None
    if name in _DEFINED and not _DEFINED[name](*operands):
        return None
    value = operands[0] if arithmetic is None else _scalar(arithmetic(*operands))
    if any(map(_is_subnormal, [*operands, value])):
        return None
    return literal(value, aval)


def _scalar(value: ArrayLike, dtype: np.dtype | None = None) -> Scalar:
    return cast(Scalar, np.asarray(value, dtype)[()])


def _is_subnormal(value: Scalar) -> bool:
    """Devices flush these to zero, or don't."""
    return value.dtype.kind == "f" and bool(0 < np.abs(value) < np.finfo(value.dtype.name).tiny)


def _converts_exactly(value: Scalar, dtype: np.dtype) -> bool:
    """Out of range, a float becomes an integer differently on each device."""
    if value.dtype.kind != "f" or dtype.kind not in "iu":
        return True
    limits = np.iinfo(dtype)
    return bool(np.isfinite(value)) and limits.min <= float(value) <= limits.max
