"""What `cjax plan --budget` says by arithmetic that a device holds, beside the compiled programs of the same plan."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import optax
from shared.results import Results, Row

import cjax
from cjax.models import BERT, GPT, T5, ViT, bert, gpt, masked_loss, t5, t5_loss, vit, vit_loss
from cjax.models import loss as gpt_loss
from cjax.models.llama import Llama, LlamaConfig
from cjax.models.llama import loss as llama_loss
from cjax.plan import Plan
from cjax.planner.choice.homes import choose_homes
from cjax.planner.choice.space import arrangement_of
from cjax.planner.choice.walks import row_sizes
from cjax.planner.homes import KINDS, Homes, RowSizes, occupied
from cjax.program.plans import planned

LLAMA_7B = LlamaConfig(32, 32, 32, 4096, 11008, context=2048)
ADAMW, SGD = (lambda: optax.adamw(1e-4)), (lambda: optax.sgd(1e-2, momentum=0.9))


@dataclass(frozen=True)
class Pair:
    """A model and a plan.

    Args:
      model: what it is called.
      devices: absent ones.
      rows: of the whole batch.
      length: of a text; pixels of an image's side.
      plan: without a budget.
      optimizer: makes it.
    """

    model: str
    devices: str
    rows: int
    length: int
    plan: str
    optimizer: Callable[[], Any] = ADAMW


PAIRS = [
    Pair("gpt2", "h100:1", 8, 1024, "precision=bfloat16"),
    Pair("gpt2-xl", "h100:1", 8, 1024, "precision=bfloat16"),
    Pair("gpt2-xl", "h100:1", 4, 1024, ""),
    Pair("gpt2-xl", "h100:1", 32, 1024, "precision=bfloat16 microbatches=4"),
    Pair("gpt2-xl", "h100:8", 64, 1024, "zero=3 precision=bfloat16"),
    Pair("gpt2-large", "h100:2", 16, 1024, "zero=1 precision=float16"),
    Pair("gpt2-medium", "h100:1", 8, 1024, "precision=bfloat16", SGD),
    Pair("llama-7b", "h100:1", 4, 2048, "precision=bfloat16"),
    Pair("llama-7b", "h100:8", 16, 2048, "tensor=2 zero=3 precision=bfloat16"),
    Pair("t5-large", "h100:1", 8, 512, "precision=bfloat16"),
    Pair("t5-3b", "a100:2", 16, 512, "zero=3 precision=bfloat16 microbatches=2"),
    Pair("vit-l16", "h100:1", 64, 224, "precision=bfloat16"),
    Pair("bert-large", "h100:4", 64, 512, "zero=2 precision=bfloat16"),
]


def call_of(pair: Pair) -> tuple[Any, Any, Any, Any]:
    """What `cjax.parallelize` takes."""
    name, rows, length = pair.model, pair.rows, pair.length
    make: Any
    ids = jax.ShapeDtypeStruct((rows, length), "int32")
    batch: Any = {"inputs": ids, "targets": ids}
    if name.startswith("gpt"):
        sizes = gpt(name, context=length)
        make, loss = (lambda rngs: GPT(sizes, rngs=rngs)), gpt_loss
    elif name == "llama-7b":
        make, loss = (lambda rngs: Llama(LLAMA_7B, rngs=rngs)), llama_loss
    elif name.startswith("t5"):
        of_t5 = t5(name)
        make, loss, batch = (lambda rngs: T5(of_t5, rngs=rngs)), t5_loss, batch | {"source": ids}
    elif name.startswith("vit"):
        of_vit = vit(name)
        make, loss = (lambda rngs: ViT(of_vit, rngs=rngs)), vit_loss
        batch = {
            "images": jax.ShapeDtypeStruct((rows, length, length, 3), "float32"),
            "labels": jax.ShapeDtypeStruct((rows,), "int32"),
        }
    else:
        of_bert = bert(name)
        make, loss = (lambda rngs: BERT(of_bert, rngs=rngs)), masked_loss
    return make, loss, pair.optimizer(), batch


def arithmetic(pair: Pair) -> Row:
    """The most that a device holds, by arithmetic to what the compiled programs say, for homes from all away, with each
    way to update, to all that fits."""
    call, began = call_of(pair), time.perf_counter()
    plan = Plan.parse(pair.plan or "data=-1")
    planning, (num,), _ = planned(call, pair.devices)
    question, plan = planning.question, plan.resolve(num)
    arrangement = arrangement_of(plan)
    split = question.split_or_reason(arrangement)
    assert not isinstance(split, str), split
    said, peaks = row_sizes(question.work(arrangement), split, plan, question.hardware_at(num))
    program = cjax.parallelize(*call, f"{pair.plan or 'data=-1'} budget=10TiB", devices=pair.devices)
    assert program._walking is not None
    measured = program._walking.measured
    lengths = [len(rows) for rows in said["params"]]
    found: Row = {"rows": [_sizes(said), _sizes(measured.sizes)], "outside": [peaks.outside, measured.peaks.outside]}
    away = Homes({kind: Homes.all_at("host", lengths).of[kind] for kind in said})
    for name in ("forward", "after", "backward", "update", "birth", "fused", "deferred"):
        found[f"{name} itself"] = [getattr(peaks, name), getattr(measured.peaks, name)]
    least = occupied(said, peaks, away).peak
    deferred = away.with_deferred(said)
    ways = {
        "least": away, "deferred": deferred, "fused": replace(away, fused=deferred.deferred),
        "half more": choose_homes(said, peaks, int(1.5 * least), defers=True), "all": choose_homes(said, peaks),
    }  # fmt: skip
    for name, homes in ways.items():
        of: Any = {kind: homes.of.get(kind, Homes.all_at("device", lengths).of[kind]) for kind in KINDS}
        full = replace(homes, of=of)
        both = occupied(said, peaks, homes), occupied(measured.sizes, measured.peaks, full)
        found[name] = {
            "said": both[0].peak, "compiled": both[1].peak, "said_to_compiled": round(both[0].peak / both[1].peak, 3),
            "fullest": [each.fullest for each in both],
        }  # fmt: skip
    return {**found, "compiled_in": round(time.perf_counter() - began, 1)}


def _sizes(sizes: RowSizes) -> dict[str, list[int]]:
    return {
        kind: [rows[0].device for rows in stacks] for kind, stacks in sizes.items() if any(r[0].device for r in stacks)
    }


def arithmetics(results: Results, folder: Path) -> None:
    """Expected: never less than 0.97 of what is compiled."""
    for pair in PAIRS:
        optimizer = "adamw" if pair.optimizer is ADAMW else "sgd"
        key = {
            "part": "arithmetic",
            "model": pair.model,
            "devices": pair.devices,
            "batch": pair.rows,
            "plan": pair.plan,
        }
        print(results.get(key | {"optimizer": optimizer}, functools.partial(arithmetic, pair)), flush=True)
