"""The one evaluator: equations in order, on whatever values, kept under whatever stands for a variable.

Values are arrays where a trace is computed again (`cjax.trace.emit`) or a block of a mask is made, on the host
(`cjax.trace.attention.form`) or on a device (`cjax.sharding.attention.blocks`); intervals where logits are bounded
(`cjax.trace.attention.bounds`); what is known of examples (`cjax.trace.examples`); variables of another trace, where
equations are put in the place of others. How operands are read and equations applied is handed in.
"""

from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Literal, Params, Var
from cjax.jax_compat.jaxprs import new_var
from cjax.trace.jaxpr.primitives import facts_of

Item = TypeVar("Item")  # what is evaluated: an equation, a group of them, a part of a loop
Key = TypeVar("Key", bound=Hashable)  # what values are kept under: a variable, or a variable and its labels
Value = TypeVar("Value")
Made = Mapping[Key, tuple[Item, tuple[Key | None, ...]]]


class Step(NamedTuple, Generic[Item, Key]):
    """One thing to evaluate.

    Args:
      of: an equation, or whatever stands for several.
      reads: for each operand what its value is kept under, None for a number.
      writes: the same for each result.
    """

    of: Item
    reads: tuple[Key | None, ...]
    writes: tuple[Key, ...]


def evaluate(
    steps: Iterable[Step[Item, Key]],
    read: Callable[[Key], Value],
    write: Callable[[Iterable[tuple[Key, Value]]], object],
    literal: Callable[[Item, int], Value],
    apply: Callable[[Step[Item, Key], list[Value]], Sequence[Value]],
) -> None:
    """Evaluates steps in order.

    Args:
      steps: what to evaluate; each comes after what it reads.
      read: the value that is kept under a key.
      write: keeps results.
      literal: the value of an operand that is a number: (what is evaluated, which operand).
      apply: the results of a step from its operands' values.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x: 2 * (x + 1))(3).jaxpr
    >>> env = {jaxpr.invars[0]: "x"}
    >>> write_out = lambda step, ins: [f"{step.of.primitive}({', '.join(ins)})"]
    >>> number = lambda eqn, i: str(int(eqn.invars[i].val))
    >>> evaluate(equations(jaxpr.eqns), env.__getitem__, env.update, number, write_out)
    >>> env[jaxpr.outvars[0]]
    'mul(2, add(x, 1))'
    """
    for step in steps:
        ins = [literal(step.of, place) if key is None else read(key) for place, key in enumerate(step.reads)]
        write(zip(step.writes, apply(step, ins), strict=True))


def equation(eqn: Equation) -> Step[Equation, Var]:
    """An equation as a step, values kept under its variables."""
    return Step(eqn, tuple(None if isinstance(v, Literal) else v for v in eqn.invars), tuple(eqn.outvars))


def equations(eqns: Iterable[Equation]) -> Iterable[Step[Equation, Var]]:
    """Equations in order as steps."""
    return map(equation, eqns)


def demanded(key: Key, made: Made[Key, Item], known: Container[Key]) -> list[Step[Item, Key]]:
    """The steps that make what is kept under `key`, each after what it reads; nothing that is known, or not made."""
    steps: list[Step[Item, Key]] = []
    seen: set[Key] = set()

    def demand(key: Key) -> None:
        if key in seen or key in known or key not in made:
            return
        seen.add(key)
        item, reads = made[key]
        for below in reads:
            if below is not None:
                demand(below)
        steps.append(Step(item, reads, (key,)))

    demand(key)
    return steps


def bind_as_is(eqn: Equation, ins: Sequence[ArrayLike], params: Params | None = None) -> list[jax.Array]:
    """The results of one equation as JAX computes them, or with other parameters. See also `cjax.trace.emit.emit.bind`,
    for what a derivative is taken of."""
    # Constants of a trace are NumPy's; an author's derivative may index what it kept of them by a traced number.
    ins = [jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in ins] if facts_of(eqn).own_derivative else ins
    out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params if params is None else params))
    return list(out) if eqn.primitive.multiple_results else [out]


def put_in_place(
    closed: ClosedJaxpr, atoms: Sequence[Atom], eqns: list[Equation], place: Callable[[Equation], Params]
) -> list[Atom]:
    """Appends to `eqns` the equations of `closed` on `atoms`, with new variables; returns what stands for its results.

    Args:
      closed: a trace without constants.
      atoms: what it is of.
      eqns: where its equations go.
      place: what `replace` takes of each of them, to say where it was written.
    """
    assert not closed.consts
    env: dict[Var, Atom] = dict(zip(closed.jaxpr.invars, atoms, strict=True))

    def apply(step: Step[Equation, Var], ins: list[Atom]) -> list[Var]:
        outs = [new_var(var.aval) for var in step.of.outvars]
        eqns.append(step.of.replace(invars=ins, outvars=outs, **place(step.of)))
        return outs

    evaluate(equations(closed.jaxpr.eqns), env.__getitem__, env.update, lambda eqn, at: eqn.invars[at], apply)
    return [v if isinstance(v, Literal) else env[v] for v in closed.jaxpr.outvars]
