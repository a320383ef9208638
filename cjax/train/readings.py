"""Single readings of hardware: this host by psutil and RAPL, NVIDIA's cards by NVML. What can't be read is None."""

import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from cjax.mesh import Device

RAPL = Path("/sys/class/powercap")
Reading = dict[str, float | None]
_T = TypeVar("_T")


class Host:
    """CPU, memory, network, disk and, where the kernel lets one read it, energy of this host.

    Attributes:
        unknown: what can't be read here, and why.

    Raises:
        ImportError: psutil is not installed.
    """

    def __init__(self) -> None:
        try:
            import psutil
        except ImportError as error:
            raise ImportError('the host is read through psutil: pip install "cjax[hardware]"') from error
        self._psutil: Any = psutil
        self._process: Any = psutil.Process()
        self._before: dict[str, tuple[float, float]] = {}
        self._packages = [Package(folder) for folder in sorted(RAPL.glob("intel-rapl:*")) if is_package(folder)]
        self.read()  # rates, and psutil's shares of a CPU, are since the reading before
        self.unknown = {name: _why(name) for name, value in self.read().items() if value is None}

    def read(self) -> Reading:
        """One reading; rates are since the one before."""
        p, own, _try = self._psutil, self._process, self._try
        memory, net, disk = _try(p.virtual_memory), _try(p.net_io_counters), _try(p.disk_io_counters)
        joules = [package.joules() for package in self._packages]
        return {
            "cpu_percent": _try(p.cpu_percent),
            "memory_used_bytes": None if memory is None else memory.total - memory.available,
            "memory_total_bytes": None if memory is None else memory.total,
            "process_cpu_percent": _try(own.cpu_percent),
            "process_memory_bytes": _try(lambda: own.memory_info().rss),
            "network_sent_bytes_per_second": self._rate("sent", None if net is None else net.bytes_sent),
            "network_received_bytes_per_second": self._rate("received", None if net is None else net.bytes_recv),
            "disk_read_bytes_per_second": self._rate("read", None if disk is None else disk.read_bytes),
            "disk_written_bytes_per_second": self._rate("written", None if disk is None else disk.write_bytes),
            "cpu_energy_joules": sum_known(joules),
        }

    def _try(self, ask: Callable[[], _T]) -> _T | None:
        """None where the kernel does not say: containers hide much."""
        try:
            return ask()
        except (OSError, RuntimeError, NotImplementedError, AttributeError, self._psutil.Error):
            return None

    def _rate(self, name: str, count: int | None) -> float | None:
        now = time.monotonic()
        before = self._before.pop(name, None)
        if count is None:
            return None
        self._before[name] = (now, count)
        return None if before is None or now <= before[0] else (count - before[1]) / (now - before[0])


