"""The report of one compiled step: what it needs, splits, moves and takes, in five lines and then in full.

Sizes are bytes and times are seconds in the fields; text shows the unit that fits, GiB and ms for anything large.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cjax.report.explained import about, parts_text
from cjax.report.render import (
    Lines,
    Table,
    bytes_unit,
    flops_text,
    fraction_text,
    milliseconds,
)
from cjax.report.walk import WalkUse


@dataclass(frozen=True)
class MemoryUse:
    """Peak bytes on one device by use, and how many it has.

    Args:
      params: parameters, frozen ones included.
      grads: gradients; a walk over layers counts them among activations.
      optimizer: the optimizer's state.
      carried: the model's own state, such as running means.
      batch: the device's part of a batch.
      activations: whatever else a step makes and drops.
      compiler: results that do not take the place of an argument.
      limit: what a program may use; None: unknown.

    >>> memory = MemoryUse(params=2**31, optimizer=2**32, limit=2**34)
    >>> print(memory, memory.fits)
    6.0 of 16.0 GiB a device: params 2.0, optimizer 4.0 True
    """

    params: int = 0
    grads: int = 0
    optimizer: int = 0
    carried: int = 0
    batch: int = 0
    activations: int = 0
    compiler: int = 0
    limit: int | None = None

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by use: all fields but the limit."""
        return {name: size for name, size in vars(self).items() if name != "limit"}

    @property
    def total(self) -> int:
        """Bytes of all uses together."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """Whether the device has as much; True when nobody knows what it has."""
        return self.limit is None or self.total <= self.limit

    def __str__(self) -> str:
        unit, limit = bytes_unit(self.total), bytes_unit(self.limit)
        own = "" if self.limit is None or unit == limit else f" {unit.name}"
        of = "" if self.limit is None else f"{own} of {limit(self.limit)}"
        parts = ", ".join(f"{name} {unit(size)}" for name, size in self.parts.items() if size)
        return f"{unit(self.total)}{of} {limit.name if of else unit.name} a device" + (f": {parts}" if parts else "")


@dataclass(frozen=True)
class ParamRow:
    """One parameter as its author wrote it, and where cjax puts it.

    Args:
      name: its path in the model.
      shape, dtype, bytes: of the whole of it.
      dims: the name of each dim; None for one that has none.
      placement: for each dim, the mesh axes that split it: `()` keeps the dim whole.
      bytes_per_device: what a device has of it; where layers are spread, an equal share for each device.
      stages: the axis over which layers are spread, of which a device has some and not others; None: they are not.

    >>> row = ParamRow("mlp/kernel", (8, 32), "float32", ("embed", "ffn"), ((), ("tensor",)), 1024, 256)
    >>> row.is_whole, row.bytes // row.bytes_per_device
    (False, 4)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[str | None, ...]
    placement: tuple[tuple[str, ...], ...]
    bytes: int
    bytes_per_device: int
    stages: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each device has all of it."""
        return not any(self.placement) and self.stages is None


@dataclass(frozen=True)
class Transfer:
    """All collectives of one kind along one mesh axis (or several), in one step.

    Args:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all, collective-permute and the like.
      axis: the mesh axis; several as "data+zero".
      bytes: what a device receives in a step.
      count: how many times such a collective runs in a step.
      exposed_bytes: of `bytes`, the part that no computation hides; None: not known.

    `cjax.report.Report` has an example.
    """

    kind: str
    axis: str
    bytes: int
    count: int
    exposed_bytes: int | None = None


@dataclass(frozen=True)
class FlopCount:
    """Floating-point operations of one step.

    Args:
      model: the model's, forward and backward.
      matmul: of these, those in matmuls and convolutions.
      recomputed: what all devices together multiply more than that.
      per_device: matmuls and convolutions of one device, as the compiled step has them.

    `cjax.report.Report` has an example.
    """

    model: float
    matmul: float = 0
    recomputed: float = 0
    per_device: float = 0


@dataclass(frozen=True)
class StepTime:
    """The time of one step, in seconds: a lower bound, and what is predicted where the devices are calibrated.

    Args:
      compute, transfer, bubble: of the bound: arithmetic at the peak, transfers that nothing hides, idle stages.
      parts: what the prediction is spent on; they add up to it. Empty where nobody has measured such devices.
      interval: around the prediction, in which 80 of 100 steps would be.
      source: what the prediction's constants stand on.

    >>> time = StepTime(compute=0.198, transfer=0.014)
    >>> print(time)
    >= 212 ms: compute 198, transfer 14, bubble 0: compute-bound
    >>> time.predicted is None  # nobody has measured such devices
    True
    """

    compute: float
    transfer: float = 0
    bubble: float = 0
    parts: Mapping[str, float] = field(default_factory=dict)
    interval: tuple[float, float] = (0.0, 0.0)
    source: str = ""

    @property
    def total(self) -> float:
        """The lower bound."""
        return self.compute + self.transfer + self.bubble

    @property
    def predicted(self) -> float | None:
        """Seconds of the prediction; None where there is none."""
        return sum(self.parts.values()) if self.parts else None

    @property
    def bound(self) -> str:
        """Which of the three is the largest."""
        return max(("compute", "transfer", "bubble"), key=lambda name: getattr(self, name))

    def __str__(self) -> str:
        bounds = {"compute": self.compute, "transfer": self.transfer, "bubble": self.bubble}
        shown = ", ".join(f"{name} {milliseconds(seconds)}" for name, seconds in bounds.items())
        least = f">= {milliseconds(self.total)} ms: {shown}: {self.bound}-bound"
        if self.predicted is None:
            return least
        return (
            f"about {about(self.predicted, *self.interval)}: {parts_text(self.parts)}; {least}; constants {self.source}"
        )


@dataclass(frozen=True, repr=False)
class Report:
    """One compiled step under one plan; prints as text, shows as HTML in a notebook, and has its facts as fields.

    Args:
      plan: text of the plan.
      devices: what it runs on, such as "8 x H100".
      memory, params, transfers, flops, time: the facts; None or empty where unknown.
      shares: of "optimizer", "activations" and the like, the fraction that one device holds; the share of "params"
        follows from their rows.
      watch: what the reader should know and might not expect, one phrase each.
      chart, picture: of a pipeline, who does what when: as text, and as SVG for notebooks.
      walk: of a plan that walks over layers, where these have what, and what a step moves; None for all others.

    >>> memory = MemoryUse(params=2**31, optimizer=2**32, limit=2**34)
    >>> sent, work = Transfer("all-reduce", "data", 2**31, count=12, exposed_bytes=2**28), FlopCount(model=1.2e15)
    >>> report = Report("data=2", "2 x H100", memory, transfers=[sent], flops=work)
    >>> print(report.summary)
    fits    6.0 of 16.0 GiB a device: params 2.0, optimizer 4.0
    split   nothing
    moves   2.0 GiB a device and step: data 2.0; 0.2 not hidden
    step    time unknown: nobody told how fast this hardware is
    watch   nothing
    >>> report.bytes_moved_by_axis, report.flops.model
    ({'data': 2147483648}, 1200000000000000.0)
    """

    plan: str
    devices: str
    memory: MemoryUse
    params: Sequence[ParamRow] = ()
    transfers: Sequence[Transfer] = ()
    flops: FlopCount | None = None
    time: StepTime | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    watch: Sequence[str] = ()
    chart: str = ""
    picture: str = ""
    walk: WalkUse | None = None

    @property
    def bytes_moved(self) -> int:
        """Bytes that one device receives in one step."""
        return sum(transfer.bytes for transfer in self.transfers)

    @property
    def bytes_exposed(self) -> int | None:
        """Of `bytes_moved`, those that no computation hides; None when that is not known of all of them."""
        known = [transfer.exposed_bytes for transfer in self.transfers]
        return sum(size for size in known if size is not None) if None not in known else None

    @property
    def bytes_moved_by_axis(self) -> dict[str, int]:
        """Bytes that one device receives in one step by mesh axis, most first."""
        moved: dict[str, int] = {}
        for transfer in self.transfers:
            moved[transfer.axis] = moved.get(transfer.axis, 0) + transfer.bytes
        return dict(sorted(moved.items(), key=lambda item: -item[1]))

    @property
    def summary(self) -> str:
        """The five lines: fits, split, moves, step, watch; of a walk over layers, more between moves and step."""
        return self._lines().text()

    def __str__(self) -> str:
        head = Lines([("plan", self.plan), ("on", self.devices)])
        parts = [f"{head.text()}\n{self.summary}", *([self.chart] if self.chart else [])]
        return "\n\n".join([*parts, *(table.text() for table in self._tables())]) + "\n"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        lines = Lines([("plan", self.plan), ("on", self.devices), *self._lines().lines])
        return lines.html() + self.picture + "".join(table.html() for table in self._tables())

    def _lines(self) -> Lines:
        fits = "needs" if self.memory.limit is None else "fits" if self.memory.fits else "OVER"
        time = "time unknown: nobody told how fast this hardware is" if self.time is None else str(self.time)
        watch = "; ".join(self.watch) or "nothing"
        lines = [(fits, str(self.memory)), ("split", self._split()), ("moves", self._moves())]
        lines += self.walk.lines() if self.walk is not None else []
        return Lines([*lines, ("step", time), ("watch", watch)])

    def _split(self) -> str:
        total = sum(param.bytes for param in self.params)
        shares = {"params": sum(param.bytes_per_device for param in self.params) / total} if total else {}
        said = ", ".join(f"{name} {fraction_text(share)}" for name, share in (shares | dict(self.shares)).items())
        whole = [param for param in self.params if param.is_whole]
        if not whole or len(whole) == len(self.params):
            return said or "nothing"
        kinds = list(dict.fromkeys(re.sub(r"[_\d]+$", "", param.name.rpartition("/")[2]) for param in whole))
        named = ", ".join(kinds[:3]) + (", ..." if len(kinds) > 3 else "")
        percent = 100 * sum(param.bytes for param in whole) / max(1, total)
        return f"{said}; whole on every device: {percent:.2g} % ({named})"

    def _moves(self) -> str:
        if not self.transfers:
            return "nothing between devices"
        unit, exposed = bytes_unit(self.bytes_moved), self.bytes_exposed
        axes = ", ".join(f"{axis} {unit(size)}" for axis, size in self.bytes_moved_by_axis.items())
        hidden = f"{unit(exposed)} not hidden" if exposed else "all hidden" if exposed == 0 else "overlap unknown"
        return f"{unit(self.bytes_moved)} {unit.name} a device and step: {axes}; {hidden}"

    def _tables(self) -> list[Table]:
        tables = [param_table(self.params)] if self.params else []
        if self.transfers:
            tables.append(_transfer_table(self.transfers))
        if self.walk is not None:
            tables.append(self.walk.table())
        if self.flops:
            shown = {
                "model": "model, forward and backward",
                "matmul": "of these in matmuls",
                "recomputed": "recomputed",
            }
            shown |= {"per_device": "on each device"}
            rows = [
                (text, flops_text(getattr(self.flops, name)))
                for name, text in shown.items()
                if getattr(self.flops, name)
            ]
            tables.append(Table(("operations of a step", ""), rows, right=frozenset({1})))
        return tables


def _transfer_table(transfers: Sequence[Transfer]) -> Table:
    unit = bytes_unit(*(transfer.bytes for transfer in transfers))
    rows = [
        (
            each.kind,
            each.axis,
            f"{each.count:,}",
            unit(each.bytes),
            "?" if (e := each.exposed_bytes) is None else unit(e),
        )
        for each in sorted(transfers, key=lambda each: -each.bytes)
    ]
    title = ("collective", "axis", "times a step", f"{unit.name} received", "not hidden")
    return Table(title, rows, right=frozenset({2, 3, 4}))


def param_table(params: Sequence[ParamRow]) -> Table:
    """A row for each parameter; layers that differ in nothing but a number in their name share one."""
    groups: dict[tuple[object, ...], list[ParamRow]] = {}
    for param in params:
        pattern = re.sub(r"\d+", "*", param.name)
        key = (pattern, param.shape, param.dtype, param.dims, param.placement, param.bytes_per_device)
        groups.setdefault(key, []).append(param)
    unit = bytes_unit(*(len(group) * group[0].bytes_per_device for group in groups.values()))
    rows = []
    for group in groups.values():
        first = group[0]
        times = f" x{len(group)}" if len(group) > 1 else ""
        axes = ["+".join(axes) or "-" for axes in first.placement]
        placed = "whole" if not any(first.placement) else f"[{', '.join(axes)}]"
        if first.stages is not None:
            placed = f"layers over {first.stages}" + (f", {placed}" if placed != "whole" else "")
        shape, dims = (", ".join(str(part or "?") for part in parts) for parts in (first.shape, first.dims))
        size = unit(len(group) * first.bytes_per_device)
        rows.append((_pattern(group) + times, f"[{shape}]", first.dtype, f"[{dims}]", placed, size))
    return Table(("parameter", "shape", "dtype", "dims", "split", f"{unit.name} a device"), rows, right=frozenset({5}))


def _pattern(group: Sequence[ParamRow]) -> str:
    """The name that a group shares: numbers that differ within it become `*`, the others stay."""
    pieces = [re.split(r"(\d+)", param.name) for param in group]
    return "".join(column[0] if len(set(column)) == 1 else "*" for column in zip(*pieces, strict=True))
