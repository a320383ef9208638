"""What compiled steps do, against collectives, bytes and FLOPs known by construction."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.audit import Audit, Collective, audit, audit_text
from cjax.mesh import DATA, TENSOR, build_mesh, compile_lowered, resolve_devices
from cjax.planner.hardware import Hardware

# On each device of a mesh of data=2 and tensor=4: f32[32, 16], 2048 bytes.
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
LOCAL_BYTES = 32 * 16 * 4
SPLIT = P(DATA, TENSOR)


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return build_mesh({DATA: 2, TENSOR: 4}, jax.devices())


def audit_local(mesh: Mesh, function, out: P = SPLIT) -> Audit:
    """The audit of a function of each device's piece of X."""
    mapped = jax.shard_map(function, mesh=mesh, in_specs=SPLIT, out_specs=out, check_vma=False)
    x = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(mesh, SPLIT))
    return audit(compile_lowered(jax.jit(mapped).lower(x), list(mesh.devices.flat)))


@pytest.mark.parametrize("axes, size", [((DATA,), 2), ((TENSOR,), 4), ((DATA, TENSOR), 8)])
def test_all_reduce_along_each_axis(mesh, axes, size):
    facts = audit_local(mesh, lambda x: lax.psum(x, axes))
    (found,) = facts.collectives
    assert (found.kind, found.axes, found.group_size, found.count) == ("all-reduce", axes, size, 1)
    assert found.bytes == 2 * (size - 1) / size * LOCAL_BYTES and found.dtype == "f32"
    assert [shape.dims for shape in found.shapes] == [(32, 16)]
    assert facts.num_partners == size - 1 and facts.num_devices == 8
    # On a CPU nothing runs beside a collective.
    assert facts.exposed_bytes() == facts.moved() == found.bytes


