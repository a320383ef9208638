"""Workloads on disk: the published ones, and users' own logs."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from cjax.scheduler.policy.job import Speed
from cjax.scheduler.replay.measured import MeasuredModel, rows_of
from cjax.scheduler.replay.own import OwnModel
from cjax.scheduler.replay.simulated import Submission

# Of the published simulations: epochs, rows that a device holds at most, and the batch of jobs that choose none.
PUBLISHED: Mapping[str, tuple[int, int | None, int | None]] = {
    "bert": (2, None, None),
    "cifar10": (100, None, None),
    "deepspeech2": (80, None, None),
    "imagenet": (90, None, None),
    "ncf": (10, None, 32768),
    "yolov3": (50, 8, None),
}


class Library:
    """Models of the published tables, each read once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[str, MeasuredModel] = {}

    def __getitem__(self, name: str) -> MeasuredModel:
        if name not in PUBLISHED:
            raise ValueError(f"no tables of {name!r} were published; there are {', '.join(PUBLISHED)}")
        if name not in self._read:
            self._read[name] = MeasuredModel(self.folder / name, *PUBLISHED[name])
        return self._read[name]


def read_workload(path: Path, tables: Path, library: Library | None = None) -> list[Submission]:
    """The jobs of a csv file.

    Args:
        path: with the columns name, time and application, and either num_replicas and batch_size, as the published
            ones have them, or work, with devices, batch, least and most where they are known.
        tables: for published ones the folder of the models' folders; else a csv file of speeds.
        library: of models that were read before.

    Raises:
        ValueError: a column is missing, a name stands twice, or a job asks for what no table has.
    """
    rows = rows_of(path, "name,time,application")
    if not rows:
        raise ValueError(f"{path} has no job: a line each, behind name,time,application,...")
    if "num_replicas" in rows[0]:
        library = library or Library(tables)
        jobs = [
            Submission(
                row["name"],
                number(row, "time", path),
                library[row["application"]],
                int(number(row, "num_replicas", path)),
                number(row, "batch_size", path),
            )
            for row in rows_of(path, "name,time,application,num_replicas,batch_size")
        ]
    else:
        speeds = read_speeds(tables)
        jobs = [_own(row, speeds, path) for row in rows_of(path, "name,time,application,work")]
    if twice := sorted({job.name for job in jobs if sum(job.name == other.name for other in jobs) > 1}):
        raise ValueError(f"{path} has jobs of one name: {', '.join(twice)}; give each its own")
    return jobs


def read_speeds(path: Path) -> dict[str, tuple[tuple[Speed, ...], float]]:
    """Speeds and noise scale of each application, from a csv file with application, devices and samples_per_second,
    and with batch, plan and noise where they are known."""
    speeds: dict[str, list[Speed]] = defaultdict(list)
    noises: dict[str, float] = {}
    for row in rows_of(path, "application,devices,samples_per_second"):
        name = row["application"]
        batch = number(row, "batch", path, 1.0)
        rate = number(row, "samples_per_second", path)
        speeds[name].append(Speed(int(number(row, "devices", path)), rate, batch, row.get("plan") or ""))
        noises[name] = number(row, "noise", path, noises.get(name, 0.0))
    return {name: (tuple(found), noises[name]) for name, found in speeds.items()}


def _own(row: Mapping[str, str], speeds: Mapping[str, tuple[tuple[Speed, ...], float]], path: Path) -> Submission:
    application = row["application"]
    if application not in speeds:
        raise ValueError(f"{path}: {row['name']} runs {application!r}, of which the speeds have no line")
    table, noise = speeds[application]
    work = number(row, "work", path)
    if work <= 0:
        raise ValueError(f"{path}: the work of {row['name']} is {work:g} samples; it is a number above 0")
    model = OwnModel(application, table, work, noise)
    sizes = model.sizes({})
    devices = int(number(row, "devices", path, sizes[0]))
    least, most = int(number(row, "least", path, 1)), int(number(row, "most", path, sizes[-1]))
    if devices not in sizes:
        known = ", ".join(map(str, sizes))
        raise ValueError(f"{path}: {row['name']} asks for {devices} devices, and speeds are known on {known}")
    if not any(least <= size <= most for size in sizes):
        raise ValueError(f"{path}: {row['name']} may have {least} to {most} devices, of which no speed is known")
    batch = number(row, "batch", path, model.base_batch)
    return Submission(row["name"], number(row, "time", path), model, devices, batch, least, most)


def number(row: Mapping[str, str], column: str, path: Path, default: float | None = None) -> float:
    """What stands in a column; `default` if nothing does."""
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ValueError(
            f"{path}: {column} of {row.get('name') or row.get('application')} is {text!r}, not a number"
        ) from None
