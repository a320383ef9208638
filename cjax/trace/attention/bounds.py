"""How large the logits of a block can be, whatever the queries and keys: which blocks a mask leaves empty.

Interval arithmetic on the region's equations. Positions are known, values are not, so `where(i >= j, scores, -1e9)` is
exactly -1e9 in a block where all i are smaller than all j, and can be anything in the others.
"""

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from cjax.jax_compat.core import Equation, Literal
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import MOVES, Node
from cjax.trace.jaxpr.evaluate import Step, demanded, evaluate
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import literal_of

# A block whose bound lies far enough below its row's maximum is skipped, so a bound that is too low is a wrong result
# without a word. Whatever is not certain is ANY; that costs time alone.
Interval = tuple[float, float]
ANY: Interval = (-math.inf, math.inf)


def bounds(attention: Attention, num_queries: int, num_keys: int, changed: Collection[tuple[int, int]]) -> np.ndarray:
    """The largest that logits can be in each block, [num_queries, num_keys]; infinite where nothing is known.

    Args:
      attention: whose logits.
      num_queries, num_keys: how many equal blocks each position is cut into; the last may have less, or nothing.
      changed: literals (equation's id, operand) whose value is not known.
    """
    query, key = attention.label("query"), attention.label("key")
    steps = {**attention.sources, **attention.steps}
    # Without positions no block is different from another.
    if not any(name_of(eqn) == "iota" for eqn, _ in steps.values()):
        return np.full((num_queries, num_keys), math.inf)
    # Of what has no rule nothing is known, whatever it is made of.
    made = {node: step for node, step in steps.items() if _has_rule(step[0])}
    logits = {node: demanded(node, made, ()) for node in (attention.logits, attention.masked)}
    found = np.empty((num_queries, num_keys))
    rows, cols = -(-attention.sizes[query] // num_queries), -(-attention.sizes[key] // num_keys)
    last = {one: size - 1 for one, size in attention.sizes.items()}
    for i in range(num_queries):
        for j in range(num_keys):
            spans = {one: (0, end) for one, end in last.items()}
            spans |= {query: (i * rows, i * rows + rows - 1), key: (j * cols, j * cols + cols - 1)}
            spans = {one: (min(first, last[one]), min(end, last[one])) for one, (first, end) in spans.items()}
            found[i, j] = max(_interval(node, steps, spans, changed) for node, steps in logits.items())[1]
    return found


def _has_rule(eqn: Equation) -> bool:
    name = name_of(eqn)
    return name == "iota" or name in MOVES or name in _RULES


def _interval(
    node: Node,
    steps: Sequence[Step[Equation, Node]],
    spans: Mapping[int, tuple[int, int]],
    changed: Collection[tuple[int, int]],
) -> Interval:
    """What a node can be in a block, by the steps that make it."""

    def number(eqn: Equation, place: int) -> Interval:
        # A literal that differs from layer to layer is one number here and another there, and this table serves them
        # all.
        return ANY if (id(eqn), place) in changed else _literal(literal_of(eqn, place))

    def apply(step: Step[Equation, Node], ins: list[Interval]) -> list[Interval]:
        eqn, (made,) = step.of, step.writes
        name = name_of(eqn)
        if name == "iota":
            label = made.labels[eqn.params["dimension"]]
            found = spans[label[0]] if len(label) == 1 else ANY
        else:
            found = _as_stored(eqn, ins[0] if name in MOVES else _RULES[name](*ins))
        # inf - inf, 0 * inf: nothing is known.
        return [ANY if any(map(math.isnan, found)) else found]

    known: dict[Node, Interval] = {}
    evaluate(steps, lambda key: known.get(key, ANY), known.update, number, apply)
    return known.get(node, ANY)


def _literal(atom: Literal) -> Interval:
    if np.ndim(atom.val) == 0 and np.asarray(atom.val).dtype.kind in "iubf" or isinstance(atom.val, float):
        return (float(atom.val), float(atom.val))
    return ANY


def _as_stored(eqn: Equation, found: Interval) -> Interval:
    """An interval after rounding; all there is where integers might wrap around."""
    dtype = eqn.outvars[0].aval.dtype
    if dtype.kind in "iub":
        wraps = dtype.kind == "u" or max(map(abs, found)) >= 2.0 ** (8 * dtype.itemsize - 1)
        truncates = any(getattr(atom.aval, "dtype", dtype).kind not in "iub" for atom in eqn.invars)
        return ANY if dtype.kind != "b" and (wraps or truncates and name_of(eqn) in MOVES) else found
    # These are computed in float64, the model in less: a few roundings wider on each side.
    slack = 2.0**-20 if dtype.itemsize >= 4 else 2.0**-7
    return (found[0] - slack * abs(found[0]), found[1] + slack * abs(found[1]))


def _compare(
    yes: Callable[[Interval, Interval], bool], no: Callable[[Interval, Interval], bool]
) -> Callable[[Interval, Interval], Interval]:
    return lambda x, y: (1.0, 1.0) if yes(x, y) else (0.0, 0.0) if no(x, y) else (0.0, 1.0)


def _product(x: Interval, y: Interval) -> Interval:
    corners = [a * b for a in x for b in y]
    return (min(corners), max(corners)) if not any(map(math.isnan, corners)) else ANY


def _choice(which: Interval, *cases: Interval) -> Interval:
    if which[0] == which[1] and which[0] in range(len(cases)):
        return cases[int(which[0])]
    return (min(case[0] for case in cases), max(case[1] for case in cases))


def _absolute(x: Interval) -> Interval:
    return (0.0 if x[0] <= 0 <= x[1] else min(map(abs, x)), max(map(abs, x)))


def _opposite(x: Interval) -> Interval:
    return (1.0 - x[1], 1.0 - x[0])


def _both(how: Callable[[float, float], float]) -> Callable[[Interval, Interval], Interval]:
    return lambda x, y: (how(x[0], y[0]), how(x[1], y[1]))


_at_least = _compare(lambda x, y: x[0] >= y[1], lambda x, y: x[1] < y[0])
_above = _compare(lambda x, y: x[0] > y[1], lambda x, y: x[1] <= y[0])
_equal = _compare(lambda x, y: x[0] == x[1] == y[0] == y[1], lambda x, y: x[1] < y[0] or y[1] < x[0])

_RULES: dict[str, Callable[..., Interval]] = {
    "add": _both(operator.add),
    "sub": lambda x, y: (x[0] - y[1], x[1] - y[0]),
    "mul": _product,
    "neg": lambda x: (-x[1], -x[0]),
    "abs": _absolute,
    "max": _both(max),
    "min": _both(min),
    "ge": _at_least,
    "gt": _above,
    "le": lambda x, y: _at_least(y, x),
    "lt": lambda x, y: _above(y, x),
    "eq": _equal,
    "ne": lambda x, y: _opposite(_equal(x, y)),
    # Of booleans; in other integers these are bits, of which nothing is known.
    "and": lambda x, y: _both(min)(x, y) if _is_truth(x) and _is_truth(y) else ANY,
    "or": lambda x, y: _both(max)(x, y) if _is_truth(x) and _is_truth(y) else ANY,
    "not": lambda x: _opposite(x) if _is_truth(x) else ANY,
    "select_n": _choice,
}


def _is_truth(x: Interval) -> bool:
    return 0 <= x[0] <= x[1] <= 1
