"""Which part of an input a value is, that slices, transposes and the like have made of it: a column of many, say."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cjax.jax_compat.core import Equation, Literal
from cjax.trace.jaxpr.primitives import name_of

Range = tuple[int, int, int] | None  # from, to and step along a dim; None: all of it
SAME = slice(None)


@dataclass(frozen=True)
class Taken:
    """Of an input, by its dims.

    Attributes:
      ranges: what of each dim it has; None where that is not known.
      dims: for each dim of the value, which of the input's it is; None where it is none.
    """

    ranges: tuple[Range, ...] | None
    dims: tuple[int | None, ...]

    @staticmethod
    def all_of(num_dims: int) -> "Taken":
        return Taken((None,) * num_dims, tuple(range(num_dims)))

    @property
    def is_all(self) -> bool:
        return self.ranges is not None and not any(self.ranges)

    @property
    def slices(self) -> tuple[slice, ...]:
        """As an index of the input; all of it where the part is not known."""
        return tuple(slice(*one) if one else SAME for one in self.ranges or ())

    def cut(self, dim: int, start: int, stop: int, step: int, size: int) -> "Taken":
        """A slice of it along a dim of that size."""
        if (start, stop, step) == (0, size, 1):
            return self
        of = self.dims[dim]
        if self.ranges is None or of is None:
            return Taken(None, self.dims)
        first, _, stride = self.ranges[of] or (0, size, 1)
        found = (first + start * stride, first + (stop - 1) * stride + 1, step * stride)
        return replace(self, ranges=tuple(found if i == of else one for i, one in enumerate(self.ranges)))

    def turn(self) -> "Taken":
        """What each turn of a loop over dim 0 has of it: all turns together have what it is."""
        return replace(self, dims=self.dims[1:])


def parts_of(eqn: Equation, part: Taken) -> list[Taken]:
    """The results of an equation that rearranges its first operand, or takes some of it."""
    shape, name, params = eqn.invars[0].aval.shape, name_of(eqn), eqn.params
    new = [var.aval.shape for var in eqn.outvars]
    if name == "squeeze":
        return [replace(part, dims=tuple(d for i, d in enumerate(part.dims) if i not in params["dimensions"]))]
    if name == "transpose":
        return [replace(part, dims=tuple(part.dims[i] for i in params["permutation"]))]
    if name == "broadcast_in_dim":
        places = dict(zip(params["broadcast_dimensions"], zip(part.dims, shape, strict=True), strict=True))
        return [replace(part, dims=tuple(_if(places.get(i), size) for i, size in enumerate(new[0])))]
    if name == "reshape":
        return [replace(part, dims=_reshaped(part.dims, shape, new[0]))]
    if name == "pad":
        around = params["padding_config"]
        dims = tuple(d if config == (0, 0, 0) else None for d, config in zip(part.dims, around, strict=True))
        cuts = any(low < 0 or high < 0 for low, high, _ in around)
        return [Taken(None if cuts else part.ranges, dims)]
    if name == "slice":
        steps = params["strides"] or [1] * len(shape)
        return [_cut(part, shape, params["start_indices"], params["limit_indices"], steps)]
    if name == "dynamic_slice":
        starts = [int(atom.val) if isinstance(atom, Literal) else None for atom in eqn.invars[1:]]
        sizes = params["slice_sizes"]
        if any(start is None and size != full for start, size, full in zip(starts, sizes, shape, strict=True)):
            return [Taken(None, part.dims)]
        held = [min(max(start or 0, 0), full - size) for start, size, full in zip(starts, sizes, shape, strict=True)]
        stops = [start + size for start, size in zip(held, sizes, strict=True)]
        return [_cut(part, shape, held, stops, [1] * len(shape))]
    if name in ("split", "unstack"):
        axis, found, start = params["axis"], [], 0
        for size in params["sizes"] if name == "split" else [1] * len(new):
            one = part.cut(axis, start, start + size, 1, shape[axis])
            dims = one.dims if name == "split" else one.dims[:axis] + one.dims[axis + 1 :]
            found.append(replace(one, dims=dims))
            start += size
        return found
    return [part if one == shape else Taken(None, (None,) * len(one)) for one in new]


def _cut(part: Taken, shape: Sequence[int], starts: Sequence[int], stops: Sequence[int], steps: Sequence[int]) -> Taken:
    for dim, (start, stop, step) in enumerate(zip(starts, stops, steps, strict=True)):
        part = part.cut(dim, start, stop, step, shape[dim])
    return part


def _if(place: tuple[int | None, int] | None, size: int) -> int | None:
    return place[0] if place is not None and place[1] == size else None


def _reshaped(dims: Sequence[int | None], old: Sequence[int], new: Sequence[int]) -> tuple[int | None, ...]:
    """Dims that are still there: all where dims of size one came or went, else those in front of the first change."""
    large = [(d, size) for d, size in zip(dims, old, strict=True) if size != 1]
    found: list[int | None] = []
    for size in new:
        if size == 1:
            found.append(None)
        elif large and large[0][1] == size:
            found.append(large.pop(0)[0])
        else:
            break
    return (*found, *[None] * (len(new) - len(found)))
