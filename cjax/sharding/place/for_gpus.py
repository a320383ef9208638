"""What is written otherwise in programs for GPUs, so that XLA's compiler stores and moves less.

GELUs: XLA takes `tanh` and `erfc` for dear. The one inside a GELU is needed twice in a layer's backward pass: for the
value that the next weight's gradient is a product with, and for the derivative. XLA writes it to memory in float32 and
reads it back: 945 MB for [8, 1024, 6400] of bfloat16 where 420 would do. The logistic function and `erf` it makes
wherever they are read. Both differ from what the author wrote by a rounding of one: as little as the sum in which a
GELU has them. For values that are small and still count, as in `exp(x * x) * erfc(x)`, that would be wrong, so both are
known by their readers.

Layers: the XLA of JAX 0.12 takes the layout of what a ViT's layers hand on from the first matmul of the patches, with
the examples innermost, and transposes it for each norm and attention.
"""

import sys
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from cjax.jax_compat.backends import keeps_behind_barriers, splits_what_has_a_layout
from cjax.jax_compat.core import Atom, Equation, Jaxpr, Literal, Var
from cjax.mesh import on_gpus
from cjax.plan import Plan
from cjax.trace.jaxpr.primitives import name_of, named
from cjax.trace.jaxpr.view import every_equation, open_bodies
from cjax.trace.layers.repeats import RepeatedLayers
from cjax.trace.reading import Trace

MOST = 96  # layers that are compiled one by one where nobody asks for it: a minute or two
_TANH, _ERFC, _SUM, _PRODUCT = map(named, ("tanh", "erfc", "add add_any", "mul"))
_SCALES, _CONVOLUTION = named("neg mul div"), named("conv_general_dilated")
_RESHAPES = named("reshape transpose convert_element_type broadcast_in_dim squeeze")
_EXPONENTIALS, _LOGARITHMS = named("exp exp2"), named("log log1p log2")
_DTYPES = ("float32", "bfloat16", "float16")


def hands_on_rows(trace: Trace) -> bool:
    """Whether [examples, positions, features] that layers hand on are to lie in this order; where layers convolve, XLA
    knows better, and where they would be gathered for it, nothing is told."""
    if not splits_what_has_a_layout():
        return False
    eqns = trace.closed.jaxpr.eqns
    within = [eqn for run in trace.runs for eqn in eqns[run.start : run.stop]]
    within += [inner for eqn in eqns for body in open_bodies(eqn) for inner in every_equation(body)]
    return not any(name_of(eqn) in _CONVOLUTION for eqn in within)


def most_apart(plan: Plan, mesh: Mesh) -> int:
    """How many layers a stack may have to be compiled one by one; 0 where none is.

    In a loop, XLA copies what each layer saves into a stack, its weights out of one, and fills both with zeros first:
    8 % of GPT-2 XL's step on an H100 (JAX 0.11.2).
    """
    if plan.unroll == "layers":
        return sys.maxsize
    return MOST if plan.unroll == "auto" and mesh.size == 1 and on_gpus(mesh) and not plan.walks else 0


def works_in_turn(plan: Plan, mesh: Mesh) -> bool:
    """Whether devices that add up micro-batches of their own gather each layer's weights in the first one, and reduce
    each layer's sum in the last (`in_turn.py`). These are compiled apart from the others, which takes half as long
    again. An old XLA would compute the last forward pass ahead of the others."""
    return mesh.size > 1 and on_gpus(mesh) and plan.unroll != "none" and keeps_behind_barriers()


def sums_with_gradients(plan: Plan, mesh: Mesh) -> bool:
    """Whether sums over pieces make their gradients along with them. Devices that share rows would reduce them in each
    turn; and float16 has no room for gradients that nobody has scaled."""
    return mesh.size == 1 and on_gpus(mesh) and plan.precision != "float16" and not plan.walks


