"""What stages read of a micro-batch."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from cjax.gradients.pipelined import _inputs

NUM, ROWS = 3, 6


class Counting:
    """Stands for a model in stages that counts the micro-batches it has seen."""

    def next_model_state(self, params: Any, frozen: Any, model_state: Any, rows: Any, key: Any, index: Any) -> Any:
        return (model_state[0] + params[0],)

    def given(self, frozen: Any, model_state: Any, rows: Any, key: Any, index: Any) -> list[Any]:
        return [*model_state, *rows, index]


def test_each_micro_batch_sees_its_rows_and_the_counts_of_those_before() -> None:
    batch = {"scale": jnp.float32(7), "x": jnp.arange(ROWS)}
    model: Any = Counting()
    given, new = _inputs(model, NUM, (jnp.int32(5),), (), (jnp.int32(2),), batch, None)
    assert int(new[0]) == 2 + NUM * 5
    for index in range(NUM):
        count, scale, rows, number = given(index)
        assert (int(count), float(scale), int(number)) == (2 + index * 5, 7, index)
        np.testing.assert_array_equal(rows, np.arange(ROWS)[index::NUM])
