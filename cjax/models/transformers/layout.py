"""The same array in two layouts, written down as text: `embed (3 heads width) -> embed heads width`.

On the left is what a file holds, on the right what a model does. A group in parentheses is one dimension of the file
made of several, the first the slowest. A number is a dimension that the model's array doesn't have, as it is one of
several pieces stored together: above, of three.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Span = tuple[int, int]
Factor = str | int


@dataclasses.dataclass(frozen=True)
class FileLayout:
    """A parsed layout: the file's dimensions, each a group of factors, and the names of the model's."""

    stored: tuple[tuple[Factor, ...], ...]
    ours: tuple[str, ...]

    @property
    def factors(self) -> tuple[Factor, ...]:
        return tuple(factor for group in self.stored for factor in group)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape in the file of what is `shape` in the model."""
        sizes = self.sizes(shape)
        return tuple(math.prod(sizes(factor) for factor in group) for group in self.stored)

    def sizes(self, shape: Sequence[int]) -> Callable[[Factor], int]:
        known = dict(zip(self.ours, shape, strict=True))
        return lambda factor: factor if isinstance(factor, int) else known[factor]

    @property
    def order(self) -> tuple[int, ...]:
        """The model's dimensions among those named in the file."""
        named = [factor for factor in self.factors if isinstance(factor, str)]
        return tuple(named.index(name) for name in self.ours)


@functools.cache
def parse(text: str) -> FileLayout:
    """
    >>> parse("embed (3 heads width) -> embed heads width").stored
    (('embed',), (3, 'heads', 'width'))
    """
    stored, ours = text.split("->")
    groups = [word.strip("()").split() for word in re.findall(r"\([^)]*\)|\S+", stored)]
    factors = tuple(tuple(int(name) if name.isdigit() else name for name in group) for group in groups)
    layout = FileLayout(factors, tuple(ours.split()))
    named = [factor for factor in layout.factors if isinstance(factor, str)]
    assert sorted(named) == sorted(set(layout.ours)), f"{text!r} names other dimensions on its two sides"
    return layout


def read(layout: FileLayout, part: int, shape: Sequence[int], index: Any, stored: Any) -> np.ndarray:
    """The part at `index` of an array of `shape` in the model; of `stored` only the slices that hold it are read.

    Args:
        layout: where it is in the file.
        part: which of the pieces stored together, if there are any.
        shape: of the whole array in the model.
        index: slices, one for each dimension.
        stored: the file's array; is indexed once, by a tuple of slices.
    """
    size = layout.sizes(shape)
    spans = dict(zip(layout.ours, (_span(i, n) for i, n in zip(index, shape, strict=True)), strict=True))
    slices, read_sizes, rest = [], [], []
    for group in layout.stored:
        start, stop = 0, math.prod(map(size, group))
        inner = stop  # elements of the dimension to one step of the factor at hand
        whole = False  # only the first named factor narrows what is read: the others lie within each of its steps
        for factor in group:
            inner //= size(factor)
            low, high = (part, part + 1) if isinstance(factor, int) else spans[factor]
            if not whole:
                start, stop = start + low * inner, start + high * inner
                read_sizes.append(high - low)
            else:
                read_sizes.append(size(factor))
            if isinstance(factor, str):
                rest.append(slice(low, high) if whole else slice(None))
                whole = True
            else:
                rest.append(0)
        slices.append(slice(start, stop))
    array = np.asarray(stored[tuple(slices)]).reshape(read_sizes)[tuple(rest)]
    return np.ascontiguousarray(array.transpose(layout.order))


def write(layout: FileLayout, pieces: dict[int, np.ndarray]) -> np.ndarray:
    """The file's array, from the model's arrays by their part."""
    first = next(iter(pieces.values()))
    size = layout.sizes(first.shape)
    array = np.empty([size(factor) for factor in layout.factors], first.dtype)
    for part, piece in pieces.items():
        where = tuple(part if isinstance(factor, int) else slice(None) for factor in layout.factors)
        array[where] = piece.transpose(np.argsort(layout.order))
    return array.reshape(layout.stored_shape(first.shape))


def _span(index: Any, size: int) -> Span:
    if isinstance(index, int | np.integer):
        raise TypeError(f"index with slices, not with {index}: a part has all dimensions of its array")
    start, stop, step = index.indices(size)
    if step != 1:
        raise ValueError(f"a part of an array is contiguous; {index} is not")
    return start, max(start, stop)
