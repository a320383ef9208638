"""Products with a shared operand, of any rank, spread over a grid."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cjax.audit import Audit, audit
from cjax.jax_compat.core import jaxprs_in_params
from cjax.mesh import build_mesh
from cjax.sharding.place.saved import checkpointed
from cjax.sharding.products import matmul
from cjax.sharding.products.matmul import MAX_STEPS, STEP_BYTES, Move, Spread, multiply

LAYERS, BATCH, SEQ, EMBED, HEADS, SIZE, FFN = 3, 8, 6, 20, 4, 7, 28
SHARED = ("query", "up", "flipped")  # what one activation is multiplied with
WEIGHTS: dict[str, tuple[int, ...]] = {
    "query": (EMBED, HEADS, SIZE), "up": (EMBED, FFN), "flipped": (FFN, EMBED), "out": (HEADS, SIZE, EMBED),
}  # fmt: skip

SQUARE = Spread(((1,), (0,)), P("row", "col"), P("row", "col"), P("row", "col"), Move("col", 1), Move("row", 0))


def grid(mode: str) -> Mesh:
    sizes = {"2d": ("row", "col"), "2.5d": ("depth", "row", "col"), "3d": ("i", "j", "k")}[mode]
    return build_mesh(dict.fromkeys(sizes, 2), jax.devices()[: 2 ** len(sizes)])


def spread(mode: str, weight: str) -> Spread:
    """Of [batch, seq, embed] times a weight of `SHARED`, or of [batch, seq, heads, size] times `out`."""
    dim = 1 if weight == "flipped" else 0
    contracted = ((2, 3), (0, 1)) if weight == "out" else ((2,), (dim,))
    free = {"query": 1, "up": 1, "flipped": 0, "out": 2}[weight]
    more = [None] * (len(WEIGHTS[weight]) - len(contracted[1]) - 1)
    rest = [None] * (len(contracted[0]) - 1)
    entries: list[Any] = [None] * len(WEIGHTS[weight])
    if mode != "3d":
        rows = ("depth", "row") if mode == "2.5d" else "row"
        entries[dim], entries[free] = "row", "col"
        return Spread(
            contracted, P(rows, None, "col", *rest), P(*entries), P(rows, None, "col", *more),
            Move("col", 2), Move("row", dim),
        )  # fmt: skip
    # Features come on k and leave on j, but for the matmul that leads back.
    come, leave = ("j", "k") if weight == "out" else ("k", "j")
    entries[dim], entries[free] = (come, "i"), leave
    return Spread(
        contracted, P(("i", leave), None, come, *rest), P(*entries), P(("i", come), None, leave, *more),
        Move(leave, 0), Move("i", dim), Move(come, 0),
    )  # fmt: skip


def plain(x: Any, w: Any, contracted: Any) -> Any:
    return np.tensordot(x, w, contracted) if isinstance(x, np.ndarray) else jnp.tensordot(x, w, contracted)


def arrays(shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    return [rng.standard_normal(shape) for shape in shapes]


def compare(mode: str, weights: Sequence[str], **options: Any) -> None:
    """Values and gradients against one device's, in float64."""
    mesh, spreads = grid(mode), [spread(mode, name) for name in weights]
    x_shape = (BATCH, SEQ, HEADS, SIZE) if "out" in weights else (BATCH, SEQ, EMBED)
    x, *ws = arrays([x_shape, *(WEIGHTS[name] for name in weights)])
    seeds = arrays([plain(x, w, s.contracted).shape for w, s in zip(ws, spreads, strict=True)])
    with jax.enable_x64(True):
        given, pull = jax.vjp(jax.jit(lambda x, ws: multiply(x, ws, spreads, mesh, **options)), x, ws)
        wanted, pull_plain = jax.vjp(lambda x, ws: [plain(x, w, s.contracted) for w, s in zip(ws, spreads)], x, ws)  # noqa: B905
        seeds = [jnp.asarray(seed) for seed in seeds]
        given, wanted = ((values, back(seeds)) for values, back in ((given, pull), (wanted, pull_plain)))
    assert jax.tree.structure(given) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-11), given, wanted)


