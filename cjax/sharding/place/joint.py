"""Products of one tensor with several that a mesh axis splits: queries, keys and values of one input.

Each makes a part of its input's gradient on every device. As JAX adds them up, one after the other on top of what else
reads the input (the residual behind a norm, say, whose gradient is whole), XLA has to reduce each by itself; and where
each rounds its own copy of the input, their sum is of float32, and is reduced as such. Reading one copy together, their
parts are added up alone, in the dtype that they are multiplied in, and reduced once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.sharding.layout.layout import Layout
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.find import Scope
from cjax.trace.emit.emit import layer_of, number
from cjax.trace.emit.precision import HIGH, Lowering
from cjax.trace.jaxpr.evaluate import equations, evaluate
from cjax.trace.jaxpr.groups import Group, make_group, variables, waits_for_itself
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.view import every_equation, is_by_rows, is_scan, scan_of, variable_of
from cjax.trace.reading import Trace


@dataclass
class SharedRead:
    """Equations that read one copy of a variable, one after the other: each once.

    Args:
      dtype: of the copy.
      readers: by id, with the operand that is read; rounding is no product, and is the copy itself.
    """

    dtype: np.dtype
    readers: dict[int, int]
    value: Any = None
    copy: Any = None
    left: set[int] = field(default_factory=set)

    def copied(self, eqn: Equation, value: Any) -> Any:
        """The copy that an equation reads in place of `value`; a new one, where this evaluation has made none."""
        if self.value is not value or id(eqn) not in self.left:
            self.value, self.left = value, set(self.readers)
            (self.copy,) = _read_together(False, jnp.asarray(value).astype(self.dtype))
        self.left.remove(id(eqn))
        copy = self.copy
        if not self.left:
            self.value = self.copy = None  # nothing of a trace is kept behind it
        return copy


@dataclass(frozen=True)
class Joint:
    """Products that read `var` in one dtype; `waits`: see `_read_together`."""

    var: Var
    dtype: np.dtype
    waits: bool


class JointProducts:
    """Finds and evaluates products whose parts of one gradient are added up before they are reduced."""

    def __init__(self, trace: Trace, layout: Layout, lowering: Lowering | None, waits: bool) -> None:
        self._dims, self._layout, self._lowering, self._waits = trace.dims, layout, lowering, waits
        self._of_all_layers = _of_all_layers(trace)
        self._readings: dict[int, SharedRead] = {}  # by an equation's id
        self._in_turn: set[int] = set()  # products that read such a copy

    def find(
        self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope, others: Sequence[Group[Any]]
    ) -> list[Group[Joint]]:
        """Groups of such products.

        Args:
          eqns: a jaxpr's equations, or a layer's.
          results: variables read after the last of them.
          scope: the dims of their variables.
          others: groups of other equations.
        """
        taken = {id(eqn) for group in others for eqn in group.eqns}
        # An author may round the input for each product: then these are copies of what they are rounded from.
        copies = {eqn.outvars[0]: eqn for eqn in eqns if _is_copy(eqn) and id(eqn) not in taken}
        together: dict[tuple[Var, np.dtype, frozenset[str]], list[tuple[Equation, Equation | None, bool]]] = {}
        for eqn in eqns:
            if not (name_of(eqn) == "dot_general" or is_by_rows(eqn)) or id(eqn) in taken:
                continue
            for place in range(1 if is_by_rows(eqn) else 2):
                axes = self._partial(eqn, place, scope)
                if axes:
                    var, dtype = variable_of(eqn, place), self._dtype(eqn, place)
                    copy = copies.get(var)
                    if copy is not None and copy.outvars[0].aval.dtype != dtype:
                        copy = None  # others read more digits of it than this product does
                    read = var if copy is None else variable_of(copy, 0)
                    product = eqn, copy, self._hides(eqn, place, read, scope)
                    together.setdefault((read, dtype, axes), []).append(product)
        found: list[Group[Joint]] = []
        seen = set(taken)
        for (var, dtype, _), products in together.items():
            left = [each for each in products if id(each[0]) not in seen and id(each[1]) not in seen]
            if len(left) < 2:
                continue
            members = [eqn for both in left for eqn in both[:2] if eqn is not None]
            waits = all(hides for *_, hides in left)
            group = make_group(members, eqns, results, Joint(var, dtype, waits))
            if group is not None and not waits_for_itself(group, eqns, [*others, *found]):
                found.append(group)
            else:
                self._read_in_turn(var, dtype, [eqn if copy is None else copy for eqn, copy, _ in left])
                self._in_turn.update(id(eqn) for eqn, *_ in left)
            seen.update(map(id, members))
        return found

    def _read_in_turn(self, var: Any, dtype: np.dtype, readers: Sequence[Equation]) -> None:
        """Has products that can't be evaluated at once read one copy all the same: what experts are sent is chosen by
        what the first of them makes."""
        places = {id(eqn): eqn.invars.index(var) for eqn in readers}
        reading = SharedRead(dtype, places)
        self._readings |= dict.fromkeys(places, reading)

    def read(self, eqn: Equation, operands: list[Any]) -> list[Any]:
        """Operands of an equation, with the copy that others read too in place of a variable."""
        reading = self._readings.get(id(eqn))
        if reading is None:
            return operands
        place = reading.readers[id(eqn)]
        return [*operands[:place], reading.copied(eqn, operands[place]), *operands[place + 1 :]]

    def _partial(self, eqn: Equation, place: int, scope: Scope) -> frozenset[str]:
        """The mesh axes over which devices have parts of the gradient of an operand that is no weight."""
        # A weight's gradient is reduced where its placement says.
        return frozenset() if eqn.invars[place] in scope.origin else self._summed(eqn, place, scope)

    def _summed(self, eqn: Equation, place: int, scope: Scope) -> frozenset[str]:
        """The same of any operand: those of the other's free dims."""
        var, other = eqn.invars[place], eqn.invars[1 - place]
        if isinstance(var, Literal) or isinstance(other, Literal) or var is other:
            return frozenset()
        if is_by_rows(eqn):
            contracting, batched = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0], ((), (0,))
        else:
            contracting, batched = eqn.params["dimension_numbers"]
        bound = {*contracting[1 - place], *batched[1 - place]}
        spec = self._layout.spec(self._dims.of(other, scope), other.aval.shape)
        return frozenset(a for d, entry in enumerate(spec) if d not in bound for a in axes_of_entry(entry))

    def _dtype(self, eqn: Equation, place: int) -> np.dtype:
        """In which dtype an operand is multiplied."""
        lowered = self._lowering is not None and all(v.aval.dtype == HIGH for v in (*eqn.invars[:2], *eqn.outvars))
        return self._lowering.low if self._lowering is not None and lowered else eqn.invars[place].aval.dtype

    def beside(self, eqn: Equation, operands: list[Any], scope: Scope) -> list[Any]:
        """Operands of a product that reads its input alone, as they are multiplied."""
        if name_of(eqn) != "dot_general" or id(eqn) in self._in_turn:
            return operands
        waits = any(
            self._partial(eqn, place, scope) and self._hides(eqn, place, variable_of(eqn, place), scope)
            for place in range(2)
        )
        return list(_read_together(True, *operands)) if waits else operands

    def _hides(self, eqn: Equation, place: int, read: Var, scope: Scope) -> bool:
        """Whether the sum over devices of an operand's gradient is to wait for the gradient of the other.

        Where that is another sum over devices, as in a single pass under data parallelism, it would wait for its
        transfer as well. And of what all layers read, XLA adds up their parts and reduces them once behind the last,
        but for those that wait: they are reduced layer by layer.

        Args:
          eqn: the product.
          place: of the operand.
          read: what the operand is, or is rounded from.
          scope: the dims of its variables.
        """
        waits = self._waits and not is_by_rows(eqn)  # of which no weight's gradient is a matmul of its own
        return waits and read not in self._of_all_layers and not self._summed(eqn, 1 - place, scope)

    def evaluate(
        self, group: Group[Joint], ins: list[Any], apply: Callable[[Equation, list[Any]], list[Any]]
    ) -> list[jax.Array]:
        """The results of such a group; `apply` evaluates one equation."""
        values: dict[Var, Any] = dict(zip(group.ins, ins, strict=True))
        others = [var for var in group.ins if var is not group.of.var]
        read = values[group.of.var].astype(group.of.dtype)
        value, *rest = _read_together(group.of.waits, read, *(values[var] for var in others))
        values |= {group.of.var: value, **dict(zip(others, rest, strict=True))}
        run = lambda step, read: [value] if _is_copy(step.of) else apply(step.of, read)  # noqa: E731
        evaluate(equations(group.eqns), values.__getitem__, values.update, number({}), run)
        return [values[var] for var in group.outs]


