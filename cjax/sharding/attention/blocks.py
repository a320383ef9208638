"""The equations of an attention on one block of its score matrix.

Rows of statistics (maxima, sums, divisors) are kept in one order of dims: the labels of the scores, key left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from string import ascii_letters
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import Equation
from cjax.sharding.attention.random import draw_block
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Labels, Node
from cjax.trace.emit.emit import bind, number
from cjax.trace.jaxpr.evaluate import Step, bind_as_is, demanded, evaluate
from cjax.trace.jaxpr.groups import Changed
from cjax.trace.jaxpr.primitives import name_of


@dataclass(frozen=True)
class KeyBlock:
    """A block of the scores: how many indices of each label it has, and the first of them.

    Labels without a start begin at 0. Matmuls take their operands in `low`. Of `filled` labels a block may go on behind
    the last position: there it has copies of that one, of which no row sees keys.
    """

    attention: Attention
    sizes: Mapping[int, int]
    starts: Mapping[int, Any]
    changed: Changed
    low: Any
    filled: frozenset[int] = frozenset()

    def shape(self, node: Node) -> tuple[int, ...]:
        """Of a node on this block."""
        dims = zip(node.labels, node.var.aval.shape, strict=True)
        return tuple(int(np.prod([self.sizes[one] for one in label])) if label else size for label, size in dims)

    def start(self, label: Sequence[int]) -> Any:
        """The block's first index in a dim that is made of these labels."""
        first, stride = 0, 1
        for one in reversed(label):
            first = first + self.starts.get(one, 0) * stride
            stride *= self.attention.sizes[one]
        return first

    def evaluate(self, node: Node, given: dict[Node, Any]) -> Any:
        """A node's value from those of the scores and leaves, or of whatever `given` has on the way."""
        steps = demanded(node, self.attention.steps, given)
        evaluate(steps, given.__getitem__, given.update, number(self.changed), self._apply)
        return given[node]

    def _apply(self, step: Step[Equation, Node], ins: list[Any]) -> list[Any]:
        (node,) = step.writes
        return [self._on_block(step.of, node, ins)]

    def _on_block(self, eqn: Equation, node: Node, ins: list[Any]) -> Any:
        # Four equations say in their parameters how large the whole is; all others go by their operands' shapes.
        shape = self.shape(node)
        match name_of(eqn):
            case "iota":
                # Numbers of the whole sequence: a block that counted from 0 would be masked as the first one is.
                dim = eqn.params["dimension"]
                index = lax.broadcasted_iota(node.var.aval.dtype, shape, dim) + jnp.asarray(
                    self.start(node.labels[dim]), node.var.aval.dtype
                )
                if self.filled.isdisjoint(node.labels[dim]):
                    return index
                return jnp.minimum(index, jnp.asarray(node.var.aval.shape[dim] - 1, index.dtype))
            case "random_bits":
                # The bits that these places have in the whole, so that dropout is the same however positions are split.
                starts = [self.start(label) for label in node.labels]
                return draw_block(eqn, ins[0], node.var.aval.shape, shape, starts)
            case "broadcast_in_dim":
                return lax.broadcast_in_dim(ins[0], shape, eqn.params["broadcast_dimensions"])
            case "reshape":
                return lax.reshape(ins[0], shape)
        return bind(eqn, ins)[0]

    # --- rows ---

    @property
    def row_labels(self) -> list[int]:
        key = self.attention.label("key")
        return [one for one in sorted(self.attention.sizes) if one != key and one in self.attention.roles]

    def rows(self, value: jax.Array, labels: Labels) -> jax.Array:
        """Statistics with dims as `labels` says, as rows; dims without a label are of size 1."""
        flat = [one for label in labels for one in label]
        value = value.reshape([self.sizes[one] for one in flat])
        return value.transpose([flat.index(one) for one in self.row_labels])

    def spread(self, rows: jax.Array, labels: Labels) -> jax.Array:
        """Rows as they broadcast against a value with dims as `labels` says."""
        key = self.attention.label("key")
        flat = [one for label in labels for one in label if one != key]
        rows = rows.transpose([self.row_labels.index(one) for one in flat])
        return rows.reshape(
            [int(np.prod([self.sizes[one] for one in label])) if label and label != (key,) else 1 for label in labels]
        )

    def reduce(self, how: Any, value: jax.Array, labels: Labels) -> jax.Array:
        """Rows of `how` (jnp.max, jnp.sum) over keys."""
        dim = labels.index((self.attention.label("key"),))
        return self.rows(how(value, axis=dim), tuple(label for at, label in enumerate(labels) if at != dim))

    # --- the parts of an attention ---

    def logits(self, query: jax.Array, key: jax.Array, leaves: Sequence[Any]) -> tuple[Any, Any, dict[Node, Any]]:
        """Logits, what their maximum is taken of, and all that was evaluated."""
        attention = self.attention
        # In the order that the author wrote: `letters` and the precision of either side go by it.
        eqn = attention.scores_eqn
        operands = (key, query) if attention.key_first else (query, key)
        scores = _multiply(_Product(eqn, self.low, attention.scores.var.aval.dtype), *operands)
        given = dict(zip(attention.leaves, leaves, strict=True)) | {attention.scores: scores}
        logits, masked = self.evaluate(attention.logits, given), self.evaluate(attention.masked, given)
        return self._of_keys(logits, attention.logits.labels), self._of_keys(masked, attention.masked.labels), given

    def _of_keys(self, logits: jax.Array, labels: Labels) -> jax.Array:
        """-inf behind the last key, whatever else masks say."""
        # Last, on top of all masks: one that is added, or that is -1e9 throughout a row, would leave keys that are not
        # there a share of the softmax.
        key = self.attention.label("key")
        if key not in self.filled:
            return logits
        index = lax.broadcasted_iota(jnp.int32, logits.shape, labels.index((key,))) + self.start((key,))
        return jnp.where(index < self.attention.sizes[key], logits, -jnp.inf)

    def terms(self, exps: jax.Array, given: dict[Node, Any]) -> jax.Array:
        """What is summed over keys, as rows of sums."""
        attention = self.attention
        # What an author sums may be more than exponentials: rounded, or masked once more.
        if attention.terms == attention.exps:
            return self.reduce(jnp.sum, exps, attention.exps.labels)
        terms = self.evaluate(attention.terms, given | {attention.exps: exps.astype(attention.exps.var.aval.dtype)})
        return self.reduce(jnp.sum, terms.astype(exps.dtype), attention.terms.labels)

    def mix(self, exps: jax.Array, divisor: jax.Array | None, value: jax.Array, given: dict[Node, Any]) -> jax.Array:
        """Weights times values; without a divisor, exponentials in their place."""
        attention = self.attention
        numerator, weights = attention.numerator, attention.weights
        if numerator != attention.exps:
            known = given | {attention.exps: exps.astype(attention.exps.var.aval.dtype)}
            exps = self.evaluate(numerator, known).astype(exps.dtype)
        if divisor is not None:
            exps = self.divide(exps, divisor, numerator.labels)
        dropped = self.evaluate(attention.dropped, given | {weights: exps.astype(weights.var.aval.dtype)})
        eqn = attention.out_eqn
        first = eqn.invars[0] is attention.dropped.var
        how = _Product(eqn, self.low, accumulated(attention))
        return _multiply(how, *((dropped, value) if first else (value, dropped)))

    def divisor(self, sums: jax.Array, maxima: jax.Array, leaves: Sequence[Any]) -> jax.Array:
        """What exponentials relative to `maxima` are divided by (or multiplied with), as rows.

        Args:
          sums: of those exponentials, as rows.
          maxima: of what the author takes the maximum of, as rows, -inf where a row sees nothing.
          leaves: the region's inputs on this block.
        """
        attention = self.attention
        # The sum itself in most models. Where more was done to it, a guard against zero say, or a sink that was added,
        # that is done to the finished sum, in the author's dtype.
        if attention.divides_by_sum:
            return sums
        node, given, off = attention.origin(attention.divisor), dict(zip(attention.leaves, leaves, strict=True)), None
        if attention.maximum is not None and attention.shift is not None:
            given[attention.maximum] = self._spread_as(maxima, attention.maximum)
            shift = attention.origin(attention.shift)
            given[shift] = lax.stop_gradient(self.evaluate(shift, dict(given)))
            off = self.rows(given[shift].astype(maxima.dtype), shift.labels)
        # What the author takes off may be more than the maximum, as a sink may be the largest of all, or nothing. Then
        # its exponentials are those here by a factor, and so is the sum.
        by = jnp.exp(finite(maxima) - (0.0 if off is None else off))
        by = jnp.maximum(by, jnp.finfo(by.dtype).tiny)
        given[attention.total] = self._spread_as(sums * by, attention.total)
        divisor = self.rows(self.evaluate(node, given).astype(sums.dtype), node.labels)
        return divisor * by if attention.multiplies else divisor / by

    def _spread_as(self, rows: jax.Array, node: Node) -> jax.Array:
        return self.spread(rows, node.labels).astype(node.var.aval.dtype)

    def divide(self, value: jax.Array, divisor: jax.Array, labels: Labels) -> jax.Array:
        """A value with dims as `labels` says by its rows' divisor."""
        divisor = self.spread(divisor, labels)
        return value * divisor if self.attention.multiplies else value / divisor