def remade(jaxpr: Jaxpr, runs: Sequence[RepeatedLayers] = ()) -> frozenset[int]:
    """Ids of the equations, those within others included, that are to be made again: the `tanh` or `erfc` of a GELU.

    Args:
      jaxpr: of a trace.
      runs: its stacks of layers, in which one layer stands for all: what one of them hands out may be read otherwise.

    >>> import jax
    >>> len(remade(jax.make_jaxpr(lambda x: x * (1 + jax.numpy.tanh(x)))(1.0).jaxpr))
    1
    >>> len(remade(jax.make_jaxpr(jax.numpy.tanh)(1.0).jaxpr))
    0
    """
    found = {id_ for eqn in jaxpr.eqns for body in open_bodies(eqn) for id_ in remade(body)}
    writers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    readers: dict[Atom, list[Equation]] = {}
    for eqn in jaxpr.eqns:
        for var in {v for v in eqn.invars if not isinstance(v, Literal)}:
            readers.setdefault(var, []).append(eqn)
    for eqn in jaxpr.eqns:
        if (name := name_of(eqn)) not in _TANH | _ERFC:
            continue
        (out,) = eqn.outvars
        if out in jaxpr.outvars or str(out.aval.dtype) not in _DTYPES:
            continue
        if name in _TANH:
            suits = all(map(_adds_one, readers.get(out, ())))
        else:
            products = [reader for reader in readers.get(out, ()) if _scales_too(reader, eqn, writers)]
            suits = len(products) == len(readers.get(out, ()))
            suits = suits and not any(_magnified(product, readers, writers) for product in products)
        if suits and readers.get(out):
            found.add(id(eqn))
    for run in runs:
        for at in range(run.start, run.start + run.period):
            alike = {id(eqn) for eqn in jaxpr.eqns[at : run.stop : run.period]}
            found -= set() if alike <= found else alike
    return frozenset(found)


def make_again(eqn: Equation, x: jax.Array) -> jax.Array:
    """The result of such an equation: `tanh(x)` as 2 / (1 + exp(-2x)) - 1, `erfc(x)` as 1 - `erf(x)`, in float32."""
    high = x.astype(jnp.float32)
    made = 2 * lax.logistic(2 * high) - 1 if name_of(eqn) in _TANH else 1 - lax.erf(high)
    return made.astype(x.dtype)


def _adds_one(reader: Equation) -> bool:
    """Whether an equation adds one to what it reads."""
    return name_of(reader) in _SUM and any(isinstance(v, Literal) and v.val == 1 for v in reader.invars)


def _scales_too(reader: Equation, of: Equation, writers: Mapping[Var, Equation]) -> bool:
    """Whether an equation multiplies what `of` makes of some multiple of x by another multiple of x."""
    if name_of(reader) not in _PRODUCT:
        return False
    others: Sequence[Atom] = [v for v in reader.invars if v not in of.outvars]
    return len(others) == 1 and _unscaled(others[0], writers) is _unscaled(of.invars[0], writers)


def _magnified(eqn: Equation, readers: Mapping[Atom, Sequence[Equation]], writers: Mapping[Var, Equation]) -> bool:
    """Whether what is small of a result still counts: behind products and forms, it is multiplied or divided by an
    exponential, or a logarithm is taken of it."""
    (out,) = eqn.outvars
    for reader in readers.get(out, ()):
        name = name_of(reader)
        others = [v for v in reader.invars if v is not out] if name in _SCALES else []
        if name in _LOGARITHMS or any(_is_exponential(v, writers) for v in others):
            return True
        if name in _SCALES | _RESHAPES and _magnified(reader, readers, writers):
            return True
    return False


def _is_exponential(atom: Atom, writers: Mapping[Var, Equation]) -> bool:
    """Whether a value is a product, or a form of one, of which a factor is an exponential."""
    if isinstance(atom, Literal) or atom not in writers:
        return False
    eqn = writers[atom]
    if name_of(eqn) in _EXPONENTIALS:
        return True
    return name_of(eqn) in _SCALES | _RESHAPES and any(_is_exponential(v, writers) for v in eqn.invars)


def _unscaled(atom: Atom, writers: Mapping[Var, Equation]) -> Atom:
    """What `atom` is a multiple of."""
    while not isinstance(atom, Literal) and atom in writers and name_of(writers[atom]) in _SCALES:
        eqn = writers[atom]
        variables = [v for v in eqn.invars if not isinstance(v, Literal)]
        if len(variables) != 1 or variables[0] is not eqn.invars[0] and name_of(eqn) == "div":
            return atom
        atom = variables[0]
    return atom
