"""A kept choice of the search over plain operations; and what XLA gets wrong: the list is to be true both ways."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
import pytest
from search.operation_table import OPERATIONS
from search.operations import Case, Traced, search

from cjax.sharding.apart.faults import FAULTS, KNOWN

BY_NAME = {each.name: each for each in OPERATIONS}
TWO = {"data": 2, "tensor": 4}


@dataclass(frozen=True)
class Example:
    """An operation whose dims are split: each axis by (place among operands and results, dim)."""

    operation: str
    splits: Mapping[str, tuple[int, int]]
    sizes: Mapping[str, int] = field(default_factory=lambda: dict(TWO))
    pins: bool = False
    gradient: str = "whole"

    def __str__(self) -> str:
        return f"{self.operation} {' '.join(f'{a}:{p}.{d}' for a, (p, d) in self.splits.items())}"

    def fault(self, avoids: bool) -> str | None:
        with jax.enable_x64(True):
            traced = Traced(BY_NAME[self.operation])
            axes_of: dict[int, tuple[str, ...]] = {}
            for axis, (place, dim) in self.splits.items():
                c = traced.classes[place][dim]
                axes_of[c] = (*axes_of.get(c, ()), axis)
            return traced.fault(Case(self.sizes, axes_of, self.pins, self.gradient), avoids)


WRONG = {
    "convolutions": [
        Example("conv depthwise causal", {"data": (0, 0)}),
        Example("conv grouped", {"data": (0, 0)}),
        Example("conv strided", {"data": (0, 1)}),
    ],
    "Fourier transforms": [Example("rfft 2", {"data": (0, 0), "tensor": (0, 1)}, pins=True)],
    "windows": [Example("average pool", {"tensor": (0, 0), "data": (0, 1)}, {"data": 4, "tensor": 2}, True, "zero")],
    "scattered extremes": [
        Example("scatter min channels", {"data": (0, 0), "tensor": (1, 2)}, {"data": 4, "tensor": 2}, pins=True)
    ],
    "padding between elements": [Example("pad interior", {"data": (1, 2), "tensor": (1, 2)}, pins=True)],
}
STOPS = {"sorting": "sort 1"}  # the search's own placements
RIGHT = [
    Example("conv", {"data": (0, 0), "tensor": (2, 2)}),
    Example("conv", {"data": (0, 0), "tensor": (0, 2)}, gradient="zero"),
    Example("conv 2d", {"data": (0, 0), "row": (0, 3), "col": (2, 3)}, {"data": 2, "row": 2, "col": 2}),
    Example("conv depthwise", {"data": (0, 0), "tensor": (0, 2)}, gradient="zero"),
    Example("conv depthwise odd", {"data": (0, 0), "tensor": (0, 2)}),
    Example("conv depthwise channels first", {"data": (0, 1), "tensor": (0, 2)}),
    Example("conv grouped in three", {"data": (0, 0), "tensor": (2, 2)}),
    Example("conv batch groups", {"data": (0, 0), "tensor": (2, 2)}),
    Example("conv pointwise", {"data": (0, 1), "tensor": (2, 2)}),
    Example("conv complex depthwise", {"data": (0, 0)}),
    Example("conv of one kernel for each row", {"data": (0, 0)}),
    Example("loop of depthwise convs", {"data": (0, 0)}),
    Example("conditional depthwise conv", {"data": (0, 0), "tensor": (0, 2)}),
    Example("max pool overlapping", {"data": (0, 0), "tensor": (0, 2)}),
    Example("sum of windows of a dilated input", {"data": (0, 0), "tensor": (1, 1)}, pins=True),
    Example("select and scatter", {"data": (0, 1), "tensor": (0, 2)}),
    Example("fft2", {"data": (0, 0), "tensor": (0, 2)}),
    Example("long convolution", {"data": (0, 0), "tensor": (0, 2)}),
    Example("cumlogsumexp 1", {"data": (0, 1), "tensor": (0, 2)}),
    Example("sort pairs", {"data": (0, 0), "tensor": (0, 1)}),
    Example("top_k", {"data": (0, 0), "tensor": (0, 2)}),
    Example("take along channels", {"data": (0, 0), "tensor": (0, 2)}),
    Example("scatter with batching dims", {"data": (0, 0), "tensor": (0, 2)}),
    Example("triangular solve", {"data": (0, 0), "tensor": (1, 2)}),
    Example("svd vectors", {"data": (0, 0), "tensor": (0, 1)}),
]


MENDED = (
    "XLA of JAX {} does {!r} right: look whether cjax/sharding/apart/faults.py, which knows {}, may leave it to XLA "
    "there (python tests/search/operations.py --by xla)"
)


def expected(name: str) -> bool:
    """Whether XLA of this version is said to do it wrong, or nobody knows."""
    (fault,) = [each for each in FAULTS if each.name == name]
    return jax.__version__ in fault.versions or jax.__version__ not in KNOWN


@pytest.mark.full("scattered extremes-scatter min channels data:0.0 tensor:1.2")
@pytest.mark.parametrize(("fault", "example"), [(k, each) for k, some in WRONG.items() for each in some], ids=str)
def test_what_is_on_the_list_is_wrong_without_cjax_and_right_with_it(fault: str, example: Example) -> None:
    assert example.fault(avoids=True) is None
    if expected(fault):
        assert example.fault(avoids=False) is not None, MENDED.format(
            jax.__version__, example.operation, ", ".join(KNOWN)
        )


@pytest.mark.parametrize(("fault", "operation"), STOPS.items())
@pytest.mark.full
def test_what_stops_the_process_without_cjax_runs_with_it(fault: str, operation: str) -> None:
    """In processes of their own."""
    assert not [what for _, _, what in search([operation], 3, 1, avoids=True) if what]
    if expected(fault):
        found = [what for _, _, what in search([operation], 3, 1, avoids=False) if what]
        assert any("stops the process" in what for what in found), MENDED.format(
            jax.__version__, operation, ", ".join(KNOWN)
        )


@pytest.mark.parametrize("example", RIGHT, ids=str)
def test_operations_are_the_same_under_every_placement(example: Example) -> None:
    assert example.fault(avoids=True) is None


def test_each_fault_has_an_example() -> None:
    assert {*WRONG, *STOPS} == {fault.name for fault in FAULTS}
    assert all(fault.versions and set(fault.versions) <= set(KNOWN) for fault in FAULTS)
