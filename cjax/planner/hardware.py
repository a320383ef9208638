"""Facts of the given devices that planning needs: memory a program may use, peak rates, links."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

from cjax.cards import Card, card_of_kind
from cjax.jax_compat.backends import is_of_this_process
from cjax.mesh import Device, is_compile_only

# What the CUDA context, NCCL's buffers and the allocator's slack take of a card before a program gets any.
_RESERVED_ON_CARD = 3 * 2**29
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
      bf16_flops, f32_flops: dense matmul peaks in FLOP/s; float32 as XLA runs it by default, in TF32 on these cards.
      host_bandwidth, network_bandwidth: bytes/s from a device to others of its host, and to other hosts.
    """

    name: str
    num_devices: int
    devices_per_host: int
    memory: int
    memory_bandwidth: float | None = None
    bf16_flops: float | None = None
    f32_flops: float | None = None
    host_bandwidth: float | None = None
    network_bandwidth: float | None = None

    def matmul_flops(self, dtype: str) -> float | None:
        """Peak FLOP/s of matmuls with operands of this dtype, such as `"bfloat16"`; None where unknown."""
        return {"bfloat16": self.bf16_flops, "float16": self.bf16_flops, "float32": self.f32_flops}.get(dtype)

    def bandwidth(self, span: int) -> float | None:
        """Bytes/s that one device receives in a collective over groups reaching `span` neighbours in the mesh's order.

        Groups that stay within a host use its links; others go at the network's pace.
        """
        return self.host_bandwidth if span <= self.devices_per_host else self.network_bandwidth


def hardware_of(devices: Sequence[Device]) -> Hardware:
    """The facts of these devices, present or compile-only.

    Args:
      devices: all devices of a plan, of one kind.

    Raises:
      ValueError: when they are of different kinds.

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
    card = card_of_kind(kinds[0])
    facts = dict(
        name=kinds[0],
        num_devices=len(devices),
        devices_per_host=_devices_per_host(devices, card),
        memory=_memory(devices, card),
    )
    if card is None:
        return Hardware(**facts)
    return Hardware(
        **facts,
        memory_bandwidth=card.memory_bandwidth,
        bf16_flops=card.bf16_flops,
        f32_flops=card.tf32_flops,
        host_bandwidth=card.nvlink_bandwidth,
        network_bandwidth=card.network_bandwidth,
    )


def _devices_per_host(devices: Sequence[Device], card: Card | None) -> int:
    if is_compile_only(devices):
        assert card is not None, "compile-only devices are made from a card"
        return min(card.cards_per_host, len(devices))
    # Several processes may share a host: then the slice, one a host where JAX reports it, says which.
    hosts = [getattr(device, "slice_index", None) for device in devices]
    hosts = [device.process_index for device in devices] if None in hosts else hosts
    return max(hosts.count(host) for host in set(hosts))


def _memory(devices: Sequence[Device], card: Card | None) -> int:
    if is_compile_only(devices):
        assert card is not None, "compile-only devices are made from a card"
        return card.memory - _RESERVED_ON_CARD
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


def host_memory() -> int:
    """Bytes of main memory this process may use: the machine's, or its container's where that is less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in map(Path, _CGROUP_LIMITS):
        if path.exists() and (text := path.read_text().strip()).isdigit():  # "max" means none
            limits.append(int(text))
    return min(limits)
