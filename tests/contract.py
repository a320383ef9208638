"""One model under one plan, and the same model trained by its author: plain Flax, JAX and optax on one device.

The author's side shares nothing with cjax but the capture of the model as a function: no trace is read or re-emitted,
no layer stacked, nothing placed. Micro-batches are the loop that a reader of design.md would write.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optimizers import OPTIMIZERS
from plans import NUM_DEVICES, num_parts, tensor_of
from starts import Trees, is_key, start, values_for
from zoo import MODELS, Batch, Case, case, regression_batch
from zoo_cjax import ROWS
from zoo_nnx import MLP as NNXMLP

from cjax.optim import LossScale
from cjax.plan import Plan
from cjax.program import Given, Program
from cjax.program.compose import compose
from cjax.program.state import State
from cjax.sharding.storage.storage import Storage
from cjax.trace.author.capture import Capture, Mean, capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource
from cjax.tree import PyTree

NUM_STEPS = 3
# Losses that are ratios with a denominator of the batch's own: cjax sums both over micro-batches, so that their number
# changes nothing, and the author's loop must be one over the whole batch.
RATIOS = {"linen_masked_mean", "cjax_gpt", "cjax_bert", "cjax_t5", "cjax_llama"}
EXACT, ROUNDED = (1e-9, 1e-12), (1e-5, 1e-7)  # of a leaf's norm, and of the norm of all leaves
# What float64 comes to: the softmax of jax.nn.dot_product_attention is float32 throughout, whatever it is given.
WIDE = dict.fromkeys(ROWS, (1e-5, 1e-7))


def exactly(name: str) -> tuple[float, float]:
    """How close losses and gradients of a model are in float64."""
    return WIDE.get(name, EXACT)


def after_updates(name: str) -> tuple[float, float]:
    """And its parameters: Adam makes the noise of a gradient that is zero, a key's bias, larger."""
    return (1e-5, 1e-5) if name in WIDE else EXACT


# -- measuring --------------------------------------------------------------------------------------------------------
def on_host(tree: PyTree) -> PyTree:
    """The leaves as NumPy arrays, random keys as their bits."""
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def norm(tree: PyTree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf, dtype=np.float64)) for leaf in jax.tree.leaves(tree))))


def assert_close(given: PyTree, wanted: PyTree, tolerance: tuple[float, float], what: str = "") -> None:
    """Leaf by leaf, ||given - wanted|| <= relative ||wanted|| + of_whole ||all of wanted||.

    The second term is for leaves that are zero in exact arithmetic: the gradient of an attention key's bias.
    """
    assert jax.tree.structure(given) == jax.tree.structure(wanted)
    relative, of_whole = tolerance
    floor = of_whole * norm([leaf for leaf in jax.tree.leaves(wanted) if np.issubdtype(leaf.dtype, np.inexact)])
    paths = jax.tree_util.tree_flatten_with_path(wanted)[0]
    for (path, b), a in zip(paths, jax.tree.leaves(given), strict=True):
        name = what + jax.tree_util.keystr(path)
        assert a.shape == b.shape and a.dtype == b.dtype, f"{name}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
        if not np.issubdtype(b.dtype, np.inexact):
            np.testing.assert_array_equal(a, b, name)
            continue
        off, allowed = norm([a.astype(np.float64) - b.astype(np.float64)]), relative * norm([b]) + floor
        assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e} (norm {norm([b]):.2e})"


def bytes_on_a_device(tree: PyTree) -> int:
    """What one device holds of the arrays of `tree`; the same on all, or it fails."""
    held: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    assert len(set(held.values())) == 1, held
    return next(iter(held.values()))


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Fails if anything is compiled inside."""
    compiled = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled, f"{len(compiled)} programs were compiled"


# -- a model of the zoo -----------------------------------------------------------------------------------------------
def counted_error(model: Any, batch: Batch) -> tuple[Mean, dict[str, Any]]:
    """The squared error of some examples: a `Mean`, with aux of both kinds."""
    errors, counts = jnp.square(model(batch["x"])[:, 0] - batch["y"]), batch["y"] > 0
    number = counts.sum()
    return Mean((errors * counts).sum(), number), {"share": counts.mean(), "above 1": Mean((errors > 1).sum(), number)}


# Beside the zoo: a loss that says itself what it is a mean over, and a model of which two layers in four are trained.
SUBJECTS: dict[str, Case] = {
    **MODELS,
    "nnx_mean": case("nnx", lambda _: lambda rngs: NNXMLP(rngs=rngs), counted_error, regression_batch),
    "linen_part_frozen": MODELS["linen_tied"],
}
UNDER_ALL = tuple(SUBJECTS)  # tables of their own, of pipelines say, add subjects that no other plan is for
WRT = {"linen_part_frozen": "block_[12]"}


def widened(tree: PyTree) -> PyTree:
    """float64 in the place of float32."""

    def widen(leaf: Any) -> Any:
        if leaf.dtype != jnp.float32:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, jnp.float64)
        return leaf.astype(jnp.float64)

    return jax.tree.map(widen, tree)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A captured model with two batches, in float32 or float64."""

    captured: Capture
    batches: tuple[PyTree, PyTree]


