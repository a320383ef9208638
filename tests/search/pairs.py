"""One model under one plan beside its author's own training: equal, refused, or what is wrong."""

import contextlib
import dataclasses
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from search.models import Spec, loss_of, model_of, parts_of, traits, wrt_of
from search.plans import num_parts
from search.reference import SGD, Diverged, Flat, Reference, Run, is_key, on_host
from starts import start

import cjax
from cjax.program.state import State
from cjax.tree import PyTree, leaf_names

HOUSE = Path(cjax.__file__).parent
# Of a leaf's norm, and of the norm of all: far above what rounding costs in float64, far below what is wrong.
TOLERANCE = (1e-7, 1e-9)
SINGLE = 1e-5  # statistics that Flax keeps in float32
SMALL = 1024  # elements of a parameter, below which ZeRO pads nothing
# NNX's attention without dropout is jax.nn.dot_product_attention, whose softmax is float32 whatever it is given.
ROUNDED = (2e-4, 1e-5)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`kind` is equal, refused, wrong, error, or model where there is nothing to compare with (processes.py adds abort
    and hang); `what` says how, or why."""

    kind: str
    what: str = ""


def recording(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer`, with the gradients it last saw beside its state."""

    def init(params: PyTree) -> PyTree:
        return optimizer.init(params), jax.tree.map(jnp.zeros_like, params)

    def update(grads: PyTree, state: PyTree, params: PyTree | None = None) -> tuple[PyTree, PyTree]:
        updates, inner = optimizer.update(grads, state[0], params)
        return updates, (inner, grads)

    return optax.GradientTransformation(init, update)


class Wrong(Exception):
    """What differs, and by how much."""


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    compiled = []

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    if compiled:
        raise Wrong(f"{len(compiled)} programs compiled after the first step")


def norm(leaves: Any) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.abs(leaf))) for leaf in leaves)))


def tolerance(spec: Spec) -> tuple[float, float]:
    is_float32 = spec["flavour"] == "nnx" and any(part["op"] == "flax_attention" for part in parts_of(spec))
    return ROUNDED if is_float32 else TOLERANCE


