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
    "collectives and how values vary over devices: models leave these to cjax": (
        "all_gather all_gather_invariant all_gather_reduced all_to_all axis_index core_pmap mpmd_map pbroadcast pcast "
        "global_array_to_host_local_array host_local_array_to_global_array "
        "pgather pmap ppermute ppermute_invariant preduced preduced_reduced preduced_sum psend precv psum pmax pmin "
        "psum_invariant psum_scatter pvary ragged_all_to_all reduce_scatter reduced_vary_cast reduced_vary_cast_p "
        "shard_map unreduced_all_gather unreduced_psum unreduced_psum_scatter unreduced_reduce_scatter "
        "vary_unreduced_cast vary_unreduced_cast_p xla_pmap"
    ),
    "placements, which are cjax's to choose": (
        "auto_axes device_put explicit_axes inspect_sharding layout_constraint mesh_cast pbroadcast_dynamic relayout "
        "reshard sharding_constraint with_memory_space_constraint"
    ),
    "mutable arrays and kernels in Pallas": (
        "accum_grad_in_ref addupdate array_ref broadcast_to core_map empty_ref free_ref freeze full_ref get new_ref "
        "mutable_array pallas_call ref_get ref_set run_state swap"
    ),
    "derivatives forwards alone: of a maximum over windows, of a sum that is a function of the author's": (
        "reduce_window select_and_gather_add"
    ),
    "no derivative in one operand, which JAX asks for wherever it does not see that this one is fixed": "zeta",
    "integers alone, or types and boxes that JAX keeps for itself": (
        "box_get box_set call_hi_primitive check custom_vmap_call dce_sink debug_print eq_to eval_jaxpr from_edtype "
        "get_variable le_to log_extend log_read lt_to mulhi new_box new_log new_variable remat_opt set_variable stage "
        "tie to_edtype"
    ),
    "host callbacks and foreign functions": (
        "debug_callback ffi_call io_callback outside_call pure_callback tpu_custom_call"
    ),
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
    """The names of all primitives that this JAX can differentiate, but for those that tests plant."""
    return {primitive.name for primitive in ad.primitive_jvps if not primitive.name.startswith("test_")}


def unreached() -> set[str]:
    known = {name for names in UNREACHED.values() for name in names.split()}
    return with_gradients() - reached() - known


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    left = unreached()
    print(f"JAX {jax.__version__}: {len(with_gradients())} primitives with gradients, not reached: {sorted(left)}")
