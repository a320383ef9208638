"""Weights that hold several tensors side by side: one matmul for queries, keys and values, or for gate and value.

The author cuts the result in equal parts: by a split, by slices, or by a reshape to [.., parts, rest] and indexing. A
mesh axis that split the merged dim in blocks would put queries on one device and keys on another; so such weights are
traced with the dim taken apart (`cjax.trace.dims.refine`), and what a part holds is split like any other dim.
"""

from collections.abc import Mapping

from cjax.trace.dims.classes import Dims, Matmul
from cjax.trace.dims.refine_rules import Form

Key = tuple[int, int]  # class and size of a dim


def packed_forms(dims: Dims, num_weights: int) -> dict[int, Form]:
    """The weights that pack several tensors: input -> the number of parts that each of its dims is made of.

    Args:
      dims: of a flat trace.
      num_weights: how many of its leading inputs are weights.

    >>> import jax, jax.numpy as jnp
    >>> from cjax.trace.dims.find import find_dims
    >>> def gated(w, x):
    ...     gate, value = jnp.split(x @ w, 2, axis=-1)
    ...     return jnp.tanh(gate) * value
    >>> packed_forms(find_dims(jax.make_jaxpr(gated)(jnp.ones((3, 8)), jnp.ones((5, 3))), 1), 1)
    {0: (1, 2)}
    """
    parts = _candidates(dims)
    if not parts:
        return {}
    products = (*dims.matmuls, *dims.grouped)
    made = {key for m in products if (key := _made_by_weight(dims, m)) is not None}
    parts = {key: num for key, num in parts.items() if key in made}
    for m in products:
        for d in m.contracted:  # read whole somewhere: its parts are no tensors of their own
            parts.pop(_key(dims, d), None)
    forms = {}
    for leaf, ids in enumerate(dims.inputs[:num_weights]):
        form = tuple(parts.get(_key(dims, d), 1) for d in ids)
        if max(form, default=1) > 1:
            forms[leaf] = form
    return forms


def _key(dims: Dims, dim: int) -> Key:
    return dims.class_of(dim), dims.size[dim]


def _candidates(dims: Dims) -> Mapping[Key, int]:
    """Dims that are cut in equal parts, everywhere the same."""
    found: dict[Key, set[int]] = {}
    # Rotary embeddings cut a head in halves too, but put them together again: what is joined can't be split.
    joined = {_key(dims, d) for d in dims.joined}
    indexed = set()
    for cut in dims.cuts:
        if cut.parts == dims.size[cut.whole]:
            indexed.add(_key(dims, cut.whole))  # cut in single entries: after a reshape, these are the parts
            continue
        spoilt = _key(dims, cut.part) in joined
        found.setdefault(_key(dims, cut.whole), set()).add(0 if spoilt else cut.parts)
    for s in dims.splits:
        if _key(dims, s.major) in indexed:
            spoilt = _key(dims, s.minor[0]) in joined
            found.setdefault(_key(dims, s.whole), set()).add(0 if spoilt else s.major_size)
    return {key: min(nums) for key, nums in found.items() if len(nums) == 1 and 0 not in nums}


def _made_by_weight(dims: Dims, m: Matmul) -> Key | None:
    """The dim that a matmul with a weight makes, if it makes one alone: where there are more (heads and head_dim), one
    of the others can be split."""
    if (m.lhs_origin is None) == (m.rhs_origin is None):
        return None
    leaf, weight = (m.lhs_origin, m.lhs) if m.rhs_origin is None else (m.rhs_origin, m.rhs)
    assert leaf is not None
    known = {dims.class_of(d) for d in (*weight, *dims.layers)}
    if any(dims.class_of(d) not in known for d in dims.inputs[leaf]):
        return None  # a convolution's window: no matmul of the kind that can be refined
    gone = {dims.class_of(d) for d in (*m.contracted, *m.batched)}
    free = [d for d in weight if dims.class_of(d) not in gone and dims.size[d] > 1]
    return _key(dims, free[0]) if len(free) == 1 else None