@pytest.mark.parametrize("options", [{}, {"steps": 2}, {"keep": True}], ids=str)
@pytest.mark.parametrize("weights", [SHARED, ("out",), ("query",)], ids=str)
@pytest.mark.parametrize("mode", ["2d", "2.5d", "3d"])
def test_products_of_any_rank_and_their_gradients(mode: str, weights: Sequence[str], options: dict[str, Any]) -> None:
    compare(mode, weights, **options)


def test_a_weight_that_lies_whole_along_one_axis() -> None:
    """No dim of it divides twice: it is not gathered, and its gradient is summed over the axis."""
    mesh = grid("2d")
    x, w, seed = arrays([(BATCH, EMBED), (EMBED, FFN), (BATCH, FFN)])
    one = Spread(((1,), (0,)), P("row", "col"), P(None, "col"), P("row", "col"), Move("col", 1), None)
    with jax.enable_x64(True):
        y, pull = jax.vjp(jax.jit(lambda x, w: multiply(x, [w], [one], mesh)[0]), x, w)
        dx, dw = pull(jnp.asarray(seed))
    for given, wanted in ((y, x @ w), (dx, seed @ w.T), (dw, x.T @ seed)):
        np.testing.assert_allclose(given, wanted, rtol=1e-12, atol=1e-12)


# -- transfers --------------------------------------------------------------------------------------------------------
def layered(mode: str, weights: Sequence[str], **options: Any) -> tuple[Audit, Audit]:
    """Of the forward loop over layers alone, and with the backward one."""
    mesh, spreads = grid(mode), [spread(mode, name) for name in weights]

    def forward(x: jax.Array, ws: Sequence[jax.Array]) -> Any:
        return jax.lax.scan(lambda _, xw: (None, multiply(*xw, spreads, mesh, **options)), None, (x, ws))[1]

    def step(x: jax.Array, ws: Sequence[jax.Array], seeds: Any) -> Any:
        ys, pull = jax.vjp(forward, x, ws)
        return ys, pull(seeds)

    def placed(spec: P) -> NamedSharding:
        return NamedSharding(mesh, P(None, *spec))

    x = jax.ShapeDtypeStruct((LAYERS, BATCH, SEQ, EMBED), np.float32)
    ws = [jax.ShapeDtypeStruct((LAYERS, *WEIGHTS[name]), np.float32) for name in weights]
    ins = placed(spreads[0].x), [placed(s.w) for s in spreads]
    outs = [placed(s.y) for s in spreads]
    one = jax.jit(forward, in_shardings=ins, out_shardings=outs)
    both = jax.jit(step, in_shardings=(*ins, outs), out_shardings=(outs, ins))
    seeds = jax.eval_shape(forward, x, ws)
    return audit(one.lower(x, ws).compile(), mesh), audit(both.lower(x, ws, seeds).compile(), mesh)


@pytest.mark.full("2d-col", "3d-j")
@pytest.mark.parametrize(("mode", "axis"), [("2d", "col"), ("2.5d", "col"), ("3d", "j")])
def test_weights_share_one_gather_and_one_scatter_of_the_gradient(mode: str, axis: str) -> None:
    """Of x [batch, seq, embed]: gathered once forward and once backward, its gradient scattered once."""
    forward, both = layered(mode, SHARED, steps=1)
    assert forward.count("all-gather", [axis]) == LAYERS
    assert both.count("reduce-scatter", [axis]) == LAYERS
    assert both.count("all-gather", [axis]) == 2 * LAYERS
    alone = sum(layered(mode, [name], steps=1)[1].moved(axes=[axis]) for name in SHARED)
    assert both.moved(axes=[axis]) == pytest.approx(alone / len(SHARED), rel=0.01)


def test_nothing_gathered_is_kept_unless_asked() -> None:
    """Gathered operands of all layers are what `keep` adds to the memory between the two passes."""
    (_, again), (_, kept) = (layered("2d", ["up"], steps=1, keep=keep) for keep in (False, True))
    assert again.memory is not None and kept.memory is not None
    gathered = 4 * LAYERS * (BATCH * SEQ * EMBED / 2 + EMBED * FFN / 2)
    assert kept.memory.temporary - again.memory.temporary >= 0.9 * gathered
    assert kept.moved("all-gather") == pytest.approx(again.moved("all-gather") / 2, rel=0.01)


