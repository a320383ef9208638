"""Optimizers x plans: given the same gradients, the same parameters and the same state as on one device; whole steps as
the model's author would take them; state in parts wherever its parameter's is."""

import functools
import math
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import (
    EXACT,
    NUM_STEPS,
    SUBJECTS,
    assert_close,
    author,
    begun,
    bytes_on_a_device,
    first_values,
    norm,
    on_host,
    program_of,
    subject,
    train,
    trees,
)
from optimizers import OPTIMIZERS, OURS
from plans import cover, num_parts
from starts import start
from zoo import BATCH as ROWS
from zoo import case, regression, regression_batch
from zoo_linen import Layered

import cjax
from cjax.optim import ParamsEmaState, find_ema, lamb, noise_scale, params_ema
from cjax.optim.noise_scale import DECAY
from cjax.plan import Plan
from cjax.program import Given, Program
from cjax.program.compose import compose
from cjax.trace.source import TraceSource
from cjax.tree import PyTree, leaf_names

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
# Each kind of plan once; where it matters to an optimizer how layers are kept, more.
PLANS = (
    "data=8",
    "zero=1",
    "zero=3/4",
    "tensor=4",
    "tensor=8 microbatches=2",
    "data=4 tensor=2 zero=2",
    "data=2 tensor=4 zero=3",
    "tensor=2d:4",
    "tensor=2.5d:8/2 zero=1",
    "tensor=3d:8",
    "data=2 sequence=all_to_all:4 zero=1",
    "pipeline=1f1b:4 microbatches=4 zero=1",
    "pipeline=zero_bubble:2 microbatches=4 tensor=2",
)
# Layers unrolled, in the author's own loop, packed, and with fewer heads for keys; four of each, of two kinds of Flax.
MODELS = ("linen_tied", "linen_scan", "linen_packed_qkv", "nnx_llama", "nnx_decoder")
# By default, where all that matters is what an optimizer does with a leaf: four layers of two matrices.
SUBJECTS["few_leaves"] = case("linen", lambda _: Layered(4), regression, regression_batch, blocks=(4,))
KIND = {"lamb": "nnx_llama", "adafactor": "linen_scan", "muon": "linen_tied", "lars of optax": "nnx_decoder",
        "labelled by path": "linen_packed_qkv"}  # fmt: skip

# Of whole steps: what differs between optimizers is in the first table, what differs between plans in the contract, so
# that by default a few are enough, of what an optimizer reads beside a gradient: norms and factors of a leaf, the norm
# of all, and the loss; each under another kind of plan.
WHOLE = ("lamb", "lamb, as FusedLAMB", "lars", "lars, as Lars", "average of parameters", "adafactor", "muon", "prodigy",
         "adaptive clipping", "labelled by path", "on a plateau")  # fmt: skip
FEW = (
    ("lamb", "data=2 tensor=4 zero=3"),
    ("on a plateau", "tensor=8 microbatches=2"),
)


def pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Every optimizer and every plan at least once; all of them in the full run."""
    if ALL:
        return [(name, plan) for name in OPTIMIZERS for plan in PLANS]
    return cover(names, list(PLANS), 1, traits={plan: frozenset(plan.split()) for plan in PLANS})


# By default under a plan: what each optimizer does on stacked, padded and split leaves is in
# tests/sharding/storage/test_optimizer.py, so that here those are enough that read more than a leaf's own gradient.
UNDER_PLANS = ("lamb", "lamb, as DistributedLamb", "lars", "average of parameters", "sgd", "adafactor", "muon",
               "lion", "adaptive clipping", "global clipping", "labelled by path",
               "on a plateau")  # fmt: skip


def model_of(name: str, plan: str) -> str:
    """Another model for each pair, the same in every run; a sequence is split where its length divides."""
    if "sequence" in plan:
        return "nnx_decoder"
    if not ALL:
        return KIND.get(name, "few_leaves")
    return MODELS[(list(OPTIMIZERS).index(name) + 3 * PLANS.index(plan)) % len(MODELS)]


# -- the same gradients -----------------------------------------------------------------------------------------------
def gradients(params: PyTree, step: int) -> PyTree:
    """Of sizes so different from leaf to leaf that whatever mixes their norms shows."""
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape) * 10 ** rng.uniform(-3, 3), params)


@pytest.mark.full(
    "adafactor-tensor=8 microbatches=2",
    "adaptive clipping-zero=1",
    "average of parameters-pipeline=1f1b:4 microbatches=4 zero=1",
    "global clipping-zero=3/4",
    "labelled by path-tensor=4",
    "lamb, as DistributedLamb-data=2 tensor=4 zero=3",
    "lamb-data=4 tensor=2 zero=2",
    "lamb-tensor=3d:8",
    "lars-data=2 sequence=all_to_all:4 zero=1",
    "muon-tensor=2.5d:8/2 zero=1",
    "on a plateau-tensor=2d:4",
    "sgd-pipeline=zero_bubble:2 microbatches=4 tensor=2",
)
@pytest.mark.parametrize(("name", "plan"), pairs(UNDER_PLANS))
def test_does_with_the_same_gradients_as_on_one_device(name: str, plan: str) -> None:
    with jax.enable_x64(True):
        model, optimizer = model_of(name, plan), OPTIMIZERS[name]()
        program = program_of(model, plan, wide=True, optimizer=optimizer)
        params = on_host(first_values(model, wide=True)[0])
        state = begun(program, model, True, name)
        there, update = optimizer.init(params), jax.jit(optax.with_extra_args_support(optimizer).update)
        for step in range(NUM_STEPS):
            grads = gradients(params, step)
            state = program.update(state, grads, 2.5)
            updates, there = update(grads, there, params, value=jnp.float32(2.5))
            params = optax.apply_updates(params, updates)
        here = trees(program, state)
        assert_close(here[0], on_host(params), EXACT, "parameter ")
        assert jax.tree.structure(here[3]) == jax.tree.structure(there)
        assert_leaves_close(here[3], on_host(there))
        assert_in_parts(program, state)


def test_an_optimizer_that_follows_the_loss_asks_for_it() -> None:
    with pytest.raises(ValueError, match=r"program.update\(state, grads, loss\)"):
        program = program_of("nnx_mlp", "data=8", wide=False, optimizer=OPTIMIZERS["on a plateau"]())
        program.update(begun(program, "nnx_mlp", False, "on a plateau"), first_values("nnx_mlp", False)[0])


def assert_leaves_close(given: PyTree, wanted: PyTree) -> None:
    """Each leaf by itself: counts beside moments, moments beside averages of parameters."""
    for name, a, b in zip(leaf_names(wanted), jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert_close([a], [b], EXACT, f"state {name}")


def assert_in_parts(program: Program, state: cjax.State) -> None:
    """Bytes a device: what is like a parameter is split as Adam's moments are, whose bytes the contract asserts."""
    parts = program._composed
    assert parts.optimizer is not None
    storage, specs = parts.storage, parts.storage.state_specs if parts.plan.zero_stage else parts.storage.used_specs
    names, shapes = leaf_names(storage.params.leaf_shapes()), storage.params.leaf_shapes()
    of_param = dict(zip(names, zip(specs, jax.tree.leaves(shapes), strict=False), strict=True))
    expected = factors = 0.0
    for name, leaf in zip(leaf_names(parts.optimizer.storage.leaf_shapes()),
                          jax.tree.leaves(parts.optimizer.storage.leaf_shapes()), strict=True):  # fmt: skip
        owner = next((p for p in names if name == p or name.endswith("/" + p)), None)
        size = leaf.dtype.itemsize * math.prod(leaf.shape)
        if owner is None or leaf.shape != of_param[owner][1].shape:
            factors += size
            continue
        axes = [a for entry in of_param[owner][0] for a in ((entry,) if isinstance(entry, str) else entry or ())]
        expected += size / math.prod(program.mesh.shape[a] for a in axes)
    held = bytes_on_a_device(state._opt)
    layers = 1.0
    if parts.line is not None:  # rows of layers are spread over the stages as well
        layers = 1 / parts.plan.pipeline.size
    assert layers * expected <= held <= 1.1 * expected + factors, f"{held} bytes a device, {expected} expected"


