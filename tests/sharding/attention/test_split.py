"""Attention over a sequence axis: everything that the equations say, on 4 and 8 devices."""

import itertools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attentions import (
    ALONE,
    BESIDE,
    FEW,
    KINDS,
    LENGTHS,
    QKV,
    B,
    D,
    H,
    S,
    V,
    assert_same,
    by_hand,
    causal_by_hand,
    mesh_of,
    our,
    positions,
    split,
    values,
    with_gradients,
)
from flax import nnx
from jax.sharding import PartitionSpec

from cjax.attention import attention as cjax_attention

# By default one of kinds that an all-to-all takes alike, which cuts heads and leaves positions as they are; and none of
# the two that come beside other axes.
OF_HEADS = ("alibi", "relative", "key_bias", "padded", "dropout", "dropout_broadcast", "packed", "grouped_dropout",
            "cross", "window")  # fmt: skip


def kinds() -> list[Any]:
    rest = [kind for kind in KINDS if kind not in ("grouped", "heads_first")]
    chosen = [(kind, "ring") for kind in rest] + [(kind, "all_to_all") for kind in OF_HEADS]
    left = [pair for kind in KINDS for mode in ("ring", "all_to_all") if (pair := (kind, mode)) not in chosen]
    return [*chosen, *(pytest.param(*pair, marks=pytest.mark.full) for pair in left)]


@pytest.mark.full(
    "alibi-ring",
    "dropout-ring",
    "dropout_broadcast-ring",
    "grouped_dropout-ring",
    "guarded-ring",
    "infinite-ring",
    "key_bias-ring",
    "learned_bias-ring",
    "packed-ring",
    "relative-ring",
    "where-ring",
    "window-ring",
)
@pytest.mark.parametrize(("kind", "mode"), kinds())
def test_equals_the_equations(kind: str, mode: str) -> None:
    function, shapes = KINDS[kind]
    with jax.enable_x64(True):
        assert_same(function, values(*shapes), mesh_of(**ALONE), mode)


@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
def test_a_sink_above_all_scores(mode: str) -> None:
    """By so much that no exponential of theirs is left beside it in float64, and a gradient still goes to one other."""

    def function(q: Any, k: Any, v: Any, sink: Any) -> Any:
        scores, sink = jnp.einsum("bqhd,bkhd->bhqk", q, k), sink * jnp.asarray([2000.0, 3.0, 1.0, -2000.0])
        off = jnp.maximum(scores.max(-1, keepdims=True), sink[:, None, None])
        exps = jnp.exp(scores - off)
        divisor = exps.sum(-1, keepdims=True) + jnp.exp(sink[:, None, None] - off)
        return jnp.einsum("bhqk,bkhd->bqhd", exps / divisor, v)

    with jax.enable_x64(True):
        q, k, v = values(*QKV)
        assert_same(function, (q, k, v, jnp.asarray([1.0, 1.5, -0.5, 1.0])), mesh_of(**ALONE), mode)


@pytest.mark.full("grouped-ring")
@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
@pytest.mark.parametrize(
    "kind",
    [
        *("alibi", "grouped"),
        *(
            pytest.param(k, marks=pytest.mark.full)
            for k in ("learned_bias", "heads_first", "grouped_dropout", "dropout")
        ),
    ],
)
def test_beside_axes_for_batch_and_heads(kind: str, mode: str) -> None:
    function, shapes = KINDS[kind]
    with jax.enable_x64(True):
        if mode == "all_to_all":  # two key heads are split over tensor already; their groups go over the sequence axis
            shapes = tuple((*s[:2], 4, s[3]) if s[2:3] == (2,) else s for s in shapes)
            shapes = ((B, S, 8, D), *shapes[1:]) if "grouped" in kind else shapes
            shapes = tuple((8, S, S) if s == (H, S, S) and kind == "grouped" else s for s in shapes)
        assert_same(function, values(*shapes), mesh_of(**BESIDE), mode)


@pytest.mark.full("ring")
@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
def test_eight_devices(mode: str) -> None:
    shapes = ((B, 32, 8, D), (B, 32, 2, D), (B, 32, 2, V), (8, 32, 32))  # 2 key heads: each has copies on 4 devices
    options = {"dropout_rng": jax.random.key(2), "dropout_rate": 0.3, "deterministic": False}
    with jax.enable_x64(True):
        function = our(causal=True, broadcast_dropout=False, **options)
        assert_same(function, values(*shapes), mesh_of(sequence=8), mode)


def test_an_odd_number_of_chunks_is_not_in_zigzag_order() -> None:
    def function(q: Any, k: Any, v: Any) -> Any:
        return cjax_attention(q, k, v, causal=True)

    with jax.enable_x64(True):
        assert_same(function, values((B, 12, H, D), (B, 12, H, D), (B, 12, H, V)), mesh_of(**ALONE), "ring")


