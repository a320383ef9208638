"""Gradients that an author wrote by hand: what they do with the number of rows shows in no loss."""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import ClosedJaxpr, Equation, make_jaxpr
from cjax.trace.emit.emit import bind
from cjax.trace.examples.values import FIXED, Context, Place, Value
from cjax.trace.jaxpr.linear import linear_results
from cjax.trace.jaxpr.simplify import simplify

# How the gradient of a row goes with the number of rows, by what the function makes of them.
_POWER = {"rows": 0, "sum": 0, "mean": -1}


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
            return bind(eqn, all_ins)

        return jax.vjp(forward, *(ins[i] for i in floats))[1](outs)

    return simplify(make_jaxpr(gradients)(ins, outs))


def operands(context: Context, results: Sequence[Value]) -> list[Value]:
    """What is known of the inputs of `backward`: operands, and gradients of results, each row its own."""
    plain = [_plain(value) for value in context.values]
    return [*plain, *(_plain(value) for value in results)]


def _plain(value: Value) -> Value:
    return Value("rows", *value.layout) if value.kind == "rows" else FIXED


def scales(closed: ClosedJaxpr, num_operands: int) -> list[bool]:
    """Which of what `backward` gives grows with the gradients that it is handed, as any derivative does."""
    return linear_results(closed, [i >= num_operands for i in range(len(closed.jaxpr.invars))])


def judged(
    context: Context, results: Sequence[Value], grads: Sequence[Value] | None, scaled: Sequence[bool]
) -> list[Value]:
    """`results`, with a note if their gradients are not those of so many examples each on its own, or do not scale."""
    kinds = {value.kind for value in results}
    if not kinds <= set(_POWER) or grads is None:
        return list(results)  # refused anyway, or without gradients
    # Of a sum over examples the gradient of one does not depend on how many there are, of a mean it is 1 / n of it. A
    # gradient by hand that says otherwise (a factor of n of its own, a mean of the batch) is right on the batch that
    # its author had in mind, and wrong by that factor on each part, while the loss looks as it should.
    power = {_POWER[kind] for kind in kinds}
    atoms = context.eqn.invars
    pairs = zip(context.values, atoms, strict=True)
    floats = [value for value, atom in pairs if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
    # One that ignores what it is handed is as many times too small as the loss is cut into parts.
    grow = all(fine or _is_zero(grad) for fine, grad in zip(scaled, grads, strict=True))
    pairs = zip(floats, grads, strict=True)
    if grow and len(power) == 1 and all(_is_right(value, grad, next(iter(power))) for value, grad in pairs):
        return list(results)
    note = Place(f"{context.where}, whose gradient is its author's own")
    return [replace(value, couplings=value.couplings | {note}) for value in results]


def _is_zero(grad: Value) -> bool:
    return grad.kind == "fixed" and grad.const == 0


def _is_right(operand: Value, grad: Value, power: int) -> bool:
    """Whether an operand's gradient is that of so many examples, each on its own."""
    # Zero, as of integers and of what is cut off, is right under any number of rows.
    if grad.kind == "fixed":
        return _is_zero(grad) or (operand.kind == "rows" and grad.power == power and not grad.taints)
    if grad.couplings or grad.weight is not None and grad.kind == "rows":
        return False
    if operand.kind == "rows":
        return grad.kind == "rows" and grad.layout == operand.layout and grad.power == power
    # What all rows share (a weight) gathers the gradients of all: their sum, or mean, and no other function.
    return grad.kind == ("mean" if power else "sum")
