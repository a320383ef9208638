"""Equations as analyses read them: their bodies, and what loops and branches do with their operands."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Var
from cjax.jax_compat.jaxprs import scan_tree_counts
from cjax.trace.jaxpr.primitives import name_of

T = TypeVar("T")


def bodies(eqn: Equation) -> Iterator[ClosedJaxpr | Jaxpr]:
    """The jaxprs that an equation holds, with their constants where it has any."""
    for value in eqn.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if isinstance(body, ClosedJaxpr | Jaxpr):
                yield body


def open_bodies(eqn: Equation) -> Iterator[Jaxpr]:
    """The jaxprs that an equation holds, without their constants."""
    for body in bodies(eqn):
        yield opened(body)


def every_equation(jaxpr: Jaxpr) -> Iterator[Equation]:
    """The equations of a jaxpr, and of those that they hold."""
    for eqn in jaxpr.eqns:
        yield eqn
        for body in open_bodies(eqn):
            yield from every_equation(body)


def opened(body: ClosedJaxpr | Jaxpr) -> Jaxpr:
    """A jaxpr without its constants."""
    return body.jaxpr if isinstance(body, ClosedJaxpr) else body


def consts_of(body: ClosedJaxpr | Jaxpr) -> Sequence[ArrayLike]:
    """The constants of a jaxpr; of an open one nobody knows any."""
    return body.consts if isinstance(body, ClosedJaxpr) else ()


def standing_for(atom: Atom, instead: Mapping[Var, Atom]) -> Atom:
    """What stands for `atom`: what is in its place may have been replaced in turn.

    >>> standing_for("a", {"a": "b", "b": "c"})  # texts for variables
    'c'
    """
    while not isinstance(atom, Literal) and atom in instead:
        atom = instead[atom]
    return atom


def literal_of(eqn: Equation, place: int) -> Literal:
    """An operand that is a number."""
    atom = eqn.invars[place]
    assert isinstance(atom, Literal), (eqn, place)
    return atom


def variable_of(eqn: Equation, place: int) -> Var:
    """An operand that is no number."""
    atom = eqn.invars[place]
    assert not isinstance(atom, Literal), (eqn, place)
    return atom


@dataclass(frozen=True)
class Scan:
    """A `scan` equation: what each of its operands and results is.

    Operands are constants, carries and what each turn gets its own slice of (`xs`), in this order; results are the last
    carries and what turns give one by one (`ys`). Its body takes and gives the same, without the loop's dim.
    """

    eqn: Equation
    num_consts: int
    num_carry: int

    @property
    def first_x(self) -> int:
        return self.num_consts + self.num_carry

    @property
    def closed(self) -> ClosedJaxpr:
        return self.eqn.params["jaxpr"]

    @property
    def body(self) -> Jaxpr:
        return self.closed.jaxpr

    @property
    def length(self) -> int:
        return self.eqn.params["length"]

    @property
    def reverse(self) -> bool:
        return self.eqn.params["reverse"]

    def consts(self, operands: Sequence[T]) -> list[T]:
        """Of operands, or of whatever there is one of for each, those that all turns read."""
        return list(operands[: self.num_consts])

    def carries(self, operands: Sequence[T]) -> list[T]:
        """Those that a turn hands to the next."""
        return list(operands[self.num_consts : self.first_x])

    def xs(self, operands: Sequence[T]) -> list[T]:
        """Those that each turn reads its own slice of."""
        return list(operands[self.first_x :])

    def last(self, results: Sequence[T]) -> list[T]:
        """Of results, or of whatever there is one of for each, the carries of the last turn."""
        return list(results[: self.num_carry])

    def ys(self, results: Sequence[T]) -> list[T]:
        """Those that each turn gives its own slice of."""
        return list(results[self.num_carry :])


def scan_of(eqn: Equation) -> Scan:
    """The view of a `scan` equation.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr = jax.make_jaxpr(lambda w, xs: jax.lax.scan(lambda c, x: (c * w + x, c), 0.0, xs))(2.0, jnp.ones(3)).jaxpr
    >>> view = scan_of(jaxpr.eqns[-1])
    >>> view.num_consts, view.num_carry, view.length, len(view.xs(jaxpr.eqns[-1].invars))
    (1, 1, 3, 1)
    """
    return Scan(eqn, *_scan_counts(eqn))


def _scan_counts(eqn: Equation) -> tuple[int, int]:
    """How many operands are constants and how many are carries, on every supported JAX."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    return scan_tree_counts(eqn)


