"""Facts of the given devices that planning needs: memory a program may use, peak rates, links."""

import dataclasses
import math
import os
from collections.abc import Sequence
from pathlib import Path

from cjax.cards import Card, card_of_kind
from cjax.jax_compat.backends import is_of_this_process
from cjax.machines import Cluster
from cjax.mesh import Device, cluster_of, is_compile_only
from cjax.planner.profile import Profile

# What the CUDA context, NCCL's buffers and the allocator's slack take of a card before a program gets any.
_RESERVED_ON_CARD = 3 * 2**29
JAX_TAKES = 0.75  # of a GPU, unless told otherwise
XLA_TAKES = 64e9  # bytes of host memory that GPUs reach, unless told otherwise
_HOST_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_MOST_OF_A_CARD = 0.95  # that can be asked for
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What `num_devices` equal devices offer; a rate is None where the device is not one that `cjax.cards` knows.

    Args:
      name: the kind of device, as JAX calls it.
      num_devices: how many there are in all.
      devices_per_host: how many share a host, and with it the fast links.
      memory: bytes a device that a program may use. On a GPU, JAX takes three quarters of the card unless told
        otherwise by XLA_PYTHON_CLIENT_MEM_FRACTION; for absent cards all but a reserve of 1.5 GiB is counted.
      memory_bandwidth: bytes/s between a device and its memory.
      bf16_flops, f16_flops, f32_flops: dense matmul peaks in FLOP/s; float32 as XLA runs it by default, in TF32 where
        the card has it.
      host_bandwidth: bytes/s from a device to others of its host.
      network_bandwidth: bytes/s of one network adapter.
      adapters_per_host: adapters that the devices of a host share; of a host that is in use in part, those that its
        devices in use reach.
      price: dollars for an hour of one device.
      power: watts that one device draws at most.
      pcie_bandwidth: bytes/s between a device and its host's memory, each way.
    """

    name: str
    num_devices: int
    devices_per_host: int
    memory: int
    memory_bandwidth: float | None = None
    bf16_flops: float | None = None
    f16_flops: float | None = None
    f32_flops: float | None = None
    host_bandwidth: float | None = None
    network_bandwidth: float | None = None
    adapters_per_host: int | None = None
    price: float | None = None
    power: float | None = None
    pcie_bandwidth: float | None = None

    @property
    def is_hopper(self) -> bool:
        """Whether the devices are NVIDIA's Hopper cards, for which there are kernels that others have not."""
        card = card_of_kind(self.name)
        return card is not None and card.is_hopper

    def matmul_flops(self, dtype: str) -> float | None:
        """Peak FLOP/s of matmuls with operands of this dtype, such as `"bfloat16"`; None where unknown."""
        return {"bfloat16": self.bf16_flops, "float16": self.f16_flops, "float32": self.f32_flops}.get(dtype)

    def bandwidth(
        self, size: int, on_host: int, crossing: int | None = None, is_exchange: bool = False
    ) -> float | None:
        """Bytes/s at which each device of a group receives in a collective, at most; None where unknown.

        What every member of a group is to have need enter a host once, by all adapters that its members there use, and
        goes on over the links inside. So a gather or a reduction among 64 devices has the 8 adapters of each host, and
        one adapter where each of its members is on a host of its own.

        Args:
          size: devices in a group.
          on_host: how many of them share a host, on the host that has the fewest.
          crossing: devices of one host whose groups leave it, and which share its adapters; all if not given.
          is_exchange: whether each member receives what no other does: all-to-alls and permutes.
        """
        if self.host_bandwidth is None or on_host >= size:
            return self.host_bandwidth
        if self.network_bandwidth is None or self.adapters_per_host is None:
            return None
        crossing = crossing or self.devices_per_host
        most = math.ceil(self.adapters_per_host / self.devices_per_host)  # that one device can use
        adapters = min(most, self.adapters_per_host / crossing) * (1 if is_exchange else on_host)
        from_outside = (size - on_host) / (size - 1)
        return min(self.host_bandwidth, adapters * self.network_bandwidth / from_outside)


def hardware_of(devices: Sequence[Device]) -> Hardware:
    """The facts of these devices, present or compile-only.

    Args:
      devices: all devices of a plan, of one kind.

    Raises:
      ValueError: when they are of different kinds, or not here and of a card that is not known.

    >>> import jax
    >>> hardware_of(jax.devices("cpu")).name
    'cpu'
    """
    kinds = sorted({device.device_kind for device in devices})
    if len(kinds) != 1:
        raise ValueError(
            f"A plan needs devices of one kind, not {' and '.join(kinds) or 'none'}: give those of one, such as "
            '[d for d in jax.devices() if d.device_kind == "..."].'
        )
    if is_compile_only(devices):
        cluster = cluster_of(devices)
        if cluster is None:
            raise ValueError(
                f"The devices are not here, and cjax does not know what a {kinds[0]} can do: give devices as a "
                "cjax.Cluster with a card of your own."
            )
        return hardware_of_cluster(cluster, len(devices))
    card = card_of_kind(kinds[0])
    per_host = _devices_per_host(devices)
    memory = _memory(devices, card)
    if card is None:
        return Hardware(kinds[0], len(devices), per_host, memory)
    return dataclasses.replace(
        hardware_of_cluster(Cluster(card), len(devices)),
        devices_per_host=per_host,
        memory=memory,
        adapters_per_host=_adapters(Cluster(card), per_host),
    )


