"""Plain operations under every placement that cjax emits, against no placement: values and gradients in float64.

    python tests/search/operations.py                      all of them as XLA does them, and as cjax has them done
    python tests/search/operations.py --only conv --limit 8

Placements are drawn as cjax makes them: the dims of operands and results fall into classes, and each axis of a mesh is
given to a class. XLA may stop the process at some, so each operation is tried in a process of its own.
"""

import argparse
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "NPROC": "32"}
    os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "0"
    os.environ["XLA_FLAGS"] = (
        "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false "
        "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    )
    sys.path[:0] = [str(Path(__file__).parent.parent.parent), str(Path(__file__).parent.parent)]

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P
from search.operation_table import OPERATIONS, Operation

from cjax.mesh import build_mesh
from cjax.sharding.apart.faults import holds_apart, is_apart
from cjax.sharding.layout.layout import Layout
from cjax.sharding.layout.zero import shard_over
from cjax.sharding.place.place import Placer, constrained
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import find_dims
from cjax.trace.emit.emit import emit
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.reading import Leaf, Trace

MESHES = ({"data": 2, "tensor": 4}, {"data": 2, "row": 2, "col": 2}, {"data": 4, "tensor": 2}, {"data": 8})
GRADIENTS = ("as it is", "whole", "zero")  # how the gradient of an operand is wanted
TOLERANCE = 1e-9


@dataclass(frozen=True)
class Case:
    """An operation on a mesh: axes by class of dims, whether results are placed too, and how gradients are wanted."""

    sizes: Mapping[str, int]
    axes_of: Mapping[int, tuple[str, ...]]
    pins: bool
    gradient: str


class Traced:
    """An operation as cjax reads it, with its operands and what it makes of them on one device."""

    def __init__(self, operation: Operation) -> None:
        self.operation, self.operands = operation, operation.operands()

        def function(*operands: Any) -> list[Any]:
            return jax.tree.leaves(operation.function(*operands))

        self.closed: Any = simplify(jax.make_jaxpr(function)(*self.operands))
        self.dims = find_dims(self.closed, len(self.operands))
        atoms = [*self.closed.jaxpr.invars, *self.closed.jaxpr.outvars]
        self.classes = [() if isinstance(v, jex.Literal) else self.dims.of(v) for v in atoms]
        self.shapes = [tuple(v.aval.shape) for v in atoms]
        self.real = [i for i, x in enumerate(self.operands) if np.issubdtype(x.dtype, np.inexact)]
        rng = np.random.default_rng(3)
        self.weights = [rng.standard_normal(v.aval.shape) for v in self.closed.jaxpr.outvars]
        alone = jax.jit(self.results(lambda operands: function(*operands)))
        self.wanted = [np.asarray(x) for x in alone(*self.operands)]

    @property
    def has_fault(self) -> bool:
        """Whether cjax has any of it done otherwise than by XLA."""
        return any(is_apart(eqn) or holds_apart(eqn) for eqn in self.closed.jaxpr.eqns)

    def results(self, evaluate: Any, after: Any = lambda i, x: x) -> Any:
        """Of an evaluation, its results and all gradients of a scalar made of them."""

        def loss(real: list[Any], operands: list[Any]) -> Any:
            operands = list(operands)
            for i, x in zip(self.real, real, strict=True):
                operands[i] = x
            outs = evaluate(operands)
            total = 0.0
            for out, weight in zip(outs, self.weights, strict=True):
                if jnp.issubdtype(out.dtype, jnp.inexact):
                    value = out if not jnp.iscomplexobj(out) else out.real + 2 * out.imag * out.real
                    total += (jnp.sin(value) * weight).sum()
            return total, outs

        def run(*operands: Any) -> list[Any]:
            (_, outs), grads = jax.value_and_grad(loss, has_aux=True)([operands[i] for i in self.real], list(operands))
            return [*outs, *(after(i, g) for i, g in zip(self.real, grads, strict=True))]

        return run

    def cases(self, limit: int, meshes: int = len(MESHES)) -> Iterator[Case]:
        """Up to `limit` placements for each mesh, always the same."""
        pairs = [zip(classes, shape, strict=True) for classes, shape in zip(self.classes, self.shapes, strict=True)]
        found = sorted({c for some in pairs for c, size in some if size > 1})
        rng = random.Random(self.operation.name)
        for sizes in MESHES[:meshes]:
            choices = [c for c in itertools.product([None, *found], repeat=len(sizes)) if set(c) != {None}]
            rng.shuffle(choices)
            for choice in choices[:limit]:
                axes_of: dict[int, tuple[str, ...]] = {}
                for axis, c in zip(sizes, choice, strict=True):
                    if c is not None:
                        axes_of[c] = (*axes_of.get(c, ()), axis)
                yield Case(sizes, axes_of, rng.random() < 0.5, rng.choice(GRADIENTS))

    def evaluated(self, case: Case, avoids: bool) -> list[np.ndarray]:
        """The results and gradients under a placement, by XLA or as cjax has it done."""
        mesh = build_mesh(dict(case.sizes), jax.devices())
        layout = Layout(case.axes_of, dict(case.sizes))
        specs = [layout.spec(c, s) for c, s in zip(self.classes, self.shapes, strict=True)]
        leaves = tuple(Leaf(str(i), "batch", x.shape, x.dtype) for i, x in enumerate(self.operands))
        trace = Trace(self.closed, leaves, {}, self.dims, (), {}, None, frozenset(), 0, None, ())
        groups = [(i,) for i in range(len(self.operands))]
        results = [(i,) for i in range(len(self.closed.jaxpr.outvars))]
        ours = emit(self.closed, (), self.dims.top, groups, results, Placer(trace, layout, mesh, {}))
        run = ours if avoids else (lambda operands: jex.jaxpr_as_fun(self.closed)(*operands))

        def evaluate(operands: list[Any]) -> list[Any]:
            placed = [constrained(x, mesh, spec) if x.ndim else x for x, spec in zip(operands, specs, strict=False)]
            outs = run(placed)
            return [
                constrained(out, mesh, spec) if case.pins and out.ndim else out
                for out, spec in zip(outs, specs[len(operands) :], strict=True)
            ]

        def after(i: int, gradient: Any) -> Any:
            spec = P() if case.gradient == "whole" else specs[i]
            if case.gradient == "zero" and not any("data" in axes_of_entry(entry) for entry in spec):
                spec = shard_over(spec, gradient.shape, ("data",), dict(case.sizes))
            return constrained(gradient, mesh, spec) if gradient.ndim else gradient

        return [np.asarray(x) for x in jax.jit(self.results(evaluate, after))(*self.operands)]

    def fault(self, case: Case, avoids: bool) -> str | None:
        """What is wrong with it, if anything."""
        try:
            found = self.evaluated(case, avoids)
        except Exception as error:  # noqa: BLE001 - whatever XLA raises is what is looked for
            return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        names = [f"result {i}" for i in range(len(self.closed.jaxpr.outvars))] + [f"gradient {i}" for i in self.real]
        for name, a, b in zip(names, found, self.wanted, strict=True):
            a, b = a.ravel().astype(complex), b.ravel().astype(complex)
            off = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300)
            if not off <= TOLERANCE:
                ratio = np.vdot(b, a) / np.vdot(b, b) if np.linalg.norm(b) else np.nan
                return f"{name} is off by {off:.2g} (ratio {ratio.real:.4g})"
        return None


