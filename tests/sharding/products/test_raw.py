"""The raw products of split matrices: values, gradients, and what they move.

As a script, `test_raw.py MODE SIDE`, it compares the products on a grid of another size: for device counts that
must be chosen before JAX starts.
"""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from cjax.audit import Audit, audit
from cjax.mesh import build_mesh
from cjax.sharding.products.raw import _placements, matmul_ab, matmul_abt, matmul_atb

Product = Callable[..., jax.Array]
M, K, N = 36, 60, 84  # no two alike; every part of them, down to 27 devices, is whole
LAYERS = 5
MODES = ("2d", "2.5d", "3d")
# What each product takes and gives, as places in (X [M, K], W [K, N], Y [M, N]), and in NumPy: the product and, for the
# gradient g of its result, those of its operands.
PRODUCTS: dict[str, tuple[Product, tuple[int, int, int], Callable[..., tuple[Any, Any, Any]]]] = {
    "ab": (matmul_ab, (0, 1, 2), lambda a, b, g: (a @ b, g @ b.T, a.T @ g)),
    "abt": (matmul_abt, (2, 1, 0), lambda a, b, g: (a @ b.T, g @ b, g.T @ a)),
    "atb": (matmul_atb, (0, 2, 1), lambda a, b, g: (a.T @ b, b @ g.T, a @ g)),
}


def grid(mode: str, side: int = 2, depth: int = 2) -> Mesh:
    sizes = {
        "2d": {"row": side, "col": side},
        "2.5d": {"depth": depth, "row": side, "col": side},
        "3d": {"i": side, "j": side, "k": side},
    }[mode]
    return build_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])


def check(name: str, mode: Any, mesh: Mesh, sizes: tuple[int, int, int] = (M, K, N), **options: Any) -> None:
    """Compares value, gradients and placements with NumPy's, in float64."""
    product, places, plain = PRODUCTS[name]
    m, k, n = sizes
    shapes, rng = ((m, k), (k, n), (m, n)), np.random.default_rng(7)
    a, b, seed = (rng.standard_normal(shapes[place]) for place in places)
    with jax.enable_x64(True):
        specs = [_placements(mode)[place] for place in places]
        placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((a, b, seed), specs, strict=True)]
        value, pull = jax.vjp(functools.partial(product, mesh=mesh, mode=mode, **options), *placed[:2])
        grads = pull(placed[2])
    for given, wanted, spec in zip((value, *grads), plain(a, b, seed), (specs[2], *specs[:2]), strict=True):
        np.testing.assert_allclose(given, wanted, rtol=1e-12, atol=1e-11)
        assert given.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2), "a gradient lives where its operand does"


