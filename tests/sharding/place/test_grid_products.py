"""The products of a grid in a trace: which matmuls are found, which share an input, and what they give."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import trace_of
from flax import nnx
from jax.extend import core as jex

import cjax
from cjax.audit import audit
from cjax.mesh import build_mesh, compile_lowered
from cjax.models import GPT, gpt
from cjax.models import loss as next_token
from cjax.plan import Plan
from cjax.plan import Sequence as SequencePlan
from cjax.planner.reading.stretches import stretches
from cjax.sharding.layout.layout import make_layout
from cjax.sharding.layout.spreads import Spreads
from cjax.sharding.place.copies import Copies
from cjax.sharding.place.grid_products import GridProducts
from cjax.trace.author.capture import capture
from cjax.trace.emit.precision import LOWS, Lowering
from cjax.trace.jaxpr.groups import Group
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource

MODES = ("2d:4", "2.5d:8/2", "3d:8")
BATCH, SEQ, EMBED = 8, 6, 12


def found_in(trace: Trace, tensor: str, low: bool = False) -> tuple[GridProducts, list[Group]]:
    """Of the equations outside of loops."""
    sizes = Plan.parse(f"tensor={tensor}").resolve(8).axis_sizes()
    mesh, layout = build_mesh(sizes, jax.devices()), make_layout(trace, sizes, {})
    lowering = Lowering(trace.closed, LOWS["bfloat16"]) if low else None
    products = GridProducts(trace.dims, layout, mesh, lowering, Copies(trace, layout, mesh, low), True)
    jaxpr = trace.closed.jaxpr
    return products, products.find(jaxpr.eqns, jaxpr.outvars, trace.dims.top)


def weights_of(trace: Trace, group: Group) -> list[str]:
    origin = trace.dims.top.origin
    leaves = [origin[v] for eqn in group.eqns for v in eqn.invars if v in origin]
    return [trace.leaves[leaf].name for leaf in leaves]


def trace_model(model: Callable[[nnx.Rngs], nnx.Module]) -> Trace:
    batch = jax.ShapeDtypeStruct((BATCH, SEQ, EMBED), jnp.float32)
    return TraceSource(capture(model, lambda model, x: (model(x) ** 2).mean(), batch), batch).read()


class Weights(nnx.Module):
    """Weights of these shapes, and a function of an input and them."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], call: Callable[..., jax.Array], *, rngs: nnx.Rngs):
        self.weights = nnx.List([nnx.Param(rngs.params.normal(shape)) for shape in shapes])
        self.call = call

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.call(x, *(weight[...] for weight in self.weights))


def model(call: Callable[..., jax.Array], *shapes: tuple[int, ...]) -> Callable[[nnx.Rngs], nnx.Module]:
    return lambda rngs: Weights(shapes, call, rngs=rngs)


# -- what is found ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tensor", MODES)
def test_matmuls_that_share_an_input_come_together(tensor: str) -> None:
    trace = trace_of("nnx_llama")
    _, groups = found_in(trace, tensor)
    first = [sorted(name.split("/", 2)[2] for name in names) for names in map(lambda g: weights_of(trace, g), groups)
             if names[0].startswith("blocks/0/")]  # fmt: skip
    assert sorted(first) == [["down/kernel"], ["gate/kernel", "up/kernel"], ["key", "query", "value"], ["out"]]
    assert sum(len(group.eqns) for group in groups) == 4 * 7 + 1, "four layers, and the head"


def test_there_are_none_without_a_grid() -> None:
    trace = trace_of("nnx_llama")
    layout = make_layout(trace, {"data": 2, "tensor": 4}, {})
    mesh, jaxpr = build_mesh({"data": 2, "tensor": 4}, jax.devices()), trace.closed.jaxpr
    products = GridProducts(trace.dims, layout, mesh, None, Copies(trace, layout, mesh), True)
    assert not products.find(jaxpr.eqns, jaxpr.outvars, trace.dims.top)


