"""Derivatives that an author wrote by hand, as programs that can be read."""

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import ClosedJaxpr, Equation, make_jaxpr
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.linear import linear_results
from cjax.trace.jaxpr.simplify import simplify


def backward(eqn: Equation) -> ClosedJaxpr | None:
    """What an equation with a derivative of its own hands back: (operands, gradients of results) -> gradients of the
    operands that have any. None where it can't be differentiated."""
    ins = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in eqn.invars]
    floats = [i for i, x in enumerate(ins) if jnp.issubdtype(x.dtype, jnp.inexact)]
    outs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in eqn.outvars]
    # Then there is no gradient that an author could have got wrong.
    if not floats or not all(jnp.issubdtype(x.dtype, jnp.inexact) for x in outs):
        return None

    def gradients(ins: list[jax.Array], outs: list[jax.Array]) -> tuple[jax.Array, ...]:
        def forward(*given: jax.Array) -> list[jax.Array]:
            all_ins = list(ins)
            for i, x in zip(floats, given, strict=True):
                all_ins[i] = x
            return bind_as_is(eqn, all_ins)

        return jax.vjp(forward, *(ins[i] for i in floats))[1](outs)

    return simplify(make_jaxpr(gradients)(ins, outs))


def scales(closed: ClosedJaxpr, num_operands: int) -> list[bool]:
    """Which of what `backward` gives grows with the gradients that it is handed, as any derivative does."""
    return linear_results(closed, [i >= num_operands for i in range(len(closed.jaxpr.invars))])
