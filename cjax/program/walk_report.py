"""The report of a program that walks over layers: its programs together, and where rows live."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax.sharding import Mesh

from cjax.audit import Audit, audit, hlo
from cjax.planner.costs.walk import WalkCost, rates_of, reading_again, walk_cost
from cjax.planner.hardware import Hardware, more_of_a_card, more_of_a_host
from cjax.planner.homes import Homes, Kind, Phase, occupied
from cjax.program.composed import Composed
from cjax.program.description import param_rows, time_of, transfer_rows, uncovered
from cjax.program.homes import describe_walk
from cjax.report import FlopCount, MemoryUse, Report
from cjax.trace.jaxpr.cost import cost
from cjax.walk.measured import Measured, WalkPiece, num_bytes
from cjax.walk.optimizer import RowOptimizer

FORWARD = ("begin", "enter", "once", "forward", "leave")


def describe_walked(composed: Composed, measured: Measured, homes: Homes, hardware: Hardware, record: int) -> Report:
    """What a step needs, moves and takes, from its programs as they are compiled; `record` as of `describe_walk`."""
    audits = audited(composed, measured)
    whole = _together(audits)
    tokens, rates = num_tokens(composed), rates_of(hardware)
    step = cost_of(composed, measured, audits, hardware)(homes)
    assert composed.walker is not None
    there = occupied(measured.sizes, measured.peaks, homes)
    shape = composed.state_shape
    kinds: tuple[Kind, ...] = ("params", "frozen", "opt")
    outside = {kind: num_bytes(composed.walker.outside_structs(kind)) for kind in kinds}
    model_state, batch = num_bytes(shape._model_state), num_bytes(composed.with_batch(composed.batch_shape))
    state = there.device["params"] + there.device["frozen"] + outside["params"] + outside["frozen"]
    opt_state = there.device["opt"] + outside["opt"]
    rest = max(0, there.peak - state - opt_state - model_state - batch)
    forward = cost(composed.trace.closed)
    model = 3.0 * forward.flops * composed.plan.microbatches
    matmul = 3.0 * forward.matmul_flops * composed.plan.microbatches
    devices, moved = list(composed.mesh.devices.flat), sum(there.host.values()) + there.moving
    asked = more_of_a_card(devices, there.peak), more_of_a_host(devices, moved)
    return Report(
        plan=str(composed.plan),
        devices=f"{composed.mesh.size} x {hardware.name}",
        memory=MemoryUse(
            params=state, optimizer=opt_state, carried=model_state, batch=batch, activations=rest, limit=hardware.memory
        ),
        params=param_rows(composed),
        transfers=transfer_rows(whole, hardware if hardware.memory_bandwidth is not None else None),
        flops=FlopCount(model, matmul, max(0.0, whole.flops * composed.mesh.size - matmul), whole.flops),
        time=time_of(composed, whole, hardware),
        watch=[*composed.notes, *uncovered(composed.trace), *filter(None, asked)],
        walk=describe_walk(composed.plan, measured.sizes, measured.peaks, homes, step, rates, tokens, record),
    )


def audited(composed: Composed, measured: Measured) -> list[tuple[WalkPiece, Audit]]:
    """What each program does."""
    return [(piece, _audited(piece, composed.mesh)) for piece in measured.pieces]


def cost_of(
    composed: Composed, measured: Measured, audits: Sequence[tuple[WalkPiece, Audit]], hardware: Hardware
) -> Callable[[Homes], WalkCost]:
    """What a step costs with rows at some homes, by what its programs compute."""
    peak = hardware.matmul_flops(composed.plan.precision)
    compute: dict[Phase, float] | None = None
    if peak is not None:
        compute = {"forward": 0.0, "backward": 0.0}
        for piece, facts in audits:
            phase: Phase = "forward" if piece.name.split()[0] in FORWARD else "backward"
            compute[phase] += piece.calls * facts.flops / peak
    assert composed.walker is not None
    optimizer, lengths = composed.walker.optimizer, composed.walker.lengths
    again = {} if optimizer is None else reads_again(optimizer, len(lengths))
    tokens, rates = num_tokens(composed), rates_of(hardware)
    return lambda homes: walk_cost(measured.sizes, homes, rates, compute, tokens, reading_again(again))


def reads_again(optimizer: RowOptimizer, num_stacks: int) -> dict[Kind, int]:
    """How many passes before the last bring rows of each kind to the devices: those of the stack that has the most."""
    found: dict[Kind, int] = {}
    kinds: tuple[Kind, ...] = ("params", "opt", "grads")
    for kind in kinds:
        passes = [
            sum(
                kind in optimizer.reads(number, k, 0) and not (number == 1 and optimizer.is_early(k, 0))
                for number in range(1, optimizer.num_rounds + 1)
            )
            for k in range(num_stacks)
        ]
        found[kind] = max(passes, default=0)
    return found


def num_tokens(composed: Composed) -> int:
    """Numbers of the first leaf of whole numbers with two dims, or rows."""
    leaves = jax.tree.leaves(composed.batch_shape)
    texts = [leaf for leaf in leaves if len(leaf.shape) == 2 and leaf.dtype.kind in "iu"]
    return max((leaf.shape[0] * leaf.shape[1] for leaf in texts), default=max(x.shape[0] for x in leaves if x.shape))


def _audited(piece: WalkPiece, mesh: Mesh) -> Audit:
    """What a program does. One that only makes numbers, out of none, is a program for one device."""
    text = piece.compiled.as_text()
    return audit(piece.compiled, mesh if text and hlo.parse(text).num_devices == mesh.size else None)


def _together(audits: Sequence[tuple[WalkPiece, Audit]]) -> Audit:
    """One step's facts, of programs that are called several times."""
    collectives = [
        dataclasses.replace(each, count=each.count * piece.calls)
        for piece, facts in audits
        for each in facts.collectives
    ]
    first = audits[0][1]
    return dataclasses.replace(
        first,
        collectives=tuple(collectives),
        memory=None,
        flops=sum(piece.calls * facts.flops for piece, facts in audits),
        bytes_accessed=sum(piece.calls * facts.bytes_accessed for piece, facts in audits),
        unknown_loops=sum(facts.unknown_loops for _, facts in audits),
        uncounted=tuple(sorted({name for _, facts in audits for name in facts.uncounted})),
        attention_kernels=tuple(sorted({name for _, facts in audits for name in facts.attention_kernels})),
    )
