"""What one plan of one model does on absent H100s, as a row of numbers, and the largest size that fits."""

import time
from collections.abc import Callable
from dataclasses import asdict

import jax
import optax
from shared.compiled import described
from shared.results import Results, Row

import cjax
from cjax import Plan
from cjax.mesh import compile_lowered, resolve_devices
from cjax.planner.hardware import hardware_of

from .models import Case, elements_received


def measure(results: Results, part: str, case: Case, plan: str) -> Row:
    """One compilation for H100s: bytes by kind, axis and dtype, partners, memory, floors. A refusal is a row too."""

    def make() -> Row:
        start = time.perf_counter()
        parsed = Plan.parse(plan)
        devices = resolve_devices(f"h100:{parsed.model_size * max(parsed.data, 1)}")
        try:
            program = cjax.parallelize(
                case.build, case.loss, optax.adam(1e-3), case.batch_shape, f"{plan} precision=bfloat16", devices=devices
            )
        except ValueError as error:
            return {"refused": str(error)}
        try:
            compiled = compile_lowered(program.lower(), devices)
        except jax.errors.JaxRuntimeError as error:  # the GPU compiler finds no tiles for some sizes
            return {"failed": str(error).splitlines()[0]}
        row = described(cjax.audit(compiled, program.mesh), hardware_of(devices))
        if case.kind in ("blocks", "vit") and parsed.data < 2:
            row["formula"] = case.layers * elements_received(plan, case.tokens, case.width)
        return row | {"seconds": round(time.perf_counter() - start, 1), "jax": jax.__version__}

    row = results.get({"part": part, "plan": plan} | asdict(case), make)
    print(f"  {part} {case.name:10s} batch {case.batch:6d} x {case.length:5d} {plan:18s} {_short(row)}", flush=True)
    return row


def _short(row: Row) -> str:
    if reason := row.get("refused", row.get("failed")):
        return "not compiled: " + reason.splitlines()[0][:90]
    gib = {name: row[name] / 2**30 for name in ("received", "peak")}
    return f"received {gib['received']:8.3f} GiB, peak {gib['peak']:7.2f} GiB, {row['seconds']:.0f} s"


def largest(peak_at: Callable[[int], Row], unit: int, starts: tuple[int, int], max_compiles: int = 4) -> Row:
    """The largest size whose step fits, found along the line through what was compiled: memory is nearly affine.

    Args:
      peak_at: the row of a size.
      unit: sizes are its multiples.
      starts: the first two sizes to compile.
      max_compiles: then the search ends; `fits` and `fails` of its result say how far it came.

    Returns:
      `fits`, the largest size seen to fit (0: none), `fails`, the smallest seen not to (None: none), and
      `line`, what the line through the last two points says.
    """
    seen: dict[int, float] = {}
    fits, fails, limit, line, size = 0, None, 0.0, 0, starts[0]
    tried: set[int] = set()
    while len(seen) < max_compiles and len(tried) < 2 * max_compiles:
        row = peak_at(size)
        tried.add(size)
        if "refused" in row:
            return {"fits": 0, "fails": size, "line": 0, "refused": row["refused"]}
        if "failed" in row:
            size -= max(unit, size // 16 // unit * unit)
            continue
        limit, seen[size] = row["limit"], row["peak"]
        fits = max((n for n, peak in seen.items() if peak <= limit), default=0)
        fails = min((n for n, peak in seen.items() if peak > limit), default=None)
        if len(seen) == 1:
            size = starts[1]
            continue
        (a, at_a), (b, at_b) = sorted(seen.items(), key=lambda item: abs(item[1] - limit))[:2]
        line = int((a + (limit - at_a) * (b - a) / (at_b - at_a)) // unit * unit)
        size = max(line, fits + unit)
        size = min(size, fails - unit) if fails is not None else size
        if size in tried or size <= fits or (fits and seen[fits] > 0.99 * limit):
            break
    return {"fits": fits, "fails": fails, "line": line, "compiles": len(seen)}