def described(traced: Traced, case: Case) -> str:
    layout = Layout(case.axes_of, dict(case.sizes))
    specs = [layout.spec(c, s) for c, s in zip(traced.classes, traced.shapes, strict=True)]
    words = [",".join("+".join(axes_of_entry(entry)) or "-" for entry in spec) or "()" for spec in specs]
    text = " ".join(words[: len(traced.operands)]), " ".join(words[len(traced.operands) :])
    mesh = "x".join(f"{axis}={size}" for axis, size in case.sizes.items())
    return f"{mesh} {text[0]} -> {text[1]}{' placed' if case.pins else ''}, gradients {case.gradient}"


def work(names: Sequence[str], limit: int, meshes: int, avoids: bool, start: int) -> None:
    """In a process of its own: one line of JSON before each case, and one with what is wrong with it."""
    jax.config.update("jax_enable_x64", True)
    for operation in OPERATIONS:
        if operation.name not in names:
            continue
        traced = Traced(operation)
        if avoids and not traced.has_fault:
            continue  # XLA does it alone
        for at, case in enumerate(traced.cases(limit, meshes)):
            if at >= start:
                print(json.dumps(["try", operation.name, at, described(traced, case)]), flush=True)
                print(json.dumps(["done", operation.name, at, traced.fault(case, avoids)]), flush=True)
        start = 0
        print(json.dumps(["end", operation.name, 0, None]), flush=True)


def search(names: Sequence[str], limit: int, meshes: int, avoids: bool) -> Iterator[tuple[str, str, str | None]]:
    """(operation, placement, what is wrong) of each case."""
    left, start = list(names), 0
    while left:
        command = [sys.executable, __file__, "--work", json.dumps([left, limit, meshes, avoids, start])]
        tried: tuple[str, int, str] | None = None
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            for line in process.stdout or ():
                kind, name, at, what = json.loads(line)
                if kind == "try":
                    tried = (name, at, what)
                elif kind == "done":
                    assert tried is not None
                    yield name, tried[2], what
                    tried = None
                else:
                    print(f"  {name}", file=sys.stderr, flush=True)
                    left.remove(name)
                    start = 0
            status = process.wait()
            errors.seek(0)
            said = errors.read()[-3000:]
        if status == 0:
            return
        if tried is None:
            raise RuntimeError(said)
        yield tried[0], tried[2], f"XLA stops the process ({status})"
        left = left[left.index(tried[0]) :]
        start = tried[1] + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="operations whose name has this in it")
    parser.add_argument("--limit", type=int, default=12, help="placements for each mesh")
    parser.add_argument("--first", default=OPERATIONS[0].name, help="the operation to begin with")
    parser.add_argument("--meshes", type=int, default=len(MESHES), help="how many of the meshes")
    parser.add_argument("--by", choices=("xla", "cjax", "both"), default="both")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(*json.loads(args.work))
        return
    names = [each.name for each in OPERATIONS]
    names = [name for name in names[names.index(args.first) :] if args.only in name]
    print(f"JAX {jax.__version__}, {len(names)} operations, up to {args.limit} placements on {args.meshes} meshes each")
    for by in ("xla", "cjax") if args.by == "both" else (args.by,):
        count, wrong = 0, 0
        for name, placement, what in search(names, args.limit, args.meshes, by == "cjax"):
            count += 1
            if what is not None:
                wrong += 1
                print(f"{by}: {name}: {placement}: {what}", flush=True)
        print(f"{by}: {count} placements, {wrong} wrong", flush=True)


if __name__ == "__main__":
    main()
