"""What is made of weights ahead of a pass over the batch: what they are computed with, under bfloat16 or float16.

Once a step, before the first micro-batch, stacks of layers are rounded. In the loop over layers each weight would be
rounded twice, and its gradient be written in float32; now matmuls read weights from the stack and write gradients into
one of the same dtype, as they made them. Whoever adds gradients up does so in float32. What the copy of the weights
takes, their gradients no longer do.

Under ZeRO-1 and -2 the float32 weights stay in parts, where the optimizer updates them. Each is rounded where it is,
which leaves half the bytes to gather. Of a batch that is one pass, layers are then gathered in their turn
(`ModelStorage.in_turn`), and all else here; of micro-batches, everything here, once, or layers in the first of them.
Under ZeRO-3, layers are gathered and rounded in their turn.
"""

from collections.abc import Callable, Collection

import jax
from jax.sharding import Mesh

from cjax.jax_compat.core import Var
from cjax.plan import Plan
from cjax.sharding.place.model import Arrays, ModelStorage
from cjax.sharding.place.stacked import read_again, stacked_leaves
from cjax.sharding.products.region import constrained
from cjax.sharding.storage.storage import Slot
from cjax.trace.emit.precision import HIGH, LOWS, rounded_leaves
from cjax.trace.reading import Trace


def make_ahead(
    trace: Trace,
    storage: ModelStorage,
    plan: Plan,
    mesh: Mesh,
    is_graded: bool = True,
    in_parts: Collection[int] = (),
) -> Callable[[Arrays], Arrays]:
    """From stored parameters to what a pass over the batch is given; the same arrays where it is given them as stored.

    Args:
      trace: of what is computed with them.
      storage: where they are kept.
      plan: its precision.
      mesh: the mesh.
      is_graded: whether there is a backward pass; in another, which rounds once in any case, a copy is memory alone.
      in_parts: the stored arrays of which a device is given its part alone, as layers of the first micro-batch gather
        them (`in_turn.py`).
    """
    if plan.precision not in LOWS or plan.zero_stage == 3 or plan.walks:
        return lambda params: params
    slots = list(zip(storage.params.slots, storage.given.slots, strict=True))
    low = LOWS[plan.precision]
    rounded = rounded_leaves(trace.dims) - _results(trace)
    again, stacked = read_again(trace), stacked_leaves(trace) if is_graded else set[int]()

    def one(at: int, kept: Slot, given: Slot, array: jax.Array) -> jax.Array:
        lowers = array.dtype == HIGH and rounded.issuperset(kept.leaves)
        if kept.spec == given.spec:
            lowers = lowers and (stacked - again).issuperset(kept.leaves)
            return constrained(array.astype(low), mesh, kept.stored_spec) if lowers else array
        array = constrained(array.astype(low) if lowers else array, mesh, kept.stored_spec)
        if at in in_parts:
            return array
        array = constrained(array, mesh, given.stored_spec)
        # What several turns of a loop give to one gradient is added up in float32.
        return array.astype(HIGH) if lowers and not again.isdisjoint(kept.leaves) else array

    def ahead(params: Arrays) -> Arrays:
        return tuple(one(at, *slots[at], array) for at, array in enumerate(params))

    return ahead


def _results(trace: Trace) -> set[int]:
    """Inputs that are results as they are: in full precision."""
    places = {var: i for i, var in enumerate(trace.closed.jaxpr.invars)}
    return {places[var] for var in trace.closed.jaxpr.outvars if isinstance(var, Var) and var in places}
