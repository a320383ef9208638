"""In a process of its own: imports a user's function, and looks for the best plan on each number of devices."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from cjax.job.files import write_whole
from cjax.program.speeds import speed_table
from cjax.tree import PyTree
from cjax.users import UsersError, load_users, with_lines

_DOUBLES = 12  # of a batch at most
_MEASURABLE = ("pipeline=1", "microbatches=2")


class JobParts:
    """What a user's function returns.

    Args:
        file: the user's.
        function: in it, that returns (model, loss, optimizer, data).
        arguments: for it.

    Raises:
        FileNotFoundError: no such file.
        ValueError: no such function, or it returns something else.
        UsersError: the file can't be imported, or the function raises.
    """

    def __init__(self, file: Path, function: str, arguments: Sequence[str] = ()) -> None:
        make: Any = load_users(file, function)
        parts = with_lines(file, lambda: make(*arguments))
        if not isinstance(parts, tuple) or len(parts) != 4:
            raise ValueError(f"{file}:{function} returned {type(parts).__name__}; it should return "
                             "(model, loss, optimizer, data)")  # fmt: skip
        self.model, self.loss, self.optimizer, data = parts
        known = dataclasses.is_dataclass(data) and {"shard", "batch_size"} <= {f.name for f in dataclasses.fields(data)}
        if not known or isinstance(data, type) or not hasattr(data, "batches"):
            raise ValueError(
                f"{file}:{function} returned data of type {type(data).__name__}; it should be as those of cjax.data: a "
                "dataclass with batch_size, shard and batches(start)"
            )
        self.data: Any = data

    def with_batch(self, rows: int) -> Any:
        """The data, in global batches of so many rows."""
        return self.data if rows == self.data.batch_size else dataclasses.replace(self.data, batch_size=rows)

    def shape(self, rows: int) -> PyTree:
        """Of a global batch."""
        batch = next(iter(dataclasses.replace(self.with_batch(rows), shard=(0, 1)).batches(0)))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), batch)


def read(asked: dict[str, Any]) -> dict[str, Any]:
    """Speeds and plans on the numbers of devices that are asked for.

    Raises:
        ValueError: no plan on any.
    """
    parts = JobParts(Path(asked["file"]), asked["function"], asked["arguments"])
    batches, plan = [parts.data.batch_size], asked["plan"]
    if asked["batches"]:
        low, high = asked["batches"]
        batches = [low * 2**number for number in range(_DOUBLES) if low * 2**number <= high]
        # The noise scale compares gradients of parts of the batch with those of the whole.
        plan = " ".join([plan, *(word for word in _MEASURABLE if f" {word.partition('=')[0]}=" not in f" {plan}")])
    cards = f"cpu:{max(asked['all'])}" if asked["card"] == "cpu" else asked["card"]
    found, why = [], ""
    for rows in batches:
        call = parts.model, parts.loss, parts.optimizer, parts.shape(rows)
        try:
            found += speed_table(call, cards, asked["all"], plan).speeds
        except ValueError as error:
            why = str(error)
    sizes = sorted({speed.devices for speed in found})
    least, most = asked["range"]
    if not found:
        raise ValueError(f"--plan {asked['plan']!r}: no plan works here. {why}")
    if not any(least <= size <= most for size in sizes):
        raise ValueError(
            f"--devices {least}:{most} holds no legal plan; there are plans on {', '.join(map(str, sizes))} devices: "
            f"type --devices {sizes[0]}:{sizes[-1]}"
        )
    return {"speeds": [dataclasses.asdict(each) for each in found], "batch": parts.data.batch_size}


def main(asked: str, answer: str) -> int:
    """Reads what is asked, as JSON, and writes the answer, or the error, to a file."""
    try:
        found = read(json.loads(asked))
    except ValueError as error:
        found = {"error": str(error), "kind": "plan"}
    except UsersError as error:
        found = {"error": f"the script can't be used: {error}", "kind": "script"}
    write_whole(Path(answer), json.dumps(found))
    return 0
