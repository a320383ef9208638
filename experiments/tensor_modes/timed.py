"""A GPT's layers written in plain JAX with GSPMD's constraints alone, in each layout; what that moves, and wall time.

Nothing of cjax splits anything here: weights and activations are placed as `docs/design.md` has them for each mode, and
XLA's partitioner chooses what to send.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from shared.compiled import described
from shared.plain_gpt import norm
from shared.results import Results, Row
from shared.timing import interleaved

import cjax
from cjax import Plan
from cjax.mesh import compile_lowered, resolve_devices
from cjax.planner.hardware import hardware_of

from .models import Case

SIZES = Case("wall time", "blocks", width=512, heads=8, layers=4, length=128, batch=16)


class Layout:
    """Where a mode keeps things: batch and features where they are embed, and where they are heads or hidden.

    Args:
      axes: names and sizes of the mesh.
      batch_e, embed: axes of the batch and of the features of the residual stream.
      batch_h, hidden: the same inside attention and the MLP.
      rows_in, rows_out: axes of the contracted dim of weights that lead from embed to hidden, and back.
    """

    def __init__(self, axes: dict[str, int], batch_e: Any, embed: Any, batch_h: Any, hidden: Any, rows: Any) -> None:
        self.axes = axes
        self.batch_e, self.embed, self.batch_h, self.hidden = batch_e, embed, batch_h, hidden
        self.rows_in, self.rows_out = rows


def layout_of(plan: str) -> Layout:
    tensor = Plan.parse(plan).tensor
    p, d = tensor.size, tensor.depth
    if tensor.mode == "1d":
        return Layout({"tensor": p}, None, None, None, "tensor", (None, "tensor"))
    if tensor.mode == "3d":
        side = round(p ** (1 / 3))
        return Layout({"i": side, "j": side, "k": side}, ("i", "j"), "k", ("i", "k"), "j", (("k", "i"), ("j", "i")))
    q = round((p / d) ** 0.5)
    axes = {"depth": d, "row": q, "col": q}
    # Not ("depth", "row"): from that order the partitioner of JAX 0.10 to 0.12 makes a step whose gradients are wrong
    # (0.5 to 18 % off in norm) where depth and row are both above 1. Which rows a device has changes nothing else.
    batch = ("row", "depth")
    return Layout(axes, batch, "col", batch, "col", ("row", "row"))


def shapes_and_specs(case: Case, at: Layout) -> dict[str, tuple[tuple[int, ...], P]]:
    """Each weight's shape, stacked over layers, and its placement."""
    n, e, h, f = case.layers, case.width, case.heads, 4 * case.width
    d = e // h
    inner, outer = P(None, at.rows_in, at.hidden), P(None, at.rows_out, at.embed)
    found: dict[str, tuple[tuple[int, ...], P]] = {"scale": ((e,), P(at.embed))}
    for name in "qkv":
        found[name] = ((n, e, h, d), P(None, at.rows_in, at.hidden, None))
        found[f"{name}_bias"] = ((n, h, d), P(None, at.hidden, None))
    found["out"] = ((n, h, d, e), P(None, at.rows_out, None, at.embed))
    found |= {"up": ((n, e, f), inner), "up_bias": ((n, f), P(None, at.hidden)), "down": ((n, f, e), outer)}
    for name in ("out_bias", "down_bias", "ln1_scale", "ln1_bias", "ln2_scale", "ln2_bias"):
        found[name] = ((n, e), P(None, at.embed))
    return found


