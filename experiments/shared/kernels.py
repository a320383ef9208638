"""What a compiled step launches, kernel by kernel: how often, the bytes that each reads and writes, matmuls apart.

Read from the program's text alone, and not by `cjax.audit`, whose numbers it may check. A loop's kernels count as often
as the loop turns. A kernel that reads a part of an array reads that part, and one that writes into an array in place
writes what is new; work spaces and reads from caches do not count.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from cjax.audit import hlo

HBM, PEAK, REACHED = (
    3.35e12,
    989e12,
    0.75,
)  # of an H100: bytes/s, bfloat16 FLOP/s, and what large matmuls reach of these
_NO_KERNEL = frozenset(
    {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id",
     "replica-id", "domain", "async-update"}
)  # fmt: skip
_CALLS = frozenset({"while", "conditional", "call", "async-start"})
_SENDS = re.compile(r"all-|reduce-scatter|collective-|ragged-all")
_FORMS = frozenset({"bitcast", "convert", "copy"})
_ELEMENTWISE = frozenset(
    {"convert", "copy", "multiply", "add", "subtract", "divide", "negate", "maximum", "minimum", "select", "tanh",
     "exponential", "rsqrt", "sqrt", "compare", "and", "or", "power", "log", "abs", "clamp", "is-finite", "not", "sign"}
)  # fmt: skip
Box = tuple[tuple[int, int], ...]  # of each dim, from where to where


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One instruction that launches something.

    Args:
      count: how often a step does.
      bytes: read and written, once; 0 of what sends, which takes the links' time.
      flops: of a matmul, convolution or attention kernel, once; 0 of others.
    """

    name: str
    op_name: str
    count: int
    bytes: float
    flops: float

    @property
    def seconds(self) -> float:
        """In a step: a matmul's by its arithmetic, any other's by its bytes."""
        return self.count * (self.flops / (REACHED * PEAK) if self.flops else self.bytes / HBM)


def kernels(text: str) -> list[Kernel]:
    """All kernels of a compiled program, of what `compiled.as_text()` returns."""
    module = hlo.parse(text)
    return list(_of(module, module.entry, 1))


def _of(module: hlo.Module, computation: str, count: int) -> Iterator[Kernel]:
    named = {each.name: each for each in module.computations[computation]}
    for each in named.values():
        if each.opcode in _CALLS:
            turns = (hlo.trip_count(each, module) or 1) if each.opcode == "while" else 1
            for called in each.called:
                yield from _of(module, called, count * turns)
        elif each.opcode not in _NO_KERNEL and not each.opcode.endswith("-done"):
            size, flops = _bytes(module, each, named), _flops(module, each, named)
            yield Kernel(each.name, each.op_name, count, size, flops)


def _flops(module: hlo.Module, each: hlo.Instruction, named: dict[str, hlo.Instruction]) -> float:
    found = hlo.matmul_flops(each, [shape for name in each.operands for shape in named[name].shapes]) or 0.0
    for called in each.called:
        inside = {each.name: each for each in module.computations[called]}
        found += sum(_flops(module, inner, inside) for inner in inside.values())
    return found


def _bytes(module: hlo.Module, each: hlo.Instruction, named: dict[str, hlo.Instruction]) -> float:
    if _SENDS.match(each.opcode):
        return 0.0
    if each.opcode in ("fusion", "fusion-start"):
        (called,) = each.called
        return _Fused(module.computations[called]).bytes()
    if each.opcode in ("slice", "dynamic-slice", "gather"):
        return 2 * each.bytes
    if each.opcode == "dynamic-update-slice":
        return 2 * named[each.operands[1]].bytes
    results = each.shapes
    if each.opcode == "custom-call" and len(results) > 1 and results[-1].dtype in ("s8", "u8"):
        results = results[:-1]  # a work space
    return sum(shape.bytes for shape in results) + sum(named[name].bytes for name in each.operands)


