"""Attention over a sequence axis: everything that the equations say, on 4 and 8 devices."""

import math
import re
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, PartitionSpec

import cjax
from cjax.attention import attention as cjax_attention
from cjax.sharding.attention.split import attend
from cjax.trace.attention.bounds import bounds
from cjax.trace.attention.find import Attention, find_attentions
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.groups import Group, arrange
from cjax.trace.jaxpr.simplify import simplify

B, S, H, D, V = 2, 16, 4, 5, 3  # V: depth of values


def mesh_of(**sizes: int) -> Mesh:
    num = math.prod(sizes.values())
    types = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=jax.devices()[:num])


ALONE = {"sequence": 4}
BESIDE = {"data": 2, "sequence": 2, "tensor": 2}


def split(
    function: Callable[..., Any], args: Any, mesh: Mesh, mode: str, spec: Any = None, literal: Any = None
) -> Callable[..., Any]:
    """`function` with its one attention split over the mesh, and `changed` in the place of a literal."""
    closed = simplify(jax.make_jaxpr(function)(*args))
    eqns = closed.jaxpr.eqns
    (found,), _ = find_attentions(eqns, closed.jaxpr.outvars)
    places = [(id(e), i) for e in eqns for i, atom in enumerate(e.invars) if literal and value_of(atom) == literal]
    spec = spec or spec_of(found, mesh)

    def run(*args: Any, changed: Any = None) -> Any:
        env = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env |= dict(zip(closed.jaxpr.invars, args, strict=True))
        for item in arrange(eqns, [found.group]):
            if isinstance(item, Group):
                ins, literals = [env[var] for var in item.ins], {place: changed for place in places}
                outs = attend(found, ins, literals, mesh=mesh, mode=mode, axis="sequence", spec=spec)
            else:
                outs = bind(item, [env[a] if value_of(a) is None else value_of(a) for a in item.invars])
            env |= dict(zip(item.outs if isinstance(item, Group) else item.outvars, outs, strict=True))
        (out,) = closed.jaxpr.outvars
        return env[out]

    return run


def value_of(atom: Any) -> Any:
    """Of a literal; None for a variable."""
    return getattr(atom, "val", None)


def spec_of(found: Attention, mesh: Mesh) -> PartitionSpec:
    """Batch, positions and the first dim of heads split over whatever the mesh has for them."""
    axis_of = {"batch": "data", "query": "sequence", "heads": "tensor"}
    free = set(mesh.axis_names)
    entries = []
    for name in found.dims_of(found.query.var):
        axis = axis_of.get(name or "")
        entries.append(axis if axis in free else None)
        free.discard(axis or "")
    return PartitionSpec(*entries)


def values(*shapes: tuple[int, ...], dtype: Any = np.float64) -> list[jax.Array]:
    rng = np.random.default_rng(7)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def with_gradients(function: Callable[..., Any], args: Any) -> Any:
    """The result, and gradients of a sum of it that weighs each element otherwise."""

    def total(*args: Any) -> Any:
        out = function(*args)
        weights = jnp.sin(1.0 + jnp.arange(out.size)).reshape(out.shape)
        return (out * weights).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(total, tuple(range(len(args))), has_aux=True))(*args)
    return out, grads


def assert_same(function: Callable[..., Any], args: Any, mesh: Mesh, mode: str, spec: Any = None, tol: float = 1e-9):
    given = reference(function, tuple(args))
    found = with_gradients(split(function, args, mesh, mode, spec), args)
    for want, have in zip(jax.tree.leaves(given), jax.tree.leaves(found), strict=True):
        assert want.shape == have.shape and want.dtype == have.dtype
        wanted = np.asarray(want)
        np.testing.assert_allclose(have, wanted, rtol=0, atol=tol * float(np.linalg.norm(wanted.ravel())) + 1e-14)


REFERENCES: dict[Any, Any] = {}


