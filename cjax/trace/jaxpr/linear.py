"""Whether a program is linear in some of its inputs: twice of them gives twice of what is made of them.

Gradients of parts of a batch are as many times larger than those of the whole as there are parts, and those of a scaled
loss as it is scaled. A derivative written by hand that clips or rounds what it is handed makes other numbers of these.
"""

from collections.abc import Sequence

import numpy as np

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal
from cjax.trace.jaxpr.primitives import facts_of, name_of
from cjax.trace.jaxpr.view import cond_of, consts_of, opened, scan_of


class _NotLinear(Exception):
    pass


def linear_results(closed: ClosedJaxpr, marked: Sequence[bool]) -> list[bool]:
    """Which results are linear in the marked inputs, as far as can be seen: made of them, or zero. Where anything is
    made of them in another way, none.

    >>> import jax
    >>> linear_results(jax.make_jaxpr(lambda x, g: (g * x ** 2, x))(2.0, 1.0), [False, True])
    [True, False]
    >>> linear_results(jax.make_jaxpr(lambda x, g: x * g.clip(-1, 1))(2.0, jax.numpy.ones(())), [False, True])
    [False]
    """
    try:
        return _read(closed, marked)[1]
    except _NotLinear:
        return [False] * len(closed.jaxpr.outvars)


def _marks(closed: ClosedJaxpr | Jaxpr, marked: Sequence[bool], harmless: Sequence[bool] | None = None) -> list[bool]:
    """Which results are made of the marked inputs; `harmless` ones are marked, or zero."""
    return _read(closed, marked, harmless)[0]


def _read(
    closed: ClosedJaxpr | Jaxpr, marked: Sequence[bool], harmless: Sequence[bool] | None = None
) -> tuple[list[bool], list[bool]]:
    """Which results are made of the marked inputs, and which are harmless: made of them, or zero."""
    jaxpr = opened(closed)
    known = {v for v, mark in zip(jaxpr.invars, marked, strict=True) if mark}
    consts = zip(jaxpr.constvars, consts_of(closed), strict=False)
    zeros = {v for v, value in consts if _is_zero(value)}
    zeros.update(v for v, fine in zip(jaxpr.invars, harmless or (), strict=False) if fine and v not in known)

    def is_marked(atom: Atom) -> bool:
        return not isinstance(atom, Literal) and atom in known

    def is_nothing(atom: Atom) -> bool:
        return _is_zero(atom.val) if isinstance(atom, Literal) else atom in zeros

    for eqn in jaxpr.eqns:
        ins = [is_marked(atom) for atom in eqn.invars]
        if not any(ins):
            if facts_of(eqn).view and all(map(is_nothing, eqn.invars)):
                zeros.update(eqn.outvars)
            continue
        harmless = [mark or is_nothing(atom) for mark, atom in zip(ins, eqn.invars, strict=True)]
        outs = _results(eqn, ins, harmless)
        known.update(var for var, mark in zip(eqn.outvars, outs, strict=True) if mark)
    marks = [is_marked(atom) for atom in jaxpr.outvars]
    return marks, [mark or is_nothing(atom) for mark, atom in zip(marks, jaxpr.outvars, strict=True)]


def _is_zero(value: object) -> bool:
    return isinstance(value, int | float | np.ndarray | np.generic) and not np.any(value)


def _results(eqn: Equation, ins: list[bool], harmless: list[bool]) -> list[bool]:
    """Which results of an equation are made of marked operands; `harmless` operands are marked, or zero."""
    name, params, facts = name_of(eqn), eqn.params, facts_of(eqn)
    all_outs = [True] * len(eqn.outvars)
    if facts.linear and all(harmless):
        return all_outs
    if sum(ins) == 1 and ins.index(True) in facts.linear_in:
        return all_outs
    some = facts.linear_with
    if some and all(harmless[i] for i in some) and not any(_left(ins, some)):
        return all_outs
    if name == "select_n" and not ins[0] and all(harmless[1:]):
        return all_outs
    if facts.body:
        return _marks(params[facts.body], ins, harmless)
    if name == "custom_linear_solve":
        # Constants of four functions come first; only the one that solves is evaluated.
        of = params["const_lengths"]
        first = of.matvec + of.vecmat
        mine = [*range(first, first + of.solve), *range(sum(of), len(ins))]
        return _marks(params["jaxprs"].solve, [ins[i] for i in mine], [harmless[i] for i in mine])
    if name == "cond" and not ins[0]:
        view = cond_of(eqn)
        found = [_marks(branch, view.given(ins), view.given(harmless)) for branch in view.branches]
        if all(each == found[0] for each in found):
            return found[0]
    if name == "scan":
        return _scanned(eqn, ins, harmless)
    raise _NotLinear


def _left(ins: Sequence[bool], some: Sequence[int]) -> list[bool]:
    return [mark for i, mark in enumerate(ins) if i not in some]


def _scanned(eqn: Equation, ins: list[bool], harmless: list[bool]) -> list[bool]:
    loop = scan_of(eqn)
    carry, outs, fine = loop.carries(ins), list[bool](), list(harmless)
    for _ in range(loop.num_carry + 1):  # once more for each that comes to be made of the marked ones
        outs = _marks(loop.closed, [*loop.consts(ins), *carry, *loop.xs(ins)], fine)
        carry = [a or b for a, b in zip(carry, loop.last(outs), strict=True)]
        # What starts at zero and is not made of them may be anything after a turn.
        fine[loop.num_consts : loop.first_x] = [a and b for a, b in zip(loop.carries(fine), carry, strict=True)]
    if any(mark and not zero for mark, zero in zip(carry, loop.carries(harmless), strict=True)):
        raise _NotLinear
    return [*carry, *loop.ys(outs)]
