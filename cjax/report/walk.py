"""What a step that walks over layers keeps where, what it moves to and fro, and how long that takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cjax.report.render import Lines, Sheet, Table, bytes_unit, milliseconds

PLACES = {"device": "on the device", "host": "in host memory", "disk": "on disk"}


@dataclass(frozen=True)
class ClassUse:
    """Rows of one class: one for each layer.

    Args:
      name: "params", "optimizer" and so on.
      layers: how many have their home where: "device", "host", "disk".
      device, host, disk: bytes of a device, and of a process; on disk with what is there twice.
      link_in, link_out: bytes that a device gets from host memory in a step, and sends there.
      disk_read, disk_written: bytes of a process in a step.

    >>> ClassUse("params", {"device": 12, "host": 20, "disk": 0}).where
    '12 on the device, 20 in host memory'
    """

    name: str
    layers: Mapping[str, int]
    device: int = 0
    host: int = 0
    disk: int = 0
    link_in: int = 0
    link_out: int = 0
    disk_read: int = 0
    disk_written: int = 0

    @property
    def where(self) -> str:
        """`12 on the device, 20 in host memory`; `in host memory` where all layers are alike."""
        used = {home: count for home, count in self.layers.items() if count}
        if len(used) == 1:
            return PLACES[next(iter(used))]
        return ", ".join(f"{count} {PLACES[home]}" for home, count in used.items())


@dataclass(frozen=True)
class PhaseUse:
    """Seconds of one pass over the layers: as long as the longest of these takes alone.

    Args:
      compute: arithmetic.
      link: between devices and host memory, in the direction that takes longer.
      disk: reading and writing.

    >>> PhaseUse(compute=1.2, link=0.4, disk=0.0).total
    1.2
    """

    compute: float
    link: float
    disk: float

    @property
    def total(self) -> float:
        """The longest of them."""
        return max(self.compute, self.link, self.disk)


@dataclass(frozen=True)
class WalkUse:
    """The homes of layers' rows, and what a step makes of them.

    Args:
      classes: the rows by class.
      peak: bytes that a device holds at most.
      fullest: the pass in which it does.
      budget, host_limit, disk_limit: what the plan allows; None: it does not say.
      phases: seconds by pass; empty where nobody knows how fast the devices and their links are.
      bound: which of compute, link and disk the step has most of.
      tokens: of a step.
      hidden_from: the number of tokens from which the forward and backward passes hide all that they move; None: no
        number does.
      rates: what the seconds go by, in words.
      moving: bytes of host memory that rows on their way take besides, at most.
      is_bound: whether computing is counted at the devices' peak, so that no step is faster; otherwise it is as
        predicted.

    >>> params = ClassUse("params", {"device": 12, "host": 20, "disk": 0}, host=2**34, link_in=2**35)
    >>> walk = WalkUse([params], peak=2**34, fullest="the backward pass", budget=2**35)
    >>> for label, text in walk.lines():
    ...     print(label, "-", text)
    holds - 16.0 of 32.0 GiB a device, at most in the backward pass; 16.0 GiB of host memory a process
    homes - params 12 on the device, 20 in host memory
    link - 32.0 GiB to a device and 0 back, each step
    walk - time unknown: nobody told how fast these devices and their links are
    """

    classes: Sequence[ClassUse]
    peak: int
    fullest: str
    budget: int | None = None
    host_limit: int | None = None
    disk_limit: int | None = None
    phases: Mapping[str, PhaseUse] = field(default_factory=dict)
    bound: str = ""
    tokens: int = 0
    hidden_from: int | None = None
    rates: str = ""
    is_bound: bool = True
    moving: int = 0

    @property
    def seconds(self) -> float | None:
        """Of a step, at least; None where nobody knows."""
        return sum(phase.total for phase in self.phases.values()) if self.phases else None

    def total(self, name: str) -> int:
        """Bytes of all classes: of "host", "link_in", "disk_written" and so on."""
        return sum(getattr(each, name) for each in self.classes)

    def lines(self) -> list[tuple[str, str]]:
        """Labelled lines: what the walk holds, moves and takes."""
        found = [("holds", self._holds()), ("homes", "; ".join(f"{each.name} {each.where}" for each in self.classes))]
        found.append(("link", self._link()))
        if self.total("disk"):
            found.append(("disk", self._disk()))
        return [*found, ("walk", self._time())]

    def table(self) -> Table:
        """The classes by size and traffic."""
        names = ("device", "host", "disk", "link_in", "link_out", "disk_read", "disk_written")
        unit = bytes_unit(*(getattr(each, name) for each in self.classes for name in names))
        rows = [(each.name, *(unit(getattr(each, name)) for name in names)) for each in self.classes]
        title = ("device", "host", "disk", "link in", "link out", "disk read", "written")
        return Table((f"rows, {unit.name}", *title), rows, right=frozenset(range(1, 8)))

    def _holds(self) -> str:
        said = [f"{_of(self.peak, self.budget)} a device, at most in {self.fullest}"]
        if self.total("host"):
            said.append(f"{_of(self.total('host'), self.host_limit)} of host memory a process")
        if self.total("disk"):
            said.append(f"{_of(self.total('disk'), self.disk_limit)} of disk")
        if self.moving:
            unit = bytes_unit(self.moving)
            said.append(f"at most {unit(self.moving)} {unit.name} of host memory for rows on their way")
        return "; ".join(said)

    def _link(self) -> str:
        there, back = self.total("link_in"), self.total("link_out")
        unit = bytes_unit(there, back)
        if not there and not back:
            return "nothing leaves the devices"
        return f"{unit(there)} {unit.name} to a device and {unit(back)} back, each step"

    def _disk(self) -> str:
        read, written = self.total("disk_read"), self.total("disk_written")
        unit = bytes_unit(read, written)
        return f"{unit(read)} {unit.name} read and {unit(written)} written a process and step: what is written wears it"

    def _time(self) -> str:
        if self.seconds is None:
            return "time unknown: nobody told how fast these devices and their links are"
        parts = ", ".join(f"{name} {milliseconds(phase.total)}" for name, phase in self.phases.items())
        waits = sum(phase.total - phase.compute for phase in self.phases.values())
        hidden = f"{milliseconds(waits)} of it not hidden" if waits else "all transfers hidden"
        about = ">=" if self.is_bound else "about"
        return (
            f"{about} {milliseconds(self.seconds)} ms with {self.tokens:,} tokens: {parts}; {hidden}; "
            f"{self.bound}-bound; {self._from()}; {self.rates}"
        )

    def _from(self) -> str:
        if not self.total("link_in") and not self.total("link_out"):
            return "nothing to hide"
        if self.hidden_from is None:
            return "no number of tokens hides what the passes move"
        return f"from {self.hidden_from:,} tokens a step the passes forward and back hide what they move"


def _of(size: int, limit: int | None) -> str:
    unit = bytes_unit(size if limit is None else limit)
    return f"{unit(size)} {unit.name}" if limit is None else f"{unit(size)} of {unit(limit)} {unit.name}"


@dataclass(frozen=True)
class WalkRow:
    """One plan of a `WalkRanking`, and what is predicted of it.

    Args:
      plan: its text without the words that all share.
      use: what it keeps where, moves and takes.
      mfu: the model's own arithmetic as a share of what the devices could do; None where nobody knows.

    `cjax.report.WalkRanking` has an example.
    """

    plan: str
    use: WalkUse
    mfu: float | None


@dataclass(frozen=True, repr=False)
class WalkRanking(Sheet):
    """Plans that walk over layers, the fastest first; prints as text, shows as HTML in a notebook.

    Args:
      on: what they are for, such as "8 x NVIDIA H100 80GB HBM3".
      shared: the words that all plans have, such as "budget=70GiB host=1TiB".
      plans: the best.
      num_plans, num_fitting: how many there are in all.
      notes: what else there is to say.

    >>> params = ClassUse("params", {"device": 0, "host": 32, "disk": 0}, 2**32, 2**36, 0, 2**37, 2**36)
    >>> phases = {"forward": PhaseUse(0.4, 1.2, 0.0), "backward": PhaseUse(1.3, 1.2, 0.0)}
    >>> use = WalkUse(
    ...     [params], 2**34, "the backward pass", phases=phases, bound="link", tokens=16384, hidden_from=49152,
    ...     rates="link 55 GB/s each way",
    ... )
    >>> print(WalkRanking("1 x H100", "budget=32GiB", [WalkRow("data=1", use, 0.31)], 1, 1))
    on      1 x H100
    of      one plan, which fits, with budget=32GiB
    best    data=1 budget=32GiB
    holds   16.0 GiB a device, at most in the backward pass; 64.0 GiB of host memory a process
    homes   params in host memory
    link    128.0 GiB to a device and 64.0 back, each step
    walk    >= 2,500 ms with 16,384 tokens: forward 1,200, backward 1,300; 800 of it not hidden;
            link-bound; from 49,152 tokens a step the passes forward and back hide what they move;
            link 55 GB/s each way
    <BLANKLINE>
    plan    step, ms  tokens/s   MFU   GiB  host GiB  disk GiB  written a step  bound
    ------  --------  --------  ----  ----  --------  --------  --------------  -----
    data=1     2,500     6,554  31 %  16.0      64.0       0.0             0.0  link
    """

    on: str
    shared: str
    plans: Sequence[WalkRow]
    num_plans: int
    num_fitting: int
    notes: Sequence[str] = ()

    @property
    def best(self) -> WalkRow:
        """The first row."""
        return self.plans[0]

    def _lines(self) -> Lines:
        fit = f"{self.num_fitting:,} plans that fit, of {self.num_plans:,}"
        many = f"{fit if self.num_plans > 1 else 'one plan, which fits'}, with {self.shared}"
        lines = [("on", self.on), ("of", many), ("best", f"{self.best.plan} {self.shared}"), *self.best.use.lines()]
        return Lines([*lines, *(("note", note) for note in self.notes)])

    def _table(self) -> Table:
        gib = 2**30
        rows = []
        for each in self.plans:
            use, seconds = each.use, each.use.seconds
            sizes = (use.peak, use.total("host"), use.total("disk"), use.total("disk_written"))
            rows.append((
                each.plan,
                "" if seconds is None else milliseconds(seconds),
                "" if not seconds else f"{use.tokens / seconds:,.0f}",
                "" if each.mfu is None else f"{100 * each.mfu:.2g} %",
                *(f"{size / gib:,.1f}" if size >= gib / 20 or not size else f"{size / gib:.2g}" for size in sizes),
                use.bound,
            ))  # fmt: skip
        title = ("plan", "step, ms", "tokens/s", "MFU", "GiB", "host GiB", "disk GiB", "written a step", "bound")
        return Table(title, rows, right=frozenset(range(1, 8)))
