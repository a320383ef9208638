"""Layers in turn: each with its own rows, and no row stays when the next is fetched."""

import weakref

import pytest

from cjax.walk.walk import in_turn


class Row:
    """Stands for arrays on the devices."""

    def __init__(self, layer: int) -> None:
        self.layer = layer


class Store:
    """Rows of layers, and what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._last: weakref.ref[Row] | None = None

    def ahead(self, layer: int) -> None:
        self.calls.append(("ahead", layer))

    def fetch(self, layer: int) -> Row:
        assert self._last is None or self._last() is None, "the row before is on the devices still"
        self.calls.append(("fetch", layer))
        row = Row(layer)
        self._last = weakref.ref(row)
        return row


@pytest.mark.parametrize("order", [range(3), range(2, -1, -1), [1], []])
def test_layers_in_turn(order: range | list[int]) -> None:
    stores = [Store(), Store()]
    found = [(at, [row.layer for row in rows]) for at, rows in in_turn(stores, order)]  # pyright: ignore
    assert found == [(at, [at, at]) for at in order]
    nexts = [*order[1:], None]
    calls = [("ahead", at) for at in order[:1]]
    for at, following in zip(order, nexts, strict=False):
        calls += [("fetch", at)] + ([("ahead", following)] if following is not None else [])
    assert all(store.calls == calls for store in stores)
