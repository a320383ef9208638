"""What a user submits: a command, how far it goes, and how fast it is on each number of devices."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cjax.job.files import read_object
from cjax.scheduler.policy.job import Speed

WAY = "CJAX_WAY"  # in a worker's environment: how it is to train on the devices that it has now, as JSON
RULES = ("sqrt", "linear")


@dataclasses.dataclass(frozen=True)
class Submitted:
    """A job.

    Attributes:
        name: its own among those of the cluster.
        command: what each of its workers runs.
        folder: where it was submitted, and where its workers are started.
        environment: of whoever submitted it.
        steps: that it takes, at the base batch.
        least: devices that it has to have.
        most: devices that it may have.
        speeds: what it is expected to do, by devices and batch.
        batch: rows of its base batch.
        rule: how its rate of learning follows the batch, where that may change.
        time: when it was submitted, in seconds since the epoch.
    """

    name: str
    command: tuple[str, ...]
    folder: str
    environment: Mapping[str, str]
    steps: int
    least: int
    most: int
    speeds: tuple[Speed, ...]
    batch: float
    rule: str | None
    time: float

    @property
    def work(self) -> float:
        """Samples of the base batch in all."""
        return self.steps * self.batch

    def text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of(path: Path) -> "Submitted | None":
        """What is in a file; None where there is nothing whole."""
        found = read_object(path)
        if found is None:
            return None
        speeds = tuple(Speed(**each) for each in found["speeds"])
        return Submitted(**found | {"command": tuple(found["command"]), "speeds": speeds})


def rate_factor(rule: str | None, batch: float, base: float) -> float:
    """What the rate of learning is multiplied by at a batch."""
    if rule is None:
        return 1.0
    return batch / base if rule == "linear" else (batch / base) ** 0.5


def sizes_of(nodes: Mapping[str, int]) -> list[int]:
    """Numbers of devices that a job may have on these nodes: a part of one, or whole ones of the largest."""
    per_node = max(nodes.values())
    many = sum(size == per_node for size in nodes.values())
    part = [size for size in range(1, per_node) if size <= 4 or size % 2 == 0]
    return [*part, *(per_node * number for number in range(1, many + 1))]


def range_of(text: Any) -> tuple[int, int]:
    """`1:8`, `4`, or a pair.

    Raises:
        ValueError: it is no such range.
    """
    try:
        parts = text.split(":") if isinstance(text, str) else [text, text] if isinstance(text, int) else list(text)
        low, high = (int(part) for part in (parts if len(parts) == 2 else parts * 2))
        if len(parts) > 2 or not 1 <= low <= high:
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"{text!r} is no range: write the least and the most, as 1:8, or one number, as 4") from None
    return low, high
