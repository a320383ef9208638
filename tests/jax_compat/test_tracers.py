"""Tracers are asked for what they don't have, quickly, and afterwards are what they were."""

from typing import Any

import jax
import pytest

from cjax.jax_compat.tracers import quick_attribute_errors


def test_a_tracer_says_quickly_that_it_has_no_sharding(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Any] = []

    def refusal(x: Any) -> str:
        with pytest.raises(AttributeError, match="sharding") as error:
            x.sharding  # noqa: B018
        assert getattr(x, "sharding", None) is None
        return str(error.value)

    def traced(x: Any) -> Any:
        # What JAX looks for through the whole trace, for the text.
        monkeypatch.setattr(type(x), "_origin_msg", lambda self: searched.append(self) or "")
        own, before = refusal(x), dict(vars(type(x)))
        assert bool(searched) == (jax.__version_info__ < (0, 11)), "whether JAX still searches has changed"
        searched.clear()
        with quick_attribute_errors({"tracer": x, "array": 1.0}):
            refusal(x * 2)
        with pytest.raises(KeyError), quick_attribute_errors(x), quick_attribute_errors(x):
            raise KeyError
        assert not searched
        assert vars(type(x)) == before and refusal(x) == own
        return x

    jax.make_jaxpr(traced)(1.0)
    with quick_attribute_errors(jax.numpy.ones(1)):
        assert jax.numpy.ones(1).sharding is not None
