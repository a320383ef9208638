"""What the placer asks of XLA: read off the jaxpr that comes out."""

from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import trace_of
from jax._src.ad_checkpoint import saved_residuals
from jax.extend import core as jex
from jax.sharding import PartitionSpec as P

import cjax
from cjax.audit import audit
from cjax.mesh import build_mesh, compiler_options
from cjax.sharding.layout.layout import make_layout
from cjax.sharding.place.place import Placer, WeightPlacement, constrained
from cjax.sharding.place.saved import POLICIES

SIZES = {"data": 4, "tensor": 2}


def placer(placement: WeightPlacement | None = None, **kwargs: Any) -> Placer:
    """Of the NNX decoder's trace; input 0 is placed as given."""
    trace = trace_of("nnx_decoder")
    mesh = build_mesh(SIZES, jax.devices())
    weights = {} if placement is None else {0: placement}
    return Placer(trace, make_layout(trace, SIZES, {}), mesh, weights, **kwargs)


def constraints(function: Callable[..., Any], *args: Any) -> list[tuple[P, str]]:
    """Spec and dtype of each sharding constraint, in order."""

    def walk(jaxpr: Any) -> Iterator[Any]:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield eqn
            for inner in jex.jaxprs_in_params(eqn.params):
                yield from walk(inner)

    eqns = [e for e in walk(jax.make_jaxpr(function)(*args)) if e.primitive.name == "sharding_constraint"]
    return [(e.params["sharding"].spec, str(e.outvars[0].aval.dtype)) for e in eqns]


WHOLE, PART = P(None, None), P("data", None)


def test_a_weight_is_used_as_laid_out_and_its_gradient_leaves_in_parts() -> None:
    place = placer(WeightPlacement(WHOLE, PART))
    grad = jax.grad(lambda w: (place.weight(0, w) ** 2).sum())
    assert constraints(grad, jnp.ones((8, 8))) == [(WHOLE, "float32"), (PART, "float32")]


def test_low_precision_rounds_before_it_gathers_and_sums_in_float32() -> None:
    leaf = next(iter(sorted(placer(precision="bfloat16")._rounded)))
    trace = trace_of("nnx_decoder")
    mesh = build_mesh(SIZES, jax.devices())
    place = Placer(
        trace, make_layout(trace, SIZES, {}), mesh, {leaf: WeightPlacement(WHOLE, PART)}, precision="bfloat16"
    )
    grad = jax.grad(lambda w: (place.weight(leaf, w).astype(jnp.float32) ** 2).sum())
    assert constraints(grad, jnp.ones((8, 8))) == [(WHOLE, "bfloat16"), (PART, "float32")]


def test_only_weights_of_matmuls_and_lookups_are_rounded() -> None:
    trace, place = trace_of("nnx_decoder"), placer(precision="bfloat16")
    rounded = {trace.leaves[i].name.split("/")[-1] for i in place._rounded}
    assert rounded == {"kernel", "embedding"}


def test_a_layer_of_an_authors_stack_has_lost_its_first_dim() -> None:
    place = placer(WeightPlacement(P(None, "tensor", None), P(None, "tensor", "data")))
    assert constraints(lambda w: place.weight(0, w), jnp.ones((8, 8))) == [(P("tensor", None), "float32")]


def contracted(mesh: Any, *placements: P) -> float:
    """How far off XLA is with a product whose batch dim and sums are split, its result placed as these say."""
    left, right = np.random.default_rng(0).normal(size=(2, 16, 4, 3))

    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (constrained(x, mesh, P(("data", "row"), "col", None)) for x in (a, b))
        found = jnp.einsum("bgw,bgv->gwv", a, b)
        for placement in placements:
            found = constrained(found, mesh, placement)
        return found

    found = jax.jit(product, compiler_options=compiler_options(mesh))(left, right)
    return float(np.abs(found - np.einsum("bgw,bgv->gwv", left, right)).max())


def test_gradients_of_experts_are_summed_before_zero_splits_them() -> None:
    """XLA loses half of the sum otherwise: where it does no more, `Placer._sums_wrong` can go."""
    mesh = build_mesh({"data": 2, "row": 2, "col": 2}, jax.devices())
    used, split = P("col", None, None), P(("col", "data"), None, None)
    assert contracted(mesh, split) > 1, f"XLA of JAX {jax.__version__} sums batched products right: remove _sums_wrong"
    assert contracted(mesh, used, split) < 1e-5
    trace = trace_of("linen_moe_capacity")
    leaf = next(o for m in trace.dims.matmuls if m.batched for o in (m.rhs_origin, m.lhs_origin) if o is not None)
    plain = next(o for m in trace.dims.matmuls if not m.batched for o in (m.rhs_origin, m.lhs_origin) if o is not None)
    for axes, sums_first in (({"data": 2, "row": 2, "col": 2}, True), ({"data": 4, "col": 2}, False)):
        mesh = build_mesh(axes, jax.devices())
        layout = make_layout(trace, {"data": 8, "tensor": 1}, {})
        place = Placer(trace, layout, mesh, dict.fromkeys((leaf, plain), WeightPlacement(used, split)))
        for which, wanted in ((leaf, [used, used, split] if sums_first else [used, split]), (plain, [used, split])):
            grad = jax.grad(lambda w, which=which, place=place: (place.weight(which, w) ** 2).sum())
            assert [spec for spec, _ in constraints(grad, jnp.ones((4, 3, 3)))] == wanted


