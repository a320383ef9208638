"""One trace evaluated for several micro-batches at a time: equation by equation for all of them, in one loop.

A layer under tensor parallelism waits for its sums over devices, and has nothing of its own to do meanwhile. Another
micro-batch has: while one's sum is on its way, the other is multiplied (Wang et al., Domino, 2024). Both have to be in
one program for that, within one turn of the loop over layers, since a compiler orders what is within a turn and never
mixes two loops.

XLA would undo it. It fuses what is alike, one micro-batch's norm with the other's, and then both wait for both sums. So
up to each product that devices add up (`awaited`), the micro-batches are put in a row: what the next one reads waits
for the operands of that product, and not for its sum.
"""

from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var
from cjax.jax_compat.jaxprs import in_context, name_stack
from cjax.trace.jaxpr.evaluate import Step, bind_as_is, equations, evaluate
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import FUSED, facts_of, name_of
from cjax.trace.jaxpr.view import consts_of, every_equation, is_scan, literal_of, opened, scan_of

AWAITED = "cjax.awaited"

Values = list[jax.Array]  # one for each micro-batch; the same array in all of them is computed once
Side = dict[Var, jax.Array]  # what variables stand for in one of them


def awaited(result: jax.Array) -> jax.Array:
    """Says of a product that devices have parts of it, which are added up before it can be read."""
    return checkpoint_name(result, AWAITED)


def is_awaited(name: str, params: object) -> bool:
    """Whether an equation, by its primitive's name, says just that."""
    return name == "name" and isinstance(params, dict) and params["name"] == AWAITED


def abreast(closed: ClosedJaxpr, inputs: Sequence[Sequence[jax.Array]]) -> list[Values]:
    """The results of a trace for each of several lists of inputs.

    Args:
      closed: a trace, with loops, `jax.checkpoint` and calls in it.
      inputs: for each micro-batch, what the trace reads. What depends only on arrays that are the same object in all of
        them, such as parameters, is computed once.

    >>> closed = jax.make_jaxpr(lambda w, x: (w * 2, w * x))(1.0, 1.0)
    >>> w = jnp.float32(3)
    >>> double, products = abreast(closed, [(w, jnp.float32(1)), (w, jnp.float32(5))])
    >>> double[0] is double[1], [float(x) for x in products]
    (True, [3.0, 15.0])
    """
    return _body(closed.jaxpr, closed.consts, [list(each) for each in zip(*inputs, strict=True)], len(inputs))


def _body(jaxpr: Jaxpr, consts: Sequence[ArrayLike], ins: Sequence[Values], num: int) -> list[Values]:
    sides = Sides([{} for _ in range(num)])
    sides.write(jaxpr.constvars, [[jnp.asarray(const)] * num for const in consts])
    sides.write(jaxpr.invars, ins)
    for stretch in _stretches(jaxpr.eqns):
        if stretch.whole is not None:
            eqn = stretch.whole
            with jax.named_scope(str(name_stack(eqn))), in_context(eqn):
                sides.write(eqn.outvars, _together(eqn, sides.read(eqn.invars), num))
        else:
            _in_a_row(stretch, sides)
    return sides.read(jaxpr.outvars)


@dataclass
class Sides:
    """What variables stand for in each micro-batch."""

    each: list[Side]

    def write(self, variables: Iterable[Var], values: Iterable[Values]) -> None:
        for var, of in zip(variables, values, strict=True):
            for side, value in zip(self.each, of, strict=True):
                side[var] = value

    def read(self, atoms: Iterable[Atom]) -> list[Values]:
        return [[a.val if isinstance(a, Literal) else side[a] for side in self.each] for a in atoms]

    def differs(self, var: Var) -> bool:
        """Whether micro-batches have a value each."""
        return any(side[var] is not self.each[0][var] for side in self.each)


@dataclass(frozen=True)
class _Stretch:
    """Equations up to a product that is awaited, if there is one; or one equation that takes all at a time."""

    eqns: tuple[Equation, ...] = ()
    product: Equation | None = None
    whole: Equation | None = None
    later: Set[Var] = frozenset()  # what is read behind the product


def _stretches(eqns: Sequence[Equation]) -> Iterable[_Stretch]:
    marked = {eqn.invars[0] for eqn in eqns if is_awaited(name_of(eqn), eqn.params)}
    run: list[Equation] = []
    for at, eqn in enumerate(eqns):
        if _holds_loops(eqn):
            yield _Stretch(tuple(run))
            yield _Stretch(whole=eqn)
            run = []
        elif not marked.isdisjoint(eqn.outvars):
            yield _Stretch(tuple(run), eqn, later={var for other in eqns[at + 1 :] for var in variables(other)})
            run = []
        else:
            run.append(eqn)
    yield _Stretch(tuple(run))


def _holds_loops(eqn: Equation) -> bool:
    """Whether an equation is, or calls, what all micro-batches have to go through at a time."""
    if is_scan(eqn) or facts_of(eqn).remat:
        return True
    return facts_of(eqn).inlined and any(map(_holds_loops, every_equation(opened(_called(eqn)))))


def _called(eqn: Equation) -> ClosedJaxpr | Jaxpr:
    return eqn.params[facts_of(eqn).body]


