"""Models with layers under plans that cut them into stages: as their authors train them, held in parts, or refused."""

import os
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import (
    SUBJECTS,
    assert_trained_alike,
    author,
    begun,
    first_values,
    norm,
    on_host,
    program_of,
    subject,
)
from flax import nnx
from plans import NUM_DEVICES, features, num_parts
from starts import start
from zoo import BATCH, MODELS, TEXT, case, linen, next_token, regression, regression_batch, squared_error, tokens
from zoo_linen import SEQ, Layered, LinenDecoder

import cjax
from cjax.pipeline.schedule import forward_only, one_f_one_b
from cjax.plan import Plan

ALL = os.environ.get("CJAX_TEST_ALL") == "1"


def deep(rows: int) -> Any:
    """Nine layers, so that eight stages have room for a few more, and as many rows as a test wants."""
    traits = TEXT | {"batch": lambda: {"tokens": np.resize(tokens(seq=SEQ + 1), (rows, SEQ + 1))}}
    return case("linen", linen(LinenDecoder, 9, 0.0, False, True), next_token, blocks=(9,), **traits)


def layered(rows: int) -> Any:
    """Nine layers of few equations, for what is a matter of schedules alone."""

    def batch() -> Any:
        return jax.tree.map(lambda x: np.resize(x, (rows, *x.shape[1:])), regression_batch())

    return case("linen", lambda _: Layered(9), regression, batch, blocks=(9,))


class LinenNormed(nn.Module):
    """Running averages before the layers, in each of them, and behind them."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        def norm(x: jax.Array, name: str) -> jax.Array:
            return nn.BatchNorm(not train, momentum=0.8, name=name)(x)

        x = norm(nn.Dense(24)(x), "first")
        for i in range(4):
            x = x + nn.relu(norm(nn.Dense(24, name=f"dense_{i}")(x), f"norm_{i}"))
        return nn.Dense(1)(norm(x, "last"))


class Remembering(nn.Module):
    """Subtracts what it has seen so far: a micro-batch decides about the next one."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x, seen = nn.Dense(24)(x), self.variable("seen", "mean", jnp.zeros, (24,))
        x, seen.value = x - seen.value, 0.9 * seen.value + 0.1 * x.mean(0)
        for _ in range(4):
            x = x + nn.relu(nn.Dense(24)(x))
        return nn.Dense(1)(x)


class Gathering(nn.Module):
    """Layers read what was put together behind them all."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x, seen, new = nn.Dense(24)(x), self.variable("seen", "mean", jnp.zeros, (24,)), []
        for _ in range(4):
            x = x + nn.relu(nn.Dense(24)(x))
            new.append(0.9 * seen.value + 0.1 * x.mean(0))
        if train and not self.is_initializing():
            seen.value = sum(new) / 4
        return nn.Dense(1)(x)


class TwoLayered(nn.Module):
    """Two stacks of few equations, layers of the second reading what the first has made."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x, y = nn.Dense(24)(x), nn.Dense(16)(x)
        for _ in range(3):
            x = x + nn.Dense(24)(nn.tanh(nn.Dense(32)(x)))
        for _ in range(2):
            y = y + nn.Dense(16)(nn.relu(nn.Dense(20)(y)) * nn.Dense(20)(x))
        return nn.Dense(1)(y)


class NNXNormedBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.dense, self.norm = nnx.Linear(24, 24, rngs=rngs), nnx.BatchNorm(24, momentum=0.8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(self.norm(self.dense(x)))


class NNXNormed(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.last = nnx.Linear(10, 24, rngs=rngs), nnx.Linear(24, 1, rngs=rngs)
        self.blocks = nnx.List([NNXNormedBlock(rngs) for _ in range(4)])

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


SUBJECTS |= {
    "linen_remembering": case(
        "linen", lambda _: Remembering(), regression, regression_batch, blocks=(4,), couples=True
    ),
    "linen_gathering": case("linen", lambda _: Gathering(), regression, regression_batch, blocks=(4,), couples=True),
    "linen_normed": case("linen", lambda _: LinenNormed(), regression, regression_batch, blocks=(4,), couples=True),
    "nnx_normed": case(
        "nnx", lambda _: lambda rngs: NNXNormed(rngs), squared_error, regression_batch, blocks=(4,), couples=True
    ),
}
SUBJECTS |= {"linen_deep": deep(BATCH), "linen_deep_28": deep(28), "linen_deep_52": deep(52)}
SUBJECTS |= {"layered": layered(BATCH), "layered_28": layered(28)}
SUBJECTS["two_layered"] = case("linen", lambda _: TwoLayered(), regression, regression_batch, blocks=(3, 2))
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
    # Running averages, which micro-batches make one after the other.
    ("linen_normed", "pipeline=1f1b:4 microbatches=4"),
    ("linen_normed", "pipeline=zero_bubble:2/2 microbatches=4 zero=1"),
    ("linen_normed", "pipeline=interleaved:2/2 microbatches=2 zero=3"),
    ("nnx_normed", "pipeline=1f1b:2 microbatches=4 tensor=2"),
    ("nnx_normed", "pipeline=gpipe:4 microbatches=4"),
    # With grids, and with every way to split a sequence.
    ("linen_decoder", "pipeline=1f1b:2 microbatches=4 tensor=2d:4"),
    ("nnx_llama", "pipeline=1f1b:2 microbatches=2 tensor=2.5d:4/1"),
    ("nnx_llama", "pipeline=zero_bubble:2 microbatches=4 sequence=ring:2 zero=1"),
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


def every_pair() -> list[tuple[str, str]]:
    """What `make test-all` takes, each pair once."""
    crossed = ((name, plan) for name in NAMES for plan in (*LAYOUTS, *DEEPER) if fits(name, plan))
    return [*dict.fromkeys((*crossed, *PARTICULAR))]


# By default: models in which stages have something of their own to keep apart, each once,
ONCE = [
    ("linen_scan", "pipeline=interleaved:2/2 microbatches=4 tensor=2 zero=1"),
    ("linen_normed", "pipeline=interleaved:2/2 microbatches=2 zero=3"),
    ("nnx_normed", "pipeline=gpipe:4 microbatches=4"),
    ("nnx_llama", "pipeline=interleaved:2/2 microbatches=4 sequence=all_to_all:2 zero=3"),
    ("nnx_llama", "pipeline=zero_bubble:2 microbatches=4 sequence=ring:2 zero=1"),
    ("linen_masked_mean", "pipeline=1f1b:2 microbatches=4 tensor=2 zero=3"),
    ("nnx_scan", "pipeline=1f1b:2 microbatches=4 tensor=2 sequence=gather"),
    ("linen_mixer", "pipeline=zero_bubble:2/2 microbatches=4 zero=3"),
    ("linen_moe_soft", "pipeline=1f1b:2 microbatches=4 zero=1"),
    ("linen_tied", "pipeline=1f1b:4 microbatches=8 tensor=2"),
    ("two_layered", "pipeline=gpipe:2 microbatches=2"),
    # and every other plan with a model that compiles quickly.
    ("layered", "pipeline=1f1b:8 microbatches=8"),
    ("layered", "pipeline=interleaved:4/2 microbatches=8 tensor=2"),
    ("layered", "pipeline=zero_bubble:4/2 microbatches=4 tensor=2 zero=1"),
    ("layered_28", "pipeline=zero_bubble:2/2 microbatches=7 tensor=4"),
]


# What another plan of the same schedule has too, with more to it.
ALIKE = (
    "pipeline=1f1b:2 microbatches=4",
    "pipeline=1f1b:4 microbatches=4",
    "pipeline=gpipe:4 microbatches=8",
    "pipeline=zero_bubble:2 microbatches=2",
    "pipeline=zero_bubble:4 microbatches=8 tensor=2",
    "pipeline=1f1b:2 microbatches=2 tensor=2",
    "pipeline=gpipe:2 microbatches=4 zero=3",
    "pipeline=interleaved:2/2 microbatches=2",
    "pipeline=zero_bubble:2/2 microbatches=2 tensor=2",
)


def pairs() -> list[tuple[str, str]]:
    rest = [plan for plan in (*LAYOUTS, *DEEPER) if plan not in {plan for _, plan in ONCE} and plan not in ALIKE]
    return every_pair() if ALL else [*ONCE, *(("layered", plan) for plan in rest)]


def test_default_run_covers_every_kind_of_model_and_plan() -> None:
    """Every plan here but those that others are like; every model somewhere (tests/test_tables.py). Models with rows of
    their own have the number in their name."""
    chosen = pairs()
    assert len({*chosen}) == len(chosen) and all(fits(*pair) or re.search(r"_\d+$", pair[0]) for pair in chosen)
    assert {plan for _, plan in chosen} >= {*LAYOUTS, *DEEPER} - {*ALIKE}
    words = {word for plan in (*LAYOUTS, *DEEPER) for word in features(plan)}
    assert {word for _, plan in chosen for word in features(plan)} >= words
    assert {len(SUBJECTS[name].blocks) for name, _ in chosen} == {1, 2}


@pytest.mark.full(
    "layered-pipeline=1f1b:8 microbatches=8",
    "layered-pipeline=interleaved:4/2 microbatches=8 tensor=2",
    "layered-pipeline=zero_bubble:2 microbatches=4 tensor=2 zero=2",
    "layered-pipeline=zero_bubble:2 microbatches=4 tensor=4 remat=dots",
    "layered-pipeline=zero_bubble:4 microbatches=4 zero=1",
    "layered-pipeline=zero_bubble:4/2 microbatches=4 tensor=2 zero=1",
    "layered_28-pipeline=zero_bubble:2/2 microbatches=7 tensor=4",
    "linen_masked_mean-pipeline=1f1b:2 microbatches=4 tensor=2 zero=3",
    "linen_normed-pipeline=interleaved:2/2 microbatches=2 zero=3",
    "nnx_llama-pipeline=interleaved:2/2 microbatches=4 sequence=all_to_all:2 zero=3",
    "two_layered-pipeline=gpipe:2 microbatches=2",
)
@pytest.mark.parametrize(("name", "plan"), pairs())
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    """Loss, aux, every gradient and, after three steps, parameters and random state."""
    assert_trained_alike(name, plan)


LOW = [
    ("linen_tied", "pipeline=1f1b:4 microbatches=8 tensor=2"),
    ("nnx_llama", "pipeline=zero_bubble:2 microbatches=4 zero=3"),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan"), LOW if ALL else LOW[1:])
def test_bfloat16_is_as_good_as_on_one_device(name: str, plan: str) -> None:
    batch, wanted = subject(name, wide=False).batches[0], author(name, num_parts(plan), wide=False).steps[0]

    def error(plan: str) -> float:
        program = program_of(name, f"{plan} precision=bfloat16", wide=False)
        grads = on_host(program.value_and_grad(begun(program, name, wide=False), batch)[1])
        return norm(jax.tree.map(lambda a, b: a - b, grads, wanted.grads))

    assert 0 < error(plan) <= 1.5 * error(f"data=1 microbatches={num_parts(plan)}")


@pytest.mark.full
@pytest.mark.parametrize("name", ["layered", *(["linen_tied"] if ALL else [])])
def test_a_table_of_the_users_own(name: str) -> None:
    """The papers' 1F1B, in which stages hold p - r micro-batches: the same numbers, in other ticks."""
    model, loss, batch = SUBJECTS[name].make(np.float32)
    plan = "data=1 pipeline=2 microbatches=4"

    def gradients(**given: Any) -> Any:
        devices = jax.devices()[:2]
        program = cjax.parallelize(model, loss, optax.sgd(1e-2), batch, plan, devices=devices, **given)
        return program, on_host(program.value_and_grad(program.init(0), batch))

    table = one_f_one_b(2, 4, lead=1)
    (own, given), (_, wanted) = gradients(schedule=table), gradients()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), given, wanted)
    assert own._composed.line.schedule is table
    for other, said in ((one_f_one_b(2, 2), "write pipeline=1f1b:2 microbatches=2"), (forward_only((0, 1), 4), "no B")):
        with pytest.raises(ValueError, match=said):
            gradients(schedule=other)


@pytest.mark.full
def test_says_when_stages_mostly_wait() -> None:
    def notes(plan: str) -> Any:
        return [note for note in program_of("linen_decoder", plan, wide=False)._composed.notes if "wait" in note]

    (note,) = notes("pipeline=1f1b:4")
    assert note == "stages wait 75% of the time with microbatches=1: take 4 for each stage, 16, or more"
    assert not notes("pipeline=1f1b:2 microbatches=4")


# -- evaluation -------------------------------------------------------------------------------------------------------
def logits(model: Any, batch: Any) -> Any:
    return model(batch["tokens"][:, :-1], train=False)


EVALUATED: list[tuple[str, str, Any]] = [("linen_tied", "pipeline=zero_bubble:2/2 microbatches=4 zero=3", logits)]
if ALL:  # two stacks are evaluated in tests/test_pipeline_stages.py too
    EVALUATED += [
        ("linen_masked_mean", "pipeline=1f1b:2 microbatches=4 sequence=ring:2", None),
        ("nnx_scan", "pipeline=interleaved:2/2 microbatches=4", None),
        ("linen_decoder", "pipeline=1f1b:2 microbatches=4", None),
        ("linen_encoder", "pipeline=gpipe:2 microbatches=4 tensor=2", None),
        ("linen_masked_mean", "pipeline=1f1b:2 microbatches=4", None),
        ("linen_encoder_decoder", "pipeline=1f1b:2 microbatches=4", None),
        ("linen_decoder", "pipeline=1f1b:2 microbatches=4 sequence=ring:2", None),
    ]


@pytest.mark.parametrize(("name", "plan", "function"), EVALUATED)
def test_evaluates_batches_of_any_size(name: str, plan: str, function: Any) -> None:
    """Whole micro-batches go through the pipeline together; rows left over, or too few, go behind them."""
    batch = subject(name, wide=False).batches[0]
    piped, author = program_of(name, plan, wide=False), subject(name, wide=False).captured
    trees, sizes = first_values(name, wide=False), (16, 11, 3)
    batches = [jax.tree.map(lambda x, n=n: x[:n], batch) for n in sizes]
    given = piped.evaluate(start(piped, trees, moments=True), batches, function)

    def call(model: Any, row: Any, key: Any, train: bool) -> Any:
        return jnp.zeros(()), function(model, row)[0]

    def alone(row: Any) -> Any:
        """Each row by itself: when a model is scored, rows do not meet."""
        row = jax.tree.map(lambda x: x[None], row)
        return author.apply(*trees, row, jax.random.key(0), False, *([call] if function else []))[:2]

    losses, aux = jax.jit(jax.vmap(alone))(batch)
    weights = batch["mask"][:, 1:].sum(1) if name == "linen_masked_mean" else np.ones(BATCH)

    def joined(rows: Any) -> Any:
        return np.concatenate([np.asarray(rows)[:n] for n in sizes])

    wanted = joined(aux) if function else {"loss": np.average(joined(losses), weights=joined(weights))}
    if not function and aux:
        wanted["aux"] = jax.tree.map(lambda rows: joined(rows).mean(), aux)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), given, wanted)


