"""Facts of a compiled step as plain data, and as text."""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Sequence

from cjax.audit.hlo import Shape
from cjax.planner.hardware import Hardware

# Names that JAX's transformations and control flow put around an author's own.
_WRAPPERS = re.compile(
    r"while|body|cond|scan|shard_map|closed_call|checkpoint|rematted_computation|eval_jaxpr|branch_\d+_fun"
    r"|pipeline_ticks|(?:all_)?runs_[\d_]+_of_\d+"
)

# In these each member receives what no other does, so that a host's adapters bring each only its own.
_EXCHANGES = frozenset({"all-to-all", "ragged-all-to-all", "collective-permute"})
_DTYPES = {"bf16": "bfloat16", "f16": "float16"}


def author_module(op_name: str) -> str:
    """The author's module in an operation's name, as JAX makes it; empty outside of any."""
    # A transformation names what it transforms, `transpose(jvp(Block_0))`; inner jits are library functions' names.
    # Instructions that XLA combined share a prefix: `Block_0/(up/dot_general:down/dot_general)`.
    name = op_name.split("/(")[0] + "/" if ":" in op_name else op_name
    parts = (part for part in name.split("/")[:-1] if not part.startswith(("jit(", "pjit(")))
    parts = (re.sub(r"^(?:\w+\()+|\)+$", "", part) if "(" in part else part for part in parts)
    return "/".join(part for part in parts if part and not _WRAPPERS.fullmatch(part))


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled step.

    Args:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute and the like.
      axes: the mesh axes along which the members of a group differ; empty when no mesh is known.
      group_size: devices in a group (fewer than the axes have, where each group spans a part of them); of a permute,
        devices along its axes.
      groups: the devices of each group, by their places in the mesh's order; of a permute, who sends to whom.
      shapes: what goes in on each device (of an all-gather, what comes out).
      bytes: bytes each device receives, once.
      count: executions in a step: the product of the trip counts around it.
      op_name: where the author's program asked for it, as JAX names it.
      is_async: whether other work is scheduled between its start and its end.
      overlap_flops, overlap_bytes: that work, once, shared out evenly among the collectives in flight.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    groups: tuple[tuple[int, ...], ...]
    shapes: tuple[Shape, ...]
    bytes: float
    count: int
    op_name: str
    is_async: bool = False
    overlap_flops: float = 0.0
    overlap_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        """Bytes each device receives in a whole step."""
        return self.bytes * self.count

    @property
    def axis(self) -> str:
        """The axes as one word, `data+zero`; `groups of 4` where no axis is known."""
        return "+".join(self.axes) or f"groups of {self.group_size}"

    @property
    def dtype(self) -> str:
        return self.shapes[0].dtype

    @property
    def module(self) -> str:
        """The author's module that asked for it, `Block_0/Attention_0`; empty outside of any."""
        return author_module(self.op_name)

    def bandwidth(self, hardware: Hardware) -> float | None:
        """Bytes/s at which a device receives, at most: that of the links, and of the adapters that its group uses."""
        is_permute = self.kind == "collective-permute"
        on_host, crossing = _on_hosts(self.groups, hardware.devices_per_host, is_permute)
        size = 2 if is_permute else self.group_size
        return hardware.bandwidth(size if crossing else on_host, on_host, crossing, self.kind in _EXCHANGES)

    def exposed_bytes(self, hardware: Hardware | None = None) -> float:
        """Bytes received in a step while the device has nothing else to do.

        With a `hardware` of known rates, the part of the transfer that lasts longer than the work scheduled beside it.
        Without, all or nothing: memory being several times faster than any link, work that multiplies no matrices and
        touches fewer bytes than arrive hides next to nothing.
        """
        bandwidth = self.bandwidth(hardware) if hardware else None
        if hardware is None or bandwidth is None or hardware.memory_bandwidth is None:
            hidden = self.is_async and (self.overlap_flops > 0 or self.overlap_bytes >= self.bytes)
            return 0.0 if hidden else self.total_bytes
        peak = hardware.matmul_flops(_DTYPES.get(self.dtype, "float32")) or math.inf
        beside = max(self.overlap_flops / peak, self.overlap_bytes / hardware.memory_bandwidth)
        return max(self.bytes - beside * bandwidth, 0.0) * self.count


