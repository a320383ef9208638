"""Slices of a trace: what makes some of its values out of what is at hand, as a program of its own.

Slices of equal layers are one program: they differ in numbers, in constants and in which small values of the outside
they read, and all of these are arguments. Numbers that are the same in all of them stay in the program.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.jax_compat.jaxprs import in_context, name_stack
from cjax.trace.jaxpr.evaluate import Step, bind_as_is, equations, evaluate
from cjax.trace.jaxpr.identity import equation_key


@dataclass(frozen=True)
class Read:
    """How a slice comes by a variable that it does not make.

    Attributes:
      kind: what it is part of.
      place: where it is in that, the same in equal slices; for what differs from slice to slice, nothing.
    """

    kind: str
    place: int = -1


@dataclass(frozen=True)
class Slice:
    """Equations, what they read and what they make of it.

    Attributes:
      eqns: each after what it reads.
      reads: variables that are given, in the order in which they are met, and how.
      outs: the results.
    """

    eqns: tuple[Equation, ...]
    reads: tuple[tuple[Var, Read], ...]
    outs: tuple[Atom, ...]

    @property
    def numbers(self) -> list[tuple[int, int]]:
        """Operands that are numbers: (which equation, which operand)."""
        return [
            (index, place)
            for index, eqn in enumerate(self.eqns)
            for place, atom in enumerate(eqn.invars)
            if type(atom) is Literal
        ]

    def number(self, at: tuple[int, int]) -> np.ndarray:
        index, place = at
        atom = self.eqns[index].invars[place]
        assert type(atom) is Literal, atom
        return np.asarray(atom.val, dtype=atom.aval.dtype)

    def bind(self, values: Mapping[str, Sequence[ArrayLike]]) -> dict[Var, ArrayLike]:
        """The values of what is read, from those of each kind: by place, or in the order of `reads_of`."""
        orders = {kind: iter(of) for kind, of in values.items()}
        return {
            var: values[given.kind][given.place] if given.place >= 0 else next(orders[given.kind])
            for var, given in self.reads
        }

    def reads_of(self, kind: str) -> list[Var]:
        """The variables of a kind, in the order in which programs take them."""
        return [var for var, given in self.reads if given.kind == kind]

    @property
    def key(self) -> Hashable:
        """Equal for slices that are one program."""
        numbers: dict[Var, int] = {}

        def number(atom: Atom) -> Hashable:
            if type(atom) is Literal:
                return None
            return numbers.setdefault(atom, len(numbers))

        reads = tuple((number(var), given, var.aval) for var, given in self.reads)
        eqns = tuple(
            (equation_key(eqn), tuple(map(number, eqn.invars)), tuple(map(number, eqn.outvars))) for eqn in self.eqns
        )
        outs = tuple(
            (atom.aval, np.asarray(atom.val).tobytes()) if type(atom) is Literal else number(atom) for atom in self.outs
        )
        return reads, eqns, outs


def cut(outs: Sequence[Atom], made: Mapping[Var, Equation], given: Callable[[Var], Read | None]) -> Slice:
    """The slice that makes `outs`.

    Args:
      outs: what is wanted.
      made: what makes a variable.
      given: how a variable is come by, or None where the slice is to make it. Asked once for each.

    The order of equations depends on `outs` alone, and not on where they stand in the trace: equal layers give equal
    slices.

    >>> import jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, y + 2))(1.0, 1.0).jaxpr
    >>> made = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns}
    >>> one, two = (cut([out], made, lambda v: None if v in made else Read("x")) for out in jaxpr.outvars)
    >>> one.key == two.key, [float(s.number(s.numbers[0])) for s in (one, two)]
    (True, [1.0, 2.0])
    """
    eqns: list[Equation] = []
    reads: dict[Var, Read] = {}
    done: set[Var] = set()
    for out in outs:
        pending: list[Atom | Equation] = [out]
        while pending:
            item = pending.pop()
            if isinstance(item, Equation):
                eqns.append(item)
                continue
            if type(item) is Literal or item in done:
                continue
            assert isinstance(item, Var)
            how = given(item)
            if how is not None:
                done.add(item)
                reads[item] = how
                continue
            eqn = made[item]
            done.update(eqn.outvars)
            pending.append(eqn)
            pending += reversed(eqn.invars)
    return Slice(tuple(eqns), tuple(reads.items()), tuple(outs))


class SliceProgram:
    """What equal slices compute. Made of all of them, so that it knows in which numbers they differ.

    >>> import jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda x, y: (x + 1, y + 2))(1.0, 1.0).jaxpr
    >>> made = {eqn.outvars[0]: eqn for eqn in jaxpr.eqns}
    >>> slices = [cut([out], made, lambda v: None if v in made else Read("x")) for out in jaxpr.outvars]
    >>> program = SliceProgram(slices)
    >>> [float(program.run({"x": [5.0]}, program.numbers(s))[0]) for s in slices]
    [6.0, 7.0]
    """

    def __init__(self, slices: Sequence[Slice]) -> None:
        self.first = slices[0]
        self._changed = [at for at in self.first.numbers if len({other.number(at).tobytes() for other in slices}) > 1]

    def numbers(self, of: Slice) -> list[np.ndarray]:
        """The numbers in which a slice differs from others."""
        return [of.number(at) for at in self._changed]

    def run(self, values: Mapping[str, Sequence[ArrayLike]], numbers: Sequence[ArrayLike]) -> list[jax.Array]:
        """Results, from the values of what is read, by kind; can be traced."""
        changed = {
            (id(self.first.eqns[index]), place): value
            for (index, place), value in zip(self._changed, numbers, strict=True)
        }
        env = self.first.bind(values)

        def number(eqn: Equation, place: int) -> ArrayLike:
            value = changed.get((id(eqn), place))
            return eqn.invars[place].val if value is None else value  # pyright: ignore

        def apply(step: Step[Equation, Var], ins: list[ArrayLike]) -> Sequence[ArrayLike]:
            with jax.named_scope(str(name_stack(step.of)) or "update"), in_context(step.of):
                return bind_as_is(step.of, ins)

        evaluate(equations(self.first.eqns), env.__getitem__, env.update, number, apply)
        return [
            jnp.asarray(atom.val, dtype=atom.aval.dtype) if type(atom) is Literal else jnp.asarray(env[atom])
            for atom in self.first.outs
        ]


Name = TypeVar("Name", bound=Hashable)


def share(slices: Mapping[Name, Slice]) -> dict[Name, SliceProgram]:
    """A program for each slice; one for equal ones."""
    alike: dict[Hashable, list[Name]] = {}
    for name, piece in slices.items():
        alike.setdefault(piece.key, []).append(name)
    programs: dict[Name, SliceProgram] = {}
    for names in alike.values():
        programs.update(dict.fromkeys(names, SliceProgram([slices[name] for name in names])))
    return programs
