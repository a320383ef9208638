"""Functions on each device's own parts: their gradients are summed by the caller, and only there."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.audit import audit
from cjax.mesh import build_mesh
from cjax.sharding.products.region import in_region, rest_of

ROWS, WIDTH, OUT = 8, 6, 10


def grid(**sizes: int) -> Mesh:
    return build_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.standard_normal(shape) for shape in shapes]


def product(x: jax.Array, w: jax.Array) -> list[jax.Array]:
    return [x @ w]


def test_value_and_gradients_are_those_of_the_whole() -> None:
    """`w` is shared by the rows, `x` by the columns: the gradients of both are sums over devices."""
    mesh, (x, w, seed) = grid(row=2, col=2), arrays((ROWS, WIDTH), (WIDTH, OUT), (ROWS, OUT))
    with jax.enable_x64(True):

        def call(x: jax.Array, w: jax.Array) -> jax.Array:
            return in_region(product, (x, w), (P("row", None), P(None, "col")), (P("row", "col"),), mesh)[0]

        y, pull = jax.vjp(jax.jit(call), x, w)
        dx, dw = pull(jnp.asarray(seed))
    for given, wanted in ((y, x @ w), (dx, seed @ w.T), (dw, x.T @ seed)):
        np.testing.assert_allclose(given, wanted, rtol=1e-12, atol=1e-12)


def test_results_are_summed_over_the_axes_that_are_named() -> None:
    mesh, (x, w, seed) = grid(row=2, col=2), arrays((ROWS, WIDTH), (WIDTH, OUT), (ROWS, OUT))
    specs = (P("row", "col"), P("col", None)), (P("row", None),)
    with jax.enable_x64(True):
        y, pull = jax.vjp(jax.jit(lambda x, w: in_region(product, (x, w), *specs, mesh, [("col",)])[0]), x, w)
        dx, dw = pull(jnp.asarray(seed))
    for given, wanted in ((y, x @ w), (dx, seed @ w.T), (dw, x.T @ seed)):
        np.testing.assert_allclose(given, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "int16", "int32", "bfloat16", "float32"])
def test_sums_have_the_dtype_of_what_is_summed(dtype: str) -> None:
    """Each device has its own rows and zeros for the others: what `~` makes of wider integers is another."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("a",))
    x = jnp.asarray(np.arange(8) % 3, dtype)

    def mine(shard: jax.Array) -> list[jax.Array]:
        whole = jnp.zeros(8, shard.dtype)
        return [jax.lax.dynamic_update_slice(whole, shard, (2 * jax.lax.axis_index("a"),))]

    (found,) = jax.jit(lambda x: in_region(mine, (x,), (P("a"),), (P(),), mesh, (("a",),)))(x)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found.astype("float32"), x.astype("float32"))


def test_integers_are_passed_on_and_have_no_gradient() -> None:
    mesh, (table,) = grid(row=2), arrays((ROWS, WIDTH))
    indices = np.arange(12) % ROWS

    def look(table: jax.Array) -> jax.Array:
        specs = (P(), P("row")), (P("row", None),)
        return in_region(lambda t, i: [t[i]], (table, jnp.asarray(indices)), *specs, mesh)[0]

    with jax.enable_x64(True):
        found, pull = jax.vjp(jax.jit(look), table)
        (grad,) = pull(jnp.ones_like(found))
    np.testing.assert_array_equal(found, table[indices])
    np.testing.assert_array_equal(grad, np.bincount(indices, minlength=ROWS)[:, None] * np.ones(WIDTH))


