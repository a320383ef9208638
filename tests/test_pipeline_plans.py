"""Models with layers under plans that cut them into stages: as their authors train them, held in parts, or refused."""

import os
from typing import Any

import jax
import numpy as np
import pytest
from contract import (
    EXACT,
    SUBJECTS,
    assert_close,
    author,
    train,
)
from plans import NUM_DEVICES, cover, num_parts
from zoo import BATCH, MODELS, TEXT, case, linen, next_token, tokens
from zoo_linen import SEQ, LinenDecoder

from cjax.plan import Plan

ALL = os.environ.get("CJAX_TEST_ALL") == "1"


def deep(rows: int) -> Any:
    """Nine layers, so that eight stages have room for a few more, and as many rows as a test wants."""
    traits = TEXT | {"batch": lambda: {"tokens": np.resize(tokens(seq=SEQ + 1), (rows, SEQ + 1))}}
    return case("linen", linen(LinenDecoder, 9, 0.0, False, True), next_token, blocks=(9,), **traits)


SUBJECTS |= {"linen_deep": deep(BATCH), "linen_deep_28": deep(28), "linen_deep_52": deep(52)}
# A model with a loss that says its weight and with layers of which some are frozen, beside the zoo's.
NAMES = [name for name in MODELS if MODELS[name].blocks] + ["linen_part_frozen", "linen_deep"]
LAYOUTS = (
    "pipeline=gpipe:2 microbatches=2",
    "pipeline=gpipe:2 microbatches=4 zero=3",
    "pipeline=1f1b:2 microbatches=2 tensor=2",
    "pipeline=1f1b:2 microbatches=4",
    "pipeline=1f1b:2 microbatches=4 zero=1",
    "pipeline=1f1b:2 microbatches=4 tensor=2 zero=3",
    "pipeline=1f1b:2 microbatches=4 zero=2 remat=block",
    "pipeline=zero_bubble:2 microbatches=2",
    "pipeline=zero_bubble:2 microbatches=4 tensor=2 zero=2",
    "pipeline=zero_bubble:2 microbatches=4 tensor=4 remat=dots",
)
DEEPER = (  # for models of four layers or more
    "pipeline=gpipe:4 microbatches=8",
    "pipeline=1f1b:4 microbatches=4",
    "pipeline=1f1b:4 microbatches=8 tensor=2",
    "pipeline=interleaved:2/2 microbatches=2",
    "pipeline=interleaved:2/2 microbatches=4 tensor=2 zero=1",
    "pipeline=zero_bubble:4 microbatches=8 tensor=2",
    "pipeline=zero_bubble:4 microbatches=4 zero=1",
    "pipeline=zero_bubble:2/2 microbatches=4 zero=3",
    "pipeline=zero_bubble:2/2 microbatches=2 tensor=2",
)
PARTICULAR = [
    ("linen_deep", "pipeline=1f1b:8 microbatches=8"),
    ("linen_deep", "pipeline=zero_bubble:8 microbatches=8"),
    ("linen_deep", "pipeline=interleaved:4/2 microbatches=8 tensor=2"),
    ("linen_deep", "pipeline=interleaved:2/4 microbatches=4 tensor=4"),
    ("linen_deep", "pipeline=zero_bubble:4/2 microbatches=4 tensor=2 zero=1"),
    ("linen_deep_28", "pipeline=1f1b:2 microbatches=7 tensor=4"),
    ("linen_deep_28", "pipeline=zero_bubble:2/2 microbatches=7 tensor=4"),
    ("linen_deep_52", "pipeline=1f1b:4 microbatches=13 tensor=2"),
    ("linen_deep_52", "pipeline=zero_bubble:4 microbatches=13 tensor=2"),
    ("linen_deep_52", "pipeline=gpipe:4 microbatches=13"),
    # An author's own loop has its layers moved about when they don't come in order, or don't divide.
    ("linen_scan", "pipeline=interleaved:2/2 microbatches=4 tensor=2 zero=1"),
    ("nnx_scan", "pipeline=zero_bubble:2/2 microbatches=4 zero=3"),
    # With grids, and with every way to split a sequence.
    ("linen_decoder", "pipeline=1f1b:2 microbatches=4 tensor=2d:4"),
    ("nnx_llama", "pipeline=1f1b:2 microbatches=2 tensor=2.5d:4/1"),
    ("linen_tied", "pipeline=zero_bubble:2 microbatches=4 tensor=2d:4"),
    ("linen_decoder", "pipeline=1f1b:2 microbatches=4 sequence=ring:2"),
    ("linen_masked_mean", "pipeline=zero_bubble:2 microbatches=4 sequence=ring:2 zero=1"),
    ("linen_encoder", "pipeline=zero_bubble:2 microbatches=4 sequence=all_to_all:2"),
    ("nnx_llama", "pipeline=interleaved:2/2 microbatches=4 sequence=all_to_all:2 zero=3"),
    ("nnx_scan", "pipeline=1f1b:2 microbatches=4 tensor=2 sequence=gather"),
]


def stages_of(plan: str) -> int:
    pipe = Plan.parse(plan).pipeline
    return pipe.size * pipe.chunks


def fits(name: str, plan: str) -> bool:
    """Whether a model has the layers, and the rows of a micro-batch can be shared."""
    parsed = Plan.parse(plan)
    blocks = SUBJECTS[name].blocks or MODELS["linen_tied"].blocks
    shards = NUM_DEVICES // parsed.model_size
    chunks_fit = len(blocks) == 1 or parsed.pipeline.schedule in ("1f1b", "gpipe", "zero_bubble")
    return (
        min(blocks) >= stages_of(plan)
        and BATCH // num_parts(plan) % shards == 0
        and chunks_fit
        and (len(blocks) == 1 or parsed.pipeline.chunks == 1)
    )


def pairs() -> list[tuple[str, str]]:
    every = [(name, plan) for name in NAMES for plan in (*LAYOUTS, *DEEPER) if fits(name, plan)]
    if ALL:
        return [*every, *PARTICULAR]
    shallow = cover(NAMES, LAYOUTS, 2)
    able = [name for name in NAMES if fits(name, DEEPER[1])]
    return sorted({*(pair for pair in (*shallow, *cover(able, DEEPER, 2)) if fits(*pair)), *PARTICULAR})


pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.mark.parametrize(("name", "plan"), pairs())
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    """Loss, aux, every gradient and, after three steps, parameters and random state."""
    with jax.enable_x64(True):
        given, wanted = train(name, plan, wide=True), author(name, num_parts(plan), wide=True)
        for step, other in zip(given.steps, wanted.steps, strict=True):
            assert_close(step.loss, other.loss, EXACT, "loss")
            assert_close(step.aux, other.aux, EXACT, "aux")
            assert_close(step.grads, other.grads, EXACT, "gradient of ")
        assert_close(given.params, wanted.params, EXACT, "parameter ")
        assert_close(given.carried, wanted.carried, EXACT, "carried ")
