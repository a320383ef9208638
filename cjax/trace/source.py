"""A user's loss on any number of rows, traced once for each, whoever asks: plans, micro-batches, one device's rows."""

from collections.abc import Callable, Hashable, Mapping

import jax

from cjax.jax_compat.core import ClosedJaxpr
from cjax.trace.author.capture import Capture
from cjax.trace.author.loss import Loss
from cjax.trace.dims.refine_rules import Form
from cjax.trace.reading import Trace, Traced, flattened, read, trace_part
from cjax.tree import PyTree


class TraceSource:
    """A captured model and loss, and the batch that it is for.

    What is traced depends on a plan by the number of micro-batches alone, and on how they are read by whether layers
    that are one weight each are taken in pairs. So all plans of a program share one source, and `auto` and every replan
    run the author's Python no more than once for a number of rows.

    Args:
      capture: the user's model and loss.
      batch_shape: the whole batch, as ShapeDtypeStructs.

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> from cjax.trace.author.capture import capture
    >>> batch = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    >>> source = TraceSource(capture(nn.Dense(5), lambda model, x: model(x).mean(), batch), batch)
    >>> source.read(2).leaves[2].shape, source.read(2) is source.read(2)
    ((4, 3), True)
    """

    def __init__(self, capture: Capture, batch_shape: PyTree) -> None:
        self.capture, self.batch_shape = capture, batch_shape
        self._traced: dict[Hashable, Traced] = {}
        self._read: dict[Hashable, Trace] = {}
        self._made: dict[Hashable, Trace] = {}

    @property
    def num_rows(self) -> int:
        """Of the whole batch; 1 where its leaves are single numbers."""
        return next((leaf.shape[0] for leaf in jax.tree.leaves(self.batch_shape) if leaf.shape), 1)

    def on_rows(self, num_rows: int) -> "TraceSource":
        """The same for a batch of so many rows; what was traced for either is known to both."""
        other = TraceSource(self.capture, _with_rows(self.batch_shape, num_rows))
        other._traced, other._read, other._made = self._traced, self._read, self._made
        return other

    def read(
        self,
        num_microbatches: int = 1,
        rows: int | None = None,
        *,
        train: bool = True,
        call: Loss | None = None,
        forms: Mapping[int, Form] | None = None,
        counters: frozenset[int] = frozenset(),
        pairs: bool = False,
        at_once: bool = False,
    ) -> Trace:
        """The loss on one of `num_microbatches` micro-batches, read.

        Args:
          num_microbatches: into how many the batch is cut.
          rows: of the micro-batch, in place of its share of the batch.
          train, call, counters: see `trace_part`.
          forms, pairs, at_once: see `cjax.trace.reading.read`; chains alone are taken in pairs.
        """
        shape = self._part(num_microbatches, rows)
        known = None if forms is None else tuple(sorted(forms.items()))
        same = (_key(shape), _microbatches(num_microbatches, counters), train, call, known, counters, at_once)

        def found(pairs: bool) -> Trace:
            if (same, pairs) not in self._read:
                traced = self._trace(shape, num_microbatches, train, call, counters)
                self._read[same, pairs] = read(traced, self.capture.dim_names, forms, pairs, at_once, counters)
            return self._read[same, pairs]

        return found(True) if pairs and found(False).is_chain else found(False)

    def once(self, trace: Trace, how: Hashable, make: Callable[[], Trace]) -> Trace:
        """What `make` makes of a trace that `read` gave, made once for each `how`: plans that differ in nothing that a
        trace depends on have the same, and with it what is compiled of it."""
        key = (id(trace), self.num_rows, how)  # of one that is kept, so that no other comes by its number
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def run(self, num_microbatches: int = 1, rows: int | None = None, counters: frozenset[int] = frozenset()) -> None:
        """Runs the author's Python as `read` would, and reads nothing: whatever this raises is the author's own."""
        self._trace(self._part(num_microbatches, rows), num_microbatches, True, None, counters)

    def flat(self, rows: int, like: Trace, num_microbatches: int, *, train: bool = True) -> ClosedJaxpr:
        """The equations of the loss on so many rows, in the form of the trace `like`, which is of others.

        Raises:
          ValueError: the loss does not run on so many.
        """
        try:
            traced = self._trace(self._part(num_microbatches, rows), num_microbatches, train, None, like.counters)
        except Exception as error:  # from the author's own code, which may know its number of rows by heart
            raise ValueError(
                f"How a loss adds up is read off two numbers of rows, and this one does not run on {rows} "
                f"({first_line(error)}). Take the number from the batch that it is given (x.shape[0]), and give each "
                "example a row of its own in every leaf."
            ) from error
        return flattened(traced, like)

    def _part(self, num_microbatches: int, rows: int | None) -> PyTree:
        if rows is not None:
            return _with_rows(self.batch_shape, rows)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((x.shape[0] // num_microbatches, *x.shape[1:]) if x.shape else (), x.dtype),
            self.batch_shape,
        )

    def _trace(
        self, shape: PyTree, num_microbatches: int, train: bool, call: Loss | None, counters: frozenset[int]
    ) -> Traced:
        key = (_key(shape), _microbatches(num_microbatches, counters), train, call, counters)
        if key not in self._traced:
            self._traced[key] = trace_part(self.capture, shape, num_microbatches, train, call, counters)
        return self._traced[key]


def first_line(error: Exception) -> str:
    """What an exception of the author's says, or which it is: a bare assertion says nothing."""
    return next(iter(str(error).splitlines()), type(error).__name__)


def _with_rows(shape: PyTree, num: int) -> PyTree:
    """ShapeDtypeStructs of a batch like `shape`, of so many rows."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((num, *x.shape[1:]) if x.shape else (), x.dtype), shape)


def _key(shape: PyTree) -> Hashable:
    return tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(shape))


def _microbatches(num_microbatches: int, counters: frozenset[int]) -> int:
    """What a trace has of the number of micro-batches: whether there are several, or which is the last."""
    return num_microbatches if counters else min(num_microbatches, 2)
