"""One stranger under some plans, in a process of its own: python -m strangers.worker NAME PLAN...

Writes a line of JSON before each phase and one at the end of each plan, so that whoever reads them knows what a
process was doing when it hung or was aborted.
"""

import dataclasses
import importlib
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from strangers import author
from strangers.common import Stranger
from strangers.plans import NUM_DEVICES
from strangers.rows import BY_NAME

import cjax
from cjax.plan import Plan
from cjax.program import Given, Program
from cjax.program.batches import batch_structs
from cjax.program.compose import compose
from cjax.trace.author.capture import Capture, capture
from cjax.trace.source import TraceSource
from cjax.tree import PyTree

RATE = 1024.0  # so large that gradients are read off new weights without rounding
# Of a leaf's norm, and of the norm of all leaves, as design.md has it: where all is float64, and where it is not.
EXACT, ROUNDED = (1e-9, 1e-12), (1e-5, 1e-7)
HOUSE = str(Path(cjax.__file__).parent)


def say(**line: Any) -> None:
    print(json.dumps(line), file=sys.__stdout__, flush=True)


def main(name: str, plans: list[str]) -> None:
    warnings.simplefilter("ignore")
    say(phase="author")
    jax.config.update("jax_enable_x64", BY_NAME[name].wide)
    module, function = BY_NAME[name].make.split(":")
    made: Stranger = getattr(importlib.import_module(f"strangers.{module}"), function)()
    subject = Subject.of(made)
    for plan in plans:
        started = time.monotonic()
        say(plan=plan, phase="trace")
        try:
            outcome, why = attempt(subject, plan)
        except Exception as error:
            outcome, why = judged(error)
        say(plan=plan, outcome=outcome, why=why, seconds=round(time.monotonic() - started, 1))


@dataclasses.dataclass
class Subject:
    """A stranger in float64: captured, with its initial weights, and what its author's loss and gradients are."""

    stranger: Stranger
    captured: Capture
    trees: tuple[PyTree, PyTree, PyTree]
    tolerance: tuple[float, float]
    wanted: dict[int, tuple[np.ndarray, PyTree]]  # by number of parts that are batches of their own

    @staticmethod
    def of(made: Stranger) -> "Subject":
        stranger = dataclasses.replace(made, batch=author.widened(made.batch))
        captured = capture(stranger.model, stranger.loss, stranger.batch)
        params, *others = author.widened(captured.initial or jax.jit(captured.init)(jax.random.key(0)))
        trees = (author.unsettled(params), *others)
        init = captured.init
        captured = dataclasses.replace(
            captured,
            init=lambda key: author.widened(init(key)),
            params_shape=author.widened(captured.params_shape),
            frozen_shape=author.widened(captured.frozen_shape),
            model_state_shape=author.widened(captured.model_state_shape),
            initial=captured.initial and author.widened(captured.initial),
        )
        narrow = author.narrow_floats(stranger, trees[0], trees[2])
        found = Subject(stranger, captured, trees, ROUNDED if narrow else EXACT, {})
        found.author(1)
        return found

    def author(self, parts: int) -> tuple[np.ndarray, PyTree]:
        parts = parts if self.stranger.apart else 1
        if parts not in self.wanted:
            self.wanted[parts] = author.value_and_grad(self.stranger, self.trees[0], self.trees[2], parts)
        return self.wanted[parts]


def attempt(subject: Subject, text: str) -> tuple[str, str]:
    """One step of plain gradient descent: its loss, and the gradients that it took, read off what it did to weights."""
    plan = Plan.parse(text).resolve(NUM_DEVICES)
    batch = subject.stranger.batch
    given = Given(TraceSource(subject.captured, batch_structs(batch)), optax.sgd(RATE))
    program = Program(compose(given, plan, jax.devices()[:NUM_DEVICES]))
    loss, grads = subject.author(plan.microbatches)
    say(plan=text, phase="init")
    before = host(subject.trees[0])
    state = program.init(0, params=before)
    say(plan=text, phase="step")
    state, metrics = program.step(state, batch)
    taken = jax.tree.map(lambda old, new: (old - np.asarray(new)) / RATE, before, program.params(state))
    given = {"loss": metrics["loss"], "gradient ": taken}
    found = compared(given, {"loss": loss, "gradient ": grads}, subject.tolerance)
    return ("WRONG", found) if found else ("equal", "")


def host(tree: PyTree) -> PyTree:
    return jax.tree.map(np.asarray, tree)


def norm(tree: PyTree) -> float:
    return float(np.sqrt(sum(np.sum(np.abs(leaf).astype(np.float64) ** 2) for leaf in jax.tree.leaves(tree))))


def compared(given: dict[str, PyTree], wanted: dict[str, PyTree], tolerance: tuple[float, float]) -> str:
    """What is off by most of what is allowed, leaf by leaf; nothing if all is within."""
    relative, of_whole = tolerance
    worst, said = 1.0, ""
    for what, tree in wanted.items():
        leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        others = jax.tree.leaves(given[what])
        if len(others) != len(leaves):
            return f"{what}: {len(others)} leaves, not {len(leaves)}"
        floor = of_whole * norm([leaf for _, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.inexact)])
        for (path, right), other in zip(leaves, others, strict=True):
            right, other = np.asarray(right), np.asarray(other)
            off, size = norm([other - right]), norm([right])
            share = off / (relative * size + floor + 1e-300)
            if not share <= worst:
                worst = share if np.isfinite(share) else np.inf
                name = what + jax.tree_util.keystr(path)
                said = f"{name} {right.shape}: off by {off:.2e} of {size:.2e}, {worst:.1e} times what is allowed"
    return said


def judged(error: Exception) -> tuple[str, str]:
    """A ValueError that cjax raises itself is an answer; anything else is a crash."""
    frames = traceback.extract_tb(error.__traceback__)
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, ValueError) and frames[-1].filename.startswith(HOUSE):
        return "refused", str(error)
    print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
    ours = [frame for frame in frames if frame.filename.startswith(HOUSE)]
    where = f" ({Path(ours[-1].filename).relative_to(Path(HOUSE).parent)}:{ours[-1].lineno})" if ours else ""
    return "CRASH", text[:600] + where


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
