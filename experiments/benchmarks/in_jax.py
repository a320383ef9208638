"""The models of `bench_gpu.py` by hand in plain JAX, as an expert writes them for one GPU; nothing of cjax or Flax.

Layers are stacked and scanned. Matmuls and the residual stream are in bfloat16, weights, norms and the loss in float32;
attention is cuDNN's flash kernel. One jitted step with AdamW, which donates its state. A scan keeps whatever a layer's
derivative reads, also what float32 norms and GELUs are made of: 15.6 GiB of GPT-2's 16 x 1024 tokens. So by default it
keeps only what matmuls and attention gave (`remat="dots"`): 7.7.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from .in_jax_weights import Weights, fresh
from .in_jax_weights import num_params as num_params
from .models import Row

ACT: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gpt": functools.partial(jax.nn.gelu, approximate=True),
    "bert": functools.partial(jax.nn.gelu, approximate=False),
    "vit": functools.partial(jax.nn.gelu, approximate=False),
    "llama": jax.nn.silu,
    "t5": jax.nn.relu,
    "mixture": jax.nn.silu,
}


def norm(x: jax.Array, w: Weights, name: str, epsilon: float) -> jax.Array:
    """LayerNorm, or RMSNorm where there is no bias; in float32."""
    wide = x.astype(jnp.float32)
    squares = jnp.square(wide).mean(-1, keepdims=True)
    if f"{name}_bias" not in w:
        return (wide * (lax.rsqrt(squares + epsilon) * w[name])).astype(x.dtype)
    mean = wide.mean(-1, keepdims=True)
    # One pass over x instead of two; rounding may leave less than nothing.
    variance = jnp.maximum(squares - jnp.square(mean), 0)
    return ((wide - mean) * (lax.rsqrt(variance + epsilon) * w[name]) + w[f"{name}_bias"]).astype(x.dtype)


def linear(x: jax.Array, w: Weights, name: str, dims: int = 1) -> jax.Array:
    y = jnp.tensordot(x, w[name], dims)
    return y + w[f"{name}_bias"] if f"{name}_bias" in w else y


def turned(x: jax.Array, angles: jax.Array) -> jax.Array:
    """Rotary positions: angles [length, half a head]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rotary(config: Any, length: int) -> jax.Array:
    """Angles of Llama 3.1: long wavelengths are stretched, those between two bounds partly."""
    half = getattr(config, "head_dim", None) or config.embed_dim // config.num_heads
    plain = config.rope_theta ** (-np.arange(0, half, 2) / half)
    turns = config.rope_context * plain / (2 * np.pi)
    kept = np.clip((turns - config.rope_low) / (config.rope_high - config.rope_low), 0, 1)
    each = plain * (kept + (1 - kept) / config.rope_factor)
    return jnp.arange(length)[:, None] * jnp.asarray(each, jnp.float32)


def relative(config: Any, length: int, both_ways: bool) -> np.ndarray:
    """int[length, length]: T5's bucket of each query and key."""
    distance = np.arange(length)[None] - np.arange(length)[:, None]
    num = config.num_buckets // 2 if both_ways else config.num_buckets
    size = np.abs(distance) if both_ways else np.maximum(-distance, 0)
    exact = num // 2
    ratio = np.maximum(size, exact).astype(np.float32) / np.float32(exact)
    share = np.log(ratio) / np.float32(math.log(config.max_distance / exact))
    wide = np.minimum(exact + (share * np.float32(num - exact)).astype(np.int32), num - 1)
    return np.where(size < exact, size, wide) + (num * (distance > 0) if both_ways else 0)


