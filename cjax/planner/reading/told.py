"""Which example is sent to which expert, and how much of it counts: what devices that share rows gather besides them.

A product of examples and rows (`cjax.sharding.layout.rows`) reads an operand that has both: which example a row is of.
It is made where the rows are, of numbers that each example has a few of (its expert and its place there, a gate), so
these are gathered whole. What comes back for a gate is its gradient, scattered to the examples.
"""

import dataclasses
from collections.abc import Iterator

from cjax.planner.reading.derived import Derived
from cjax.planner.reading.naming import Naming
from cjax.planner.reading.stretches import Body, Operation, Spot
from cjax.planner.reading.traffic import value_of
from cjax.planner.work import BATCH, ROWS, Ordered, Told
from cjax.sharding.layout.rows import adds_among_rows, is_among_rows
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.jaxpr.sorted_rows import sorted_rows


def told_of(body: Body, naming: Naming, derivative: Derived) -> Iterator[Told]:
    """What a body's operands that have examples and rows are made of, each once."""
    maker = {node: step for step in body.steps for node in step.writes}

    def names(node: Spot) -> set[str]:
        return {name for name, _ in value_of(node, body, naming).dims}

    found: dict[Spot, None] = {}
    waiting = [node for step in body.steps if _is_product(step) for node in step.reads[:2] if node]
    seen = set[Spot]()
    while waiting:
        node = waiting.pop()
        if node in seen or not {BATCH, ROWS} <= names(node):
            continue
        seen.add(node)
        step = maker.get(node)
        for read in step.reads if step is not None else ():
            if read is None:
                continue
            has = names(read)
            if ROWS in has:
                waiting.append(read)
            elif BATCH in has:
                found[_least(read, maker)] = None
    for node in found:
        value = value_of(node, body, naming)
        # A gate is a softmax's, which stays wide under every precision; what a product makes of gates does not.
        narrows = value.is_computed and node in maker and _is_product(maker[node])
        yield Told(dataclasses.replace(value, is_computed=narrows), derivative.has_gradient(node))


def ordered_of(body: Body, naming: Naming, derivative: Derived, alone: bool) -> Iterator[Ordered]:
    """What is looked up in a body where each row of the batch finds another, and what is added up where each is added
    to another: scattered in the one pass, it is gathered in the other. Not what devices sort by themselves.

    Args:
      body: whose steps.
      naming: of dims.
      derivative: of the body.
      alone: whether nothing else may need what it makes; its backward pass counts as needing all of it otherwise.
    """
    own = own_rows(body)
    for step in body.steps:
        eqn, node = step.eqn, step.reads[0] if step.reads else None
        if eqn is None or id(eqn) in own:
            continue
        is_remade = not alone or not derivative.needed.isdisjoint(step.writes)
        if node is not None and is_among_rows(eqn, naming.trace, step.scope):
            yield Ordered(value_of(node, body, naming), derivative.has_gradient(node), is_remade)
        elif adds_among_rows(eqn, naming.trace, step.scope):
            (made,) = step.writes
            yield Ordered(value_of(made, body, naming), derivative.has_gradient(made), is_remade)


def own_rows(body: Body) -> set[int]:
    """Lookups of rows, and additions to them, that each device does among its own; by id."""
    found = [rows for eqns, results, _ in body.lists for rows in sorted_rows(eqns, results)]
    return {each for rows in found for each in (*rows.lookups, *rows.additions)}


def _is_product(step: Operation) -> bool:
    return step.eqn is not None and bool(facts_of(step.eqn).product)


def _least(node: Spot, maker: dict[Spot, Operation]) -> Spot:
    """A value as it was before it was laid out or widened: XLA gathers the mask, and not the numbers made of it."""
    while (step := maker.get(node)) is not None and step.eqn is not None and facts_of(step.eqn).view:
        source = step.reads[0]
        if source is None or _size(source) > _size(node):
            break
        node = source
    return node


def _size(node: Spot) -> int:
    return node.var.aval.size * node.var.aval.dtype.itemsize