def test_one_device_is_left_alone() -> None:
    trace = trace_of("nnx_decoder")
    sizes = {"data": 1, "tensor": 1}
    mesh, weights = build_mesh(sizes, jax.devices()[:1]), {0: WeightPlacement(WHOLE, WHOLE)}
    alone = Placer(trace, make_layout(trace, sizes, {}), mesh, weights)
    assert not constraints(lambda w: alone.weight(0, w), jnp.ones((8, 8)))
    assert not constraints(lambda w: alone.constrain(w, WHOLE), jnp.ones((8, 8)))


def test_results_of_matmuls_are_pinned_and_of_the_rest_not(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, place = trace_of("nnx_decoder"), placer()
    pinned: list[str] = []
    monkeypatch.setattr(Placer, "constrain", lambda self, value, spec: pinned.append(name) or value)
    for eqn in trace.closed.jaxpr.eqns:
        name = eqn.primitive.name
        shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]
        jax.eval_shape(lambda *a, eqn=eqn: place.equation(eqn, list(a), trace.dims.top), *shapes)
    assert set(pinned) == {"dot_general", "gather"}


def test_activations_lie_by_their_dims() -> None:
    trace, place = trace_of("nnx_decoder"), placer()
    dots = [eqn for eqn in trace.closed.jaxpr.eqns if eqn.primitive.name == "dot_general"]
    up = next(eqn for eqn in dots if eqn.outvars[0].aval.shape == (16, 12, 64))
    args = [jnp.zeros(v.aval.shape) for v in up.invars]
    found = constraints(lambda *a: place.equation(up, list(a), trace.dims.top), *args)
    assert found == [(P("data", None, "tensor"), "float32")]


# -- remat ------------------------------------------------------------------------------------------------------------
def body(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


def test_layers_save_results_of_matmuls_and_make_the_rest_again() -> None:
    def mlp(w: jax.Array, x: jax.Array) -> jax.Array:
        return (jax.nn.gelu(x @ w) @ w.T).sum()

    def saved(function: Callable[..., Any]) -> list[tuple[int, ...]]:
        found = saved_residuals(function, jnp.ones((8, 16)), jnp.ones((4, 8)))
        return [aval.shape for aval, what in found if "argument" not in what]

    assert saved(mlp).count((4, 16)) > 2, "gelu alone keeps several"
    assert saved(placer().layer(mlp)).count((4, 16)) == 1
    assert placer().whole(mlp) is mlp


def test_of_dropout_one_byte_is_saved() -> None:
    def dropped(w: jax.Array, x: jax.Array) -> jax.Array:
        keep = jax.random.bernoulli(jax.random.key(0), 0.9, (4, 16))
        return (jnp.where(keep, x @ w, 0.0) @ w.T).sum()

    found = saved_residuals(placer().layer(dropped), jnp.ones((8, 16)), jnp.ones((4, 8)))
    assert [aval.dtype for aval, what in found if aval.shape == (4, 16)].count(jnp.dtype(bool)) == 1
    assert not any(aval.dtype == jnp.uint32 and aval.shape == (4, 16) for aval, _ in found)


REMAKES: list[dict[str, Any]] = [{"gathers": True}, {"precision": "bfloat16"}, {"remat": "dots"}, {"remat": "block"}]


@pytest.mark.parametrize("kwargs", REMAKES)
def test_what_is_made_again_is_checkpointed(kwargs: dict[str, Any]) -> None:
    place = placer(**kwargs)
    assert place.layer(body) is not body
    assert place.whole(body) is body, "the loop over layers does it"


def test_gathered_weights_are_not_saved() -> None:
    """Saved for the backward pass are activations and the weight as it is kept, not as it is used."""
    place = placer(WeightPlacement(WHOLE, PART), gathers=True)

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ place.weight(0, w)).sum()

    def saved(function: Callable[..., Any]) -> list[tuple[int, ...]]:
        found = saved_residuals(function, jnp.ones((8, 8)), jnp.ones((4, 8)))
        return [aval.shape for aval, what in found if "argument" not in what]

    assert (8, 8) in saved(layer)
    assert (8, 8) not in saved(jax.checkpoint(layer, policy=POLICIES["none"]))
    assert (4, 8) in saved(jax.checkpoint(layer, policy=POLICIES["none"])), "activations still are"
    assert not saved(jax.checkpoint(layer, policy=POLICIES["block"]))


def test_the_largest_of_each_row_are_found_where_the_row_is() -> None:
    """Rows are split by data, what they are made of by tensor: XLA would gather all rows of scores first."""

    class Router(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            scores = nn.Dense(6)(nn.tanh(nn.Dense(16)(x)))
            best, which = jax.lax.top_k(scores, 2)
            return (best * jnp.cos(which)).mean()

    batch = jax.ShapeDtypeStruct((32, 12), jnp.float32)
    program = cjax.parallelize(Router(), lambda model, x: model(x), optax.sgd(0.1), batch, "data=2 tensor=4")
    facts = audit(program.lower().compile(), program.mesh)
    assert facts.moved("all-gather", ["data"]) == 0
    weights = sum(x.size for x in jax.tree.leaves(program.params(program.init(0))))
    assert facts.moved_by_axis()["data"] <= 4 * weights + 64