def test_a_gradient_in_parts_is_scattered_and_nowhere_whole() -> None:
    """The sum over the batch belongs to whoever asks for it: placed in parts, it is summed part by part."""
    mesh = grid(data=4, col=2)
    x, w = (jax.ShapeDtypeStruct(shape, np.float32) for shape in ((ROWS, WIDTH), (WIDTH * 4, OUT)))

    def grad(x: jax.Array, w: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            (y,) = in_region(
                lambda x, w: [jnp.tanh(x @ w[:WIDTH])], (x, w), (P("data", None), P(None, "col")),
                (P("data", "col"),), mesh,
            )  # fmt: skip
            return y.sum()

        return lax.with_sharding_constraint(jax.grad(loss)(w), NamedSharding(mesh, P("data", "col")))

    ins = [NamedSharding(mesh, spec) for spec in (P("data", None), P(None, "col"))]
    jaxpr = str(jax.make_jaxpr(grad)(x, w))
    assert "psum" not in jaxpr, "the region itself sums nothing"
    facts = audit(jax.jit(grad, in_shardings=ins).lower(x, w).compile(), mesh)
    assert {c.axes for c in facts.collectives} == {("data",)}


def test_what_is_gathered_inside_is_not_saved() -> None:
    """Saved for the backward pass are the operands as they are kept."""
    mesh = grid(row=2, col=2)

    def gathered(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        return [jnp.tanh(x) @ lax.all_gather(w, "row", axis=0, tiled=True)]

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        return in_region(gathered, (x, w), (P("row", None), P("row", "col")), (P("row", "col"),), mesh)[0]

    _, pull = jax.vjp(jax.jit(call), jnp.ones((ROWS, WIDTH)), jnp.ones((WIDTH, OUT)))
    saved = sorted(leaf.shape for leaf in jax.tree.leaves(pull))
    assert saved == sorted([(ROWS, WIDTH), (WIDTH, OUT)])


def test_several_results_and_a_dim_that_nothing_splits() -> None:
    mesh, (x,) = grid(row=2, col=2), arrays((ROWS, WIDTH))

    def both(x: jax.Array) -> Sequence[jax.Array]:
        return in_region(lambda x: [2 * x, x.sum(1)], (x,), (P("row"),), (P("row", None), P("row")), mesh)

    with jax.enable_x64(True):
        (twice, sums), pull = jax.vjp(jax.jit(both), x)
        (grad,) = pull([jnp.ones_like(twice), jnp.ones_like(sums)])
    np.testing.assert_allclose(twice, 2 * x)
    np.testing.assert_allclose(sums, x.sum(1))
    np.testing.assert_allclose(grad, np.full_like(x, 3))


@pytest.mark.parametrize("gathered", [False, True])
def test_a_result_that_devices_hold_alike_counts_once(gathered: bool) -> None:
    """`w` lies whole along columns or is gathered there: either way all columns find the same rows."""
    mesh, (x, w, seed) = grid(row=2, col=2), arrays((ROWS, WIDTH), (WIDTH, OUT), (ROWS, OUT))

    def whole(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        w = lax.all_gather(w, "col", tiled=True) if gathered else w
        return [lax.all_gather(x, "col", axis=1, tiled=True) @ w]

    specs = (P("row", "col"), P("col" if gathered else None, None)), (P("row", None),)
    with jax.enable_x64(True):
        y, pull = jax.vjp(jax.jit(lambda x, w: in_region(whole, (x, w), *specs, mesh)[0]), x, w)
        dx, dw = pull(jnp.asarray(seed))
    for given, wanted in ((y, x @ w), (dx, seed @ w.T), (dw, x.T @ seed)):
        np.testing.assert_allclose(given, wanted, rtol=1e-12, atol=1e-12)


def test_a_region_of_no_axes_is_a_call() -> None:
    (y,) = in_region(lambda x: [x + 1], (jnp.ones(3),), (P(None),), (P(None),), grid(row=2, col=2))
    np.testing.assert_array_equal(y, [2, 2, 2])


@pytest.mark.parametrize("inner", ["row", "col"])
def test_axes_that_are_manual_already_are_left_out(inner: str) -> None:
    """As in a pipeline's stage: what the outer region has taken apart, the inner one does not."""
    mesh, (x, w) = grid(data=2, row=2, col=2), arrays((2, ROWS, WIDTH), (WIDTH, OUT))

    def stage(x: jax.Array, w: jax.Array) -> jax.Array:
        specs = (P(("data", inner), None), P(None, None)), (P(("data", inner), None),)
        return in_region(product, (x[0], w), *specs, mesh)[0][None]

    with jax.enable_x64(True):
        outer = jax.shard_map(
            stage, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        found = jax.jit(outer)(x, w)
    np.testing.assert_allclose(found, x @ w, rtol=1e-12)


def test_the_rest_of_a_placement() -> None:
    assert rest_of(P(("data", "row"), "col", None), {"data"}) == P(("row",), ("col",), None)
    assert rest_of(P("data"), {"data"}) == P(None)
