"""Re-emitting a trace changes nothing but where its hooks say so."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contract import subject, trace_of
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend import core as jex
from zoo import MODELS

from cjax.trace.dims.find import find_dims
from cjax.trace.emit.emit import Hooks, bind, emit, in_turn
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.layers.repeats import find_runs

WIDTH = 5


class Spy(Hooks):
    """Notes what it is asked, and changes nothing."""

    def __init__(self) -> None:
        self.weights: list[tuple[int, tuple[int, ...]]] = []
        self.primitives: list[str] = []
        self.carries: list[tuple[int, ...]] = []
        self.layers = 0

    def weight(self, leaf: int, value: jax.Array) -> jax.Array:
        self.weights.append((leaf, value.shape))
        return value

    def equation(self, eqn: Any, ins: list[Any], scope: Any) -> list[Any]:
        self.primitives.append(eqn.primitive.name)
        return bind(eqn, ins)

    def carry(self, var: Any, value: jax.Array, scope: Any) -> jax.Array:
        self.carries.append(value.shape)
        return value

    def layer(self, body: Callable[..., Any]) -> Callable[..., Any]:
        self.layers += 1
        return body


class Apart(Spy):
    """With layers one by one."""

    unrolls = 100


def alone(number: int) -> list[tuple[int, ...]]:
    return [(i,) for i in range(number)]


def emitted(
    closed: jex.ClosedJaxpr, groups: Sequence[tuple[int, ...]] = (), hooks: Hooks | None = None, rolled: bool = True,
    num_weights: int = 0,
) -> Callable[..., list[jax.Array]]:  # fmt: skip
    """The trace as a function of its inputs, those in `groups` stacked; the first are weights, if that is asked."""
    taken = {i for group in groups for i in group}
    ins = sorted([*groups, *((i,) for i in range(len(closed.jaxpr.invars)) if i not in taken)])
    runs = find_runs(closed) if rolled else ()
    scope, outs = find_dims(closed, num_weights).top, alone(len(closed.jaxpr.outvars))
    run = emit(closed, runs, scope, ins, outs, hooks or Hooks())

    def call(*args: Any) -> list[jax.Array]:
        return run([args[g[0]] if len(g) == 1 else jnp.stack([args[i] for i in g]) for g in ins])

    return call


def assert_equal_results(given: Sequence[Any], wanted: Sequence[Any], tolerance: float = 1e-6) -> None:
    for a, b in zip(given, wanted, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if jax.dtypes.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# -- whole models -----------------------------------------------------------------------------------------------------
# One of each kind of trace; test_contract re-emits all of the zoo, with gradients.
KINDS = "linen_remat linen_moe_capacity linen_lstm nnx_scan nnx_conv".split()
if os.environ.get("CJAX_TEST_ALL") == "1":
    KINDS += ["linen_encoder_decoder", "linen_scan", "nnx_decoder"]


@pytest.mark.full(
    "rolled-linen_lstm",
    "rolled-linen_moe_capacity",
    "rolled-linen_remat",
    "rolled-nnx_scan",
    "unrolled-linen_lstm",
    "unrolled-linen_moe_capacity",
    "unrolled-linen_remat",
    "unrolled-nnx_scan",
)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rolled", [True, False], ids=["rolled", "unrolled"])
def test_identity_hooks_give_the_model_back(name: str, rolled: bool) -> None:
    case = subject(name, False)
    batch, key = case.batches[0], jax.random.key(3)
    trace = trace_of(name)
    assert len(trace.runs) == (len(MODELS[name].blocks) if not MODELS[name].scanned else 0)
    state = case.captured.initial or jax.jit(case.captured.init)(jax.random.key(0))
    leaves = [*jax.tree.leaves(state), *jax.tree.leaves(batch), key, jnp.int32(0)]
    run = emit(
        trace.closed, trace.runs if rolled else (), trace.dims.top,
        alone(len(leaves)), alone(len(trace.closed.jaxpr.outvars)), Hooks(),
    )  # fmt: skip
    loss, aux, model_state = jax.jit(case.captured.apply, static_argnums=5)(*state, batch, key, True)
    assert_equal_results(jax.jit(run)(leaves), jax.tree.leaves((loss, aux, model_state)), 1e-5)


# -- a chain of layers ------------------------------------------------------------------------------------------------
@settings(max_examples=15)
@given(st.lists(st.sampled_from("abct"), min_size=1, max_size=7), st.booleans(), st.booleans())
def test_any_chain_of_layers_comes_out_the_same(kinds: list[str], collects: bool, looks_back: bool) -> None:
    """Layers in any order, some of them collected, some reading the one before the last, some tied."""
    _, *kernels = inputs(len(kinds))

    def model(x: jax.Array, *kernels: jax.Array) -> Any:
        before, seen = x, []
        for index, (kind, kernel) in enumerate(zip(kinds, kernels, strict=True)):
            y = x @ (kernels[0] if kind == "t" else kernel)
            match kind:
                case "a":
                    y = x + jnp.tanh(y) * 0.5
                case "b":
                    y = jax.checkpoint(lambda y: jnp.sin(y) - jnp.cos(y) * 2)(y)
                case "c":
                    y = x + jnp.tanh(y) * (0.1 * index)
                case "t":
                    y = jnp.tanh(y) + jnp.sin(x) - 1
            x, before = (y + before if looks_back else y), x
            seen.append(x.sum())
        return (x, seen) if collects else x

    x = jnp.linspace(-1, 1, 3 * WIDTH).reshape(3, WIDTH)
    closed = simplify(jax.make_jaxpr(model)(x, *kernels))
    # Each of seven layers may treble the rounding of those before it; one in the wrong place is off in the first digit.
    assert_equal_results(emitted(closed)(x, *kernels), jax.tree.leaves(model(x, *kernels)), 1e-3)
    assert_equal_results(emitted(closed, hooks=Apart())(x, *kernels), jax.tree.leaves(model(x, *kernels)), 1e-3)


def stack_of(depth: int, body: Callable[[jax.Array, jax.Array], jax.Array]) -> jex.ClosedJaxpr:
    def model(x: jax.Array, *kernels: jax.Array) -> jax.Array:
        for kernel in kernels:
            x = body(x, kernel)
        return x

    return simplify(jax.make_jaxpr(model)(jnp.ones((3, WIDTH)), *[jnp.ones((WIDTH, WIDTH))] * depth))


def body(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return x + jnp.tanh(x @ kernel) * 0.5


def inputs(depth: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(s), jnp.float32) for s in [(3, WIDTH), *[(WIDTH, WIDTH)] * depth]]


def test_a_rolled_stack_is_one_loop_and_its_weights_are_met_once() -> None:
    spy, args = Spy(), inputs(12)
    function = emitted(stack_of(12, body), [tuple(range(1, 13))], spy)
    jaxpr = jax.make_jaxpr(function)(*args)
    assert sum(eqn.primitive.name == "scan" for eqn in jaxpr.eqns) == 1
    assert not any(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)
    kernels = [shape for leaf, shape in spy.weights if leaf == 1]
    assert kernels == [(WIDTH, WIDTH)], "made ready inside the loop, one layer at a time"
    assert spy.primitives.count("dot_general") == 1 and spy.layers == 1
    assert spy.carries == [(3, WIDTH)] * 2, "on the way in and from layer to layer"


def test_an_unrolled_stack_meets_each_weight() -> None:
    spy, args = Spy(), inputs(3)
    wanted = emitted(stack_of(3, body), [(1, 2, 3)], Hooks())(*args)
    given = emitted(stack_of(3, body), [(1, 2, 3)], spy, rolled=False)(*args)
    assert_equal_results(given, wanted)
    assert [leaf for leaf, shape in spy.weights if shape == (WIDTH, WIDTH)] == [1, 2, 3]


def test_an_authors_scan_meets_its_weights_one_layer_at_a_time() -> None:
    def model(x: jax.Array, kernels: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, kernel: (body(x, kernel), None), x, kernels)[0]

    x, *kernels = inputs(4)
    closed = simplify(jax.make_jaxpr(model)(x, jnp.stack(kernels)))
    spy = Spy()
    assert_equal_results(emitted(closed, hooks=spy)(x, jnp.stack(kernels)), [model(x, jnp.stack(kernels))])
    assert (1, (WIDTH, WIDTH)) in spy.weights and (1, (4, WIDTH, WIDTH)) not in spy.weights
    assert spy.layers == 1


def test_an_authors_scan_runs_the_way_it_was_written() -> None:
    """Backwards, with results at their own places."""

    def function(kernels: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda x, kernel: (body(x, kernel), x.sum()), x, kernels, reverse=True)

    kernels, x = jnp.stack(inputs(3)[1:]), inputs(3)[0]
    closed = simplify(jax.make_jaxpr(function)(kernels, x))
    assert_equal_results(emitted(closed)(kernels, x), function(kernels, x))


def test_what_layers_hand_on_keeps_its_dtype() -> None:
    """Whatever precision a hook computes in: a loop takes out what it takes in."""

    class Narrow(Hooks):
        def equation(self, eqn: Any, ins: list[Any], scope: Any) -> list[Any]:
            return [out.astype(jnp.bfloat16) for out in bind(eqn, [jnp.asarray(x, jnp.float32) for x in ins])]

    closed, args = stack_of(4, body), inputs(4)
    (out,) = emitted(closed, [tuple(range(1, 5))], Narrow())(*args)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, functools.reduce(body, args[1:], args[0]), rtol=0.05, atol=0.05)


def test_results_that_are_stacks_come_out_stacked() -> None:
    def model(x: jax.Array, *kernels: jax.Array) -> Any:
        seen = []
        for kernel in kernels:
            x = body(x, kernel)
            seen.append(x.mean(0))
        return seen

    args = inputs(4)
    closed = simplify(jax.make_jaxpr(model)(*args))
    run = emit(closed, find_runs(closed), find_dims(closed).top, alone(5), [(0, 1, 2, 3)], Hooks())
    assert_equal_results(run(args), [jnp.stack(model(*args))])
    assert sum(eqn.primitive.name == "concatenate" for eqn in jax.make_jaxpr(run)(args).eqns) <= 1


def test_inputs_that_are_results_pass_through_untouched() -> None:
    """Frozen statistics: a stack that is only handed back is not taken apart and put together again."""
    closed = simplify(jax.make_jaxpr(lambda a, b, c: (a, b, c * 2))(*[jnp.ones(3)] * 3))
    run = emit(closed, (), find_dims(closed).top, [(0, 1), (2,)], [(0, 1), (2,)], Hooks())
    jaxpr = jax.make_jaxpr(run)([jnp.ones((2, 3)), jnp.ones(3)])
    assert [eqn.primitive.name for eqn in jaxpr.eqns] == ["mul"]


def test_the_authors_names_survive() -> None:
    def model(x: jax.Array, *kernels: jax.Array) -> jax.Array:
        for kernel in kernels:
            with jax.named_scope("block/attention"):
                x = body(x, kernel)
        return x

    closed = simplify(jax.make_jaxpr(model)(*inputs(4)))
    text = jax.jit(emitted(closed)).lower(*inputs(4)).as_text(debug_info=True)
    assert "block/attention" in text


def test_gradients_flow_through_a_rolled_stack() -> None:
    args = inputs(6)
    closed = stack_of(6, body)

    def reference(*args: jax.Array) -> jax.Array:
        x = args[0]
        for kernel in args[1:]:
            x = body(x, kernel)
        return (x**2).sum()

    given = jax.grad(lambda *args: (emitted(closed)(*args)[0] ** 2).sum(), range(7))(*args)
    assert_equal_results(given, jax.grad(reference, range(7))(*args), 1e-4)


# -- layers one by one ------------------------------------------------------------------------------------------------
@settings(max_examples=10)
@given(st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_turns_give_what_a_scan_gives(length: int, reverse: bool, reads: bool, gives: bool) -> None:
    """With gradients of all that goes in, whether layers have anything of their own or leave anything behind."""
    rng = np.random.default_rng(0)
    start = {"x": jnp.asarray(rng.standard_normal(3), jnp.float32), "count": jnp.int32(1)}
    stack = {"w": jnp.asarray(rng.standard_normal((length, 3)), jnp.float32), "n": jnp.arange(length)}
    stack |= {"key": jax.random.split(jax.random.key(0), length)}

    def layer(carry: Any, own: Any) -> Any:
        w, n = (own["w"] + jax.random.normal(own["key"], (3,)), own["n"]) if reads else (jnp.ones(3), jnp.int32(2))
        new = {"x": jnp.sin(carry["x"] * w + n), "count": 2 * carry["count"] + n}
        return new, (carry["x"] * w, carry["count"]) if gives else None

    def total(turn: Any, x: jax.Array, w: jax.Array) -> Any:
        own = {**stack, "w": w} if reads else None
        out = turn(layer, {**start, "x": x}, own, length=length, reverse=reverse)
        seen = (out[1][0] * jnp.arange(1.0, length + 1)[:, None]).sum() if gives else 0.0
        return out[0]["x"].sum() + seen, out

    found, wanted = (
        jax.value_and_grad(lambda x, w, t=t: total(t, x, w), (0, 1), has_aux=True)(start["x"], stack["w"])
        for t in (in_turn, jax.lax.scan)
    )
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert_equal_results(jax.tree.leaves(found), jax.tree.leaves(wanted))


def test_layers_one_by_one_have_no_loop_and_their_gradients_are_stacked() -> None:
    """Each weight is made ready by itself, and no zeros as large as the stack are added to."""
    closed, spy, (x, *kernels) = stack_of(5, body), Apart(), inputs(5)
    function, stack = emitted(closed, [tuple(range(1, 6))], spy), jnp.stack(kernels)
    assert_equal_results(function(x, *kernels), emitted(closed, [tuple(range(1, 6))])(x, *kernels))
    assert spy.layers == 1 and [leaf for leaf, _ in spy.weights if leaf] == [1] * 5
    assert spy.carries == [(3, WIDTH)] * 6, "on the way in and from layer to layer"
    run = emit(closed, find_runs(closed), find_dims(closed).top, [(0,), tuple(range(1, 6))], alone(1), Apart())
    jaxpr = jax.make_jaxpr(jax.grad(lambda x, stack: run([x, stack])[0].sum(), (0, 1)))(x, stack)
    assert " scan[" not in str(jaxpr) and " while[" not in str(jaxpr)
    sums = [eqn for eqn in jaxpr.eqns if eqn.primitive.name in ("add_any", "pad")]
    assert not any(eqn.outvars[0].aval.shape == stack.shape for eqn in sums)


@pytest.mark.parametrize("reverse", [False, True])
def test_an_authors_scan_is_taken_apart_the_way_it_runs(reverse: bool) -> None:
    def function(kernels: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(lambda x, kernel: (body(x, kernel), x.sum()), x, kernels, reverse=reverse)

    kernels, x = jnp.stack(inputs(3)[1:]), inputs(3)[0]
    spy = Apart()
    run = emitted(simplify(jax.make_jaxpr(function)(kernels, x)), hooks=spy, num_weights=1)
    assert_equal_results(run(kernels, x), function(kernels, x))
    assert spy.layers == 1 and [shape for leaf, shape in spy.weights if leaf == 0] == [(WIDTH, WIDTH)] * 3
    assert "scan" not in str(jax.make_jaxpr(run)(kernels, x))


def test_a_loop_that_has_no_weights_of_its_own_stays_one() -> None:
    """Over positions, say, of which there may be thousands."""

    def function(kernel: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, row: (body(x, kernel) + row, None), x, jnp.ones((7, 3, WIDTH)))[0]

    kernel, x = inputs(1)[1], inputs(1)[0]
    run = emitted(simplify(jax.make_jaxpr(function)(kernel, x)), hooks=Apart())
    assert_equal_results(run(kernel, x), [function(kernel, x)])
    assert "scan" in str(jax.make_jaxpr(run)(kernel, x))


def test_no_layers_at_all_hand_on_what_they_are_given() -> None:
    given = [turn(lambda c, x: (c + x, c * x), 2.0, jnp.ones((0,)), length=0) for turn in (in_turn, jax.lax.scan)]
    assert_equal_results(jax.tree.leaves(given[0]), jax.tree.leaves(given[1]))
