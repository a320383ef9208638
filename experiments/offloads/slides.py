"""GPT-2 XL and T5-3B on two absent A100s of 80 GB: ZeRO-3 beside budgets, as Isenko's slides of 2023 have FSDP beside
Gemini.

There, with layers made again in the backward pass, FSDP trained GPT-2 XL with 73 to 88 texts of a card and Gemini with
98, at best 3 % faster; T5-3B with 64 to 73 under FSDP, in memory that grew from step to step until it was full.
"""

import functools
import time
from pathlib import Path
from typing import Any

import jax
import optax
from shared.results import Results, Row

import cjax
from cjax.models import GPT, T5, gpt, t5, t5_loss
from cjax.models import loss as gpt_loss
from cjax.report.charts import Chart

CARDS, MICROBATCH = 2, 16
LENGTH = {"gpt2-xl": 1024, "t5-3b": 512}
ROWS = {"gpt2-xl": (16, 128), "t5-3b": (16, 64)}  # of a device
PLANS = {
    "gpt2-xl": {"ZeRO-3": "zero=3 remat=block", "70 GiB": "zero=3 budget=70GiB", "24 GiB": "zero=3 budget=24GiB"},
    "t5-3b": {"ZeRO-3": "zero=3 remat=block", "70 GiB": "zero=3 budget=70GiB", "20 GiB": "zero=3 budget=20GiB"},
}


def slides(results: Results, folder: Path) -> None:
    """Each model by rows of a device under each plan, and pictures of memory and time. Expected: under a budget the
    memory of a device stays below it, whatever the rows."""
    for model, plans in PLANS.items():
        for name, plan in plans.items():
            for rows in ROWS[model]:
                key = {"part": "slides", "model": model, "rows": rows, "name": name}
                print(results.get(key, functools.partial(compiled, model, rows, plan)), flush=True)
    draw(results)


def draw(results: Results) -> None:
    """A picture of each model's memory and one of its seconds, beside the rows."""
    for model in LENGTH:
        own = [row for row in results.of("slides") if row["model"] == model and "memory" in row]
        for of, unit, scale, high in (("memory", "GiB of a device", 2**30, 80.0), ("seconds", "s, at least", 1.0, 0.0)):
            lines = {
                name: [(row["rows"], row[of] / scale) for row in own if row["name"] == name] for name in PLANS[model]
            }
            lines = {name: sorted(points) for name, points in lines.items() if points}
            top = max([high, *(1.1 * y for points in lines.values() for _, y in points)])
            chart = Chart(f"{model}, {CARDS} A100, compiled", unit, "rows of a device", 0, top, doubling=True)
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
        program = cjax.parallelize(make, loss, optax.adamw(1e-4), batch, plan, devices=f"a100:{CARDS}")
        report = program.report()
    except ValueError as error:
        return {"plan": plan, "refused": str(error)}
    took = {"plan": plan, "compiled_in": round(time.perf_counter() - began, 1)}
    assert report.time is not None
    if report.walk is not None:
        names = ("host", "link_in", "link_out")
        moved = {name: report.walk.total(name) for name in names} | {"moving": report.walk.moving}
        seconds = max(report.walk.seconds or 0.0, report.time.total)
        return {"memory": report.walk.peak, "seconds": round(seconds, 3), **moved, **took}
    return {"memory": report.memory.total, "seconds": round(report.time.total, 3), **took}