def hardware_of_cluster(cluster: Cluster, num_devices: int) -> Hardware:
    """The facts of `num_devices` cards of machines that are not here.

    >>> hardware_of_cluster(Cluster.parse("h100/network=100Gb/s"), 64).bandwidth(64, 8)
    14062500000.0
    """
    card, per_host = cluster.card, min(cluster.cards_per_host, num_devices)
    return Hardware(
        name=card.kind,
        num_devices=num_devices,
        devices_per_host=per_host,
        memory=cluster.memory - _RESERVED_ON_CARD,
        memory_bandwidth=card.memory_bandwidth,
        bf16_flops=card.bf16_flops,
        f16_flops=card.f16_flops,
        f32_flops=card.tf32_flops or card.f32_flops,
        host_bandwidth=cluster.host_bandwidth,
        network_bandwidth=cluster.network_bandwidth,
        adapters_per_host=_adapters(cluster, per_host),
        price=cluster.price,
        power=cluster.power,
        pcie_bandwidth=card.pcie_bandwidth,
    )


def with_measured(hardware: Hardware, profile: Profile) -> Hardware:
    """The same facts, with measured rates where no datasheet has any: what a CPU does, and virtual devices of it."""
    assert profile.kind == hardware.name, "read_profile gives that of these devices"
    found = profile.at(hardware.num_devices)
    return dataclasses.replace(
        hardware,
        memory_bandwidth=hardware.memory_bandwidth or found.memory_bandwidth,
        bf16_flops=hardware.bf16_flops or found.matmul.get("bfloat16"),
        f16_flops=hardware.f16_flops or found.matmul.get("float16"),
        f32_flops=hardware.f32_flops or found.matmul.get("float32"),
        host_bandwidth=hardware.host_bandwidth or found.links,
    )


def _adapters(cluster: Cluster, in_use: int) -> int:
    """The adapters of a host that `in_use` of its cards reach: a card has its own, or shares one with others."""
    return min(cluster.adapters_per_host, in_use * math.ceil(cluster.adapters_per_host / cluster.cards_per_host))


def _devices_per_host(devices: Sequence[Device]) -> int:
    # Several processes may share a host: then the slice, one a host where JAX reports it, says which.
    hosts = [getattr(device, "slice_index", None) for device in devices]
    hosts = [device.process_index for device in devices] if None in hosts else hosts
    return max(hosts.count(host) for host in set(hosts))


def _memory(devices: Sequence[Device], card: Card | None) -> int:
    local = [device for device in devices if is_of_this_process(device)]
    if not local:
        raise ValueError(
            "None of the given devices belongs to this process: give jax.devices(), which holds all processes'."
        )
    if local[0].platform == "cpu":
        return host_memory() // len(local)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in local]
    known = [limit for limit in limits if limit]
    if known:
        return min(known)
    # With XLA_PYTHON_CLIENT_ALLOCATOR=platform JAX sets itself no limit and reports none.
    if card is None:
        raise ValueError(
            f"JAX does not say how much memory a {local[0].device_kind} has, and cjax does not know it: start Python "
            "without XLA_PYTHON_CLIENT_ALLOCATOR=platform, under which JAX keeps no count."
        )
    return card.memory - _RESERVED_ON_CARD


def more_of_a_card(devices: Sequence[Device], needed: float) -> str | None:
    """What to set, where a plan needs more of its GPUs than JAX takes by itself, and they have it.

    Args:
      devices: all devices of a plan.
      needed: bytes of one.
    """
    card, cluster = card_of_kind(devices[0].device_kind), cluster_of(devices) if is_compile_only(devices) else None
    whole = cluster.memory if cluster is not None else card.memory if card is not None else 0
    if needed > _MOST_OF_A_CARD * whole:
        return None
    taken = JAX_TAKES * whole if is_compile_only(devices) else _memory(devices, card)
    if needed <= taken:
        return None
    return (
        f"JAX takes {taken / 2**30:.0f} of such a card's {whole / 2**30:.0f} GiB, and this needs more: set "
        f"XLA_PYTHON_CLIENT_MEM_FRACTION={_MOST_OF_A_CARD} where it runs, before Python starts"
    )


def more_of_a_host(devices: Sequence[Device], needed: float) -> str | None:
    """What to set, where GPUs are to reach more bytes of their host's memory than XLA lets a process have by itself.

    Args:
      devices: all devices of a plan.
      needed: bytes of a process.
    """
    if devices[0].platform == "cpu":
        return None
    told = None if is_compile_only(devices) else os.environ.get(_HOST_LIMIT)
    taken = 1e9 * float(told) if told else XLA_TAKES
    if needed <= taken:
        return None
    return (
        f"XLA lets a process have {taken / 1e9:.0f} GB of host memory for what moves, and this needs more: set "
        f"{_HOST_LIMIT}={1.25 * needed / 1e9:.0f} where it runs, before Python starts"
    )


def host_memory() -> int:
    """Bytes of main memory this process may use: the machine's, or its container's where that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _CGROUP_LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdigit():  # "max" means none
            limits.append(int(text))
    return min(limits)