class Package:
    """The energy of one CPU, as its own counter (RAPL) says; it starts again at its end, and at once after a boot.

    Args:
        folder: of the kernel's powercap.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._last: int | None = None
        self._turns = 0

    def joules(self) -> float | None:
        """Since some moment; differences are what it says. Read it more often than it goes round: minutes at least."""
        try:
            now = int((self._folder / "energy_uj").read_text())
            end = int((self._folder / "max_energy_range_uj").read_text())
        except (OSError, ValueError):  # the kernel lets root alone read it, since it tells secrets
            return None
        if self._last is not None and now < self._last:
            self._turns += 1
        self._last = now
        return (self._turns * end + now) / 1e6


def is_package(folder: Path) -> bool:
    """Whether this is a counter of one whole CPU: neither of a part of one, nor of the platform that holds them all
    (`psys`), whose energy would be counted twice."""
    try:
        name = (folder / "name").read_text().strip()
    except OSError:
        name = ""
    return folder.name.count(":") == 1 and name != "psys"


class Cards:
    """NVIDIA's cards of this process.

    Args:
        devices: JAX's; none of other makers is read.

    Attributes:
        unknown: what can't be read here, and why.
    """

    def __init__(self, devices: Sequence[Device]):
        self._nvml: Any = None
        self._cards: dict[str, Any] = {}
        self._samples: dict[str, Any] = {}
        self.unknown: dict[str, str] = {}
        if not devices:
            return
        try:
            import pynvml  # pyright: ignore[reportMissingImports]
        except ImportError:
            self.unknown["gpu"] = 'NVML\'s bindings are not installed: pip install "cjax[hardware]"'
            return
        try:
            pynvml.nvmlInit()
            self._nvml = pynvml
            self._cards = {f"gpu{device.id}": self._handle(device) for device in devices}
        except pynvml.NVMLError as error:
            self.unknown["gpu"] = f"NVML says: {error}"
            return
        self.read()  # of the bandwidth, two samples are needed
        self.unknown = {name: "NVML does not say on this card" for name, value in self.read().items() if value is None}

    def _handle(self, device: Device) -> Any:
        """CUDA counts what CUDA_VISIBLE_DEVICES lists, NVML all."""
        index = device.local_hardware_id
        listed = [each.strip() for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
        name = listed[index] if index is not None and index < len(listed) else str(index)
        if name.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(name))
        return self._nvml.nvmlDeviceGetHandleByUUID(name)

    def read(self) -> Reading:
        """One reading of each card; without NVML none, rather than zeros."""
        found: Reading = {}
        for name, card in self._cards.items():
            found |= {f"{name}/{what}": value for what, value in self._read(name, card).items()}
        return found

    def _read(self, name: str, card: Any) -> Reading:
        n = self._nvml
        use, memory = self._try(n.nvmlDeviceGetUtilizationRates, card), self._try(n.nvmlDeviceGetMemoryInfo, card)
        power, energy = (
            self._try(n.nvmlDeviceGetPowerUsage, card),
            self._try(n.nvmlDeviceGetTotalEnergyConsumption, card),
        )
        return {
            "utilization_percent": None if use is None else use.gpu,
            "memory_busy_percent": None if use is None else use.memory,  # of the time, not of the bandwidth
            "memory_bandwidth_percent": self._try(self._bandwidth, name, card),
            "memory_used_bytes": None if memory is None else memory.used,
            "memory_total_bytes": None if memory is None else memory.total,
            "power_watts": None if power is None else power / 1e3,
            "temperature_celsius": self._try(n.nvmlDeviceGetTemperature, card, n.NVML_TEMPERATURE_GPU),
            "energy_joules": None if energy is None else energy / 1e3,
        }

    def _bandwidth(self, name: str, card: Any) -> float | None:
        """The share of the memory's bandwidth that was used since the reading before: from Hopper on."""
        n = self._nvml
        if not n.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
            return None
        sample, before = n.nvmlGpmSampleAlloc(), self._samples.get(name)
        n.nvmlGpmSampleGet(card, sample)
        self._samples[name] = sample
        if before is None:
            return None
        asked = n.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = n.NVML_GPM_METRICS_GET_VERSION, 1
        asked.sample1, asked.sample2 = before, sample
        asked.metrics[0].metricId = n.NVML_GPM_METRIC_DRAM_BW_UTIL
        n.nvmlGpmMetricsGet(asked)
        n.nvmlGpmSampleFree(before)
        value = float(asked.metrics[0].value)
        # Of two samples that are too close together, NVML says "not a number", and no error.
        return None if asked.metrics[0].nvmlReturn or not math.isfinite(value) else value

    def _try(self, ask: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return ask(*arguments)
        except (self._nvml.NVMLError, AttributeError):  # older bindings lack the newer questions
            return None

    def close(self) -> None:
        if self._nvml is not None:
            self._try(self._nvml.nvmlShutdown)


def sum_known(values: Sequence[float | None]) -> float | None:
    """None if there are none, or one is not known: a sum without it would be too small.

    >>> sum_known([1.0, 2.0]), sum_known([1.0, None]), sum_known([])
    (3.0, None, None)
    """
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _why(name: str) -> str:
    if name == "cpu_energy_joules":
        return f"no counter of energy (RAPL) can be read in {RAPL}; many kernels let root alone"
    return "the system has no counters of it that can be read"
