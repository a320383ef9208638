"""Rolled evaluation gives what plain evaluation gives, in equations that do not grow with the number of layers."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.layers.vectorize import SpreadRows, vectorize
from cjax.tree import leaf_names


def groups(tree):
    """Positions of leaves, those of different layers together."""
    found = {}
    for position, name in enumerate(leaf_names(tree)):
        found.setdefault(re.sub(r"\blayer_?\d+\b|\blayers/\d+\b", "*", name), []).append(position)
    return [tuple(group) for group in found.values()]


def store(leaves, grouping):
    return [leaves[g[0]] if len(g) == 1 else jnp.stack([leaves[i] for i in g]) for g in grouping]


def rolled(function, *args):
    """The stored outputs of `function`: wanted and got."""
    evaluate, stored, out_groups = plan(function, *args)
    return store(jax.tree.leaves(jax.jit(function)(*args)), out_groups), jax.jit(evaluate)(stored)


def plan(function, *args):
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    in_groups, out_groups = groups(args), groups(shape)
    evaluate = vectorize(simplify(closed), in_groups, out_groups)
    return evaluate, store(jax.tree.leaves(args), in_groups), out_groups


def count(function, *args):
    """How many equations rolled evaluation takes."""
    evaluate, stored, _ = plan(function, *args)
    return len(jax.make_jaxpr(evaluate)(stored).eqns)


def tree(layers, seed):
    random = np.random.default_rng(seed)

    def draw(shape):
        return random.normal(size=shape).astype(np.float32)

    shapes = {"up": (6, 10), "down": (10, 6), "bias": (10,), "scale": (6,)}
    params = {f"layer_{i}": {name: draw(shape) for name, shape in shapes.items()} for i in range(layers)}
    return params | {"embed": draw((12, 6)), "norm": draw((6,))}


def by_path(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "adam" if "bias" in str(path) else "sgd", params)


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


OPTIMIZERS = {
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 5, 50), weight_decay=0.1, mask=matrices),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=6),
    "muon": optax.contrib.muon(0.1),
    "lamb": optax.lamb(0.1, weight_decay=0.1),
    "lars": optax.lars(0.1, weight_decay=0.1),
    "by path": optax.multi_transform({"adam": optax.adam(0.1), "sgd": optax.sgd(0.1, momentum=0.9)}, by_path),
    "masked": optax.chain(optax.masked(optax.add_decayed_weights(0.1), matrices), optax.adam(0.1)),
    "clipped": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)),
    "adaptive": optax.chain(optax.adaptive_grad_clip(0.01), optax.sgd(0.1)),
    "accumulated": optax.MultiSteps(optax.adamw(0.1), every_k_schedule=2),
    "if finite": optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3),
}


def step(optimizer, layers):
    """The update, and arguments for it."""

    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(optimizer.init)(tree(layers, 0))
    if isinstance(state, optax.MultiStepsState):
        state = state._replace(mini_step=state.mini_step + 1)  # the step that updates
    return update, tree(layers, 0), state, tree(layers, 1)


@pytest.mark.full("accumulated", "adafactor", "adamw", "clipped", "lamb", "lars", "muon")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    want, got = rolled(*step(OPTIMIZERS[name], 4))
    for one, other in zip(want, got, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)


def spread_out(function, *args):
    """Stored outputs of `function`, wanted and got, where stacks have rows that belong to no member. Those of inputs
    hold what would be seen wherever it were read; between members, in front, and behind."""

    def spreads(found):
        shift = {n: tuple(range(1, 1 + n // 2)) + tuple(range(3 + n // 2, 3 + n)) for n in set(map(len, found))}
        return [SpreadRows(len(group) + 4, shift[len(group)]) if len(group) > 1 else None for group in found]

    def rows(leaf, spread):
        if spread is None:
            return leaf
        nothing = jnp.full((spread.num_rows, *leaf.shape[1:]), np.nan if leaf.dtype.kind == "f" else -7, leaf.dtype)
        return nothing.at[np.array(spread.places)].set(leaf)

    closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    in_groups, out_groups = groups(args), groups(shape)
    given, made = spreads(in_groups), spreads(out_groups)
    stored = [rows(leaf, spread) for leaf, spread in zip(store(jax.tree.leaves(args), in_groups), given, strict=True)]
    evaluate = jax.jit(vectorize(simplify(closed), in_groups, out_groups, given, made))
    want = store(jax.tree.leaves(jax.jit(function)(*args)), out_groups)
    return (
        [(one, other, spread) for one, other, spread in zip(want, evaluate(stored), made, strict=True)],
        evaluate,
        stored,
    )


@pytest.mark.full("accumulated", "adafactor", "adamw", "lamb", "lars", "muon")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_that_belong_to_no_layer(name):
    found, _, _ = spread_out(*step(OPTIMIZERS[name], 4))
    assert any(spread for *_, spread in found)
    for one, other, spread in found:
        if spread is not None:
            nobody = np.delete(other, spread.places, axis=0)
            assert len(nobody) == 4 and not np.asarray(nobody).any(), "rows of nobody are zeros"
            other = other[np.array(spread.places)]
        assert one.dtype == other.dtype
        np.testing.assert_allclose(other, one, rtol=2e-5, atol=2e-6)


def test_rows_stay_where_they_are():
    """A gather would bring layers from stage to stage."""
    *_, evaluate, stored = spread_out(*step(OPTIMIZERS["clipped"], 4))
    text = str(jax.make_jaxpr(evaluate)(stored))
    assert "gather" not in text and "concatenate" not in text


@pytest.mark.full("accumulated", "adafactor", "lamb", "lars", "muon")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equations_of_optimizers_do_not_grow(name):
    few, many = (count(*step(OPTIMIZERS[name], layers)) for layers in (4, 8))
    # `apply_if_finite` makes an array of one boolean for each leaf, four in a layer: each is taken from its stack.
    assert many - few <= (4 * 4 * 3 if name == "if finite" else 0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states_are_born_rolled(name):
    want, got = rolled(OPTIMIZERS[name].init, tree(3, 0))
    for one, other in zip(want, got, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


class LinenModel(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8)(tokens)
        for i in range(self.layers):
            h = nn.MultiHeadDotProductAttention(2, name=f"layer_{i}")(nn.LayerNorm()(x))
            x = x + nn.Dropout(0.1, deterministic=False)(h)
        return nn.Dense(11, bias_init=nn.initializers.normal())(x)


class NNXLayer(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up = nnx.Linear(8, 16, kernel_init=nnx.initializers.orthogonal(), rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class NNXModel(nnx.Module):
    def __init__(self, layers, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.layers = nnx.List([NNXLayer(rngs) for _ in range(layers)])


def linen_init(layers):
    tokens = np.zeros((2, 3), np.int32)
    return lambda key: LinenModel(layers).init({"params": key, "dropout": key}, tokens)


def nnx_init(layers):
    return lambda key: nnx.to_pure_dict(nnx.state(NNXModel(layers, nnx.Rngs(key)), nnx.Param))


INITS = [
    (linen_init, "threefry2x32"),
    pytest.param(linen_init, "rbg", marks=pytest.mark.full),
    pytest.param(nnx_init, "threefry2x32", marks=pytest.mark.full),
    (nnx_init, "rbg"),
]


@pytest.mark.full("linen_init-threefry2x32")
@pytest.mark.parametrize(("init", "implementation"), INITS)
def test_initial_parameters_are_the_same(init, implementation):
    key = jax.random.key(5, impl=implementation)
    want, got = rolled(init(3), key)
    assert sum(leaf.shape[0] == 3 for leaf in got) >= 8
    for one, other in zip(want, got, strict=True):  # the same bits, turned into values with XLA's own spread
        np.testing.assert_allclose(one, other, rtol=5e-7, atol=1e-8)
    assert count(init(12), key) == count(init(4), key)


def test_members_that_depend_on_each_other():
    def init(key):
        params = {}
        for i in range(4):
            key, sub = jax.random.split(key)
            params[f"layer_{i}"] = jax.random.bits(sub, (3,))
        return params

    want, got = rolled(init, jax.random.key(0))
    np.testing.assert_array_equal(want[0], got[0])


def test_other_orders_subsets_and_mixtures():
    def function(params):
        a, b, c = (params[f"layer_{i}"] for i in range(3))
        return {
            "reversed": {f"layer_{i}": leaf * 2 for i, leaf in enumerate((c, b, a))},
            "some": {f"layer_{i}": leaf + 1 for i, leaf in enumerate((a, c))},
            "unlike": {f"layer_{i}": f(leaf) for i, (f, leaf) in enumerate(((jnp.sin, a), (jnp.cos, b), (jnp.exp, c)))},
            "mixed": {f"layer_{i}": leaf for i, leaf in enumerate((a * 2, jnp.sin(b), c))},
            "shared": {f"layer_{i}": b - 1 for i in range(3)},
            "literals": {f"layer_{i}": jnp.float32(i) for i in range(3)},
            "same": params,
        }

    params = {f"layer_{i}": jnp.arange(4.0) + i for i in range(3)}
    want, got = rolled(function, params)
    for one, other in zip(want, got, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_sums_over_all_leaves_and_what_uses_parts_of_them():
    def function(params):
        parts = [jnp.sum(params["layer_0"])]
        for i in range(1, 4):
            parts.append(parts[-1] + jnp.sum(params[f"layer_{i}"]))
        return {"all": parts[-1], "half": parts[1], "most": jnp.sin(parts[2]) + parts[2]}

    want, got = rolled(function, {f"layer_{i}": jnp.arange(4.0) + i for i in range(4)})
    for one, other in zip(want, got, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_largest_and_the_least_of_all_leaves():
    def function(params):
        leaves = [jnp.abs(leaf).max() for leaf in jax.tree.leaves(params)]
        flags = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]
        return {
            "most": functools.reduce(jnp.maximum, leaves), "least": functools.reduce(jnp.minimum, leaves),
            "all": functools.reduce(jnp.logical_and, flags), "any": functools.reduce(jnp.logical_or, flags),
        }  # fmt: skip

    params = {f"layer_{i}": jnp.arange(4.0) + 3 - i for i in range(4)}
    for given in (params, params | {"layer_2": jnp.full(4, jnp.nan)}):
        want, got = rolled(function, given)
        for one, other in zip(want, got, strict=True):
            np.testing.assert_array_equal(one, other)


def test_rows_of_nobody_in_what_is_not_made_layer_by_layer():
    """Sums, other orders, some of the members, loops that end by what they hold, other sizes, and two spreads that
    differ: the same numbers, though members may be brought together."""

    def function(params):
        a, b, c, d = (params[f"layer_{i}"] for i in range(4))
        halved = [jax.lax.while_loop(lambda x: (x > 1).any(), lambda x: x / 2, x) for x in (a, b, c, d)]
        flags = [jnp.isfinite(leaf).all() for leaf in (a, b, c, d)]
        both = jax.lax.cond(a.sum() > 0, lambda *xs: [x + 1 for x in xs], lambda *xs: [x - 1 for x in xs], a, b, c, d)
        return {
            "reversed": {f"layer_{i}": leaf * 2 for i, leaf in enumerate((d, c, b, a))},
            "some": {f"layer_{i}": leaf + 1 for i, leaf in enumerate((a, c))},
            "halved": {f"layer_{i}": leaf for i, leaf in enumerate(halved)},
            "both": {f"layer_{i}": leaf for i, leaf in enumerate(both)},
            "shared": {f"layer_{i}": b - 1 for i in range(4)},
            "literals": {f"layer_{i}": jnp.float32(i) for i in range(4)},
            "product": {f"layer_{i}": x * params["of_others"][f"layer_{i}"] for i, x in enumerate((a, b, c, d))},
            "all": functools.reduce(jnp.logical_and, flags), "most": functools.reduce(jnp.maximum, (a, b, c, d)),
            "sum": a + b + c + d, "one": b * 3,
        }  # fmt: skip

    layers = {f"layer_{i}": jnp.arange(1.0, 5.0) + i for i in range(4)}
    given = layers | {"of_others": {name: -x for name, x in layers.items()}}
    found, evaluate, stored = spread_out(function, given)
    (loop,) = re.findall(r"(\S+) = while\[", str(jax.make_jaxpr(evaluate)(stored)))
    assert loop.endswith("f32[4,4]"), "a loop does not wait for rows that nobody has"
    for one, other, spread in found:
        np.testing.assert_allclose(other if spread is None else other[np.array(spread.places)], one, rtol=1e-6)


def test_layers_with_their_own_literals():
    def function(params):
        return {name: jnp.maximum(leaf * float(i), i - 2.0) for i, (name, leaf) in enumerate(params.items())}

    def params(layers):
        return {f"layer_{i}": jnp.arange(4.0) - 2 for i in range(layers)}

    want, got = rolled(function, params(3))
    np.testing.assert_allclose(want[0], got[0], rtol=1e-6)
    assert count(function, params(3)) == count(function, params(6))


def test_effects_are_kept(capfd):
    def function(params):
        jax.debug.print("seen {}", params["layer_0"][0])
        return jax.tree.map(lambda leaf: leaf + 1, params)

    want, got = rolled(function, {f"layer_{i}": jnp.arange(4.0) + i for i in range(3)})
    jax.effects_barrier()
    np.testing.assert_array_equal(want[0], got[0])
    assert capfd.readouterr().out.count("seen") == 2  # once plain, once rolled
