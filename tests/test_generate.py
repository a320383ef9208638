"""Greedy texts are the same tokens on one device and under every plan that generates."""

import dataclasses
import functools
import os
from typing import Any

import jax
import numpy as np
import pytest
from starts import begin
from zoo_cjax import ROWS

import cjax
from cjax.models import GPT, T5

PLANS = ["data=8", "zero=3", "zero=1/4", "tensor=8", "data=2 tensor=4", "data=4 tensor=2 zero=3", "tensor=2 zero=1"]
NAMES = ["cjax_gpt", "cjax_llama", "cjax_t5"]
PROMPT = np.random.default_rng(0).integers(0, 101, (8, 5)).astype(np.int32)


@functools.cache
def program(name: str, plan: str = "data=1", num: int = 1) -> cjax.Program:
    kind, config, loss, batch, _ = ROWS[name]
    if kind is T5:
        config = dataclasses.replace(config, tied=False)  # tied and untrained, it says the same whatever it reads
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    return cjax.parallelize(lambda rngs: kind(config, rngs=rngs), loss, None, shapes, plan, devices=jax.devices()[:num])


@functools.cache
def alone(name: str) -> np.ndarray:
    one = program(name)
    return np.asarray(cjax.generate(one.model(begin(one)), PROMPT, 12, temperature=0))


# Each model under three of the plans, and each plan with a model at least; by default each model under one.
PAIRS = [(name, plan) for i, name in enumerate(NAMES) for j, plan in enumerate(PLANS) if (i + j) % 3 == 0 or j == 4]
if os.environ.get("CJAX_TEST_ALL") != "1":
    PAIRS = [
        ("cjax_llama", "data=4 tensor=2 zero=3"),
        ("cjax_t5", "data=2 tensor=4"),
    ]


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan"), PAIRS)
def test_greedy_texts_are_those_of_one_device(name: str, plan: str) -> None:
    made = program(name, plan, 8)
    found = cjax.generate(made, PROMPT, 12, temperature=0, state=begin(made))
    np.testing.assert_array_equal(found, alone(name))
    assert len({tuple(row) for row in alone(name)}) > 1, "rows differ, so that mixing them up would show"


@pytest.mark.full
def test_padding_travels_with_its_rows() -> None:
    present = np.arange(5) < np.array([[5], [3], [2], [5], [4], [1], [5], [2]])
    one, eight = program("cjax_t5"), program("cjax_t5", "data=2 tensor=4", 8)
    options: dict[str, Any] = {"temperature": 0, "present": present}
    found = cjax.generate(eight, PROMPT, 6, state=begin(eight), **options)
    np.testing.assert_array_equal(found, cjax.generate(one, PROMPT, 6, state=begin(one), **options))


@pytest.mark.full("pipeline=1f1b:2 microbatches=2")
@pytest.mark.parametrize("plan", ["tensor=2d:4", "tensor=2 sequence=ring:2", "pipeline=1f1b:2 microbatches=2"])
def test_other_plans_say_what_to_write(plan: str) -> None:
    made = program("cjax_gpt", plan, 8)
    with pytest.raises(ValueError, match='program.replan\\("tensor=8"\\)'):
        cjax.generate(made, PROMPT, 2, temperature=0, state=begin(made))


def test_what_cannot_be_said_is_refused() -> None:
    made = program("cjax_gpt", "data=8", 8)
    state = begin(made)
    with pytest.raises(ValueError, match="state=state"):
        cjax.generate(made, PROMPT, 2, temperature=0)
    with pytest.raises(ValueError, match="give 8 or 16"):
        cjax.generate(made, np.concatenate([PROMPT, PROMPT[:1]]), 2, temperature=0, state=state)
    model = made.model(state)
    assert isinstance(model, GPT)
    with pytest.raises(ValueError, match="leave it out"):
        cjax.generate(model, PROMPT, 2, temperature=0, state=state)
    with pytest.raises(TypeError, match="it continues texts"):
        cjax.generate(program, PROMPT, 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="longer than this model's context"):
        cjax.generate(model, np.zeros((2, 13), np.int32), 2, temperature=0)
    walked = program("cjax_gpt", "budget=1GiB offload=params", 8)
    for source, given in ((made, state), (walked, begin(walked))):
        with pytest.raises(TypeError, match=r"generate\(\) got an unexpected keyword argument 'topk'"):
            cjax.generate(source, PROMPT, 2, topk=3, state=given)  # type: ignore[call-arg]


WRONG: dict[str, tuple[Any, str]] = {
    "out of the vocabulary": (np.where(PROMPT == PROMPT[2, 3], 101, PROMPT), r"holds 101 at .*0 to 100"),
    "negative": (np.where(np.arange(5) == 4, -1, PROMPT), r"holds -1 at \[0, 4\]"),
    "floats": (PROMPT.astype(np.float32), r"not float32\[8, 5\]"),
    "one text": (PROMPT[0], r"not int32\[5\]"),
    "empty": (PROMPT[:, :0], r"not int32\[8, 0\]"),
    "a list": (["hello"], "as integers.*tokenizer"),
    "on the devices": (jax.numpy.asarray(PROMPT + 200), "outside this model's vocabulary of 101"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_prompt_that_is_none_is_refused(name: str) -> None:
    tokens, said = WRONG[name]
    made = program("cjax_gpt")
    state = begin(made)
    with pytest.raises(ValueError, match=said):
        cjax.generate(made, tokens, 2, temperature=0, state=state)
    with pytest.raises(ValueError, match=said):
        cjax.generate(made.model(state), tokens, 2, temperature=0)


def test_numbers_that_make_no_sense_are_refused() -> None:
    model = program("cjax_gpt").model(begin(program("cjax_gpt")))
    for num in (-3, 2.5, "3", True):
        with pytest.raises(ValueError, match="num_tokens="):
            cjax.generate(model, PROMPT, num, temperature=0)  # type: ignore[arg-type]
    for options in ({"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": 0, "stop": [101]}):
        with pytest.raises(ValueError, match="generate got"):
            cjax.generate(model, PROMPT, 2, jax.random.key(0), **options)  # type: ignore[arg-type]
