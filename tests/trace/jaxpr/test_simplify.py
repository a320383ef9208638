"""Flat traces: same values, no calls, no arithmetic on literals; equations of equal layers are equal."""

import collections
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Literal, jaxpr_as_fun

from cjax.trace.jaxpr.identity import equation_key
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.jaxpr.simplify import simplify


class Block(nn.Module):
    rate: float = 0.1

    @nn.compact
    def __call__(self, x):
        h = nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        h = nn.relu(nn.gelu(nn.Dense(x.shape[-1])(h)))
        return x + nn.Dropout(self.rate, deterministic=False)(h)


class Stack(nn.Module):
    layers: int
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        block = nn.remat(Block) if self.remat else Block
        for index in range(self.layers):
            x = block(name=f"block_{index}")(x)
        return (x**2).mean()


X = np.random.default_rng(0).normal(size=(2, 3, 8)).astype(np.float32)


def names(closed):
    return [eqn.primitive.name for eqn in closed.eqns]


def stack_trace(layers, remat, differentiate=False):
    model = Stack(layers, remat)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.jit(model.init)(rngs, X)

    def loss(params, key):
        return model.apply(params, X, rngs={"dropout": key})

    args = params, jax.random.key(2)
    return jax.make_jaxpr(jax.value_and_grad(loss) if differentiate else loss)(*args), jax.tree.leaves(args)


@pytest.mark.full("False-False", "True-False", "True-True")
@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("differentiate", [False, True])
def test_values_are_the_same(remat, differentiate):
    closed, args = stack_trace(2, remat, differentiate)
    flat = simplify(closed)
    want, got = jax.jit(jaxpr_as_fun(closed))(*args), jax.jit(jaxpr_as_fun(flat))(*args)
    for one, other in zip(want, got, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-6, atol=1e-7)  # the compiler fuses, and rounds, otherwise
    assert not {"jit", "pjit", "closed_call"} & set(names(flat))
    retraced = jax.make_jaxpr(jaxpr_as_fun(flat))(*args)
    assert retraced.out_avals == closed.out_avals
    assert retraced.in_avals == closed.in_avals


