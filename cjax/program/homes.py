"""The homes of a plan that walks over layers, and what its step costs, in words for the report."""

from collections.abc import Mapping
from typing import get_args

from cjax.plan import Plan
from cjax.planner.costs.walk import DISK_READ, DISK_WRITE, WalkCost, WalkRates
from cjax.planner.homes import KINDS, Home, Homes, Kind, Peaks, Phase, RowSizes, occupied
from cjax.report.walk import ClassUse, PhaseUse, WalkUse
from cjax.walk.files import num_records

NAMES: Mapping[Kind, str] = {
    "params": "params",
    "frozen": "frozen params",
    "opt": "optimizer",
    "grads": "gradients",
    "inputs": "activations",
}
PASSES: Mapping[Phase, str] = {
    "birth": "making the parameters",
    "forward": "the forward pass",
    "after": "the loss",
    "backward": "the backward pass",
    "update": "the update",
}


def describe_walk(
    plan: Plan, sizes: RowSizes, peaks: Peaks, homes: Homes, cost: WalkCost, rates: WalkRates, tokens: int,
    record: int = 0, is_bound: bool = True,
) -> WalkUse:  # fmt: skip
    """What a report says of the homes that were chosen.

    Args:
      plan: what they were chosen for.
      sizes: of the rows.
      peaks: what a device needs beside rows.
      homes: of the rows.
      cost: of a step with them.
      rates: what that goes by.
      tokens: of a step.
      record: bytes that a process keeps on disk beside rows, if it keeps any there.
      is_bound: whether the cost counts computing at the devices' peak.
    """
    there = occupied(sizes, peaks, homes)
    classes = []
    kinds: list[Kind] = [kind for kind in KINDS if kind in sizes]
    for kind in kinds:
        layers: dict[str, int] = dict.fromkeys(get_args(Home), 0)
        for rows, places in zip(sizes[kind], homes.of[kind], strict=True):
            for row, home in zip(rows, places, strict=True):
                layers[home] += bool(row.device)
        if any(layers.values()):
            moved = cost.moved[kind]
            classes.append(
                ClassUse(
                    NAMES[kind], layers, there.device[kind], there.host[kind], there.disk[kind],
                    moved.link_in, moved.link_out, moved.disk_read, moved.disk_written,
                )
            )  # fmt: skip
    if record and any(each.disk for each in classes):
        classes.append(ClassUse("the rest", {"disk": 1}, disk=record, disk_written=record // num_records()))
    phases = {
        str(phase): PhaseUse(each.compute, max(each.link_in, each.link_out), each.disk)
        for phase, each in cost.seconds.items()
    }
    return WalkUse(
        classes, there.peak, PASSES[there.fullest], plan.budget, plan.host, plan.disk, phases, cost.bound or "",
        tokens, cost.hidden_from, _rates_text(rates, any(each.disk for each in classes)), is_bound, there.moving,
    )  # fmt: skip


def _rates_text(rates: WalkRates, reads_disk: bool) -> str:
    if rates.link is None:
        return ""
    link = f"link {rates.link / 1e9:.3g} GB/s each way"
    if not reads_disk:
        return link
    own = (rates.disk_read, rates.disk_write) != (DISK_READ, DISK_WRITE)
    disk = f"disk {rates.disk_read / 1e9:.3g} GB/s read, {rates.disk_write / 1e9:.3g} written"
    return f"{link}, {disk}" + ("" if own else " (assumed)")
