"""XLA's optimized HLO text as data: computations, instructions, replica groups, trip counts, matmul FLOPs."""

import dataclasses
import functools
import math
import re

import numpy as np

_ITEM_BYTES = {
    "pred": 1, "s2": 0.25, "u2": 0.25, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2,
    "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16,
    "token": 0, "opaque": 0,
}  # fmt: skip
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|true_computation|false_computation|branch_computations|called_computations)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
# Instructions whose computations run as many times as they do; elsewhere `to_apply` is what reduces two scalars.
_CALLERS = frozenset({"call", "fusion", "fusion-start", "async-start", "while", "conditional", "custom-call"})


@dataclasses.dataclass(frozen=True)
class Shape:
    """A dtype in XLA's spelling and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        # Eight bits is what every float8 format has; anything else unknown is a new dtype, better loud than wrong.
        item = 1 if self.dtype.startswith("f8") else _ITEM_BYTES[self.dtype]
        return self.size * item

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation; `shapes` are the leaves of its result, `attributes` what follows its operands."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    attributes: str
    is_root: bool

    @property
    def bytes(self) -> float:
        return sum(shape.bytes for shape in self.shapes)

    def attribute(self, pattern: str) -> str | None:
        """The first group of `pattern` where it occurs in the attributes."""
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    def integers(self, name: str) -> tuple[int, ...]:
        """An attribute such as `dimensions={0,2}`."""
        text = self.attribute(rf"\b{name}=\{{([\d,]*)\}}")
        return tuple(int(number) for number in text.split(",")) if text else ()

    @property
    def op_name(self) -> str:
        """Where the author's program asked for it, as JAX names it."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"') or ""

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that run when this instruction does; of a `while`, condition and body."""
        if self.opcode not in _CALLERS:
            return ()
        return tuple(name for group in _CALLED.findall(self.attributes) for name in re.findall(r"[\w.\-]+", group))


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program for one of `num_devices` devices."""

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    num_devices: int