def reference(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """By the equations; one for all modes and meshes for kinds of the table, whose `args` are always `values`."""
    if not any(function is kind for kind, _ in KINDS.values()):
        return with_gradients(function, args)
    key = (function, *((x.shape, x.dtype) for x in args))
    if key not in REFERENCES:
        REFERENCES[key] = with_gradients(function, args)
    return REFERENCES[key]


# --- attentions of many kinds: (function, shapes of its operands); masks and keys are made inside ---

QKV = ((B, S, H, D), (B, S, H, D), (B, S, H, V))
FEW = ((B, S, H, D), (B, S, 2, D), (B, S, 2, V))
LENGTHS = np.array([7, 16])
SEGMENTS = np.array([[1] * 5 + [2] * 9 + [0] * 2, [1] * 11 + [2] * 5])


def by_hand(q: Any, k: Any, v: Any, logits: Callable[[Any], Any] = lambda x: x) -> Any:
    weights = jax.nn.softmax(logits(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.2))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def positions() -> tuple[jax.Array, jax.Array]:
    return jnp.arange(S)[:, None], jnp.arange(S)[None, :]


def causal_by_hand(q: Any, k: Any, v: Any) -> Any:
    i, j = positions()
    return by_hand(q, k, v, lambda x: jnp.where(i >= j, x, -1e9))


def infinite(q: Any, k: Any, v: Any) -> Any:
    i, j = positions()
    return by_hand(q, k, v, lambda x: jnp.where(i >= j, x, -jnp.inf))


def capped(q: Any, k: Any, v: Any) -> Any:
    return by_hand(q, k, v, lambda x: 1.3 * jnp.tanh(x / 1.3))


def alibi(q: Any, k: Any, v: Any, slopes: Any) -> Any:
    i, j = positions()
    return by_hand(q, k, v, lambda x: jnp.where(i >= j, x - slopes[:, None, None] * (i - j), -1e30))


def relative(q: Any, k: Any, v: Any, table: Any) -> Any:
    i, j = positions()
    return by_hand(q, k, v, lambda x: x + table[jnp.clip(i - j, -3, 3) + 3].transpose(2, 0, 1))


def key_bias(q: Any, k: Any, v: Any, bias: Any) -> Any:
    return by_hand(q, k, v, lambda x: x + bias[:, None, None, :])


def where_softmax(q: Any, k: Any, v: Any) -> Any:
    i, j = positions()
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, where=(i - j) % 3 != 1), v)


def plain_softmax(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v)


def guarded(q: Any, k: Any, v: Any) -> Any:
    """Its rows that see nothing are zero."""
    i, j = positions()
    scores = jnp.where((i >= j) & (j > 2), jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
    most = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    exps = jnp.exp(scores - jnp.where(jnp.isfinite(most), most, 0.0))
    sums = exps.sum(-1, keepdims=True)
    return jnp.einsum("bhqk,bkhd->bqhd", exps * (1 / jnp.maximum(sums, 0.1)), v)


def heads_first(q: Any, k: Any, v: Any) -> Any:
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    i, j = positions()
    weights = jax.nn.softmax(jnp.where(i >= j, q @ k.transpose(0, 1, 3, 2), -1e30))
    return weights @ v


def padded(q: Any, k: Any, v: Any) -> Any:
    present = jnp.arange(S) < LENGTHS[:, None]
    return nn.dot_product_attention(q, k, v, mask=nn.make_attention_mask(present, present))


def given_mask(q: Any, k: Any, v: Any) -> Any:
    mask = jnp.asarray(np.random.default_rng(3).random((B, 1, S, S)) > 0.3)
    return nn.dot_product_attention(q, k, v, mask=mask)


def dropped(**options: Any) -> Callable[..., Any]:
    def function(q: Any, k: Any, v: Any) -> Any:
        key = jax.random.key(5)
        return nn.dot_product_attention(q, k, v, dropout_rng=key, dropout_rate=0.3, **options)

    return function


def our(**options: Any) -> Callable[..., Any]:
    return lambda q, k, v, *bias: cjax_attention(q, k, v, *bias, **options)


def grouped_dropout(q: Any, k: Any, v: Any) -> Any:
    options = {"dropout_rng": jax.random.key(2), "dropout_rate": 0.3, "deterministic": False}
    return cjax_attention(q, k, v, causal=True, broadcast_dropout=False, **options)


KINDS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "bidirectional": (nn.dot_product_attention, QKV),
    "causal": (causal_by_hand, QKV),
    "infinite": (infinite, QKV),
    "capped": (capped, QKV),
    "alibi": (alibi, (*QKV, (H,))),
    "relative": (relative, (*QKV, (7, H))),
    "key_bias": (key_bias, (*QKV, (B, S))),
    "learned_bias": (lambda q, k, v, b: nn.dot_product_attention(q, k, v, bias=b), (*QKV, (H, S, S))),
    "where": (where_softmax, QKV),
    "no_maximum": (plain_softmax, QKV),
    "guarded": (guarded, QKV),
    "heads_first": (heads_first, QKV),
    "padded": (padded, QKV),
    "given_mask": (given_mask, QKV),
    "dropout": (dropped(broadcast_dropout=False), QKV),
    "dropout_broadcast": (dropped(), QKV),
    "packed": (our(segment_ids=jnp.asarray(SEGMENTS), causal=True), QKV),
    "window": (our(window=(4, 2)), QKV),
    "grouped": (our(causal=True, window=5), (*FEW, (H, S, S))),
    "grouped_dropout": (grouped_dropout, FEW),
    "cross": (nn.dot_product_attention, ((B, 8, H, D), (B, 24, H, D), (B, 24, H, V))),
}


@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.full) if kind in ("grouped", "heads_first") else kind for kind in KINDS],
)  # the two come beside other axes
def test_equals_the_equations(kind: str, mode: str) -> None:
    function, shapes = KINDS[kind]
    with jax.enable_x64(True):
        assert_same(function, values(*shapes), mesh_of(**ALONE), mode)


