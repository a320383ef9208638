"""The vocabulary: each of JAX's primitives once, with the facts that analyses ask for.

A rule of what a primitive does to dims, examples or blocks stays with whoever needs it; *which* primitives are of a
kind is said here alone. A primitive without facts relates nothing and is computed whole on every device, and reports
name it: a user's own, or one that a later JAX brings. `WITHOUT` holds those of JAX that are left so, and why.

Tables go by names, and a name is no proof: anyone may call a primitive `sort`. So nobody asks an equation's primitive
for its name; `name_of` says it, and gives another to what is not JAX's own.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cjax.jax_compat.core import ClosedJaxpr, Equation, Primitive
from cjax.jax_compat.jaxprs import is_of_jax


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of a primitive.

    Attributes:
      known: that anything is; all other facts are False without.
      elementwise: an element of a result is made of the elements at its place; scalars stand for all places.
      same: results are the operands one by one, but for their dtype, rounding or placement.
      rounds: of these, it may change numbers a little.
      view: its result is all of its one operand in another shape, order or dtype, or repeated; nothing is left out.
      takes: its results are blocks of its first operand.
      moves: elements come to other places, and nothing is computed.
      whole_dims: dims are moved, joined or taken apart whole: no element of a dim comes to another place of that dim.
      free: a view or an annotation, which costs nothing when it runs.
      adds: its two operands, one and the other.
      extreme: the largest or the smallest of several elements.
      joins: puts its operands side by side in one dim.
      linear: twice of all operands is twice of all results.
      linear_in: operands in each of which, the others given, it is linear.
      linear_with: operands in all of which together it is linear, the others given.
      cheap: numbers are moved, rounded or combined one by one, which a compiler fuses into whatever reads them.
      low: may be computed in the low precision that a matmul has stored its operands in.
      real: real results of complex operands.
      reduces: brings the dims `axes` of its operand together.
      tells_place: of these, it gives the place where an element is, not the element.
      cumulates: works along its dim `axis`, each element of those before it.
      reads: arithmetic goes by what it reads rather than by what it makes.
      combines: the jaxpr that it holds combines two elements, and is no body that runs once.
      window: goes over windows of its operand.
      scatter: writes updates to places of its first operand.
      matrices: a function of matrices; what comes before their dims is a batch of them.
      product: sums of products of two operands, a matrix unit's work.
      makes: makes dims of its own, out of parameters.
      draws: draws random numbers of a key, as many as its shape says.
      opaque: draws them in an order of its own.
      seeds: takes numbers that seed keys, as modules' paths are.
      rekeys: makes keys of numbers, or numbers of keys, one of each.
      body: the parameter with the jaxpr that it runs once on its own operands.
      inlined: of these, it is nothing more than its body.
      remat: of these, its results are made again for the backward pass.
      own_derivative: of these, its derivative is the author's.
      loop: runs a body many times.
      branches: runs one of several bodies.
      stops: no derivative passes.
      numpy: the NumPy function that gives the same numbers to the bit.
    """

    known: bool = True
    elementwise: bool = False
    same: bool = False
    rounds: bool = False
    view: bool = False
    takes: bool = False
    moves: bool = False
    whole_dims: bool = False
    free: bool = False
    adds: bool = False
    extreme: bool = False
    joins: bool = False
    linear: bool = False
    linear_in: tuple[int, ...] = ()
    linear_with: tuple[int, ...] = ()
    cheap: bool = False
    low: bool = False
    real: bool = False
    reduces: bool = False
    tells_place: bool = False
    cumulates: bool = False
    reads: bool = False
    combines: bool = False
    window: bool = False
    scatter: bool = False
    matrices: bool = False
    product: bool = False
    makes: bool = False
    draws: bool = False
    opaque: bool = False
    seeds: bool = False
    rekeys: bool = False
    body: str = ""
    inlined: bool = False
    remat: bool = False
    own_derivative: bool = False
    loop: bool = False
    branches: bool = False
    stops: bool = False
    numpy: Callable[..., np.ndarray] | None = None