def _of_all_layers(trace: Trace) -> set[Var]:
    """What each turn of a loop over layers reads as it is: an encoder's results, which all of a decoder's layers do."""
    jaxpr = trace.closed.jaxpr
    found: set[Var] = set()
    for run in trace.runs:
        eqns, _ = layer_of(jaxpr.eqns, run)
        own = {var for eqn in eqns for var in eqn.outvars} | {var for group in run.stacked for var in group}
        handed_on = {read for _, read, _, _ in run.carries}
        found |= {var for eqn in eqns for var in variables(eqn)} - own - handed_on
    loops = [scan_of(eqn) for eqn in every_equation(jaxpr) if is_scan(eqn)]
    return found.union(*(loop.consts(loop.body.invars) for loop in loops))


def _is_copy(eqn: Equation) -> bool:
    """Whether an equation rounds a variable to fewer bits, and does nothing else."""
    if name_of(eqn) != "convert_element_type" or isinstance(eqn.invars[0], Literal):
        return False
    old, new = (v.aval.dtype for v in (eqn.invars[0], eqn.outvars[0]))
    real = all(jnp.issubdtype(d, jnp.floating) for d in (old, new))
    return real and new.itemsize < old.itemsize


def _same(waits: bool, *values: jax.Array) -> tuple[jax.Array, ...]:
    return values


def _backward(waits: bool, _: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return lax.optimization_barrier(gradients) if waits else gradients


# The same values, under names of their own: what readers of one give back is added up before it goes any further.
# An input's gradient is reduced over devices, a weight's takes a matmul that this could be hidden under. From JAX 0.11
# on XLA puts these matmuls behind all reductions of a layer. Where the input's gradient `waits`, nobody reads it before
# the weights' are made, and so they are while it is on its way.
_read_together = jax.custom_vjp(_same, nondiff_argnums=(0,))
_read_together.defvjp(lambda waits, *values: (values, None), _backward)
