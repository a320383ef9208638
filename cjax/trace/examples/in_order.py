"""Rows that are sorted for experts and put back (`cjax.trace.jaxpr.sorted_rows`): none sees another on the way.

Where a row is among all others does not matter to it, and so not to its example: all along it is laid out as what it is
sorted by. How many rows each expert has is said of all examples, but to the product alone, which finds by it whose each
row is.
"""

from dataclasses import replace

from cjax.jax_compat.core import Jaxpr
from cjax.trace.examples.values import LOST, Context, Value
from cjax.trace.jaxpr.sorted_rows import SortedRows, sorted_rows


class InOrder:
    """Says what equations on such rows make."""

    def __init__(self) -> None:
        self._rows: dict[int, SortedRows] = {}  # by an equation's id
        self._layouts: dict[int, tuple[int, int, int]] = {}  # by the id of a sort

    def learn(self, jaxpr: Jaxpr) -> None:
        """All such rows of a jaxpr."""
        for rows in sorted_rows(jaxpr.eqns, jaxpr.outvars):
            ids = (rows.sort, *rows.inverses, *rows.places, *rows.lookups, *rows.additions, *rows.products)
            self._rows |= dict.fromkeys(ids, rows)

    def results(self, context: Context) -> list[Value] | None:
        """What such an equation makes; None for all others, and where the keys are not the examples' rows."""
        key, values = id(context.eqn), context.values
        rows = self._rows.get(key)
        if rows is None or context.twin is None:
            return None
        if key == rows.sort and values[0].kind == "rows" and values[0].dim == 0:
            self._layouts[key] = values[0].layout
        layout = self._layouts.get(rows.sort)
        if layout is None:
            return None
        places = (0, 1) if key in rows.places or key in rows.inverses or key == rows.sort else ()
        counts = (2,) if key in rows.products else ()
        if any(value.kind in LOST for i, value in enumerate(values) if i not in counts):
            return None
        if places:
            made = context.make(Value("rows", *layout), ignoring=tuple(range(len(values))))
        else:
            made = self._moved(context, rows, layout, counts)
        return [made] * len(context.eqn.outvars)

    def _moved(
        self, context: Context, rows: SortedRows, layout: tuple[int, int, int], counts: tuple[int, ...]
    ) -> Value:
        """Rows that are looked up, multiplied, or added to those that they came from."""
        first, values = context.values[0], context.values
        if counts:
            is_plain = first.layout == layout and first.kind == "rows" and values[1].kind == "fixed"
            if not is_plain or any(value.is_scaled for value in values[:2]):
                return context.unknown()
            return replace(context, values=list(values[:2])).make(Value("rows", *layout))
        dim, outer, inner = layout
        num, all_ = context.shape(0)[0], context.shape(1)[0]
        times = all_ // num
        tokens = (dim, outer, inner // times)
        if inner % times:
            return context.unknown()
        if id(context.eqn) in rows.lookups:
            if first.kind != "rows" or first.layout != tokens:
                return context.unknown()
            return context.moved(first, *layout)
        added = values[2]
        # What is fixed is the same number for all, zero mostly.
        is_same = first.kind == "fixed" and first.const is not None and first.const == first.twin
        is_whole = is_same or (first.kind == "rows" and first.layout == tokens)
        if not is_whole or first.is_scaled or added.is_scaled or added.kind != "rows" or added.layout != layout:
            return context.unknown()
        return context.make(Value("rows", *tokens))