# -- whole steps ------------------------------------------------------------------------------------------------------
@pytest.mark.full("lamb-data=2 tensor=4 zero=3")
@pytest.mark.parametrize(("name", "plan"), pairs(WHOLE) if ALL else FEW)
def test_trains_as_its_author_would(name: str, plan: str) -> None:
    """Parameters after three steps, but for elements whose true gradient is zero: theirs is rounding, which an
    optimizer that divides by its size, or asks for its sign, makes as large as any. A bias of keys has such, also where
    it is a part of that of queries, keys and values; by chance one is zero in one step of one of both. What nothing
    has read, a row of a table, is zero in all."""
    with jax.enable_x64(True):
        model = model_of(name, plan)
        here, there = train(model, plan, True, name), author(model, num_parts(plan), True, name)
        grads, *others = [jax.tree.leaves(step.grads) for step in (*there.steps, *here.steps)]
        least, unread = 1e-10 * norm(grads), [np.all(np.equal(each, 0), 0) for each in zip(grads, *others, strict=True)]
        kept = [
            norm([g]) > least and (np.abs(g) > least / math.sqrt(g.size)) | zero
            for g, zero in zip(grads, unread, strict=True)
        ]
        a, b = ([x * keep for x, keep in zip(jax.tree.leaves(run.params), kept, strict=True)] for run in (here, there))
        assert np.mean([np.mean(keep) for keep in kept]) >= 0.75
        assert_close(a, b, (1e-7, 0.0), "parameter ")


# -- norms of what a parameter holds ----------------------------------------------------------------------------------
@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        "tensor=2d:4",
        *(pytest.param(p, marks=pytest.mark.full) for p in ("tensor=4 zero=1", "pipeline=1f1b:4 microbatches=4")),
    ],
)
def test_packed_projections_are_layers_of_their_own(plan: str) -> None:
    """Queries, keys and values in one kernel, each with its own ratio, split over devices or not."""
    name = next(n for n in leaf_names(subject("linen_packed_qkv", False).captured.params_shape) if "qkv" in n.lower())
    optimizer = lamb(1e-2, split={name.split("/")[-2] + "/kernel": (-1, 3)})
    with jax.enable_x64(True):
        program = program_of("linen_packed_qkv", plan, wide=True, optimizer=optimizer)
        params = first_values("linen_packed_qkv", wide=True)[0]
        state = begun(program, "linen_packed_qkv", True, "lamb")
        there = optimizer.init(params)
        for step in range(2):
            grads = gradients(params, step)
            state = program.update(state, grads)
            updates, there = optimizer.update(grads, there, params)
            params = optax.apply_updates(params, updates)
        assert_close(trees(program, state)[0], on_host(params), EXACT, "parameter ")
        mixed, _ = lamb(1e-2).update(grads, lamb(1e-2).init(params), params)
        assert norm(jax.tree.map(lambda a, b: a - b, on_host(mixed), on_host(updates))) > 1e-3 * norm(on_host(mixed))


# -- averages ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "plan", ["data=4 tensor=2 zero=1", *(["pipeline=1f1b:2 microbatches=2 zero=3"] if ALL else [])]
)
@pytest.mark.parametrize("name", ["nnx_llama", *(["nnx_decoder"] if ALL else [])])
def test_averaged_parameters_are_found_and_scored(name: str, plan: str) -> None:
    optimizer = optax.chain(optax.sgd(0.3), params_ema(0.5))
    program = program_of(name, plan, wide=False, optimizer=optimizer)
    batch = subject(name, False).batches[0]
    state = start(program, first_values(name, wide=False), moments=False)
    seen = [on_host(program.params(state))]
    for _ in range(3):
        state, _ = program.step(state, batch)
        seen.append(on_host(program.params(state)))
    average = seen[0]
    for params in seen[1:]:
        average = jax.tree.map(lambda a, w: 0.5 * a + 0.5 * w, average, params)
    found = find_ema(state)
    assert_close(on_host(found), average, (1e-5, 1e-7), "average ")
    scored = program.evaluate(state, batch, params=found)["loss"]
    by_hand = program.evaluate(state, batch, params=jax.tree.map(jnp.asarray, average))["loss"]
    assert abs(scored - by_hand) < 1e-4 and abs(scored - program.evaluate(state, batch)["loss"]) > 1e-4
    program.step(state, batch)
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(found)), "what was found outlives the state"


def test_states_are_found_by_kind() -> None:
    program = program_of("nnx_mlp", "zero=1", wide=False, optimizer=optax.adam(1e-3))
    state = program.init(0)
    (moments,) = state.find_opt_states(optax.ScaleByAdamState)
    assert jax.tree.structure(moments.mu) == jax.tree.structure(program.params(state))
    assert state.find_opt_states(ParamsEmaState) == []
    with pytest.raises(ValueError, match="holds no averages"):
        find_ema(state)