@functools.cache
def subject(name: str, wide: bool) -> Subject:
    model, loss, batch = SUBJECTS[name].make(jnp.float64 if wide else jnp.float32)
    captured = capture(model, loss, batch, WRT.get(name))
    if wide:
        batch, init = widened(batch), captured.init
        captured = dataclasses.replace(
            captured,
            init=lambda key: widened(init(key)),
            params_shape=widened(captured.params_shape),
            frozen_shape=widened(captured.frozen_shape),
            model_state_shape=widened(captured.model_state_shape),
            initial=captured.initial and widened(captured.initial),
        )
    # Other examples, of the same range: rows and columns change places, differently in each leaf.
    leaves, treedef = jax.tree.flatten(batch)
    other = [np.roll(leaf, (i + 1,) * leaf.ndim, tuple(range(leaf.ndim))) for i, leaf in enumerate(leaves)]
    return Subject(captured, (batch, jax.tree.unflatten(treedef, other)))


def batch_shape(name: str, wide: bool = False) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), subject(name, wide).batches[0])


@functools.cache
def source_of(name: str, wide: bool = False) -> TraceSource:
    """What all plans of the model share, as they do in a user's program."""
    return TraceSource(subject(name, wide).captured, batch_shape(name, wide))


def trace_of(name: str, parts: int = 1) -> Trace:
    return source_of(name).read(parts)


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer`, with the gradients it last saw beside its state: those that training used, not some others."""

    def init(params: PyTree) -> PyTree:
        return optimizer.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None, **more: Any) -> tuple[PyTree, PyTree]:
        updates, inner = optax.with_extra_args_support(optimizer).update(grads, state[0], params, **more)
        return updates, (inner, grads)

    return optax.GradientTransformationExtraArgs(init, update)


# A larger eps than Adam's: a gradient that is zero in exact arithmetic is noise, which Adam would make as large as any.
ADAM = optax.adamw(1e-2, weight_decay=1e-2, eps=1e-6)
OPTIMIZER = recording(ADAM)


@functools.cache
def optimizer_of(row: str | None) -> optax.GradientTransformation:
    """A row of the table of optimizers; the one above for None."""
    return OPTIMIZER if row is None else recording(OPTIMIZERS[row]())


def program_of(name: str, plan: str, wide: bool, optimizer: optax.GradientTransformation | None = OPTIMIZER) -> Program:
    """The model under the plan, on as many of the virtual devices as it says (all by default)."""
    devices = jax.devices()[: 1 if plan.startswith("data=1 ") else NUM_DEVICES]
    resolved = Plan.parse(plan).resolve(len(devices))
    given = Given(source_of(name, wide), optimizer)
    return Program(compose(given, resolved, devices))


@functools.cache
def _given(name: str, optimizer: optax.GradientTransformation, loss_scale: LossScale | None) -> Given:
    return Given(source_of(name), optimizer, loss_scale)


_WALKERS: list[object] = []  # for the next test that asks for the same programs


def walking_program(
    name: str,
    plan: str,
    folder: Path | None = None,
    optimizer: optax.GradientTransformation = OPTIMIZER,
    loss_scale: LossScale | None = None,
) -> Program:
    """The model under a plan, which may move layers out of the devices; `folder` is for what goes to disk. Plans that
    differ in where layers live have their compiled programs in common, as those of a user's `replan`."""
    given = dataclasses.replace(_given(name, optimizer, loss_scale), disk_folder=folder)
    program = Program(compose(given, Plan.parse(plan).resolve(NUM_DEVICES), jax.devices()))
    _WALKERS.append(program._composed.walker)
    return program


def trained(program: Program, name: str, num_steps: int = 2) -> Any:
    """A state that has been trained for a few steps, in float32."""
    state = program.init(3)
    for index in range(num_steps):
        state, _ = program.step(state, subject(name, False).batches[index % 2])
    return state


def digest(program: Program, state: Any) -> str:
    """Of all that a checkpoint would hold."""
    found = hashlib.sha256()
    for x in jax.tree.leaves(program.to_arrays(state)):
        found.update(np.asarray(jax.random.key_data(x) if is_key(x) else x).tobytes())
    return found.hexdigest()


@dataclasses.dataclass(frozen=True)
class Step:
    """What one step of training gave, on the host."""

    loss: np.ndarray
    aux: PyTree
    grads: PyTree


@dataclasses.dataclass(frozen=True)
class Run:
    """A few steps of training, alternating the two batches, and the model's trees afterwards."""

    steps: tuple[Step, ...]
    params: PyTree
    model_state: PyTree


def trees(program: Program, state: Any) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """params, frozen, model_state and the optimizer's state in the user's trees, on the host.

    What is loaded is on the host already, so that no program is compiled to slice each leaf out of its stack.
    """
    if program._composed.walker is not None:
        arrays = program.to_arrays(state)
        return tuple(on_host(arrays[name]) for name in ("params", "frozen", "carried", "opt_state"))
    storage, optimizer = program._composed.storage, program._composed.optimizer
    stored = (state._params, state._frozen, state._model_state)
    shelves = (storage.params, storage.frozen, storage.model_state)

    def load(shelf: Storage, arrays: Any) -> PyTree:
        return on_host(shelf.load([leaf if is_key(leaf) else np.asarray(leaf) for leaf in arrays]))

    params, frozen, model_state = (load(shelf, arrays) for shelf, arrays in zip(shelves, stored, strict=True))
    return params, frozen, model_state, load(optimizer.storage, state._opt) if optimizer else ()


Look = Callable[[Program, Any], None]


def train(name: str, plan: str, wide: bool, optimizer: str | None = None, look: Look | None = None) -> Run:
    """The run under cjax; `look` sees the program and its state after a step. Fails if anything is compiled after the
    first step."""
    program, (first, second) = program_of(name, plan, wide, optimizer_of(optimizer)), subject(name, wide).batches
    state, steps = begun(program, name, wide, optimizer), []
    params, model_state = None, None
    for index in range(NUM_STEPS):
        with no_compilation() if index else contextlib.nullcontext():
            state, metrics = program.step(state, second if index % 2 else first)
        if look and not index:
            look(program, state)
        params, _, model_state, (_, grads) = trees(program, state)
        steps.append(Step(np.asarray(metrics["loss"]), on_host(metrics.get("aux", {})), grads))
        assert int(metrics["skipped"]) == 0 and int(state.step) == index + 1
        np.testing.assert_allclose(metrics["grad_norm"], norm(grads), rtol=1e-5)
    return Run(tuple(steps), params, model_state)


# Which dim of which parameter 1D tensor parallelism splits, by a pattern of its path: heads, ffn, vocabulary, experts.
# What matches nothing is whole, and so is a dim with fewer entries than the axis has devices.
ATTENTION = {"(query|key|value)/kernel": -2, "(query|key|value)/bias": -2, "out/kernel": -3}
BLOCK = {**ATTENTION, r"(lock|coder)_\d/Dense_0/": -1, r"(lock|coder)_\d/Dense_1/kernel": -2}
MLP = {"up/": -1, "down/kernel": -2}
DECODER = {**BLOCK, "^Embed": 0, "^Dense_0": -1}
SPLIT: dict[str, dict[str, int]] = {
    "linen_decoder": DECODER,
    "linen_scan": DECODER,
    "linen_remat": DECODER,
    "linen_tied": {**BLOCK, "^Embed": 0},
    "linen_encoder": {**BLOCK, "^Embed": 0, "^Dense_1": -1, "^Dense_0/kernel": 0},
    "linen_encoder_decoder": {**BLOCK, "^Embed": 0, "^Dense_0": -1},
    "linen_lstm": {"^Embed": -1, "LSTM.*kernel": 0, "^Dense_0/kernel": 0},
    "nnx_decoder": {**ATTENTION, **MLP, "^embed": 0, "^head": -1},
    "nnx_scan": {**ATTENTION, **MLP, "^embed": 0},
    "nnx_llama": {"(query|key|value)$": 1, "out$": 0, "gate|up": -1, "down": 0, "^embed": 0, "^head": -1},
    "nnx_conv": {"conv1|norm1": -1, "conv2/kernel": 2, "head": -1},
    "nnx_mlp": {"0/kernel": 0, "1/": -1, "2/kernel": 0},
    "cjax_gpt": {**ATTENTION, **MLP, "^token_embed": 0},
    "cjax_bert": {**ATTENTION, **MLP, "^(token|type)_embed": 0, "word_head/bias": 0},
    "cjax_vit": {**ATTENTION, **MLP, "^patch_embed/kernel": 0, "^head": -1},
    "cjax_t5": {**ATTENTION, **MLP, "^token_embed": 0, "_bias/table": -1},
    "cjax_llama": {**ATTENTION, "(gate|up)/kernel": -1, "down/kernel": -2, "^token_embed": 0, "^head": -1},
}


def split_dim(name: str, path: str, shape: tuple[int, ...], tensor: int) -> int | None:
    """The dim that `tensor` devices split, by the table; of patches and of segments one axis splits none, as it would
    divide next to nothing for what is reduced then."""
    if "patch_embed" in path or "type_embed" in path:
        return None
    found = [dim % len(shape) for pattern, dim in SPLIT[name].items() if re.search(pattern, path)]
    assert len(set(found)) <= 1, f"{path} matches rows of SPLIT that disagree"
    return found[0] if found and shape[found[0]] >= tensor > 1 else None


# Of a grid: both sides of these models' matrices are split, whatever matches their row of SPLIT and is no bias. Of BERT
# and T5 tables match that are no matrices there: two segments, a few distances.
GRID_SPLIT = [name for name in SPLIT if name not in ("linen_lstm", "nnx_conv", "nnx_mlp", "cjax_bert", "cjax_t5")]
TIED = {"linen_tied", "nnx_scan", "cjax_gpt", "cjax_bert", "cjax_t5"}


def grid_parts(name: str, path: str, plan: str) -> int:
    """Into how many parts a grid takes a parameter: 1/q or 1/l of a vector is held, 1/q^2 or 1/l^3 of a matrix. A table
    that is only looked up is gathered along one axis, and in 3d whole along another."""
    mode, side, _ = tensor_of(plan)
    matrix = not path.endswith("bias") and any(re.search(pattern, path) for pattern in SPLIT[name])
    table = re.search("^(token_)?[Ee]mbed", path) and name not in TIED
    return side ** (1 if not matrix else 3 if mode == "3d" and not table else 2)


# -- the same model, trained by its author ----------------------------------------------------------------------------
def author_initial(name: str) -> Trees:
    """params, frozen and model_state as the model's own init makes them, in the precision of whoever asks."""
    return _initial(name, jax.config.jax_enable_x64)


@functools.cache
def _initial(name: str, wide: bool) -> Trees:  # `wide` keeps two precisions apart
    captured = subject(name, wide=False).captured
    return captured.initial or jax.jit(captured.init)(jax.random.key(0))


@functools.cache
def first_values(name: str, wide: bool) -> Trees:
    """What both sides begin with: none of an init, which would take as long to compile as the steps. Softmax in float32
    is exact enough only where it is not sharp: with numbers as small as an init's."""
    captured = subject(name, wide).captured
    shapes = (captured.params_shape, captured.frozen_shape, captured.model_state_shape)
    return captured.initial or values_for(*shapes, share=0.1 if wide and name in WIDE else 1.0)


def begun(program: Program, name: str, wide: bool, optimizer: str | None = None) -> State:
    """The state of a program that begins with these."""
    return start(program, first_values(name, wide), moments=optimizer is None)


def is_alike_in_parts(name: str) -> bool:
    """Whether the sum over micro-batches is the whole batch's own: nothing is drawn, no examples meet, and a ratio is
    one of sums."""
    case = SUBJECTS[name]
    return name in RATIOS or not (case.dropout or case.couples)


@functools.cache
def _backward(name: str, parts: int, wide: bool) -> Any:
    return jax.jit(functools.partial(_part, subject(name, wide).captured, parts))


@functools.cache
def author(name: str, parts: int, wide: bool, optimizer: str | None = None) -> Run:
    """The run without cjax; `parts` micro-batches, each of every `parts`-th row."""
    if parts > 1 and is_alike_in_parts(name):
        return author(name, 1, wide, optimizer)
    return kept(f"{name} {parts} {wide} {optimizer}", lambda: _author(name, parts, wide, optimizer))


def kept(name: str, make: Callable[[], Run]) -> Run:
    """What `make` makes, made once by all processes of this run of tests."""
    path = Path(os.environ["CJAX_TEST_KEPT"]) / hashlib.sha1(name.encode()).hexdigest()
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        own.write_bytes(pickle.dumps(make()))
        own.replace(path)  # whole, or not there
    return pickle.loads(path.read_bytes())


def _author(name: str, parts: int, wide: bool, optimizer: str | None) -> Run:
    # Adam has one rule for all numbers, so that it may see them as one array: a hundred leaves compile far longer. What
    # is done leaf by leaf is done by NumPy, which compiles nothing.
    case, tx = subject(name, wide), optax.flatten(ADAM) if optimizer is None else optimizer_of(optimizer)
    captured, key = case.captured, jax.random.key(0)
    params, frozen, model_state = first_values(name, wide)
    params, first_state, opt_state = on_host(params), model_state, jax.jit(tx.init)(params)
    backward, update = _backward(name, parts, wide), jax.jit(optax.with_extra_args_support(tx).update)
    steps = []
    for index in range(NUM_STEPS):
        batch, step_key = case.batches[index % 2], jax.random.fold_in(key, index)
        outs = []
        for part in range(parts):
            rows = jax.tree.map(lambda x, part=part: x[part::parts] if np.ndim(x) else x, batch)
            model_state = _streams_of(first_state, model_state, captured.random)
            *out, model_state = backward(params, frozen, model_state, rows, step_key, part)
            outs.append(out)
        loss, aux, grads = _averaged(outs)
        updates, opt_state = update(grads, opt_state, params, value=loss)
        params, first_state = jax.tree.map(np.add, params, on_host(updates)), model_state
        steps.append(Step(on_host(loss), on_host(aux), grads))
    return Run(tuple(steps), params, on_host(model_state))


def _streams_of(first: PyTree, now: PyTree, random: tuple[bool, ...]) -> PyTree:
    """`now` with random streams as they were in `first`: each micro-batch of a step draws from where the step began."""
    leaves, treedef = jax.tree.flatten(now)
    pairs = zip(jax.tree.leaves(first), leaves, random, strict=True)
    return treedef.unflatten([old if drawn else new for old, new, drawn in pairs])


def _part(captured: Capture, parts: int, params: PyTree, *rest: Any) -> tuple[Any, ...]:
    """One micro-batch: total, weight, aux, gradients of the total, and model state."""
    frozen, model_state, rows, key, index = rest

    def total(params: PyTree) -> tuple[jax.Array, Any]:
        inner = captured.fold_model_state(model_state, index) if parts > 1 else model_state
        inner_key = jax.random.fold_in(key, index) if parts > 1 else key
        loss, aux, new = captured.apply(params, frozen, inner, rows, inner_key, True)
        new = captured.unfold(new, model_state) if parts > 1 else new
        loss = loss if isinstance(loss, Mean) else Mean(loss, jnp.ones_like(loss))
        return loss.total, (loss.weight, aux, new)

    (value, (weight, aux, new)), grads = jax.value_and_grad(total, has_aux=True)(params)
    return value, weight, aux, grads, new


def _averaged(outs: list[Any]) -> tuple[Any, Any, Any]:
    """Totals of all parts over their weights; aux that is no `Mean` is averaged."""
    totals, weights, auxes, grads = zip(*outs, strict=True)
    weight = sum(weights)

    def average(*parts: Any) -> Any:
        if isinstance(parts[0], Mean):
            return sum(p.total for p in parts) / sum(p.weight for p in parts)
        return sum(parts) / len(parts)

    aux = jax.tree.map(average, *auxes, is_leaf=lambda x: isinstance(x, Mean))
    return sum(totals) / weight, aux, jax.tree.map(lambda *g: sum(g) / np.asarray(weight), *map(on_host, grads))


# -- the two side by side ---------------------------------------------------------------------------------------------
def assert_trained_alike(name: str, plan: str, look: Look | None = None) -> None:
    """Loss, aux, every gradient and, after three steps, parameters, running statistics and random state, in float64."""
    tolerance = exactly(name)
    with jax.enable_x64(True):
        given, wanted = train(name, plan, wide=True, look=look), author(name, num_parts(plan), wide=True)
        for index, (step, other) in enumerate(zip(given.steps, wanted.steps, strict=True)):
            where = f"step {index}, "
            assert_close(step.loss, other.loss, tolerance, where + "loss")
            assert_close(step.aux, other.aux, tolerance, where + "aux")
            assert_close(step.grads, other.grads, tolerance, where + "gradient of ")
        assert_close(given.params, wanted.params, after_updates(name), "parameter ")
        assert_close(given.model_state, wanted.model_state, tolerance, "carried ")
