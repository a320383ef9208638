"""Walks a compiled program: what each computation does, how often, and what is scheduled beside each transfer."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from cjax.audit import hlo
from cjax.audit.facts import Collective

# Bytes a device receives in a group of n, for each byte it puts in.
RECEIVED = {
    "all-reduce": lambda n: 2 * (n - 1) / n,  # as a ring: reduce-scatter, then all-gather
    "all-gather": lambda n: n - 1,
    "reduce-scatter": lambda n: (n - 1) / n,
    "all-to-all": lambda n: (n - 1) / n,
    "ragged-all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
    "collective-broadcast": lambda n: 1,
}
LEAST = 1e-3  # of the bytes of the largest transfer; what moves less makes nobody a partner
_UNCOUNTED = frozenset({"ragged-dot", "scaled-dot", "send", "recv"})
_FREE = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
     "replica-id", "domain", "iota"}
)  # fmt: skip


@dataclasses.dataclass
class Execution:
    """What running a computation once amounts to."""

    flops: float = 0.0
    flops_float32: float = 0.0
    bytes: float = 0.0
    collectives: list[Collective] = dataclasses.field(default_factory=list)

    def add(self, other: "Execution", times: float = 1) -> None:
        self.flops += other.flops * times
        self.flops_float32 += other.flops_float32 * times
        self.bytes += other.bytes * times
        self.collectives += [dataclasses.replace(each, count=each.count * times) for each in other.collectives]


class ModuleReader:
    """Walks a module's computations, each once, in the order in which they are scheduled."""

    def __init__(self, module: hlo.Module, mesh: Mesh | None):
        self.module, self.mesh = module, mesh
        self.done: dict[str, Execution] = {}
        self.exchanges: list[tuple[float, tuple[tuple[int, ...], ...]]] = []  # bytes received, and groups
        self.unknown_loops = 0
        self.uncounted: set[str] = set()
        self.attention_kernels: set[str] = set()

    def work(self, computation: str) -> Execution:
        if computation not in self.done:
            self.done[computation] = self._read(computation)
        return self.done[computation]

    def num_partners(self) -> int:
        """Distinct devices that a device exchanges data with, at most; single numbers (a norm, a count) aside."""
        largest = max((received for received, _ in self.exchanges), default=0.0)
        partners: dict[int, set[int]] = collections.defaultdict(set)
        for groups in {groups for received, groups in self.exchanges if received >= LEAST * largest}:
            for group in groups:
                for device in group:
                    partners[device].update(other for other in group if other != device)
        return max(map(len, partners.values()), default=0)

    def _read(self, computation: str) -> Execution:
        instructions = {each.name: each for each in self.module.computations[computation]}
        total = Execution()
        in_flight: dict[str, range] = {}  # start instruction -> its collectives' places in total.collectives
        for instruction in instructions.values():
            if instruction.opcode in _FREE:
                continue
            if instruction.opcode.endswith("-done"):
                in_flight.pop(instruction.operands[0], None)
                continue
            if instruction.opcode == "async-update":
                in_flight[instruction.name] = in_flight.pop(instruction.operands[0], range(0))
                continue
            operands = [shape for name in instruction.operands for shape in instructions[name].shapes]
            work = self._one(instruction, operands)
            places = range(len(total.collectives), len(total.collectives) + len(work.collectives))
            total.add(work)
            waiting = [place for each in in_flight.values() for place in each]
            for place in waiting:
                before = total.collectives[place]
                total.collectives[place] = dataclasses.replace(
                    before,
                    overlap_flops=before.overlap_flops + work.flops / len(waiting),
                    overlap_bytes=before.overlap_bytes + work.bytes / len(waiting),
                )
            if instruction.opcode.endswith("-start") and places and '"is_sync":true' not in instruction.attributes:
                in_flight[instruction.name] = places
                for place in places:
                    total.collectives[place] = dataclasses.replace(total.collectives[place], is_async=True)
        return total

    def _one(self, instruction: hlo.Instruction, operands: list[hlo.Shape]) -> Execution:
        """The work of one instruction, with all that it calls."""
        work = Execution()
        kind = instruction.opcode.removesuffix("-start")
        if kind in RECEIVED:
            work.collectives += self._collective(instruction, kind, operands)
            return work
        if instruction.opcode == "while":
            trips = hlo.trip_count(instruction, self.module)
            self.unknown_loops += trips is None
            for name in instruction.called:
                work.add(self.work(name), 1 if trips is None else trips)
            return work
        if instruction.opcode == "conditional":
            branches, shares = [self.work(name) for name in instruction.called], _shares_of_turns(instruction)
            if len(shares) == len(branches) - 1 > 1:
                for branch, share in zip(branches[1:], shares, strict=True):
                    work.add(branch, share)
                return work
            # Which branch runs is known at run time only; the dearest of each kind is reported.
            dearest = max(branches, key=lambda branch: sum(each.total_bytes for each in branch.collectives))
            once = Execution(
                max(branch.flops for branch in branches), max(branch.flops_float32 for branch in branches),
                max(branch.bytes for branch in branches), dearest.collectives,
            )  # fmt: skip
            work.add(once, sum(shares) if shares else 1.0)
            return work
        for name in instruction.called:
            work.add(self.work(name))
        if kind == "call":
            return work
        # Inside a fusion nothing touches memory: its operands and results do.
        work.bytes = 0.0 if work.collectives else self._traffic(instruction, operands)
        flops = hlo.matmul_flops(instruction, operands)
        work.flops += flops or 0.0
        if flops and any(shape.dtype in ("f32", "f64") for shape in operands[:2]):
            work.flops_float32 += flops
        target = instruction.attribute(r'custom_call_target="([^"]*)"') or ""
        if "fmha" in target:
            self.attention_kernels.add(target)
        if flops is None and re.search(r"gemm|matmul|conv[A-Z]|fmha|attention", target):
            self.uncounted.add(target)
        elif kind in _UNCOUNTED and "is_host_transfer=true" not in instruction.attributes:
            self.uncounted.add(kind)
        return work

    def _traffic(self, instruction: hlo.Instruction, operands: list[hlo.Shape]) -> float:
        """Bytes an instruction reads and writes; of an array that it only slices or updates in place, the slice."""
        result = sum(shape.bytes for shape in instruction.shapes)
        if instruction.opcode in ("dynamic-slice", "slice", "gather"):
            return 2 * result
        if instruction.opcode == "dynamic-update-slice":
            return 2 * operands[1].bytes
        if instruction.opcode.endswith("-start"):
            result -= sum(shape.bytes for shape in operands)  # a start's result repeats its operands
        if instruction.opcode not in ("fusion", "fusion-start"):
            return result + sum(shape.bytes for shape in operands)
        body = self.module.computations[instruction.called[0]]
        read = 0.0
        for parameter in (each for each in body if each.opcode == "parameter"):
            users = _users(body, parameter.name)
            ways = {each.opcode if is_first else "whole" for each, is_first in users}
            if ways == {"dynamic-update-slice"}:
                continue  # updated in place: nothing of it is read
            sliced = ways and ways <= {"dynamic-slice", "slice", "gather"}
            read += sum(each.bytes for each, _ in users) if sliced else parameter.bytes
        by_name = {each.name: each for each in body}
        for update in (each for each in body if each.opcode == "dynamic-update-slice"):
            result += by_name[update.operands[1]].bytes - update.bytes
        return read + max(result, 0.0)

    def _collective(self, instruction: hlo.Instruction, kind: str, operands: list[hlo.Shape]) -> list[Collective]:
        groups = hlo.replica_groups(instruction, self.module.num_devices)
        if all(len(group) < 2 for group in groups):
            return []  # a group of one moves nothing
        axes, along = axes_of(groups, tuple(self.mesh.shape.items()) if self.mesh is not None else ())
        size = max(map(len, groups)) if kind != "collective-permute" else along or self.module.num_devices
        # A ragged exchange names its destination, offsets and sizes beside what goes in.
        into = operands[:1] if kind == "ragged-all-to-all" else operands
        shapes = into
        if kind == "all-gather":
            dim = instruction.integers("dimensions")[0]
            shapes = [hlo.Shape(s.dtype, (*s.dims[:dim], s.dims[dim] * size, *s.dims[dim + 1 :])) for s in into]
        received = RECEIVED[kind](size) * sum(shape.bytes for shape in into)
        self.exchanges.append((received, tuple(set(groups))))
        return [Collective(kind, axes, size, groups, tuple(shapes), received, 1, instruction.op_name)]


