"""What is looked up, sorted or taken matrix by matrix, on each device's own parts: against the same on one device."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cjax.mesh import build_mesh
from cjax.sharding.apart.apart import apart, evaluate_apart
from cjax.sharding.apart.lanes import Lane, is_looked_up, lanes
from cjax.trace.jaxpr.simplify import simplify

X, ROWS = np.random.RandomState(0).randn(4, 6, 8), np.arange(4)[:, None]
PICKED = np.random.RandomState(1).randint(-2, 9, (4, 3))  # some are outside
SPLIT = P("row", None, "col")


def written(x: jax.Array) -> jax.Array:
    return jnp.zeros((4, 9, 8), x.dtype).at[:, PICKED[0]].add(x[:, :3])


CASES: dict[str, Callable[[jax.Array], Any]] = {
    "slices": lambda x: x[:, PICKED],
    "filled": lambda x: x.at[:, :, PICKED].get(mode="fill", fill_value=7.0),
    "of each row": lambda x: x[ROWS, PICKED],
    "windows": lambda x: jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at, 2, 0))(x, PICKED[:, 0]),
    "along": lambda x: jnp.take_along_axis(x, PICKED[:, :, None] % 6, 1),
    "added": written,
    "set": lambda x: x.at[:, 1:3, PICKED[1]].set(2.0 * x[:, :2, :3]),
    "largest": lambda x: x.at[PICKED[2] % 4].max(x[:3]),
    "sorted": lambda x: jnp.sort(x, 1),
    "order": lambda x: jnp.argsort(x, 0),
    "top": lambda x: lax.top_k(x, 3),
    "approximate top": lambda x: lax.approx_max_k(x, 3, reduction_dimension=1),
    "eigenvalues": lambda x: jnp.linalg.eigvals(x[:, :, :6]).real,
    "factors": lambda x: lax.linalg.lu(x)[0],
}


def evaluated(function: Callable[[jax.Array], Any], x: jax.Array, spec: P) -> tuple[list[jax.Array], int]:
    """What a function gives, its gathers, scatters and sorts in parts; and how many these were."""
    closed, num = jax.make_jaxpr(function)(X.astype(x.dtype)), 0
    mesh = build_mesh({"pipe": 2, "row": 2, "col": 2}, jax.devices())

    def walk(jaxpr: Any, consts: Any, args: Any) -> list[Any]:
        nonlocal num
        env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return np.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else env[atom]

        for eqn in jaxpr.eqns:
            ins = [jnp.asarray(read(v)) for v in eqn.invars]
            specs = [P(*(axis for axis, _ in zip(spec, v.aval.shape, strict=False))) for v in eqn.invars]
            if eqn.primitive.name in ("jit", "pjit"):
                outs = walk(eqn.params["jaxpr"].jaxpr, eqn.params["jaxpr"].consts, ins)
            elif is_looked_up(eqn):
                parts = apart(eqn, eqn.params, specs, [P() for _ in eqn.outvars], {"row": 2, "col": 2})
                outs, num = evaluate_apart(eqn, ins, parts, mesh), num + 1
            else:
                out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
                outs = out if eqn.primitive.multiple_results else [out]
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def inside(x: jax.Array) -> list[jax.Array]:
        return walk(closed.jaxpr, closed.consts, [x])

    run = jax.shard_map(inside, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"pipe"}, check_vma=False)
    return run(x), num


PAIRS = [(name, spec) for name in CASES for spec in (SPLIT, P(None, "row", "col"))]


@pytest.mark.full(
    "added-spec10",
    "eigenvalues-spec24",
    "factors-spec26",
    "factors-spec27",
    "largest-spec14",
    "set-spec12",
    "set-spec13",
    "slices-spec0",
)
@pytest.mark.parametrize(("name", "spec"), [*PAIRS, ("slices", P()), ("sorted", P())])
def test_is_what_one_device_makes(name: str, spec: P) -> None:
    """Values and gradients, whichever dims the layout splits."""

    def total(outs: Any) -> Any:
        real = [out for out in jax.tree.leaves(outs) if jnp.issubdtype(out.dtype, jnp.inexact)]
        return sum((out * jnp.cos(jnp.arange(out.size).reshape(out.shape))).sum() for out in real)

    def parts(x: jax.Array) -> Any:
        outs, count = evaluated(CASES[name], x, spec)
        assert count
        return total(outs), outs

    def whole(x: jax.Array) -> Any:
        outs = jax.tree.leaves(CASES[name](x))
        return total(outs), outs

    with jax.enable_x64(True):
        if name == "order":
            np.testing.assert_array_equal(jax.jit(parts)(jnp.asarray(X))[1][0], whole(jnp.asarray(X))[1][0])
            return
        grad, outs = jax.jit(jax.grad(parts, has_aux=True))(jnp.asarray(X))
        wanted, others = jax.grad(whole, has_aux=True)(jnp.asarray(X))
        jax.tree.map(np.testing.assert_array_equal, outs, others)
        np.testing.assert_allclose(grad, wanted, rtol=1e-12, atol=1e-12)


def test_of_what_is_looked_up_only_whole_slices_and_rows_go_apart() -> None:
    """And a device's slices are as wide as its part of the table."""

    def equation(function: Callable[..., Any], *args: Any) -> Any:
        closed = jax.make_jaxpr(function)(*args)
        return next(eqn for eqn in simplify(closed).jaxpr.eqns if is_looked_up(eqn))

    table, rows = jnp.zeros((9, 6, 8)), jnp.zeros((4, 3), jnp.int32)
    picked = equation(lambda x, at: x.at[at].get(mode="clip"), table, rows)
    assert lanes(picked) == [
        Lane((1, None), (2,), 6, ("slice_sizes", 1)),
        Lane((2, None), (3,), 8, ("slice_sizes", 2)),
        Lane((None, 0), (0,), 4),
        Lane((None, 1), (1,), 3),
    ]
    parts = apart(picked, picked.params, [P(None, None, "col"), P()], [P("row")], {"row": 2, "col": 2})
    assert parts.ins == [P(None, None, "col"), P("row", None, None)] and parts.params["slice_sizes"] == (1, 6, 4)
    added = equation(lambda x, at, y: x.at[at].add(y, mode="clip"), table, rows, jnp.zeros((4, 3, 6, 8)))
    assert lanes(added) == [Lane((1, None, 2), (1,), 6), Lane((2, None, 3), (2,), 8)], "rows may meet in one place"
    assert lanes(equation(lambda x: lax.top_k(x, 3), table)) == [Lane((0,), (0, 0), 9), Lane((1,), (1, 1), 6)]