@functools.lru_cache(maxsize=1024)
def _on_hosts(groups: tuple[tuple[int, ...], ...], devices_per_host: int, is_permute: bool) -> tuple[int, int]:
    """Of the groups that leave a host: the fewest members that one has on a host, and the most devices of one host.

    Where none does: the members of the largest group, and 0. Of a permute's pairs those count that receive, since an
    adapter sends and receives at once.
    """
    found = [collections.Counter(device // devices_per_host for device in group) for group in groups]
    leaving = [hosts for hosts in found if len(hosts) > 1]
    if not leaving:
        return max(map(len, groups)), 0
    left = [group for group, hosts in zip(groups, found, strict=True) if len(hosts) > 1]
    devices = {device for group in left for device in group[1 if is_permute else 0 :]}
    crossing = collections.Counter(device // devices_per_host for device in devices)
    return min(min(hosts.values()) for hosts in leaving), max(crossing.values())


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes of device memory that a compiled step needs on each device; memory kinds of the host are not in it."""

    arguments: int
    outputs: int
    aliased: int
    temporary: int

    @property
    def peak(self) -> int:
        """What a run allocates: XLA takes all temporaries as one block, and donated arguments serve as outputs."""
        return self.arguments + self.outputs - self.aliased + self.temporary


@dataclasses.dataclass(frozen=True)
class Audit:
    """Facts of a compiled step, per device and step; `str()` renders them.

    Args:
      collectives: every collective instruction.
      memory: bytes, from XLA; None where the platform does not tell.
      flops: of matmuls and convolutions, trip counts included.
      flops_float32: of these, those of which an operand is float32 or wider: bfloat16 multiplies twice as fast at
        least.
      bytes_accessed: bytes read and written by instructions, trip counts included.
      num_devices: devices the program runs on.
      num_partners: distinct devices that one device exchanges data with, at most; transfers
        below a thousandth of the largest (a loss, a norm) aside.
      unknown_loops: loops of unknown length, counted as running once.
      uncounted: instructions that multiply matrices or move data in a way cjax cannot count.
      attention_kernels: names of the fused attentions that are called.

    >>> one = Collective("all-reduce", ("data",), 2, ((0, 1),), (Shape("f32", (1024,)),), 4096, count=3, op_name="")
    >>> found = Audit((one,), None, 2e9, 1e6, num_devices=2, num_partners=1, unknown_loops=0, uncounted=())
    >>> found.count("all-reduce", axes=["data"]), found.moved("all-gather"), found.moved_by_axis()
    (3, 0, {'data': 12288.0})
    """

    collectives: tuple[Collective, ...]
    memory: Memory | None
    flops: float
    bytes_accessed: float
    num_devices: int
    num_partners: int
    unknown_loops: int
    uncounted: tuple[str, ...]
    attention_kernels: tuple[str, ...] = ()
    flops_float32: float = 0.0

    def select(
        self, kind: str | None = None, axes: Sequence[str] | None = None, min_bytes: float = 0
    ) -> tuple[Collective, ...]:
        """The collectives of this kind, along exactly these axes, that receive at least `min_bytes` each time."""
        return tuple(
            collective
            for collective in self.collectives
            if (kind is None or collective.kind == kind)
            and (axes is None or set(collective.axes) == set(axes))
            and collective.bytes >= min_bytes
        )

    def moved(self, kind: str | None = None, axes: Sequence[str] | None = None, min_bytes: float = 0) -> float:
        """Bytes a device receives in a step through the collectives that `select` gives."""
        return sum(collective.total_bytes for collective in self.select(kind, axes, min_bytes))

    def count(self, kind: str | None = None, axes: Sequence[str] | None = None, min_bytes: float = 0) -> int:
        """Executions in a step of the collectives that `select` gives."""
        return sum(collective.count for collective in self.select(kind, axes, min_bytes))

    def moved_by_axis(self, min_bytes: float = 0) -> dict[str, float]:
        """Bytes a device receives in a step, by axis, most first."""
        moved: dict[str, float] = collections.defaultdict(float)
        for collective in self.select(min_bytes=min_bytes):
            moved[collective.axis] += collective.total_bytes
        return dict(sorted(moved.items(), key=lambda item: -item[1]))

    def exposed_bytes(self, hardware: Hardware | None = None) -> float:
        """Bytes received in a step that no computation hides: `Collective.exposed_bytes`, summed."""
        return sum(collective.exposed_bytes(hardware) for collective in self.collectives)

    def __str__(self) -> str:
        return _render(self)


def _render(facts: Audit) -> str:
    lines = []
    if (memory := facts.memory) is not None:
        lines.append(
            f"memory  {_size(memory.peak)} a device: arguments {_size(memory.arguments)}, outputs "
            f"{_size(memory.outputs)} (in place {_size(memory.aliased)}), temporary {_size(memory.temporary)}"
        )
    share = f", {facts.flops_float32 / facts.flops:.3g} of them in float32" if facts.flops_float32 else ""
    lines.append(f"work    {facts.flops:.4g} FLOP in matmuls and convolutions a device and step{share}")
    by_axis = ", ".join(f"{axis} {_size(moved)}" for axis, moved in facts.moved_by_axis().items()) or "nothing"
    lines.append(
        f"moves   {_size(facts.moved())} a device and step: {by_axis}; {_size(facts.exposed_bytes())} not hidden; "
        f"a device talks to {facts.num_partners} of {facts.num_devices - 1} others"
    )
    if facts.unknown_loops:
        lines.append(f"watch   {facts.unknown_loops} loop(s) of unknown length, counted once")
    if facts.uncounted:
        lines.append(f"watch   not counted: {', '.join(facts.uncounted)}")
    rows: dict[tuple[str, ...], list[float]] = {}
    for each in sorted(facts.collectives, key=lambda each: -each.total_bytes):
        key = (
            each.kind,
            each.axis,
            ", ".join(map(str, each.shapes[:2])) + ", ..." * (len(each.shapes) > 2),
            each.module,
        )
        row = rows.setdefault(key, [0, 0.0, 0.0])
        row[0] += each.count
        row[1] += each.total_bytes
        row[2] += each.exposed_bytes()
    table = [("times", "collective", "axis", "of", "received", "not hidden", "for")]
    table += [(f"{n:.0f}", k, a, s, _size(b), _size(e), m) for (k, a, s, m), (n, b, e) in rows.items()]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    if rows:
        lines += ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in table]
    return "\n".join(lines)


def _size(num_bytes: float) -> str:
    power = min(int(math.log(max(num_bytes, 1), 1024)), 4)
    return f"{num_bytes / 1024**power:.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
