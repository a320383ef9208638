"""Attention by a fused kernel, whose scores are never in memory: cuDNN's flash attention on NVIDIA's cards."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec

from cjax.mesh import on_gpus
from cjax.sharding.attention.blocks import KeyBlock, lowest
from cjax.sharding.attention.where import Apart, Places, split_axes
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.attention.find import Attention
from cjax.trace.attention.form import KernelForm, NoForm, kernel_form
from cjax.trace.attention.labels import Node
from cjax.trace.jaxpr.groups import Changed, Group, variables


class Kernel(Protocol):
    """What computes attention: queries [batch, length, heads, depth], keys and values of as many heads or fewer, and a
    bias [batch or 1, heads or 1, queries, keys] or none. `window` is how many keys a query sees, of those up to it."""

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, *,
        scale: float, causal: bool, window: int | None,
    ) -> jax.Array: ...  # fmt: skip


def cudnn(
    query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None, *,
    scale: float, causal: bool, window: int | None,
) -> jax.Array:  # fmt: skip
    """cuDNN's flash attention: of bfloat16 or float16, with sums in float32."""
    lengths = query.shape[1], key.shape[1]
    more = [length % 2 for length in lengths]  # JAX hands on no odd lengths, such as the 197 of a ViT
    options: dict[str, Any] = {}
    if any(more):
        # Saved for the backward pass in place of what they are made of.
        query, key, value = (
            checkpoint_name(jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))), "cjax.filled") if extra else x
            for x, extra in zip((query, key, value), (more[0], more[1], more[1]), strict=True)
        )
        bias = None if bias is None else jnp.pad(bias, ((0, 0), (0, 0), (0, more[0]), (0, more[1])))
        names = ("query_seq_lengths", "key_value_seq_lengths")
        options = {name: jnp.full(len(query), length, jnp.int32) for name, length in zip(names, lengths, strict=True)}
    # JAX counts the keys on either side of a query and itself not; a causal window has none behind it.
    sides = None if window is None else (window - 1, 0)
    mixed = jax.nn.dot_product_attention(
        query, key, value, bias=bias, scale=scale, is_causal=causal, local_window_size=sides,
        implementation="cudnn", **options,
    )  # fmt: skip
    return mixed[:, : lengths[0]]


@dataclass(frozen=True)
class Fused:
    """An attention that a kernel computes."""

    attention: Attention
    form: KernelForm


def kernel_for(mesh: Mesh) -> Kernel | None:
    """What computes attention on the mesh's devices; None where nothing does better than the author's equations."""
    return cudnn if on_gpus(mesh) else None


def fused_groups(attentions: Sequence[Attention]) -> list[Group[Fused]]:
    """Those that have a kernel's form, as groups. They read what the attention does, and what its equations do: if the
    kernel refuses, these are evaluated as they stand, with a mask that other layers share and the kernel never sees."""
    found = []
    for attention in attentions:
        try:
            fused = Fused(attention, kernel_form(attention))
        except NoForm:
            continue  # it stays with its author's equations, which are right for anything
        eqns = attention.group.eqns
        written = {var for eqn in eqns for var in eqn.outvars}
        read = dict.fromkeys(var for eqn in eqns for var in variables(eqn) if var not in written)
        ins = tuple(dict.fromkeys((*attention.group.ins, *read)))
        found.append(replace(attention.group, ins=ins, of=fused))
    return found


def refusal(attention: Attention) -> str | None:
    """Why no kernel computes an attention whose heads and examples alone are split, in a half precision on a GPU that
    has cuDNN; None if one does. As far as it can be told without either: what is computed asks JAX."""
    try:
        kernel_form(attention)
    except NoForm as why:
        return str(why)
    order = _order(attention, PartitionSpec())
    if isinstance(order, str):
        return order
    width, _, of_values = _widths(attention, order)
    if width != of_values:
        return _NOT_AS_WIDE
    if width % 8 or width > _WIDEST:
        return f"its heads are {width} wide: kernels take multiples of 8 up to {_WIDEST}"
    return None


