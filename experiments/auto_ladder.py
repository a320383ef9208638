"""What `auto` finds against the ladder of data-parallel plans that it once climbed: predicted, and compiled by XLA.

    python experiments/auto_ladder.py                 # predicted and compiled; needs the extra aot
    python experiments/auto_ladder.py --predict       # predicted alone

No devices: cards are absent, and nothing runs. The ladder takes the first of its plans that fits by today's arithmetic.
Both plans are then compiled for the cards; memory, bytes on the way and those that no computation hides are the
compiled program's own. Each row is kept in the log as soon as it is known. A few minutes of one core. Expected: `auto`
is never slower by prediction, and both fit as compiled.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # cards are planned for, not looked for

import optax
from shared.results import KEPT, Results, Row

import cjax
from cjax.models import GPT, gpt
from cjax.models import loss as gpt_loss
from cjax.models.bert import BERT, bert, masked_loss
from cjax.plan import Auto
from cjax.planner.choice.planning import Asked, Planning
from cjax.planner.choice.scored import Scored
from cjax.planner.hardware import hardware_of_cluster
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource

LOG = KEPT / "auto-ladder-2026-11-23.log"
# ZeRO, remat, micro-batches: cheapest first, as it was thought before there was a prediction.
LADDER = (
    (0, "none", 1), (1, "none", 1), (2, "none", 1), (3, "none", 1), (2, "dots", 1), (3, "dots", 1), (3, "block", 1),
    (3, "block", 2), (3, "block", 4), (3, "block", 8), (3, "block", 16), (3, "block", 32), (3, "block", 64),
)  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A model, its rows of so many tokens, and the cards."""

    model: str
    rows: int
    length: int
    devices: str

    def make(self) -> tuple[Any, ...]:
        ids = jax.ShapeDtypeStruct((self.rows, self.length), "int32")
        batch = {"inputs": ids, "targets": ids}
        if self.model.startswith("bert"):
            config = bert(self.model, context=self.length)
            return (lambda rngs: BERT(config, rngs=rngs)), masked_loss, optax.adam(1e-3), batch
        sizes = gpt(self.model, context=self.length)
        return (lambda rngs: GPT(sizes, rngs=rngs)), gpt_loss, optax.adam(1e-3), batch


SETTINGS = (
    Setting("gpt2", 1024, 1024, "a100-40gb:4"),  # the ladder recomputes
    Setting("bert-large", 512, 512, "a100-40gb-pcie:4"),  # and its links are slow
    Setting("gpt2-medium", 64, 1024, "a100-40gb:4/nvlink=3GB/s"),  # data parallelism waits for gradients
)


def predicted(setting: Setting) -> Row:
    """The ladder's plan and `auto`'s, with what is predicted of both."""
    model, of, optimizer, batch = setting.make()
    cluster = cjax.Cluster.parse(setting.devices)
    source = TraceSource(capture(model, of, batch), batch)
    planning = Planning(source, optimizer, lambda num: hardware_of_cluster(cluster, num))
    assert cluster.num_devices is not None, "a setting says how many"
    for zero, remat, microbatches in LADDER:
        plan = cjax.Plan(zero=zero, remat=remat, microbatches=microbatches, precision="bfloat16")
        scored = planning.score(plan.resolve(cluster.num_devices))
        if isinstance(scored, Scored) and scored.fits and setting.rows % (microbatches * scored.num_devices) == 0:
            break
    else:
        raise ValueError(f"no plan of the ladder fits {setting}")
    found = planning.search(Asked((cluster.num_devices,), Auto.parse("auto precision=bfloat16")))
    best = found.best[0]
    return {"ladder": _row(scored), "auto": _row(best), "faster": round(scored.time / best.time, 3)}


def _row(scored: Scored) -> Row:
    return {"plan": str(scored.plan), "ms": round(1e3 * scored.time, 1), "GiB": round(scored.bytes / 2**30, 2)}


def compiled(setting: Setting, plan: str) -> Row:
    """What XLA makes of a plan."""
    report = cjax.parallelize(*setting.make(), plan=plan, devices=setting.devices).report()
    assert report.flops is not None, "XLA compiled it"
    return {
        "GiB": round(report.memory.total / 2**30, 2),
        "fits": report.memory.fits,
        "GiB moved": {axes: round(size / 2**30, 3) for axes, size in report.bytes_moved_by_axis.items()},
        "GiB not hidden": round(sum(each.exposed_bytes or 0 for each in report.transfers) / 2**30, 3),
        "TFLOP a device": round(report.flops.per_device / 1e12, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--predict", action="store_true", help="compile nothing")
    parser.add_argument("--log", type=Path, default=LOG, help="where rows are kept")
    options = parser.parse_args()
    results = Results(options.log)
    for setting in SETTINGS:
        key = {"model": setting.model, "rows": setting.rows, "tokens": setting.length, "devices": setting.devices}
        found = results.get({"part": "predicted"} | key, lambda setting=setting: predicted(setting))
        print(found, flush=True)
        for who in ("ladder", "auto") if not options.predict else ():
            plan = found[who]["plan"]
            row = results.get(
                {"part": "compiled", "who": who, "plan": plan} | key, lambda s=setting, p=plan: compiled(s, p)
            )
            print(row, flush=True)


if __name__ == "__main__":
    main()
