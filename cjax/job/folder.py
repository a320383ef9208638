"""What a job keeps in the folder of its run, below `job`."""

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class JobFolder:
    """Where everything is.

    Attributes:
        run: the folder of the run.
    """

    run: Path

    @property
    def place(self) -> Path:
        return self.run / "job"

    @property
    def state(self) -> Path:
        """What the supervisor knows: command, number of workers, incarnation, and which processes are its own."""
        return self.place / "state.json"

    @property
    def history(self) -> Path:
        """A line for each start and each end of an incarnation."""
        return self.place / "history.jsonl"

    @property
    def asked(self) -> Path:
        """What `cjax resize` asks for."""
        return self.place / "asked.json"

    @property
    def rehearsal(self) -> Path:
        """A checkpoint that those who get ready for a resize restore before it counts."""
        return self.place / "rehearsal"

    @property
    def lock(self) -> Path:
        """Held by whoever trains here, or supervises who does."""
        return self.run / "lock"

    @property
    def beats(self) -> Path:
        return self.place / "beats"

    def beat(self, incarnation: int, rank: int) -> Path:
        """What a worker says of itself."""
        return self.beats / f"{incarnation}-{rank}"

    def log(self, incarnation: int, rank: int) -> Path:
        """What a worker prints."""
        return self.place / "logs" / f"{incarnation}-{rank}.log"

    def cache(self, rank: int) -> Path:
        """Compiled programs of one rank: a rank's are of no use to another."""
        return self.run / "cache" / f"rank-{rank}"


def new_run(name: str) -> Path:
    """A folder below `runs` that nobody else has, also of those who begin in the same second."""
    first = (Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}").absolute()
    folder, number = first, 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = first.with_name(f"{first.name}-{number}")
        else:
            return folder
