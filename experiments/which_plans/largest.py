"""The largest batch, and the longest sequence, that fit a flavour: solved from memory at a few sizes.

Memory is a sum of what no size changes and of what grows with the rows; with the positions, scores that no kernel makes
grow with their square. So two batches give the one, and three lengths the other.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from shared.results import Results, Row

from cjax.machines import Cluster
from cjax.plan import Plan, Zero

from .asking import Asking
from .flavours import autos
from .models import Case

MOST = 2**20


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One model at several sizes of one kind.

    Args:
      name: "rows" or "length".
      askings: by size.
      step: sizes that are tried are multiples of it, and of the number of devices.
    """

    name: str
    askings: Mapping[int, Asking]
    step: int = 1

    @classmethod
    def of(cls, results: Results, case: Case, name: str, values: Sequence[int], step: int = 1) -> "Sizes":
        return cls(name, {value: Asking(results, dataclasses.replace(case, **{name: value})) for value in values}, step)


def largest(results: Results, sizes: Sizes, cluster: Cluster, num: int, flavour: str) -> Row:
    """The largest size that fits a flavour by prediction, without recomputation, micro-batches or ZeRO that it does not
    name."""
    case = next(iter(sizes.askings.values())).case
    key = {"part": f"most {sizes.name}", "model": case.model, "rows": case.rows, "length": case.length,
           "cluster": str(cluster), "devices": num, "flavour": flavour}  # fmt: skip
    row = results.get(key, lambda: _solved(sizes, cluster, num, flavour))
    print(row if "refused" in row else f"  {row['part']} {num} {flavour}: {row['most']:,}", flush=True)
    return row


def _solved(sizes: Sizes, cluster: Cluster, num: int, flavour: str) -> Row:
    words: dict[str, Any] = {"zero": Zero(0)} | dict(autos(flavour, num, is_pure=True)[0].fixed)
    plan = Plan(data=1, **words)
    plan = dataclasses.replace(plan, data=num // plan.model_size).resolve(num)
    known = {size: asking.score(cluster, plan) for size, asking in sizes.askings.items()}
    if refused := [each for each in known.values() if isinstance(each, str)]:
        return {"refused": refused[0].splitlines()[0]}
    scored = [each for each in known.values() if not isinstance(each, str)]
    limit = scored[0].limit
    curve = np.polynomial.Polynomial.fit(list(known), [each.bytes for each in scored], len(known) - 1)
    step = int(np.lcm(num, sizes.step))
    tried = np.arange(step, MOST, step)
    fit = curve(tried) <= limit
    count = int(np.argmin(fit)) if not fit.all() else len(tried)
    return {"plan": str(plan), "most": int(tried[count - 1]) if count else 0, "limit": limit}
