"""What a trace's work is, in numbers: the `Work` of a model and a batch."""

import math
from collections.abc import Sequence

import numpy as np

from cjax.jax_compat.core import Literal
from cjax.planner.reading.derivative import Planned
from cjax.planner.reading.derived import derived, learned_of
from cjax.planner.reading.naming import Naming
from cjax.planner.reading.products import attentions_of, products_of
from cjax.planner.reading.saved import KeptBy
from cjax.planner.reading.staged import Tensors, message_of
from cjax.planner.reading.stretches import Spot, Stretch, stretches
from cjax.planner.reading.told import ordered_of, told_of
from cjax.planner.reading.traffic import touched
from cjax.planner.reading.weights import leaves_of, multiplied, weight_of
from cjax.planner.work import NamedTensor, Part, Work
from cjax.trace.jaxpr.cost import cost
from cjax.trace.reading import Trace


def work_of(trace: Trace, optimizer_bytes: float = 2.0, num_microbatches: int = 1) -> Work:
    """The work of one step, read off a trace.

    Args:
      trace: of the loss on the whole batch, or on one of `num_microbatches` micro-batches.
      optimizer_bytes: bytes of optimizer state for each byte of trained parameters.
      num_microbatches: how many such traces the batch is.
    """
    naming = Naming(trace, num_microbatches)
    found = stretches(trace)
    known = multiplied(trace)
    learned = learned_of(trace)
    parts = []
    for at, (stretch, leaves) in enumerate(zip(found, leaves_of(trace, found), strict=True)):
        numbers: dict[Spot, int] = {}
        alone = len(stretch.bodies) == 1  # of several, what one needs may be made in another
        bodies = [(body, derived(body, learned)) for body in stretch.bodies]
        parts.append(
            Part(
                stretch.name,
                stretch.repeats,
                tuple(
                    product
                    for body, derivative in bodies
                    for product in products_of(body, naming, numbers, derivative if alone else None)
                ),
                tuple(a for body in stretch.bodies for a in attentions_of(body, naming)),
                tuple(v for body in stretch.bodies for v in touched(body, naming)),
                tuple(weight_of(trace, leaf, stretch, known, naming) for leaf in leaves),
                _stream(stretch, naming) or (_stream(found[at + 1], naming) if at + 1 < len(found) else None),
                tuple(each for body, derivative in bodies for each in told_of(body, naming, derivative)),
                tuple(each for body, derivative in bodies for each in ordered_of(body, naming, derivative, alone)),
            )
        )
    batch = [trace.leaves[i] for i in trace.leaves_of("batch")]
    num_rows = max((leaf.shape[0] for leaf in batch if leaf.shape), default=1)
    words = [leaf for leaf in batch if len(leaf.shape) > 1 and np.issubdtype(leaf.dtype, np.integer)]
    tokens = max((math.prod(leaf.shape[:2]) for leaf in words), default=num_rows)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in batch)
    return Work(
        tuple(parts), num_microbatches * num_rows, num_microbatches * tokens, optimizer_bytes, num_microbatches * size,
        *_handed(trace, found, naming), _notes(trace), KeptBy(trace, naming, found),
    )  # fmt: skip


def _handed(trace: Trace, found: Sequence[Stretch], naming: Naming) -> tuple[Tensors, Tensors]:
    """What stages send, in float32 and where plans compute in a half precision: there a norm's result stays wide."""
    stacks = [stretch.stack for stretch in found if stretch.stack is not None]
    if not stacks:
        return (), ()
    whole, low = (Planned(trace, "none", precision, False) for precision in ("float32", "bfloat16"))
    return message_of(trace, naming, stacks, whole), message_of(trace, naming, stacks, low)


def _notes(trace: Trace) -> tuple[str, ...]:
    """What could not be read, for the user."""
    found = [f"`{name}` is counted as nothing: cjax does not know what it does" for name in sorted(trace.dims.unknown)]
    loops = cost(trace.closed).unbounded_loops
    return (*found, *([f"{loops} loop(s) of unknown length are counted as one turn"] if loops else []))


def _stream(stretch: Stretch, naming: Naming) -> NamedTensor | None:
    """The largest of what a layer of a stack is handed."""
    if stretch.stack is None:
        return None
    handed = [atom for atom in stretch.stack.initial if not isinstance(atom, Literal) and atom.aval.shape]
    largest = max(handed, key=lambda atom: math.prod(atom.aval.shape) * atom.aval.dtype.itemsize, default=None)
    if largest is None:
        return None
    dims, aval = naming.trace.dims, largest.aval
    return NamedTensor(naming.dims(dims.of(largest), aval.shape), aval.dtype.itemsize, str(aval.dtype) == "float32")