@pytest.mark.parametrize("options", [{}, {"steps": 3}, {"keep": True}], ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_and_their_gradients(name: str, mode: str, options: dict[str, Any]) -> None:
    check(name, mode, grid(mode), **options)


@pytest.mark.parametrize("side", [(1, 2), (2, 1)], ids=str)
def test_a_side_or_a_depth_of_one(side: tuple[int, int]) -> None:
    check("ab", "2.5d", grid("2.5d", *side))


@pytest.mark.parametrize(("mode", "side"), [("2d", 4), ("3d", 3)])
@pytest.mark.full
def test_on_more_devices_than_there_are_here(mode: str, side: int) -> None:
    paths = os.pathsep.join([str(Path(__file__).parents[3]), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, __file__, mode, str(side)],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# -- what is moved ----------------------------------------------------------------------------------------------------
def layered(name: str, mode: Any, mesh: Mesh, **options: Any) -> Audit:
    """The product and its gradients in a loop over layers, as models have it: nothing gathered in the forward loop is
    at hand in the backward one."""
    product, places, _ = PRODUCTS[name]
    shapes = ((M, K), (K, N), (M, N))

    def forward(a: jax.Array, b: jax.Array) -> jax.Array:
        body = functools.partial(product, mesh=mesh, mode=mode, **options)
        return jax.lax.scan(lambda _, ab: (None, body(*ab)), None, (a, b))[1]

    def step(a: jax.Array, b: jax.Array, seed: jax.Array) -> Any:
        value, pull = jax.vjp(forward, a, b)
        return value, pull(seed)

    stacked = [jax.ShapeDtypeStruct((LAYERS, *shapes[place]), np.float32) for place in places]
    specs = [jax.sharding.PartitionSpec(None, *_placements(mode)[place]) for place in places]
    a, b, y = (NamedSharding(mesh, spec) for spec in specs)
    compiled = jax.jit(step, in_shardings=(a, b, y), out_shardings=(y, (a, b))).lower(*stacked).compile()
    return audit(compiled, mesh)


def bound(mode: str, side: int, depth: int, keep: bool) -> float:
    """Elements a device receives for Y = X W and its two gradients, by design.md's table."""
    x, w, y = M * K, K * N, M * N
    if mode == "3d":
        parts = 2 * (x + y + w) if keep else 3 * x + 3 * w + 2 * y
        return (side - 1) / side**3 * parts
    depth = depth if mode == "2.5d" else 1
    times = 2 if keep else 3
    return times * (side - 1) / side**2 * (x / depth + w) + 2 * (depth - 1) / depth * w / side**2


@pytest.mark.parametrize("options", [{"steps": 1}, {"steps": 2}, {"keep": True}], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_a_linear_layer_moves_what_the_table_says(mode: str, options: dict[str, Any]) -> None:
    facts = layered("ab", mode, grid(mode), **options)
    elements = facts.moved() / 4 / LAYERS
    assert elements <= 1.01 * bound(mode, 2, 2, options.get("keep", False))
    assert elements >= 0.99 * bound(mode, 2, 2, options.get("keep", False)), "or the audit misses something"
    assert {c.kind for c in facts.collectives} <= {"all-gather", "reduce-scatter", "all-reduce"}
    assert bool(facts.select("all-reduce")) == (mode == "2.5d"), "weight gradients over depth, nothing else"
    assert {c.axes for c in facts.select("all-reduce")} <= {("depth",)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "times"), [("abt", (2, 3, 2)), ("atb", (3, 2, 2))])
def test_the_other_products_move_as_often(name: str, times: tuple[int, int, int], mode: str) -> None:
    """In 3d three tensors trade places. In 2d one operand stays where it is, and of the two that move, the result (and
    its gradient) is moved twice, the operand three times; `times` is of X, W and, as always, W over the depth."""
    facts = layered(name, mode, grid(mode), steps=1)
    x, w, y = M * K, K * N, M * N
    if mode == "3d":
        wanted = {"abt": 2 * x + 3 * w + 3 * y, "atb": 3 * x + 2 * w + 3 * y}[name] / 8
    else:
        depth = 2 if mode == "2.5d" else 1
        wanted = (times[0] * x / depth + times[1] * w) / 4 + times[2] * (depth - 1) / depth * w / 4
    assert facts.moved() / 4 / LAYERS == pytest.approx(wanted, rel=0.01)


def test_steps_cut_a_transfer_and_add_nothing() -> None:
    """A transfer in pieces, so that one is on its way while another is multiplied."""
    whole, cut = (layered("ab", "2d", grid("2d"), steps=steps) for steps in (1, 2))
    assert whole.moved("all-gather") == cut.moved("all-gather")
    assert cut.count("all-gather") > whole.count("all-gather")


# -- what is refused --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("mode", "a", "b", "text"),
    [
        ("2d", (7, 10), (10, 6), r"size 7 in 'a' \(7, 10\) is split 2 ways .*pad it with zeros to 8"),
        ("2d", (8, 10), (10, 5), r"size 5 in 'b' \(10, 5\) is split 2 ways .*pad it with zeros to 6"),
        ("2.5d", (6, 10), (10, 6), r"size 6 in 'a' .* split 4 ways .*depth.*row.*pad it with zeros to 8"),
        ("3d", (8, 10), (10, 6), r"size 10 in 'b' .* split 4 ways .*k.*i.*pad it with zeros to 12"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(mode: Any, a: Any, b: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        matmul_ab(np.ones(a), np.ones(b), grid(mode), mode)


@pytest.mark.parametrize(("mode", "missing"), [("2.5d", "depth"), ("3d", "[ijk]")])
def test_a_mesh_without_an_axis_is_refused(mode: Any, missing: str) -> None:
    with pytest.raises(ValueError, match=f"'?{missing}'? is not found in mesh|{missing}"):
        matmul_ab(np.ones((8, 8)), np.ones((8, 8)), grid("2d"), mode)


if __name__ == "__main__":
    chosen, length = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_num_cpu_devices", length ** (3 if chosen == "3d" else 2))
    sizes = (2 * length**2, 3 * length**2, 5 * length)
    for each in PRODUCTS:
        check(each, chosen, grid(chosen, length), sizes, steps=1)
