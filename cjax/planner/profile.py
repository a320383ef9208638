"""What was measured on devices that are here: plain rates, the file that keeps them, and the factor of a real run."""

import dataclasses
import json
import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

OUTER = "outer "  # before a collective's name: along the outermost dim, where no member has to lay out what it sends
_FORM = 3  # of the file; another one is measured anew
_CPUINFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class Profile:
    """Rates of one device while all `num_devices` of them work, and where they are from.

    Args:
      kind: the kind of device, as JAX calls it.
      machine: the processor and its cores for CPU devices, whose kind says nothing; empty for others.
      num_devices: how many worked at once.
      shares_cores: whether they are virtual and share the cores of one processor.
      matmul: FLOP/s of large matmuls by dtype.
      thin: seconds that each FLOP of a matmul takes longer, times the matmul's least dim: half the rate where the
        least dim is this times the rate. In float32.
      memory_bandwidth: bytes/s that an activation function reads and writes.
      link_bandwidth: bytes/s that a device receives, by collective; empty where there is one device. Gathers and
        scatters are along the last dim, and once more along the outermost (`OUTER`).
      latency: seconds of a collective that moves next to nothing, between computations where devices share cores; 0
        where there is one device.
      launch: seconds of a program that does next to nothing.
      jax: the version that measured.
      date: when, as YYYY-MM-DD.
      samples: all that was timed, as rows of what, size and seconds.

    >>> matmul, link = {"float32": 5e10}, {"all-reduce": 2e9}
    >>> print(Profile("cpu", "4 cores", 8, True, matmul, 2e-9, 4e9, link, 5e-5, 1e-5, "0.12.0", "2026-11-26"))
    on               measured on 2026-11-26 on 8 x cpu (4 cores), which share its cores, JAX 0.12.0
    matmul float32   0.05 TFLOP/s a device
    thin matmuls     half the rate of float32 where the least dim is 100
    memory           4 GB/s a device
    all-reduce       2 GB/s received a device
    collective       50 us at least
    program          10 us at least
    """

    kind: str
    machine: str
    num_devices: int
    shares_cores: bool
    matmul: Mapping[str, float]
    thin: float
    memory_bandwidth: float
    link_bandwidth: Mapping[str, float]
    latency: float
    launch: float
    jax: str
    date: str
    samples: Sequence[Mapping[str, Any]] = ()

    def at(self, num_devices: int) -> "Profile":
        """The same for another number of devices: those that share cores share them out anew, others stay as they are.

        >>> shared = Profile("cpu", "", 8, True, {"float32": 1e9}, 0.0, 1e9, {}, 0.0, 0.0, "", "")
        >>> shared.at(4).matmul
        {'float32': 2000000000.0}
        """
        if not self.shares_cores or num_devices == self.num_devices:
            return self
        times = self.num_devices / num_devices
        return dataclasses.replace(
            self,
            num_devices=num_devices,
            matmul={dtype: rate * times for dtype, rate in self.matmul.items()},
            thin=self.thin / times,
            memory_bandwidth=self.memory_bandwidth * times,
            link_bandwidth={kind: rate * times for kind, rate in self.link_bandwidth.items()},
        )

    @property
    def links(self) -> float | None:
        """Bytes/s that a device receives in a collective of whatever kind; None where there is one device."""
        rates = [rate for kind, rate in self.link_bandwidth.items() if not kind.startswith(OUTER)]
        return statistics.median(rates) if rates else None

    @property
    def source(self) -> str:
        """Where these numbers are from, in words for a report."""
        on = f"{self.num_devices} x {self.kind}" + (f" ({self.machine})" if self.machine else "")
        together = ", which share its cores" if self.shares_cores else ""
        return f"measured on {self.date} on {on}{together}, JAX {self.jax}"

    def __str__(self) -> str:
        rows = [("on", self.source)]
        rows += [(f"matmul {dtype}", f"{rate / 1e12:.4g} TFLOP/s a device") for dtype, rate in self.matmul.items()]
        half = self.thin * self.matmul.get("float32", 0.0)
        rows.append(("thin matmuls", f"half the rate of float32 where the least dim is {half:.0f}"))
        rows.append(("memory", f"{self.memory_bandwidth / 1e9:.4g} GB/s a device"))
        rows += [(kind, f"{rate / 1e9:.4g} GB/s received a device") for kind, rate in self.link_bandwidth.items()]
        rows += [("collective", f"{1e6 * self.latency:.4g} us at least")] * bool(self.latency)
        rows.append(("program", f"{1e6 * self.launch:.4g} us at least"))
        return "\n".join(f"{name:16} {value}" for name, value in rows)


