"""Which part of its operands a part of a result is made of: equations that work on each layer by itself.

A part is one of `num` equal blocks along a dim.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import Equation, Params
from cjax.jax_compat.random import is_threefry
from cjax.trace.dims.refine_rules import shape_of
from cjax.trace.jaxpr.along import along
from cjax.trace.jaxpr.primitives import facts_of, goes_by_element, name_of, named

Operands = tuple[int | None, ...]


def operand_dims(eqn: Equation, dim: int, num: int) -> Operands | None:
    """For each operand the dim along which a part of it is needed for the same part of the results along `dim`, or None
    where all of it is; None for all together where parts of results can't be made of parts.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: x.sum(1))(jnp.ones((2, 3))).jaxpr
    >>> operand_dims(jaxpr.eqns[0], 0, 2)
    (0,)
    """
    for var in eqn.outvars:
        shape = getattr(var.aval, "shape", ())
        if len(shape) <= dim or shape[dim] % num:
            return None
    if eqn.effects:
        return None
    name, facts = name_of(eqn), facts_of(eqn)
    if goes_by_element(eqn) or facts.reduces or facts.cumulates or name in _BY_PLACE:
        places = along(eqn, dim)
        return None if places is None else tuple(places)
    rule = _RULES.get(name, _batch if facts.matrices else None)
    return None if rule is None else rule(eqn, dim, num)


def params_of_part(eqn: Equation, dim: int, num: int) -> Params:
    """The parameters of an equation that makes one part."""
    name = _SIZES.get(name_of(eqn))
    if name is None:
        return eqn.params
    sizes = tuple(n // num if i == dim else n for i, n in enumerate(eqn.params[name]))
    return {**eqn.params, name: sizes}


_SIZES = {
    "broadcast_in_dim": "shape", "reshape": "new_sizes", "iota": "shape", "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}  # fmt: skip


def _first(eqn: Equation, dim: int | None) -> Operands:
    return (dim, *(None for _ in eqn.invars[1:]))


def _reshape(eqn: Equation, dim: int, num: int) -> Operands | None:
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params["dimensions"] is not None:
        return None
    for own, size in enumerate(before):
        if size % num == 0 and math.prod(before[:own]) == math.prod(after[:dim]):
            return _first(eqn, own)
    return None


def _batch(eqn: Equation, dim: int, num: int) -> Operands | None:
    same = {shape_of(v)[:1] for v in (*eqn.invars, *eqn.outvars)}
    ok = dim == 0 and len(same) == 1 and all(len(shape_of(v)) > 2 for v in eqn.invars)
    return tuple(0 for _ in eqn.invars) if ok else None


def _sort(eqn: Equation, dim: int, num: int) -> Operands | None:
    return None if eqn.params["dimension"] == dim else tuple(dim for _ in eqn.invars)


def _drawn(eqn: Equation, dim: int, num: int) -> Operands | None:
    """Random numbers of many keys: those of each key, where they are drawn key by key."""
    key = eqn.invars[0].aval
    is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return _first(eqn, dim) if is_key and dim < len(key.shape) and is_threefry(key.dtype) else None


def _keys(eqn: Equation, dim: int, num: int) -> Operands | None:
    rank = min(len(shape_of(v)) for v in (eqn.invars[0], eqn.outvars[0]))
    return _first(eqn, dim) if dim < rank else None


# Of parts, which come in order and as whole blocks, more is known than of single places.
_RULES: dict[str, Callable[[Equation, int, int], Operands | None]] = {
    "reshape": _reshape,
    "sort": _sort,
    "iota": lambda eqn, dim, num: None if eqn.params["dimension"] == dim else (None,) * len(eqn.invars),
    "random_bits": _drawn,
    "random_split": _drawn,
    "random_wrap": _keys,
    "random_unwrap": _keys,
}
# What is the same for parts as for single places. Of all others that `along` knows, `params_of_part` would have to know
# how a part is made.
_BY_PLACE = named("broadcast_in_dim squeeze transpose rev concatenate pad dot_general slice dynamic_slice")