@pytest.mark.parametrize("mode", [pytest.param("ring", marks=pytest.mark.full), "all_to_all"])
def test_layers_of_jax_and_flax(mode: str) -> None:
    """Theirs compute the softmax in float32 always (JAX), or in the dtype of the operands."""
    with jax.enable_x64(True):
        args = values(*FEW[:1], (B, S, 2, D), (B, S, 2, D))
        lengths = jnp.asarray(LENGTHS, jnp.int32)
        by_jax: Any = lambda q, k, v: jax.nn.dot_product_attention(  # noqa: E731
            q, k, v, is_causal=True, local_window_size=6, key_value_seq_lengths=lengths
        )
        assert_same(by_jax, args, mesh_of(**ALONE), mode, tol=1e-6)
        by_nnx: Any = lambda q, k, v: nnx.dot_product_attention(  # noqa: E731
            q, k, v, dropout_rng=jax.random.key(0), dropout_rate=0.2, is_causal=True
        )
        full = values(QKV[0], QKV[1], QKV[0])
        assert_same(by_nnx, full, mesh_of(**ALONE), mode)


@pytest.mark.full
@pytest.mark.parametrize("layer", ["linen", "nnx"])
@pytest.mark.parametrize("ours", [pytest.param(False, marks=pytest.mark.full), True])
def test_whole_layers(layer: str, ours: bool) -> None:
    options: dict[str, Any] = {"attention_fn": cjax_attention} if ours else {}
    options |= {"num_heads": H, "dropout_rate": 0.2}
    with jax.enable_x64(True):
        (x,) = values((B, S, 12))
        mask = nn.make_causal_mask(jnp.ones((B, S)))
        if layer == "linen":
            module = nn.MultiHeadDotProductAttention(**options, deterministic=False, param_dtype=jnp.float64)
            variables = module.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
            weights = variables["params"]["query"]["kernel"]

            def function(x: Any, kernel: Any) -> Any:
                params = {**variables["params"], "query": {**variables["params"]["query"], "kernel": kernel}}
                return module.apply({"params": params}, x, mask=mask, rngs={"dropout": jax.random.key(1)})
        else:
            rngs = nnx.Rngs(0, dropout=1)
            made = nnx.MultiHeadAttention(
                in_features=12, decode=False, deterministic=False, param_dtype=jnp.float64, rngs=rngs, **options
            )
            graph, state = nnx.split(made)
            weights = made.query.kernel[...]

            def function(x: Any, kernel: Any) -> Any:
                again = jax.tree.map(lambda leaf: leaf, state)
                again["query"]["kernel"].set_value(kernel)
                return nnx.merge(graph, again)(x, mask=mask)

        assert_same(function, [x, weights], mesh_of(**ALONE), "ring")


# --- rows that see nothing ---


@pytest.mark.full("ring")
@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
def test_rows_masked_throughout(mode: str) -> None:
    """With a large negative number they are means of all values, later ones included; with -inf they are NaN."""

    def function(low: float) -> Callable[..., Any]:
        def masked(q: Any, k: Any, v: Any) -> Any:
            i, j = positions()
            return by_hand(q, k, v, lambda x: jnp.where((i >= j) & (j > 5), x, low))  # early queries see no key

        return masked

    with jax.enable_x64(True):
        args = values(*QKV)
        assert_same(function(-1e9), args, mesh_of(**ALONE), mode)
        assert_same(function(float(np.finfo(np.float64).min)), args, mesh_of(**ALONE), mode)
        out = jax.jit(split(function(-np.inf), args, mesh_of(**ALONE), mode))(*args)
        want = jax.jit(function(-np.inf))(*args)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(want))
    np.testing.assert_allclose(out[:, 6:], want[:, 6:], atol=1e-12)
    assert np.isnan(out[:, :6]).all()


# --- layers rolled in a scan, and regions that are manual already ---


@pytest.mark.full("ring")
@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
def test_literals_that_differ_by_layer(mode: str) -> None:
    """Each turn of a scan has a slope of its own in the place of the one in the trace."""
    slopes = np.array([0.1, 0.4, 0.9])

    def layer(x: Any, slope: Any = 0.1) -> Any:
        i, j = positions()
        return by_hand(x, x, x, lambda s: jnp.where(i >= j, s - slope * (i - j).astype(s.dtype), -1e9))

    def plain(x: Any) -> Any:
        for slope in slopes:
            x = layer(x, slope)
        return x

    with jax.enable_x64(True):
        args = values(QKV[0])
        run = split(layer, args, mesh_of(**ALONE), mode, literal=0.1)

        def rolled(x: Any) -> Any:
            return jax.lax.scan(lambda x, slope: (run(x, changed=slope), None), x, jnp.asarray(slopes))[0]

        for want, have in zip(*map(jax.tree.leaves, (with_gradients(f, args) for f in (plain, rolled))), strict=True):
            np.testing.assert_allclose(have, want, rtol=0, atol=1e-9 * float(jnp.linalg.norm(want.ravel())))


