"""What stands behind arrays while a trace is evaluated: it is known by the arrays themselves, which hooks hand on."""

import contextlib
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar


class Stands(Protocol):
    """What stands behind `value`; it holds the array, so that nothing else takes its id."""

    @property
    def value(self) -> Any: ...


K = TypeVar("K", bound=Stands)


class Beside(Generic[K]):
    """Arrays of which more is known than they say."""

    def __init__(self) -> None:
        self._made: dict[int, K] | None = None

    @contextlib.contextmanager
    def made(self) -> Iterator[None]:
        """While a trace is evaluated: nothing of it is kept behind."""
        before, self._made = self._made, {}
        try:
            yield
        finally:
            self._made = before

    def has(self, value: Any) -> bool:
        return self._of(value) is not None

    def _of(self, value: Any) -> K | None:
        made = (self._made or {}).get(id(value))
        return made if made is not None and made.value is value else None
