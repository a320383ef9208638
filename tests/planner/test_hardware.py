"""Facts of devices: what is measured, what is on the datasheet, and what stays unknown."""

import dataclasses
import os
from typing import Any

import jax
import pytest

from cjax.cards import CARDS
from cjax.machines import Cluster
from cjax.mesh import resolve_devices
from cjax.planner import hardware
from cjax.planner.hardware import Hardware, hardware_of, hardware_of_cluster, more_of_a_card, more_of_a_host


class Client:
    runtime_type = "stream_executor"

    def process_index(self):
        return 0


class Absent:
    runtime_type = "compile_only_runtime"


class Gpu:
    platform = "gpu"
    client = Client()

    def __init__(self, kind, process_index=0, slice_index=0, limit=70 * 2**30):
        self.device_kind, self.process_index, self.slice_index, self.limit = kind, process_index, slice_index, limit

    def memory_stats(self):
        return {"bytes_limit": self.limit} if self.limit else None


def test_virtual_cpu_devices_share_the_hosts_memory():
    facts = hardware_of(jax.devices())
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < facts.memory <= total // 8 and facts.memory == hardware.host_memory() // 8
    assert hardware_of(jax.devices()[:2]).memory == 4 * facts.memory
    assert (facts.name, facts.num_devices, facts.devices_per_host) == ("cpu", 8, 8)
    assert facts.bf16_flops is facts.matmul_flops("float32") is facts.bandwidth(2, 2) is None


def test_container_limit_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(hardware, "_CGROUP_LIMITS", (str(limit), str(tmp_path / "missing")))
    limit.write_text("1048576\n")
    assert hardware.host_memory() == 2**20
    limit.write_text("max\n")
    assert hardware.host_memory() > 2**20


def test_known_card_takes_rates_from_the_datasheet_and_memory_from_jax():
    card = CARDS["h200"]
    # Two hosts of two cards each, four processes dealt to the hosts in turn.
    devices = [Gpu(card.kind, process_index=i, slice_index=i % 2) for i in range(4)]
    facts = hardware_of(devices)
    assert facts.memory == 70 * 2**30 and facts.devices_per_host == 2
    assert facts.matmul_flops("bfloat16") == facts.matmul_flops("float16") == 989.4e12
    assert facts.matmul_flops("float32") == card.tf32_flops and facts.matmul_flops("float64") is None
    # Four in all, each with an adapter of its own; half of what a host is to have comes from the other.
    assert (facts.bandwidth(2, 2), facts.bandwidth(2, 1)) == (450e9, 50e9)
    assert facts.adapters_per_host == 2 and facts.bandwidth(4, 2) == 2 * 50e9 * 3 / 2
    assert (facts.price, facts.power) == (card.price, 700)


MACHINE = Hardware("card", 64, 8, 1, host_bandwidth=1000.0, network_bandwidth=10.0, adapters_per_host=8)
FEW = dataclasses.replace(MACHINE, adapters_per_host=1)
MANY = dataclasses.replace(MACHINE, devices_per_host=4, num_devices=32)


@pytest.mark.parametrize(
    ("machine", "size", "on_host", "more", "bandwidth"),
    [
        (MACHINE, 8, 8, {}, 1000),  # stays in its host
        (MACHINE, 64, 8, {}, 80 * 63 / 56),  # 8 adapters bring 56 of the 63 parts that a member is to have
        (MACHINE, 16, 8, {}, 80 * 15 / 8),
        (MACHINE, 8, 1, {}, 10),  # a member a host, and 7 more groups beside it
        (MACHINE, 16, 2, {}, 20 * 15 / 14),
        (MACHINE, 64, 8, {"is_exchange": True}, 10 * 63 / 56),  # each is brought what no other has
        (MACHINE, 2, 1, {"is_exchange": True}, 10),
        (FEW, 64, 8, {}, 10 * 63 / 56),  # one adapter for the host
        (FEW, 8, 1, {}, 10 / 8),
        (FEW, 2, 1, {"is_exchange": True}, 10 / 8),
        (FEW, 2, 1, {"is_exchange": True, "crossing": 1}, 10),  # of a ring over all, one member a host looks out
        (MANY, 32, 4, {}, 80 * 31 / 28),  # two adapters a device
        (MANY, 2, 1, {"is_exchange": True, "crossing": 1}, 20),
        (dataclasses.replace(MACHINE, host_bandwidth=30.0), 64, 8, {}, 30),  # PCIe is slower than the adapters
        (dataclasses.replace(MACHINE, network_bandwidth=None), 64, 8, {}, None),
    ],
)
def test_a_group_has_the_adapters_of_its_members(
    machine: Hardware, size: int, on_host: int, more: dict[str, Any], bandwidth: float | None
) -> None:
    assert machine.bandwidth(size, on_host, **more) == pytest.approx(bandwidth)