class _Fused:
    """What a fused kernel reads and writes: of each array the part that its results need."""

    def __init__(self, computation: Sequence[hlo.Instruction]) -> None:
        self._named = {each.name: each for each in computation}
        (self._root,) = [each for each in computation if each.is_root]
        self._boxes: dict[str, set[Box]] = {each.name: set() for each in computation}

    def bytes(self) -> float:
        roots = [self._named[name] for name in self._root.operands] if self._root.opcode == "tuple" else [self._root]
        total = 0.0
        for written in map(self._written, roots):
            total += written.bytes
            self._boxes[written.name].add(_whole(written))
        for each in reversed(self._named.values()):  # what is used comes before its users
            for box in self._boxes[each.name]:
                self._ask(each, box)
            if each.opcode == "parameter":
                read = sum(math.prod(end - start for start, end in box) for box in self._boxes[each.name])
                total += each.bytes * min(1.0, read / max(each.shapes[0].size, 1))
        return total

    def _written(self, root: hlo.Instruction) -> hlo.Instruction:
        """A result; of an array that a part is written into, that part."""
        update = self._behind_forms(root)
        if update.opcode == "dynamic-update-slice":
            into = self._behind_forms(self._named[update.operands[0]])
            return self._named[update.operands[1]] if into.opcode == "parameter" else root
        return root

    def _behind_forms(self, each: hlo.Instruction) -> hlo.Instruction:
        while each.opcode in _FORMS:
            each = self._named[each.operands[0]]
        return each

    def _ask(self, each: hlo.Instruction, box: Box) -> None:
        """Notes what a part of a result needs of its operands: all, unless it is plain that it is less."""
        operands = [self._named[name] for name in each.operands]
        if each.opcode == "slice":
            self._boxes[operands[0].name].add(_sliced(each, box))
            return
        if each.opcode == "concatenate":
            (dim,), at = each.integers("dimensions"), 0
            for operand in operands:
                size = operand.shapes[0].dims[dim]
                low, high = max(box[dim][0] - at, 0), min(box[dim][1] - at, size)
                if low < high:
                    self._boxes[operand.name].add((*box[:dim], (low, high), *box[dim + 1 :]))
                at += size
            return
        if each.opcode in ("dynamic-slice", "gather"):  # somewhere, which is not known: counted as the first rows
            first, *rest = operands[0].shapes[0].dims
            rows = math.ceil(each.shapes[0].size / max(math.prod(rest), 1))
            self._boxes[operands[0].name].add(((0, min(rows, first)), *((0, size) for size in rest)))
            operands = operands[1:]
        for operand in operands:
            if each.opcode in ("bitcast", "reshape"):
                self._boxes[operand.name].add(_reshaped(each, operand, box))
                continue
            alike = each.opcode in _ELEMENTWISE and operand.shapes[0].dims == each.shapes[0].dims
            self._boxes[operand.name].add(box if alike else _whole(operand))


def _whole(each: hlo.Instruction) -> Box:
    return tuple((0, size) for size in each.shapes[0].dims)


def _reshaped(each: hlo.Instruction, operand: hlo.Instruction, box: Box) -> Box:
    """What a part of a reshaped array is of the array, by rows: of a part that is one stretch of memory."""
    first, *rest = operand.shapes[0].dims or (1,)
    row, dims = math.prod(rest), each.shapes[0].dims
    start = sum(low * math.prod(dims[dim + 1 :]) for dim, (low, _) in enumerate(box)) // max(row, 1)
    rows = math.ceil(math.prod(high - low for low, high in box) / max(row, 1))
    return ((start, min(start + rows, first)), *((0, size) for size in rest))


def _sliced(each: hlo.Instruction, box: Box) -> Box:
    """What a part of a slice is of the array, as if each step were one."""
    starts = re.findall(r"\[(\d+):", each.attribute(r"slice=\{([^}]*)\}") or "")
    return tuple((int(start) + low, int(start) + high) for start, (low, high) in zip(starts, box, strict=True))
