"""What depth costs before the first step: Python's tracing and XLA's compilation, for 4 and for 48 unrolled layers.

    python experiments/bench_compile.py                       # 8 virtual CPU devices
    python experiments/bench_compile.py --devices h100:8      # compiled for absent H100s (extra `cjax[aot]`)
    python experiments/bench_compile.py --plan auto --trace-only

About 3 minutes on 2 cores. Expected: `ours` (parallelize + lower) at most 2 x `plain`, which is `jax.make_jaxpr` of a
train step written by hand for the same model; XLA's compilation of 48 layers at most 1.3 x that of 4, since a stack of
any depth compiles as one layer; `ops`, what XLA gets, are equal. An exception is init on CPUs under JAX 0.10, 1.3 to
1.5 x: its LLVM unrolls loops of at most 8 trips and vectorizes longer ones, so 12 layers take what 96 do.
All times are CPU seconds, medians of runs with empty caches.
"""

import argparse
import functools
import gc
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import flax.linen as nn
import jax.numpy as jnp
import optax
from flax import nnx

from cjax.mesh import compile_lowered, resolve_devices
from cjax.models.gpt import GPT, GPTConfig, loss
from cjax.program import Given
from cjax.program.compose import compose
from cjax.program.steps import make_init, make_step
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

DEPTHS = (4, 48)
HEADS, EMBED, VOCAB, SEQ, BATCH = 4, 32, 64, 16, 8
STAGES = ("capture", "compose", "trace", "lower")
OPTIMIZER = optax.adamw(1e-3)


class LinenDecoder(nn.Module):
    """The GPT of `cjax.models`, in Linen, its attention written out."""

    num_layers: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        embed = nn.Embed(VOCAB, EMBED)
        x = embed(tokens) + nn.Embed(SEQ, EMBED)(jnp.arange(SEQ))
        causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))
        for _ in range(self.num_layers):
            h = nn.LayerNorm()(x)
            q, k, v = (nn.DenseGeneral((HEADS, EMBED // HEADS))(h) for _ in range(3))
            scores = jnp.where(causal, jnp.einsum("bqhd,bkhd->bhqk", q, k), -1e9)
            mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
            x = x + nn.DenseGeneral(EMBED, axis=(-2, -1))(mixed)
            x = x + nn.Dense(EMBED)(nn.gelu(nn.Dense(4 * EMBED)(nn.LayerNorm()(x))))
        return embed.attend(nn.LayerNorm()(x))


def nnx_builder(num_layers: int) -> Callable[[nnx.Rngs], GPT]:
    config = GPTConfig(num_layers=num_layers, num_heads=HEADS, embed_dim=EMBED, context=SEQ, vocab_size=VOCAB)
    return lambda rngs: GPT(config, rngs=rngs)


MODELS: dict[str, Callable[[int], Any]] = {"NNX GPT": nnx_builder, "Linen decoder": LinenDecoder}


def by_hand(model: Any, batch: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(a train step as the model's author would write it, shapes of its arguments)."""
    if isinstance(model, nn.Module):
        graph, params = None, jax.eval_shape(model.init, jax.random.key(0), batch["inputs"])
    else:
        graph, params = nnx.split(nnx.eval_shape(lambda: model(nnx.Rngs(0))), nnx.Param)

    def rebuilt(params: Any) -> Any:
        return functools.partial(model.apply, params) if graph is None else nnx.merge(graph, params)

    def step(params: Any, state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
        value, grads = jax.value_and_grad(lambda params: loss(rebuilt(params), batch))(params)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, jax.eval_shape(OPTIMIZER.init, params), batch)


class Clock:
    """CPU seconds since the last reading."""

    def __init__(self) -> None:
        jax.clear_caches()
        gc.collect()
        self._last = time.process_time()

    def read(self) -> float:
        before, self._last = self._last, time.process_time()
        return self._last - before


def measure(
    make: Callable[[int], Any], num_layers: int, plan: str, devices: Sequence[Any], compiles: bool
) -> dict[str, float]:
    """CPU seconds of each stage, once, and the number of operations that XLA gets."""
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    step, arguments = by_hand(make(num_layers), batch)
    clock = Clock()
    jax.make_jaxpr(step)(*arguments)
    times = {"plain": clock.read()}
    clock = Clock()
    captured = capture(make(num_layers), loss, batch)
    times["capture"] = clock.read()
    parts = compose(Given(TraceSource(captured, batch), OPTIMIZER), plan, devices)
    times["compose"] = clock.read()
    traced = make_step(parts).trace(parts.state_shape, parts.with_batch(batch))
    times["trace"] = clock.read()
    lowered = traced.lower()
    times["lower"] = clock.read()
    times["ours"] = sum(times[stage] for stage in STAGES)
    if compiles:
        compile_lowered(lowered, devices)
        times["XLA step"] = clock.read()
        lowered_init = make_init(parts).lower(jax.eval_shape(lambda: jax.random.key(0)))
        times["lower init"] = clock.read()
        compile_lowered(lowered_init, devices)
        times["XLA init"] = clock.read()
        times["ops step"], times["ops init"] = num_operations(lowered), num_operations(lowered_init)
    return times


def num_operations(lowered: jax.stages.Lowered) -> int:
    return lowered.as_text().count(" = ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="data=8")
    parser.add_argument("--devices", help='such as "h100:8"; by default those that are here')
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trace-only", action="store_true", help="leave XLA out")
    options = parser.parse_args()
    devices = resolve_devices(options.devices)
    jax.config.update("jax_enable_compilation_cache", False)
    print(f"jax {jax.__version__}, python {platform.python_version()}, {platform.machine()}, plan {options.plan}")
    for name, make in MODELS.items():
        found = {}
        run = functools.partial(measure, make, plan=options.plan, devices=devices, compiles=not options.trace_only)
        run(2)  # imports and first calls
        for depth in DEPTHS:
            runs = [run(depth) for _ in range(options.rounds)]
            found[depth] = {stage: statistics.median(times[stage] for times in runs) for stage in runs[0]}
        shallow, deep = (found[depth] for depth in DEPTHS)
        print(f"\n{name:14s}" + "".join(f"{stage:>11s}" for stage in deep) + f"{'ours/plain':>12s}")
        for depth, times in found.items():
            row = "".join(f"{value:11.2f}" if isinstance(value, float) else f"{value:11d}" for value in times.values())
            print(f"{depth:3d} layers{'':5s}{row}{times['ours'] / times['plain']:12.2f}")
        for stage in ("XLA step", "XLA init"):
            if stage in deep:
                print(f"{stage}, {DEPTHS[1]} layers against {DEPTHS[0]}: {deep[stage] / shallow[stage]:.2f}")


if __name__ == "__main__":
    main()