def test_low_precision_adds_up_in_float32() -> None:
    """Of a sum in steps: each step rounded to 8 bits would lose a small part beside a large one."""
    mesh = grid("2d")
    x = jnp.ones((2, 64), jnp.bfloat16)
    w = jnp.full((64, 2), 2.0**-9, jnp.bfloat16).at[0].set(1.0).at[32].set(1.0)  # a step adds half of 2's last bit
    (y,) = jax.jit(lambda x, w: multiply(x, [w], [SQUARE], mesh, steps=16))(x, w)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y.astype(np.float32), jnp.full((2, 2), 2 + 62 / 512, jnp.bfloat16).astype(np.float32))


def test_sums_of_low_precision_are_kept_wide_on_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    """There operands stay as they are, and the matmul itself sums wide: CPUs have no kernel for it, so this is read."""
    monkeypatch.setattr(matmul, "raised_on_cpu", lambda operand, mesh: operand)
    for dtype in (jnp.bfloat16, jnp.float16):
        x, w = jnp.ones((2, 64), dtype), jnp.ones((64, 2), dtype)
        made = str(jax.make_jaxpr(lambda x, w: multiply(x, [w], [SQUARE], grid("2d"), steps=2))(x, w))
        assert made.count("dot_general[") == made.count("preferred_element_type=float32") == 2, made


def test_gradients_are_multiplied_in_low_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of wide sums too: a float32 operand would halve a card's speed, and hold nothing that bfloat16 does not."""
    monkeypatch.setattr(matmul, "raised_on_cpu", lambda operand, mesh: operand)
    x, w = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((64, 2), jnp.bfloat16)

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        (y,) = multiply(x, [w], [SQUARE], grid("2d"), steps=1)
        return y.astype(jnp.float32).sum()

    read = operands(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w).jaxpr)
    assert len(read) >= 6 and set(read) == {jnp.dtype(jnp.bfloat16)}, read


def test_gradients_of_devices_are_added_up_in_their_own_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a sum of float32 rounded once: as float32 they would be twice the bytes to reduce."""
    monkeypatch.setattr(matmul, "raised_on_cpu", lambda operand, mesh: operand)
    mesh = build_mesh({"data": 2, "row": 2, "col": 2}, jax.devices())
    spread = replace(SQUARE, x=P(("data", "row"), "col"), y=P(("data", "row"), "col"))
    x, w = jnp.ones((4, 64), jnp.bfloat16), jnp.ones((64, 2), jnp.bfloat16)

    def loss(w: jax.Array) -> jax.Array:
        (y,) = multiply(x, [w], [spread], mesh, steps=1)
        return y.astype(jnp.float32).sum()

    eqns = jax.make_jaxpr(jax.grad(loss))(w).jaxpr.eqns
    (summed,) = [
        e.invars[0].aval for e in eqns if e.primitive.name == "reduce_sum" and e.outvars[0].aval.shape == w.shape
    ]
    assert summed.shape == (2, *w.shape) and summed.dtype == jnp.bfloat16


@pytest.mark.parametrize("axis", ["data", None])
def test_a_copy_on_each_device_has_a_gradient_of_its_own(axis: str | None) -> None:
    """Whose sum is that of the weight."""
    mesh = build_mesh({"data": 2, "row": 2, "col": 2}, jax.devices())
    spread = replace(SQUARE, x=P(("data", "row"), "col"), y=P(("data", "row"), "col"))
    x, w = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(8, 6), (6, 4)]))
    copies = jnp.broadcast_to(w, (2 if axis else 1, 6, 4))

    def product(copies: jax.Array) -> jax.Array:
        (y,) = multiply(x, [copies], [spread], mesh, leads=[P(axis)])
        return y

    y, pull = jax.vjp(jax.jit(product), copies)
    np.testing.assert_allclose(y, x @ w, rtol=1e-5)
    (shares,) = pull(jnp.ones_like(y))
    wanted = x.reshape(2, 4, 6).sum(1) if axis else x.sum(0)[None]
    np.testing.assert_allclose(shares, jnp.broadcast_to(wanted[..., None], shares.shape), rtol=1e-5)


def operands(jaxpr: Any) -> list[Any]:
    """The dtypes of all that is multiplied."""
    found = [v.aval.dtype for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general" for v in eqn.invars]
    return found + [dtype for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params) for dtype in operands(inner)]


@pytest.mark.parametrize("keep", [False, True])
def test_layers_that_save_products_make_none_again(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of low precision too, as on accelerators: a policy looks for products, in the forward pass."""
    monkeypatch.setattr(matmul, "raised_on_cpu", lambda operand, mesh: operand)
    shapes = ((2, 64), (64, 64), (64, 2))

    def layer(x: jax.Array, *ws: jax.Array) -> jax.Array:
        for w in ws:
            (x,) = multiply(jnp.tanh(x), [w], [SQUARE], grid("2d"), steps=1, keep=keep)
        return x

    def num_products(remat: Any) -> int:
        saved = checkpointed(layer, remat, False)
        derived = jax.grad(lambda *args: saved(*args).astype(jnp.float32).sum(), (0, 1, 2))
        return len(operands(jax.make_jaxpr(derived)(*(jnp.ones(shape, jnp.bfloat16) for shape in shapes)).jaxpr)) // 2

    assert num_products("none") == num_products("dots") < num_products("block")


