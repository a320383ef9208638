"""The numbers of a step compiled for devices that are not here."""

from collections import defaultdict

from cjax.audit import Audit
from cjax.planner.hardware import Hardware

from .results import Row


def described(facts: Audit, hardware: Hardware) -> Row:
    """The numbers of a compiled step, per device and step: bytes, elements of any dtype, seconds."""
    assert facts.memory is not None and hardware.bf16_flops is not None
    moved: dict[str, float] = defaultdict(float)
    elements = transfer = exposed = 0.0
    for each in facts.collectives:
        moved[f"{each.kind} {each.axis} {each.dtype}"] += each.total_bytes
        elements += each.total_bytes * sum(s.size for s in each.shapes) / sum(s.bytes for s in each.shapes)
        bandwidth = each.bandwidth(hardware)
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
