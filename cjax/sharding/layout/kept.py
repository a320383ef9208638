"""Weights that a tensor axis leaves whole, for people: how much of the model they are, which they are, and why."""

import math
import re
from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

from cjax.sharding.layout.one_d import FEW, find_products, whole_classes
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.reading import Trace

NAMED = 4  # kinds of weights that a note names


def kept_whole(
    trace: Trace, specs: Mapping[int, PartitionSpec], axes: Sequence[str], size: int, tensor: str, ruled: set[int]
) -> list[str]:
    """A note on the weights that none of the tensor mode's axes splits; none where these are few.

    Args:
      trace: the model.
      specs: the placement of each weight, by leaf.
      axes: the mesh axes of the tensor mode.
      size: what a dim must have to be split over one of them.
      tensor: as the plan writes it.
      ruled: classes that the user's rules place.
    """
    whole: dict[tuple[str, str], list[int]] = {}
    total = kept = 0
    why = _reasons(trace, size, ruled)
    for leaf, spec in specs.items():
        bytes_ = math.prod(trace.leaves[leaf].shape) * trace.leaves[leaf].dtype.itemsize
        total += bytes_
        if not any(axis in axes for entry in spec for axis in axes_of_entry(entry)):
            kept += bytes_
            reason = _reason(trace, leaf, why)
            whole.setdefault((re.sub(r"\d+", "*", trace.leaves[leaf].name), reason), []).append(bytes_)
    if kept <= FEW * total:
        return []
    kinds = sorted(whole.items(), key=lambda item: -sum(item[1]))
    said = [f"{name} {100 * sum(sizes) / total:.2g} % ({reason})" for (name, reason), sizes in kinds[:NAMED]]
    more = f", and {len(kinds) - NAMED} more" if len(kinds) > NAMED else ""
    return [
        f"tensor={tensor} leaves {100 * kept / total:.2g} % of the parameters' bytes whole on every device: "
        f"{', '.join(said)}{more}"
    ]


def _reasons(trace: Trace, size: int, ruled: set[int]) -> dict[int, str]:
    """Why a class is not split, as far as it is the class that can't be."""
    weighed, between = find_products(trace)
    used = {c for product in weighed for c in product.weight}
    found = {c: "as `rules` says" for c in ruled}
    found = whole_classes(trace, between) | dict.fromkeys(trace.stream, "is what layers hand on") | found
    for product in weighed:
        for c in product.weight:
            if product.weight.count(c) > 1:
                found.setdefault(c, "is twice in one weight")
    for d in trace.dims.joined:
        found.setdefault(trace.dims.class_of(d), "is put end to end with others")
    for c in used:
        found.setdefault(c, "stands beside what is split")
    for ids in trace.dims.inputs:
        for d in ids:
            if trace.dims.class_of(d) in used and trace.dims.size[d] < size:
                found[trace.dims.class_of(d)] = f"is less than {size}"
    return found


def _reason(trace: Trace, leaf: int, why: Mapping[int, str]) -> str:
    classes, shape = trace.classes_of(leaf), trace.leaves[leaf].shape
    known = {f"{trace.names.get(c, '?')} {n} {why[c]}": None for c, n in zip(classes, shape, strict=True) if c in why}
    if leaf in {leaf for leaf, _, rows in trace.dims.tables if trace.batch_class not in _classes(trace, rows)}:
        return "a table of positions"
    return ", ".join(known) or "in no matmul, convolution or lookup as cjax reads them"


def _classes(trace: Trace, ids: Sequence[int]) -> set[int]:
    return {trace.dims.class_of(d) for d in ids}
