"""What is sent to experts that data-parallel devices share out, and what comes back: exchanged, and nothing else.

A product of examples and of who is sent where has experts in its result, and is made where the examples are. Asked for
where the experts are, XLA would gather one operand for it and compute there. Asked for with the examples first and with
the experts then, it sends what was made: an all-to-all. Back from the experts it is the same, before anything reads it.
Both are saved for the backward pass as they arrive, where layers save what products make: else they would be sent once
more.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.mesh import EXPERT
from cjax.sharding.layout.layout import Layout
from cjax.sharding.place.saved import saved
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named

_MEET = having("product") | named("gather")  # where examples and those who are sent somewhere meet


class Sends:
    """Which values go to experts or come back from them, by the equations that make or read them."""

    def __init__(self, dims: Dims, layout: Layout) -> None:
        self._dims, self._layout = dims, layout

    def sent(self, eqn: Equation, scope: Scope) -> list[int]:
        """Results of an equation that are made where the examples are, and sent to the experts."""
        return self._sent(eqn, eqn.outvars, scope)

    def fetched(self, eqn: Equation, scope: Scope) -> list[int]:
        """Operands of an equation that experts have made, and that are read where the examples are."""
        return self._sent(eqn, eqn.invars, scope)

    def spec(self, var: Atom, scope: Scope, with_examples: bool) -> PartitionSpec:
        """The placement of such a value, with the examples or with the experts."""
        assert isinstance(var, Var)
        return self._layout.spec(self._dims.of(var, scope), var.aval.shape, with_examples)

    def among_rows(self, eqn: Equation, scope: Scope) -> dict[int, PartitionSpec]:
        """Operands of a product with who is sent where among all examples' rows, which have some of that one's dims and
        no others, such as whose gates count: the placements that these dims have there."""
        found = dict[int, PartitionSpec]()
        if not self._layout.rows or not facts_of(eqn).product:
            return found
        every = [() if isinstance(atom, Literal) else tuple(self._dims.of(atom, scope)) for atom in eqn.invars]
        for mask, classes in zip(eqn.invars, every, strict=True):
            if self._layout.batch not in classes or self._layout.rows.isdisjoint(classes):
                continue
            entry = dict(zip(classes, self.spec(mask, scope, with_examples=False), strict=True))
            for at, others in enumerate(every):
                is_of_examples = self._layout.batch in others and self._layout.rows.isdisjoint(others)
                if is_of_examples and entry.keys() >= set(others):
                    found[at] = PartitionSpec(*(entry[c] for c in others))
        return found

    def _sent(self, eqn: Equation, atoms: Sequence[Atom], scope: Scope) -> list[int]:
        if not self._layout.experts or not (name_of(eqn) in _MEET or facts_of(eqn).scatter):
            return []
        if any(self._is_weight(atom, scope) for atom in eqn.invars):
            return []  # the experts' own work
        return [at for at, atom in enumerate(atoms) if self._is_of_examples(atom, scope)]

    def _is_weight(self, atom: Atom, scope: Scope) -> bool:
        leaf = None if isinstance(atom, Literal) else scope.origin.get(atom)
        return leaf is not None and leaf not in self._layout.scores and self._is_shared(atom, scope)

    def _is_of_examples(self, atom: Atom, scope: Scope) -> bool:
        """Whether a value with experts is some of each example's. What all examples make together is no example's."""
        classes = () if isinstance(atom, Literal) else self._dims.of(atom, scope)
        is_of_all = not self._layout.rows.isdisjoint(classes)
        return self._layout.batch in classes and not is_of_all and self._is_shared(atom, scope)

    def _is_shared(self, atom: Atom, scope: Scope) -> bool:
        """Whether experts split a value."""
        if isinstance(atom, Literal):
            return False
        entries = zip(self._dims.of(atom, scope), self.spec(atom, scope, with_examples=False), strict=True)
        return any(c in self._layout.experts and EXPERT in axes_of_entry(entry) for c, entry in entries)


class Exchanges:
    """Sends and fetches such values.

    Args:
      sends: which.
      constrain: places a value.
      saves: whether what arrives is saved for the backward pass.
    """

    def __init__(self, sends: Sends, constrain: Callable[[jax.Array, PartitionSpec], jax.Array], saves: bool) -> None:
        self._sends, self._constrain, self._saves = sends, constrain, saves

    def fetched(self, eqn: Equation, ins: Sequence[Any], scope: Scope) -> list[Any]:
        """What an equation reads, of it what experts have made as it comes back."""
        found = list(ins)
        for at in self._sends.fetched(eqn, scope):
            found[at] = self._arrived(ins[at], self._sends.spec(eqn.invars[at], scope, with_examples=True))
        for at, spec in self._sends.among_rows(eqn, scope).items():
            found[at] = self._constrain(ins[at], spec)
        return found

    def sent(self, eqn: Equation, outs: Sequence[Any], scope: Scope) -> list[Any]:
        """What an equation makes, of it what goes to experts as it arrives."""
        found = list(outs)
        for at in self._sends.sent(eqn, scope):
            made, sent = (self._sends.spec(eqn.outvars[at], scope, with_examples) for with_examples in (True, False))
            found[at] = self._arrived(self._constrain(outs[at], made), sent)
        return found

    def _arrived(self, value: jax.Array, spec: PartitionSpec) -> jax.Array:
        value = self._constrain(value, spec)
        return saved(value) if self._saves else value