def _users(body: Sequence[hlo.Instruction], name: str) -> list[tuple[hlo.Instruction, bool]]:
    """The instructions that read `name`, other forms of it included, and of each whether that is its first operand."""
    found = []
    for each in body:
        if name in each.operands:
            renamed = each.opcode == "bitcast"
            found += _users(body, each.name) if renamed else [(each, each.operands[0] == name)]
    return found


def _shares_of_turns(instruction: hlo.Instruction) -> list[float]:
    """How often each branch but the first is taken, where its author has said so in the name of its scope:
    `runs_3_of_4`, or `runs_3_1_of_4` of two. Nothing where nobody has."""
    found = re.findall(r"runs_(\d+(?:_\d+)*)_of_(\d+)/\w+$", instruction.op_name)
    return [int(times) / int(found[-1][1]) for times in found[-1][0].split("_")] if found else []


@functools.lru_cache(maxsize=1024)
def axes_of(
    groups: tuple[tuple[int, ...], ...], mesh_shape: tuple[tuple[str, int], ...]
) -> tuple[tuple[str, ...], int]:
    """The mesh axes along which members of a group differ, and the number of devices along these axes."""
    if not mesh_shape:
        return (), 0
    sizes = [size for _, size in mesh_shape]
    varies = np.zeros(len(sizes), bool)
    for group in groups:
        places = np.array(np.unravel_index(group, sizes))
        varies |= (places != places[:, :1]).any(axis=1)
    names = tuple(name for (name, _), moves in zip(mesh_shape, varies, strict=True) if moves)
    return names, math.prod(size for size, moves in zip(sizes, varies, strict=True) if moves)
