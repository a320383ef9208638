"""What was measured on the devices that are here, in place of a datasheet and of shares of it."""

import dataclasses

from cjax.cards import card_of_kind
from cjax.planner.costs.calibration import Calibration, Software, calibration_of
from cjax.planner.hardware import Hardware, with_measured
from cjax.planner.profile import Profile

# Of single steps around a prediction from measured rates: what the rates of large arrays do not tell of small ones.
_SPREAD = 0.25


def profiled(hardware: Hardware, profile: Profile | None) -> tuple[Hardware, Calibration | None]:
    """The devices and their constants, measured ones first; None where nobody has measured any like them.

    Of a card with a datasheet its shares are measured, and the rest is as fitted. Of other devices the rates are
    measured, and reached whole. Virtual devices that share cores have together what the cores have: a stage that waits
    leaves them to the others, so that only the sum of all work counts, and a transfer is a copy that nothing hides.

    Args:
      hardware: the devices.
      profile: what `cjax calibrate` found, if it did.

    >>> from cjax.planner.hardware import Hardware
    >>> profile = Profile("cpu", "", 8, True, {"float32": 1e10}, 0.0, 1e9, {"all-gather": 5e8}, 1e-4, 1e-3, "", "")
    >>> known, constants = profiled(Hardware("cpu", 4, 4, 2**30), profile)
    >>> known.f32_flops, constants.shares_cores
    (20000000000.0, True)
    """
    fitted = calibration_of(hardware)
    if profile is None:
        return hardware, fitted
    found, known = profile.at(hardware.num_devices), with_measured(hardware, profile)
    if fitted is not None:
        # The time of a collective that moves nothing is all members' together; a prediction counts it by member.
        # And what a step takes beside its kernels was measured too: published runs, which the constants are from, took
        # 10 ms, for an H100 by itself it is 1 or 2 (docs/gpu.md).
        latency = found.latency / max(1, found.num_devices - 1)
        shares = {"source": profile.source, "latency": latency, "step": found.launch}
        if known.memory_bandwidth:
            shares["memory"] = min(1.0, found.memory_bandwidth / known.memory_bandwidth)
        if known.bf16_flops and "bfloat16" in found.matmul:
            shares["matmul"] = min(1.0, found.matmul["bfloat16"] / known.bf16_flops)
        # Measured were the links that the card comes with; those that are planned for may be others.
        card = card_of_kind(hardware.name)
        if card is not None and found.links:
            shares["links"] = min(1.0, found.links / card.host_bandwidth)
        return known, dataclasses.replace(fitted, **shares)
    hidden = dict.fromkeys(("hidden_data", "hidden_gather", "hidden_tensor", "overlapped", "hidden_pipeline"), 0.0)
    return known, Calibration(
        profile.source,
        cores=0,
        matmul=1.0,
        attention=1.0,
        # What `Computing` counts of a thin matmul is that its weights are read from memory once for each.
        thin=found.thin * found.memory_bandwidth / 2,
        memory=1.0,
        links=1.0,
        adapters=1.0,
        latency=found.latency,
        launch=0.0,
        step=found.launch,
        straggling=0.0,
        spread=_SPREAD,
        shares_cores=found.shares_cores,
        # CPUs lay out what they gather and scatter, which takes longer than to send it; they add up where it lies.
        kinds=tuple((kind, rate / found.links) for kind, rate in found.link_bandwidth.items()) if found.links else (),
        software=Software(scatters=known.name != "cpu", copies_weights=known.name == "cpu"),
        **hidden,
    )