def compare(given: Flat, wanted: Flat, what: str, allowed: tuple[float, float]) -> None:
    """Leaf by leaf, ||given - wanted|| <= relative ||wanted|| + of_whole ||all of wanted||."""
    if given.keys() != wanted.keys():
        raise Wrong(f"{what}: other leaves, {sorted(given.keys() ^ wanted.keys())}")
    relative, of_whole = allowed
    floor = of_whole * norm(leaf for leaf in wanted.values() if np.issubdtype(leaf.dtype, np.inexact))
    wrong = []
    for name, b in wanted.items():
        a = given[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            raise Wrong(f"{what} {name}: {a.dtype}{a.shape}, not {b.dtype}{b.shape}")
        if not np.issubdtype(b.dtype, np.inexact):
            if not np.array_equal(a, b):
                wrong.append((np.inf, f"{what} {name}: {a.ravel()[:4]}, not {b.ravel()[:4]}"))
            continue
        off, size = norm([a - b]), norm([b])
        share = max(relative, SINGLE) if b.dtype == np.float32 else relative
        if not off <= share * size + floor:
            wrong.append((off / (size + 1e-30), f"{what} {name}: off by {off:.2e} of {size:.2e}"))
    if wrong:
        ratio, text = max(wrong)
        raise Wrong(f"{text}; {len(wrong)} of {len(wanted)} leaves")


def flat(tree: PyTree) -> Flat:
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


class Pairs:
    """A model with its reference, under as many plans as one likes."""

    def __init__(self, spec: Spec, own_init: bool = True) -> None:
        self.spec, self.reference, self.allowed = spec, Reference(spec, own_init=own_init), tolerance(spec)
        author, batch = self.reference.author, self.reference.batches[0]
        self.held = on_host((author.params, author.frozen, author.model_state))
        self.first = cjax.parallelize(
            model_of(spec), loss_of(spec, cjax.Mean), recording(SGD), batch, "data=1",
            wrt=wrt_of(spec), devices=jax.devices()[:1],
        )  # fmt: skip

    def outcome(self, plan: str, own_init: bool = False) -> Outcome:
        """Never raises but for what is no Exception."""
        try:
            wanted = self.reference.run(num_parts(plan))
        except Exception as error:
            return Outcome("model", str(error) if isinstance(error, Diverged) else told(error))
        try:
            return self._outcome(plan, wanted, own_init)
        except Wrong as error:
            return self._judged(str(error), wanted, num_parts(plan))
        except ValueError as error:
            # What cjax refuses, it raises itself; a ValueError from inside JAX is no refusal.
            last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
            return Outcome("refused" if last.is_relative_to(HOUSE) else "error", told(error))
        except Exception as error:
            return Outcome("error", told(error))

    def _outcome(self, plan: str, wanted: Run, own_init: bool) -> Outcome:
        program = self.first.replan(plan, jax.devices())
        if own_init:
            state = program.init(0)
            for (name, tree), kept in zip(self._trees(program, state).items(), (*self.held, None), strict=True):
                if kept is not None:
                    compare(flat(tree), kept, f"initial {name}", self.allowed)
        else:
            state = self._start(program)
        self._check_bytes(program, state)
        for index, (loss, aux, grads) in enumerate(wanted.steps):
            batch = self.reference.batches[index % 2]
            with no_compilation() if index else contextlib.nullcontext():
                state, metrics = program.step(state, batch)
            trees, where = self._trees(program, state), f"step {index},"
            if int(metrics["skipped"]):
                raise Wrong(f"{where} skipped: loss {float(metrics['loss'])}, not {float(loss)}")
            given = {"loss": np.asarray(metrics["loss"]), **flat(on_host(metrics.get("aux", {})))}
            compare(given, {"loss": loss, **flat(aux)}, where, self.allowed)
            compare(flat(trees["opt"][1]), grads, f"{where} gradient of", self.allowed)
        compare(flat(trees["params"]), wanted.params, "parameter", self.allowed)
        compare(flat(trees["carried"]), wanted.model_state, "carried", self.allowed)
        return Outcome("equal")

    def _judged(self, what: str, wanted: Run, parts: int) -> Outcome:
        """Wrong, unless the author's own run goes astray no later by the last bit of its first parameters. A first step
        is never excused."""
        found = re.match(r"step (\d+),", what)
        last = int(found[1]) if found else len(wanted.steps) - 1
        if last > 0:
            shaken = self.reference.run(parts, is_shaken=True)
            try:
                for a, b in zip(shaken.steps[1 : last + 1], wanted.steps[1 : last + 1], strict=True):
                    compare({"loss": a[0], **flat(a[2])}, {"loss": b[0], **flat(b[2])}, "shaken", self.allowed)
            except Wrong as error:
                return Outcome("model", f"its rounding grows: {error}")
        return Outcome("wrong", what)

    def _start(self, program: cjax.Program) -> State:
        """The author's first values, as the program keeps them: nothing is compiled for it."""

        def tree(shapes: PyTree, kept: Flat) -> PyTree:
            leaves = [
                jax.random.wrap_key_data(kept[name]) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else kept[name]
                for name, leaf in zip(leaf_names(shapes), jax.tree.leaves(shapes), strict=True)
            ]
            return jax.tree.unflatten(jax.tree.structure(shapes), leaves)

        shelves = program._composed.shelves
        shapes = (shelf.leaf_shapes() for shelf in (shelves.params, shelves.frozen, shelves.model_state))
        params, frozen, model_state = map(tree, shapes, self.held)
        return start(program, (params, frozen, model_state), moments=True)

    def _trees(self, program: cjax.Program, state: State) -> dict[str, PyTree]:
        shelves = program._composed.shelves
        stored = {"params": state._params, "frozen": state._frozen, "carried": state._model_state, "opt": state._opt}
        found = {}
        for name, arrays in stored.items():
            shelf = getattr(shelves, {"carried": "model_state"}.get(name, name))
            held = [leaf if is_key(leaf) else np.asarray(leaf) for leaf in arrays]
            found[name] = on_host(shelf.load(held))
        return found

    def _check_bytes(self, program: cjax.Program, state: State) -> None:
        """Every device holds as much as any other, and with ZeRO its part of each leaf that divides; layers
        that the author scans over are not counted as a dim, nor is what packs several tensors, as long as it is small
        enough to stay whole."""
        held: dict[Any, int] = {}
        for leaf in jax.tree.leaves((state._params, state._opt)):
            for shard in leaf.addressable_shards:
                held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
        if len(set(held.values())) > 1:
            raise Wrong(f"bytes: devices hold {sorted(set(held.values()))}")
        plan = program.plan
        if plan.tensor_size > 1 or plan.pipeline.size > 1 or plan.sequence.size > 1 or not held:
            return
        group = plan.zero_group
        scanned = tuple(
            f"stack_{i}/" if self.spec["flavour"] == "linen" else f"parts/{i}/"
            for i, part in enumerate(self.spec["parts"]) if part.get("how") == "scan"
        )  # fmt: skip

        packs = any(kind.packs for kind in traits(self.spec))

        def divides(name: str, shape: tuple[int, ...]) -> bool:
            dims = shape[1:] if name.startswith(scanned) else shape
            dims = dims[:-1] if packs and np.prod(dims) < SMALL else dims
            return any(n % group == 0 for n in dims)

        leaves = self.held[0].items()
        whole = sum(leaf.nbytes for _, leaf in leaves)
        parts = sum(leaf.nbytes // (group if divides(name, leaf.shape) else 1) for name, leaf in leaves)
        wanted = (parts if plan.zero_stage == 3 else whole) + 2 * (parts if plan.zero_stage else whole)
        if next(iter(held.values())) > wanted:
            raise Wrong(f"bytes: a device holds {next(iter(held.values()))}, at most {wanted} by formula")


def told(error: BaseException) -> str:
    """An exception in a line or two, with the innermost place in cjax."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(HOUSE)]
    place = f" at {Path(frames[-1].filename).relative_to(HOUSE)}:{frames[-1].name}" if frames else ""
    text = re.sub(r"\s+", " ", str(error))[:400]
    return f"{type(error).__name__}{place}: {text}"