def test_without_a_limit_of_jax_the_cards_memory_counts():
    card = CARDS["a100"]
    assert hardware_of([Gpu(card.kind, limit=None)]).memory == card.memory - 3 * 2**29
    with pytest.raises(ValueError, match="NVIDIA Whatever"):
        hardware_of([Gpu("NVIDIA Whatever", limit=None)])


def test_of_a_card_that_is_not_here_a_part_is_reserved():
    """What a running process would need beside the program; as many as 16 of them fill two hosts."""
    absent = Gpu(CARDS["h100"].kind)
    absent.client = Absent()
    facts = hardware_of([absent] * 16)
    assert facts.memory == CARDS["h100"].memory - 3 * 2**29 and facts.devices_per_host == 8
    assert hardware_of([absent] * 4).devices_per_host == 4
    assert facts == hardware_of_cluster(Cluster("h100"), 16)
    absent.device_kind = "NVIDIA Whatever"
    with pytest.raises(ValueError, match="does not know what a NVIDIA Whatever can do: give devices as a cjax.Cluster"):
        hardware_of([absent])


def test_more_of_a_card_than_jax_takes_is_told():
    """Three quarters of one that is not here, and of one that is as much as JAX says."""
    card = CARDS["h100"]
    absent, here = Gpu(card.kind), Gpu(card.kind, limit=int(0.75 * card.memory))
    absent.client = Absent()
    for gpu in (absent, here):
        assert more_of_a_card([gpu], 0.74 * card.memory) is None
        told = more_of_a_card([gpu], 0.76 * card.memory)
        assert told and "JAX takes 59 of such a card's 79 GiB" in told and "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in told
        assert more_of_a_card([gpu], 0.96 * card.memory) is None, "nor has the card as much"
    assert more_of_a_card([Gpu(card.kind, limit=int(0.9 * card.memory))], 0.8 * card.memory) is None
    assert more_of_a_card(jax.devices(), 1e15) is None


def test_more_of_a_host_than_xla_takes_is_told(monkeypatch):
    absent, here = Gpu(CARDS["h100"].kind), Gpu(CARDS["h100"].kind)
    absent.client = Absent()
    for gpu in (absent, here):
        told = more_of_a_host([gpu], 80e9)
        assert told and "have 64 GB" in told and "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100 where" in told
        assert more_of_a_host([gpu], 63e9) is None
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "90")
    assert more_of_a_host([here], 80e9) is None and more_of_a_host([absent], 80e9) is not None
    assert more_of_a_host(jax.devices(), 1e15) is None


def test_machines_of_their_own():
    text = "h100:16/node=4,nvlink=64GB/s,network=2x25GB/s,memory=60GiB,price=2,power=500"
    facts = hardware_of_cluster(Cluster.parse(text), 16)
    assert (facts.num_devices, facts.devices_per_host, facts.adapters_per_host) == (16, 4, 2)
    assert (facts.host_bandwidth, facts.network_bandwidth, facts.price, facts.power) == (64e9, 25e9, 2, 500)
    assert facts.memory == 60 * 2**30 - 3 * 2**29
    # A host that is in use in part has the adapters that its cards in use reach.
    assert hardware_of_cluster(Cluster.parse(text), 1).adapters_per_host == 1
    assert hardware_of_cluster(Cluster("h100", adapters_per_host=16), 4).adapters_per_host == 8


def test_a_card_without_bfloat16():
    facts = hardware_of_cluster(Cluster("v100"), 8)
    assert facts.matmul_flops("bfloat16") is None and facts.matmul_flops("float16") == 125e12
    assert facts.matmul_flops("float32") == 15.7e12  # it has no TF32 either


def test_mixed_kinds_are_refused():
    with pytest.raises(ValueError, match="NVIDIA H100 80GB HBM3 and NVIDIA H200"):
        hardware_of([Gpu(CARDS["h100"].kind), Gpu(CARDS["h200"].kind)])


@pytest.mark.aot
def test_absent_cards():
    small = resolve_devices("h100:1/memory=40GiB")
    assert more_of_a_card(small, 65 * 2**30) is None and "30 of such a card's 40" in str(more_of_a_card(small, 2**35))
    facts = hardware_of(resolve_devices("h100:64"))
    assert (facts.num_devices, facts.devices_per_host) == (64, 8)
    assert 77 * 2**30 < facts.memory < 78 * 2**30
    assert facts.bf16_flops == 989.4e12
    assert hardware_of(resolve_devices("h100:4")).devices_per_host == 4


@pytest.mark.aot
def test_devices_that_are_not_here_know_their_machines():
    """Two clusters of the same card, alive at once."""
    slow, fast = resolve_devices("h100:8/node=4,nvlink=64GB/s"), resolve_devices(Cluster("h100", 8))
    assert hardware_of(slow).bandwidth(4, 4) == 64e9 and hardware_of(slow[:2]).devices_per_host == 2
    assert (hardware_of(fast).devices_per_host, hardware_of(fast).host_bandwidth) == (8, 450e9)
    assert [device.process_index for device in slow] == [0] * 4 + [1] * 4