@pytest.mark.parametrize(
    "function, kind, shape, received",
    [
        (lambda x: lax.all_gather(x, TENSOR, axis=1, tiled=True), "all-gather", (32, 64), 3 * LOCAL_BYTES),
        (
            lambda x: lax.psum_scatter(x, TENSOR, scatter_dimension=0, tiled=True),
            "reduce-scatter",
            (32, 16),
            3 / 4 * LOCAL_BYTES,
        ),
        (lambda x: lax.all_to_all(x, TENSOR, 0, 1, tiled=True), "all-to-all", (8, 16), 3 / 4 * LOCAL_BYTES),
        (
            lambda x: lax.ppermute(x, TENSOR, [(i, (i + 1) % 4) for i in range(4)]),
            "collective-permute",
            (32, 16),
            LOCAL_BYTES,
        ),
    ],
    ids=["all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_the_other_kinds(mesh, function, kind, shape, received):
    facts = audit_local(mesh, function)
    (found,) = facts.collectives
    assert (found.kind, found.axes, found.group_size, found.bytes) == (kind, (TENSOR,), 4, received)
    assert found.shapes[0].dims == shape
    assert facts.num_partners == (2 if kind == "collective-permute" else 3)


def test_loops_multiply_and_conditions_count_the_dearest_branch(mesh):
    def step(x):
        def outer(x, _):
            def inner(x, _):
                return jnp.tanh(lax.psum(x, TENSOR)), None

            x = lax.scan(inner, x, None, length=5)[0]
            small = lambda x: lax.psum(x, DATA)  # noqa: E731
            large = lambda x: lax.psum(jnp.sin(lax.psum(x, DATA)), DATA)  # noqa: E731
            return lax.cond(x.sum() > 0, small, large, x), None

        return lax.scan(outer, x, None, length=3)[0]

    facts = audit_local(mesh, step)
    assert facts.count("all-reduce", [TENSOR]) == 15 and facts.count("all-reduce", [DATA]) == 6
    assert facts.moved(axes=[TENSOR]) == 15 * 1.5 * LOCAL_BYTES
    assert facts.moved_by_axis() == {TENSOR: 15 * 1.5 * LOCAL_BYTES, DATA: 6 * LOCAL_BYTES}


def test_branches_of_several_count_as_often_as_their_scope_says(mesh):
    def step(x):
        def turn(x, i):
            ways = [lambda x: x, lambda x: lax.psum(x, DATA), lambda x: lax.psum(jnp.sin(lax.psum(x, DATA)), TENSOR)]
            with jax.named_scope("runs_3_1_of_4"):
                return lax.switch(i, ways, x), None

        return lax.scan(turn, x, jnp.array([1, 1, 2, 1]))[0]

    facts = audit_local(mesh, step)
    assert facts.count("all-reduce", [DATA]) == 4 and facts.count("all-reduce", [TENSOR]) == 1


def test_small_ones_are_separable(mesh):
    facts = audit_local(mesh, lambda x: lax.psum(x, DATA) + lax.pmax(x.sum(), (DATA, TENSOR)))
    assert facts.count() == 2 and facts.count(min_bytes=LOCAL_BYTES) == 1
    assert facts.moved(min_bytes=LOCAL_BYTES) == LOCAL_BYTES
    assert facts.moved_by_axis(min_bytes=LOCAL_BYTES) == {DATA: LOCAL_BYTES}
    assert facts.moved() == LOCAL_BYTES + 2 * 7 / 8 * 4


MIXED = """HloModule mixed, num_partitions=1
%turn (s: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {
  %s = (s32[], f32[8,8]) parameter(0)
  %i = s32[] get-tuple-element((s32[], f32[8,8]) %s), index=0
  %x = f32[8,8] get-tuple-element((s32[], f32[8,8]) %s), index=1
  %y = f32[8,8] dot(f32[8,8] %x, f32[8,8] %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[8,8]) tuple(s32[] %i, f32[8,8] %y)
}
%more (c: (s32[], f32[8,8])) -> pred[] {
  %c = (s32[], f32[8,8]) parameter(0)
  %j = s32[] get-tuple-element((s32[], f32[8,8]) %c), index=0
  %n = s32[] constant(3)
  ROOT %less = pred[] compare(s32[] %j, s32[] %n), direction=LT
}
ENTRY %main (a: bf16[8,8]) -> f32[8,8] {
  %a = bf16[8,8] parameter(0)
  %b = f32[8,8] dot(bf16[8,8] %a, bf16[8,8] %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %zero = s32[] constant(0)
  %first = (s32[], f32[8,8]) tuple(s32[] %zero, f32[8,8] %b)
  %loop = (s32[], f32[8,8]) while((s32[], f32[8,8]) %first), condition=%more, body=%turn
  ROOT %result = f32[8,8] get-tuple-element((s32[], f32[8,8]) %loop), index=1
}
"""


def test_one_device_moves_nothing():
    facts = audit(jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile())
    assert facts.collectives == () and facts.num_partners == 0 and facts.flops == 2 * 8**3
    assert "nothing" in str(facts)
    assert facts.flops_float32 == facts.flops and ", 1 of them in float32" in str(facts)


def test_products_in_float32_are_told_from_others():
    """In a loop, beside one in low precision; text as GPUs have it, since CPUs multiply all in float32."""
    facts = audit_text(MIXED)
    assert (facts.flops, facts.flops_float32) == (2 * 8**3 + 3 * 2 * 8**3, 3 * 2 * 8**3)
    assert ", 0.75 of them in float32" in str(facts)


def test_memory_counts_donated_arguments_once(mesh):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, SPLIT))
    for donated in ((), (0,)):
        memory = audit(jax.jit(lambda x: jnp.sin(x), donate_argnums=donated).lower(x).compile()).memory
        assert memory is not None
        assert (memory.arguments, memory.outputs, memory.aliased) == (2048, 2048, 2048 * len(donated))
        assert memory.peak == 4096 - memory.aliased + memory.temporary


