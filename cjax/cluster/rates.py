"""How fast a job is: as it was predicted, corrected by what it was seen to do."""

import dataclasses
import math
from collections.abc import Mapping

from cjax.scheduler.policy.job import Speed, SpeedTable

Ways = Mapping[tuple[int, float], float]  # samples/s that were measured, by devices and batch


def corrected(speeds: tuple[Speed, ...], measured: Ways) -> SpeedTable:
    """What was measured, where it was; elsewhere what was predicted, times what the nearest that was measured came to
    beside its own prediction."""
    predicted = {(speed.devices, speed.batch): speed.samples_per_second for speed in speeds}
    ratios = {way: rate / predicted[way] for way, rate in measured.items() if way in predicted}

    def rate(speed: Speed) -> float:
        way = speed.devices, speed.batch
        if way in measured:
            return measured[way]
        if not ratios:
            return speed.samples_per_second
        nearest = min(ratios, key=lambda other: (_apart(way, other), other))
        return speed.samples_per_second * ratios[nearest]

    return SpeedTable([dataclasses.replace(speed, samples_per_second=rate(speed)) for speed in speeds])


def _apart(one: tuple[int, float], other: tuple[int, float]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))
