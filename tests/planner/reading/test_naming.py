"""What dims are called: those that are split alike by one name."""

import jax
import jax.numpy as jnp
from traces import plain_trace

from cjax.planner.reading.naming import Naming
from cjax.planner.work import BATCH

ROWS, LENGTH, EMBED, HEADS, FEW, WIDTH = 5, 7, 9, 4, 2, 3


def test_few_heads_of_keys_have_a_name_of_their_own() -> None:
    """A tensor axis that splits those of queries may have to leave them whole."""

    def loss(params, frozen, state, batch, key, index):
        def heads(name: str, num: int) -> jax.Array:
            return (batch["x"] @ params[name]).reshape(ROWS, LENGTH, num, WIDTH)

        mixed = jax.nn.dot_product_attention(heads("query", HEADS), heads("key", FEW), heads("value", FEW))
        return (mixed.reshape(ROWS, LENGTH, -1) @ params["out"]).sum(), {}, {}

    shapes = {
        "query": (EMBED, HEADS * WIDTH), "key": (EMBED, FEW * WIDTH), "value": (EMBED, FEW * WIDTH),
        "out": (HEADS * WIDTH, EMBED),
    }  # fmt: skip
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    trace = plain_trace(loss, params=params, batch={"x": jnp.ones((ROWS, LENGTH, EMBED))})
    naming = Naming(trace, num_microbatches=3)
    names = {
        trace.leaves[i].name: naming.dims(trace.classes_of(i), trace.leaves[i].shape)
        for i in (*trace.leaves_of("params"), *trace.leaves_of("batch"))
    }
    (_, (whole, _)), (_, (few, _)) = names["query"], names["key"]
    assert few == f"{whole}/{FEW}" and names["value"] == names["key"] and names["out"][0] == (whole, HEADS * WIDTH)
    assert naming.classes[few][0] == naming.classes[whole][0], "they are of one class"
    assert names["x"][0] == (BATCH, 3 * ROWS)
