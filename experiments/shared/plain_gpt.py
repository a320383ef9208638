"""GPT and its training step written by hand in plain JAX: the baseline that cjax is measured against.

Nothing of cjax or Flax is used. Layers are stacked and scanned, shardings are written out as an expert would:
Megatron's split over `tensor`, ZeRO over `data`, weights gathered where they are used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

# Where each weight is split over `tensor`, by dim; layers are stacked on dim 0.
TENSOR_DIM = {
    "wte": 0, "wpe": None, "norm_scale": None, "norm_bias": None,
    "q": 2, "k": 2, "v": 2, "q_bias": 1, "k_bias": 1, "v_bias": 1, "out": 1, "out_bias": None,
    "up": 2, "up_bias": 1, "down": 1, "down_bias": None,
    "ln1_scale": None, "ln1_bias": None, "ln2_scale": None, "ln2_bias": None,
}  # fmt: skip
TOP = ("wte", "wpe", "norm_scale", "norm_bias")
WHOLE = P()


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of one batch."""

    num_layers: int = 8
    num_heads: int = 8
    embed: int = 512
    vocab: int = 8192
    seq: int = 128
    batch: int = 8

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        n, e, h, f = self.num_layers, self.embed, self.num_heads, 4 * self.embed
        d = e // h
        return {
            "wte": (self.vocab, e), "wpe": (self.seq, e), "norm_scale": (e,), "norm_bias": (e,),
            "q": (n, e, h, d), "k": (n, e, h, d), "v": (n, e, h, d),
            "q_bias": (n, h, d), "k_bias": (n, h, d), "v_bias": (n, h, d), "out": (n, h, d, e), "out_bias": (n, e),
            "up": (n, e, f), "up_bias": (n, f), "down": (n, f, e), "down_bias": (n, e),
            "ln1_scale": (n, e), "ln1_bias": (n, e), "ln2_scale": (n, e), "ln2_bias": (n, e),
        }  # fmt: skip


def specs(sizes: Sizes, mesh: Mesh, zero: bool) -> dict[str, P]:
    """Placement of each weight: over `tensor`, and with `zero` also over `data` on the largest dim that is left."""
    found = {}
    for name, shape in sizes.shapes.items():
        entries: list[str | None] = [None] * len(shape)
        if TENSOR_DIM[name] is not None and mesh.shape["tensor"] > 1:
            entries[TENSOR_DIM[name]] = "tensor"
        if zero and mesh.shape["data"] > 1:
            first = 0 if name in TOP else 1
            free = [i for i in range(first, len(shape)) if entries[i] is None and shape[i] % mesh.shape["data"] == 0]
            if free:
                entries[max(free, key=lambda i: shape[i])] = "data"
        found[name] = P(*entries)
    return found


def norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.maximum(jnp.square(x).mean(-1, keepdims=True) - jnp.square(mean), 0)
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * scale) + bias


def make_step(sizes: Sizes, mesh: Mesh, zero: int) -> tuple[Callable[..., Any], Any, Any]:
    """(jitted step, shapes of its state with placements, shapes of its batch)."""
    used = specs(sizes, mesh, zero=False)
    kept = specs(sizes, mesh, zero=zero == 3)
    state = specs(sizes, mesh, zero=zero >= 1)

    def pin(x: jax.Array, spec: P) -> jax.Array:
        return x if mesh.size == 1 else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def use(weights: dict[str, jax.Array], layer: bool) -> dict[str, jax.Array]:
        return {n: pin(w, P(*used[n][1:]) if layer else used[n]) for n, w in weights.items()}

    def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = use(w, layer=True)
        h = norm(x, w["ln1_scale"], w["ln1_bias"])
        q, k, v = (jnp.einsum("bse,ehd->bshd", h, w[n]) + w[f"{n}_bias"] for n in "qkv")
        q, k, v = (pin(a, P("data", None, "tensor", None)) for a in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + pin(jnp.einsum("bshd,hde->bse", mixed, w["out"]), P("data", None, None)) + w["out_bias"]
        h = norm(x, w["ln2_scale"], w["ln2_bias"])
        h = pin(jnp.einsum("bse,ef->bsf", h, w["up"]), P("data", None, "tensor")) + w["up_bias"]
        h = jax.nn.gelu(h, approximate=True)
        return x + pin(jnp.einsum("bsf,fe->bse", h, w["down"]), P("data", None, None)) + w["down_bias"], None

    if zero == 3:
        # Gather again in the backward pass: gathered weights of all layers at once are what ZeRO-3 avoids.
        block = jax.checkpoint(block, policy=lambda p, *_, **__: p.name != "sharding_constraint", prevent_cse=False)

    def loss(weights: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        top = use({n: weights[n] for n in TOP}, layer=False)
        x = pin(jnp.take(top["wte"], batch["inputs"], axis=0), P("data", None, None)) + top["wpe"]
        x, _ = lax.scan(block, x, {n: w for n, w in weights.items() if n not in TOP})
        x = norm(x, top["norm_scale"], top["norm_bias"])
        logits = pin(jnp.einsum("bse,ve->bsv", x, top["wte"]), P("data", None, "tensor"))
        logprobs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logprobs, batch["targets"][..., None], -1).mean()

    optimizer = optax.adam(1e-3)

    def step(held: Any, batch: Any) -> Any:
        weights, opt = held
        value, grads = jax.value_and_grad(loss)(weights, batch)
        size = optax.tree.norm(grads)
        grads = {n: pin(g, state[n]) for n, g in grads.items()}
        local = {n: pin(w, state[n]) for n, w in weights.items()}
        updates, opt = optimizer.update(grads, opt, local)
        return (optax.apply_updates(local, updates), opt), {"loss": value, "grad_norm": size}

    weights_shape = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in sizes.shapes.items()}
    opt_shape = jax.eval_shape(optimizer.init, weights_shape)
    weights_sharding = {n: NamedSharding(mesh, kept[n]) for n in kept}
    moments = {n: NamedSharding(mesh, state[n]) for n in state}
    whole = NamedSharding(mesh, WHOLE)
    opt_sharding = (opt_shape[0]._replace(count=whole, mu=moments, nu=moments), *opt_shape[1:])
    rows = NamedSharding(mesh, P("data"))
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.seq), jnp.int32, sharding=rows)
    held = jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        (weights_shape, opt_shape),
        (weights_sharding, opt_sharding),
    )
    jitted = jax.jit(step, donate_argnums=0, out_shardings=((weights_sharding, opt_sharding), whole))
    return jitted, held, {"inputs": tokens, "targets": tokens}


def fresh(shape: Any, seed: int = 0) -> Any:
    """Arrays for such a state: weights small and random, moments zero."""
    weights, opt = shape
    keys = jax.random.split(jax.random.key(seed), len(weights))

    def draw(key: jax.Array, s: Any) -> jax.Array:
        return jax.device_put(0.02 * jax.random.normal(key, s.shape, s.dtype), s.sharding)

    drawn = {n: draw(key, s) for key, (n, s) in zip(keys, weights.items(), strict=True)}
    zeros = jax.tree.map(lambda s: jax.device_put(jnp.zeros(s.shape, s.dtype), s.sharding), opt)
    return drawn, zeros
