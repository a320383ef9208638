"""From a matmul's result to the softmax made of it, and on to what that is multiplied with."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.trace.attention.labels import MOVES, Labels, outgoing
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named
from cjax.trace.jaxpr.view import variable_of

# Any product of a model is a start, and without an end each would be followed through the rest of it.
MAX_SPINE = 200  # equations from scores to output; a longer way is no attention
_FORMS = having("view") - named("broadcast_in_dim")


class Miss(Exception):
    """A softmax on its way from a matmul to another that is no attention, and why."""


class Other(Exception):
    """Something else than attention."""


class Index:
    """Who writes and who reads what, in a list of equations."""

    def __init__(self, eqns: Sequence[Equation], results: Sequence[Atom], before: Sequence[Equation]) -> None:
        self.eqns = eqns
        self.results = {v for v in results if not isinstance(v, Literal)}
        self.place = {id(eqn): place for place, eqn in enumerate(eqns)}
        self.writer = {var: eqn for eqn in (*before, *eqns) for var in eqn.outvars}
        self.readers: dict[Var, list[Equation]] = {}
        for eqn in eqns:
            for var in dict.fromkeys(variables(eqn)):
                self.readers.setdefault(var, []).append(eqn)

    def origin(self, atom: Atom) -> Var | None:
        """The variable that an operand is a mere form of."""
        while not isinstance(atom, Literal) and atom in self.writer:
            eqn = self.writer[atom]
            if name_of(eqn) not in _FORMS:
                break
            atom = eqn.invars[0]
        return None if isinstance(atom, Literal) else atom

    def is_zero(self, atom: Atom) -> bool:
        """Whether an operand is 0 everywhere."""
        while not isinstance(atom, Literal):
            eqn = self.writer.get(atom)
            if eqn is None or not facts_of(eqn).view:
                return False
            atom = eqn.invars[0]
        return np.ndim(atom.val) == 0 and atom.val == 0


@dataclass
class Walk:
    """One try: from a matmul's result on, equation by equation."""

    trace: Index
    start: Equation
    kinds: dict[Var, str] = field(default_factory=dict)
    labels: dict[Var, Labels] = field(default_factory=dict)
    by_name: dict[str, Any] = field(default_factory=dict)  # variables, by the names they have in Attention
    spine: list[Equation] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)

    def walk(self) -> None:
        """Follow the scores to their product with values, and find what each variable on the way is.

        Raises:
          Miss, Other: when they do not get there as an attention's do.
        """
        scores = self.start.outvars[0]
        shape = scores.aval.shape
        self.sizes = {label: size for label, size in enumerate(shape) if size > 1}
        self._mark(scores, "logits", tuple((label,) if size > 1 else () for label, size in enumerate(shape)))
        for eqn in self._dependents(scores):
            self.spine.append(eqn)
            self._step(eqn)
        if "final" not in self.by_name:
            raise Miss("its weights multiply nothing") if "weights" in self.by_name else Other
        if "key" not in self.by_name or "weights" not in self.by_name:
            raise Other

    def _mark(self, var: Var, kind: str, labels: Labels) -> None:
        self.kinds[var], self.labels[var] = kind, labels

    def _dependents(self, scores: Var) -> Iterator[Equation]:
        """Equations that depend on the scores, in order, as far as results have been marked."""
        waiting: list[tuple[int, Equation]] = []
        seen: set[int] = set()
        news = [scores]
        # In the program's order, not breadth first: an equation is judged by what is known of all its operands, so
        # those that depend on scores have to be marked before it.
        for _ in range(MAX_SPINE):
            for var in news:
                for eqn in self.trace.readers.get(var, ()):
                    if id(eqn) not in seen:
                        seen.add(id(eqn))
                        heapq.heappush(waiting, (self.trace.place[id(eqn)], eqn))
            if not waiting:
                return
            _, eqn = heapq.heappop(waiting)
            yield eqn
            news = [var for var in eqn.outvars if var in self.kinds]
        raise Other

    def _step(self, eqn: Equation) -> None:
        """What one equation on the way makes of what it reads."""
        name = name_of(eqn)
        ins = {i: v for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in self.kinds}
        kinds = {self.kinds[v] for v in ins.values()}
        first = next(iter(ins.values()))
        (out, *_) = eqn.outvars
        if name == "dot_general":
            # One product with values and no more: weights that are multiplied twice have to exist whole.
            if kinds != {"weights"} or len(ins) != 1 or "final" in self.by_name:
                raise self._unlike(name)
            self.by_name |= {"final": eqn, "dropped": first}
            return
        if name in ("reduce_max", "reduce_sum"):
            self._reduce(eqn, first, kinds)
            return
        labels = outgoing(eqn, {i: self.labels[v] for i, v in ins.items()}, self.sizes)
        if labels is None:
            raise self._unlike(name)
        # With or without a maximum taken off: an author who knows that scores are small may leave it out.
        if name == "exp" and kinds <= {"logits", "shifted"}:
            self._once("exps", out)
            self.by_name.setdefault("logits", first)
            return self._mark(out, "exp", labels)
        if kinds == {"logits", "max"} and name == "sub" and self.kinds[variable_of(eqn, 0)] == "logits":
            self._once("logits", variable_of(eqn, 0))
            self._once("shift", variable_of(eqn, 1))
            return self._mark(out, "shifted", labels)
        if kinds <= {"max", "sum"}:
            # A number for each row. With one for each key in it, a bias say, it would not cancel, or divide a sum.
            if any(self._differs(atom, labels) for i, atom in enumerate(eqn.invars) if i not in ins):
                raise self._unlike(name)
            return self._mark(out, "sum" if "sum" in kinds else "max", labels)
        if kinds == {"exp", "sum"} and (name == "mul" or name == "div" and self.kinds[variable_of(eqn, 0)] == "exp"):
            self._once("weights", out)
            divisor, numerator = sorted(ins.values(), key=lambda v: self.kinds[v] == "exp")
            self.by_name |= {"divisor": divisor, "numerator": numerator, "division": eqn}
            return self._mark(out, "weights", labels)
        # Nothing may happen between the maximum and the exponential: by blocks it is another maximum that is taken off,
        # and only exp turns a difference into a factor that cancels. Equations that mix kinds in another way are no
        # softmax.
        if len(kinds) > 1 or kinds == {"shifted"} and name not in ("convert_element_type", "reshape"):
            raise self._unlike(name)
        (kind,) = kinds
        if kind in ("exp", "weights"):
            self._require_linear(eqn, ins, kind)
        self._mark(out, kind, labels)

    def _reduce(self, eqn: Equation, operand: Var, kinds: set[str]) -> None:
        """The maximum or the sum over keys: by it, the keys are known."""
        which = {"reduce_max": ("logits", "masked", "max"), "reduce_sum": ("exp", "terms", "sum")}
        kind, name, result = which[name_of(eqn)]
        axes = [int(axis) for axis in eqn.params["axes"]]
        labels = self.labels[operand]
        over = [labels[axis] for axis in axes if labels[axis]]
        # Over one dim of the scores, the same for the maximum and the sum: what it is over are the keys. Over two, or
        # over merged ones, it is a softmax of something else.
        if kinds != {kind} or len(over) != 1 or len(over[0]) != 1:
            raise self._unlike(name_of(eqn))
        if self.by_name.setdefault("key", over[0][0]) != over[0][0]:
            raise Other
        self._once(name, operand)
        self.by_name["total" if name == "terms" else "maximum"] = eqn.outvars[0]
        self._mark(eqn.outvars[0], result, tuple(label for dim, label in enumerate(labels) if dim not in axes))

    def _differs(self, atom: Atom, labels: Labels) -> bool:
        """Whether an operand may be another number along a dim that has no label."""
        sizes = zip(labels, atom.aval.shape, strict=False)
        loose = {dim for dim, (label, size) in enumerate(sizes) if size > 1 > len(label)}
        eqn = None if isinstance(atom, Literal) else self.trace.writer.get(atom)
        if eqn is not None and name_of(eqn) == "broadcast_in_dim":
            placed = zip(eqn.params["broadcast_dimensions"], eqn.invars[0].aval.shape, strict=True)
            loose &= {dim for dim, size in placed if size > 1}
        return bool(loose)

    @property
    def stops_masked(self) -> bool:
        """Whether no gradient comes through what the maximum is taken of."""
        var = self.by_name["masked"]
        while not facts_of(self.trace.writer[var]).stops and name_of(self.trace.writer[var]) in MOVES:
            var = variable_of(self.trace.writer[var], 0)
        return facts_of(self.trace.writer[var]).stops

    def _once(self, name: str, var: Var) -> None:
        if name in self.by_name:
            raise self._unlike(name)
        self.by_name[name] = var

    def _unlike(self, name: str) -> Exception:
        # Before there are weights any product may be the start, and it would be noise to say that it led nowhere.
        if "weights" not in self.by_name:
            return Other()
        return Miss(f"its weights go through `{name}`, which is neither dropout nor a product with values")

    def _require_linear(self, eqn: Equation, ins: Mapping[int, Var], kind: str) -> None:
        """Weights may be scaled only later: it must not matter when."""
        name, facts = name_of(eqn), facts_of(eqn)
        # By blocks the result is divided by the sum at the end, and exponentials are rescaled whenever a larger maximum
        # turns up. Both are factors, which pass through what is linear (dropout, a mask of zeros, a cast) and through
        # nothing else.
        # A ring takes what rows hand back to their sums from the result, which has a gradient even where the weights'
        # own is stopped.
        once = facts.linear or (facts.stops and kind != "weights")
        alone = once if len(eqn.invars) == 1 else set(ins) <= set(facts.linear_in)
        linear = alone and len(ins) == 1
        if name == "select_n":
            others = [v for i, v in enumerate(eqn.invars) if i and i not in ins]
            linear = len(ins) == 1 and 0 not in ins and all(map(self.trace.is_zero, others))
        if not linear or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
            raise self._unlike(name)