def parse(text: str) -> Module:
    """Parses the optimized HLO text of one program, as `compiled.as_text()` gives it."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        if line[:1] not in (" ", "}", ""):
            if match := _COMPUTATION.match(line):
                current = computations.setdefault(match[2], [])
                entry = match[2] if match[1] else entry
        elif current is not None and (match := _INSTRUCTION.match(line)):
            current.append(_instruction(match, line[match.end() :]))
    if not entry:
        raise ValueError(
            "This is no HLO text of a compiled program, having no ENTRY computation: give what compiled.as_text() "
            "returns."
        )
    counts = [re.search(rf"\b{name}=(\d+)", text.split("\n", 1)[0]) for name in ("num_partitions", "replica_count")]
    num_devices = math.prod(int(count[1]) for count in counts if count)
    return Module({name: tuple(lines) for name, lines in computations.items()}, entry, num_devices)


def _instruction(head: re.Match[str], rest: str) -> Instruction:
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shapes = tuple(
        Shape(dtype, tuple(int(dim) for dim in dims.split(",")) if dims else ())
        for dtype, dims in _SHAPE.findall(rest[:end])
    )
    opcode, call = rest[end:].strip().split("(", 1)
    close = _closing("(" + call) - 2
    return Instruction(
        name=head[2],
        opcode=opcode,
        shapes=shapes,
        operands=tuple(_OPERAND.findall(call[:close])),
        # An integer constant's value stands where operands do; `trip_count` needs it.
        attributes=call[:close] if opcode == "constant" else call[close + 1 :],
        is_root=bool(head[1]),
    )


def _closing(text: str) -> int:
    """The index just after the parenthesis that closes the one `text` starts with."""
    depth, at = 0, 0
    while True:
        close = text.index(")", at)
        depth += text.count("(", at, close) - 1
        at = close + 1
        if depth == 0:
            return at


def replica_groups(instruction: Instruction, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of devices, by number in the program's device order, among which a collective moves data.

    For a collective-permute, the pairs (source, target) other than a device with itself.
    """
    if (pairs := instruction.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")) is not None:
        return tuple(pair for pair in _explicit(pairs) if pair[0] != pair[1])
    text = instruction.attribute(
        r"replica_groups=(\{(?:\{[\d,]*\},?)*\}"  # {{0,1},{2,3}}
        r"|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"  # [4,2]<=[2,4]T(1,0)
        r"|mesh\[[^\]]*\](?:, device_ids=\(.*?\))? \{[^}]*\})"  # mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}
    )
    if text is None:
        raise ValueError(f"cjax does not know this form of replica groups: {instruction.attributes[:200]}")
    return _parse_groups(text) or (tuple(range(num_devices)),)


@functools.lru_cache(maxsize=1024)
def _parse_groups(text: str) -> tuple[tuple[int, ...], ...]:
    if text.startswith("{"):
        return _explicit(text)
    if text.startswith("["):
        shape, ids = text.split("<=")
        array = _iota(ids).reshape(_integers(shape))
        return tuple(tuple(group) for group in array.tolist())
    axes_text, wanted_text = text[5:].split("]", 1)
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes_text)}
    device_ids = re.search(r"device_ids=\((.*)\) \{", wanted_text)
    if device_ids is None:
        ids = np.arange(math.prod(sizes.values()))
    else:
        ids = _iota(device_ids[1]) if device_ids[1].startswith("[") else np.array(_integers(device_ids[1]))
    # An axis may take part in a piece only: 'a':(2)4 is the middle 4 of a = 2 x 4 x rest.
    wanted = {
        name: (int(before or 1), int(size or sizes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", wanted_text.rsplit("{", 1)[1])
    }
    dims, moved = [], []
    for name, size in sizes.items():
        before, piece = wanted.get(name, (size, 1))
        moved.append((list(wanted).index(name), len(dims) + 1) if name in wanted else None)
        dims += [before, piece, size // before // piece]
    inner = [position for _, position in sorted(filter(None, moved))]
    outer = [position for position in range(len(dims)) if position not in inner]
    array = ids.reshape(dims).transpose(outer + inner).reshape(-1, math.prod(dims[position] for position in inner))
    return tuple(tuple(group) for group in array.tolist())


def _explicit(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(_integers(group) for group in re.findall(r"\{([\d,]+)\}", text))


def _iota(text: str) -> np.ndarray:
    """The ids of "[2,4]T(1,0)": 0, 1, 2 ... laid out as 2 x 4, transposed, read row by row."""
    dims, _, order = text.partition("T")
    sizes = _integers(dims)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    return ids.transpose(_integers(order)).reshape(-1) if order else ids.reshape(-1)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def trip_count(loop: Instruction, module: Module) -> int | None:
    """How often a `while` runs its body; None when its text does not say."""
    if known := loop.attribute(r'"known_trip_count":\{"n":"(\d+)"\}'):
        return int(known)
    # The shape that a scan or a fori_loop from 0 in steps of 1 leaves: the counter is compared with one constant.
    condition = loop.attribute(r"\bcondition=%?([\w.\-]+)")
    assert condition is not None, "a while has a condition"
    names = [condition]
    names += [name for instruction in module.computations[condition] for name in instruction.called]
    body = [instruction for name in names for instruction in module.computations[name]]
    bounds = [
        int(instruction.attributes)
        for instruction in body
        if instruction.opcode == "constant" and re.fullmatch(r"-?\d+", instruction.attributes)
    ]
    compares = [instruction for instruction in body if instruction.opcode == "compare"]
    if len(bounds) == len(compares) == 1 and "direction=LT" in compares[0].attributes:
        return max(bounds[0], 0)
    return None


def matmul_flops(instruction: Instruction, operands: list[Shape]) -> float | None:
    """FLOPs of a dot, a convolution or the library call that stands for one; None for any other instruction.

    Args:
      operands: the shapes of the instruction's operands.
    """
    target = instruction.attribute(r'custom_call_target="([^"]*)"') or ""
    if instruction.opcode == "dot":
        contracted = instruction.integers("lhs_contracting_dims")
        return 2.0 * instruction.shapes[0].size * math.prod(operands[0].dims[dim] for dim in contracted)
    if "matmul" in target or "$gemm" in target:
        text = instruction.attribute(r'"lhs_contracting_dimensions":\[([^\]]*)\]')
        if text is None:
            return None
        contracted = _integers(text)
        return 2.0 * instruction.shapes[0].size * math.prod(operands[0].dims[dim] for dim in contracted)
    if instruction.opcode == "convolution":
        return _convolution_flops(instruction, operands[1], instruction.shapes[0])
    if target.startswith("__cudnn$fmha") and len(operands[0].dims) == 4:
        # Two products of all queries with all keys; five on the way back, since scores were not kept. As formulas of
        # MFU have it, keys that a mask hides count.
        (batch, queries, heads, width), keys = operands[0].dims, operands[1].dims[1]
        return (10.0 if target.endswith("Backward") else 4.0) * batch * heads * queries * keys * width
    if target.startswith("__cudnn$conv"):
        # All three carry the labels of the forward convolution, but have its kernel and output in other places.
        if target.endswith("BackwardFilter"):
            return _convolution_flops(instruction, instruction.shapes[0], operands[1])
        if target.endswith("BackwardInput"):
            return _convolution_flops(instruction, operands[1], operands[0])
        return _convolution_flops(instruction, operands[1], instruction.shapes[0])
    return _grouped_flops(instruction.shapes[0], operands) if target.startswith("mosaic_gpu") else None


def _grouped_flops(made: Shape, operands: list[Shape]) -> float | None:
    """Of rows in groups by their groups' weights, or of the gradient of these; None of other kernels in Pallas."""
    if len(operands) < 3:
        return None
    sizes, left, right = operands[0], operands[-2], operands[-1]
    grouped = [shape for shape in (right, made) if len(shape.dims) == 3]
    if len(left.dims) != 2 or len(sizes.dims) != 1 or [shape.dims[0] for shape in grouped] != [sizes.dims[0]]:
        return None
    return 2.0 * (left.size * right.dims[-1] if grouped[0] is made else made.size * left.dims[1])


def _convolution_flops(instruction: Instruction, kernel: Shape, output: Shape) -> float | None:
    labels = instruction.attribute(r"dim_labels=\w+_(\w+)->\w+")
    if labels is None:
        return None
    per_output = math.prod(size for label, size in zip(labels, kernel.dims, strict=True) if label != "o")
    # A dilated input is mostly zeros that no implementation multiplies.
    dilation = math.prod(_integers(instruction.attribute(r"\blhs_dilate=([\dx]+)") or ""))
    return 2.0 * output.size * per_output / dilation
