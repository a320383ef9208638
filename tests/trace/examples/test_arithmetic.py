"""Sums, means and ratios of examples: what each becomes when it is added up, divided or multiplied."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

from cjax.trace.examples.verdict import follow
from cjax.trace.jaxpr.simplify import simplify

ROWS, LENGTH = 8, 3
Function = Callable[[jax.Array, jax.Array, int], jax.Array]  # of examples, weights of them, and how many there are

KINDS: list[tuple[str, Function]] = [
    ("sum", lambda x, w, n: x.sum()),
    ("mean", lambda x, w, n: x.sum() / n),
    ("mean", lambda x, w, n: (x / n).sum()),
    ("mean", lambda x, w, n: (x * (1 / n)).sum()),
    ("sum", lambda x, w, n: x.mean() * n),
    ("sum", lambda x, w, n: (x / n).mean(1).sum() * n),
    ("aggregate", lambda x, w, n: x.sum() * n),  # neither the parts' sum nor their mean
    ("aggregate", lambda x, w, n: (x * n).sum()),
    ("aggregate", lambda x, w, n: x.sum() / n / n),
    ("ratio", lambda x, w, n: x.sum() / w.sum()),
    ("ratio", lambda x, w, n: x.mean() / w.mean()),
    ("aggregate", lambda x, w, n: x.mean() / w.sum()),  # shrinks as the rows grow
    ("aggregate", lambda x, w, n: x.sum() / w.mean()),
    ("mixed", lambda x, w, n: x.sum() + w.mean()),
    ("sum", lambda x, w, n: x.sum() + w.sum()),
    ("mean", lambda x, w, n: x.mean() - w.mean()),
]


@pytest.mark.parametrize(("kind", "function"), KINDS)
def test_what_is_made_of_examples(kind: str, function: Function) -> None:
    def trace(rows: int):
        x = jax.ShapeDtypeStruct((rows, LENGTH), jnp.float32)
        return simplify(jax.make_jaxpr(lambda x, w: function(x, w, rows))(x, x))

    assert follow(trace(ROWS), trace(ROWS // 2), {0, 1}, 0)[0].kind == kind
