"""Ring attention: each device keeps its queries, and keys and values go round.

A device sees one block of scores at a time. Softmax statistics are carried on from block to block, and the backward
pass makes each block again from queries, keys, values and the statistics, with gradients of keys and values going round
along with them. Of a causal mask, each device gets an early and a late chunk (zigzag), so that all have as much to do.

Where the axis does not divide a length, chunks go on behind its last position. There they have copies of that position,
of which everything is as finite as of itself, and its keys are masked: no -inf or NaN of a position that is not there
meets those that are. Blocks of chunks that have nothing but that are left out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.sharding.attention.blocks import KeyBlock, accumulated, finite
from cjax.sharding.attention.zigzag import from_zigzag, to_zigzag
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Node
from cjax.trace.jaxpr.groups import Changed

# exp(-MARGIN) is zero in float64. A block whose logits are all that far below each row's maximum adds nothing to it.
MARGIN = 1000.0

Divisor = Callable[..., jax.Array]
Statistics = tuple[jax.Array, jax.Array, jax.Array]  # maxima and sums as rows, and values mixed with exponentials


@dataclass(frozen=True)
class Ring:
    """One device's shard of an attention; all methods run where `axis` is manual.

    Args:
      attention: what is computed.
      axis: the mesh axis that queries and keys are split over.
      size: of that axis.
      sizes: of each label on a device.
      axes_of: the mesh axes that split other labels, whose first index is not 0 on every device.
      bounds: of the logits of each chunk of queries and keys; twice as many chunks as devices mean zigzag order.
      differentiable: for each leaf, whether its gradient is wanted.
      low: the dtype that matmuls take their operands in.
      in_order: whether query, key and value come in the ring's order, and the result is to leave in it.
    """

    attention: Attention
    axis: str
    size: int
    sizes: Mapping[int, int]
    axes_of: Mapping[int, tuple[str, ...]]
    bounds: np.ndarray
    differentiable: tuple[bool, ...]
    low: Any
    in_order: bool = False

    @property
    def num_chunks(self) -> int:
        """Of a device: one, or an early and a late one."""
        return self.bounds.shape[0] // self.size

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, leaves: Sequence[Any], changed: Changed
    ) -> tuple[jax.Array, list[jax.Array], jax.Array, jax.Array]:
        """The result, the operands in the ring's order, and each row's maximum and sum."""
        nodes = self.attention.operands
        query, key, value = self._filled(self._in_order([query, key, value], nodes), nodes)
        leaves = self._filled(self._in_order(leaves, self.attention.leaves), self.attention.leaves)
        states = [self._empty(chunk, query, value) for chunk in range(self.num_chunks)]

        def visit(states: list[Statistics], keys: Any, source: Any) -> list[Statistics]:
            for chunk in range(self.num_chunks):
                for other in range(self.num_chunks):
                    states = [*states]
                    states[chunk] = self._absorb(states[chunk], chunk, other, source, query, keys, leaves, changed)
            return states

        def turn(carry: Any, step: Any) -> Any:
            # Sent as they came, not as the block leaves them, so that they are on the way while it is computed.
            states, keys = carry
            coming = self._pass_on(keys)
            return (visit(states, keys, self._source(step)), coming), None

        keys = (key, value)
        # The last turn is outside of the loop: in it, keys would go home, which nobody waits for.
        (states, keys), _ = lax.scan(turn, (states, keys), jnp.arange(self.size - 1))
        states = visit(states, keys, self._source(self.size - 1))
        outs = []
        for chunk, (maxima, sums, mixed) in enumerate(states):
            divisor = self._divisor(chunk, maxima, leaves, changed)(self._something(sums, chunk, 1.0))
            outs.append(self._block(chunk, 0, 0, changed).divide(mixed, divisor, self.attention.out.labels))
        out = self._from_zigzag(self._join(outs, self.attention.out, "query").astype(value.dtype), "query")
        rows = self.row_node
        maxima, sums = (self._join([state[i] for state in states], rows, "query") for i in (0, 1))
        return out, [query, key, value], maxima, sums

    def backward(
        self, moved: Sequence[jax.Array], leaves: Sequence[Any], changed: Changed,
        out: jax.Array, maxima: jax.Array, sums: jax.Array, gradient: jax.Array,
    ) -> tuple[Any, Any, Any, list[Any]]:  # fmt: skip
        """Gradients of query, key, value and leaves (None for those that have none), from what `forward` returned."""
        # Of operands that are kept as they came, and not as they went round, there are no copies yet.
        query, key, value = self._filled(moved, self.attention.operands)
        leaves = self._filled(self._in_order(leaves, self.attention.leaves), self.attention.leaves)
        dtype, rows = accumulated(self.attention), self.row_node
        block = self._block(0, 0, 0, changed, whole=True)
        # The derivative of a softmax takes the sum of gradient times weight over all keys. Over values it is the same
        # sum as gradient times result, which is here: otherwise all blocks would have to be gone through twice.
        dims = tuple(dim for dim, label in enumerate(self.attention.out.labels) if not label)
        spent = jnp.sum(gradient.astype(dtype) * out.astype(dtype), axis=dims, keepdims=True)
        spent = self._turned(block.rows(spent, self.attention.out.labels), self._dim(rows, "query"), True)
        gradient = self._turned(gradient, self._dim(self.attention.out, "query"), True).astype(dtype)

        def visit(grads: Any, keys: Any, d_keys: Any, source: Any) -> Any:
            for chunk in range(self.num_chunks):
                for other in range(self.num_chunks):
                    given = (gradient, maxima, sums, spent)
                    grads, d_keys = self._backward_block(
                        grads, d_keys, chunk, other, source, query, keys, leaves, changed, given
                    )
            return grads, d_keys

        def zeros(values: Any) -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), values)

        def rounded(d_keys: Any) -> Any:
            # On the way in the keys' own dtype, as these are: what is added to them here is not.
            return jax.tree.map(lambda grad, x: grad.astype(x.dtype), d_keys, (key, value))

        # Gradients of keys follow them a turn behind: what one block adds is on the way while the next is computed. So
        # the first turn, which nothing has come in for, and the last, from which they go home, are no part of the loop.
        wanted = [leaf if wanted else None for leaf, wanted in zip(leaves, self.differentiable, strict=True)]
        keys = (key, value)
        coming = self._pass_on(keys)
        d_leaves = self._of_divisors(zeros(wanted), leaves, changed, maxima, sums, spent)
        grads, d_keys = visit((zeros(query), d_leaves), keys, zeros(keys), self._source(0))

        def turn(carry: Any, step: Any) -> Any:
            grads, keys, d_keys = carry
            coming, d_coming = self._pass_on(keys), self._pass_on(rounded(d_keys))
            grads, d_keys = visit(grads, keys, zeros(keys), self._source(step))
            return (grads, coming, jax.tree.map(_added, d_keys, d_coming)), None

        (grads, keys, d_keys), _ = lax.scan(turn, (grads, coming, d_keys), jnp.arange(1, self.size - 1))
        d_coming = self._pass_on(rounded(d_keys))
        grads, d_keys = visit(grads, keys, zeros(keys), self._source(self.size - 1))
        d_key, d_value = self._pass_on(rounded(jax.tree.map(_added, d_keys, d_coming)))
        return self._home(grads, d_key, d_value, query, key, value)

    # --- one block ---

    def _absorb(
        self,
        state: Statistics,
        chunk: int,
        other: int,
        source: Any,
        query: Any,
        keys: Any,
        leaves: Any,
        changed: Changed,
    ) -> Statistics:
        block = self._block(chunk, other, source, changed)

        def compute() -> Statistics:
            operands = self._operands(chunk, other, source, query, keys, leaves)
            logits, masked, given = block.logits(operands[0], operands[1], operands[3])
            maxima, sums, mixed = state
            new = jnp.maximum(maxima, block.reduce(jnp.max, masked, self.attention.masked.labels).astype(maxima.dtype))
            exps = self._exps(block, logits, new)
            # Rows that saw nothing but -inf have sums of 0, which must not meet an infinite scale.
            scale = jnp.where(maxima == -jnp.inf, 0.0, jnp.exp(maxima - finite(new)))
            mixed = mixed * block.spread(scale, self.attention.out.labels)
            return new, sums * scale + block.terms(exps, given), mixed + block.mix(exps, None, operands[2], given)

        return self._unless_empty(chunk, other, source, state[0], compute, lambda: state)

    def _backward_block(
        self, grads: Any, d_keys: Any, chunk: int, other: int, source: Any,
        query: Any, keys: Any, leaves: Any, changed: Changed, given: Any,
    ) -> Any:  # fmt: skip
        block = self._block(chunk, other, source, changed)
        gradient, maxima, sums, spent = given
        maxima, sums, spent = (self._chunk(rows, self.row_node, "query", chunk) for rows in (maxima, sums, spent))
        mine = self._chunk(gradient, self.attention.out, "query", chunk)

        def compute() -> Any:
            operands = self._operands(chunk, other, source, query, keys, leaves)
            divide = self._divisor(chunk, maxima, leaves, changed)
            divisor, slope = jax.jvp(divide, (sums,), (jnp.ones_like(sums),))
            d_sums = spent * slope / divisor * (1 if self.attention.multiplies else -1)

            def mixed(query: Any, key: Any, value: Any, wanted: Any) -> Any:
                full = [mine if mine is not None else leaf for mine, leaf in zip(wanted, operands[3], strict=True)]
                logits, _, known = block.logits(query, key, full)
                exps = self._exps(block, logits, maxima)
                return block.mix(exps, divisor, value, known), block.terms(exps, known)

            wanted = [leaf if want else None for leaf, want in zip(operands[3], self.differentiable, strict=True)]
            _, pull = jax.vjp(mixed, *(x.astype(mine.dtype) for x in operands[:3]), wanted)
            d_query, d_key, d_value, d_leaves = pull((mine, d_sums))
            (sum_query, sum_leaves), (sum_key, sum_value) = grads, d_keys
            attention = self.attention
            sum_query = self._add(sum_query, d_query, attention.query, {"query": chunk})
            sum_key = self._add(sum_key, d_key, attention.key, {"key": other})
            sum_value = self._add(sum_value, d_value, attention.value, {"key": other})
            where = {"query": chunk, "key": self._number(source, other)}
            sum_leaves = [
                None if want is None else self._add(total, want, node, where)
                for total, want, node in zip(sum_leaves, d_leaves, attention.leaves, strict=True)
            ]
            return (sum_query, sum_leaves), (sum_key, sum_value)

        return self._unless_empty(chunk, other, source, maxima, compute, lambda: (grads, d_keys))

    def _divisor(self, chunk: int, maxima: jax.Array, leaves: Sequence[Any], changed: Changed) -> Divisor:
        """What makes the divisor of a chunk's rows of their sums, and of leaves where these are others."""
        maxima = self._something(maxima, chunk, 0.0)
        mine = self._leaves(chunk, 0, leaves)
        block = self._block(chunk, 0, 0, changed)
        return lambda sums, leaves=mine: block.divisor(sums, maxima, leaves)

    def _of_divisors(
        self, d_leaves: list[Any], leaves: Sequence[Any], changed: Changed,
        maxima: jax.Array, sums: jax.Array, spent: jax.Array,
    ) -> list[Any]:  # fmt: skip
        """Gradients of leaves with those that come through the divisor, as of a sink: once for each row."""
        if self.attention.divides_by_sum:
            return d_leaves
        for chunk in range(self.num_chunks):
            of_chunk = [self._chunk(rows, self.row_node, "query", chunk) for rows in (maxima, sums, spent)]
            divide = self._divisor(chunk, of_chunk[0], leaves, changed)
            total = self._something(of_chunk[1], chunk, 1.0)
            mine = self._leaves(chunk, 0, leaves)
            wanted = [leaf if want else None for leaf, want in zip(mine, self.differentiable, strict=True)]

            def made_of(wanted: list[Any], divide: Divisor = divide, mine: Any = mine, total: Any = total) -> jax.Array:
                return divide(total, [b if a is None else a for a, b in zip(wanted, mine, strict=True)])

            divisor, pull = jax.vjp(made_of, wanted)
            (found,) = pull(of_chunk[2] / divisor * (1 if self.attention.multiplies else -1))
            d_leaves = [
                None if new is None else self._add(old, new, node, {"query": chunk})
                for old, new, node in zip(d_leaves, found, self.attention.leaves, strict=True)
            ]
        return d_leaves

    def _exps(self, block: KeyBlock, logits: jax.Array, maxima: jax.Array) -> jax.Array:
        return jnp.exp(logits.astype(maxima.dtype) - block.spread(finite(maxima), self.attention.logits.labels))

    def _unless_empty(
        self,
        chunk: int,
        other: int,
        source: Any,
        maxima: jax.Array,
        compute: Callable[[], Any],
        skip: Callable[[], Any],
    ) -> Any:
        """Compute, unless no logit of this block can be near its row's maximum."""
        # Each device decides by itself, so that nothing within may send: sends are in `turn`, which all devices run
        # alike.
        masks, nothing = (self.bounds < -MARGIN).any(), self._nothing
        if not masks and not nothing.any():
            return compute()
        block = self._number(lax.axis_index(self.axis), chunk), self._number(source, other)
        is_empty = jnp.asarray(nothing)[block]
        # By the maxima so far, and not by the mask alone: a row that has seen nothing but -inf up to now may still need
        # a block of large negative numbers, as `-1e9` masks are.
        if masks:
            is_empty |= jnp.all(maxima > jnp.asarray(self.bounds, maxima.dtype)[block] + MARGIN)
        return lax.cond(is_empty, skip, compute)

    # --- behind the last position ---

    @property
    def _overlong(self) -> frozenset[int]:
        """Labels whose last chunk goes on behind the last position."""
        labels = (self.attention.label(role) for role in ("query", "key"))
        return frozenset(one for one in labels if self.sizes[one] * self.size > self.attention.sizes[one])

    @property
    def _nothing(self) -> np.ndarray:
        """Which blocks, [chunk of queries, chunk of keys], have queries or keys behind the last position alone."""
        lengths = [self.attention.sizes[self.attention.label(role)] for role in ("query", "key")]
        first = [np.arange(len(self.bounds)) * -(-length // len(self.bounds)) >= length for length in lengths]
        return first[0][:, None] | first[1]

    def _something(self, rows: jax.Array, chunk: int, other: float) -> jax.Array:
        """Statistics of rows, and another number in all rows of a chunk without any query: nothing to divide by 0."""
        nobody = self._nothing.all(axis=1)
        if not nobody.any():
            return rows
        return jnp.where(jnp.asarray(nobody)[self._number(lax.axis_index(self.axis), chunk)], other, rows)

    def _filled(self, values: Sequence[Any], nodes: Sequence[Node]) -> list[Any]:
        """Values in the ring's order, with copies of the last position behind it. Of leaves, all keys are here, and
        have that already."""
        found = []
        for value, node in zip(values, nodes, strict=False):
            for role in ("query", *(("key",) if any(node is one for one in self.attention.operands[1:3]) else ())):
                value = self._with_copies(value, node, role)
            found.append(value)
        return found

    def _with_copies(self, value: Any, node: Node, role: str) -> Any:
        label, dim = self.attention.label(role), self._dim(node, role)
        if dim is None or label not in self._overlong:
            return value
        rows, length = self.sizes[label] // self.num_chunks, self.attention.sizes[label]
        chunks = []
        for chunk, held in enumerate(jnp.split(value, self.num_chunks, axis=dim)):
            index = lax.broadcasted_iota(jnp.int32, held.shape, dim)
            there = length - self._number(lax.axis_index(self.axis), chunk) * rows
            last = lax.slice_in_dim(held, (length - 1) % rows, (length - 1) % rows + 1, axis=dim)
            chunks.append(jnp.where(index < there, held, last))
        return self._join(chunks, node, role)

    # --- where things are ---

    def _source(self, step: Any) -> Any:
        """Whose keys are here after so many turns."""
        return (lax.axis_index(self.axis) - step) % self.size

    def _number(self, device: Any, chunk: int) -> Any:
        """Which chunk of the sequence a device's early (0) or late (1) one is."""
        return device if chunk == 0 else 2 * self.size - 1 - device

    def _block(self, chunk: int, other: int, source: Any, changed: Changed, whole: bool = False) -> KeyBlock:
        attention = self.attention
        sizes, starts = dict(self.sizes), {}
        for label, axes in self.axes_of.items():
            starts[label] = lax.axis_index(axes) * sizes[label]
        for role, device, at in (("query", lax.axis_index(self.axis), chunk), ("key", source, other)):
            label = attention.label(role)
            if not whole:
                sizes[label] //= self.num_chunks
            starts[label] = self._number(device, at) * sizes[label]
        return KeyBlock(attention, sizes, starts, changed, self.low, self._overlong)

    @property
    def row_node(self) -> Node:
        """Rows of statistics, in their order; the sums are some."""
        key = self.attention.label("key")
        return Node(self.attention.total.var, tuple((one,) for one in sorted(self.attention.roles) if one != key))

    def _dim(self, node: Node, role: str) -> int | None:
        label = (self.attention.label(role),)
        return node.labels.index(label) if label in node.labels else None

    def _chunk(self, value: Any, node: Node, role: str, chunk: Any) -> Any:
        """One chunk of what is here, or of the whole where all of it is."""
        dim = self._dim(node, role)
        if dim is None:
            return value
        rows = self.sizes[self.attention.label(role)] // self.num_chunks
        return lax.dynamic_slice_in_dim(value, chunk * rows, rows, axis=dim)

    def _operands(self, chunk: int, other: int, source: Any, query: Any, keys: Any, leaves: Sequence[Any]) -> Any:
        attention = self.attention
        number = self._number(source, other)
        return (
            self._chunk(query, attention.query, "query", chunk),
            self._chunk(keys[0], attention.key, "key", other),
            self._chunk(keys[1], attention.value, "key", other),
            self._leaves(chunk, number, leaves),
        )

    def _leaves(self, chunk: int, number: Any, leaves: Sequence[Any]) -> list[Any]:
        """The region's inputs for a chunk of queries here and any chunk of keys."""
        return [
            self._chunk(self._chunk(leaf, node, "query", chunk), node, "key", number)
            for leaf, node in zip(leaves, self.attention.leaves, strict=True)
        ]

    def _add(self, total: jax.Array, new: jax.Array, node: Node, at: Mapping[str, Any]) -> jax.Array:
        """`total` with `new` added to the chunk that it belongs to."""
        starts: list[Any] = [0] * total.ndim
        for role, chunk in at.items():
            dim = self._dim(node, role)
            if dim is not None:
                starts[dim] = chunk * new.shape[dim]
        starts = [jnp.asarray(start, jnp.int32) for start in starts]
        old = lax.dynamic_slice(total, starts, new.shape)
        return lax.dynamic_update_slice(total, old + new.astype(total.dtype), starts)

    def _empty(self, chunk: int, query: jax.Array, value: jax.Array) -> Statistics:
        attention, dtype = self.attention, accumulated(self.attention)
        block = self._block(chunk, 0, 0, {})
        rows = [block.sizes[one] for one in block.row_labels]
        sizes = zip(attention.out.labels, attention.out.var.aval.shape, strict=True)
        mixed = [int(np.prod([block.sizes[one] for one in label])) if label else size for label, size in sizes]
        return jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), jnp.zeros(mixed, dtype)

    def _join(self, chunks: Sequence[jax.Array], node: Node, role: str) -> jax.Array:
        return chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis=self._dim(node, role))

    # --- on the way ---

    def _pass_on(self, values: Any) -> Any:
        ring = [(device, (device + 1) % self.size) for device in range(self.size)]
        return jax.tree.map(lambda value: lax.ppermute(value, self.axis, ring), values)

    def _in_order(self, values: Sequence[Any], nodes: Sequence[Node]) -> list[Any]:
        """Operands in the ring's order. Of leaves, keys' positions are all here, and stay as they are."""
        found = []
        for value, node in zip(values, nodes, strict=False):
            dim, is_key = self._dim(node, "query"), any(node is one for one in self.attention.operands[1:3])
            if node is self.attention.query or is_key:
                found.append(self._turned(value, self._dim(node, "key") if is_key else dim, True))
            else:
                found.append(self._exchange(value, dim, True))
        return found

    def _from_zigzag(self, value: jax.Array, role: str) -> jax.Array:
        return self._turned(value, self._dim(self.attention.out, role), False)

    def _home(self, grads: Any, d_key: Any, d_value: Any, query: Any, key: Any, value: Any) -> Any:
        """Gradients in the sequence's own order, and in the operands' dtypes."""
        attention = self.attention
        d_query, d_leaves = grads
        back = [
            None if grad is None else self._exchange(grad, self._dim(node, "query"), False)
            for grad, node in zip(d_leaves, attention.leaves, strict=True)
        ]
        return (
            self._turned(d_query.astype(query.dtype), self._dim(attention.query, "query"), False),
            self._turned(d_key.astype(key.dtype), self._dim(attention.key, "key"), False),
            self._turned(d_value.astype(value.dtype), self._dim(attention.value, "key"), False),
            back,
        )

    def _turned(self, value: jax.Array, dim: int | None, zigzag: bool) -> jax.Array:
        """Of queries, keys, values and the result: `_exchange`, unless whoever holds them has them in order."""
        return value if self.in_order else self._exchange(value, dim, zigzag)

    def _exchange(self, value: jax.Array, dim: int | None, zigzag: bool) -> jax.Array:
        """From the sequence's order to chunks `i` and `2 * size - 1 - i` on device `i`, or back."""
        if dim is None or self.num_chunks == 1:
            return value
        return (to_zigzag if zigzag else from_zigzag)(value, dim, self.axis, self.size)


def _added(total: jax.Array, coming: jax.Array) -> jax.Array:
    return total + coming.astype(total.dtype)
