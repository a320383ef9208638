"""Equations computed apart give what they give at once, for those of random programs, however operands are split."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P
from row_programs import equations

from cjax.jax_compat.core import Equation
from cjax.sharding.apart.apart import Shards, apart
from cjax.sharding.apart.lanes import lanes
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.emit.emit import bind

SIZES = ({"a": 2, "b": 2}, {"a": 3, "b": 2}, {"a": 2, "b": 4})


def drawn(pick: random.Random, shape: Sequence[int], sizes: Mapping[str, int]) -> P:
    """A placement that a layout may have: each axis on at most one dim, which it divides."""
    entries: list[tuple[str, ...]] = [() for _ in shape]
    for axis in sizes:
        if shape and pick.random() < 0.8:
            dim = pick.randrange(len(shape))
            entries[dim] = (*entries[dim], axis)
    fits = [n % math.prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, entries, strict=True)]
    return P(*(axes if axes and fit else None for axes, fit in zip(entries, fits, strict=True)))


def place_of(spec: P, shape: Sequence[int], at: Mapping[str, int], sizes: Mapping[str, int]) -> tuple[slice, ...]:
    """Which part of an array a device has."""
    found = []
    for n, entry in zip(shape, (*spec, *[None] * len(shape)), strict=False):
        start = 0
        for axis in axes_of_entry(entry):
            n //= sizes[axis]
            start += at[axis] * n
        found.append(slice(start, start + n))
    return tuple(found)


def evaluated(eqn: Equation, ins: Sequence[jax.Array], parts: Shards, sizes: Mapping[str, int]) -> list[np.ndarray]:
    """What all devices make of their parts, put together."""
    found = [np.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    for at in (dict(zip(sizes, each, strict=True)) for each in itertools.product(*map(range, sizes.values()))):
        own = [x[place_of(spec, x.shape, at, sizes)] for x, spec in zip(ins, parts.ins, strict=True)]
        for y, whole, spec in zip(bind(eqn, own, parts.params), found, parts.outs, strict=True):
            split = {a for entry in spec for a in axes_of_entry(entry)} | set(parts.sums)
            if any(at[axis] for axis in sizes if axis not in split):
                continue  # the same as another device's
            place = place_of(spec, whole.shape, at, sizes)
            whole[place] = whole[place] + np.asarray(y) if parts.sums else np.asarray(y)
    return found


@pytest.mark.full
@settings(max_examples=settings().max_examples // 3)
@given(st.integers(0, 10**6))
def test_what_is_computed_apart_is_the_same(seed: int) -> None:
    pick = random.Random(seed)
    with jax.enable_x64(True):
        for eqn, ins, outs in equations(seed):
            if not lanes(eqn):
                continue
            sizes = pick.choice(SIZES)
            specs = [[drawn(pick, v.aval.shape, sizes) for v in atoms] for atoms in (eqn.invars, eqn.outvars)]
            parts = apart(eqn, eqn.params, *specs, sizes)
            for one, other in zip(evaluated(eqn, ins, parts, sizes), outs, strict=True):
                np.testing.assert_allclose(one, other, 1e-6, 1e-8, err_msg=f"{eqn} {parts}")
