"""Loss and gradients of a batch: at once, or micro-batch by micro-batch.

`plain` differentiates the whole batch. The others add up gradients of micro-batches, each of every m-th row, so that
a device's rows of one are rows that it already has. In `micro_batched` all devices compute a micro-batch, and reduce
its gradients, before the next; in `locally_accumulated` each device adds up those of its own rows, and all reduce
once, behind the last. Either may compute several micro-batches at a time (`abreast`).
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.gradients.reduced import Arrays, ByLayer, Reduction, by_layer, reduced
from cjax.jax_compat.core import jaxpr_as_fun, make_jaxpr
from cjax.sharding.place.in_turn import InTurn
from cjax.trace.emit.abreast import abreast
from cjax.trace.microbatches.combine import guarded
from cjax.trace.reading import Shared
from cjax.tree import PyTree

NO_LAYERS: Mapping[int, ByLayer] = MappingProxyType({})


@dataclass(frozen=True)
class Evaluated:
    """What one pass over (a part of) a batch gives; `weight` is None where parts simply average. `gathered` are the
    stacks of weights that layers have gathered in it."""

    total: jax.Array
    weight: jax.Array | None
    aux: list[tuple[jax.Array, jax.Array | None]]
    model_state: Arrays
    gathered: Arrays = ()


jax.tree_util.register_dataclass(Evaluated, ["total", "weight", "aux", "model_state", "gathered"], [])


@dataclass(frozen=True)
class Graded:
    """Results and gradients of a whole batch; `part_square`, where it is measured: the mean squared norm of the
    gradients of its `num_parts` parts, each as large as if it were the batch."""

    out: Evaluated
    grads: Arrays
    part_square: jax.Array | None = None
    num_parts: int = 1


jax.tree_util.register_dataclass(Graded, ["out", "grads", "part_square"], ["num_parts"])

Scale = jax.Array | None  # what the loss is multiplied by before its derivative is taken, which is divided by it again
Loss = Callable[[Arrays, Arrays, Arrays, PyTree, jax.Array, jax.Array], Evaluated]
Gradients = Callable[[Arrays, Arrays, Arrays, PyTree, jax.Array, Scale], Graded]
Denominator = Callable[[jax.Array], jax.Array]
Dtypes = Sequence[Any]


def mean(total: jax.Array, weight: jax.Array | None) -> jax.Array:
    """total / weight; the total where there is no weight. Nothing counted is a mean of zero, not NaN."""
    if weight is None:
        return total
    # Both branches of a where are differentiated: without the inner one a division by 0 would be NaN times 0 in the
    # gradient.
    return jnp.where(weight == 0, 0, total / jnp.where(weight == 0, 1, weight))


def widened(grads: Arrays, dtypes: Dtypes) -> Arrays:
    """Gradients in the dtypes that weights are kept in: of weights that were rounded ahead of the loss, they come in
    the dtype of these."""
    return tuple(g.astype(dtype) for g, dtype in zip(grads, dtypes, strict=True))


def gathering(gradients: Gradients, ahead: Callable[[Arrays], Arrays]) -> Gradients:
    """Gradients by a function whose parameters are made ready `ahead`, once for all parts of a batch."""

    def whole(params: Arrays, *args: Any, **more: Any) -> Graded:
        return gradients(ahead(params), *args, **more)

    return whole


def plain(loss: Loss, dtypes: Dtypes) -> Gradients:
    """Gradients of the loss of a whole batch, in these dtypes."""

    def gradients(
        params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array, scale: Scale
    ) -> Graded:
        def scalar(params: Arrays) -> tuple[jax.Array, Evaluated]:
            out = loss(params, frozen, model_state, batch, key, jnp.int32(0))
            # As in all kinds of gradients: the weight is a count of what the total is over, and parts' weights are
            # added up without a derivative. Were it taken here, a loss would have another gradient as soon as its batch
            # is cut.
            weight = None if out.weight is None else lax.stop_gradient(out.weight)
            return scaled(mean(out.total, weight), scale), out

        (_, out), grads = jax.value_and_grad(scalar, has_aux=True)(params)
        grads = widened(grads, dtypes)  # before they are divided, which would round them once more
        if scale is not None:
            grads = jax.tree.map(lambda g: g / scale.astype(g.dtype), grads)
        return Graded(out, grads)

    return gradients


def micro_batched(
    loss: Loss,
    dtypes: Dtypes,
    num_microbatches: int,
    constrain: Callable[[PyTree], PyTree],
    denominator: Denominator,
    measures: bool = False,
    overlap: int = 1,
) -> Gradients:
    """Gradients of a batch run in parts.

    Args:
      loss: of one part; its last argument is the part's index.
      dtypes: in which gradients are added up, of each parameter.
      num_microbatches: how many parts.
      constrain: placement of the batch after it was cut, part index first.
      denominator: what the sum of all totals is divided by, from the sum of all weights.
      measures: whether the parts' gradients are measured too.
      overlap: how many parts at a time.
    """
    parts = _Parts(loss, dtypes, num_microbatches, constrain, measures, overlap, NO_LAYERS, frozenset())

    def gradients(
        params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array, scale: Scale
    ) -> Graded:
        sums, grads, square = parts.sum(params, frozen, model_state, batch, key, scale)
        return averaged(sums, grads, num_microbatches, denominator, scale, (square, num_microbatches))

    return gradients


def locally_accumulated(
    loss: Loss,
    dtypes: Dtypes,
    num_microbatches: int,
    axes: tuple[str, ...],
    reductions: Sequence[Reduction],
    mesh: Mesh,
    denominator: Denominator,
    measures: bool = False,
    overlap: int = 1,
    stacks: Mapping[int, tuple[int, ...]] = MappingProxyType({}),
    in_parts: Collection[int] = (),
) -> Gradients:
    """Gradients of a batch run in parts, each device on its own rows; reduced once, in or after the last part.

    Args:
      loss: of one device's rows of a part; its last argument is the part's index.
      dtypes: in which gradients are added up, of each parameter.
      num_microbatches: how many parts.
      axes: the mesh axes that split the batch. All others stay with the compiler.
      reductions: of each stored array's gradient.
      mesh: the mesh.
      denominator: what the sum of all totals is divided by, from the sum of all weights.
      measures: whether the gradients of the devices' parts are measured too.
      overlap: how many parts at a time.
      stacks: of the stored arrays whose gradients layers reduce in their turn, in the last part's backward pass, the
        shapes.
      in_parts: those of them that come as they are kept, a part on each device, and that layers gather in their turn,
        in the first part's forward pass.
    """
    num_shards = math.prod(mesh.shape[axis] for axis in axes)
    turns = {i: by_layer(shape, reductions[i], axes, mesh) for i, shape in stacks.items()}
    parts = _Parts(loss, dtypes, num_microbatches, lambda rows: rows, measures, overlap, turns, frozenset(in_parts))

    def inside(params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array, scale: Scale) -> Any:
        sums, grads, square = parts.sum(params, frozen, model_state, batch, key, scale)
        # Numbers, a few bytes; other gradients are left as they are on each device, to be reduced where and in which
        # dtype the plan says, behind a dim that tells the devices' sums apart.
        totals = lax.psum((sums.total, sums.weight, sums.aux, square), axes)
        return totals, sums.model_state, tuple(g if i in turns else g[None] for i, g in enumerate(grads))

    def gradients(
        params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array, scale: Scale
    ) -> Graded:
        whole = PartitionSpec()
        rows = jax.tree.map(lambda leaf: PartitionSpec(axes) if leaf.ndim else whole, batch)
        parted = [PartitionSpec(*[None] * how.dim, how.scatter or None) for how in reductions]
        given = tuple(spec if i in in_parts else whole for i, spec in enumerate(parted))
        placed = tuple(spec if i in turns else PartitionSpec(axes) for i, spec in enumerate(parted))
        # Without varying types: with them, the gradient of what all devices share would be summed at every part.
        run = jax.shard_map(
            inside, mesh=mesh, axis_names=set(axes), check_vma=False,
            in_specs=(given, whole, whole, rows, whole, whole), out_specs=(whole, whole, placed),
        )  # fmt: skip
        (total, weight, aux, square), model_state, grads = run(params, frozen, model_state, batch, key, scale)
        grads = reduced(grads, reductions, [() if i in turns else axes for i in range(len(grads))], mesh)
        sums = Evaluated(total, weight, aux, model_state)
        num_parts = num_microbatches * num_shards
        return averaged(sums, grads, num_parts, denominator, scale, (square, num_parts))

    return gradients


def sharing(gradients: Gradients, shared: Shared | None, num_microbatches: int, num_parts: int) -> Gradients:
    """Gradients of a loss that divides by the weights of the whole batch, which are added up first.

    Args:
      gradients: of the loss, whose batch has the denominators behind it.
      shared: what they are; None for any other loss.
      num_microbatches: in how many parts the weights are made.
      num_parts: in how many the loss is: each is given its share of a sum, so that their mean is the whole.
    """
    if shared is None:
        return gradients

    def whole(
        params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array, scale: Scale, **more: Any
    ) -> Graded:
        batch = [*jax.tree.leaves(batch), *divisors(shared, batch, key, num_microbatches, num_parts)]
        return gradients(params, frozen, model_state, batch, key, scale, **more)

    return whole


def divisors(shared: Shared, batch: PyTree, key: jax.Array, num_microbatches: int, num_parts: int) -> list[jax.Array]:
    """What each of `num_parts` parts of a batch divides by, whose weights are made a micro-batch at a time."""
    weights, leaves = jaxpr_as_fun(shared.closed), jax.tree.leaves(batch)
    parts = [cut_rows(leaf, num_microbatches) for leaf in leaves if leaf.ndim]

    def one(sums: list[jax.Array], x: Any) -> Any:
        index, rows = x
        left = iter(rows)
        part = [next(left) if leaf.ndim else leaf for leaf in leaves]
        return [a + b for a, b in zip(sums, weights(*part, key, index), strict=True)], None

    zeros = [jnp.zeros((), weight.atom.aval.dtype) for weight in shared.weights]
    sums, _ = lax.scan(one, zeros, (jnp.arange(num_microbatches, dtype=jnp.int32), parts))
    dtypes = [var.aval.dtype for var in dict.fromkeys(shared.divisors.values())]
    found = []
    for weight, total, dtype in zip(shared.weights, sums, dtypes, strict=True):
        # Guards come after adding up, on the whole batch's weight. A sum is then shared out: parts' sums over the n-th
        # part of it average to sum over weight.
        value = total / num_microbatches if weight.is_mean else total
        divisor = guarded(weight, value).astype(dtype)
        found.append(divisor if weight.is_mean else divisor / num_parts)
    return found


def cut_rows(leaf: jax.Array, num_microbatches: int) -> jax.Array:
    """Rows by micro-batch: every m-th row is one's."""
    # Every m-th, not m stretches: rows are split over devices in stretches, so a stretch would be one device's, and
    # every micro-batch would first have to be spread over all.
    rows = leaf.reshape(leaf.shape[0] // num_microbatches, num_microbatches, *leaf.shape[1:])
    return jnp.moveaxis(rows, 1, 0)


@dataclass(frozen=True)
class _Parts:
    """A loss on `num` parts of a batch, `overlap` of them at a time; arguments as for `micro_batched`.

    Layers reduce their gradients of the stacks in `by_layer` in the last part's backward pass, and gather those
    `in_parts` in the first part's forward pass, beside the layers in front of them.
    """

    loss: Loss
    dtypes: Dtypes
    num: int
    constrain: Callable[[PyTree], PyTree]
    measures: bool
    overlap: int
    by_layer: Mapping[int, ByLayer]
    in_parts: frozenset[int]

    def sum(
        self, params: Arrays, frozen: Arrays, model_state: Arrays, batch: PyTree, key: jax.Array, scale: Scale
    ) -> tuple[Evaluated, Arrays, jax.Array | None]:
        """What the parts give, their gradients, and these gradients' squared norms, each added up."""
        leaves, treedef = jax.tree.flatten(batch)
        parts = self.constrain([cut_rows(leaf, self.num) for leaf in leaves if leaf.ndim])
        indices = jnp.arange(self.num, dtype=jnp.int32)
        if self.overlap > 1:
            indices, *parts = (x.reshape(-1, self.overlap, *x.shape[1:]) for x in (indices, *parts))

        def part_of(rows: Sequence[Any]) -> PyTree:
            left = iter(rows)
            return jax.tree.unflatten(treedef, [next(left) if leaf.ndim else leaf for leaf in leaves])

        def evaluated(params: Arrays, model_state: Arrays, index: jax.Array, rows: Sequence[Any]) -> list[Evaluated]:
            def given(index: jax.Array, rows: Sequence[Any]) -> tuple[Any, ...]:
                return params, frozen, model_state, part_of(rows), key, index

            if self.overlap == 1:
                return [self.loss(*given(index, rows))]
            return _abreast(self.loss, [given(index[i], [x[i] for x in rows]) for i in range(self.overlap)])

        def one(params: Arrays, sums: Any, x: Any, is_first: bool = False, is_last: bool = False) -> tuple[Any, Arrays]:
            index, rows = x
            # One after the other, as a loop of steps would: running statistics see the micro-batches in order.
            summed, *old, model_state = sums
            free, given = self._in_turn(params, summed, is_first, is_last)

            def scalar(free: Arrays) -> tuple[jax.Array, list[Evaluated]]:
                outs = evaluated(given(free), model_state, index, rows)
                return scaled(_added([out.total for out in outs]), scale), outs

            (_, outs), grads = jax.value_and_grad(scalar, has_aux=True)(free)
            grads = widened(grads, self.dtypes)
            found = _added([(out.total, out.weight, out.aux) for out in outs])
            new = [found, square_of(grads) if self.measures else None]
            is_summed = self.by_layer if is_last else ()
            grads = tuple(g if i in is_summed else summed[i] + g for i, g in enumerate(grads))
            return (grads, *jax.tree.map(jnp.add, old, new), outs[-1].model_state), outs[0].gathered

        shapes = [jax.ShapeDtypeStruct(self._shape(i, p), p.dtype) for i, p in enumerate(params)]
        first = part_of([jax.ShapeDtypeStruct(x.shape[1 + (self.overlap > 1) :], x.dtype) for x in parts])
        shape = jax.eval_shape(self.loss, shapes, frozen, model_state, first, key, jnp.int32(0))
        # Gradients are added up in what weights are kept in, float32, however low the precision they were made in.
        kept = [jax.ShapeDtypeStruct(p.shape, dtype) for p, dtype in zip(shapes, self.dtypes, strict=True)]
        sums = (tuple(kept), (shape.total, shape.weight, shape.aux))
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), sums)
        square = jnp.zeros((), jnp.float32) if self.measures else None
        grads, (total, weight, aux), square, model_state = self._run(
            one, params, (*zeros, square, model_state), (indices, parts)
        )
        return Evaluated(total, weight, aux, model_state), grads, square

    def _shape(self, i: int, param: jax.Array) -> tuple[int, ...]:
        return self.by_layer[i].whole if i in self.in_parts else param.shape

    def _in_turn(
        self, params: Arrays, summed: Arrays, is_first: bool, is_last: bool
    ) -> tuple[Arrays, Callable[[Arrays], Arrays]]:
        """What a pass is differentiated by, and from that to the parameters that it is given."""
        early = self.in_parts if is_first else frozenset[int]()
        late = frozenset(self.by_layer if is_last else ())
        free = list(params)
        for i in early | late:
            how = self.by_layer[i]
            free[i] = jnp.zeros(how.part, self.dtypes[i]) if i in late else jnp.zeros(how.whole, params[i].dtype)

        def given(free: Arrays) -> Arrays:
            found: list[Any] = list(free)
            for i in early | late:
                how = self.by_layer[i]
                found[i] = InTurn(
                    free[i],
                    params[i],
                    summed[i] if i in late and self.num > self.overlap else None,
                    how.gather if i in early else None,
                    how.reduce if i in late else None,
                )
            return tuple(found)

        return tuple(free), given

    def _run(self, one: Callable[..., tuple[Any, Arrays]], params: Arrays, sums: Any, turns: Any) -> Any:
        """The sums over all turns: in a loop, but for the first and the last where layers do more in these."""
        num, (late, early) = self.num // self.overlap, map(bool, (self.by_layer, self.in_parts))

        def turn(at: int) -> Any:
            return jax.tree.map(lambda x: x[at], turns)

        def behind(sums: Any, at: int) -> Any:
            # A forward pass reads no sums: XLA would compute it in front of the backward pass before it, beside which
            # it has more to hide transfers under, and keep what both save.
            return lax.optimization_barrier((sums, turn(at)))

        if early or num == 1:  # of a single turn, a loop would keep the sums that it adds nothing to
            sums, gathered = one(params, sums, turn(0), is_first=early, is_last=late and num == 1)
            whole = dict(zip(sorted(self.in_parts), gathered, strict=True))
            params = tuple(whole.get(i, p) for i, p in enumerate(params))
        start, stop = int(early or num == 1), num - late
        if stop - start == 1:
            sums, _ = one(params, *behind(sums, start))
        elif stop > start:
            left = jax.tree.map(lambda x: x[start:stop], turns)
            sums, _ = lax.scan(lambda sums, x: (one(params, sums, x)[0], None), sums, left)
        if late and num > 1:
            sums, _ = one(params, *behind(sums, num - 1), is_last=True)
        return sums


