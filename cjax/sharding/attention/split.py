"""An attention computed with its sequence split over a mesh axis: in a ring, or with heads in place of positions.

A length that the axis does not divide is filled up behind its last position, and what was added is cut off the result:
a ring masks it, an exchange drops it before it computes. Rows whose logits are all -inf come to NaN, as they do at
once; rows masked with large negative numbers throughout are means of the values, likewise.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from cjax.sharding.attention.all_to_all import Exchange
from cjax.sharding.attention.ring import MARGIN, Ring
from cjax.sharding.attention.where import Apart, Places, split_axes
from cjax.sharding.storage.storage import filled_up
from cjax.trace.attention.bounds import bounds
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Node
from cjax.trace.jaxpr.groups import Changed
from cjax.trace.jaxpr.primitives import name_of


def attend(
    attention: Attention,
    ins: Sequence[Any],
    changed: Changed,
    *,
    mesh: Mesh,
    mode: str,
    axis: str,
    spec: PartitionSpec,
    in_order: bool = False,
    apart: Sequence[Apart] = (),
) -> list[jax.Array]:
    """The results of an attention's group, its sequence split over `axis`.

    Everything else follows the query: keys, values, the result and the region's inputs are split over the mesh axes
    that split the same dims of the query. Inside a `shard_map` the axes that are manual there count as split already.

    Args:
      attention: what `find_attentions` found.
      ins: values of `attention.group.ins`.
      changed: literals that differ by layer.
      mesh: the mesh.
      mode: "ring" or "all_to_all".
      axis: the mesh axis for positions, of queries and keys alike.
      spec: of `attention.query`, with `axis` at the dim of positions.
      in_order: whether query, key and value come in the ring's order, and the result is to leave in it: of an attention
        that has one (`in_zigzag`).
      apart: for each of `ins`, a copy for each device, which an exchange reads instead: all examples share it, and its
        gradient is summed over them by whoever made the copies.

    Raises:
      ValueError: when for all_to_all the heads can't be split.
    """
    if mode not in ("ring", "all_to_all"):
        raise ValueError(f'Attention over a sequence axis is "ring" or "all_to_all", not {mode!r}.')
    places = Places(attention, mesh, axis, split_axes(attention, axis, spec))
    given = dict(zip(attention.group.ins, ins, strict=True))
    operands = [given[node.var] for node in attention.operands]
    literals = {place: jnp.asarray(value) for place, value in changed.items() if place in places.literals}
    if mode == "ring":
        return [_ring(places, operands, literals, in_order)]
    return [_all_to_all(places, operands, literals, apart)]


def _ring(
    places: Places, operands: Sequence[Any], literals: Mapping[tuple[int, int], jax.Array], in_order: bool
) -> jax.Array:
    attention = places.attention
    assert places.axis is not None
    names = list(literals)
    low = places.low(operands[:3])
    # The region's equations are evaluated as they were traced: an operand in the step's low precision would not fit to
    # their others.
    operands = [*operands[:3], *_as_traced(attention, operands[3:])]
    # Of leaves, each device has all keys' positions: those behind the last are copies of it, as within the ring.
    modes = ["constant"] * 3 + ["edge"] * len(attention.leaves)
    triples = zip(operands, attention.operands, modes, strict=True)
    operands = [places.filled(value, node, mode) for value, node, mode in triples]
    ring = Ring(
        attention, places.axis, places.size, places.sizes, places.axes_of, _chunks(places, names), _wanted(attention),
        low, in_order,
    )  # fmt: skip
    assert ring.num_chunks == 2 or not in_order, "a ring whose devices have one chunk each has no order of its own"
    # Keys go round and leaves don't: a device that has all keys' positions of a mask can look up whichever block it is
    # at.
    leaves = [places.spec(node, ["query"]) for node in attention.leaves]
    products = [places.spec(node) for node in attention.operands[:3]]
    specs = (*products, leaves, [PartitionSpec()] * len(names))
    out, rows = places.spec(attention.out), places.spec(ring.row_node)
    kept = (products, leaves, specs[-1], out, rows, rows)

    def forward(query: Any, key: Any, value: Any, leaves: Any, changed: Any) -> Any:
        return ring.forward(query, key, value, leaves, dict(zip(names, changed, strict=True)))

    def backward(kept: Any, gradient: Any) -> Any:
        moved, given, changed, result, maxima, sums = kept
        named = dict(zip(names, changed, strict=True))
        found = ring.backward(moved, given, named, result, maxima, sums, gradient)

        # A value that some axis does not split, as the keys' heads that several devices share, was read by all along
        # it: each has its own part of the gradient.
        def whole(grad: Any, spec: PartitionSpec) -> Any:
            return None if grad is None else jax.lax.psum(grad, places.whole(spec))

        *grads, of_leaves = found
        return [whole(*pair) for pair in zip(grads, products, strict=True)], [
            whole(*pair) for pair in zip(of_leaves, leaves, strict=True)
        ]

    wanted = [spec if want else None for spec, want in zip(leaves, ring.differentiable, strict=True)]

    mapped = places.mapped(forward, specs, (out, products, rows, rows))

    # By hand, since JAX's own derivative of the loop would keep the scores of every turn: the whole matrix, which a
    # ring is there to never have.
    @jax.custom_vjp
    def run(*args: Any) -> jax.Array:
        return mapped(*args)[0]

    def run_forward(*args: Any) -> tuple[jax.Array, Any]:
        result, moved, maxima, sums = mapped(*args)
        # Saved as what they are: a policy that looks into the region would save the scores of each turn in their place.
        result, maxima, sums = (checkpoint_name(x, "cjax.ring") for x in (result, maxima, sums))
        # Whatever is there anyway is not kept a second time, as a copy that went through the ring.
        here = ring.num_chunks == 1 or in_order
        return result, (list(args[:3]) if here else moved, *args[3:], result, maxima, sums)

    def run_backward(kept_values: Any, gradient: jax.Array) -> Any:
        grads, of_leaves = places.mapped(backward, (kept, out), (products, wanted))(kept_values, gradient)
        # What is added up over turns is wider than what it is a gradient of, and JAX takes none of another dtype.
        given = [
            None if grad is None else grad.astype(node.var.aval.dtype)
            for grad, node in zip(of_leaves, attention.leaves, strict=True)
        ]
        return (*grads, given, [None] * len(names))

    run.defvjp(run_forward, run_backward)
    return places.cut(run(*operands[:3], operands[3:], list(literals.values())))


def _all_to_all(
    places: Places,
    operands: Sequence[Any],
    literals: Mapping[tuple[int, int], jax.Array],
    apart: Sequence[Apart],
) -> jax.Array:
    attention = places.attention
    assert places.axis is not None
    names = list(literals)
    low = places.low(operands[:3])
    exchange = Exchange(attention, places.axis, places.size, places.sizes, places.axes_of, low)
    # After the exchange a device has all positions, and so needs all of a mask's.
    leaves = [places.spec(node, []) for node in attention.leaves]
    copies = places.own_copies(apart, [])
    operands = [*operands[:3], *_as_traced(attention, operands[3:])]
    for place, (copied, axes_in_front) in copies.items():
        leaves[place - 3] = PartitionSpec(axes_in_front, *leaves[place - 3])
        operands[place] = copied.astype(operands[place].dtype)
    specs = (*(places.spec(node) for node in attention.operands[:3]), leaves, [PartitionSpec()] * len(names))

    def forward(query: Any, key: Any, value: Any, leaves: Any, changed: Any) -> Any:
        leaves = [x[0] if 3 + i in copies else x for i, x in enumerate(leaves)]
        return exchange.forward(query, key, value, leaves, dict(zip(names, changed, strict=True)))

    run = places.mapped(forward, specs, places.spec(attention.out))
    filled = [places.filled(value, node) for value, node in zip(operands[:3], attention.operands, strict=False)]
    return places.cut(run(*filled, operands[3:], list(literals.values())))


def _as_traced(attention: Attention, leaves: Sequence[Any]) -> list[Any]:
    """Leaves in the dtypes that the trace says they have, whatever they are computed in."""
    return [
        leaf if leaf.dtype == node.var.aval.dtype else leaf.astype(node.var.aval.dtype)
        for leaf, node in zip(map(jnp.asarray, leaves), attention.leaves, strict=True)
    ]


def _chunks(places: Places, changed: Sequence[tuple[int, int]]) -> np.ndarray:
    """Bounds of the logits by chunk: one chunk on a device, or two where a mask leaves later ones less to do."""
    # Two chunks cost an exchange of order on the way in and out, which pays only where whole blocks are skipped: a
    # causal ring in the sequence's own order would have its last device do twice the mean, and all others wait for it.
    attention, size = places.attention, places.size
    found = bounds(attention, size, size, changed)
    halves = all(filled_up(attention.sizes[attention.label(role)], size) % (2 * size) == 0 for role in ("query", "key"))
    if halves and (found < -MARGIN).any():
        return bounds(attention, 2 * size, 2 * size, changed)
    return found


def _wanted(attention: Attention) -> tuple[bool, ...]:
    """For each leaf, whether any way from it to the result can carry a gradient."""
    able: dict[Node, bool] = {}

    # A gradient that nobody can ask for would be kept, and added up, in every turn. Whole numbers have none, and an
    # author stops those of a mask.
    def reach(node: Node) -> None:
        if able.get(node) or not jnp.issubdtype(node.var.aval.dtype, jnp.inexact):
            return
        able[node] = True
        step = attention.steps.get(node)
        if step is not None and name_of(step[0]) != "stop_gradient":
            for below in step[1]:
                if below is not None:
                    reach(below)

    for node in (attention.logits, attention.terms, attention.numerator, attention.divisor, attention.dropped):
        reach(node)
    return tuple(able.get(leaf, False) for leaf in attention.leaves)