# -- noise ------------------------------------------------------------------------------------------------------------
NOISY = [
    ("linen_tied", "data=8", 8),
    ("linen_masked_mean", "data=4 tensor=2 zero=2", 4),
    ("linen_masked_mean", "data=2 tensor=4 microbatches=4", 8),
    ("linen_tied", "zero=3 microbatches=2", 2),
    ("linen_masked_mean", "tensor=8 microbatches=4", 4),
    ("linen_tied", "data=4 pipeline=1f1b:2 microbatches=2 zero=1", 4),
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan", "num_parts"), NOISY if ALL else NOISY[5:])
def test_noise_is_measured_from_the_parts_that_a_plan_has(name: str, plan: str, num_parts: int) -> None:
    """The gradients of the parts, each by itself on one device, give the same estimates; and nothing else changes."""
    case = subject(name, False)
    batch, shape = case.batches[0], jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batches[0])
    given = Given(TraceSource(case.captured, shape), optax.sgd(1e-2), measures=True)
    program = Program(compose(given, Plan.parse(plan).resolve(8), jax.devices()[:8]))
    state, metrics = program.step(begun(program, name, wide=False), batch)
    there, whole = author(name, 1, False).steps[0], np.square(metrics["grad_norm"])
    np.testing.assert_allclose(metrics["loss"], there.loss, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norm(there.grads), rtol=1e-4)
    part = part_square(name, plan, num_parts)
    signal, noise = (num_parts * whole - part) / (num_parts - 1), ROWS * (part - whole) / (num_parts - 1)
    np.testing.assert_allclose(state._noise.signal / (1 - DECAY), signal, rtol=1e-3, atol=1e-3 * whole)
    np.testing.assert_allclose(state._noise.noise / (1 - DECAY), noise, rtol=1e-3)
    np.testing.assert_allclose(metrics["noise_scale"], noise_scale(state._noise))


def part_square(name: str, plan: str, num_parts: int) -> float:
    """By the author's own loss: the mean squared norm of the parts' gradients, over an equal share of the weights."""
    case = subject(name, False)
    params, frozen, model_state = first_values(name, False)
    shards = Plan.parse(plan).resolve(8).data if "zero=3" not in plan else 1
    parts = num_parts // shards  # micro-batch i is every i-th row of what a device has
    each = ROWS // shards
    owners = [np.arange(d * each, (d + 1) * each)[i::parts] for d in range(shards) for i in range(parts)]

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params: PyTree, mine: PyTree) -> tuple[jax.Array, jax.Array]:
        loss, _, _ = case.captured.apply(params, frozen, model_state, mine, jax.random.key(0), True)
        weight = mine["mask"][:, 1:].sum() if name == "linen_masked_mean" else jnp.ones(())
        return loss * weight, weight

    out = [gradient(params, jax.tree.map(lambda x, rows=rows: x[rows], case.batches[0])) for rows in owners]
    weights = sum(w for _, w in out)
    return float(np.mean([np.square(norm(on_host(g)) * num_parts / weights) for g, _ in out]))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("data=1", "no two devices see different examples: add microbatches=2"),
        ("tensor=8", "no two devices see different examples: add microbatches=2"),
        ("zero=3", "zero=3 reduces gradients during the backward pass: add microbatches=2"),
        ("pipeline=4 microbatches=4 data=1", "no two devices .*: take a pipeline with data > 1"),
    ],
)
def test_noise_needs_two_batch_sizes(plan: str, message: str) -> None:
    case = subject("linen_tied", False)
    devices = jax.devices()[: 1 if plan == "data=1" else 4 if "pipeline" in plan else 8]
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), case.batches[0])
    with pytest.raises(ValueError, match=message):
        compose(Given(TraceSource(case.captured, shape), optax.sgd(1e-2), measures=True), plan, devices)


# -- the table itself -------------------------------------------------------------------------------------------------
def test_default_run_covers_every_optimizer_and_plan() -> None:
    assert set(OURS) < set(OPTIMIZERS) and len(set(OPTIMIZERS) - set(OURS)) >= 10
    chosen = pairs(UNDER_PLANS)
    assert {p[0] for p in chosen} >= set(OPTIMIZERS if ALL else UNDER_PLANS) and {p[1] for p in chosen} == set(PLANS)
    assert {model_of(*pair) for pair in chosen} - {"few_leaves"} == set(MODELS)
    assert {name for name, _ in FEW} < set(WHOLE) <= set(OPTIMIZERS) and {plan for _, plan in FEW} < set(PLANS)
