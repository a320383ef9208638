"""What goes through memory of lookups, sums and whatever is made in between."""

import jax.numpy as jnp
from traces import plain_trace

from cjax.planner.reading.work import work_of
from cjax.planner.work import elements

ROWS, LENGTH, VOCAB, WIDTH = 64, 20, 5000, 96


def test_a_lookup_reads_what_it_takes() -> None:
    """And not its table."""

    def loss(params, frozen, state, batch, key, index):
        return jnp.tanh(params["table"][batch["ids"]]).sum(), {}, {}

    batch = {"ids": jnp.zeros((ROWS, LENGTH), jnp.int32)}
    (part,) = work_of(plain_trace(loss, params={"table": jnp.ones((VOCAB, WIDTH))}, batch=batch)).parts
    assert max(elements(value.dims) for value in part.touched) == ROWS * LENGTH * WIDTH
    assert [elements(value.dims) for value in part.touched if value.is_computed].count(ROWS * LENGTH * WIDTH) == 3
