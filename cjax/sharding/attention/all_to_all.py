"""Attention with heads in place of positions: one all-to-all before it, one after it.

Each device gets all positions of some heads. Where there are fewer key-value heads than devices, those that share one
get a copy each, and split the query heads that go with it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cjax.sharding.attention.blocks import KeyBlock, finite
from cjax.sharding.storage.storage import filled_up
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Node
from cjax.trace.jaxpr.groups import Changed


@dataclass(frozen=True)
class Exchange:
    """One device's shard of an attention; `forward` runs where `axis` is manual. Arguments as for `Ring`."""

    attention: Attention
    axis: str
    size: int
    sizes: Mapping[int, int]
    axes_of: Mapping[int, tuple[str, ...]]
    low: Any

    def __post_init__(self) -> None:
        # Heads of keys first, and the query heads that share one only once each device has a single one: of several,
        # half of each one's query heads are no one stretch of a dim that has all of them, and `_slice` takes one
        # stretch.
        heads, groups = (self.sizes.get(one, 1) for one in self.split)
        of_heads, of_groups = self.factors
        if groups % of_groups or (of_heads != heads and of_groups > 1):
            raise ValueError(
                f"{self.attention.where or 'An attention'} has {heads * groups} heads on a device ({heads} of keys), "
                f"which can't be split {self.size} ways over the axis {self.axis!r}: all_to_all needs a size that "
                f"divides them, such as {math.gcd(heads * groups, self.size)}; sequence=ring needs no heads."
            )

    @property
    def split(self) -> tuple[int, int]:
        """The label of heads that keys have too, and that of groups that only queries have; -1 for none."""
        of_key = {one for label in self.attention.key.labels for one in label}
        heads = [label[0] for label in self.attention.query.labels if label and self._role(label) == "heads"]
        shared = [one for one in heads if one in of_key]
        own = [one for one in heads if one not in of_key]
        return (max(shared, key=self.sizes.__getitem__, default=-1), max(own, key=self.sizes.__getitem__, default=-1))

    def _role(self, label: Sequence[int]) -> str:
        return self.attention.roles[label[0]]

    @property
    def factors(self) -> tuple[int, int]:
        """How many ways heads and groups are split."""
        heads = math.gcd(self.sizes.get(self.split[0], 1), self.size)
        return heads, self.size // heads

    def forward(
        self, query: jax.Array, key: jax.Array, value: jax.Array, leaves: Sequence[Any], changed: Changed
    ) -> jax.Array:
        """The result, on all operands' parts of one device."""
        attention = self.attention
        query = self._to_heads(query, attention.query, "query")
        key = self._to_heads(key, attention.key, "key")
        value = self._to_heads(value, attention.value, "key")
        block = self._block(changed)
        # Leaves are whole along this axis: most have no heads that could be exchanged for positions.
        mine = [self._slice(leaf, node, block) for leaf, node in zip(leaves, attention.leaves, strict=True)]
        logits, masked, given = block.logits(query, key, mine)
        # Any number may be subtracted, as long as it is the same for the sum: so the maximum needs no derivative.
        dtype = jnp.promote_types(attention.exps.var.aval.dtype, jnp.float32)
        maxima = block.reduce(jnp.max, lax.stop_gradient(masked), attention.masked.labels).astype(dtype)
        exps = jnp.exp(logits.astype(dtype) - block.spread(finite(maxima), attention.logits.labels))
        out = block.mix(exps, block.divisor(block.terms(exps, given), maxima, mine), value, given)
        return self._to_positions(out.astype(value.dtype))

    def _block(self, changed: Changed) -> KeyBlock:
        sizes = dict(self.sizes)
        starts: dict[int, Any] = {
            label: lax.axis_index(axes) * self.sizes[label] for label, axes in self.axes_of.items()
        }
        # All positions, and no more than there are: what was added is cut off before anything is computed.
        for role in ("query", "key"):
            sizes[self.attention.label(role)] = self.attention.sizes[self.attention.label(role)]
        for label, factor, index in zip(self.split, self.factors, self._index(), strict=True):
            if label in sizes:
                sizes[label] //= factor
                starts[label] = starts.get(label, 0) + index * sizes[label]
        return KeyBlock(self.attention, sizes, starts, changed, self.low)

    def _index(self) -> tuple[jax.Array, jax.Array]:
        """Which part of the heads, and of their groups, is this device's."""
        index, of_groups = lax.axis_index(self.axis), self.factors[1]
        return index // of_groups, index % of_groups

    def _slice(self, leaf: Any, node: Node, block: KeyBlock) -> Any:
        """This device's heads of a region's input."""
        for dim, label in enumerate(node.labels):
            first, stride, size = 0, 1, 1
            for one in reversed(label):
                if one in self.split:
                    place = self.split.index(one)
                    first = first + self._index()[place] * block.sizes[one] * stride
                stride *= self.sizes[one] if self._role((one,)) not in ("query", "key") else block.sizes[one]
                size *= block.sizes[one]
            if label and leaf.shape[dim] != size:
                leaf = lax.dynamic_slice_in_dim(leaf, first, size, axis=dim)
        return leaf

    def _to_heads(self, value: jax.Array, node: Node, role: str) -> jax.Array:
        """From a part of the positions and all heads to all positions, and no more, of a part of the heads."""
        for place, (label, factor) in reversed(list(enumerate(zip(self.split, self.factors, strict=True)))):
            dim = self._dim(node, label, place)
            # Keys have no groups: each device that shares a head of theirs gets it.
            if dim is None:
                value = jnp.broadcast_to(value, (factor, *value.shape))
            else:
                parts = value.reshape(*value.shape[:dim], factor, value.shape[dim] // factor, *value.shape[dim + 1 :])
                value = jnp.moveaxis(parts, dim, 0)
        value = value.reshape(self.size, *value.shape[2:])
        value = lax.all_to_all(value, self.axis, 0, 0)
        dim = node.labels.index((self.attention.label(role),))
        value = jnp.moveaxis(value, 0, dim)
        value = value.reshape(*value.shape[:dim], -1, *value.shape[dim + 2 :])
        return lax.slice_in_dim(value, 0, self.attention.sizes[self.attention.label(role)], axis=dim)

    def _dim(self, node: Node, label: int, place: int) -> int | None:
        """Where a node has the heads, or the groups in front of which parts of groups have been put."""
        if (label,) not in node.labels:
            return None
        return node.labels.index((label,)) + (1 - place)

    def _to_positions(self, value: jax.Array) -> jax.Array:
        """Back again, for the result."""
        node = self.attention.out
        dim = node.labels.index((self.attention.label("query"),))
        more = filled_up(value.shape[dim], self.size) - value.shape[dim]
        value = jnp.pad(value, [(0, more if at == dim else 0) for at in range(value.ndim)])
        value = value.reshape(*value.shape[:dim], self.size, value.shape[dim] // self.size, *value.shape[dim + 1 :])
        value = lax.all_to_all(jnp.moveaxis(value, dim, 0), self.axis, 0, 0)
        value = value.reshape(*self.factors, *value.shape[1:])
        for place, label in enumerate(self.split):
            dim = self._dim(node, label, place)
            if dim is None:  # one group alone, of which the factor is 1
                value = value[0]
                continue
            value = jnp.moveaxis(value, 0, dim)
            value = value.reshape(*value.shape[:dim], -1, *value.shape[dim + 2 :])
        return value