@pytest.mark.parametrize("mode", ["ring", "all_to_all"])
@pytest.mark.parametrize(
    "kind",
    [
        *("alibi", "learned_bias", "grouped", "heads_first"),
        *(pytest.param(kind, marks=pytest.mark.full) for kind in ("grouped_dropout", "dropout")),
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


# --- what it costs ---


def compiled(function: Callable[..., Any], args: Any, mesh: Mesh, mode: str, gradients: bool) -> Any:
    run = split(function, args, mesh, mode)
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "sequence"))
    placed = [jax.device_put(x, sharding) for x in args]
    step = jax.grad(lambda *a: run(*a).sum(), (0, 1, 2)) if gradients else run
    return jax.jit(step, out_shardings=sharding).lower(*placed).compile()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", ["bidirectional", "causal", "dropout", "packed"])
def test_no_matrix_of_scores(kind: str, gradients: bool) -> None:
    """The longest block of scores is S/P by S/P."""
    long = 96
    shapes = ((B, long, H, D), (B, long, H, D), (B, long, H, V))
    function = {
        "bidirectional": our(),
        "causal": our(causal=True),
        "dropout": our(dropout_rate=0.2, dropout_rng=jax.random.key(0), deterministic=False, broadcast_dropout=False),
        "packed": our(segment_ids=jnp.arange(B * long).reshape(B, long) // 20),
    }[kind]
    text = compiled(function, values(*shapes, dtype=np.float32), mesh_of(**ALONE), "ring", gradients).as_text()
    for dims in re.findall(r"\b(?:f32|pred|u32|s32)\[([\d,]+)\]", text):
        sizes = [int(size) for size in dims.split(",")]
        assert sum(size >= 24 for size in sizes) <= 2 and not (long in sizes and 24 in sizes), dims
        assert math.prod(sizes) <= max(B * H * 24 * 24, B * long * H), dims


def test_ring_moves_keys_and_values_once_each_way() -> None:
    mesh, size = mesh_of(**ALONE), 4
    key, value = B * S * H * D * 4, B * S * H * V * 4
    args = values(*QKV, dtype=np.float32)

    def moved(gradients: bool) -> float:
        found = cjax.audit(compiled(nn.dot_product_attention, args, mesh, "ring", gradients), mesh)
        assert {c.kind for c in found.collectives} == {"collective-permute"}
        return sum(c.total_bytes for c in found.collectives)

    there = (size - 1) / size * (key + value)
    assert moved(False) == there
    assert moved(True) == 2 * there + key + value  # and gradients go all the way round


def test_all_to_all_moves_a_part_of_each_operand() -> None:
    mesh, size = mesh_of(**ALONE), 4
    args = values(*QKV, dtype=np.float32)
    total = sum(B * S * H * depth * 4 for depth in (D, D, V, V))
    found = cjax.audit(compiled(nn.dot_product_attention, args, mesh, "all_to_all", False), mesh)
    assert {c.kind for c in found.collectives} == {"all-to-all"}
    assert sum(c.total_bytes for c in found.collectives) == (size - 1) / size**2 * total


def test_causal_order_shares_the_work() -> None:
    """In zigzag order every device computes as many blocks, and as many in each turn but the first."""
    args = values(*QKV, dtype=np.float32)
    closed = simplify(jax.make_jaxpr(our(causal=True))(*args))
    (found,), _ = find_attentions(closed.jaxpr.eqns, closed.jaxpr.outvars)
    size = 4
    above = bounds(found, 2 * size, 2 * size, ())
    chunks = [(device, 2 * size - 1 - device) for device in range(size)]
    for turn in range(size):
        work = [
            sum(not above[i, j] < -1000 for i in chunks[device] for j in chunks[(device - turn) % size])
            for device in range(size)
        ]
        assert work == [3 if turn == 0 else 2] * size


def test_empty_blocks_are_not_computed() -> None:
    """Keys that are hidden by their position may hold anything: no product with them is made."""
    args = values(*QKV, dtype=np.float32)
    spoiled = args[1].at[:, 12:].set(jnp.nan)
    run = jax.jit(split(our(causal=True), args, mesh_of(**ALONE), "ring"))
    out = run(args[0], spoiled, args[2].at[:, 12:].set(jnp.nan))
    np.testing.assert_allclose(out[:, :12], run(*args)[:, :12], rtol=1e-6)
    assert np.isnan(out[:, 12:]).all()


# --- what is refused ---


def test_lengths_that_do_not_divide() -> None:
    args = values((B, 18, H, D), (B, 18, H, D), (B, 18, H, V), dtype=np.float32)
    with pytest.raises(ValueError, match=r"18 query positions.*4 ways.*'sequence'.*16 or 20"):
        split(our(), args, mesh_of(**ALONE), "ring")(*args)


def test_heads_that_do_not_divide() -> None:
    args = values((B, S, 6, D), (B, S, 6, D), (B, S, 6, V), dtype=np.float32)
    with pytest.raises(ValueError, match=r"6 heads.*4 ways.*sequence=ring"):
        split(our(), args, mesh_of(**ALONE), "all_to_all")(*args)
    with pytest.raises(ValueError, match="gather"):
        split(our(), args, mesh_of(**ALONE), "gather")(*args)