@pytest.mark.full
@pytest.mark.parametrize("mode", ["ring", pytest.param("all_to_all", marks=pytest.mark.full)])
def test_inside_a_region_that_is_manual_over_the_batch(mode: str) -> None:
    """A trace of one device's rows, in a `shard_map` over them."""
    mesh = mesh_of(data=2, sequence=2)
    function, shapes = KINDS["alibi"]
    with jax.enable_x64(True):
        args = values(*shapes)
        mine = [x[:1] for x in args[:3]] + args[3:]
        spec = PartitionSpec(None, "sequence")
        rows = [PartitionSpec("data")] * 3 + [PartitionSpec()]
        inner = split(function, mine, mesh, mode, spec)
        options: Any = {"mesh": mesh, "axis_names": {"data"}, "check_vma": False}
        run = jax.shard_map(lambda *a: inner(*a), in_specs=tuple(rows), out_specs=PartitionSpec("data"), **options)
        given, found = with_gradients(function, args), with_gradients(run, args)
        for want, have in zip(jax.tree.leaves(given), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(have, want, rtol=0, atol=1e-9 * float(jnp.linalg.norm(want.ravel())))


# --- precision ---


@pytest.mark.full("ring")
@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
def test_bfloat16_is_summed_in_float32(mode: str) -> None:
    wide = values(*QKV, dtype=np.float32)
    args = [x.astype(jnp.bfloat16) for x in wide]
    exact = with_gradients(causal_by_hand, [x.astype(jnp.float32) for x in args])
    alone = with_gradients(causal_by_hand, args)
    found = with_gradients(split(causal_by_hand, args, mesh_of(**ALONE), mode), args)
    for best, one, have in zip(*map(jax.tree.leaves, (exact, alone, found)), strict=True):
        assert have.dtype == jnp.bfloat16

        def error(x: Any, best: Any = best) -> float:
            return float(jnp.linalg.norm((x.astype(jnp.float32) - best).ravel()))

        assert error(have) <= 1.5 * error(one) + 1e-6


# --- lengths that the axis does not divide ---


def everything(q: Any, k: Any, v: Any, bias: Any) -> Any:
    options = {"dropout_rng": jax.random.key(2), "dropout_rate": 0.3, "deterministic": False}
    return cjax_attention(q, k, v, bias, causal=True, broadcast_dropout=False, **options)


def masked(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return cjax_attention(q, k, v, bias, causal=True)


def logarithms(q: Any, k: Any, v: Any, bias: Any) -> Any:
    """Of scores that are 0 it would be infinite, and so would its gradient."""
    return by_hand(q, k, v, lambda x: jnp.log(jnp.abs(x)) / bias)


def odd() -> list[Any]:
    """Of 15 each device has an early and a late chunk, of 13 one, the last hardly any, and of 5 the last nothing."""
    chosen = [("ring", masked, 15), ("ring", logarithms, 5), ("all_to_all", everything, 13)]
    every = itertools.product(("ring", "all_to_all"), (everything, masked, logarithms), (5, 13, 15))
    return [*chosen, *(pytest.param(*row, marks=pytest.mark.full) for row in every if row not in chosen)]


@pytest.mark.full("ring-masked-15")
@pytest.mark.parametrize(("mode", "kind", "length"), odd())
def test_lengths_that_do_not_divide(mode: str, kind: Callable[..., Any], length: int) -> None:
    with jax.enable_x64(True):
        shapes = (B, length, H, D), (B, length, H, D), (B, length, H, V), (H, length, length)
        assert_same(kind, values(*shapes), mesh_of(**ALONE), mode)


@pytest.mark.parametrize("mode", ["ring", pytest.param("all_to_all", marks=pytest.mark.full)])
def test_queries_and_keys_of_lengths_that_do_not_divide(mode: str) -> None:
    with jax.enable_x64(True):
        args = values((B, 6, H, D), (B, 11, H, D), (B, 11, H, V))
        assert_same(nn.dot_product_attention, args, mesh_of(data=2, sequence=4), mode)


# --- what is refused ---


def test_heads_that_do_not_divide() -> None:
    args = values((B, S, 6, D), (B, S, 6, D), (B, S, 6, V), dtype=np.float32)
    with pytest.raises(ValueError, match=r"6 heads.*4 ways.*sequence=ring"):
        split(our(), args, mesh_of(**ALONE), "all_to_all")(*args)
    with pytest.raises(ValueError, match="gather"):
        split(our(), args, mesh_of(**ALONE), "gather")(*args)
