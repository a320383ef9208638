"""Costs against models counted by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cjax.trace.jaxpr.cost import Cost, cost, cost_by_equation
from cjax.trace.jaxpr.simplify import simplify


def matmul_flops(function, *shapes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return cost(jax.make_jaxpr(function)(*args)).matmul_flops


def test_mlp_forward_and_gradient():
    batch, wide, narrow = 7, 11, 5

    def loss(up, down, x):
        return (jnp.tanh(x @ up) @ down).sum()

    shapes = (narrow, wide), (wide, narrow), (batch, narrow)
    one = 2 * batch * wide * narrow
    assert matmul_flops(loss, *shapes) == 2 * one
    # Backward: two products for each forward one; the gradient of the inputs is not asked for.
    assert matmul_flops(jax.grad(loss, argnums=(0, 1)), *shapes) == (2 + 3) * one


def test_remat_pays_for_its_forward_pass_twice():
    def loss(w, x, wrap):
        layer = wrap(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w))
        return layer(w, layer(w, x)).sum()

    shapes = (5, 5), (3, 5)
    plain = matmul_flops(jax.grad(lambda w, x: loss(w, x, lambda f: f)), *shapes)
    remat = matmul_flops(jax.grad(lambda w, x: loss(w, x, jax.checkpoint)), *shapes)
    one = 2 * 3 * 5 * 5
    assert plain == (4 + 4 + 3) * one
    # The last product of each block is not needed again, only the first one's input to tanh.
    assert plain + 2 * one <= remat <= plain + 4 * one


def test_attention():
    batch, seq, heads, dim = 2, 7, 3, 5
    model = nn.MultiHeadDotProductAttention(heads, qkv_features=heads * dim, out_features=11)
    x = jnp.zeros((batch, seq, 11))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    closed = jax.make_jaxpr(model.apply)(params, x)
    projections = 4 * 2 * batch * seq * 11 * heads * dim
    scores = 2 * 2 * batch * heads * seq * seq * dim
    assert cost(closed).matmul_flops == cost(simplify(closed)).matmul_flops == projections + scores


@pytest.mark.parametrize("groups, strides", [(1, 1), (3, 1), (3, 2)])
def test_convolution(groups, strides):
    model = nn.Conv(12, (3, 5), (strides, strides), feature_group_count=groups, use_bias=False)
    x = jnp.zeros((2, 16, 20, 6))
    params = jax.eval_shape(model.init, jax.random.key(0), x)
    out = 2 * (16 // strides) * (20 // strides) * 12
    forward = 2 * out * 3 * 5 * 6 // groups
    assert cost(jax.make_jaxpr(model.apply)(params, x)).matmul_flops == forward
    gradient = jax.make_jaxpr(jax.grad(lambda p, x: model.apply(p, x).sum(), argnums=(0, 1)))(params, x)
    # The padded border makes the input's gradient read a little more than the forward pass did.
    assert cost(gradient).matmul_flops == pytest.approx(3 * forward, rel=0.15)


def test_scans_multiply_and_nest():
    def stack(ws, x):
        def layer(x, w):
            return jax.lax.scan(lambda x, _: (x @ w, None), x, length=3)[0], None

        return jax.lax.scan(layer, x, ws)[0]

    assert matmul_flops(stack, (4, 5, 5), (2, 5)) == 4 * 3 * 2 * 2 * 5 * 5


def test_conditionals_cost_the_dearest_branch_and_loops_one_pass():
    def function(x):
        y = jax.lax.cond(x[0, 0] > 0, lambda v: v @ v @ v, lambda v: v @ v, x)
        return jax.lax.while_loop(lambda v: v[0, 0] < 9, lambda v: v @ v, y)

    found = cost(jax.make_jaxpr(function)(jnp.ones((3, 3))))
    assert found.matmul_flops == 3 * 2 * 3**3
    assert found.unbounded_loops == 1


def test_elementwise_reductions_and_moves():
    x = np.ones((4, 6), np.float32)
    assert cost(jax.make_jaxpr(lambda x: x * x)(x)) == Cost(flops=24, bytes=96)
    assert cost(jax.make_jaxpr(lambda x: x.sum(1))(x)) == Cost(flops=24, bytes=16)
    assert cost(jax.make_jaxpr(lambda x: x.T)(x)) == Cost(flops=0, bytes=96)
    assert cost(jax.make_jaxpr(lambda x: x.reshape(24))(x)) == Cost()
    assert cost(jax.make_jaxpr(jnp.cumsum)(x)).flops == 24


def test_bytes_of_a_matmul():
    half = jax.ShapeDtypeStruct((3, 5), jnp.bfloat16), jax.ShapeDtypeStruct((5, 7), jnp.bfloat16)
    assert cost(jax.make_jaxpr(jnp.matmul)(*half)).bytes == 2 * (15 + 35 + 21)


def test_custom_derivatives_count_their_bodies():
    assert cost(jax.make_jaxpr(jax.nn.relu)(np.ones(9, np.float32))).flops == 9


def test_by_equation_adds_up():
    closed = jax.make_jaxpr(lambda x: jnp.tanh(x @ x).sum())(np.ones((3, 3), np.float32))
    parts = cost_by_equation(closed)
    assert len(parts) == len(closed.eqns)
    assert sum(parts, Cost()) == cost(closed)
    assert parts[0].matmul_flops == 54


def test_ragged_matmuls_are_matmuls():
    sizes = jax.ShapeDtypeStruct((3,), jnp.int32)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 5), (3, 5, 7))]
    assert cost(jax.make_jaxpr(jax.lax.ragged_dot)(*args, sizes)).matmul_flops == 2 * 8 * 5 * 7


def test_what_is_written_to_places_counts_once_however_it_combines():
    table, rows, places = jnp.ones((6, 5)), jnp.ones((4, 5)), jnp.arange(4)
    made = {how: cost(simplify(jax.make_jaxpr(lambda t, r, i, how=how: getattr(t.at[i], how)(r))(table, rows, places)))
            for how in ("add", "subtract", "max")}  # fmt: skip
    assert made["subtract"] == made["add"] == made["max"]