def attend_fused(
    fused: Fused,
    ins: Sequence[Any],
    changed: Changed,
    *,
    mesh: Mesh,
    spec: PartitionSpec,
    kernel: Kernel,
    apart: Sequence[Apart] = (),
) -> list[jax.Array] | str:
    """The results of an attention's group, or why the kernel can't be asked for them.

    Args:
      fused: the attention and its form.
      ins: values of `attention.group.ins`, queries, keys and values in the dtype to compute in.
      changed: literals that differ by layer.
      mesh: the mesh; keys, values, the result and what is added are split as the query is.
      spec: of the query.
      kernel: what to ask.
      apart: for each of `ins`, a copy for each device on a dim in front, and the axes that split that; None where it
        has none. All examples share it, so that its gradient is summed over them by whoever made the copies.
    """
    attention = fused.attention
    # A number that differs from layer to layer, a scale say, was not known when the form was read, and may have none
    # now.
    try:
        form = kernel_form(attention, changed) if changed else fused.form
    except NoForm as why:
        return str(why)
    order = _order(attention, spec)
    if isinstance(order, str):
        return order
    places = Places(attention, mesh, None, split_axes(attention, None, spec))
    # XLA has no say in how a kernel is split, so no axis may be left to it.
    axes = [axis for axis in mesh.shape if axis not in jax.sharding.get_abstract_mesh().manual_axes]
    if idle := [axis for axis in axes if mesh.shape[axis] > 1 and axis not in places.axes]:
        return f"the axis {idle[0]!r} splits none of its dims"
    given = dict(zip(attention.group.ins, ins, strict=True))
    operands = [given[node.var] for node in attention.operands]
    low = lowest(operands[:3])
    products = [x.astype(low) for x in operands[:3]]
    copies = places.own_copies(apart)
    call = _Call(attention, form, order, kernel, low, places, frozenset(copies))
    if (why := call.refused()) is not None:
        return why
    specs = [places.spec(node) for node in attention.operands]
    for place, (copied, axes_in_front) in copies.items():
        operands[place], specs[place] = copied, PartitionSpec(axes_in_front, *specs[place])
    mapped = places.mapped(call, tuple(specs), places.spec(attention.out), axes if mesh.size > 1 else ())
    out = mapped(*products, *operands[3:])
    return [out.astype(operands[0].dtype)]


_WIDEST = 128  # features of a head on every card; some take more, which JAX tells once a card is known
_NOT_AS_WIDE = "its values are not as wide as its queries"


@dataclass(frozen=True)
class _Order:
    """Labels as a kernel orders dims: batch, position, heads (first those that keys have too), depth."""

    batch: tuple[int, ...]
    shared: tuple[int, ...]
    own: tuple[int, ...]
    query: int
    key: int
    depths: tuple[tuple[int, ...], ...]  # dims of query, key and value that are no label's


def _order(attention: Attention, spec: PartitionSpec) -> _Order | str:
    """The order of an attention's labels, or why a kernel has none."""
    labels, roles = [label[0] for label in attention.query.labels if label], attention.roles
    of_key, of_value = ({label for label in node.labels if label} for node in (attention.key, attention.value))
    heads = [one for one in labels if roles[one] == "heads"]
    batch = tuple(one for one in labels if roles[one] == "batch")
    shared = tuple(one for one in heads if (one,) in of_key)
    key = attention.label("key")
    wanted = {(one,) for one in (*batch, *shared, key)}
    # A kernel takes one batch, one position and heads. A dim of keys that queries lack, a window of its own for each
    # query say, has no place there.
    if of_key != wanted or of_value != wanted:
        return "its keys or values have other dims than batch, position and heads"
    entries = zip(attention.query.labels, spec, strict=False)
    # A kernel sees a whole softmax or none: of split positions it would give each device's, as if there were no other
    # keys.
    if any(axes_of_entry(entry) and (not label or roles[label[0]] == "query") for label, entry in entries):
        return "its positions or the width of its heads are split"
    if any(axes and any(label[1:]) for node in attention.operands for label, axes in _splits(node, attention, spec)):
        return "groups of heads are split, not the heads that they share"
    (contract, _), first = attention.scores_eqn.params["dimension_numbers"], attention.key_first
    dims, _ = attention.out_eqn.params["dimension_numbers"]
    side = 0 if attention.out_eqn.invars[0] is attention.value.var else 1
    taken = {*dims[side], *attention.out_eqn.params["dimension_numbers"][1][side]}
    of_values = tuple(d for d in range(len(attention.value.labels)) if d not in taken)
    depths = (tuple(contract[1 if first else 0]), tuple(contract[0 if first else 1]), of_values)
    own = tuple(one for one in heads if one not in shared)
    return _Order(batch, shared, own, attention.label("query"), key, depths)


