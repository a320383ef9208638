"""`calibrate`: how fast the devices that are here multiply, read and write, and talk to each other."""

import dataclasses
import datetime
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.audit.read import RECEIVED
from cjax.mesh import DATA, Device, build_mesh, compiler_options, is_compile_only, own_context, resolve_devices
from cjax.planner.profile import OUTER, Profile, machine_of

DTYPES = ("float32", "bfloat16", "float16")
# Edges of square matmuls, tried in this order until one takes `_LONG`: large ones show the rate, small ones the losses.
_EDGES = (128, 256, 512, 1024, 2048, 4096, 8192)
_LONG = 0.02
# Thin products, one dim of which is small: their other edges on accelerators and on CPUs.
_THIN, _WIDTH = 64, {False: 8192, True: 1024}
# Bytes a device of an array that is only read and written, and those that it receives, on accelerators and on CPUs.
_TOUCHED = {False: 2**28, True: 2**23}
_SENT = {False: (2**12, 2**26), True: (2**12, 2**22)}
_ROWS = 64  # of such an array
_ROUNDS = 8
_TURNS, _EDGE = 8, 256  # products, of this edge, between which devices of a CPU wait for each other
_WAITING = {False: "turns", True: "turns with a collective each"}
_ENOUGH = 0.005  # seconds that a program is run for in each round, once or more


@dataclasses.dataclass
class _Timed:
    """One program on all devices, and the least time that one run of it took."""

    what: str
    size: int
    run: Callable[[], Any]
    one_at_a_time: bool
    seconds: float = math.inf

    def measure(self) -> None:
        repeats = 1 if not math.isfinite(self.seconds) else max(1, int(_ENOUGH / self.seconds))
        start = time.perf_counter()
        result = None
        for _ in range(repeats):
            result = self.run()
            if self.one_at_a_time:  # virtual devices that are ahead of the others would take their cores
                jax.block_until_ready(result)
        jax.block_until_ready(result)
        self.seconds = min(self.seconds, (time.perf_counter() - start) / repeats)


@own_context
def calibrate(devices: Sequence[Device] | str | None = None, seconds: float = 45.0) -> Profile:
    """Times matmuls, an elementwise operation and collectives on devices that are here.

    Rates are those of one device while all of them work: virtual CPU devices share the cores of one processor, and have
    together what it has.

    Args:
      devices: of this process; all that JAX sees if not given.
      seconds: when to stop, at the latest after one round: programs are timed in turns, and the least of several turns
        counts.

    Raises:
      ValueError: for devices that are not here, or that belong to several processes.

    >>> profile = calibrate(jax.devices()[:1], seconds=1)
    >>> profile.num_devices, sorted(profile.matmul) == sorted(DTYPES), profile.memory_bandwidth > 0
    (1, True, True)
    """
    end = time.perf_counter() + seconds
    found = resolve_devices(devices)
    if is_compile_only(found):
        raise ValueError("calibrate runs programs, and these devices are not here: give those of jax.devices().")
    if len({device.process_index for device in found}) > 1:
        raise ValueError("calibrate times the devices of one process: give it jax.local_devices().")
    bench = _Bench(found)
    timed = [bench.nothing(), bench.elementwise()]
    for dtype in DTYPES:
        timed += bench.matmuls(dtype, (end - time.perf_counter()) / 2)
    timed.append(bench.thin())
    if len(found) > 1 and bench.is_cpu:
        timed += [bench.turns(waits) for waits in (False, True)]
    if len(found) > 1:
        timed += [bench.collective(kind, size) for kind in COLLECTIVES for size in _SENT[bench.is_cpu]]
    for _ in range(_ROUNDS):
        for each in timed:
            each.measure()
        if time.perf_counter() > end:
            break
    return _profile(found, timed)