@pytest.mark.parametrize("tensor", MODES)
def test_products_of_activations_and_of_experts_are_left_to_the_compiler(tensor: str) -> None:
    trace = trace_of("linen_moe_capacity")
    _, groups = found_in(trace, tensor)
    for group in groups:
        for eqn in group.eqns:
            assert not any(eqn.params["dimension_numbers"][1]), "no batch dims: each expert has its own weight"
            assert sum(v in trace.dims.top.origin for v in eqn.invars) == 1


def test_matmuls_of_another_precision_are_apart() -> None:
    def call(x: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.concatenate([x @ a, jnp.matmul(x, b, precision="highest")], -1) @ jnp.ones(44)

    trace = trace_model(model(call, (EMBED, 20), (EMBED, 24)))
    _, groups = found_in(trace, "2d:4")
    assert sorted(len(group.eqns) for group in groups) == [1, 1]


# -- results ----------------------------------------------------------------------------------------------------------
def evaluated(trace: Trace, tensor: str, low: bool = False) -> list[tuple[Any, list[np.ndarray], list[np.ndarray]]]:
    """Each group: its first equation, what the grid makes of random inputs, and what one device does."""
    products, groups = found_in(trace, tensor, low)
    assert groups
    rng, results = np.random.default_rng(4), []
    for group in groups:
        ins = [rng.standard_normal(var.aval.shape, dtype=np.float32) for var in group.ins]
        env = dict(zip(group.ins, ins, strict=True))
        # Bound with the group's own equations: a function of one's own for each.
        given = jax.jit(lambda *ins, group=group: products.evaluate(group, list(ins), trace.dims.top))(*ins)
        wanted = [plain(eqn, [env[v] for v in eqn.invars]) for eqn in group.eqns]
        results.append((group.eqns[0], [np.asarray(y) for y in given], wanted))
    return results


def plain(eqn: Any, ins: list[Any]) -> np.ndarray:
    return np.asarray(eqn.primitive.bind(*map(jnp.asarray, ins), **eqn.primitive.get_bind_params(eqn.params)))


@pytest.mark.full(
    "linen_packed_qkv-2.5d:8/2", "linen_packed_qkv-3d:8", "nnx_llama-2.5d:8/2", "nnx_llama-2d:4", "nnx_llama-3d:8"
)
@pytest.mark.parametrize("tensor", MODES)
@pytest.mark.parametrize("name", ["linen_packed_qkv", "nnx_llama"])
def test_every_product_of_a_model(name: str, tensor: str) -> None:
    """Among them a head whose vocabulary of 101 is padded."""
    for eqn, given, wanted in evaluated(trace_of(name), tensor)[-8:]:
        for a, b in zip(given, wanted, strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=str(eqn))


def shared(h: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.concatenate([h @ w, h @ v], axis=-1)


# [out, in] as PyTorch has it; both dims of heads; a contraction of two dims; sizes that divide by nothing.
WAYS: dict[str, tuple[Callable[..., jax.Array], tuple[tuple[int, ...], ...]]] = {
    "transposed": (lambda x, w: jnp.einsum("bse,fe->bsf", x, w), ((20, EMBED),)),
    "weight first": (lambda x, w: jnp.einsum("ef,bse->fbs", w, x), ((EMBED, 20),)),
    "heads": (lambda x, w, v: jnp.einsum("bshd,hde->bse", jnp.einsum("bse,ehd->bshd", x, w), v),
              ((EMBED, 4, 5), (4, 5, EMBED))),
    # In 3d the first of the two is split behind its 18 rows, the second along them, which takes 20.
    "two that pad what they share differently": (lambda x, u, w, v: shared(x @ u, w, v),
                                                 ((EMBED, 18), (18, 8), (18, 10))),
    "uneven": (lambda x, w, v: jnp.tanh(x @ w) @ v, ((EMBED, 23), (23, 17))),
}  # fmt: skip


@pytest.mark.parametrize("tensor", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_weights_in_any_order_and_of_any_size(way: str, tensor: str) -> None:
    call, shapes = WAYS[way]
    for _, given, wanted in evaluated(trace_model(model(call, *shapes)), tensor):
        for a, b in zip(given, wanted, strict=True):
            assert a.shape == b.shape
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_low_precision_rounds_the_operands_and_keeps_the_sum() -> None:
    call, shapes = WAYS["uneven"]
    for eqn, given, wanted in evaluated(trace_model(model(call, *shapes)), "2d:4", low=True):
        assert {str(y.dtype) for y in given} <= {"bfloat16", "float32"}, eqn
        for a, b in zip(given, wanted, strict=True):
            off = np.linalg.norm(a.astype("float32") - b) / np.linalg.norm(b)
            assert 1e-4 < off < 1e-2, "rounded to 8 bits, and not more than twice"


def test_literals_are_no_weights() -> None:
    trace = trace_model(model(lambda x, w: (x @ w) @ jnp.ones((20, 8)), (EMBED, 20)))
    _, groups = found_in(trace, "2d:4")
    assert all(not isinstance(v, jex.Literal) for group in groups for eqn in group.eqns for v in eqn.invars)


def test_positions_that_do_not_divide_are_spread() -> None:
    """15 of them, over 2 devices: queries, keys and values, their result, and both products of the MLP."""
    trace = trace_of("linen_vit")
    layout = make_layout(trace, {"tensor": 2}, {}, sequence=SequencePlan(mode="gather"))
    spreads = Spreads(trace.dims, layout)
    lists = [some for stretch in stretches(trace) for body in stretch.bodies for some in body.lists]
    moves = [spread for some in lists for group in spreads.find(*some) for spread in group.of.values()]
    assert [bool(spread.gather_x) for spread in moves].count(True) == 4
    assert [bool(spread.scatter_y) for spread in moves].count(True) == 2


@pytest.mark.aot
def test_what_positions_scatter_is_hidden_under_the_gradients_of_weights() -> None:
    """Of `sequence=gather`, an input's gradient; and the input that these are of is gathered beside other products."""
    config = gpt("gpt-mini", num_layers=2, embed_dim=4096, num_heads=32, mlp_dim=16384, vocab_size=512, context=2048)
    tokens = jax.ShapeDtypeStruct((4, 2048), jnp.int32)
    program = cjax.parallelize(
        lambda rngs: GPT(config, rngs=rngs), next_token, optax.sgd(0.1), {"inputs": tokens, "targets": tokens},
        "tensor=4 sequence=gather precision=bfloat16", devices="h100:4",
    )  # fmt: skip
    facts = audit(compile_lowered(program.lower(), list(program.mesh.devices.flat)), program.mesh)
    back = [c for c in facts.collectives if "transpose(jvp" in c.op_name and c.bytes > 2**24]
    scattered = [c for c in back if c.kind == "reduce-scatter"]
    least = 2 * tokens.size * config.embed_dim**2 / 4  # the smallest weight's
    assert len(scattered) == 2 and all(c.is_async and c.overlap_flops >= least for c in scattered)
    assert sum(c.overlap_flops >= least for c in back if c.kind == "all-gather") >= 1


@pytest.mark.parametrize(
    ("num", "plan", "waits"),
    [
        (2, "tensor=2 sequence=gather", True),
        (4, "data=2 tensor=2 sequence=gather", False),  # weights' gradients are sums over devices themselves
        (4, "pipeline=1f1b:2 microbatches=2 tensor=2 sequence=gather", True),
        (4, "pipeline=zero_bubble:2 microbatches=2 tensor=2 sequence=gather", False),  # which makes them when it likes
        (4, "tensor=2d:4", False),
    ],
)
def test_an_inputs_gradient_waits_for_those_of_weights_that_stay(num: int, plan: str, waits: bool) -> None:
    config, tokens = gpt("gpt-mini", num_layers=2), jax.ShapeDtypeStruct((4, 16), jnp.int32)
    program = cjax.parallelize(
        lambda rngs: GPT(config, rngs=rngs), next_token, optax.sgd(0.1), {"inputs": tokens, "targets": tokens}, plan,
        devices=jax.devices()[:num],
    )  # fmt: skip
    assert ("optimization_barrier" in program.lower().as_text()) is waits