def test_a_flat_remat_can_be_differentiated():
    closed, args = stack_trace(2, remat=True)
    flat = simplify(closed)

    def gradient(trace):
        params, key = args[:-1], args[-1]
        return jax.jit(jax.grad(lambda params: jaxpr_as_fun(trace)(*params, key)[0]))(params)

    for one, other in zip(gradient(closed), gradient(flat), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.full("False")
@pytest.mark.parametrize("remat", [False, True])
def test_equal_layers_have_equal_equations(remat):
    closed, _ = stack_trace(3, remat)
    flat = simplify(closed)
    blocks = [[] for _ in range(3)]
    for eqn in flat.eqns:
        for index in range(3):
            if f"block_{index}" in str(eqn.source_info.name_stack) or (remat and facts_of(eqn).remat):
                blocks[index].append(equation_key(eqn))
                break
    keys = blocks[0] if remat else None
    if remat:
        assert len(keys) == 3 and len(set(keys)) == 1
    else:
        assert len(blocks[0]) > 20
        assert blocks[0] == blocks[1] == blocks[2]


def test_remat_blocks_take_their_seeds_as_operands():
    closed, _ = stack_trace(2, remat=True)
    remats = [eqn for eqn in simplify(closed).eqns if facts_of(eqn).remat]
    seeds = [[int(atom.val) for atom in eqn.invars if isinstance(atom, Literal)] for eqn in remats]
    assert len(seeds) == 2 and len(seeds[0]) == 1 and seeds[0] != seeds[1]


def test_module_names_survive():
    closed, _ = stack_trace(1, remat=False)
    stacks = {str(eqn.source_info.name_stack) for eqn in simplify(closed).eqns if eqn.primitive.name == "random_bits"}
    assert stacks == {"Stack/block_0/Dropout_0"}


def test_counters_of_random_streams_fold():
    def init(key):
        rngs = nnx.Rngs(key)
        return [nnx.to_pure_dict(nnx.state(nnx.Linear(3, 3, rngs=rngs), nnx.Param)) for _ in range(3)]

    flat = simplify(jax.make_jaxpr(init)(jax.random.key(0)))
    folds = [eqn for eqn in flat.eqns if eqn.primitive.name == "random_fold_in"]
    assert [int(eqn.invars[1].val) for eqn in folds] == [0, 2, 4]


def test_folding_keeps_weak_types_and_wraps_around():
    def function(x):
        third = jax.lax.div(jax.lax.convert_element_type(1, jnp.float32), jnp.float32(3))
        top = jnp.uint32(0xFFFFFFFF) + jnp.uint32(2)
        return x * third, jax.lax.add(1, 2), top, jax.lax.div(-7, 2), jax.lax.rem(-7, 2)

    closed = jax.make_jaxpr(function)(np.float32(1))
    flat = simplify(closed)
    assert names(flat) == ["mul"]
    assert flat.out_avals == closed.out_avals
    values = jaxpr_as_fun(flat)(np.float32(1))
    assert [int(value) for value in values[1:]] == [3, 1, -3, -1]
    assert values[0] == np.float32(1) / np.float32(3)


def test_division_by_a_literal_zero_stays():
    assert names(simplify(jax.make_jaxpr(lambda: jax.lax.div(1, 0))())) == ["div"]


def test_random_numbers_are_never_folded():
    assert "random_bits" in names(simplify(jax.make_jaxpr(lambda: jax.random.bits(jax.random.key(0)))()))


def test_dead_equations_go_and_effects_stay():
    def function(x):
        jnp.sin(x)
        jax.debug.print("{}", x)
        return x + 1

    assert "sin" not in names(simplify(jax.make_jaxpr(function)(1.0)))
    assert any("debug" in name for name in names(simplify(jax.make_jaxpr(function)(1.0))))


def test_constants_are_hoisted_once_and_scalars_become_literals():
    table, step = np.arange(5.0, dtype=np.float32), jnp.asarray(2, jnp.int32)
    inner = jax.jit(lambda x: x * table + step)
    flat = simplify(jax.make_jaxpr(lambda x: inner(inner(x)))(table))
    assert len(flat.consts) == 1 and flat.consts[0] is not None
    np.testing.assert_array_equal(jaxpr_as_fun(flat)(table)[0], (table * table + 2) * table + 2)


def test_bodies_are_flat_too():
    inner = jax.jit(lambda x: jnp.tanh(x) + (jnp.float32(1) + jnp.float32(2)))

    def function(x):
        y, _ = jax.lax.scan(lambda c, row: (inner(c) + row, None), x, jnp.ones((3, 2)))
        y = jax.lax.cond(x[0] > 0, inner, lambda v: v, y)
        return jax.lax.while_loop(lambda c: c[0] < 3, inner, y)

    x = jnp.ones(2)
    flat = simplify(jax.make_jaxpr(function)(x))
    text = str(flat)
    assert "jit[" not in text and "2.0" not in text
    np.testing.assert_array_equal(jaxpr_as_fun(flat)(x)[0], function(x))
    np.testing.assert_array_equal(jax.jit(jaxpr_as_fun(flat))(x)[0], jax.jit(function)(x))


def test_bodies_keep_calls_that_own_arrays():
    table = np.arange(3.0, dtype=np.float32)
    inner = jax.jit(lambda x: x * table + 1)

    def function(x):
        return jax.checkpoint(lambda x: jax.lax.scan(lambda c, _: (inner(c), None), x, length=2)[0] + inner(x))(x)

    closed = jax.make_jaxpr(function)(table)
    flat = simplify(closed)
    np.testing.assert_array_equal(jax.jit(jaxpr_as_fun(flat))(table)[0], jax.jit(function)(table))


def clip_gradient(limit):
    @jax.custom_vjp
    def identity(x):
        return jnp.sin(x)

    identity.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (jnp.clip(g, -limit, limit),))
    return identity


def test_custom_derivatives_are_equal_when_they_do_the_same():
    def keys(*limits):
        def function(x):
            for limit in limits:
                x = clip_gradient(limit)(x)
            return x

        return [equation_key(eqn) for eqn in simplify(jax.make_jaxpr(function)(1.0)).eqns]

    same, differs = keys(1.0, 1.0), keys(1.0, 2.0)
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    assert differs[0] != differs[1]


def test_keys_tell_apart_what_differs():
    def function(x, w):
        a = jnp.sum(x, 0), jnp.sum(x, 1)
        scans = [jax.lax.scan(lambda c, r, k=k: (c + r * k, None), x[0], x)[0] for k in (2.0, 2.0, 3.0)]
        return a, scans, x @ w, w @ x

    flat = simplify(jax.make_jaxpr(function)(jnp.ones((2, 2)), jnp.ones((2, 2))))
    sums = [equation_key(eqn) for eqn in flat.eqns if eqn.primitive.name == "reduce_sum"]
    scans = [equation_key(eqn) for eqn in flat.eqns if eqn.primitive.name == "scan"]
    assert sums[0] != sums[1]
    assert scans[0] == scans[1] != scans[2]


def num_calls(depth):
    """Calls of functions, Python's and C's, that simplifying takes: the same on every machine."""

    def function(x):
        for index in range(depth):
            x = jax.nn.gelu(x * float(index))
        return x

    closed, calls = jax.make_jaxpr(function)(jnp.ones(3)), collections.Counter()
    sys.setprofile(lambda frame, event, arg: calls.update([event]))
    try:
        flat = simplify(closed)
    finally:
        sys.setprofile(None)
    assert len(flat.eqns) >= 8 * depth
    return calls["call"] + calls["c_call"]


@pytest.mark.full
def test_the_work_of_simplifying_grows_with_the_trace_alone():
    num_calls(10)  # fills caches
    assert num_calls(2000) < 11 * num_calls(200)