def finite(maxima: jax.Array) -> jax.Array:
    """Maxima to subtract: rows of nothing but -inf have none, and come to 0/0 as they do at once."""
    return jnp.where(maxima == -jnp.inf, 0.0, maxima)


def lowest(arrays: Sequence[jax.Array]) -> Any:
    """The lowest of their dtypes."""
    return min((x.dtype for x in arrays), key=lambda dtype: jnp.finfo(dtype).bits)


def accumulated(attention: Attention) -> Any:
    """The dtype of sums: float32, or float64 where the model has it."""
    return jnp.promote_types(attention.out.var.aval.dtype, jnp.float32)


class _Product(NamedTuple):
    """A matmul by its equation, of operands rounded to `low`, with sums in `dtype`."""

    eqn: Equation
    low: Any
    dtype: Any

    @property
    def precision(self) -> Any:
        """As its author asked, unless it names a dtype that is not there."""
        return self.eqn.params["precision"] if self.low == self.eqn.invars[0].aval.dtype else None

    @property
    def letters(self) -> tuple[str, str, str]:
        """Its dims, as `einsum` names them: left, right, result."""
        (contract, batch) = self.eqn.params["dimension_numbers"]
        ndims = [len(atom.aval.shape) for atom in self.eqn.invars]
        names = [list(ascii_letters[: ndims[0]]), list(ascii_letters[ndims[0] : sum(ndims)])]
        for left, right in [*zip(*contract, strict=True), *zip(*batch, strict=True)]:
            names[1][right] = names[0][left]
        shared = [names[0][dim] for dim in batch[0]]
        free = [[one for one in names[side] if one not in names[1 - side]] for side in (0, 1)]
        return "".join(names[0]), "".join(names[1]), "".join(shared + free[0] + free[1])


# By hand: JAX would round each block's gradient to the low dtype before it is added to the others, once for each
# device.
@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(how: _Product, left: jax.Array, right: jax.Array) -> jax.Array:
    params = {"preferred_element_type": jnp.dtype(how.dtype), "precision": how.precision}
    return bind_as_is(how.eqn, (left.astype(how.low), right.astype(how.low)), how.eqn.params | params)[0]


def _multiply_forward(how: _Product, left: jax.Array, right: jax.Array) -> Any:
    return _multiply(how, left, right), (left, right)


def _multiply_backward(how: _Product, kept: Any, gradient: jax.Array) -> Any:
    """Products in `low` as well, but sums in the operands' own dtype: those of several blocks are yet to be added."""
    names = how.letters
    gradient = gradient.astype(how.low)

    def product(side: int) -> jax.Array:
        rule = f"{names[2]},{names[1 - side]}->{names[side]}"
        other = kept[1 - side].astype(how.low)
        options = {"precision": how.precision, "preferred_element_type": kept[side].dtype}
        return jnp.einsum(rule, gradient, other, **options)

    return product(0), product(1)


_multiply.defvjp(_multiply_forward, _multiply_backward)
