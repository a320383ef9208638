"""What one plan of one model does on absent H100s, as a row of numbers, and the largest size that fits."""

import json
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import optax
from tensor_parallel_models import Case, elements_received

import cjax
from cjax import Plan
from cjax.audit import Audit
from cjax.mesh import compile_lowered, resolve_devices
from cjax.planner.hardware import Hardware, hardware_of

Row = dict[str, Any]


class Results:
    """Rows on disk, one JSON object a line: each is kept as soon as it is known, and what is there isn't done again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self.rows: list[Row] = [json.loads(line) for line in lines]

    def get(self, key: Row, make: Callable[[], Row]) -> Row:
        """The row with these entries; made and kept if there is none."""
        key = json.loads(json.dumps(key))
        for row in self.rows:
            if all(row.get(name) == value for name, value in key.items()):
                return row
        row = key | make()
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.rows.append(row)
        return row

    def of(self, part: str) -> list[Row]:
        return [row for row in self.rows if row["part"] == part]


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


def described(facts: Audit, hardware: Hardware) -> Row:
    """The numbers of a compiled step, per device and step: bytes, elements of any dtype, seconds."""
    assert facts.memory is not None and hardware.bf16_flops is not None
    moved: dict[str, float] = defaultdict(float)
    elements = transfer = exposed = 0.0
    for each in facts.collectives:
        moved[f"{each.kind} {each.axis} {each.dtype}"] += each.total_bytes
        elements += each.total_bytes * sum(s.size for s in each.shapes) / sum(s.bytes for s in each.shapes)
        bandwidth = hardware.bandwidth(each.span)
        assert bandwidth is not None
        transfer += each.total_bytes / bandwidth
        exposed += each.exposed_bytes(hardware) / bandwidth
    return {
        "moved": dict(sorted(moved.items(), key=lambda item: -item[1])),
        "received": facts.moved(),
        "elements": elements,
        "partners": facts.num_partners,
        "peak": facts.memory.peak,
        "limit": hardware.memory,
        "flops": facts.flops,
        "compute_s": facts.flops / hardware.bf16_flops,
        "transfer_s": transfer,
        "exposed_s": exposed,
    }


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