def make_step(case: Case, plan: str, devices: Any, dtype: Any) -> tuple[Callable[..., Any], Any, Any]:
    """(jitted step, shapes of its state with placements, the same of its batch): weights and Adam in float32."""
    at = layout_of(plan)
    grid = np.array(devices).reshape(*at.axes.values())
    mesh = Mesh(grid, tuple(at.axes), axis_types=(AxisType.Auto,) * grid.ndim)
    weights = shapes_and_specs(case, at)

    def pin(x: jax.Array, *spec: Any) -> jax.Array:
        return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def linear(equation: str, x: jax.Array, w: jax.Array, *spec: Any) -> jax.Array:
        return pin(jnp.einsum(equation, x.astype(dtype), w.astype(dtype)), *spec)

    def block(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        stream, heads = (at.batch_e, None, at.embed), (at.batch_h, None, at.hidden, None)
        hidden = (at.batch_h, None, at.hidden)
        y = pin(norm(x, w["ln1_scale"], w["ln1_bias"]), *stream)
        q, k, v = (linear("bse,ehd->bshd", y, w[n], *heads) + w[f"{n}_bias"].astype(dtype) for n in "qkv")
        mixed = pin(jax.nn.dot_product_attention(q, k, v, is_causal=True), *heads)
        x = x + linear("bshd,hde->bse", mixed, w["out"], *stream) + w["out_bias"]
        y = pin(norm(x, w["ln2_scale"], w["ln2_bias"]), *stream)
        y = linear("bse,ef->bsf", y, w["up"], *hidden) + w["up_bias"].astype(dtype)
        y = jax.nn.gelu(y, approximate=True)
        return pin(x + linear("bsf,fe->bse", y, w["down"], *stream) + w["down_bias"], *stream), None

    def loss(w: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        x = pin(batch["x"][..., None] * w["scale"], at.batch_e, None, at.embed)
        x, _ = lax.scan(block, x, {name: each for name, each in w.items() if name != "scale"})
        return jnp.mean(jnp.square(x))

    optimizer = optax.adam(1e-3)

    def step(held: Any, batch: Any) -> Any:
        w, opt = held
        value, grads = jax.value_and_grad(loss)(w, batch)
        grads = {name: pin(g, *weights[name][1]) for name, g in grads.items()}
        updates, opt = optimizer.update(grads, opt, w)
        return (optax.apply_updates(w, updates), opt), {"loss": value, "grad_norm": optax.tree.norm(grads)}

    def shape(size: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(size, jnp.float32, sharding=NamedSharding(mesh, spec))

    held = {name: shape(size, spec) for name, (size, spec) in weights.items()}
    adam, *rest = jax.eval_shape(optimizer.init, held)
    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
    opt = (adam._replace(count=count, mu=held, nu=held), *rest)
    batch = {"x": shape((case.batch, case.length), P(at.batch_e))}
    placed = jax.tree.map(lambda s: s.sharding, (held, opt))
    return jax.jit(step, donate_argnums=0, out_shardings=(placed, NamedSharding(mesh, P()))), (held, opt), batch


def counted(results: Results, case: Case, plan: str) -> Row:
    """What GSPMD's own form of the layers moves and holds, compiled for H100s."""

    def make() -> Row:
        start = time.perf_counter()
        devices = resolve_devices(f"h100:{Plan.parse(plan).model_size}")
        step, held, batch = make_step(case, plan, devices, jnp.bfloat16)
        row = described(cjax.audit(compile_lowered(step.lower(held, batch), devices)), hardware_of(devices))
        return row | {"seconds": round(time.perf_counter() - start, 1), "jax": jax.__version__}

    row = results.get({"part": "a: GSPMD", "plan": plan} | asdict(case), make)
    gib = {name: row[name] / 2**30 for name in ("received", "peak")}
    print(f"  GSPMD alone {plan:18s} received {gib['received']:8.3f} GiB, peak {gib['peak']:7.2f} GiB", flush=True)
    return row


def fresh(shape: Any) -> Any:
    """Arrays for such a state: weights small and random, all else zero."""
    weights, opt = shape
    rng = np.random.default_rng(0)
    drawn = {
        n: jax.device_put((0.02 * rng.standard_normal(s.shape)).astype(np.float32), s.sharding)
        for n, s in weights.items()
    }
    return drawn, jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), opt)


# plan: what it is timed against, by devices
GSPMD = ["tensor=4", "tensor=2d:4", "tensor=8", "tensor=2.5d:8/2", "tensor=3d:8"]


def timed(results: Results, case: Case, plan: str, rounds: int) -> Row:
    """Median step times of cjax and of GSPMD's own form, one step of each in turn, on virtual CPU devices."""
    devices = jax.devices()[: Plan.parse(plan).model_size]

    def make() -> Row:
        program = cjax.parallelize(case.build, case.loss, optax.adam(1e-3), case.batch_shape, plan, devices=devices)
        state = program.init(0)
        step, held_shape, batch_shape = make_step(case, plan, devices, jnp.float32)
        held = fresh(held_shape)
        batch = {"x": np.random.default_rng(1).standard_normal((case.batch, case.length)).astype(np.float32)}
        placed = {"x": jax.device_put(batch["x"], batch_shape["x"].sharding)}

        def mine() -> None:
            nonlocal state
            state, metrics = program.step(state, batch)
            jax.block_until_ready(metrics)

        def theirs() -> None:
            nonlocal held
            held, metrics = step(held, placed)
            jax.block_until_ready((held, metrics))

        a, b = interleaved(mine, theirs, rounds)
        return {"cjax_ms": a, "gspmd_ms": b, "jax": jax.__version__}

    row = results.get({"part": "d", "plan": plan, "rounds": rounds} | asdict(replace(case, name="wall time")), make)
    ratio = row["cjax_ms"] / row["gspmd_ms"]
    print(f"{plan:18s} cjax {row['cjax_ms']:8.1f} ms   GSPMD alone {row['gspmd_ms']:8.1f} ms   ratio {ratio:.3f}")
    return row
