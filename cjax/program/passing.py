"""What devices hold of a state that walks while nothing is trained, and what a budget leaves for passes forward."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from cjax.plan.sizes import Offloaded, size_text
from cjax.planner.choice.homes import TooLittle, readable, rounded_up
from cjax.planner.homes import Homes, Kind, in_flight
from cjax.program.composed import Composed
from cjax.tree import PyTree
from cjax.walk.forward import RowsOf
from cjax.walk.measured import num_bytes, row_sizes
from cjax.walk.walker import Walker

STATE: tuple[Kind, ...] = ("params", "frozen", "opt")
AWAY: tuple[Offloaded, ...] = ("params", "optimizer")  # with these, no state of layers is at home on the devices


def weight_rows(walker: Walker) -> RowsOf:
    """Of each stack a layer's params and frozen, as structs: what steps keep of them."""
    return lambda k: [tuple(walker.structs("params", k)), tuple(walker.structs("frozen", k))]


def inputs_of(composed: Composed, batch_shape: PyTree) -> tuple[Any, ...]:
    """What passes over such a batch are given beside rows: params, frozen, model state, batch and key, as structs."""
    walker, shape = composed.walker, composed.state_shape
    assert walker is not None
    params, frozen = (tuple(walker.outside_structs(kind)) for kind in STATE[:2])
    return params, frozen, shape._model_state, composed.with_batch(batch_shape), shape._key


def room_of(composed: Composed, homes: Homes, passing: Sequence[Kind] = ("params", "frozen")) -> int:
    """Bytes of a device that a budget leaves beside a state: what is outside of layers, rows at home on the device, and
    those of the kinds that a pass brings there on their way. Below zero where there are none."""
    walker, budget = composed.walker, composed.plan.budget
    assert walker is not None and budget is not None
    sizes, held = row_sizes(walker), num_bytes(composed.state_shape._model_state)
    held += sum(num_bytes(walker.outside_structs(kind)) for kind in STATE)
    for kind in STATE:
        for rows, places in zip(sizes[kind], homes.of[kind], strict=True):
            held += sum(row.device for row, home in zip(rows, places, strict=True) if home == "device")
            if kind in passing:
                held += in_flight([row.device for row, home in zip(rows, places, strict=True) if home != "device"])
    return budget - held


def host_left(composed: Composed, homes: Homes) -> int | None:
    """Bytes of host memory that a plan leaves a process beside a state; None: no limit."""
    walker, host = composed.walker, composed.plan.host
    assert walker is not None
    if host is None:
        return None
    sizes = row_sizes(walker)
    return host - sum(
        row.host
        for kind in STATE
        for rows, places in zip(sizes[kind], homes.of[kind], strict=True)
        for row, home in zip(rows, places, strict=True)
        if home == "host"
    )


def check_room(composed: Composed, homes: Homes, peak: int, num_rows: int) -> None:
    """Raises TooLittle where a pass over so many rows of a batch needs more of a device than a budget leaves."""
    budget, room = composed.plan.budget, room_of(composed, homes)
    assert budget is not None
    if peak <= room:
        return
    fewer = max(1, num_rows * max(room, 0) // peak)
    say = f"give batches of fewer rows, about {fewer}, or " if fewer < num_rows and room > 0 else ""
    # A larger budget alone need not help: more layers would stay on the devices, and fill it.
    walker, plan = composed.walker, composed.plan
    assert walker is not None
    least = budget - room_of(composed, Homes.all_at("host", walker.lengths)) + peak
    kept = tuple(kind for kind in plan.offload if kind not in AWAY)
    enough = dataclasses.replace(plan, offload=(*AWAY, *kept), budget=budget if budget >= least else rounded_up(least))
    raise TooLittle(
        f"to score {num_rows} rows at once takes {readable(peak)} of a device beside the weights, and budget="
        f"{size_text(budget)} leaves {readable(max(room, 0))}: {say}keep no layer on the devices, "
        f'other = program.replan("{enough}"), and other.evaluate(other.restore(state), ...).',
        "budget",
        peak - room,
    )
