"""Where the three trees of a model live, stage by stage."""

import re
from dataclasses import replace
from typing import Any

import jax
import pytest
from contract import program_of, subject, trace_of
from jax.sharding import PartitionSpec as P
from zoo import MODELS

from cjax.mesh import build_mesh
from cjax.plan import Plan
from cjax.sharding.place.model import ModelStorage, make_placer, store_model
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource
from cjax.tree import leaf_names


def stored(name: str, plan: str) -> ModelStorage:
    resolved = Plan.parse(plan).resolve(8)
    mesh = build_mesh(resolved.axis_sizes(), jax.devices())
    return store_model(subject(name, False).captured, trace_of(name, resolved.microbatches), resolved, mesh)


@pytest.mark.full("zero=1 reduce=float32 precision=bfloat16-False")
@pytest.mark.parametrize(
    ("plan", "is_in_turn"),
    [
        ("zero=1 precision=bfloat16", True),
        ("zero=2/4 precision=float16", True),
        ("data=4 tensor=2 zero=1 precision=bfloat16 remat=block", True),
        ("zero=1", False),
        ("data=8 precision=bfloat16", False),
        ("zero=3 precision=bfloat16", False),
        ("zero=1 microbatches=2 precision=bfloat16", False),
        ("zero=1 reduce=float32 precision=bfloat16", False),
        ("data=4 pipeline=1f1b:2 microbatches=2 zero=1 precision=bfloat16", False),
    ],
)
def test_layers_gather_in_turn_where_a_step_reads_them_once(plan: str, is_in_turn: bool) -> None:
    """All that one layer alone has; what lies outside of layers is gathered ahead."""
    program = program_of("linen_decoder", plan, wide=False)
    storage, names = program._composed.storage, leaf_names(subject("linen_decoder", False).captured.params_shape)
    found = {names[leaf] for leaf in storage.in_turn}
    assert found == ({name for name in names if "block_" in name} if is_in_turn else set())
    for kept, given, whole in zip(storage.params.slots, storage.given.slots, storage.whole.slots, strict=True):
        is_kept = kept.leaves[0] in storage.in_turn or storage.given is storage.params
        assert given.spec == (kept if is_kept else whole).spec
        assert kept.spec != whole.spec or kept.leaves[0] not in storage.in_turn


@pytest.mark.parametrize(
    ("plan", "is_local"),
    [
        ("data=2 sequence=ring:4 microbatches=2 zero=1", False),
        ("data=2 sequence=ring:2 pipeline=1f1b:2 microbatches=2 zero=2", False),
        ("data=8 microbatches=2 zero=2", True),
    ],
)
def test_who_adds_up_together_gets_parts(plan: str, is_local: bool) -> None:
    """Of gradients that all devices reduce in each micro-batch, each has its part; of its own it adds up the whole."""
    storage, resolved = stored("nnx_decoder", plan), Plan.parse(plan).resolve(8)
    mesh, layout = build_mesh(resolved.axis_sizes(), jax.devices()), storage.layout
    trace, layout = trace_of("nnx_decoder", resolved.microbatches), replace(layout) if is_local else layout
    placer = make_placer(trace, storage, resolved, mesh, layout)
    found = [placer._weights[i].gradient for i in range(len(storage.used_specs))]
    assert found == list(storage.used_specs if is_local else storage.zero_specs)
    assert storage.used_specs != storage.zero_specs


def spec_of(name: str, storage: ModelStorage, pattern: str, state: bool = False) -> P:
    """The placement, as kept, of the one parameter whose path matches; or that of its optimizer's state."""
    names = leaf_names(subject(name, False).captured.params_shape)
    (leaf,) = [i for i, text in enumerate(names) if re.search(pattern, text)]
    if state:
        return storage.state_specs[leaf]
    return next(slot.spec for slot in storage.params.slots if leaf in slot.leaves)


KERNEL = "block_0/Dense_0/kernel"  # [40, 64]


@pytest.mark.parametrize(
    ("plan", "kept", "state"),
    [
        ("data=8", P(None, None), P(None, None)),
        ("zero=1", P(None, None), P("data", None)),
        ("zero=2", P(None, None), P("data", None)),
        ("zero=3", P("data", None), P("data", None)),
        ("zero=1/4", P(None, None), P("zero", None)),
        ("zero=3/4", P("zero", None), P("zero", None)),
        ("tensor=4", P(None, "tensor"), P(None, "tensor")),
        ("data=4 tensor=2 zero=2", P(None, "tensor"), P("data", "tensor")),
        ("data=2 tensor=4 zero=3", P("data", "tensor"), P("data", "tensor")),
        ("zero=1 precision=bfloat16", P("data", None), P("data", None)),
        ("data=4 tensor=2 zero=2 precision=float16", P("data", "tensor"), P("data", "tensor")),
        ("data=8 precision=bfloat16", P(None, None), P(None, None)),
        ("zero=1 precision=bfloat16 offload=optimizer", P(None, None), P("data", None)),
    ],
)
def test_stages(plan: str, kept: P, state: P) -> None:
    storage = stored("linen_decoder", plan)
    assert spec_of("linen_decoder", storage, KERNEL) == kept
    assert spec_of("linen_decoder", storage, KERNEL, state=True) == state


def test_layers_are_kept_as_stacks_and_the_rest_alone() -> None:
    storage = stored("linen_decoder", "zero=3")
    sizes = [len(slot.leaves) for slot in storage.params.slots]
    assert set(sizes) == {1, 4} and sizes.count(4) == 16
    names = leaf_names(subject("linen_decoder", False).captured.params_shape)
    for slot in storage.params.slots:
        if len(slot.leaves) > 1:
            assert [re.search(r"block_(\d)", names[i])[1] for i in slot.leaves] == list("0123")  # type: ignore[index]
            assert len({re.sub(r"block_\d", "", names[i]) for i in slot.leaves}) == 1


def test_an_authors_stack_of_layers_is_not_cut_between_layers() -> None:
    for slot in stored("linen_scan", "zero=3/4").params.slots:
        if len(slot.shape) > 2 and slot.shape[0] == 4:
            assert slot.spec[0] is None, slot


def test_vocabulary_is_padded_in_storage_alone() -> None:
    storage = stored("linen_decoder", "tensor=8")
    (slot,) = [slot for slot in storage.params.slots if slot.shape == (101, 40)]
    assert slot.padded == (104, 40)
    assert storage.params.leaf_shapes()["Embed_0"]["embedding"].shape == (101, 40)


def test_running_statistics_lie_as_their_features_do() -> None:
    storage = stored("linen_conv", "tensor=4")
    assert P("tensor") in [slot.spec for slot in storage.model_state.slots]


def test_random_keys_are_whole() -> None:
    storage = stored("nnx_decoder", "data=2 tensor=4 zero=3")
    keys = [slot for slot in storage.model_state.slots if jax.dtypes.issubdtype(slot.dtype, jax.dtypes.prng_key)]
    assert keys and all(set(slot.spec) <= {None} for slot in keys)


def test_frozen_parameters_are_split_too() -> None:
    model, loss, batch = MODELS["linen_decoder"].make()
    captured = capture(model, loss, batch, wrt="Dense_1")
    plan = Plan.parse("zero=3").resolve(8)
    shape: Any = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    storage = store_model(
        captured, TraceSource(captured, shape).read(), plan, build_mesh(plan.axis_sizes(), jax.devices())
    )
    assert {slot.shape for slot in storage.params.slots} == {(64, 40), (40,)}
    assert any(slot.shape == (40, 64) and slot.spec == P("data", None) for slot in storage.frozen.slots)