def _abreast(loss: Loss, given: Sequence[tuple[Any, ...]]) -> list[Evaluated]:
    """A loss of several parts at a time."""
    closed, shape = make_jaxpr(loss, return_shape=True)(*given[0])
    outs = abreast(closed, [jax.tree.leaves(each) for each in given])
    treedef = jax.tree.structure(shape)
    return [jax.tree.unflatten(treedef, [values[i] for values in outs]) for i in range(len(given))]


def _added(parts: Sequence[PyTree]) -> PyTree:
    return functools.reduce(lambda one, other: jax.tree.map(jnp.add, one, other), parts)


def scaled(total: jax.Array, scale: Scale) -> jax.Array:
    return total if scale is None else total * scale.astype(total.dtype)


def square_of(grads: Arrays) -> jax.Array:
    """The squared norm of all gradients together."""
    return sum((jnp.sum((g * g.conj()).real).astype(jnp.float32) for g in grads), jnp.zeros((), jnp.float32))


def averaged(
    sums: Evaluated,
    grads: Arrays,
    num_parts: int,
    denominator: Denominator,
    scale: Scale,
    measured: tuple[jax.Array | None, int],
) -> Graded:
    """The loss and gradients of the whole from the sums over its parts; and how large a part's gradient is alone, from
    the sum of squared norms that was `measured`, and of how many."""
    weight, divisor = divisor_of(sums.weight, num_parts, denominator, scale)
    grads = jax.tree.map(lambda g: g / divisor.astype(g.dtype), grads)
    total = sums.total / num_parts if weight is None else sums.total
    aux = [(t / num_parts if w is None else t, w) for t, w in sums.aux]
    # A part's sum over its share of the divisor, so that the parts' mean is the whole.
    square, parts = measured
    part_square = None if square is None else square * parts / jnp.square(divisor.astype(jnp.float32))
    return Graded(Evaluated(total, weight, aux, sums.model_state), grads, part_square, parts)


def divisor_of(
    weight: jax.Array | None, num_parts: int, denominator: Denominator, scale: Scale
) -> tuple[jax.Array | None, jax.Array]:
    """What the sum of all totals is divided by, None where parts average; and what gradients of that sum are."""
    # Without a weight each part is a mean over equally many rows: their sum is over their number.
    weight = None if weight is None else denominator(weight)
    # Of no example that counts all totals are 0, and so is their mean.
    divisor = jnp.asarray(num_parts) if weight is None else jnp.where(weight == 0, 1, weight)
    return weight, divisor if scale is None else divisor * scale
