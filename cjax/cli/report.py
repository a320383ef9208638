"""`cjax report`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import tyro

from cjax.report.runs import write_page


@dataclasses.dataclass(frozen=True)
class ReportCommand:
    """Draws runs as one HTML page: loss, speed and hardware, several runs in the same charts; needs no devices.

    Attributes:
        runs: folders of runs.
        out: the page; report.html in the folder of a run, or here where there are several, if not given.
    """

    runs: tyro.conf.Positional[tuple[str, ...]]
    out: str | None = None

    @staticmethod
    def parse(arguments: Sequence[str]) -> "ReportCommand":
        return tyro.cli(ReportCommand, args=arguments, prog="cjax report")

    def run(self) -> int:
        if not self.runs:
            raise ValueError("no run was given: cjax report runs/first")
        place = Path(self.out or (Path(self.runs[0]) if len(self.runs) == 1 else Path()) / "report.html")
        write_page(self.runs, place)
        print(f"{place.absolute()}")
        return 0
