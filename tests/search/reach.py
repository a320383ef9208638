"""Which primitives random models reach, of all that this JAX has gradients for: `python tests/search/reach.py`."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from search.blocks import BLOCKS
from search.models import WIDE, Recorder

# What no model of the generator has, and why.
UNREACHED = {
    "collectives, which models under cjax do not write: cjax does": (
        "all_gather all_gather_invariant all_gather_reduced all_to_all axis_index core_pmap mpmd_map pbroadcast pcast "
        "pgather pmap ppermute preduced_reduced preduced_sum psum psum_invariant psum_scatter reduce_scatter reduced_vary "
        "reduced_vary_cast shard_map unreduced_psum unreduced_psum_scatter unreduced_reduce_scatter vary_unreduced_cast "
        "xla_pmap pvary ragged_all_to_all psend precv unreduced_all_gather ppermute_invariant pmin pmax"
    ),
    "placements and memories, which are cjax's to choose": (
        "device_put mesh_cast reshard sharding_constraint auto_axes explicit_axes pjit_sharding layout_constraint "
        "with_layout_constraint copy_p transfer"
    ),
    "references and kernels: mutable arrays, Pallas": (
        "addupdate broadcast_to get swap accum_grad_in_ref freeze mutable_array new_ref run_state ref_get ref_set "
        "pallas_call core_map empty_ref empty_ref_p array_ref full_ref"
    ),
    "what JAX makes of others, for itself": (
        "box_get box_set call_hi_primitive custom_vmap_call dce_sink eq_to eval_jaxpr from_edtype le_to mulhi new_box "
        "remat_opt reduce_window select_and_gather_add stage tie to_edtype log_extend log_read new_log check debug_print "
        "inspect_sharding get_variable new_variable set_variable free_ref preduced reduced_vary_cast_p "
        "vary_unreduced_cast_p"
    ),
    "host callbacks and foreign functions": "ffi_call io_callback pure_callback outside_call debug_callback tpu_custom_call",
}


def walk(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)


def configs(name: str) -> Iterator[dict[str, Any]]:
    """Each choice of each argument at least once."""
    choices = BLOCKS[name].choices
    longest = max(map(len, choices.values()), default=1)
    for i in range(longest):
        yield {key: values[i % len(values)] for key, values in choices.items()}
    for key, value in itertools.chain.from_iterable([(k, v) for v in vs] for k, vs in choices.items() if len(vs) == 2):
        yield {k: vs[0] for k, vs in choices.items()} | {key: value}


def reached() -> set[str]:
    """Primitives in the gradients of all blocks."""
    x, found = np.ones((4, 6, 8)), set()
    for name, block in BLOCKS.items():
        for config in configs(name):

            def forward(x: jax.Array, block: Any = block, config: Any = config) -> jax.Array:
                recorder = Recorder(jnp.arange(24, dtype=jnp.int32).reshape(4, 6))
                return block.run(recorder, x, **config).astype(WIDE).sum()

            found |= set(walk(jax.make_jaxpr(jax.grad(forward))(x).jaxpr))
            found |= set(walk(jax.make_jaxpr(forward)(x).jaxpr))
    return found


def with_gradients() -> set[str]:
    """The names of all primitives that this JAX can differentiate."""
    return {primitive.name for primitive in ad.primitive_jvps}


def unreached() -> set[str]:
    known = {name for names in UNREACHED.values() for name in names.split()}
    return with_gradients() - reached() - known


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    left = unreached()
    print(f"JAX {jax.__version__}: {len(with_gradients())} primitives with gradients, not reached: {sorted(left)}")
