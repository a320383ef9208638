"""What a layer saves for its backward pass, and what it makes again."""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params, make_jaxpr
from cjax.trace.emit.abreast import is_awaited
from cjax.trace.emit.precision import MATMULS
from cjax.trace.jaxpr.primitives import FACTS, UNKNOWN, is_cheap, name_of, named, word_for
from cjax.trace.jaxpr.view import open_bodies, opened

KEPT = "cjax.kept"
GATHERED = "cjax.gathered"  # a weight that a layer has gathered once for both passes
_COMPARES = named("lt le gt ge")
_SUMS, _SHAPES = named("add"), named("reshape transpose convert_element_type squeeze")
_MAKES_COMPLEX = named("complex eig")  # of real numbers; `fft` says by its parameters


def keeps_results(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Save for the backward pass the results of matmuls, reductions, lookups and kernels, and make the rest again.

    What moves, rounds or combines numbers one by one is fused into whatever reads it, while saved it is most of a
    layer's memory: in float32, several times over. Forms of a weight are such results too, gathered or rounded: saved,
    every layer's gathered weights would be alive at once, which is what ZeRO-3 is there to avoid. A byte that says how
    two numbers compare is worth its place: it may be all that is left of random bits.
    """
    name = word_for(primitive)
    # A product that is marked as a sum over devices is saved as the product that it is.
    if is_awaited(name, params):
        return False
    if name in _COMPARES:
        return jnp.issubdtype(operands[0].dtype, jnp.floating)
    return not is_cheap(name, params)


def _of_real_numbers(policy: Callable[..., Any]) -> Callable[..., Any]:
    """`policy` for real results. JAX rounds what is saved, and can't round complex numbers: `kept` takes them apart."""

    def saves(primitive: Any, *operands: Any, **params: Any) -> bool:
        if word_for(primitive) == "name" and params["name"] in (KEPT, GATHERED):
            return True
        return bool(policy(primitive, *operands, **params)) and not _makes_complex(
            word_for(primitive), operands, params
        )

    return saves


def _makes_complex(name: str, operands: Any, params: Mapping[str, Any]) -> bool:
    if name == "fft":
        return params["fft_type"] != jax.lax.FftType.IRFFT
    inner = [opened(body) for body in jaxprs_in_params(dict(params))]
    if inner:
        return any(is_complex(v.aval) for body in inner for v in body.outvars)
    return name in _MAKES_COMPLEX or (not FACTS.get(name, UNKNOWN).real and any(map(is_complex, operands)))


def is_complex(array: Any) -> bool:
    """Whether an array, or what stands for one, is of complex numbers."""
    return bool(jnp.issubdtype(getattr(array, "dtype", jnp.float32), jnp.complexfloating))


def has_complex(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr, or one inside it, computes with complex numbers."""
    inputs = any(is_complex(v.aval) for v in (*jaxpr.constvars, *jaxpr.invars))
    return inputs or any(
        any(is_complex(v.aval) for v in eqn.outvars) or any(map(has_complex, open_bodies(eqn))) for eqn in jaxpr.eqns
    )


def with_bias(jaxpr: Jaxpr) -> frozenset[int]:
    """Ids of the equations, those within others included, that add to a product what is smaller, and are all that
    reads it.

    Saved is the sum in place of the product: as many bytes, written by the kernel that adds, of which a backward pass
    need not add again. A product's own kernel writes elsewhere than to the stack of all layers' results, so that it
    would be copied there.

    >>> import jax
    >>> len(with_bias(jax.make_jaxpr(lambda x, w, b: x @ w + b)(*map(jax.numpy.ones, [(4, 3), (3, 2), 2])).jaxpr))
    1
    """
    found = {id_ for eqn in jaxpr.eqns for body in open_bodies(eqn) for id_ in with_bias(body)}
    makers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    reads = collections.Counter(v for eqn in jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal))
    reads.update(v for v in jaxpr.outvars if not isinstance(v, Literal))

    def is_product(atom: Atom) -> bool:
        while not isinstance(atom, Literal) and atom in makers and reads[atom] == 1:
            if name_of(makers[atom]) in MATMULS:
                return True
            if name_of(makers[atom]) not in _SHAPES:
                return False
            atom = makers[atom].invars[0]
        return False

    def is_small(atom: Atom, of: Atom) -> bool:
        made = None if isinstance(atom, Literal) else makers.get(atom)
        return atom.aval.size < of.aval.size or (made is not None and name_of(made) == "broadcast_in_dim")

    for eqn in jaxpr.eqns:
        if name_of(eqn) in _SUMS:
            one, other = eqn.invars
            if is_product(one) and is_small(other, one) or is_product(other) and is_small(one, other):
                found.add(id(eqn))
    return frozenset(found)


def gathered(value: jax.Array, place: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """A gathered weight, saved for the backward pass.

    JAX rounds what is saved, by an operation of its own. Of its result XLA would keep a part on each device, as of the
    gradient, and gather whatever a layer makes of it; so that is placed too, and the gradient comes back as it is.

    Args:
      value: the weight.
      place: places an array as the weight is used.
    """
    placed = jax.custom_vjp(place)
    placed.defvjp(lambda named: (place(named), None), lambda _, gradient: (gradient,))
    return placed(checkpoint_name(value, GATHERED))


def keep_sum(out: Any, ins: Sequence[Any], remat: str) -> Any:
    """Such a sum, saved for the backward pass where products are, if it is as small as the product and can be."""
    product = max(ins, key=lambda x: x.size)
    is_kept = remat == "none" and out.dtype == product.dtype and not is_complex(out)
    return checkpoint_name(out, KEPT) if is_kept else out


POLICIES: Mapping[str, Callable[..., Any] | None] = {
    "none": _of_real_numbers(keeps_results),
    "dots": _of_real_numbers(jax.checkpoint_policies.dots_with_no_batch_dims_saveable),
    "block": jax.checkpoint_policies.save_only_these_names(GATHERED),
}


def kept(eqn: Equation, outs: list[Any], remat: str) -> list[Any]:
    """The results of an equation, complex ones as two real numbers each where layers save such results."""
    wanted = {"none": keeps_results, "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}.get(remat)
    operands = [v.aval for v in eqn.invars]
    if not any(map(is_complex, outs)) or wanted is None or not wanted(eqn.primitive, *operands, **eqn.params):
        return outs
    return [saved(out) if is_complex(out) else out for out in outs]


def saved(value: jax.Array) -> jax.Array:
    """A value that layers save for the backward pass; a complex one as two real numbers, which JAX can round."""
    if is_complex(value):
        return lax.complex(checkpoint_name(value.real, KEPT), checkpoint_name(value.imag, KEPT))
    return checkpoint_name(value, KEPT)


def checkpointed(
    body: Callable[..., Any], remat: str, complexes: bool, prevent_cse: bool = False
) -> Callable[..., Any]:
    """`jax.checkpoint` of a function of arrays.

    Args:
      body: the function.
      remat: what it saves, of `POLICIES`.
      complexes: whether it reads or makes complex numbers; they cross its border as two real numbers each.
      prevent_cse: as JAX has it.
    """
    policy = POLICIES[remat]
    if not complexes:
        return jax.checkpoint(body, policy=policy, prevent_cse=prevent_cse)

    def run(*args: Any) -> Any:
        closed, shape = make_jaxpr(body, return_shape=True)(*args)  # constants are what it reads of outside
        inputs = [*closed.consts, *jax.tree.leaves(args)]
        split = [(x.real, x.imag) if is_complex(x) else (x,) for x in map(jnp.asarray, inputs)]

        def inside(*parts: Any) -> Any:
            whole = [lax.complex(*x) if len(x) == 2 else x[0] for x in parts]
            consts, given = whole[: len(closed.consts)], whole[len(closed.consts) :]
            return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr, consts))(*given)

        outs = jax.checkpoint(inside, policy=policy, prevent_cse=prevent_cse)(*split)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return run
