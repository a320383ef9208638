"""Random Flax models and losses from a seed: first as plain data, a spec, then as a Linen or NNX model of it.

A spec can be printed, kept as a row of a table, and shrunk by dropping parts of it. Everything is float64, so that what
is wrong can be told from what is rounded.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from search.blocks import BLOCKS, Block

from cjax.tree import PyTree

Spec = dict[str, Any]
WIDE = jnp.float64
ROWS = 16

WRAPS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "residual": lambda x, y: x + 0.5 * y,
    "bounded": lambda x, y: jnp.tanh(y) + 0.1 * y,
    "raw": lambda x, y: y,
}


def normal(key: jax.Array, shape: tuple[int, ...], dtype: Any = WIDE) -> jax.Array:
    fan_in = shape[-2] if len(shape) > 1 else 4
    return jax.random.normal(key, shape, dtype) / np.sqrt(max(1, fan_in))


# -- what a block makes its parameters with ---------------------------------------------------------------------------
def pool(how: str, x: jax.Array, window: int, stride: int) -> jax.Array:
    return {"max": nn.max_pool, "avg": nn.avg_pool}[how](x, (window,), (stride,), "SAME")


class LinenMaker:
    def __init__(self, module: nn.Module, ids: jax.Array, train: bool) -> None:
        self.module, self.ids, self.train = module, ids, train
        self.pool = pool

    def param(self, name: str, shape: tuple[int, ...], dtype: str = "float64") -> jax.Array:
        return self.module.param(name, normal, shape, jnp.dtype(dtype))

    def integers(self, name: str, size: int) -> jax.Array:
        return self.module.param(name, lambda key: jnp.arange(size)[::-1].astype(jnp.int32))

    def keep(self, name: str, shape: tuple[int, ...], update: Callable[[jax.Array], jax.Array]) -> None:
        held = self.module.variable("kept", name, jnp.zeros, shape, WIDE)
        if self.train and not self.module.is_initializing():
            held.value = update(held.value)

    def key(self) -> Any:
        return self.module.make_rng("dropout") if self.train and self.module.has_rng("dropout") else None

    def layer(self, name: str, kind: str, x: jax.Array, **given: Any) -> jax.Array:
        typed: Any = {"param_dtype": WIDE, "name": name}
        match kind:
            case "dense":
                return nn.Dense(given["features"], **typed)(x)
            case "attention":
                heads, width = given["heads"], x.shape[-1]
                return nn.MultiHeadDotProductAttention(heads, qkv_features=2 * heads, out_features=width, **typed)(
                    x, mask=given["mask"]
                )
            case "conv":
                return nn.Conv(given["features"], (given["kernel"],), **typed)(x)
            case "layer_norm":
                return nn.LayerNorm(epsilon=1e-2, **typed)(x)
            case "rms_norm":
                return nn.RMSNorm(epsilon=1e-2, **typed)(x)
            case "batch_norm":
                return nn.BatchNorm(not self.train, momentum=given["momentum"], epsilon=1e-2, **typed)(x)
            case "embed":
                return nn.Embed(given["num"], given["features"], **typed)(x)
            case "lstm" | "gru":
                cell = {"lstm": nn.OptimizedLSTMCell, "gru": nn.GRUCell}[kind]
                return nn.RNN(cell(given["features"], param_dtype=WIDE), name=name)(x)
            case "dropout":
                dims = (1,) if given["broadcast"] else ()
                return nn.Dropout(given["rate"], broadcast_dims=dims, deterministic=not self.train)(x)
        raise AssertionError(kind)


class Kept(nnx.Variable):
    """State of a block of ours."""


class NNXMaker:
    """Looks up in `module` what `NNXBlock` made."""

    def __init__(self, module: Any, ids: jax.Array) -> None:
        self.module, self.ids, self.pool = module, ids, pool

    def param(self, name: str, shape: tuple[int, ...], dtype: str = "float64") -> jax.Array:
        return getattr(self.module, name).get_value()

    def integers(self, name: str, size: int) -> jax.Array:
        return getattr(self.module, name).get_value()

    def keep(self, name: str, shape: tuple[int, ...], update: Callable[[jax.Array], jax.Array]) -> None:
        held = getattr(self.module, name)
        held.set_value(update(held.get_value()))

    def key(self) -> Any:
        return self.module.stream()

    def layer(self, name: str, kind: str, x: jax.Array, **given: Any) -> jax.Array:
        layer = getattr(self.module, name)
        return layer(x, mask=given["mask"]) if kind == "attention" else layer(x)


class Recorder:
    """Notes what a block asks for, so that an NNX module can make it in its constructor."""

    def __init__(self, ids: jax.Array) -> None:
        self.ids, self.pool = ids, pool
        self.params: dict[str, tuple[tuple[int, ...], str]] = {}
        self.tables: dict[str, int] = {}
        self.kept: dict[str, tuple[int, ...]] = {}
        self.layers: dict[str, Callable[[nnx.Rngs], nnx.Module]] = {}
        self.draws = False

    def param(self, name: str, shape: tuple[int, ...], dtype: str = "float64") -> jax.Array:
        self.params[name] = (shape, dtype)
        return jnp.zeros(shape, dtype)

    def integers(self, name: str, size: int) -> jax.Array:
        self.tables[name] = size
        return jnp.arange(size, dtype=jnp.int32)

    def keep(self, name: str, shape: tuple[int, ...], update: Callable[[jax.Array], jax.Array]) -> None:
        self.kept[name] = shape

    def key(self) -> Any:
        self.draws = True
        return jax.random.key(0)

    def layer(self, name: str, kind: str, x: jax.Array, **given: Any) -> jax.Array:
        make = self.layers[name] = nnx_layer(kind, x.shape[-1], given)
        out = make(nnx.Rngs(0))
        return out(x, mask=given["mask"]) if kind == "attention" else out(x)  # type: ignore[operator]


def nnx_layer(kind: str, width: int, given: dict[str, Any]) -> Callable[[nnx.Rngs], Any]:
    def make(rngs: nnx.Rngs) -> Any:
        typed: Any = {"param_dtype": WIDE, "rngs": rngs}
        match kind:
            case "dense":
                return nnx.Linear(width, given["features"], **typed)
            case "attention":
                heads = given["heads"]
                return nnx.MultiHeadAttention(
                    heads, width, qkv_features=2 * heads, out_features=width, decode=False, **typed
                )
            case "conv":
                return nnx.Conv(width, given["features"], (given["kernel"],), **typed)
            case "layer_norm":
                return nnx.LayerNorm(width, epsilon=1e-2, **typed)
            case "rms_norm":
                return nnx.RMSNorm(width, epsilon=1e-2, **typed)
            case "batch_norm":
                return nnx.BatchNorm(width, momentum=given["momentum"], epsilon=1e-2, **typed)
            case "embed":
                return nnx.Embed(given["num"], given["features"], **typed)
            case "lstm" | "gru":
                cell = {"lstm": nnx.OptimizedLSTMCell, "gru": nnx.GRUCell}[kind]
                return nnx.RNN(cell(width, given["features"], **typed), rngs=rngs)
            case "dropout":
                dims = (1,) if given["broadcast"] else ()
                return nnx.Dropout(given["rate"], broadcast_dims=dims, rngs=rngs)
        raise AssertionError(kind)

    return make


# -- the models -------------------------------------------------------------------------------------------------------
def run_part(maker: Any, x: jax.Array, part: Spec) -> jax.Array:
    y = BLOCKS[part["op"]].run(maker, x, **part["config"])
    assert y.shape == x.shape and y.dtype == x.dtype, (part, x.shape, y.shape, y.dtype)
    return WRAPS[part["wrap"]](x, y)


class LinenBlock(nn.Module):
    part: Any
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return run_part(LinenMaker(self, ids, self.train), x, self.part)


class LinenLayer(nn.Module):
    """What repeats: a few blocks behind one another."""

    parts: Any
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, ids: jax.Array) -> Any:
        for i, part in enumerate(self.parts):
            x = LinenBlock(part, self.train, name=f"{part['op']}_{i}")(x, ids)
        return x


class LinenTurn(nn.Module):
    parts: Any
    train: bool

    @nn.compact
    def __call__(self, x: jax.Array, ids: jax.Array) -> Any:
        return LinenLayer(self.parts, self.train)(x, ids), None


class LinenNet(nn.Module):
    spec: Any

    @nn.compact
    def __call__(self, x: jax.Array, ids: jax.Array, train: bool) -> jax.Array:
        x = nn.Dense(self.spec["width"], param_dtype=WIDE, name="first")(x)
        for i, part in enumerate(self.spec["parts"]):
            if "stack" not in part:
                x = LinenBlock(part, train, name=f"{part['op']}_{i}")(x, ids)
                continue
            parts, how, times = part["stack"], part["how"], part["times"]
            if how == "scan":
                turn = nn.scan(
                    LinenTurn, variable_axes={"params": 0, "kept": 0, "batch_stats": 0},
                    split_rngs={"params": True, "dropout": True}, in_axes=nn.broadcast, length=times,
                )  # fmt: skip
                x, _ = turn(parts, train, name=f"stack_{i}")(x, ids)
            elif how == "shared":
                layer = LinenLayer(parts, train, name=f"stack_{i}")
                for _ in range(times):
                    x = layer(x, ids)
            else:
                layer = nn.remat(LinenLayer) if how == "remat" else LinenLayer
                for j in range(times):
                    x = layer(parts, train, name=f"stack_{i}_{j}")(x, ids)
        return nn.Dense(self.spec["classes"], param_dtype=WIDE, name="last")(x)


class NNXBlock(nnx.Module):
    def __init__(self, part: Spec, shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.part = nnx.static(Frozen(part))
        seen: list[Recorder] = []

        def record() -> jax.Array:
            seen.append(Recorder(jnp.zeros(shape[:2], jnp.int32)))
            return BLOCKS[part["op"]].run(seen[0], jnp.ones(shape, WIDE), **part["config"])

        jax.eval_shape(record)
        for name, (size, dtype) in seen[0].params.items():
            setattr(self, name, nnx.Param(normal(rngs.params(), size, jnp.dtype(dtype))))
        for name, size in seen[0].tables.items():
            setattr(self, name, nnx.Param(jnp.arange(size)[::-1].astype(jnp.int32)))
        for name, size in seen[0].kept.items():
            setattr(self, name, Kept(jnp.zeros(size, WIDE)))
        for name, make in seen[0].layers.items():
            setattr(self, name, make(rngs))
        if seen[0].draws:
            self.stream = rngs.dropout.fork()

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        return run_part(NNXMaker(self, ids), x, self.part.spec)


class Frozen:
    """A spec as metadata of an NNX module: one that can be hashed."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    def __hash__(self) -> int:
        return hash(repr(self.spec))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and repr(self.spec) == repr(other.spec)


