"""What a tracer answers."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax import core


@contextmanager
def quick_attribute_errors(tracers: Any) -> Iterator[None]:
    """Keeps tracing linear in the number of random draws and statistics, where JAX makes it quadratic.

    NNX asks each new value of a Variable for its `sharding`. A tracer answers with an AttributeError, whose text, which
    nobody reads, takes a search through the whole trace (9 s for the constructor of 48 layers).

    Private: the classes of tracers, which are given a property of that name while this is open.
    Tried: JAX 0.10.2; of 0.11.2 and 0.12.0.1 the text is short, and from 0.12 on nothing is changed.
    Public instead: JAX 0.11 or later as the oldest that cjax supports.

    Args:
      tracers: a tree; the classes of those in it are changed.
    """
    kinds = {type(leaf) for leaf in jax.tree.leaves(tracers) if isinstance(leaf, core.Tracer)}
    slow = [kind for kind in kinds if "sharding" not in vars(kind)] if jax.__version_info__ < (0, 12) else []

    def sharding(self: Any) -> Any:
        raise AttributeError("A tracer has no sharding: see `jax.typeof(x).sharding`.")

    for kind in slow:
        kind.sharding = property(sharding)  # type: ignore[misc]
    try:
        yield
    finally:
        for kind in slow:
            del kind.sharding  # type: ignore[misc]
