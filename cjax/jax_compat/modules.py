"""What Flax does on its own while modules are made and run: what it sows, misses, and notes down."""

import contextvars
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flax.linen as nn
from flax import nnx
from flax.errors import InvalidRngError

_watchers: contextvars.ContextVar[tuple[set[str], ...]] = contextvars.ContextVar("sown", default=())
_lock = threading.Lock()
_num_watching = 0
_sow: Any = None  # Flax's own, while it is watched; None while it is not


@contextmanager
def sown_collections() -> Iterator[set[str]]:
    """The collections that Linen modules sow into while this is open, in this thread.

    After init they look like any other collection, but carried from step to step they would grow or add up, and Flax
    offers no way to tell them apart: so `sow` is watched. The first to come puts the watch there and the last to go
    takes it away, in whatever order they do.

    Private: that `nn.Module.sow` can be replaced, and that modules call it by that name.
    Tried: Flax 0.12.8, 0.12.12.
    Public instead: `nn.intercept_methods`, which sees no method of `Module` itself; or a mark on what was sown.
    """
    global _num_watching, _sow
    sown = {"intermediates"}
    with _lock:
        if _sow is None:
            _sow, nn.Module.sow = nn.Module.sow, _watched
        _num_watching += 1
    _watchers.set((*_watchers.get(), sown))
    try:
        yield sown
    finally:
        with _lock:
            _num_watching -= 1
            if _num_watching == 0 and nn.Module.sow is _watched:  # or else somebody has put another around it
                nn.Module.sow, _sow = _sow, None
        _watchers.set(tuple(each for each in _watchers.get() if each is not sown))


def _watched(self: nn.Module, col: str, *args: Any, **kwargs: Any) -> bool:
    for sown in _watchers.get():
        sown.add(col)
    return (_sow or nn.Module.sow)(self, col, *args, **kwargs)  # the last may have gone while this was on its way


def missing_stream(error: InvalidRngError) -> str | None:
    """The random stream that a Linen module asked for and was not given, or None if the error is about another thing.

    Private: the text of the error.
    Tried: Flax 0.12.8, 0.12.12.
    Public instead: the name as a field of the error.
    """
    found = re.search(r'needs PRNG for "(.+?)"', str(error))
    return None if found is None else found[1]


_NOT_YET = 0  # as false as False, which an author may have written


@contextmanager
def without_eager_sharding() -> Iterator[None]:
    """The author's axis names are read, not applied, while an NNX model is built: there is no mesh yet.

    Private: that the flag is kept as it was given, so that `forget_eager_sharding` knows it again.
    Tried: Flax 0.12.8, 0.12.12.
    Public instead: as for `forget_eager_sharding`.
    """
    with nnx.use_eager_sharding(_NOT_YET):
        yield


def forget_eager_sharding(model: nnx.Module) -> None:
    """Undoes what `without_eager_sharding` left in the metadata of a model. That is part of the structure of its trees,
    and the author's own jitted functions would refuse them, or compile again.

    Private: the entry `eager_sharding` of the metadata, which Flax writes into every Variable.
    Tried: Flax 0.12.8, 0.12.12.
    Public instead: `nnx.use_eager_sharding` without a trace in what was made under it.
    """
    own = nnx.using_eager_sharding()
    for _, variable in nnx.iter_graph(model):
        if isinstance(variable, nnx.Variable):
            metadata = variable.get_metadata()
            if metadata.get("eager_sharding") is _NOT_YET:
                metadata["eager_sharding"] = own
                variable.update_from_state(type(variable).from_metadata(variable.get_raw_value(), metadata))
