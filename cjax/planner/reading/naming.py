"""Names for the dims of a trace's values: those of their classes, so that what is split alike is called alike."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from cjax.mesh import DATA
from cjax.planner.work import BATCH, ROWS, Dims
from cjax.sharding.layout.one_d import find_products
from cjax.sharding.layout.rows import rows_of_all
from cjax.trace.reading import Trace


@dataclass
class Naming:
    """What the dims of a trace are called.

    A class has one name. Of key-value heads that are fewer than the heads of queries, though they are of one class, a
    tensor axis may have to leave those whole: they get a name of their own.

    Args:
      trace: whose dims.
      num_microbatches: of how many such traces the batch is.
    """

    trace: Trace
    num_microbatches: int = 1
    _names: dict[int, str] = field(default_factory=dict)
    _fewer: dict[tuple[int, int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        dims, taken = self.trace.dims, {BATCH, ROWS}
        for c, name in self.trace.names.items():
            if c == self.trace.batch_class:
                continue
            self._names[c] = name if name not in taken else f"{name}{c}"
            taken.add(self._names[c])
        if self.trace.batch_class is not None:
            self._names[self.trace.batch_class] = BATCH
            # Those that two devices can share, whatever the plan.
            self._names |= dict.fromkeys(rows_of_all(self.trace, {DATA: 2}, (DATA,), set())[0], ROWS)
        most: dict[int, int] = {}
        for split in dims.splits:
            c = dims.class_of(split.whole)
            most[c] = max(most.get(c, 0), split.major_size)
        heads = {dims.class_of(d) for m in find_products(self.trace)[1] for d in m.batched}
        for split in dims.splits:
            c = dims.class_of(split.whole)
            if c in heads and c != self.trace.batch_class and split.major_size < most[c]:
                self._fewer[c, split.size] = f"{self.name(c)}/{split.major_size}"

    def name(self, c: int, size: int = 0) -> str:
        """The name of a class, or of its dims of this size."""
        return self._fewer.get((c, size)) or self._names.get(c) or f"dim{c}"

    @functools.cached_property
    def classes(self) -> dict[str, tuple[int, int]]:
        """By name, the class and the size of its dims, 0 if it is of all sizes."""
        every = {self.trace.dims.class_of(d) for d in range(len(self.trace.dims.size))}
        found = {self.name(c): (c, 0) for c in every}
        return found | {name: pair for pair, name in self._fewer.items()}

    def dims(self, classes: Sequence[int], shape: Sequence[int]) -> Dims:
        """Names and sizes of a tensor's dims; those of one element are left out."""
        found = []
        for c, size in zip(classes, shape, strict=True):
            if c == self.trace.batch_class:
                size *= self.num_microbatches
            if size > 1:
                found.append((self.name(c, size), size))
        return tuple(found)