def _in_a_row(stretch: _Stretch, sides: Sides) -> None:
    """One micro-batch after the other; each from the moment on when the one before it has what the product reads."""
    made = {var for eqn in stretch.eqns for var in eqn.outvars}
    outside = [var for var in dict.fromkeys(v for eqn in stretch.eqns for v in variables(eqn)) if var not in made]
    given = [var for var in outside if sides.differs(var)]
    product, again = [] if stretch.product is None else [stretch.product], _made_again(stretch, sides)
    for number, side in enumerate(sides.each):
        if number and product:
            before = sides.each[number - 1]
            side.update((var, sides.each[0][var]) for var in again)  # rounded and gathered once
            _wait([v for v in variables(product[0]) if not isinstance(v, Literal)], before, [*given, *again], side)
            _run(product, number - 1, sides)
        _run([eqn for eqn in stretch.eqns if not side.keys() & set(eqn.outvars)], number, sides)
    _run(product, len(sides.each) - 1, sides)


def _made_again(stretch: _Stretch, sides: Sides) -> list[Var]:
    """Scales and biases of what is read in front of the product and behind it, as behind a norm that a residual passes.

    XLA makes that once more where it is read behind, in one micro-batch after the sum. What the other one has of it is
    made of the same scale, so XLA would make both in one kernel, and the other one's products would wait for the sum.
    """
    made = {var for eqn in stretch.eqns for var in eqn.outvars}
    made_of: dict[Var, dict[Var, None]] = {}

    def vectors(var: Var) -> dict[Var, None]:
        is_shared = var not in made and var.aval.ndim == 1 and not sides.differs(var)
        return {var: None} if is_shared else made_of.get(var, {})

    for eqn in stretch.eqns:
        read = list(variables(eqn))
        if len(read) == 1 and vectors(read[0]) and [out.aval.ndim for out in eqn.outvars] == [1]:
            made_of[eqn.outvars[0]] = {eqn.outvars[0]: None}  # rounded, or gathered: what is read in the end
        elif name_of(eqn) in FUSED:
            made_of |= dict.fromkeys(eqn.outvars, {var: None for one in read for var in vectors(one)})
    return list(dict.fromkeys(var for one, found in made_of.items() if one in stretch.later for var in found))


def _wait(operands: Sequence[Var], before: Side, given: Sequence[Var], side: Side) -> None:
    """Nothing reads `given` on one side before the other's `operands` are there."""
    given = [var for var in given if _is_real(side[var])]
    operands = [var for var in dict.fromkeys(operands) if before[var] is not side.get(var) and _is_real(before[var])]
    if not given or not operands:
        return
    first, second = _meet([before[var] for var in operands], [side[var] for var in given])
    before.update(zip(operands, first, strict=True))
    side.update(zip(given, second, strict=True))


def _is_real(value: jax.Array) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


@jax.custom_jvp
def _meet(first: list[jax.Array], second: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
    """The same values, none of which is read before all of them are there. Gradients meet nowhere: in the backward pass
    there are the gradients of weights to hide a sum under."""
    return lax.optimization_barrier((first, second))


_meet.defjvp(lambda primals, tangents: (_meet(*primals), tangents))


def _run(eqns: Sequence[Equation], number: int, sides: Sides) -> None:
    """Equations on one side; what they read is the same on all of them, they make once."""
    side, first = sides.each[number], sides.each[0]

    def apply(step: Step[Equation, Var], ins: Values) -> Values:
        eqn = step.of
        if number and all(side[v] is first[v] for v in variables(eqn) if not isinstance(v, Literal)):
            return [first[var] for var in eqn.outvars]
        with jax.named_scope(str(name_stack(eqn))), in_context(eqn):
            return bind_as_is(eqn, ins)

    evaluate(equations(eqns), side.__getitem__, side.update, lambda eqn, at: literal_of(eqn, at).val, apply)


def _together(eqn: Equation, ins: Sequence[Values], num: int) -> list[Values]:
    """The results of a loop, of a `jax.checkpoint` or of a call that has such in it."""
    if is_scan(eqn):
        return _loop(eqn, ins, num)
    inner = _called(eqn)
    if not facts_of(eqn).remat:
        return _body(opened(inner), consts_of(inner), ins, num)
    # What all of them read is handed in once: saved for each, it would be there several times.
    arrays = {id(value): value for values in ins for value in values if isinstance(value, jax.Array)}

    def inside(*given: jax.Array) -> list[Values]:
        now = dict(zip(arrays, given, strict=True))
        return _body(opened(inner), (), [[now.get(id(value), value) for value in values] for values in ins], num)

    again: Callable[..., list[Values]] = jax.checkpoint(
        inside, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"]
    )
    return again(*arrays.values())


def _loop(eqn: Equation, ins: Sequence[Values], num: int) -> list[Values]:
    loop = scan_of(eqn)
    consts, carries, xs = loop.consts(ins), loop.carries(ins), loop.xs(ins)
    alike = [all(value is values[0] for value in values) for values in xs]

    def turn(carry: list[Values], slices: list[Values]) -> tuple[list[Values], list[Values]]:
        own = [of * num if same else of for same, of in zip(alike, slices, strict=True)]
        outs = _body(loop.body, loop.closed.consts, [*consts, *carry, *own], num)
        return loop.last(outs), loop.ys(outs)

    initial = [[jnp.asarray(value) for value in values] for values in carries]
    rows = [values[:1] if same else values for same, values in zip(alike, xs, strict=True)]
    last, ys = lax.scan(turn, initial, rows, length=loop.length, reverse=loop.reverse)
    return [*last, *ys]
