"""`cjax inspect`."""

import dataclasses
from collections.abc import Sequence

import tyro

from cjax.checkpoint import inspect


@dataclasses.dataclass(frozen=True)
class Inspect:
    """Shows what a checkpoint holds; needs no devices and no model.

    Attributes:
        checkpoint: the folder of a checkpoint, or of a run, whose latest is shown.
    """

    checkpoint: tyro.conf.Positional[str]

    @staticmethod
    def parse(arguments: Sequence[str]) -> "Inspect":
        return tyro.cli(Inspect, args=arguments, prog="cjax inspect")

    def run(self) -> int:
        print(inspect(self.checkpoint))
        return 0