def profile_path(kind: str) -> Path:
    """Where the profile of a kind of device is kept: in `$XDG_CACHE_HOME/cjax`, or `~/.cache/cjax`.

    A CPU's has the processor in its name, since homes are shared among machines.
    """
    # The XDG specification: a path that is not absolute is ignored.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    folder = (cache if cache.is_absolute() else Path.home() / ".cache") / "cjax"
    slug = re.sub(r"[^a-z0-9]+", "-", f"{kind} {machine_of(kind)}".lower()).strip("-")
    return folder / f"profile-{slug}.json"


def machine_of(kind: str) -> str:
    """The processor of this machine and its cores, for CPU devices; empty for other kinds."""
    if kind != "cpu":
        return ""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    # A process may be kept to some of the cores; `os.cpu_count` counts all of them.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{model[1] if model else 'processor'}, {cores} cores"


def write_profile(profile: Profile, path: Path | None = None) -> Path:
    """Keeps a profile, where `profile_path` says if not told where."""
    path = profile_path(profile.kind) if path is None else path
    path.parent.mkdir(parents=True, exist_ok=True)
    # Whole or not at all: other processes may read it meanwhile.
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    beside.write_text(json.dumps({"form": _FORM, **dataclasses.asdict(profile)}, indent=1) + "\n")
    beside.replace(path)
    return path


def read_profile(kind: str, path: Path | None = None) -> Profile | None:
    """The profile of a kind of device that was measured on this machine; None where none was.

    Args:
      kind: as JAX calls it, such as `"cpu"`.
      path: another file than `profile_path(kind)`, which then has to be there.

    Raises:
      ValueError: for a file that is no profile, or one of other devices.
    """
    where = profile_path(kind) if path is None else path
    if path is None and not where.exists():
        return None
    again = f"measure again with cjax calibrate, or delete {where}"
    try:
        facts = json.loads(where.read_text())
        if facts.pop("form") != _FORM:
            raise ValueError("another form")
        profile = Profile(**facts)
        rates = [profile.memory_bandwidth, *profile.matmul.values(), *profile.link_bandwidth.values()]
        times = [profile.thin, profile.latency, profile.launch, *(sample["seconds"] for sample in profile.samples)]
        if not profile.matmul or not all(0 < rate < math.inf for rate in rates) or not all(0 <= t for t in times):
            raise ValueError("rates that can't be")
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{where} is no profile that this cjax can read ({error}): {again}.") from error
    if (profile.kind, profile.machine) != (kind, machine_of(kind)):
        these = f"{kind} ({machine_of(kind)})" if machine_of(kind) else kind
        raise ValueError(f"{where} was {profile.source}, and these are {these}: {again}.")
    return profile


def factor_of(step_seconds: float | Sequence[float], predicted: float) -> float:
    """How much slower a run's own steps are than predicted: the one number that no profile and no datasheet knows.

    It is one for a software and a machine: a plan's prediction is multiplied with it, and so is every other plan's.

    Args:
      step_seconds: measured: of one step, or of several, of which the median counts (one in ten is slow for reasons
        of its own); without the first, which compiles.
      predicted: seconds of a step of the same program.

    >>> factor_of([1.2, 1.2, 9.0], 1.0)
    1.2
    """
    seconds = [step_seconds] if isinstance(step_seconds, int | float) else list(step_seconds)
    if not seconds or not all(0 < each < math.inf for each in seconds):
        raise ValueError(f"step_seconds are what steps took, each more than 0, not {step_seconds!r}.")
    if not 0 < predicted < math.inf:
        raise ValueError(f"predicted is the seconds that a step was said to take, more than 0, not {predicted!r}.")
    return statistics.median(seconds) / predicted