# -- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.full("linen_deep-pipeline=interleaved:4/2 microbatches=2-write microbatches=4")
@pytest.mark.parametrize(
    ("name", "plan", "said"),
    [
        ("linen_lstm", "pipeline=1f1b:2", "layers that repeat, and none were found.*leave `pipeline` out"),
        ("linen_decoder", "pipeline=1f1b:8 microbatches=8", "8 layers for 8 stages.*has 4: write pipeline=1f1b:4"),
        # Three stages would not divide eight devices.
        ("linen_encoder", "pipeline=1f1b:4 microbatches=4", "4 layers for 4 stages.*has 3: write pipeline=1f1b:2, or"),
        ("linen_encoder", "pipeline=interleaved:2/2 microbatches=2", "2 chunks each.*has 3: write pipeline=1f1b:2, or"),
        ("linen_remembering", "pipeline=1f1b:2 microbatches=2", "loss depends on seen/mean, which it makes anew"),
        ("linen_gathering", "pipeline=1f1b:2 microbatches=2", "makes seen/mean of the examples in one place"),
        ("linen_tied", "pipeline=interleaved:4/1 microbatches=4", "2 or more chunks"),
        ("linen_deep", "pipeline=interleaved:4/2 microbatches=2", "write microbatches=4"),
        ("linen_encoder_decoder", "pipeline=1f1b:2 microbatches=1", "2 stacks of layers.*write microbatches=2"),
        ("linen_decoder", "pipeline=1f1b:4 microbatches=5", "does not divide a batch of 16 rows"),
        ("linen_decoder", "pipeline=1f1b:2 microbatches=8", "2 rows in each micro-batch, which 4 data-par"),
    ],
)
def test_refuses_what_no_pipeline_can_be(name: str, plan: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        program_of(name, plan, wide=False)


def test_layers_whose_weights_are_all_tied_have_a_name() -> None:
    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            layer = nn.Dense(8, name="layer", use_bias=False)
            x = jnp.tanh(2 * jnp.sin(layer(nn.Dense(8)(x))))
            x = jnp.tanh(2 * jnp.sin(layer(x)))
            return nn.Dense(3)(nn.Dense(8, use_bias=False)(x))

    x = np.ones((16, 4), np.float32)
    with pytest.raises(ValueError, match=r"needs 4 layers for 4 stages, and the stack of 'layer/kernel' has 2"):
        cjax.parallelize(Tied(), lambda model, x: (model(x) ** 2).mean(), optax.sgd(0.1), x,
                         "pipeline=gpipe:4 microbatches=2")  # fmt: skip
