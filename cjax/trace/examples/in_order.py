"""Rows that are sorted for experts and put back (`cjax.trace.jaxpr.sorted_rows`): none sees another on the way.

Where a row is among all others does not matter to it, and so not to its example: all along it is laid out as what it is
sorted by. How many rows each expert has is said of all examples, but to the product alone, which finds by it whose each
row is.
"""

from dataclasses import replace

from cjax.jax_compat.core import Jaxpr
from cjax.trace.examples.values import LOST, Context, Value
from cjax.trace.jaxpr.sorted_rows import SortedRows, sorted_rows

RowLayout = tuple[int, int, int]  # of rows


class InOrder:
    """Says what equations on such rows make."""

    def __init__(self) -> None:
        self._rows: dict[int, SortedRows] = {}  # by an equation's id
        self._layouts: dict[int, RowLayout | None] = {}  # by the id of a sort

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
        if key == rows.sort:
            # Of a loop's body that is read again, less may be known than at first.
            is_known = values[0].kind == "rows" and values[0].dim == 0
            self._layouts[key] = values[0].layout if is_known else None
        layout, is_product = self._layouts.get(rows.sort), key in rows.products
        if layout is None or any(value.kind in LOST for value in (values[:2] if is_product else values)):
            return None
        if is_product:
            made = _multiplied(context, layout)
        elif key in rows.lookups or key in rows.additions:
            made = _moved(context, layout, key in rows.lookups)
        else:  # numbers of rows, each its own example's
            made = context.make(Value("rows", *layout), ignoring=tuple(range(len(values))))
        return [made] * len(context.eqn.outvars)


def _multiplied(context: Context, layout: RowLayout) -> Value:
    """Rows by the weights of their keys; how many rows each key has is not asked."""
    known = replace(context, values=context.values[:2])
    rows, weights = known.values
    is_plain = rows.layout == layout and rows.kind == "rows" and weights.kind == "fixed"
    if not is_plain or any(value.is_scaled for value in known.values):
        return context.unknown()
    return known.make(Value("rows", *layout))


def _moved(context: Context, layout: RowLayout, is_lookup: bool) -> Value:
    """Rows that are looked up, or added to those that they came from."""
    first, (dim, outer, inner) = context.values[0], layout
    times = context.shape(1)[0] // context.shape(0)[0]
    tokens = (dim, outer, inner // times)
    if inner % times:
        return context.unknown()
    if is_lookup:
        return context.moved(first, *layout) if first.kind == "rows" and first.layout == tokens else context.unknown()
    added = context.values[2]
    # What is fixed is the same number for all, zero mostly.
    is_same = first.kind == "fixed" and first.const is not None and first.const == first.twin
    is_whole = is_same or (first.kind == "rows" and first.layout == tokens)
    if not is_whole or first.is_scaled or added.is_scaled or added.kind != "rows" or added.layout != layout:
        return context.unknown()
    return context.make(Value("rows", *tokens))