class NNXLayer(nnx.Module):
    def __init__(self, parts: list[Spec], shape: tuple[int, ...], rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([NNXBlock(part, shape, rngs) for part in parts])

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x, ids)
        return x


def scanned_layers(part: Spec, shape: tuple[int, ...], rngs: nnx.Rngs) -> NNXLayer:
    """Layers in one module, each of its arrays with a first dim of all."""

    @nnx.split_rngs(splits=part["times"])
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs: nnx.Rngs) -> NNXLayer:
        return NNXLayer(part["stack"], shape, rngs)

    return make(rngs)


class NNXNet(nnx.Module):
    def __init__(self, spec: Spec, rngs: nnx.Rngs) -> None:
        self.spec = nnx.static(Frozen(spec))
        shape = (ROWS, spec["length"], spec["width"])
        self.first = nnx.Linear(spec["features"], spec["width"], param_dtype=WIDE, rngs=rngs)
        self.last = nnx.Linear(spec["width"], spec["classes"], param_dtype=WIDE, rngs=rngs)
        parts: list[Any] = []
        for part in spec["parts"]:
            if "stack" not in part:
                parts.append(NNXBlock(part, shape, rngs))
            elif part["how"] == "scan":
                parts.append(scanned_layers(part, shape, rngs))
            else:
                times = 1 if part["how"] == "shared" else part["times"]
                parts.append(nnx.List([NNXLayer(part["stack"], shape, rngs) for _ in range(times)]))
        self.parts = nnx.List(parts)

    def __call__(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        x = self.first(x)
        for held, part in zip(self.parts, self.spec.spec["parts"], strict=True):
            if "stack" not in part:
                x = held(x, ids)
            elif part["how"] == "scan":

                @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
                def forward(x: jax.Array, layer: NNXLayer) -> jax.Array:
                    return layer(x, ids)

                x = forward(x, held)
            else:
                for layer in list(held) * (part["times"] if part["how"] == "shared" else 1):
                    x = nnx.remat(lambda layer, x: layer(x, ids))(layer, x) if part["how"] == "remat" else layer(x, ids)
        return self.last(x)


# -- losses -----------------------------------------------------------------------------------------------------------
class Total:
    """What a loss may return in the place of a mean: its sum and its weight."""

    def __init__(self, total: jax.Array, weight: jax.Array) -> None:
        self.total, self.weight = total, weight


def _entropy(out: jax.Array, batch: PyTree) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(out, batch["labels"])


LOSSES: dict[str, Callable[[jax.Array, PyTree], Any]] = {
    "squares": lambda out, batch: jnp.square(out - batch["y"]).mean(),
    "entropy": lambda out, batch: _entropy(out, batch).mean(),
    "masked": lambda out, batch: (_entropy(out, batch) * batch["mask"]).sum() / batch["mask"].sum(),
    "rows": lambda out, batch: (jnp.square(out - batch["y"]).sum((1, 2)) + 0.1).mean(),
    "pooled": lambda out, batch: jnp.square(out.mean(1) - batch["y"][:, 0]).mean(),
    "last": lambda out, batch: jnp.abs(out[:, -1] - batch["y"][:, 0]).mean(),
    "huber": lambda out, batch: optax.huber_loss(out, batch["y"]).mean(),
    "two": lambda out, batch: jnp.square(out - batch["y"]).mean() + 0.1 * jnp.square(out).mean(),
    "sigmoid": lambda out, batch: optax.sigmoid_binary_cross_entropy(out, batch["y"] > 0).mean(),
    "aux": lambda out, batch: (_entropy(out, batch).mean(), {"hits": (out.argmax(-1) == batch["labels"]).mean()}),
    "total": lambda out, batch: Total((_entropy(out, batch) * batch["mask"]).sum(), batch["mask"].sum()),
}


def loss_of(spec: Spec, mean: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """`loss(model, batch[, train])`; `mean(total, weight)` is what a weighted sum is returned as (`cjax.Mean`)."""

    def finish(value: Any) -> Any:
        return mean(value.total, value.weight) if mean and isinstance(value, Total) else value

    function = LOSSES[spec["loss"]]
    if spec["flavour"] == "linen":
        return lambda model, batch, train: finish(function(model(batch["x"], batch["ids"], train), batch))
    return lambda model, batch: finish(function(model(batch["x"], batch["ids"]), batch))


def model_of(spec: Spec) -> Any:
    """A Linen module, or a builder of an NNX one."""
    if spec["flavour"] == "linen":
        return LinenNet(spec)
    return lambda rngs: NNXNet(spec, rngs)


def batch_of(spec: Spec, seed: int) -> PyTree:
    rng = np.random.default_rng(seed)
    shape = (spec["rows"], spec["length"])
    return {
        "x": rng.standard_normal((*shape, spec["features"])),
        "ids": rng.integers(0, 64, shape, dtype=np.int32),
        "y": rng.standard_normal((*shape, spec["classes"])),
        "labels": rng.integers(0, spec["classes"], shape, dtype=np.int32),
        "mask": rng.integers(0, 2, shape).astype(float) + (np.arange(shape[1]) == 0),
    }


# -- specs ------------------------------------------------------------------------------------------------------------
def parts_of(spec: Spec) -> Iterator[Spec]:
    """All blocks, those within stacks too."""
    for part in spec["parts"]:
        yield from part.get("stack", (part,))


def traits(spec: Spec) -> list[Block]:
    return [BLOCKS[part["op"]] for part in parts_of(spec)]


def wrt_of(spec: Spec) -> str | None:
    """What is trained: all but tables of integers and what is called frozen."""
    ops = {part["op"] for part in parts_of(spec)}
    return "^(?!.*(index|frozen))" if ops & {"low_rank", "integer_permutation"} else spec.get("wrt")


WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 16)
LENGTHS = (1, 2, 3, 4, 5, 6, 7, 8, 12)


def draw_part(rng: np.random.Generator, ops: list[str]) -> Spec:
    op = str(rng.choice(ops))
    wrap = str(rng.choice(["residual", "bounded", "raw"], p=[0.5, 0.35, 0.15]))
    return {"op": op, "config": BLOCKS[op].sample(rng), "wrap": wrap}


def draw(seed: int, between_attentions: bool = False) -> Spec:
    """The spec of a seed; all its blocks between two attentions, if asked, so that plans may split its positions."""
    rng = np.random.default_rng(seed)
    flavour = str(rng.choice(["linen", "nnx"]))
    ops = [name for name, block in BLOCKS.items() if block.only in ("", flavour)]
    # Small models, many of them: what a pair costs is compiling it.
    parts: list[Spec] = [draw_part(rng, ops) for _ in range(int(rng.choice([0, 1, 2], p=[0.4, 0.5, 0.1])))]
    for _ in range(int(rng.choice([0, 1, 2], p=[0.5, 0.45, 0.05]))):
        stack = [draw_part(rng, ops) for _ in range(int(rng.choice([1, 2], p=[0.75, 0.25])))]
        how = str(rng.choice(["unrolled", "scan", "remat", "shared"], p=[0.5, 0.25, 0.15, 0.1]))
        parts.append({"stack": stack, "times": int(rng.choice([2, 3, 4], p=[0.6, 0.1, 0.3])), "how": how})
    if not parts or rng.random() < 0.3:
        parts.append(draw_part(rng, ops))
    if between_attentions:
        first, last = draw_part(rng, ["attention"]), draw_part(rng, ["attention"])
        for part in (first, last):
            part["config"]["heads"] = 4  # which axes of 2 and 4 divide
        parts = [first, *parts, last]
    return {
        "flavour": flavour,
        "rows": ROWS,
        "length": int(rng.choice(LENGTHS)),
        "features": int(rng.choice([1, 3, 6, 8])),
        "width": int(rng.choice(WIDTHS)),
        "classes": int(rng.choice([2, 3, 7, 8])),
        "parts": parts,
        "loss": str(rng.choice(list(LOSSES))),
        "wrt": None if rng.random() < 0.85 else "^(?!.*first)",
    }


def smaller(spec: Spec) -> Iterator[Spec]:
    """Specs that are simpler by one step, the boldest steps first."""

    def changed(**values: Any) -> Spec:
        return copy.deepcopy(spec) | copy.deepcopy(values)

    parts = spec["parts"]
    if len(parts) > 1:
        for part in parts:
            yield changed(parts=[part])
        for i in range(len(parts)):
            yield changed(parts=parts[:i] + parts[i + 1 :])
    for i, part in enumerate(parts):
        if "stack" not in part:
            continue

        def with_stack(i: int = i, part: Spec = part, **values: Any) -> Spec:
            return changed(parts=[*parts[:i], part | values, *parts[i + 1 :]])

        for inner in part["stack"]:
            yield changed(parts=[*parts[:i], inner, *parts[i + 1 :]])
            if len(part["stack"]) > 1:
                yield with_stack(stack=[inner])
        if part["how"] != "unrolled":
            yield with_stack(how="unrolled")
        if part["times"] > 2:
            yield with_stack(times=2)
            yield with_stack(times=4)
    if spec["loss"] != "squares":
        yield changed(loss="squares")
    if spec["flavour"] != "linen" and not any(block.only == "nnx" for block in traits(spec)):
        yield changed(flavour="linen")
    if spec["wrt"]:
        yield changed(wrt=None)
