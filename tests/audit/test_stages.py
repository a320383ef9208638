"""Collectives that only some stages come to, in programs compiled by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from cjax.audit.stages import waits
from cjax.mesh import build_mesh, compile_lowered

MESH = build_mesh({"pipe": 2, "data": 1, "tensor": 2}, jax.devices()[:4])


def compiled(branch: Any, scope: str) -> Any:
    """Two ticks, in which the first stage alone takes a branch."""

    def inside(x: jax.Array) -> jax.Array:
        def tick(x: jax.Array, _: Any) -> tuple[jax.Array, None]:
            with jax.named_scope(scope):
                return lax.cond(lax.axis_index("pipe") == 0, lambda: branch(x), lambda: x), None

        with jax.named_scope("pipeline_ticks"):
            return lax.scan(tick, x, length=2)[0]

    spec = P(("pipe", "tensor"))
    run = jax.shard_map(inside, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)
    return compile_lowered(jax.jit(run).lower(jnp.ones((8, 4))), jax.devices()[:4], named=True)


def permuted(x: jax.Array) -> jax.Array:
    return lax.ppermute(x, "tensor", [(0, 1), (1, 0)])


def again(x: jax.Array) -> jax.Array:
    """As often as the numbers say."""
    return lax.while_loop(lambda x: x.sum() < 3, lambda x: permuted(x) + 1, x)


@pytest.mark.parametrize(
    ("branch", "scope", "kinds"),
    [
        (permuted, "runs_1_of_2", ["collective-permute"]),
        (permuted, "all_runs_1_of_2", []),
        (again, "all_runs_1_of_2", ["collective-permute"]),
        (lambda x: lax.psum(x, "tensor"), "runs_1_of_2", []),
        (lambda x: lax.psum(x, "pipe"), "runs_1_of_2", ["all-reduce"]),
        (lambda x: lax.cond(x.sum() > 0, permuted, lambda x: x, x), "all_runs_1_of_2", ["collective-permute"]),
        (lambda x: x * 2, "runs_1_of_2", []),
    ],
)
def test_finds_what_some_stages_do_not_come_to(branch: Any, scope: str, kinds: list[str]) -> None:
    assert [wait.kind for wait in waits(compiled(branch, scope), MESH, "pipe")] == kinds