@pytest.mark.parametrize("shapes", [((3, 4, 5), (4, 5, 6)), ((5, 3, 4), (6, 4, 2, 5)), ((4,), (4, 7)), ((2, 4), (4,))])
def test_the_derivative_of_a_wide_sum(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Of any dims in any order, as JAX's own has it."""
    shared = [n for n in (4, 5) if n in shapes[0] and n in shapes[1]]
    for order in (shared, shared[::-1]):
        contracted = (tuple(map(shapes[0].index, order)), tuple(map(shapes[1].index, order)))
        x, w = arrays(shapes)
        with jax.enable_x64(True):
            y, pull = jax.vjp(lambda x, w: jnp.tensordot(x, w, contracted), x, w)  # noqa: B023
            seed = jnp.asarray(*arrays([y.shape]))
            given = matmul._derived_low_backward(contracted, None, (x, w), seed)
            for one, wanted in zip(given, pull(seed), strict=True):
                np.testing.assert_allclose(one, wanted, rtol=1e-12)


def test_the_number_of_steps_follows_from_the_size() -> None:
    mesh = grid("2d")

    def steps(rows: int) -> int:  # of x, [rows, 1024] float32, gathered to half its rows
        x, w = (np.broadcast_to(np.float32(0), shape) for shape in ((rows, 1024), (1024, 2)))  # one number each
        return matmul._steps(x, [w], [SQUARE], mesh)  # pyright: ignore

    one = STEP_BYTES * 2 // 4096  # the rows of which a device gathers a step's worth
    assert [steps(one // 8), steps(one), steps(2 * one), steps(3 * one)] == [1, 1, 2, 3]
    assert steps(100 * one) == MAX_STEPS


def test_inside_a_region_that_is_manual_already() -> None:
    """A pipeline's stages are: the axes of the grid are then the context's."""
    mesh = build_mesh({"data": 2, "row": 2, "col": 2}, jax.devices())
    one = spread("2d", "up")
    x, w = arrays([(2, BATCH, SEQ, EMBED), (2, EMBED, FFN)])

    def stage(x: jax.Array, w: jax.Array) -> jax.Array:
        return multiply(x[0], [w[0]], [one], mesh)[0][None]

    with jax.enable_x64(True):
        staged = jax.shard_map(
            stage, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"), axis_names={"data"}, check_vma=False
        )
        y, pull = jax.vjp(jax.jit(staged), x, w)
        dx, dw = pull(jnp.ones_like(y))
    ones = np.ones_like(y)
    np.testing.assert_allclose(y, np.einsum("nbse,nef->nbsf", x, w), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(dx, np.einsum("nbsf,nef->nbse", ones, w), rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(dw, np.einsum("nbse,nbsf->nef", x, ones), rtol=1e-11, atol=1e-11)