def _widths(attention: Attention, order: _Order) -> list[int]:
    """Features of a head in queries, keys and values."""
    nodes = (attention.query, attention.key, attention.value)
    pairs = zip(nodes, order.depths, strict=True)
    return [math.prod(node.var.aval.shape[dim] for dim in dims) for node, dims in pairs]


def _splits(node: Node, attention: Attention, spec: PartitionSpec) -> list[tuple[tuple[int, ...], bool]]:
    """Each dim's labels, and whether one behind the first of them is split."""
    pairs = zip(attention.query.labels, spec, strict=False)
    split = {label[0] for label, entry in pairs if label and axes_of_entry(entry)}
    return [(label, any(one in split for one in label[1:])) for label in node.labels]


@dataclass(frozen=True)
class _Call:
    """The kernel on each device's shard of the operands."""

    attention: Attention
    form: KernelForm
    order: _Order
    kernel: Kernel
    low: Any
    places: Places
    copied: frozenset[int]  # which operands have a dim in front, of this device's copy

    @property
    def sizes(self) -> dict[int, int]:
        return self.places.sizes

    def _count(self, labels: Sequence[int]) -> int:
        return math.prod(self.sizes[one] for one in labels)

    def refused(self) -> str | None:
        """Why the kernel does not take operands of these shapes, if it doesn't."""
        order, widths = self.order, _widths(self.attention, self.order)
        # `_refused` tries one width for all three: of values of another nobody would have asked.
        if widths[0] != widths[2]:
            return _NOT_AS_WIDE
        has_bias = bool(self.form.added or self.form.masks)
        heads = (self._count((*order.shared, *order.own)), self._count(order.shared))
        lengths = (self.sizes[order.query], self.sizes[order.key])
        return _refused(self.kernel, str(self.low), lengths, heads, widths[0], has_bias)

    def __call__(self, query: jax.Array, key: jax.Array, value: jax.Array, *leaves: jax.Array) -> jax.Array:
        attention, order, form = self.attention, self.order, self.form
        # Of copies, one for each device, its shard is a dim of 1 in front, which no equation of the author's knows.
        leaves = tuple(x[0] if 3 + i in self.copied else x for i, x in enumerate(leaves))
        heads = (*order.shared, *order.own)
        query = self._ordered(query, attention.query, (*order.batch, order.query, *heads), order.depths[0])
        key = self._ordered(key, attention.key, (*order.batch, order.key, *order.shared), order.depths[1])
        value = self._ordered(value, attention.value, (*order.batch, order.key, *order.shared), order.depths[2])
        mixed = self.kernel(
            query, key, value, self._bias(leaves), scale=form.scale, causal=form.causal, window=form.window
        )
        return self._as_written(mixed)

    def _ordered(self, value: jax.Array, node: Node, labels: Sequence[int], depth: Sequence[int]) -> jax.Array:
        """[batch, position, heads, depth]; `labels` has the position after the batch."""
        at = {label[0]: dim for dim, label in enumerate(node.labels) if label}
        places = [at[one] for one in labels]
        rest = [dim for dim in range(value.ndim) if dim not in (*places, *depth)]  # of size 1
        position = labels[len(self.order.batch)]
        heads = self._count(labels[len(self.order.batch) + 1 :])
        ordered = value.transpose(*rest, *places, *depth)
        return ordered.reshape(self._count(self.order.batch), self.sizes[position], heads, -1)

    def _as_written(self, mixed: jax.Array) -> jax.Array:
        """The kernel's result with the dims that the author's has."""
        order, node, eqn = self.order, self.attention.out, self.attention.out_eqn
        labels = (*order.batch, order.query, *order.shared, *order.own)
        value = mixed.reshape(*(self.sizes[one] for one in labels), mixed.shape[-1])
        # A matmul's result has batch dims first, then what only its left operand has, then the right one's.
        _, (batched, _) = eqn.params["dimension_numbers"]
        width = len(order.depths[2])
        first = len(batched) if eqn.invars[0] is self.attention.value.var else len(node.labels) - width
        before, behind = (
            [labels.index(one) for label in part for one in label]
            for part in (node.labels[:first], node.labels[first + width :])
        )
        shape = [
            self._count(label) if label else size for label, size in zip(node.labels, node.var.aval.shape, strict=True)
        ]
        return value.transpose(*before, len(labels), *behind).reshape(shape)

    def _bias(self, leaves: Sequence[jax.Array]) -> jax.Array | None:
        """[batch or 1, heads or 1, queries, keys] of all that is added and all that is hidden."""
        if not self.form.added and not self.form.masks:
            return None
        # By the author's own equations on this device's heads and examples: a mask that counts them begins where they
        # do.
        block = KeyBlock(self.attention, self.sizes, self.places.starts, {}, self.low)
        known = dict(zip(self.attention.leaves, leaves, strict=True))
        lowest_number = _HIDES[self.low.name]
        total: Any = 0.0
        for node, factor in self.form.added:
            value = self._as_bias(block.evaluate(node, known), node)
            total = total + value.astype(jnp.promote_types(value.dtype, jnp.float32)) * factor
        for node, inverted in self.form.masks:
            hidden = (block.evaluate(node, known) != 0) == inverted
            total = total + jnp.where(self._as_bias(hidden, node), lowest_number, 0.0)
        # Several of them together, or an author's finfo.min, are more than the kernel's dtype holds.
        bias = jnp.maximum(total, lowest_number).astype(self.low)
        lengths = (self.sizes[self.order.query], self.sizes[self.order.key])
        return jnp.broadcast_to(bias, (*bias.shape[:2], *lengths))

    def _as_bias(self, value: jax.Array, node: Node) -> jax.Array:
        """A node's value as [batch or 1, heads or 1, queries or 1, keys or 1]."""
        order = self.order
        flat = [one for label in node.labels for one in label]
        value = value.reshape([self.sizes[one] for one in flat])
        groups = (order.batch, (*order.shared, *order.own), (order.query,), (order.key,))
        present = [one for group in groups for one in group if one in flat]
        value = value.transpose([flat.index(one) for one in present])
        value = value.reshape([self.sizes[one] if one in flat else 1 for group in groups for one in group])
        kept = [group if set(group).intersection(flat) else () for group in groups]
        whole = [self.sizes[one] if mine else 1 for group, mine in zip(groups, kept, strict=True) for one in group]
        return jnp.broadcast_to(value, whole).reshape([self._count(mine) for mine in kept])


# Large enough to hide a key from float32's softmax, and small enough that two of them are no infinity.
_HIDES = {"bfloat16": -(2.0**41), "float16": -(2.0**15), "float32": -(2.0**41), "float64": -(2.0**41)}


@functools.cache
def _refused(
    kernel: Kernel, dtype: str, lengths: tuple[int, int], heads: tuple[int, int], width: int, has_bias: bool
) -> str | None:
    """What JAX says against a kernel on these shapes, forwards and backwards; None if nothing."""
    # JAX's own checks are the only list of what cuDNN takes on which card, and grow with it. They look at shapes, so
    # nothing runs; with a gradient, since a step needs both ways. One example is as good as many.
    shapes = [(1, lengths[0], heads[0], width), *[(1, lengths[1], heads[1], width)] * 2]
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    bias = jax.ShapeDtypeStruct((1, 1, *lengths), dtype) if has_bias else None

    def total(query: jax.Array, key: jax.Array, value: jax.Array, bias: jax.Array | None) -> jax.Array:
        return kernel(query, key, value, bias, scale=1.0, causal=False, window=None).sum()

    try:
        jax.eval_shape(jax.grad(total, argnums=(0, 1, 2)), *operands, bias)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None
