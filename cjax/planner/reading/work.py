"""What a trace's work is, in numbers: the `Work` of a model and a batch."""

import math

import numpy as np

from cjax.jax_compat.core import Literal
from cjax.planner.reading.naming import Naming
from cjax.planner.reading.products import attentions_of, products_of
from cjax.planner.reading.saved import KeptBy
from cjax.planner.reading.stretches import Spot, Stretch, stretches
from cjax.planner.reading.traffic import touched, unread
from cjax.planner.reading.weights import leaves_of, multiplied, weight_of
from cjax.planner.work import Part, Value, Work
from cjax.trace.reading import Trace


def work_of(trace: Trace, optimizer_bytes: float = 2.0, num_parts: int = 1) -> Work:
    """The work of one step, read off a trace.

    Args:
      trace: of the loss on the whole batch, or on one of `num_parts` micro-batches.
      optimizer_bytes: bytes of optimizer state for each byte of trained parameters.
      num_parts: how many such traces the batch is.
    """
    naming = Naming(trace, num_parts)
    found = stretches(trace)
    known = multiplied(trace)
    parts = []
    for at, (stretch, leaves) in enumerate(zip(found, leaves_of(trace, found), strict=True)):
        numbers: dict[Spot, int] = {}
        parts.append(
            Part(
                stretch.name,
                stretch.repeats,
                tuple(p for body in stretch.bodies for p in products_of(body, naming, numbers)),
                tuple(a for body in stretch.bodies for a in attentions_of(body, naming)),
                tuple(v for body in stretch.bodies for v in touched(body, naming)),
                tuple(weight_of(trace, leaf, stretch, known, naming) for leaf in leaves),
                _stream(stretch, naming) or (_stream(found[at + 1], naming) if at + 1 < len(found) else None),
            )
        )
    batch = [trace.leaves[i] for i in trace.leaves_of("batch")]
    num_rows = max((leaf.shape[0] for leaf in batch if leaf.shape), default=1)
    words = [leaf for leaf in batch if len(leaf.shape) > 1 and np.issubdtype(leaf.dtype, np.integer)]
    tokens = max((math.prod(leaf.shape[:2]) for leaf in words), default=num_rows)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in batch)
    return Work(
        tuple(parts), num_parts * num_rows, num_parts * tokens, optimizer_bytes, num_parts * size, unread(trace),
        KeptBy(trace, naming, found),
    )  # fmt: skip


def _stream(stretch: Stretch, naming: Naming) -> Value | None:
    """The largest of what a layer of a stack is handed."""
    if stretch.stack is None:
        return None
    handed = [atom for atom in stretch.stack.initial if not isinstance(atom, Literal) and atom.aval.shape]
    largest = max(handed, key=lambda atom: math.prod(atom.aval.shape) * atom.aval.dtype.itemsize, default=None)
    if largest is None:
        return None
    dims, aval = naming.trace.dims, largest.aval
    return Value(naming.dims(dims.of(largest), aval.shape), aval.dtype.itemsize, str(aval.dtype) == "float32")
