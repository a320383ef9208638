"""What a program is composed of, and its compiled step, as plain facts for a report."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from cjax.audit import Audit
from cjax.pipeline.gantt import gantt, gantt_svg
from cjax.pipeline.simulate import simulate
from cjax.planner.hardware import Hardware, more_of_a_card
from cjax.program.composed import Composed
from cjax.report import (
    BlockRow,
    DimRow,
    FlopCount,
    MemoryUse,
    ParamRow,
    Report,
    StepTime,
    TraceSummary,
    Transfer,
)
from cjax.sharding.apart.apart import brought_together
from cjax.sharding.apart.faults import is_apart
from cjax.sharding.attention.kernel import kernel_for
from cjax.sharding.storage.storage import Slot, Storage, axes_of_entry
from cjax.trace.attention.positions import positions
from cjax.trace.jaxpr.cost import cost
from cjax.trace.jaxpr.covered import PRIMITIVES, TESTED
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import FACTS, name_of, without_facts
from cjax.trace.jaxpr.view import every_equation
from cjax.trace.reading import Trace, primitives


def describe_step(composed: Composed, audit: Audit, hardware: Hardware, more: Sequence[str] = ()) -> Report:
    """The report of a compiled step; `more` is what there is to say beside."""
    optimizer = composed.shelves.opt
    sizes = dict(composed.mesh.shape)
    memory = _memory(composed, audit, hardware)
    total_opt = sum(_bytes(slot, PartitionSpec(), sizes, whole=True) for slot in optimizer.slots)
    shares = {"optimizer": memory.optimizer / total_opt} if total_opt else {}
    forward = cost(composed.trace.closed)
    model_flops = 3.0 * forward.flops * composed.plan.microbatches
    matmul = 3.0 * forward.matmul_flops * composed.plan.microbatches
    recomputed = max(0.0, audit.flops * composed.mesh.size - matmul)
    if composed.line is not None and composed.plan.remat == "none":
        recomputed = 0.0  # what is more is the stage's with the most to do, which `audit` tells for all
    schedule = composed.line.schedule if composed.line is not None else None
    knows_overlap = hardware.memory_bandwidth is not None
    return Report(
        plan=str(composed.plan),
        devices=f"{composed.mesh.size} x {hardware.name}",
        memory=memory,
        params=param_rows(composed),
        transfers=transfer_rows(audit, hardware if knows_overlap else None),
        flops=FlopCount(model_flops, matmul, recomputed if recomputed > 0.01 * matmul else 0.0, audit.flops),
        time=time_of(composed, audit, hardware),
        shares=shares,
        watch=[
            *composed.notes,
            *more,
            *_plain_attention(composed, audit),
            *_padding(composed),
            *_apart(composed),
            *uncovered(composed.trace),
            *filter(None, [more_of_a_card(list(composed.mesh.devices.flat), memory.total)]),
        ],
        chart=gantt(schedule, width=100) if schedule is not None else "",
        picture=gantt_svg(simulate(schedule)) if schedule is not None else "",
    )


def _plain_attention(composed: Composed, audit: Audit) -> list[str]:
    """That attention on a GPU is not by its fastest kernel, and what it would take."""
    if kernel_for(composed.mesh) is None or audit.attention_kernels or not positions(composed.trace)[0]:
        return []
    return [
        "attention is computed as it is written, not by cuDNN's flash kernel, which takes bfloat16 or float16, heads "
        'of 8 to 128 in eights, no dropout of its weights, and cuDNN itself (pip install "cjax[gpu]", or cjax[aot])'
    ]


def _bytes(slot: Slot, spec: PartitionSpec, sizes: dict[str, int], whole: bool = False) -> int:
    """Bytes of one slot on one device whose leaves are placed as `spec` says, or of a slot that is not split at all."""
    spec = PartitionSpec() if whole else slot.stacked(spec)
    shards = math.prod(sizes[a] for entry in spec for a in axes_of_entry(entry))
    itemsize = 8 if jnp.issubdtype(slot.dtype, jax.dtypes.prng_key) else np.dtype(slot.dtype).itemsize
    return math.prod(slot.stored_shape) * itemsize // shards


def stored_bytes(storage: Storage, sizes: dict[str, int]) -> int:
    """Bytes on one device of a stored tree."""
    return sum(_bytes(slot, slot.spec, sizes) for slot in storage.slots)


def _memory(composed: Composed, audit: Audit, hardware: Hardware) -> MemoryUse:
    sizes, storage = dict(composed.mesh.shape), composed.storage
    specs = storage.zero_specs if composed.plan.zero_stage >= 2 else storage.used_specs
    grads = sum(_bytes(slot, specs[slot.leaves[0]], sizes) for slot in storage.params.slots)
    batch = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(composed.with_batch(composed.batch_shape))
    )
    used = audit.memory
    temporary = used.temporary if used else 0
    return MemoryUse(
        params=stored_bytes(storage.params, sizes) + stored_bytes(storage.frozen, sizes),
        grads=min(grads, temporary),
        optimizer=stored_bytes(composed.shelves.opt, sizes),
        carried=stored_bytes(storage.model_state, sizes),
        batch=batch,
        activations=max(0, temporary - grads),
        compiler=max(0, used.outputs - used.aliased) if used else 0,
        limit=hardware.memory,
    )


def param_rows(composed: Composed) -> list[ParamRow]:
    sizes, trace = dict(composed.mesh.shape), composed.trace
    rows = {}
    for storage, kind in ((composed.storage.params, "params"), (composed.storage.frozen, "frozen")):
        leaves = trace.leaves_of(kind)
        for slot in storage.slots:
            for i in slot.leaves:
                leaf = trace.leaves[leaves[i]]
                itemsize = np.dtype(slot.dtype).itemsize
                names = tuple(trace.names.get(c) for c in trace.user_classes_of(leaves[i]))
                rows[leaves[i]] = ParamRow(
                    leaf.name,
                    slot.logical,
                    str(np.dtype(slot.dtype)),
                    names,
                    tuple(axes_of_entry(entry) for entry in slot.logical_spec),
                    math.prod(leaf.shape) * itemsize,
                    _bytes(slot, slot.spec, sizes) // len(slot.leaves),
                    slot.rows.axis if slot.rows and slot.is_stack else None,
                )
    return [rows[i] for i in sorted(rows)]


def transfer_rows(audit: Audit, hardware: Hardware | None) -> list[Transfer]:
    found: dict[tuple[str, str], list[Any]] = {}
    for each in audit.collectives:
        row = found.setdefault((each.kind, each.axis), [0, 0, 0])
        row[0] += int(each.total_bytes)
        row[1] += each.count
        row[2] = None if hardware is None or row[2] is None else row[2] + int(each.exposed_bytes(hardware))
    return [Transfer(kind, axis, *row) for (kind, axis), row in sorted(found.items(), key=lambda item: -item[1][0])]


def time_of(composed: Composed, audit: Audit, hardware: Hardware) -> StepTime | None:
    peak = hardware.matmul_flops(composed.plan.precision)
    if peak is None:
        return None
    transfer = 0.0
    for each in audit.collectives:
        bandwidth = each.bandwidth(hardware)
        transfer += each.exposed_bytes(hardware) / bandwidth if bandwidth else 0.0
    compute = audit.flops / peak
    # A backward is two forwards' work, half of it for the weights.
    calibration = composed.planning.calibration
    is_shared = calibration is not None and calibration.shares_cores  # whose idle time others have
    idle = 0.0 if composed.line is None or is_shared else simulate(composed.line.schedule).bubble
    return _predicted(composed, StepTime(compute, transfer, compute * idle / (1 - idle)))


def _predicted(composed: Composed, bound: StepTime) -> StepTime:
    """With what is predicted, where the devices are calibrated and the schedule is one that the plan names."""
    planning = composed.planning
    if planning.calibration is None or composed.has_own_schedule or composed.given.optimizer is None:
        return bound
    scored = planning.score(composed.plan)
    if isinstance(scored, str):
        return bound
    parts = {name: seconds for name, seconds in scored.seconds.items() if seconds}
    low, high = scored.low, scored.high
    # The compiled program may do what arithmetic does not know of.
    unseen = bound.total - scored.time
    if unseen > 0:
        parts["unforeseen"] = unseen
        low, high = low + unseen, high + unseen
    return dataclasses.replace(bound, parts=parts, interval=(low, high), source=planning.calibration.source)


def _padding(composed: Composed) -> list[str]:
    said = {}
    for storage, kind in ((composed.storage.params, "params"), (composed.storage.frozen, "frozen")):
        leaves = composed.trace.leaves_of(kind)
        for slot in storage.slots:
            names = composed.trace.dims_of(leaves[slot.leaves[0]]) if slot.leaves else ()
            for name, size, padded in zip(names, slot.shape, slot.padded, strict=True):
                if size != padded:
                    said[f"{name} {size} padded to {padded}"] = None
    return list(said)


def uncovered(trace: Trace) -> list[str]:
    """What in this program cjax does not know, or no test of it has run: primitives, and JAX itself."""
    said, found = [], primitives(trace)
    without = found - FACTS.keys()
    left = {name_of(eqn) for eqn in every_equation(trace.closed.jaxpr) if without_facts(eqn) and not is_apart(eqn)}
    unrelated = trace.dims.unknown.keys() - without
    new = found - without - frozenset().union(*PRIMITIVES.values())
    checked = "and no dim is followed through it. Check this plan with program.check, or verify=True"
    if without - left:
        said.append(f"cjax knows nothing of {_listed(without - left)}: every device computes all of it, {checked}")
    if left:
        said.append(
            f"cjax knows nothing of {_listed(left)}, and what has effects or mutable arrays is left to XLA: it may be "
            f"split, {checked}"
        )
    if unrelated:
        said.append(f"no dim is followed through {_listed(unrelated)}: what it makes may be whole on every device")
    if new:
        said.append(f"no test of cjax has run {_listed(new)}: check this plan with program.check, or verify=True")
    version = ".".join(jax.__version__.split(".")[:2])
    if version not in TESTED:
        said.append(
            f"JAX {jax.__version__} is not one that cjax was tested with ({', '.join(TESTED)}): check this plan with "
            "program.check, or verify=True"
        )
    return said


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


def _apart(composed: Composed) -> list[str]:
    """What is not left to XLA's partitioner, where that costs."""
    return brought_together(composed.trace, composed.storage.layout) if composed.mesh.size > 1 else []


