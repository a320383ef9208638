"""What was found in a trace: dims and where they occur, repeated blocks, primitives that nobody knows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cjax.report.render import Lines, Sheet, Table

MAX_PLACES = 4


@dataclass(frozen=True)
class DimRow:
    """A dim of the model.

    Args:
      name: what cjax calls it.
      sizes: its size; several where one name covers multiples.
      places: the tensors that it occurs in, as `path:number`.

    `cjax.report.TraceSummary` has an example.
    """

    name: str
    sizes: tuple[int, ...]
    places: tuple[str, ...]


@dataclass(frozen=True)
class BlockRow:
    """A stack: a part of the model that repeats.

    Args:
      repeats: how many times.
      what: the part, by the path of its parameters.
      num_equations: of the trace, for one repeat.
      share: of the trace's equations, those that all repeats cover.

    `cjax.report.TraceSummary` has an example.
    """

    repeats: int
    what: str
    num_equations: int
    share: float


@dataclass(frozen=True, repr=False)
class TraceSummary(Sheet):
    """What was read off a traced loss; prints as text, shows as HTML in a notebook.

    Args:
      model: what its author calls it.
      dims: all that have a name.
      blocks: the parts that repeat.
      unknown: primitives that cjax does not know, and how many times each occurs.

    >>> print(TraceSummary("GPT", [DimRow("embed", (64,), ("wte:1", "wpe:1"))], [BlockRow(12, "Block", 90, 0.95)]))
    trace   of GPT
    blocks  12 x Block (90 equations each, 95 % of the trace)
    unknown no primitive
    <BLANKLINE>
    dim    size  where
    -----  ----  ------------
    embed    64  wte:1, wpe:1
    """

    model: str
    dims: Sequence[DimRow]
    blocks: Sequence[BlockRow] = ()
    unknown: Mapping[str, int] = field(default_factory=dict)

    def _lines(self) -> Lines:
        blocks = [
            f"{each.repeats} x {each.what} ({each.num_equations} equations each, {100 * each.share:.0f} % of the trace)"
            for each in self.blocks
        ]
        names = [f"{name} ({count} times)" if count > 1 else name for name, count in self.unknown.items()]
        unknown = f"{', '.join(names)}: their dims count as unrelated" if names else "no primitive"
        lines = [("trace", f"of {self.model}"), ("blocks", "; ".join(blocks) or "none: no part repeats")]
        return Lines([*lines, ("unknown", unknown)])

    def _table(self) -> Table:
        rows = []
        for dim in self.dims:
            more = len(dim.places) - MAX_PLACES
            places = ", ".join(dim.places[:MAX_PLACES]) + (f" and {more} more" if more > 0 else "")
            rows.append((dim.name, ", ".join(f"{size:,}" for size in dim.sizes), places))
        return Table(("dim", "size", "where"), rows, right=frozenset({1}))
