"""What a search goes by on devices that nobody has measured: proportions, from which no time can be told."""

import dataclasses

from cjax.planner.costs.calibration import Calibration
from cjax.planner.hardware import Hardware

# Of one host, whatever the number of virtual devices that share it: a few cores, and copies through its memory.
_CPU_FLOPS = 1e11
_CPU_BYTES = 1e10
# Of an accelerator between those that cjax knows.
_FLOPS, _BYTES, _LINK, _NETWORK = 3e14, 2e12, 3e11, 2.5e10


def assumed(hardware: Hardware) -> tuple[Hardware, Calibration]:
    """The same devices with rates, and how far they are reached, by which plans can be put in order.

    Virtual CPU devices share their host's cores: what one of them saves another has, so that only the sum of all work
    counts, and a transfer is a copy.
    """
    if hardware.name.lower() == "cpu":
        share = max(1, hardware.devices_per_host)
        rates = dict(flops=_CPU_FLOPS / share, memory=_CPU_BYTES / share, link=_CPU_BYTES / share / 2)
        rates["network"] = rates["link"]
    else:
        rates = dict(flops=_FLOPS, memory=_BYTES, link=_LINK, network=_NETWORK)
    known = dataclasses.replace(
        hardware,
        memory_bandwidth=hardware.memory_bandwidth or rates["memory"],
        bf16_flops=hardware.bf16_flops or rates["flops"],
        f16_flops=hardware.f16_flops or rates["flops"],
        f32_flops=hardware.f32_flops or rates["flops"] / 2,
        host_bandwidth=hardware.host_bandwidth or rates["link"],
        network_bandwidth=hardware.network_bandwidth or rates["network"],
        adapters_per_host=hardware.adapters_per_host or hardware.devices_per_host,
    )
    exposed = dict.fromkeys(("hidden_data", "hidden_gather", "hidden_tensor", "overlapped", "hidden_pipeline"), 0.0)
    return known, Calibration(f"nobody has measured a {hardware.name}", **exposed)
