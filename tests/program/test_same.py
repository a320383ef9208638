"""Which functions are one for a compiled program."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from cjax.program.same import function_key

ARRAY = np.ones(3)


class Scorer:
    def score(self, model: Any, batch: Any) -> Any:
        return model


def closing(thing: Any, other: Any = 1) -> Callable[..., Any]:
    return lambda model, batch, key=other: (thing, model)


def test_equal_code_over_equal_values_is_the_same() -> None:
    for thing in (1, 2.5, "a", None, (1, ("b",)), ARRAY, len, closing(3)):
        assert function_key(closing(thing)) == function_key(closing(thing))
        assert hash(function_key(closing(thing))) == hash(function_key(closing(thing)))
    assert function_key(closing(closing(3))) == function_key(closing(closing(3)))
    assert function_key(functools.partial(closing(1), key=2)) == function_key(functools.partial(closing(1), key=2))
    scorer = Scorer()
    assert function_key(scorer.score) == function_key(scorer.score)


def test_all_else_differs() -> None:
    things = [1, 1.0, True, 0.0, -0.0, "1", None, (1,), [1], [1], ARRAY, ARRAY.copy(), Scorer(), closing(1), closing(2)]
    keys = [function_key(closing(thing)) for thing in things]
    keys += [function_key(closing(1, other)) for other in (2, ARRAY)]
    keys += [function_key(functools.partial(closing(1), **more)) for more in ({}, {"key": 1})]
    keys += [function_key(Scorer().score), function_key(Scorer().score), function_key(lambda model, batch: model)]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])


def test_a_function_that_closes_over_itself() -> None:
    def again(model: Any, batch: Any) -> Any:
        return again

    assert function_key(again) == function_key(again)


def test_what_a_function_closes_over_may_change() -> None:
    number = 1

    def score(model: Any, batch: Any) -> Any:
        return number

    before = function_key(score)
    number = 2
    assert function_key(score) != before
