"""The loss on one of several micro-batches, as something that adds up to that of the batch."""

from cjax.jax_compat.core import ClosedJaxpr
from cjax.trace.microbatches.combine import counters, lift
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource, first_line


def read_part(
    source: TraceSource,
    num_microbatches: int,
    *,
    pairs: bool = False,
    at_once: bool = False,
    adds_up: bool = True,
    apart: bool = False,
) -> Trace:
    """The loss on one of `num_microbatches` micro-batches.

    Args:
      source: the user's model and loss.
      num_microbatches: into how many the batch is cut.
      pairs, at_once: how it is read, see `cjax.trace.reading.read`.
      adds_up: whether it is put together from parts of any kind: micro-batches, or the devices' own rows.
      apart: whether each part is a batch of its own, so that no loss is refused.

    Raises:
      ValueError: the loss runs on the whole batch alone, or can't be put together from parts.
    """
    try:
        source.run(num_microbatches)
    except Exception as error:  # from the author's own code, which may know the size of the whole batch by heart
        if num_microbatches > 1:
            _blame_rows(source, num_microbatches, error)
        raise
    trace = source.read(num_microbatches, pairs=pairs, at_once=at_once)
    if not adds_up:
        return trace

    def lifted(trace: Trace, apart: bool) -> Trace:
        def again(rows: int) -> ClosedJaxpr:
            return source.flat(rows, trace, num_microbatches)

        return source.once(trace, apart, lambda: lift(trace, again, source.num_rows, shares=True, apart=apart))

    first = lifted(trace, apart)
    if num_microbatches == 1 or apart:
        return first
    found = counters(first, source.capture.random)
    # Which leaves are counters is known once the trace has been read, and that only the last micro-batch changes them
    # has to be in it: so it is made and read again, with that said.
    if not found:
        return first
    return lifted(source.read(num_microbatches, pairs=pairs, at_once=at_once, counters=found), False)


def _blame_rows(source: TraceSource, num: int, error: Exception) -> None:
    """Raises ValueError if `error`, of a loss on a micro-batch, does not come with the whole batch."""
    try:
        source.run()
    except Exception:  # it comes with any number of rows: the author's own, and for him to see as it is
        error.add_note(f"The loss ran on one of {num} micro-batches of this batch; see microbatches.")
        return
    said = first_line(error)
    ended = said if said.endswith((".", "!", "?")) else f"{said}."
    raise ValueError(
        f"The loss runs on the whole batch and not on one of {num} micro-batches of it: {ended} "
        "It, or a leaf of the batch, knows how many rows the batch has. Take the number from the batch that it is "
        "given (x.shape[0]), give each example a row of its own in every leaf, or use microbatches=1."
    ) from error
