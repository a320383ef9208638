"""Values that are given for parameters: whether numbers can be made of them, and whether they are ones."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.mesh import compiler_options


def loses(given: Any, needed: Any) -> bool:
    """Whether values of one dtype can't be had in another: complex ones as real, fractions as integers, texts as
    numbers. Precision alone may be lost."""
    return _rank(given) > max(_rank(needed), 1)


def _rank(dtype: Any) -> int:
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    return next((rank for rank, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), len(kinds))


def not_finite(arrays: Mapping[str, jax.Array], mesh: Mesh) -> list[str]:
    """What is wrong with arrays that hold NaN or infinity, by name. Each is looked at where it is, all at once."""
    floats = {name: array for name, array in arrays.items() if jnp.issubdtype(array.dtype, jnp.inexact)}
    if not floats:
        return []

    def count(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
        return [(jnp.isnan(array).sum(), jnp.isinf(array).sum()) for array in arrays]

    whole = NamedSharding(mesh, PartitionSpec())
    counts = jax.jit(count, out_shardings=whole, compiler_options=compiler_options(mesh))(list(floats.values()))
    problems = []
    for (name, array), found in zip(floats.items(), jax.device_get(counts), strict=True):
        kinds = zip(found, ("NaN", "infinite"), strict=True)
        told = [f"{int(num):,} of {array.size:,} are {kind}" for num, kind in kinds if num]
        if told:
            problems.append(f"{name}: {' and '.join(told)} (as {array.dtype})")
    return problems