def describe_trace(trace: Trace, model: str) -> TraceSummary:
    """What was found in a trace."""
    sizes: dict[str, set[int]] = {}
    places: dict[str, list[str]] = {}
    for i, leaf in enumerate(trace.leaves):
        for position, name, size in zip(trace.user_dims_of(i), trace.dims_of(i), leaf.shape, strict=True):
            if name != "?":
                sizes.setdefault(name, set()).add(size)
                places.setdefault(name, []).append(f"{leaf.name}:{position}")
    dims = [DimRow(name, tuple(sorted(sizes[name])), tuple(places[name])) for name in sizes]
    total = max(1, len(trace.closed.jaxpr.eqns))
    index = {var: i for i, var in enumerate(trace.closed.jaxpr.invars)}
    blocks = []
    for run in trace.runs:
        weights = [g for g in run.stacked if all(v in index for v in g)]
        what = _block_name([trace.leaves[index[v]].name for v in weights[0]]) if weights else "layers"
        blocks.append(BlockRow(run.repeats, what, run.period, run.repeats * run.period / total))
    for eqn in trace.closed.jaxpr.eqns:
        if name_of(eqn) == "scan" and any(trace.dims.top.origin.get(v) is not None for v in variables(eqn)):
            inner = len(eqn.params["jaxpr"].jaxpr.eqns)
            blocks.append(BlockRow(eqn.params["length"], "the author's own scan", inner, 1 / total))
    return TraceSummary(model, dims, blocks, dict(trace.dims.unknown))


def _block_name(names: list[str]) -> str:
    """`blocks/0/mlp/up`, `blocks/1/mlp/up`, ... -> `blocks/0`: the path up to where the layers differ."""
    first, last = names[0].split("/"), names[-1].split("/")
    differ = next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first) - 1)
    return "/".join(first[: differ + 1])
