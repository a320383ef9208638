"""Which part of its operands a part of a result is made of: equations that work on each layer by itself.

A part is one of `num` equal blocks along a dim.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import Equation, Params
from cjax.jax_compat.random import is_threefry
from cjax.trace.dims.refine_rules import shape_of
from cjax.trace.jaxpr.primitives import facts_of, goes_by_element, name_of

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
    if goes_by_element(eqn):
        size = shape_of(eqn.outvars[0])[dim]  # an operand may have 1 there, which stands for all
        return tuple(dim if shape_of(atom) and shape_of(atom)[dim] == size else None for atom in eqn.invars)
    rule = _RULES.get(name_of(eqn))
    if rule is None:
        facts = facts_of(eqn)
        rule = _reduced if facts.reduces else _along if facts.cumulates else _batch if facts.matrices else None
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


def _kept(rank: int, gone: Sequence[int], dim: int) -> int:
    return [i for i in range(rank) if i not in gone][dim]


def _broadcast(eqn: Equation, dim: int, num: int) -> Operands | None:
    places, shape = eqn.params["broadcast_dimensions"], shape_of(eqn.invars[0])
    own = places.index(dim) if dim in places else None
    return _first(eqn, own if own is not None and shape[own] == shape_of(eqn.outvars[0])[dim] else None)


def _reshape(eqn: Equation, dim: int, num: int) -> Operands | None:
    before, after = shape_of(eqn.invars[0]), shape_of(eqn.outvars[0])
    if eqn.params["dimensions"] is not None:
        return None
    for own, size in enumerate(before):
        if size % num == 0 and math.prod(before[:own]) == math.prod(after[:dim]):
            return _first(eqn, own)
    return None


def _reduced(eqn: Equation, dim: int, num: int) -> Operands | None:
    return _first(eqn, _kept(len(shape_of(eqn.invars[0])), eqn.params["axes"], dim))


def _along(eqn: Equation, dim: int, num: int) -> Operands | None:
    return None if eqn.params["axis"] == dim else _first(eqn, dim)


def _batch(eqn: Equation, dim: int, num: int) -> Operands | None:
    same = {shape_of(v)[:1] for v in (*eqn.invars, *eqn.outvars)}
    ok = dim == 0 and len(same) == 1 and all(len(shape_of(v)) > 2 for v in eqn.invars)
    return tuple(0 for _ in eqn.invars) if ok else None


def _sort(eqn: Equation, dim: int, num: int) -> Operands | None:
    return None if eqn.params["dimension"] == dim else tuple(dim for _ in eqn.invars)


def _dot_general(eqn: Equation, dim: int, num: int) -> Operands | None:
    (lhs_sum, rhs_sum), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    if dim < len(lhs_batch):
        return lhs_batch[dim], rhs_batch[dim]
    lhs, rhs = (len(shape_of(v)) for v in eqn.invars)
    free = [i for i in range(lhs) if i not in (*lhs_sum, *lhs_batch)]
    dim -= len(lhs_batch)
    if dim < len(free):
        return free[dim], None
    return None, _kept(rhs, (*rhs_sum, *rhs_batch), dim - len(free))


def _slice(eqn: Equation, dim: int, num: int) -> Operands | None:
    strides = eqn.params["strides"] or (1,) * len(shape_of(eqn.invars[0]))
    is_all = eqn.params["limit_indices"][dim] == shape_of(eqn.invars[0])[dim] and strides[dim] == 1
    return _first(eqn, dim) if is_all and eqn.params["start_indices"][dim] == 0 else None


def _dynamic_slice(eqn: Equation, dim: int, num: int) -> Operands | None:
    return _first(eqn, dim) if eqn.params["slice_sizes"][dim] == shape_of(eqn.invars[0])[dim] else None


def _drawn(eqn: Equation, dim: int, num: int) -> Operands | None:
    """Random numbers of many keys: those of each key, where they are drawn key by key."""
    key = eqn.invars[0].aval
    is_key = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return _first(eqn, dim) if is_key and dim < len(key.shape) and is_threefry(key.dtype) else None


def _keys(eqn: Equation, dim: int, num: int) -> Operands | None:
    rank = min(len(shape_of(v)) for v in (eqn.invars[0], eqn.outvars[0]))
    return _first(eqn, dim) if dim < rank else None


_RULES: dict[str, Callable[[Equation, int, int], Operands | None]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": lambda eqn, dim, num: (_kept(len(shape_of(eqn.invars[0])), eqn.params["dimensions"], dim),),
    "transpose": lambda eqn, dim, num: (eqn.params["permutation"][dim],),
    "sort": _sort,
    "rev": lambda eqn, dim, num: None if dim in eqn.params["dimensions"] else (dim,),
    "concatenate": lambda eqn, dim, num: None if eqn.params["dimension"] == dim else tuple(dim for _ in eqn.invars),
    "pad": lambda eqn, dim, num: (dim, None) if eqn.params["padding_config"][dim] == (0, 0, 0) else None,
    "iota": lambda eqn, dim, num: None if eqn.params["dimension"] == dim else (None,) * len(eqn.invars),
    "dot_general": _dot_general,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "random_bits": _drawn,
    "random_split": _drawn,
    "random_wrap": _keys,
    "random_unwrap": _keys,
}
