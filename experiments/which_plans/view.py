"""The rows of a log, as the page reads them."""

from collections.abc import Iterable, Sequence
from typing import Any

from shared.results import Results, Row

from cjax.machines import Cluster

from .flavours import PIPELINES

NOTHING = "-"


class View:
    """Rows of one question, by what they were asked of.

    Args:
      results: all rows.
      part: the question.
      known: entries that the rows have.
    """

    def __init__(self, results: Results, part: str, **known: Any) -> None:
        self._rows = [row for row in results.of(part) if all(row.get(name) == value for name, value in known.items())]

    def __bool__(self) -> bool:
        return bool(self._rows)

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    def values(self, name: str) -> list[Any]:
        """That these rows have, in their order."""
        return list(dict.fromkeys(row[name] for row in self._rows))

    def row(self, flavour: str, **known: Any) -> Row | None:
        """The first one of a flavour that fits; None where none does."""
        found = (row for row in self._rows if row["flavour"] == flavour)
        return next((row for row in found if fits(row) and all(row[n] == v for n, v in known.items())), None)

    def least(self, flavours: Iterable[str], **known: Any) -> Row | None:
        """The fastest of several flavours."""
        found = [row for each in flavours if (row := self.row(each, **known))]
        return min(found, key=lambda row: row["s"], default=None)

    def pipeline(self, **known: Any) -> Row | None:
        """The fastest pipeline."""
        return self.least(PIPELINES, **known)


def fits(row: Row) -> bool:
    return "s" in row and not row.get("over")


def rate(row: Row) -> float:
    """Tokens, or examples where there are no positions, a second."""
    return row["tokens"] / row["s"]


def share(row: Row | None, best: Row | None) -> str:
    """How fast beside the best, in percent of its speed."""
    return f"{100 * best['s'] / row['s']:.0f}" if row and best else NOTHING


def ms(row: Row | None) -> str:
    """Its step, with the 80 % interval."""
    if row is None:
        return NOTHING
    return f"{1e3 * row['s']:,.0f} ({1e3 * row['low']:,.0f}-{1e3 * row['high']:,.0f})"


def part_of(row: Row, *parts: str) -> float:
    """The share of a step that some of its parts take, in percent."""
    return 100 * sum(row["parts"].get(part, 0.0) for part in parts) / row["s"]


def words(row: Row | None) -> str:
    """A plan without what all of them have."""
    if row is None:
        return NOTHING
    plan = " ".join(word for word in row["plan"].split() if word not in ("data=1", "precision=bfloat16"))
    return f"`{plan or 'data=1'}`"


def times(number: float) -> str:
    """A ratio: 2.9, 12."""
    return f"{number:.1f}" if number < 10 else f"{number:,.0f}"


def bandwidth(row: Row) -> float:
    """GB/s from a card to the others: of the links in a host, or of its adapter where they are on several."""
    cluster = Cluster.parse(row["cluster"])
    is_inside = row["devices"] <= cluster.cards_per_host
    return (cluster.host_bandwidth if is_inside else cluster.network_bandwidth) / 1e9
