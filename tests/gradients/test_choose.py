"""Which kind of gradients which plan gets, and why: nothing is compiled."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from contract import batch_shape, subject

import cjax
from cjax.gradients import LaidOut, arrange_stages, choose
from cjax.sharding.place.local import LocalRows
from cjax.sharding.place.model import store_model
from cjax.trace.author.capture import capture
from cjax.trace.microbatches.part import read_part
from cjax.trace.source import TraceSource

BATCH = jax.ShapeDtypeStruct((32, 8), jnp.float32)


class Net(nn.Module):
    rate: float = 0.0
    norm: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for _ in range(2):
            x = x + nn.Dense(8)(jnp.tanh(x))
        x = nn.BatchNorm(use_running_average=False)(x) if self.norm else x
        return nn.Dropout(self.rate, deterministic=False)(x)


def squares(model: Any, x: jax.Array) -> jax.Array:
    return jnp.square(model(x)).mean()


@functools.cache
def source_of(name: str) -> TraceSource:
    nets = {"net": Net(), "dropout": Net(rate=0.5), "norm": Net(norm=True)}
    if name in nets:
        return TraceSource(capture(nets[name], squares, BATCH), BATCH)
    return TraceSource(subject(name, False).captured, batch_shape(name))


def laid_out(source: TraceSource, text: str) -> LaidOut:
    plan = cjax.Plan.parse(text).resolve(8)
    sizes = plan.axis_sizes()
    mesh: Any = jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes))
    trace = read_part(source, plan.microbatches)
    line = arrange_stages(trace, plan) if plan.pipeline.size > 1 else None
    return LaidOut(trace, store_model(source.capture, trace, plan, mesh, line.rows if line else {}), plan, mesh, line)


# A model, a plan, whether noise is measured; the kind, the cause, and whether the report says so.
ROWS = [
    ("net", "data=8", False, "whole", "one pass", False),
    ("net", "tensor=8", False, "whole", "one shard", False),
    ("net", "zero=3", False, "whole", "zero", False),
    ("nnx_decoder", "data=2 sequence=all_to_all:4", False, "whole", "positions", False),
    ("net", "tensor=8 reduce=float32", False, "whole", "one shard", False),
    ("norm", "data=8", False, "whole", "one pass", False),
    ("net", "tensor=8 microbatches=2", False, "parts", "one shard", False),
    ("net", "zero=3 microbatches=2", False, "parts", "zero", False),
    ("net", "zero=3 microbatches=2", True, "parts", "zero", False),
    ("norm", "data=8 microbatches=2", False, "parts", "rows", True),
    ("nnx_decoder", "data=2 sequence=all_to_all:4 microbatches=2", False, "parts", "positions", True),
    ("net", "data=8 microbatches=2", False, "own parts", None, False),
    ("net", "tensor=8 microbatches=4 overlap=2", False, "parts", "one shard", False),
    ("dropout", "data=2 tensor=4 microbatches=2 overlap=2", False, "own parts", None, False),
    ("nnx_decoder", "data=2 tensor=4 microbatches=2 overlap=2", False, "own parts", None, False),  # counts its draws
    ("net", "zero=2 microbatches=2 tensor=2", False, "own parts", None, False),
    ("dropout", "data=8 microbatches=4", False, "own parts", None, False),
    ("net", "data=8", True, "own parts", None, False),
    ("dropout", "data=8", True, "own parts", None, False),
    ("dropout", "data=4 tensor=2 reduce=bfloat16", False, "own parts", None, False),
    ("net", "data=1 tensor=4 pipeline=gpipe:2 microbatches=2", False, "pipeline", "one shard", False),
    ("net", "data=4 pipeline=gpipe:2 microbatches=2 zero=3", False, "pipeline", "zero", False),
    ("net", "data=4 pipeline=gpipe:2 microbatches=2", False, "own pipeline", None, False),
    ("net", "data=8 microbatches=2 offload=optimizer", False, "parts", "walk", False),
    ("net", "data=8 offload=optimizer", False, "parts", "walk", False),
    ("net", "data=4 pipeline=gpipe:2 microbatches=2", True, "own pipeline", None, False),
]


@pytest.mark.parametrize(("name", "plan", "measures", "kind", "cause", "is_told"), ROWS)
def test_which_plan_gets_which(
    name: str, plan: str, measures: bool, kind: str, cause: str | None, is_told: bool
) -> None:
    source = source_of(name)
    choice = choose(source, laid_out(source, plan), measures)
    assert (choice.kind, choice.reason and choice.reason.cause) == (kind, cause), choice.reason
    assert isinstance(choice.local, LocalRows) == kind.startswith("own")
    assert len(choice.notes) == is_told


def test_a_reason_is_a_sentence_that_goes_on() -> None:
    source = source_of("norm")
    choice = choose(source, laid_out(source, "data=8 microbatches=2"))
    assert choice.reason is not None and choice.reason.text == "Net/BatchNorm_0 looks at the whole micro-batch"
    assert choice.notes == (f"{choice.reason.text}, so gradients are reduced once per micro-batch",)


REFUSED = [
    ("net", "zero=3 reduce=float32", False, "own sum of gradients, and zero=3 reduces .* or write zero=2"),
    ("norm", "data=8 reduce=float32", False, "gradients, and Net.BatchNorm_0 .*micro-batch: leave `reduce` out"),
    ("nnx_decoder", "data=2 sequence=all_to_all:4 reduce=float32", False, "positions are split: leave `reduce` out"),
    ("net", "tensor=8", True, "no two devices see different examples: add microbatches=2"),
    ("net", "zero=3", True, "zero=3 reduces gradients during the backward pass: add microbatches=2"),
    ("norm", "data=8", True, "with data=8 Net.BatchNorm_0 looks at the whole micro-batch: add microbatches=2"),
    ("net", "data=1 tensor=4 pipeline=gpipe:2 microbatches=2", True, "examples: take a pipeline with data > 1"),
    ("net", "data=4 pipeline=gpipe:2 microbatches=2 zero=3", True, "backward pass: take a pipeline with data > 1"),
    ("net", "data=8 microbatches=2 offload=optimizer", True, "none of all layers at once: leave measure_noise out"),
    ("net", "data=8 microbatches=4 overlap=2", True, "adds up those of 2 as it makes them: leave out overlap=2, or"),
    (
        "norm",
        "tensor=8 microbatches=4 overlap=4",
        False,
        "changes batch_stats.*mean.*for the next: leave out overlap=4",
    ),
]


@pytest.mark.parametrize(("name", "plan", "measures", "said"), REFUSED)
def test_what_needs_a_devices_own_sums_is_refused_without_them(name: str, plan: str, measures: bool, said: str) -> None:
    source = source_of(name)
    loss = laid_out(source, plan)
    with pytest.raises(ValueError, match=said):
        choose(source, loss, measures)


@pytest.mark.parametrize("plan", ["data=8", "data=8 offload=optimizer", "data=8 microbatches=2 offload=optimizer"])
def test_a_weight_that_is_trained_is_refused_whoever_adds_up(plan: str) -> None:
    def gated(model: Any, x: jax.Array) -> cjax.Mean:
        gates = jax.nn.sigmoid(model(x))
        return cjax.Mean((gates * x).sum(), gates.sum())

    source = TraceSource(capture(Net(), gated, BATCH), BATCH)
    with pytest.raises(ValueError, match=r"The weight of a cjax.Mean .* depends on"):
        choose(source, laid_out(source, plan))
