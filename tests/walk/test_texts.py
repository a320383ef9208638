"""Greedy texts of programs that walk are those of a model in device memory."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from zoo_cjax import ROWS

import cjax
from cjax.models import T5

PROMPT = np.random.default_rng(0).integers(0, 101, (4, 5)).astype(np.int32)


@functools.cache
def program(name: str, plan: str) -> tuple[cjax.Program, Any]:
    kind, config, loss, batch, _ = ROWS[name]
    if kind is T5:
        config = dataclasses.replace(config, tied=False)  # tied and untrained, it says the same whatever it reads
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    made = cjax.parallelize(
        lambda rngs: kind(config, rngs=rngs),
        loss,
        None,
        shapes,
        plan,
        devices=jax.devices()[: 1 if plan == "data=1" else 2],
    )
    return made, made.init(0)


def text(name: str, plan: str, num: int, **options: Any) -> np.ndarray:
    made, state = program(name, plan)
    return np.asarray(cjax.generate(made, PROMPT, num, temperature=0, state=state, **options))


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("cjax_gpt", "data=2 offload=params+activations"),
        ("cjax_llama", "tensor=2 offload=params+activations"),
        ("cjax_t5", "data=2 zero=3 offload=params"),
    ],
)
def test_greedy_texts_are_those_in_device_memory(name: str, plan: str) -> None:
    # Of a GPT and a Llama the context is 12: the window slides at the end.
    wanted = text(name, "data=1", 9)
    np.testing.assert_array_equal(text(name, plan, 9), wanted)
    assert len({tuple(row) for row in wanted}) > 1, "rows differ, so that mixing them up would show"