class _Bench:
    """Makes programs in which every device does the same, and compiles them as cjax compiles a step."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.mesh: Mesh = build_mesh({DATA: len(devices)}, devices)
        self.is_cpu = devices[0].platform == "cpu"

    def nothing(self) -> _Timed:
        return self._timed("nothing", 0, lambda x: x + 1, (8,), "float32")

    def elementwise(self) -> _Timed:
        """Bytes that are read and written, half of them each. An activation function: on accelerators any operation is
        as fast as memory is, a CPU computes most of what models do between matmuls more slowly than that."""
        size = _TOUCHED[self.is_cpu]
        return self._timed("elementwise", 2 * size, jax.nn.gelu, (size // 4,), "float32")

    def turns(self, waits: bool) -> _Timed:
        """Products, behind each of which devices add up a single row, or not.

        Devices that share cores are never equally far: what a collective costs a CPU is that those that are ahead fall
        asleep, and are woken up.
        """

        def function(x: jax.Array) -> jax.Array:
            for _ in range(_TURNS):
                x = jnp.tanh(_product(x))
                x = x.at[0].set(jax.lax.psum(x[0], DATA)) if waits else x
            return x

        return self._timed(_WAITING[waits], _TURNS, function, (_EDGE, _EDGE), "float32")

    def matmuls(self, dtype: str, seconds: float) -> list[_Timed]:
        """Of each size until one is long, or the time is over."""
        start, timed = time.perf_counter(), []
        for edge in _EDGES:
            timed.append(self._timed(f"matmul {dtype}", 2 * edge**3, _product, (edge, edge), dtype))
            for _ in range(2):  # one run may have had to wait for something else
                timed[-1].measure()
            if timed[-1].seconds > _LONG or time.perf_counter() - start > seconds / len(DTYPES):
                break
        return timed

    def thin(self) -> _Timed:
        """Few rows, few columns, and few numbers to add up, each with both gradients: a step has products of each kind,
        and CPUs take unlike long for them."""
        width = _WIDTH[self.is_cpu]

        def function(x: jax.Array) -> Any:
            few, whole = x[:_THIN], x[_THIN:]
            results = []
            for operands in ((few, whole), (whole, few.T), (few.T, few)):
                made, back = jax.vjp(jnp.dot, *operands)
                results += [made, *back(made)]
            return results

        return self._timed("thin", 3 * 3 * 2 * _THIN * width**2, function, (_THIN + width, width), "float32")

    def collective(self, kind: str, size: int) -> _Timed:
        """Each device receives `size` bytes, or a little more."""
        num = self.mesh.size
        received = RECEIVED[kind.removeprefix(OUTER)](num)
        columns = math.ceil(size / 4 / received / num / _ROWS) * num
        shape = (columns, _ROWS) if kind.startswith(OUTER) else (_ROWS, columns)
        return self._timed(kind, round(received * 4 * _ROWS * columns), COLLECTIVES[kind], shape, "float32")

    def _timed(self, what: str, size: int, function: Callable[[jax.Array], Any], shape: Any, dtype: str) -> _Timed:
        """A program that does `function` on each device, to an array of this shape there. It has run once."""
        whole = (self.mesh.size * shape[0], *shape[1:])
        split = NamedSharding(self.mesh, P(DATA))
        options = compiler_options(self.mesh)
        ones = jax.jit(lambda: jnp.full(whole, 1e-3, dtype), out_shardings=split, compiler_options=options)()
        mapped = jax.shard_map(function, mesh=self.mesh, in_specs=P(DATA), out_specs=P(DATA), check_vma=False)
        program = jax.jit(mapped, compiler_options=options).lower(ones).compile()
        jax.block_until_ready(program(ones))
        return _Timed(what, size, lambda: program(ones), self.is_cpu)


def _product(x: jax.Array) -> jax.Array:
    return jnp.dot(x, x, preferred_element_type=x.dtype)


def _to_the_next(x: jax.Array) -> jax.Array:
    num = jax.lax.axis_size(DATA)
    return jax.lax.ppermute(x, DATA, [(i, (i + 1) % num) for i in range(num)])


# Along the last dim, as positions and features are gathered and scattered: what is sent is laid out for it, which takes
# CPUs longer than to send it. So a grid's gathers and scatters along the outermost dim are several times faster.
COLLECTIVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "all-reduce": lambda x: jax.lax.psum(x, DATA),
    "all-gather": lambda x: jax.lax.all_gather(x, DATA, axis=1, tiled=True),
    "reduce-scatter": lambda x: jax.lax.psum_scatter(x, DATA, scatter_dimension=1, tiled=True),
    "all-to-all": lambda x: jax.lax.all_to_all(x, DATA, 1, 1, tiled=True),
    "collective-permute": _to_the_next,
    OUTER + "all-gather": lambda x: jax.lax.all_gather(x, DATA, tiled=True),
    OUTER + "reduce-scatter": lambda x: jax.lax.psum_scatter(x, DATA, tiled=True),
}


def _profile(devices: Sequence[Device], timed: Sequence[_Timed]) -> Profile:
    by_name: dict[str, list[_Timed]] = {}
    for each in timed:
        by_name.setdefault(each.what, []).append(each)
    (nothing,), (elementwise,), (thin,) = (by_name.pop(what) for what in ("nothing", "elementwise", "thin"))
    links, latencies = {}, []
    for kind in [kind for kind in by_name if kind in COLLECTIVES]:
        small, large = by_name.pop(kind)
        # What a small one takes is latency; what a large one takes beside it is its bytes.
        links[kind] = (large.size - small.size) / max(large.seconds - small.seconds, 0.05 * large.seconds)
        latencies += [small.seconds] * (not kind.startswith(OUTER))
    latency = max(0.0, sorted(latencies)[len(latencies) // 2] - nothing.seconds) if latencies else 0.0
    if _WAITING[True] in by_name:
        (alone,), (waiting,) = (by_name.pop(_WAITING[waits]) for waits in (False, True))
        latency = max(latency, (waiting.seconds - alone.seconds) / _TURNS)
    kind = devices[0].device_kind
    matmul = {what.split()[1]: max(each.size / each.seconds for each in found) for what, found in by_name.items()}
    return Profile(
        kind=kind,
        machine=machine_of(kind),
        num_devices=len(devices),
        shares_cores=devices[0].platform == "cpu" and len(devices) > 1,
        matmul=matmul,
        thin=max(0.0, thin.seconds - thin.size / matmul["float32"]) * _THIN / thin.size,
        memory_bandwidth=elementwise.size / elementwise.seconds,
        link_bandwidth=links,
        latency=latency,
        launch=nothing.seconds,
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
        samples=[{"what": each.what, "size": each.size, "seconds": each.seconds} for each in timed],
    )
