"""What cjax costs against the same model and sharding written by hand in plain JAX (`shared/plain_gpt.py`).

    python experiments/bench_overhead.py --counted            # FLOPs, bytes, collectives, peak memory on absent H100s
    python experiments/bench_overhead.py --timed --python     # step times on 8 virtual CPU devices; host time a step

About 3 minutes counted (extra `cjax[aot]`), 5 minutes timed on 2 quiet cores. Expected: counted quantities equal or
below the baseline's, step time within 1.05 of it. Timed runs interleave the two and print medians.
"""

import argparse
import platform
from collections.abc import Callable
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh
from shared import plain_gpt
from shared.timing import interleaved

import cjax
from cjax.mesh import compile_lowered, resolve_devices
from cjax.models.gpt import GPT, GPTConfig, loss

PLANS = {"data=1": (1, 1, 0), "data=8": (8, 1, 0), "zero=3 data=8": (8, 1, 3), "data=2 tensor=4": (2, 4, 0)}
H100_SIZES = plain_gpt.Sizes(num_layers=12, num_heads=12, embed=768, vocab=50304, seq=1024, batch=16)


def ours(sizes: plain_gpt.Sizes, plan: str, devices: Any) -> tuple[cjax.Program, dict[str, Any]]:
    config = GPTConfig(
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        embed_dim=sizes.embed,
        context=sizes.seq,
        vocab_size=sizes.vocab,
    )
    tokens = jax.ShapeDtypeStruct((sizes.batch, sizes.seq), jnp.int32)
    batch = {"inputs": tokens, "targets": tokens}
    program = cjax.parallelize(
        lambda rngs: GPT(config, rngs=rngs), loss, optax.adam(1e-3), batch, plan, devices=devices
    )
    return program, batch


def by_hand(sizes: plain_gpt.Sizes, plan: str, devices: Any) -> tuple[Any, Any, Any]:
    data, tensor, zero = PLANS[plan]
    grid = np.array(devices[: data * tensor]).reshape(data, tensor)
    mesh = Mesh(grid, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    return plain_gpt.make_step(sizes, mesh, zero)


def counted() -> None:
    """Compare the programs that XLA compiles for H100s."""
    print(f"\ncounted on the H100 compile: {H100_SIZES}")
    columns = f"{'GFLOP':>10s}{'GB accessed':>13s}{'GB received':>13s}{'collectives':>13s}{'peak GiB':>10s}"
    print(f"{'plan':26s}{columns}")
    for plan in PLANS:
        devices = resolve_devices("h100:8")[: np.prod(PLANS[plan][:2])]
        program, _ = ours(H100_SIZES, plan, devices)
        step, held, batch = by_hand(H100_SIZES, plan, devices)
        for name, lowered in (("cjax", program.lower()), ("by hand", step.lower(held, batch))):
            facts = cjax.audit(compile_lowered(lowered, devices))
            moved = [c for c in facts.collectives if c.bytes > 1024]
            peak = facts.memory.peak / 2**30 if facts.memory else float("nan")
            print(
                f"{plan:18s}{name:8s}{facts.flops / 1e9:10.1f}{facts.bytes_accessed / 1e9:13.2f}"
                f"{sum(c.total_bytes for c in moved) / 1e9:13.3f}{sum(c.count for c in moved):13d}{peak:10.2f}"
            )


def timed(rounds: int) -> None:
    """Compare step times, one step of each in turn."""
    sizes = plain_gpt.Sizes()
    print(f"\nstep time, ms, median of {rounds} interleaved steps: {sizes}")
    for plan in PLANS:
        mine, theirs = _steps(sizes, plan)
        a, b = interleaved(mine, theirs, rounds)
        print(f"{plan:18s} cjax {a:8.1f}   by hand {b:8.1f}   ratio {a / b:.3f}")


def _steps(sizes: plain_gpt.Sizes, plan: str) -> tuple[Callable[[], None], Callable[[], None]]:
    devices = jax.devices()[: int(np.prod(PLANS[plan][:2]))]
    program, _ = ours(sizes, plan, devices)
    state = program.init(0)
    step, held_shape, batch_shape = by_hand(sizes, plan, devices)
    held = plain_gpt.fresh(held_shape)
    rng = np.random.default_rng(0)
    batch = {n: rng.integers(0, sizes.vocab, s.shape, dtype=np.int32) for n, s in batch_shape.items()}
    placed = {n: jax.device_put(x, batch_shape[n].sharding) for n, x in batch.items()}

    def mine() -> None:
        nonlocal state
        state, metrics = program.step(state, batch)
        jax.block_until_ready(metrics)

    def theirs() -> None:
        nonlocal held
        held, metrics = step(held, placed)
        jax.block_until_ready((held, metrics))

    return mine, theirs


def host_time(num_leaves: int, rounds: int) -> None:
    """Compare the host's work for one step of a model of many small leaves."""

    def forward(params: Any, x: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    from flax import nnx

    class Chain(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.w = nnx.List([nnx.Param(0.1 * jax.random.normal(rngs.params(), (4, 4))) for _ in range(num_leaves)])

        def __call__(self, x: Any) -> Any:
            return forward([w[...] for w in self.w], x)

    batch = {"x": np.ones((8, 4), np.float32)}
    program = cjax.parallelize(
        lambda rngs: Chain(rngs),
        lambda model, batch: jnp.square(model(batch["x"])).mean(),
        optax.adam(1e-3),
        batch,
        "data=1",
        devices=jax.devices()[:1],
    )
    state = program.init(0)
    params = tuple(0.1 * jnp.ones((4, 4)) for _ in range(num_leaves))
    optimizer = optax.adam(1e-3)

    @jax.jit
    def step(params: Any, opt: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: jnp.square(forward(p, batch["x"])).mean())(params)
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt, value

    opt = optimizer.init(params)

    def mine() -> None:
        nonlocal state
        state, _ = program.step(state, batch)

    def theirs() -> None:
        nonlocal params, opt
        params, opt, _ = step(params, opt, batch)

    a, b = interleaved(mine, theirs, rounds)
    print(f"\nhost and device, ms a step, {num_leaves} leaves: cjax {a:.2f}   by hand {b:.2f}   ratio {a / b:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counted", action="store_true", help="compare compiled programs for 8 absent H100s")
    parser.add_argument("--timed", action="store_true", help="compare step times on virtual CPU devices")
    parser.add_argument("--python", action="store_true", help="compare host time for a tree of 500 leaves")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    print(f"jax {jax.__version__}, python {platform.python_version()}, {platform.machine()}")
    if options.counted:
        counted()
    if options.timed:
        timed(options.rounds)
    if options.python:
        host_time(500, 10 * options.rounds)


if __name__ == "__main__":
    main()