@dataclass(frozen=True)
class While:
    """A `while` equation: what each of its operands is.

    Operands are constants of its condition, constants of its body and carries, in this order; results are the last
    carries. The condition takes its constants and the carries, the body its own and the carries.
    """

    eqn: Equation

    @property
    def condition(self) -> ClosedJaxpr:
        return self.eqn.params["cond_jaxpr"]

    @property
    def closed(self) -> ClosedJaxpr:
        return self.eqn.params["body_jaxpr"]

    @property
    def body(self) -> Jaxpr:
        return self.closed.jaxpr

    def asked(self, operands: Sequence[T]) -> list[T]:
        """Of operands, or of whatever there is one of for each, those that only the condition reads."""
        return list(operands[: self.eqn.params["cond_nconsts"]])

    def consts(self, operands: Sequence[T]) -> list[T]:
        """Those that all turns of the body read."""
        first = self.eqn.params["cond_nconsts"]
        return list(operands[first : first + self.eqn.params["body_nconsts"]])

    def carries(self, operands: Sequence[T]) -> list[T]:
        """Those that a turn hands to the next."""
        return list(operands[self.eqn.params["cond_nconsts"] + self.eqn.params["body_nconsts"] :])


def while_of(eqn: Equation) -> While:
    """The view of a `while` equation.

    >>> import jax
    >>> loop = lambda n, w, x: jax.lax.while_loop(lambda c: c < n, lambda c: c * w, x)
    >>> (eqn,) = jax.make_jaxpr(loop)(9, 2, 3).jaxpr.eqns
    >>> view = while_of(eqn)
    >>> view.asked("nwx"), view.consts("nwx"), view.carries("nwx")
    (['n'], ['w'], ['x'])
    """
    assert name_of(eqn) == "while", eqn
    return While(eqn)


@dataclass(frozen=True)
class Cond:
    """A `cond` equation: its first operand is the number of a branch, the others are what each branch takes."""

    eqn: Equation

    @property
    def branches(self) -> tuple[ClosedJaxpr, ...]:
        return tuple(self.eqn.params["branches"])

    def which(self, operands: Sequence[T]) -> T:
        """Of operands, or of whatever there is one of for each, that of the branch's number."""
        return operands[0]

    def given(self, operands: Sequence[T]) -> list[T]:
        """Those that each branch takes."""
        return list(operands[1:])


def cond_of(eqn: Equation) -> Cond:
    """The view of a `cond` equation.

    >>> import jax
    >>> eqn = jax.make_jaxpr(lambda i, x: jax.lax.switch(i, [jax.numpy.sin, jax.numpy.cos], x))(1, 2.0).jaxpr.eqns[-1]
    >>> view = cond_of(eqn)
    >>> len(view.branches), view.which("ix"), view.given("ix")
    (2, 'i', ['x'])
    """
    assert name_of(eqn) == "cond", eqn
    return Cond(eqn)


def is_scan(eqn: Equation) -> bool:
    return name_of(eqn) == "scan"


def is_by_rows(eqn: Equation) -> bool:
    """Whether an equation multiplies rows, its first operand's dim 0, by the weight of the group that each is in.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> rows, weights, sizes = jnp.ones((6, 4)), jnp.ones((2, 4, 3)), jnp.array([4, 2])
    >>> is_by_rows(jax.make_jaxpr(jax.lax.ragged_dot)(rows, weights, sizes).jaxpr.eqns[-1])
    True
    """
    if name_of(eqn) != "ragged_dot_general" or eqn.params["group_offset"] is not None:
        return False
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    ((contracted, _), (batched, _)) = numbers.dot_dimension_numbers
    groups, rows = tuple(numbers.rhs_group_dimensions), tuple(numbers.lhs_ragged_dimensions)
    return groups == rows == (0,) and not batched and 0 not in contracted