def sharded_mlp(mesh: Mesh, num_layers: int, dtype=jnp.float32):
    """Megatron's pair of matmuls, in a scan over layers: its loss, and the arguments' shapes with shardings."""

    def shaped(shape, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

    def loss(weights, x):
        def layer(x, weights):
            up, down = weights
            with jax.named_scope("Mlp"):
                return x + jnp.tanh(x @ up) @ down, None

        return (lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2).mean()

    up = shaped((num_layers, 256, 1024), None, None, TENSOR)
    down = shaped((num_layers, 1024, 256), None, TENSOR, None)
    return loss, ((up, down), shaped((16, 64, 256), DATA))


def test_megatron_pair_on_cpu(mesh):
    loss, arguments = sharded_mlp(mesh, num_layers=3)
    facts = audit(jax.jit(loss).lower(*arguments).compile())
    activation = 16 * 64 * 256 * 4 // 2
    (found,) = facts.select("all-reduce", [TENSOR], min_bytes=activation)
    assert found.count == 3 and found.bytes == 1.5 * activation and found.module.endswith("Mlp")
    assert facts.flops == 3 * 2 * 2 * (16 * 64 * 256 * 1024) / 8
    text = str(facts)
    assert "tensor" in text and "all-reduce" in text and "Mlp" in text and f"{facts.flops:.4g} FLOP" in text


@pytest.mark.parametrize(
    "op_name, module",
    [
        ("jit(step)/transpose(jvp(GPT))/h_0/attn/dot_general", "GPT/h_0/attn"),
        ("jit(step)/jvp()/while/body/closed_call/checkpoint/Block/jit(silu)/mul", "Block"),
        ("jit(step)/shard_map/psum", ""),
        ("jit(step)/jvp(GPT)/h_0/(up/dot_general:down/dot_general)", "GPT/h_0"),
        ("jit(step)/(jvp()/reduce_sum:transpose(jvp(GPT))/mul)", ""),
        ("", ""),
    ],
)
def test_modules_are_the_authors(op_name, module):
    assert Collective("all-reduce", (), 2, ((0, 1),), (), 1.0, 1, op_name).module == module


def test_meshes_of_other_devices_and_other_programs(mesh):
    loss, arguments = sharded_mlp(mesh, num_layers=1)
    text = jax.jit(loss).lower(*arguments).compile().as_text()
    unnamed = audit_text(text)
    assert unnamed.select(axes=[]) == unnamed.collectives and "groups of 4" in unnamed.moved_by_axis()
    with pytest.raises(ValueError, match="for 8 devices, and Mesh.* has 4"):
        audit_text(text, build_mesh({TENSOR: 4}, jax.devices()[:4]))


# A schedule as a GPU's compiler writes it: one transfer beside a matmul, one beside a scalar addition, one that XLA
# runs synchronously, one wrapped in an async computation, one in a fusion.
SCHEDULE = """HloModule step, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%wrapped (p: f32[256,256]) -> f32[64,256] {
  %p = f32[256,256]{1,0} parameter(0)
  ROOT %rs = f32[64,256]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=%add
}

%fused (q: f32[256,256]) -> f32[256,256] {
  %q = f32[256,256]{1,0} parameter(0)
  ROOT %ar = f32[256,256]{1,0} all-reduce(%q), replica_groups={{0,1,2,3}}, to_apply=%add
}

ENTRY %main (x: f32[256,256], i: s32[]) -> f32[256,256] {
  %x = f32[256,256]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %s1 = (f32[256,256]{1,0}, f32[1024,256]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}, backend_config={"collective_backend_config":{"is_sync":false}}
  %d = f32[256,256]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %g = f32[1024,256]{1,0} all-gather-done(%s1)
  %s2 = f32[256,256]{1,0} all-reduce-start(%d), replica_groups=mesh['a'=4] {'a'}, to_apply=%add
  %j = s32[] add(%i, %i)
  %r = f32[256,256]{1,0} all-reduce-done(%s2)
  %s3 = (f32[256,256]{1,0}, f32[256,256]{1,0}) collective-permute-start(%r), source_target_pairs={{0,1},{1,2},{2,3},{3,0}}, backend_config={"collective_backend_config":{"is_sync":true}}
  %d2 = f32[256,256]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %m = f32[256,256]{1,0} collective-permute-done(%s3)
  %s4 = ((f32[256,256]{1,0}), f32[64,256]{1,0}) async-start(%m), calls=%wrapped
  %s5 = ((f32[256,256]{1,0}), f32[256,256]{1,0}) fusion-start(%m), kind=kCustom, calls=%fused
  %d3 = f32[256,256]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %u = ((f32[256,256]{1,0}), f32[64,256]{1,0}) async-update(%s4)
  %d4 = f32[256,256]{1,0} dot(%m, %m), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %w = f32[64,256]{1,0} async-done(%u)
  ROOT %v = f32[256,256]{1,0} fusion-done(%s5)
}
"""  # noqa: E501


def test_exposed_transfers_of_a_schedule():
    facts = audit_text(SCHEDULE, Mesh(np.array(jax.devices()[:4]), ("tensor",)))
    size, matmul, touched = 256 * 256 * 4, 2 * 256**3, 3 * 256 * 256 * 4
    by_kind = {(each.kind, each.is_async, each.overlap_flops): each for each in facts.collectives}
    gather = by_kind["all-gather", True, matmul]
    reduce = by_kind["all-reduce", True, 0.0]
    permute = by_kind["collective-permute", False, 0.0]
    scatter = by_kind["reduce-scatter", True, 2 * matmul / 2]  # these two share the last two matmuls
    fused = by_kind["all-reduce", True, 2 * matmul / 2]
    assert len(facts.collectives) == 5 and all(each.axes == ("tensor",) for each in facts.collectives)
    assert (gather.bytes, reduce.bytes, permute.bytes) == (3 * size, 1.5 * size, size)
    assert (scatter.bytes, fused.bytes) == (0.75 * size, 1.5 * size)
    assert (gather.overlap_bytes, reduce.overlap_bytes) == (touched, 12)
    assert facts.exposed_bytes() == (1.5 + 1) * size
    assert facts.flops == 4 * matmul and facts.bytes_accessed == 4 * touched + 12


# A loop's way with stacked arrays: a layer's weights are read from the stack, a layer's result is put in place.
STACKED = """HloModule body, is_scheduled=true

%read (w: f32[10,8,8], i: s32[], x: f32[8,8]) -> f32[8,8] {
  %w = f32[10,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %x = f32[8,8]{1,0} parameter(2)
  %s = f32[1,8,8]{2,1,0} dynamic-slice(%w, %i, %i, %i), dynamic_slice_sizes={1,8,8}
  %b = f32[8,8]{1,0} bitcast(%s)
  ROOT %y = f32[8,8]{1,0} add(%b, %x)
}

%write (o: f32[10,8,8], i: s32[], y: f32[8,8]) -> f32[10,8,8] {
  %o = f32[10,8,8]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %y = f32[8,8]{1,0} parameter(2)
  %b = f32[1,8,8]{2,1,0} bitcast(%y)
  ROOT %u = f32[10,8,8]{2,1,0} dynamic-update-slice(%o, %b, %i, %i, %i)
}

ENTRY %main (w: f32[10,8,8], o: f32[10,8,8], i: s32[], x: f32[8,8]) -> f32[10,8,8] {
  %w = f32[10,8,8]{2,1,0} parameter(0)
  %o = f32[10,8,8]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %x = f32[8,8]{1,0} parameter(3)
  %y = f32[8,8]{1,0} fusion(%w, %i, %x), kind=kLoop, calls=%read
  ROOT %u = f32[10,8,8]{2,1,0} fusion(%o, %i, %y), kind=kLoop, calls=%write
}
"""


def test_stacked_arrays_count_by_the_slice():
    layer, index = 8 * 8 * 4, 4
    assert audit_text(STACKED).bytes_accessed == (3 * layer + index) + (2 * layer + index)
    unfused = STACKED.replace("fusion(%w, %i, %x), kind=kLoop, calls=%read", "dynamic-slice(%w, %i, %i, %i)")
    unfused = unfused.replace("fusion(%o, %i, %y), kind=kLoop, calls=%write", "dynamic-update-slice(%o, %y, %i, %i)")
    assert audit_text(unfused).bytes_accessed == 2 * layer + 2 * layer


def test_a_stack_in_another_form_counts_by_the_slice():
    renamed = STACKED.replace("dynamic-slice(%w,", "dynamic-slice(%f,").replace("slice(%o,", "slice(%g,")
    for name, form in (("w", "f"), ("o", "g")):
        parameter = f"  %{name} = f32[10,8,8]{{2,1,0}} parameter(0)\n"
        renamed = renamed.replace(parameter, parameter + f"  %{form} = f32[10,8,8]{{0,1,2}} bitcast(%{name})\n", 1)
    assert renamed.count("bitcast") == 4
    assert audit_text(renamed).bytes_accessed == audit_text(STACKED).bytes_accessed


def test_exposure_follows_the_rates_of_the_hardware():
    facts = audit_text(SCHEDULE, Mesh(np.array(jax.devices()[:4]), ("tensor",)))
    (gather,) = facts.select("all-gather")
    rates = dict(name="card", num_devices=4, memory=1, bf16_flops=2.0, f32_flops=1.0, memory_bandwidth=1e30)
    # The matmul lasts 2 * 256**3 s; in that time the links bring in half of the bytes, the network a quarter.
    pace = gather.bytes / 2 / (2 * 256**3)
    within = Hardware(devices_per_host=4, host_bandwidth=pace, **rates)
    # Two hosts, two adapters each: they bring two of the three parts that a device is to have.
    adapters = dict(network_bandwidth=pace / 2 * (2 / 3) / 2, adapters_per_host=2)
    across = Hardware(devices_per_host=2, host_bandwidth=pace, **adapters, **rates)
    np.testing.assert_allclose(gather.exposed_bytes(within), gather.bytes / 2)
    np.testing.assert_allclose(gather.exposed_bytes(across), gather.bytes * 3 / 4)
    fast = Hardware(devices_per_host=4, host_bandwidth=pace / 1e6, **rates)
    np.testing.assert_allclose(gather.exposed_bytes(fast), gather.bytes, rtol=1e-5)
    unknown = Hardware(name="cpu", num_devices=4, devices_per_host=4, memory=1)
    assert gather.exposed_bytes(unknown) == gather.exposed_bytes() == 0


def test_a_collective_uses_the_adapters_of_its_members():
    machine = Hardware("card", 8, 4, 1, host_bandwidth=100.0, network_bandwidth=1.0, adapters_per_host=4)

    def bandwidth(kind: str, *groups: tuple[int, ...]) -> float | None:
        return Collective(kind, (), max(map(len, groups)), groups, (), 1.0, 1, "").bandwidth(machine)

    assert bandwidth("all-reduce", (0, 1, 2, 3), (4, 5, 6, 7)) == 100
    assert bandwidth("all-reduce", tuple(range(8))) == 4 * 7 / 4
    assert bandwidth("all-to-all", tuple(range(8))) == 7 / 4
    assert bandwidth("all-gather", (0, 4), (1, 5), (2, 6), (3, 7)) == 1
    assert bandwidth("all-gather", (0, 1, 4, 5), (2, 3, 6, 7)) == 2 * 3 / 2
    # Neighbours in the mesh's order, and yet on two hosts.
    assert bandwidth("all-gather", (2, 3), (4, 5)) == 100 and bandwidth("all-gather", (3, 4)) == 1
    assert bandwidth("collective-permute", (0, 1), (1, 2), (2, 3), (3, 0)) == 100
    assert bandwidth("collective-permute", *((i, (i + 1) % 8) for i in range(8))) == 1
    machine = dataclasses.replace(machine, adapters_per_host=1)
    assert bandwidth("all-reduce", tuple(range(8))) == 7 / 4 and bandwidth("all-gather", (3, 4)) == 1
    # In a ring two devices of a host look out: one sends, one receives. With all devices so, four share an adapter.
    assert bandwidth("collective-permute", *((i, (i + 1) % 8) for i in range(8))) == 1
    assert bandwidth("collective-permute", *((i, (i + 4) % 8) for i in range(8))) == 1 / 4


@functools.cache
def h100_step(num_layers: int) -> Audit:
    devices = resolve_devices("h100:8")
    mesh = build_mesh({DATA: 2, TENSOR: 4}, devices)
    loss, arguments = sharded_mlp(mesh, num_layers, jnp.bfloat16)
    return audit(compile_lowered(jax.jit(jax.value_and_grad(loss)).lower(*arguments), devices))


@pytest.mark.aot
def test_megatron_pair_on_h100_is_two_all_reduces_a_layer():
    facts = h100_step(6)
    activation = 16 * 64 * 256 * 2 // 2
    large = facts.select("all-reduce", [TENSOR], min_bytes=activation)
    assert sum(each.count for each in large) == 2 * 6  # one forward, one backward
    assert {(each.dtype, each.bytes) for each in large} == {("bf16", 1.5 * activation)}
    # Gradients of the weights, summed over data; nothing else of size.
    gradients = 6 * 2 * 256 * 1024 * 2 / 4
    assert facts.moved(axes=[DATA], min_bytes=1024) == gradients
    assert facts.moved(min_bytes=1024) == gradients + facts.moved(axes=[TENSOR], min_bytes=1024)
    assert facts.flops == 6 * 3 * 2 * 2 * (16 * 64 * 256 * 1024) / 8
    assert 0 < facts.exposed_bytes() <= facts.moved()
    assert facts.memory is not None and facts.memory.peak > 2 * gradients
    assert facts.unknown_loops == 0 and facts.uncounted == ()


@pytest.mark.aot
def test_kinds_on_h100():
    devices = resolve_devices("h100:8")
    mesh = build_mesh({DATA: 2, TENSOR: 4}, devices)

    def step(x):
        x = lax.psum_scatter(x, TENSOR, scatter_dimension=0, tiled=True)
        x = lax.all_gather(x, TENSOR, axis=0, tiled=True)
        x = lax.all_to_all(x, TENSOR, 0, 1, tiled=True)
        x = lax.ppermute(x, DATA, [(0, 1), (1, 0)])
        return lax.psum(x, (DATA, TENSOR))

    facts = audit_local(mesh, step, P())
    received = {each.kind: (each.axes, each.bytes / LOCAL_BYTES) for each in facts.collectives}
    assert received == {
        "reduce-scatter": ((TENSOR,), 3 / 4),
        "all-gather": ((TENSOR,), 3 / 4),
        "all-to-all": ((TENSOR,), 3 / 4),
        "collective-permute": ((DATA,), 1),
        "all-reduce": ((DATA, TENSOR), 2 * 7 / 8),
    }
