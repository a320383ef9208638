"""Flax's `sow` is watched while models are made, and afterwards is what it was, in whatever order they were."""

import threading
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import pytest

from cjax.trace.author.linen import sown_collections

SOW = nn.Module.sow


class Sows(nn.Module):
    name_of: str = "losses"

    @nn.compact
    def __call__(self, x: Any) -> Any:
        self.sow(self.name_of, "x", x)
        return x


def sow(name: str) -> None:
    Sows(name).apply({}, jnp.ones(1), mutable=[name])


def test_one_inside_another_and_one_that_goes_first() -> None:
    first, second = sown_collections(), sown_collections()
    found = first.__enter__()
    sow("a")
    more = second.__enter__()
    sow("b")
    first.__exit__(None, None, None)
    sow("c")
    second.__exit__(None, None, None)
    sow("d")
    assert (found, more) == ({"intermediates", "a", "b"}, {"intermediates", "b", "c"})
    assert nn.Module.sow is SOW


def test_threads_watch_their_own() -> None:
    both, found = threading.Barrier(2, timeout=30), {}

    def watch(name: str) -> None:
        with sown_collections() as sown:
            both.wait()
            sow(name)
            both.wait()
        found[name] = sown

    threads = [threading.Thread(target=watch, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: {"intermediates", name} for name in ("a", "b")}
    assert nn.Module.sow is SOW


def test_an_error_inside_and_anothers_patch_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), sown_collections():
        raise KeyError
    assert nn.Module.sow is SOW
    seen: list[str] = []
    with sown_collections():
        watched: Any = nn.Module.sow
        monkeypatch.setattr(nn.Module, "sow", lambda self, col, *more: seen.append(col) or watched(self, col, *more))
    with sown_collections() as sown:
        sow("a")
    sow("b")
    assert seen == ["a", "b"] and sown == {"intermediates", "a"}
    monkeypatch.undo()
    with sown_collections():
        pass
    assert nn.Module.sow is SOW
