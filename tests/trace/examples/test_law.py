"""What a verdict says of a result is true of its numbers, for random programs on the rows of a batch."""

import random

import jax
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from row_programs import BATCH, fixed, leaves, program, run

from cjax.trace.examples.values import Value
from cjax.trace.examples.verdict import follow
from cjax.trace.jaxpr.simplify import simplify

PARTS = 2


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


def rows_of(value: Value, whole: np.ndarray, part: int) -> np.ndarray:
    """A part's rows of a result that is [..., outer * batch * inner, ...]."""
    dim, outer, inner = value.layout
    front, behind = whole.shape[:dim], whole.shape[dim + 1 :]
    apart = whole.reshape(*front, outer, BATCH, inner, *behind)
    return apart.take(range(part, BATCH, PARTS), dim + 1).reshape(*front, -1, *behind)


def alike(value: Value, whole: np.ndarray, parts: list[np.ndarray]) -> bool:
    """Whether results are the same of all rows and of some, and along dims that there are more of with more rows."""
    if value.is_merged:
        return all(close(rows_of(value, whole, i), part) for i, part in enumerate(parts))
    grown = [dim for dim, (a, b) in enumerate(zip(whole.shape, parts[0].shape, strict=True)) if a != b]
    first = [x[tuple(slice(0, 1) if d in grown else slice(None) for d in range(x.ndim))] for x in (whole, *parts)]
    same = all(close(x, np.broadcast_to(one, x.shape)) for x, one in zip((whole, *parts), first, strict=True))
    return same and all(close(one, first[0]) for one in first)


def holds(value: Value, whole: np.ndarray, parts: list[np.ndarray]) -> bool:
    """Whether what is said of a result is so. Where couplings or taints are noted, somebody is told."""
    if value.couplings or value.taints or value.weight is not None and value.kind == "rows":
        return True
    grown = float(PARTS) ** value.power
    if value.kind == "rows":
        return all(close(rows_of(value, whole, i), grown * part) for i, part in enumerate(parts))
    if value.kind == "sum":
        return close(whole, sum(parts, np.zeros(())))
    if value.kind == "mean":
        return close(whole, sum(parts, np.zeros(())) / PARTS)
    return value.kind != "fixed" or alike(value, whole, [grown * part for part in parts])


@given(st.integers(0, 10**6))
def test_what_is_said_of_every_result_is_true(seed: int) -> None:
    batch, others, pick = leaves(seed), list(fixed(seed).values()), random.Random(seed).choice
    whole, *parts = (
        [*batch.values(), *others],
        *([*(x[i::PARTS] for x in batch.values()), *others] for i in range(PARTS)),
    )
    with jax.enable_x64(True):
        steps = program(pick, 4, whole, parts[0])
        traces = [simplify(jax.make_jaxpr(lambda *values: run(steps, values))(*given)) for given in (whole, parts[0])]
        values = follow(*traces, set(range(len(batch))), 0)
        results, *of_parts = (list(map(np.asarray, run(steps, given))) for given in (whole, *parts))
    for i, (value, result) in enumerate(zip(values, results, strict=True)):
        assert holds(value, result, [part[i] for part in of_parts]), (i, value, [name for *_, name in steps])
