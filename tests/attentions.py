"""Attentions of many kinds, their equations split over a mesh, and both compared with their gradients."""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, PartitionSpec

from cjax.attention import attention as cjax_attention
from cjax.sharding.attention.split import attend
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


def with_sink(q: Any, k: Any, v: Any, sink: Any) -> Any:
    """Each head has a key that all of its queries see, of no value (as gpt-oss has it)."""
    i, j = positions()
    scores = jnp.where(i >= j, jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.2, -1e9)
    one_more = jnp.broadcast_to(sink[None, :, None, None], (*scores.shape[:3], 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, one_more], -1))[..., :-1]
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def with_sink_by_hand(q: Any, k: Any, v: Any, sink: Any) -> Any:
    """The same, of all keys, with the sink's own exponential in the divisor, and a maximum that has a gradient."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    sink = 4 * sink[None, :, None, None]
    most = jnp.maximum(scores.max(-1, keepdims=True), sink)
    exps = jnp.exp(scores - most)
    return jnp.einsum("bhqk,bkhd->bqhd", exps * (1 / (exps.sum(-1, keepdims=True) + jnp.exp(sink - most))), v)


def plus_one(q: Any, k: Any, v: Any) -> Any:
    """A softmax with 1 more in its sum: queries that no key is near to take nothing."""
    i, j = positions()
    scores = jnp.where((i >= j) & (j > 2), jnp.einsum("bqhd,bkhd->bhqk", q, k), -jnp.inf)
    most = jax.lax.stop_gradient(jnp.maximum(scores.max(-1, keepdims=True), 0))
    exps = jnp.exp(scores - most)
    return jnp.einsum("bhqk,bkhd->bqhd", exps * (1 / (exps.sum(-1, keepdims=True) + jnp.exp(-most))), v)


def plus_one_without_maximum(q: Any, k: Any, v: Any) -> Any:
    scores = jnp.exp(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", scores / (1 + scores.sum(-1, keepdims=True)), v)


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
    "sink": (with_sink, (*QKV, (H,))),
    "sink_by_hand": (with_sink_by_hand, (*QKV, (H,))),
    "plus_one": (plus_one, QKV),
    "plus_one_without_maximum": (plus_one_without_maximum, QKV),
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
