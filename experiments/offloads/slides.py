"""GPT-2 XL and T5-3B on 8 absent H100s, as in Isenko's slides about Gemini beside FSDP: ZeRO-3 beside budgets."""

import functools
import time
from pathlib import Path
from typing import Any

import jax
import optax
from shared.charts import Chart
from shared.results import Results, Row

import cjax
from cjax.models import GPT, T5, gpt, t5, t5_loss
from cjax.models import loss as gpt_loss

CARDS, LENGTH, MICROBATCH = 8, {"gpt2-xl": 1024, "t5-3b": 512}, 4
ROWS = (4, 32)  # of a device
PLANS = {
    "ZeRO-3": "zero=3",
    "ZeRO-3, layers made again": "zero=3 remat=block",
    "ZeRO-3, 12 GiB": "zero=3 budget=12GiB",
}


def slides(results: Results, folder: Path) -> None:
    """Each model by rows of a device under each plan, and a picture of the memory. Expected: under a budget the memory
    of a device stays what it is said to be, whatever the rows; time is never less than that of plain ZeRO-3."""
    for model in LENGTH:
        for rows in ROWS:
            for name, plan in PLANS.items():
                key = {"part": "slides", "model": model, "rows": rows, "name": name}
                print(results.get(key, functools.partial(compiled, model, rows, plan)), flush=True)
    draw(results)


def draw(results: Results) -> None:
    """A picture of each model's memory and one of its seconds, beside the rows."""
    for model in LENGTH:
        own = [row for row in results.of("slides") if row["model"] == model]
        for of, unit, scale, high in (("memory", "GiB of a device", 2**30, 80.0), ("seconds", "ms, at least", 1e-3, 0)):
            lines = {
                name: [(row["rows"], row[of] / scale) for row in own if row["name"] == name and of in row]
                for name in PLANS
            }
            lines = {name: points for name, points in lines.items() if points}
            top = high or 1.1 * max(y for points in lines.values() for _, y in points)
            chart = Chart(f"{model}, {CARDS} H100, compiled", unit, "rows of a device", 0, top, doubling=True)
            results.path.with_name(f"{results.path.stem}-{model}-{of}.svg").write_text(chart.svg(lines))


def compiled(model: str, rows: int, plan: str) -> Row:
    """What the programs of a step take and need, or why there are none."""
    make: Any
    if model == "gpt2-xl":
        sizes, loss = gpt(model, context=LENGTH[model]), gpt_loss
        make = lambda rngs: GPT(sizes, rngs=rngs)  # noqa: E731
    else:
        config, loss = t5(model), t5_loss
        make = lambda rngs: T5(config, rngs=rngs)  # noqa: E731
    ids = jax.ShapeDtypeStruct((CARDS * rows, LENGTH[model]), "int32")
    batch = {"inputs": ids, "targets": ids} | ({"source": ids} if model == "t5-3b" else {})
    plan = f"{plan} precision=bfloat16" + (f" microbatches={rows // MICROBATCH}" if "budget" in plan else "")
    began = time.perf_counter()
    try:
        program = cjax.parallelize(make, loss, optax.adamw(1e-4), batch, plan, devices=f"h100:{CARDS}")
        report = program.report()
    except ValueError as error:
        return {"plan": plan, "refused": str(error)}
    took = {"plan": plan, "compiled_in": round(time.perf_counter() - began, 1)}
    if report.walk is not None:
        names = ("host", "link_in", "link_out")
        moved = {name: report.walk.total(name) for name in names} | {"moving": report.walk.moving}
        return {"memory": report.walk.peak, "seconds": round(report.walk.seconds or 0.0, 4), **moved, **took}
    assert report.time is not None
    return {"memory": report.memory.total, "seconds": round(report.time.total, 4), **took}
