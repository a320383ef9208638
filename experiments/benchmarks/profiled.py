"""What a step does on a GPU, kernel by kernel, by JAX's own profiler: milliseconds, launches and idle time."""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

# The first that a kernel's name holds says what it is; what none fits is a fusion of XLA's, or named by itself.
KINDS = (
    ("attention", r"fmha|flash|sdpa|cudnn.*attn|attention"),
    ("pallas", r"mosaic"),
    ("matmul", r"gemm|nvjet|cutlass|cublas|xmma|triton_gemm|splitk"),
    ("convolution", r"conv(?!ert)|implicit|wgrad|dgrad"),
    ("transfer", r"nccl|memcpyp2p"),
    ("copy", r"memcpy|copy|transpose"),
    ("zeros", r"memset"),
    ("sort", r"sort|cub"),
    ("scatter", r"scatter"),
    ("slice", r"slice"),
    ("reduction", r"reduc"),
    ("fusion", r"fusion|loop|add|multiply|convert|broadcast|select|triton"),
)


@dataclass(frozen=True)
class Kernel:
    """One kernel of a step: its name and the instruction of the compiled program that it is of; calls and
    milliseconds of a step."""

    name: str
    instruction: str
    calls: float
    milliseconds: float

    @property
    def kind(self) -> str:
        text = f"{self.name} {self.instruction}".lower()
        return next((kind for kind, pattern in KINDS if re.search(pattern, text)), "other")


@dataclass(frozen=True)
class Profiled:
    """Of one step: the milliseconds that it takes from end to end, those in which a kernel runs, and each kernel."""

    milliseconds: float
    busy: float
    kernels: tuple[Kernel, ...]

    @property
    def kinds(self) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for kernel in self.kernels:
            found[kernel.kind] += kernel.milliseconds
        return dict(sorted(found.items(), key=lambda pair: -pair[1]))

    @property
    def launches(self) -> float:
        return sum(kernel.calls for kernel in self.kernels)

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {milliseconds:.1f}" for kind, milliseconds in self.kinds.items())
        idle = self.milliseconds - self.busy
        return f"{self.milliseconds:.1f} ms: {kinds}, idle {idle:.1f}; {self.launches:.0f} launches"


def profiled(step: Callable[[], Any], num_steps: int) -> Profiled:
    """Profiles steps that have run before; they are waited for at the end only, as a training loop does.

    Raises:
      RuntimeError: where the profiler saw no GPU.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            result = None
            for _ in range(num_steps):
                result = step()
            jax.block_until_ready(result)
        found = list(Path(folder).rglob("*.xplane.pb"))
        events = [event for path in found for event in _events(jax.profiler.ProfileData.from_file(str(path)))]
    if not events:
        raise RuntimeError("the profiler saw no kernel of a GPU; give bench_gpu --profile on a machine that has one")
    return _of_a_step(events, num_steps)


def _events(data: Any) -> Iterable[tuple[str, str, float, float]]:
    """(kernel, instruction, start, duration in nanoseconds) of all streams."""
    for plane in data.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                stats = dict(event.stats)
                yield event.name, str(stats.get("hlo_op", "")), event.start_ns, event.duration_ns


def _of_a_step(events: list[tuple[str, str, float, float]], num_steps: int) -> Profiled:
    events = sorted(events, key=lambda event: event[2])
    busy, end = 0.0, 0.0
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, instruction, start, duration in events:
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
        total = totals[name, instruction]
        total[0] += 1 / num_steps
        total[1] += duration / 1e6 / num_steps
    kernels = [Kernel(*names, *total) for names, total in totals.items()]
    kernels.sort(key=lambda kernel: -kernel.milliseconds)
    return Profiled((end - events[0][2]) / 1e6 / num_steps, busy / 1e6 / num_steps, tuple(kernels))