def _quotient(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Towards zero for integers, where NumPy rounds down."""
    return (x - np.fmod(x, y)) // y if np.issubdtype(np.asarray(x).dtype, np.integer) else np.divide(x, y)


def _clamped(low: np.ndarray, x: np.ndarray, high: np.ndarray) -> np.ndarray:
    return np.minimum(np.maximum(x, low), high)


def _chosen(which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(np.asarray(which, np.intp), np.broadcast_arrays(*cases))


# Only what IEEE 754 or integer arithmetic defines to the last bit: exp, erf and their kin differ between libraries.
_NUMPY: Mapping[str, Callable[..., np.ndarray]] = {
    "abs": np.abs, "add": np.add, "add_any": np.add, "and": np.bitwise_and, "ceil": np.ceil, "clamp": _clamped,
    "div": _quotient, "eq": np.equal, "floor": np.floor, "ge": np.greater_equal, "gt": np.greater,
    "is_finite": np.isfinite, "le": np.less_equal, "lt": np.less, "max": np.maximum, "min": np.minimum,
    "mul": np.multiply, "ne": np.not_equal, "neg": np.negative, "not": np.invert, "or": np.bitwise_or, "rem": np.fmod,
    "select_n": _chosen, "sign": np.sign, "sqrt": np.sqrt, "square": np.square, "sub": np.subtract,
    "xor": np.bitwise_xor,
}  # fmt: skip
FACTS: dict[str, Facts] = {}


def _know(names: str, **facts: Any) -> None:
    for name in names.split():
        assert name not in FACTS, f"{name} stands in the vocabulary twice"
        FACTS[name] = Facts(**facts, numpy=_NUMPY.get(name))


# -- one element of each operand -----------------------------------------------------------------------------
_know("add add_any", elementwise=True, adds=True, cheap=True, low=True, linear=True)
_know("sub neg", elementwise=True, cheap=True, low=True, linear=True)
_know("mul", elementwise=True, cheap=True, low=True, linear_in=(0, 1))
_know("div", elementwise=True, cheap=True, linear_in=(0,))
_know("max min", elementwise=True, extreme=True, cheap=True, low=True)
# Linear in its cases, the choice given.
_know("select_n", elementwise=True, cheap=True, low=True)
_know("complex conj", elementwise=True, cheap=True, linear=True)
_know("real imag", elementwise=True, cheap=True, linear=True, real=True)
_know("abs eq ne is_finite", elementwise=True, cheap=True, real=True)
_know("ge gt le lt and or xor not", elementwise=True, cheap=True)
_know("ceil floor round sign rem clamp", elementwise=True, cheap=True)
_know("cbrt sqrt rsqrt square pow integer_pow", elementwise=True, cheap=True)
_know("exp exp2 expm1 log log1p log2 logistic", elementwise=True, cheap=True)
_know("sin cos tan sinh cosh tanh atan2 erf erf_inv erfc", elementwise=True, cheap=True)
_know("one_minus_square polynomial", elementwise=True, cheap=True)
_know("acos acosh asin asinh atan atanh bessel_i0e bessel_i1e digamma lgamma", elementwise=True)
_know("igamma igamma_grad_a igammac polygamma regularized_incomplete_beta zeta", elementwise=True)
_know("nextafter shift_left shift_right_arithmetic shift_right_logical clz population_count mulhi", elementwise=True)
_know("eq_to le_to lt_to from_edtype to_edtype", elementwise=True)
_know("threefry2x32 threefry4x32 philox2x32 philox4x32", elementwise=True)  # bits of counters

# -- the same numbers ----------------------------------------------------------------------------------------
_know("convert_element_type", elementwise=True, same=True, rounds=True, view=True, linear=True, cheap=True)
_know("copy", elementwise=True, same=True, view=True, linear=True, cheap=True)
_know("stop_gradient", elementwise=True, same=True, view=True, stops=True, free=True, cheap=True)
# Not cheap, though it is free: a name is there to be asked for by what a layer saves.
_know("name", elementwise=True, same=True, view=True, free=True, linear=True)
_know("reduce_precision", elementwise=True, same=True, rounds=True, linear=True, cheap=True)
_know("optimization_barrier", same=True, free=True, linear=True, cheap=True)
_know("sharding_constraint", same=True, free=True, linear=True, cheap=True)  # for the shape that it is given
_know("pvary", same=True, free=True, linear=True)
_know("layout_constraint device_put reshard with_memory_space_constraint", same=True, linear=True)

# -- elements elsewhere --------------------------------------------------------------------------------------
_know("reshape squeeze", moves=True, view=True, whole_dims=True, free=True, linear=True, cheap=True)
_know("transpose broadcast_in_dim", moves=True, view=True, whole_dims=True, linear=True, cheap=True)
_know("rev tile", moves=True, linear=True, cheap=True)
_know("slice", moves=True, takes=True, linear=True, cheap=True)
_know("dynamic_slice", moves=True, takes=True, linear_in=(0,), cheap=True)
# Not cheap: saved, all of them are no more than what they are taken from, and some may be needed alone.
_know("split", moves=True, takes=True, whole_dims=True, linear=True)
_know("unstack", moves=True, takes=True, whole_dims=True, linear=True)
_know("stack", moves=True, joins=True, whole_dims=True, linear=True, cheap=True)
_know("concatenate", moves=True, joins=True, linear=True, cheap=True)
_know("pad", moves=True, linear=True, cheap=True)
_know("dynamic_update_slice", moves=True, linear_with=(0, 1))
_know("gather", moves=True, linear_in=(0,))
_know("bitcast_convert_type", whole_dims=True, cheap=True)  # elementwise, where bits of a number stay one number
_know("scatter scatter-mul", scatter=True, combines=True)
_know("scatter-min scatter-max", scatter=True, combines=True, extreme=True)
_know("scatter-add", scatter=True, combines=True, linear_with=(0, 2))
_know("scatter-sub", scatter=True, combines=True, linear_with=(0, 2))

# -- along dims ----------------------------------------------------------------------------------------------
_know("reduce_sum", reduces=True, reads=True, linear=True)
_know("reduce_max reduce_min", reduces=True, reads=True, extreme=True)
_know("reduce_prod reduce_and reduce_or reduce_xor", reduces=True, reads=True)
_know("argmax argmin", reduces=True, reads=True, tells_place=True)
_know("cumsum", cumulates=True, reads=True, linear=True)
_know("cummax cummin", cumulates=True, reads=True, extreme=True)
_know("cumprod cumlogsumexp", cumulates=True, reads=True)
_know("reduce", reads=True, combines=True)
_know("reduce_window", window=True, reads=True, combines=True)
_know("reduce_window_sum", window=True, reads=True, linear=True)
_know("reduce_window_max reduce_window_min", window=True, reads=True, extreme=True)
_know("select_and_gather_add", window=True, linear_in=(0,))
_know("select_and_scatter_add", window=True, combines=True, linear_in=(0,))
_know("select_and_scatter", window=True, combines=True)
_know("sort top_k", reads=True)
_know("approx_top_k")
_know("fft", linear=True)
_know("dot_general conv_general_dilated ragged_dot_general", product=True, linear_in=(0, 1))
_know("triangular_solve", matrices=True, linear_in=(1,))
_know("tridiagonal_solve", matrices=True, linear_in=(3,))
_know("cholesky qr svd eigh eig lu schur geqrf geqp3 householder_product hessenberg tridiagonal", matrices=True)

# -- random numbers, and what is made of parameters ----------------------------------------------------------
_know("iota", makes=True, cheap=True)
_know("empty empty2 platform_index iota_2x32_shape", makes=True)
_know("random_bits random_split", draws=True)
_know("rng_bit_generator rng_uniform", makes=True, opaque=True)
_know("random_seed", seeds=True, rekeys=True)
_know("random_fold_in", elementwise=True, seeds=True)
_know("random_wrap random_unwrap", free=True, rekeys=True)
_know("random_clone", elementwise=True)
_know("random_gamma", opaque=True)  # one key, split among all elements in order

# -- equations that hold jaxprs ------------------------------------------------------------------------------
_know("jit", body="jaxpr", inlined=True)
_know("call closed_call eval_jaxpr", body="call_jaxpr", inlined=True)  # the last is 0.12's for those before
_know("remat2", body="jaxpr", remat=True)
_know("custom_jvp_call custom_vjp_call", body="call_jaxpr", own_derivative=True)
_know("composite", body="jaxpr")
_know("custom_vmap_call", body="call")
_know("scan while", loop=True)
_know("cond", branches=True)

# -- left to XLA as they stand, their dims related to nothing ------------------------------------------------
_know("custom_linear_solve linear_call call_hi_primitive")
_know("shard_map")  # its author's own split
_know("debug_callback debug_print io_callback pure_callback inspect_sharding")  # JAX's own way over devices
_know("create_token", free=True)
_know("dot_product_attention_fwd dot_product_attention_fwd_wrapper dot_product_attention_bwd")  # cuDNN's, which say
_know("dot_product_attention_bwd_wrapper")  # themselves how they may be split

UNKNOWN = Facts(known=False)
# Primitives of JAX that have no facts, by the reason.
WITHOUT: Mapping[str, str] = {
    "collectives, and how values vary over devices: models leave these to cjax": (
        "all_gather all_gather_done all_gather_invariant all_gather_reduced all_gather_reduced_start "
        "all_gather_start all_to_all all_to_all_done all_to_all_start axis_index global_array_to_host_local_array "
        "host_local_array_to_global_array pbroadcast pbroadcast_done pbroadcast_dynamic pbroadcast_start pmax pmin "
        "ppermute ppermute_done ppermute_start precv preduced psend psum psum_done psum_invariant "
        "psum_invariant_start psum_start ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start "
        "reduced_vary_cast reduced_vary_cast_p relayout unreduced_pmax unreduced_pmin unreduced_psum "
        "unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start vary_unreduced_cast "
        "vary_unreduced_cast_p"
    ),
    "mutable arrays and boxes, which no pure loss has": (
        "accum_grad_in_ref addupdate box_get box_set core_map dce_sink empty_ref free_ref freeze get get_variable "
        "log_extend log_read new_box new_log new_ref new_variable pin run_state set_variable stage swap unpin"
    ),
    "kernels and foreign functions, whose inside nobody can see": (
        "call_exported cudnn_fusion custom_partitioning dot_product_attention_fp8_bwd "
        "dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper "
        "ffi_call scaled_dot scaled_matmul scaled_matmul_wrapper"
    ),
    "shapes that are not known when a program is made": (
        "broadcast_to check dim_as_value dimension_size shape_assertion unreachable"
    ),
    "what JAX makes for itself while it differentiates or compiles": (
        "after_all call_hi_primitive_linearized create_linear custom_jvp_call_jaxpr custom_lin remat_opt tie zeros_like"
    ),
    "an order of execution that the author fixes, which is undone where a trace is evaluated anew": "program_order",
    "functions of matrices whose operands have no batch in common": (
        "cholesky_update lu_pivots_to_permutation ormqr symmetric_product"
    ),
}


@functools.cache  # asked of every equation by every analysis
def word_for(primitive: Primitive) -> str:
    """What the vocabulary calls a primitive: its name, or another where it has the name of one of JAX's and is not it.

    What it does is then as unknown as that of any other of a user's own. Taken for JAX's, it would be split along dims
    that it mixes, and the numbers be wrong without a word.
    """
    is_taken = primitive.name in FACTS and not is_of_jax(primitive)
    return f"{primitive.name} (not JAX's)" if is_taken else primitive.name


def name_of(eqn: Equation) -> str:
    """The name by which tables and reports know an equation's primitive."""
    return word_for(eqn.primitive)


def facts_of(eqn: Equation) -> Facts:
    """The facts of an equation's primitive; `UNKNOWN` where there are none."""
    return FACTS.get(name_of(eqn), UNKNOWN)


def having(fact: str) -> frozenset[str]:
    """The primitives of which a fact holds.

    >>> sorted(having("draws"))
    ['random_bits', 'random_split']
    """
    assert fact in {field.name for field in fields(Facts)}, f"no fact is called {fact}"
    return frozenset(name for name, facts in FACTS.items() if getattr(facts, fact))


def named(names: str | Iterable[str]) -> frozenset[str]:
    """Primitives by their names, for a choice that no fact makes: each of them is in the vocabulary."""
    found = frozenset(names.split() if isinstance(names, str) else names)
    assert found <= FACTS.keys(), f"not in the vocabulary: {sorted(found - FACTS.keys())}"
    return found


# What a compiler makes where it is read, rather than in memory. JAX lowers a copy within a program to nothing.
FUSED = (having("cheap") | having("elementwise") | having("free") | named("split unstack")) - named(
    "optimization_barrier"
)


def goes_by_element(eqn: Equation) -> bool:
    """Whether an element of an equation's result is made of the elements at its place.

    Of numbers whose bits are taken for those of a wider or narrower type, it is not.
    """
    if not facts_of(eqn).elementwise and name_of(eqn) != "bitcast_convert_type":
        return False
    ranks = {len(getattr(v.aval, "shape", ())) for v in (*eqn.invars, *eqn.outvars)}
    return len(ranks - {0}) <= 1


def is_cheap(name: str, params: Mapping[str, object]) -> bool:
    """Whether a primitive, or all of what it calls, moves, rounds or combines numbers one by one.

    A derivative may call what has a derivative of its own, as that of `erfc` does since JAX 0.12.
    """
    inner = params.get("call_jaxpr" if name == "custom_jvp_call" else "jaxpr")  # as jax.nn.relu has, one in the other
    if name in ("custom_jvp_call", "jit") and isinstance(inner, ClosedJaxpr):
        return all(is_cheap(name_of(eqn), eqn.params) for eqn in inner.jaxpr.eqns)
    return FACTS.get(name, UNKNOWN).cheap


def without_facts(eqn: Equation) -> bool:
    """Whether nothing is known of what an equation does."""
    return not facts_of(eqn).known
