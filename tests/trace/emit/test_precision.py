"""bfloat16: which equations compute low. Read off the jaxpr that comes out."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import core as jex

from cjax.trace.dims.find import Scope, find_dims
from cjax.trace.emit.emit import Hooks, bind, emit
from cjax.trace.emit.precision import Lowering
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.layers.repeats import find_runs

LOW, HIGH = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


class Low(Hooks):
    def __init__(self, closed: jex.ClosedJaxpr, low: Any) -> None:
        self._lowering = Lowering(closed, low)

    def equation(self, eqn: Any, ins: list[Any], scope: Scope) -> list[Any]:
        return bind(eqn, *self._lowering.given(eqn, ins, scope))


def lowered(
    function: Callable[..., Any], *args: Any, num_weights: int = 1, low: Any = LOW
) -> Callable[..., list[jax.Array]]:
    """`function` (of weights first) with its equations evaluated by the rules; results in the dtypes it declares."""
    closed = simplify(jax.make_jaxpr(function)(*args))
    outs = closed.jaxpr.outvars
    run = emit(
        closed, find_runs(closed), find_dims(closed, num_weights).top,
        [(i,) for i in range(len(args))], [(i,) for i in range(len(outs))], Low(closed, low),
    )  # fmt: skip
    return lambda *args: run(args)


def equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jex.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def dtypes(function: Callable[..., Any], *args: Any, num_weights: int = 1) -> dict[str, list[Any]]:
    """Result dtypes by primitive, in order."""
    found: dict[str, list[Any]] = {}
    for eqn in equations(jax.make_jaxpr(lowered(function, *args, num_weights=num_weights))(*args)):
        found.setdefault(eqn.primitive.name, []).append(eqn.outvars[0].aval.dtype)
    return found


W, X = jnp.ones((4, 4)), jnp.ones((3, 4))


def test_matmuls_take_and_store_low() -> None:
    jaxpr = jax.make_jaxpr(lowered(lambda w, x: x @ w, W, X))(W, X)
    (dot,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"]
    assert {v.aval.dtype for v in (*dot.invars, *dot.outvars)} == {LOW}


def test_convolutions_take_and_store_low() -> None:
    conv = lambda w, x: lax.conv(x, w, (1, 1), "SAME")  # noqa: E731
    assert dtypes(conv, jnp.ones((2, 3, 3, 3)), jnp.ones((1, 3, 8, 8)))["conv_general_dilated"] == [LOW]


def test_what_follows_the_last_matmul_is_high() -> None:
    found = dtypes(lambda w, x: jnp.log((x @ w) * 2 + 1).sum(), W, X)
    assert found["mul"] == found["add"] == found["log"] == found["reduce_sum"] == [HIGH]


def test_adding_between_matmuls_stays_low() -> None:
    found = dtypes(lambda w, b, x: jnp.maximum(x @ w + b, 0) @ w, W, jnp.ones(4), X, num_weights=2)
    assert found["add"] == found["max"] == [LOW]


def test_stacking_between_matmuls_stays_low() -> None:
    found = dtypes(lambda w, x: jnp.stack([x @ w, x @ w]) @ w, W, X)
    assert all(dtype == LOW for name in ("stack", "concatenate") for dtype in found.get(name, []))


def test_adding_what_is_high_is_high() -> None:
    """x is no weight and no result of a matmul: the residual stream keeps what it was given."""
    found = dtypes(lambda w, x: (x + x @ w) @ w, W, X)
    assert found["add"] == [HIGH]


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "rsqrt", "reduce_sum", "cumsum"])
def test_functions_and_reductions_between_matmuls_are_high(name: str) -> None:
    function = {
        "exp": jnp.exp, "log": jnp.log, "tanh": jnp.tanh, "rsqrt": lax.rsqrt,
        "reduce_sum": lambda x: jnp.broadcast_to(x.sum(-1, keepdims=True), x.shape),
        "cumsum": lambda x: jnp.cumsum(x, 1),
    }[name]  # fmt: skip
    found = dtypes(lambda w, x: function(x @ w) @ w, W, X)
    assert found[name] == [HIGH]
    assert found["dot_general"] == [LOW, LOW]


def test_softmax_statistics_are_high() -> None:
    found = dtypes(lambda w, x: jax.nn.softmax(x @ w) @ w, W, X)
    assert set(found["exp"]) == set(found["reduce_sum"]) == {HIGH}


def test_lookups_in_tables_of_weights_are_low() -> None:
    ids = jnp.array([[0, 2]])
    assert dtypes(lambda table, w, ids: table[ids] @ w, W, W, ids, num_weights=2)["gather"] == [LOW]


def test_lookups_that_matmuls_alone_read_find_what_was_rounded() -> None:
    """Tokens in another order, here: of what is looked up as many bytes move, between devices and in memory."""
    place = jnp.arange(4)[::-1]

    def looked_up(function: Callable[..., Any]) -> set[Any]:
        """The dtypes of what gathers read."""
        run = lowered(function, jnp.ones((8, 8)), jnp.ones((4, 8)))
        jaxpr = jax.make_jaxpr(run)(jnp.ones((8, 8)), jnp.ones((4, 8))).jaxpr
        return {eqn.invars[0].aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == "gather"}

    assert looked_up(lambda w, x: jnp.tanh(x)[place] @ w) == {LOW}
    assert looked_up(lambda w, x: jnp.tanh(x)[place].reshape(2, 2, 8) @ w) == {LOW}
    assert looked_up(lambda w, x: (rows := jnp.tanh(x)[place]) @ w + rows) == {HIGH}
    assert looked_up(lambda w, x: jnp.tanh(jnp.tanh(x)[place]) @ w) == {HIGH}
    assert looked_up(lambda w, x: ((rows := jnp.tanh(x)[place]) @ w, rows)) == {HIGH}


def test_lookups_that_no_matmul_reads_are_high() -> None:
    ids = jnp.array([[0, 2]])
    assert dtypes(lambda table, ids: table[ids].sum(), W, ids)["gather"] == [HIGH]


def test_dtypes_the_author_fixed_stay() -> None:
    found = dtypes(lambda w, x: x.astype(jnp.float16) @ w.astype(jnp.float16), W, X)
    assert found["dot_general"] == [jnp.dtype(jnp.float16)]
    with jax.enable_x64(True):
        wide = jnp.ones((4, 4), jnp.float64)
        assert dtypes(lambda w, x: x @ w, wide, wide)["dot_general"] == [jnp.dtype(jnp.float64)]


def test_integers_stay() -> None:
    found = dtypes(lambda w, x: (x.astype(jnp.int32) + 1).astype(jnp.float32) @ w, W, X)
    assert found["add"] == [jnp.dtype(jnp.int32)]


def test_results_have_the_dtypes_that_the_trace_declares_inside_loops_and_out() -> None:
    def model(ws: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), (x @ w).mean()), x, ws)[0]

    stack = jnp.ones((5, 4, 4))
    jaxpr = jax.make_jaxpr(lowered(model, stack, X))(stack, X)
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    assert scan.outvars[0].aval.dtype == HIGH
    assert LOW in {eqn.outvars[0].aval.dtype for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general"}


def test_what_a_turn_hands_on_is_what_the_next_multiplies() -> None:
    """Nothing behind the loop multiplies it: only the next turn does."""

    def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        y = x @ w
        return y + y, None

    assert dtypes(lambda ws, x: lax.scan(turn, x, ws)[0].sum(), jnp.ones((2, 4, 4)), X)["add"] == [LOW]
    assert dtypes(lambda w, x: turn(x, w)[0].sum(), W, X)["add"] == [HIGH]


def test_matmuls_inside_checkpoints_are_low_too() -> None:
    function = jax.checkpoint(lambda w, x: jnp.sin(x @ w))
    assert dtypes(lambda w, x: function(w, function(w, x)), W, X)["dot_general"] == [LOW, LOW]


def test_error_is_that_of_eight_bits() -> None:
    rng = np.random.default_rng(0)
    w, x = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((32, 32), (16, 32)))

    def model(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.nn.softmax(jnp.tanh(x @ w) @ w).sum(0)

    (given,), wanted = lowered(model, w, x)(w, x), model(w, x)
    error = float(jnp.linalg.norm(given - wanted) / jnp.linalg.norm(wanted))
    assert 1e-5 < error < 2e-2


def test_numbers_that_float16_cannot_hold_stay_float32() -> None:
    def there_and_back(w: jax.Array, x: jax.Array) -> jax.Array:
        return (x @ w - 1e5 + 1e5) @ w

    (given,) = lowered(there_and_back, W, X, low=jnp.dtype(jnp.float16))(W, X)
    np.testing.assert_allclose(given, there_and_back(W, X), rtol=1e-2)


def test_float16_is_stored_where_bfloat16_would_be() -> None:
    def twice(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.exp((x @ w) @ w)

    run = lowered(twice, W, X, low=jnp.dtype(jnp.float16))
    eqns = [eqn for eqn in equations(jax.make_jaxpr(run)(W, X)) if eqn.primitive.name == "dot_general"]
    assert [eqn.outvars[0].aval.dtype for eqn in eqns] == [jnp.dtype(jnp.float16)] * 2
    assert run(W, X)[0].dtype == HIGH
