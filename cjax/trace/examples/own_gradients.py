"""Gradients that an author wrote by hand: what they do with the number of rows shows in no loss."""

from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from cjax.trace.examples.values import FIXED, LOST, Context, Place, Value

# How the gradient of a row goes with the number of rows, by what the function makes of them.
_POWER = {"rows": 0, "sum": 0, "mean": -1}


def operands(context: Context, results: Sequence[Value]) -> list[Value]:
    """What is known of the inputs of `backward`: operands, and gradients of results, each row its own."""
    alone = not any(value.kind == "rows" for value in context.values)
    made = [context.aggregate() if alone and value.kind != "fixed" else _plain(value) for value in context.values]
    return [*made, *(_plain(value) for value in results)]


def _plain(value: Value) -> Value:
    return Value("rows", *value.layout) if value.kind == "rows" else FIXED


def judged(
    context: Context, results: Sequence[Value], grads: Sequence[Value] | None, scaled: Sequence[bool]
) -> list[Value]:
    """`results`, with a note if their gradients are not those of so many examples each on its own, or do not scale."""
    kinds = {value.kind for value in results}
    if grads is None or not kinds.isdisjoint(("aggregate", *LOST)):
        return list(results)  # without gradients, or refused anyway
    # One that ignores what it is handed is as many times too small as the loss is cut into parts; one that clips it
    # clips each part's.
    right = all(fine or _is_zero(grad) for fine, grad in zip(scaled, grads, strict=True))
    if any(value.kind == "rows" for value in context.values):
        # Of a sum over examples the gradient of one does not depend on how many there are, of a mean it is 1 / n of it.
        # A gradient by hand that says otherwise (a factor of n of its own, a mean of the batch) is right on the batch
        # that its author had in mind, and wrong by that factor on each part, while the loss looks as it should.
        power = {_POWER[kind] for kind in kinds & _POWER.keys()}
        pairs = zip(context.values, context.eqn.invars, strict=True)
        floats = [value for value, atom in pairs if jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
        pairs = zip(floats, grads, strict=True)
        right = right and kinds <= _POWER.keys() and len(power) == 1
        right = right and all(_is_right(value, grad, next(iter(power))) for value, grad in pairs)
    else:  # of weights alone, or of what was made of all examples, of which each part has another
        right = right and all(grad.kind == "fixed" for grad in grads)
    if right:
        return list(results)
    note = Place(f"{context.where}, whose gradient is its author's own")
    return [replace(value, couplings=value.couplings | {note}) for value in results]


def _is_zero(grad: Value) -> bool:
    return grad.kind == "fixed" and grad.const == 0


def _is_right(operand: Value, grad: Value, power: int) -> bool:
    """Whether an operand's gradient is that of so many examples, each on its own."""
    if operand.kind == "fixed" and not operand.trained:
        return True  # nobody asks for it
    # Zero, as of integers and of what is cut off, is right under any number of rows.
    if grad.kind == "fixed":
        return _is_zero(grad) or (operand.kind == "rows" and grad.power == power and not grad.taints)
    if grad.couplings or grad.weight is not None and grad.kind == "rows":
        return False
    if operand.kind == "rows":
        return grad.kind == "rows" and grad.layout == operand.layout and grad.power == power
    # What all rows share (a weight) gathers the gradients of all: their sum, or mean, and no other function.
    return grad.kind == ("mean" if power else "sum")