def experts(y: jax.Array, w: Weights, act: Callable[[jax.Array], jax.Array], top: int) -> jax.Array:
    """Of each token's `top` experts the weighted sum; tokens are sorted by expert for it."""
    tokens, num = y.reshape(-1, y.shape[-1]), w["router"].shape[-1]
    weights, which = lax.top_k(jax.nn.softmax((tokens @ w["router"]).astype(jnp.float32)), top)
    expert = which.reshape(-1)
    order, sizes = jnp.argsort(expert), jnp.bincount(expert, length=num)
    given = tokens[order // top]
    inner = act(lax.ragged_dot(given, w["gate"], sizes)) * lax.ragged_dot(given, w["up"], sizes)
    made = lax.ragged_dot(inner, w["down"], sizes)[jnp.argsort(order)].reshape(-1, top, y.shape[-1])
    return (made * weights[..., None].astype(y.dtype)).sum(1).reshape(y.shape)


@dataclass(frozen=True)
class Stack:
    """Layers of one kind that are scanned.

    Attributes:
        act: between the layers of the MLP.
        after: norms come after the branches, as in BERT.
        scale: of scores; None for 1 / sqrt(head_dim).
        kernel: of attention; None for plain XLA.
        remat: "none"; "dots", elementwise operations are recomputed; "block", everything is.
        unroll: layers that a turn of the scan's loop computes.
        top: experts that a token is sent to, of a mixture.
    """

    act: Callable[[jax.Array], jax.Array]
    epsilon: float
    causal: bool
    after: bool
    scale: float | None
    kernel: Any
    remat: str
    unroll: int
    top: int

    def __call__(
        self, x: jax.Array, layers: Weights, angles: Any = None, bias: Any = None, memory: Any = None, seen: Any = None
    ) -> jax.Array:
        """angles: of rotary positions; bias: of scores; memory: what cross-attention reads; seen: int[batch], keys."""

        def attend(y: jax.Array, other: jax.Array, w: Weights, name: str, causal: bool, bias: Any) -> jax.Array:
            q, k, v = linear(y, w, f"{name}q"), linear(other, w, f"{name}k"), linear(other, w, f"{name}v")
            if angles is not None:
                q, k = turned(q, angles), turned(k, angles)
            # Rounded here, so that the gradients of all layers are summed in float32.
            bias = None if bias is None else bias.astype(q.dtype)
            mixed = jax.nn.dot_product_attention(
                q, k, v, bias, is_causal=causal, scale=self.scale, implementation=self.kernel,
                key_value_seq_lengths=seen,
            )  # fmt: skip
            return linear(mixed, w, f"{name}out", 2)

        def mlp(y: jax.Array, w: Weights) -> jax.Array:
            if "router" in w:
                return experts(y, w, self.act, self.top)
            up = linear(y, w, "up")
            return linear(self.act(linear(y, w, "gate")) * up if "gate" in w else self.act(up), w, "down")

        def layer(x: jax.Array, w: Weights) -> tuple[jax.Array, None]:
            if self.after:
                x = norm(x + attend(x, x, w, "", self.causal, bias), w, "norm1", self.epsilon)
                return norm(x + mlp(x, w), w, "norm2", self.epsilon), None
            y = norm(x, w, "norm1", self.epsilon)
            x = x + attend(y, y, w, "", self.causal, bias)
            if memory is not None:
                x = x + attend(norm(x, w, "norm3", self.epsilon), memory, w, "cross_", False, None)
            return x + mlp(norm(x, w, "norm2", self.epsilon), w), None

        if self.remat != "none":
            kept = None if self.remat == "block" else _keeps
            layer = jax.checkpoint(layer, policy=kept, prevent_cse=False)
        return lax.scan(layer, x, layers, unroll=self.unroll)[0]


def _keeps(primitive: Any, *_: Any, **__: Any) -> bool:
    """Products and what attention gave: the rest is elementwise, and a scan would keep all of it, half in float32."""
    return primitive.name in ("dot_general", "ragged_dot_general") or primitive.name.startswith("dot_product_attention")


def loss_of(
    row: Row,
    weights: Weights,
    batch: dict[str, Any],
    dtype: Any,
    remat: str = "dots",
    unroll: int = 1,
    on_gpu: bool | None = None,
) -> jax.Array:
    """Mean cross-entropy in nats, matmuls in `dtype`; `on_gpu` is asked of JAX where it is not given."""
    config, kind = row.config, row.kind
    on_gpu = jax.default_backend() == "gpu" if on_gpu is None else on_gpu
    act = ACT["gpt"] if getattr(config, "gated", False) else ACT[kind]
    epsilon = getattr(config, "norm_epsilon", 1e-5)
    scale = 1.0 if kind == "t5" else None
    stack = functools.partial(
        Stack,
        act,
        epsilon,
        after=kind == "bert",
        scale=scale,
        remat=remat,
        unroll=unroll,
        top=getattr(config, "top", 0),
        kernel="cudnn" if on_gpu and dtype == jnp.bfloat16 else None,
    )

    def rounded(path: Any, w: jax.Array) -> jax.Array:
        return w if "norm" in path[-1].key or "relative" in path[-1].key else w.astype(dtype)

    low = jax.tree_util.tree_map_with_path(rounded, weights)

    if kind == "vit":
        return _vit(row, low, batch, dtype, stack(causal=False), epsilon)
    length, angles, bias, memory = row.seq, None, None, None
    # Tables are looked up in float32: the gradients of one token's rows are many.
    x = weights["embed"][batch["inputs"]]
    if kind in ("gpt", "bert"):
        x = x + weights["positions"][:length]
    if kind == "bert":
        x = norm(x + weights["types"][0], low, "norm", epsilon)
    if kind in ("llama", "mixture"):
        angles = rotary(config, length)
    if kind == "t5":
        both = low["encoder_relative"][relative(config, length, True)].transpose(2, 0, 1)[None]
        bias = low["relative"][relative(config, length, False)].transpose(2, 0, 1)[None]
        memory = stack(causal=False)(weights["embed"][batch["source"]].astype(dtype), low["encoder"], bias=both)
        memory = norm(memory, low, "encoder_norm", epsilon)
    x = stack(causal=kind != "bert")(x.astype(dtype), low["layers"], angles, bias, memory)
    if kind == "bert":
        x = norm(act(linear(x, low, "dense")), low, "head_norm", epsilon)
    else:
        x = norm(x, low, "norm", epsilon)
    if config.tied:
        low["head"] = low["embed"].T * (config.embed_dim**-0.5 if kind == "t5" else 1)
    return _cross_entropy(linear(x, low, "head"), batch["targets"])


def _vit(row: Row, w: Weights, batch: dict[str, Any], dtype: Any, stack: Stack, epsilon: float) -> jax.Array:
    images, size = batch["images"].astype(dtype), row.config.patch_size
    count, side = images.shape[0], row.config.image_size // size
    images = images.reshape(count, side, size, side, size, 3).swapaxes(2, 3).reshape(count, side * side, size, size, 3)
    x = linear(images, w, "patches", 3)
    first = jnp.broadcast_to(w["first"], (count, 1, row.config.embed_dim))
    x = jnp.concatenate([first, x], axis=1) + w["positions"]
    # JAX hands no odd lengths to cuDNN: a token more, that nobody sees.
    seen = jnp.full(count, row.tokens, jnp.int32) if row.tokens % 2 else None
    x = stack(jnp.pad(x, ((0, 0), (0, row.tokens % 2), (0, 0))), w["layers"], seen=seen)
    # Norms are of each token: those of the others are nobody's.
    return _cross_entropy(linear(norm(x[:, 0], w, "norm", epsilon), w, "head"), batch["labels"])


def _cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def train(
    row: Row, low: bool, remat: str, unroll: int = 1, on_gpu: bool | None = None
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """(initial state of a key, (state and loss) of state and batch), neither of them jitted."""
    optimizer = optax.adamw(1e-4, weight_decay=1e-2)

    def start(key: jax.Array) -> Any:
        weights = fresh(row, key)
        return weights, optimizer.init(weights)

    def step(state: Any, batch: dict[str, Any]) -> Any:
        weights, moments = state
        dtype = jnp.bfloat16 if low else jnp.float32
        value, grads = jax.value_and_grad(lambda given: loss_of(row, given, batch, dtype, remat, unroll, on_gpu))(
            weights
        )
        updates, moments = optimizer.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    return start, step


def make_step(
    row: Row, batch: dict[str, Any], low: bool = True, remat: str = "dots"
) -> tuple[Callable[[], jax.Array], Callable[[], int]]:
    """(a step that gives its loss, peak bytes so far), on the first device."""
    device = jax.devices()[0]
    start, step = train(row, low, remat)
    given = jax.device_put(batch, device)
    state = jax.jit(start)(jax.device_put(jax.random.key(0), device))
    compiled = jax.jit(step, donate_argnums=0)

    def run() -> jax.Array:
        nonlocal state
        state, value = compiled(state, given)
        return value

    def peak() -> int:
        return (device.memory_stats() or {}).get("peak_bytes_in_use", 0)

    return run, peak
