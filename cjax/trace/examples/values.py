"""What a value of a trace has to do with the examples of a batch: the vocabulary of `cjax.trace.examples.verdict`."""

import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, Equation, Var
from cjax.jax_compat.jaxprs import name_stack, traceback_of
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.tracebacks import called_by_loss, in_model, place


@dataclass(frozen=True, order=True)
class Place:
    """Where examples meet, or where something depends on how many there are; `inside` the model or in the loss."""

    text: str
    inside: bool = False

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class RowWeight:
    """A denominator `max(atom, floor) + offset`, where `atom` is a sum, or mean, over examples; `zero`, if given, where
    the atom is zero, or also `below` it."""

    atom: Atom
    # Guards are kept apart from the atom, for they do not add up: max(count, 1) of the batch is not the sum of
    # max(count, 1) of its parts. So counts are added up first, and guarded then.
    floor: float = 0.0
    offset: float = 0.0
    zero: float | None = None
    below: bool = False
    is_mean: bool = False

    @property
    def is_guarded(self) -> bool:
        return bool(self.floor or self.offset or self.zero is not None)


@dataclass(frozen=True)
class Value:
    """What is known of a value. Its kind is one of

    fixed      the same whatever the batch holds, and along dims that are longer with more rows
    rows       dim `dim` is (outer, batch, inner) merged, and each row depends on its own example
    sum, mean  added up over examples, or averaged
    weight     a guarded sum or mean: good for a denominator, and for nothing else
    inverse    one over a weight
    ratio      a sum over a weight, and possibly means; `total` is the sum where nothing else was done to it
    mixed      a sum and something that is none, added up
    aggregate  another function of all examples together
    pairs      examples meet one by one
    unknown    made by a primitive that cannot be followed

    Values of a number of rows n grow with it as n ** `power`: `const` is what a constant is here, `twin` what it is in
    a trace of another number of rows. Sums and means need no power, nor do others: theirs is 1 or 0.
    """

    kind: str
    dim: int = 0
    outer: int = 1
    inner: int = 1
    trained: bool = False  # depends on trained parameters
    varies: bool = False  # depends on what is another for each micro-batch: the key, its number, the model's state
    const: float | None = None  # every element is this number
    twin: float | None = None
    power: int = 0  # of fixed and rows
    weight: RowWeight | None = None  # of a ratio or inverse; of rows that were divided by it; of a sum: itself
    total: Atom | None = None
    blended: bool = False  # of a ratio: a mean, or a ratio with another weight, was added
    origin: Place | None = None  # where examples came together, were lost from sight, or rows scaled by all of them
    couplings: frozenset[Place] = frozenset()  # where rows saw other rows, or how many there are
    taints: frozenset[Place] = frozenset()  # of fixed: where it came to differ by row, or by the number of rows
    iota: int | None = None  # counts rows along this dim
    columns: frozenset[int] = frozenset()  # entries of the last dim that count rows: indices of gather and scatter
    test: str = ""  # of a comparison with zero: which
    left: bool = False  # of what examples made together: it has been outside of the model since

    @property
    def is_scaled(self) -> bool:
        """By the number of rows, or by a weight."""
        return self.kind in ("rows", "fixed") and bool(self.power or self.weight)

    @property
    def is_merged(self) -> bool:
        """Of what is fixed: whether a dim that is longer with more rows was merged with one along which it differs; its
        layout is then as of rows."""
        return self.kind == "fixed" and (self.outer, self.inner) != (1, 1)

    @property
    def layout(self) -> tuple[int, int, int]:
        return self.dim, self.outer, self.inner


FIXED = Value("fixed")
LOST = ("pairs", "unknown")


@dataclass(frozen=True)
class Context:
    """One equation, its twin in a trace of another number of rows, and what is known of its operands."""

    eqn: Equation
    values: list[Value]
    batch: int
    twin: Equation | None
    ratio: float  # how many times as many rows this trace has
    inside: bool = False  # the equation around it is in the model
    is_top: bool = False  # there is none around it
    by_method: bool = False  # a method of the model computes the loss

    @property
    def name(self) -> str:
        return name_of(self.eqn)

    @property
    def is_inside(self) -> bool:
        told = traceback_of(self.eqn)
        return self.inside or (in_model(told) and not (self.by_method and called_by_loss(told)))

    @property
    def where(self) -> str:
        # Derivatives taken in a loss have nothing but `transpose(jvp())` for a name.
        named = re.sub(r"\w+\(|\)", "", str(name_stack(self.eqn))).strip("/")
        return f"{name_stack(self.eqn) if named else place(traceback_of(self.eqn))} ({self.name})"

    @property
    def here(self) -> Place:
        return Place(self.where, self.is_inside)

    @property
    def out(self) -> Var:
        return self.eqn.outvars[0]

    def shape(self, operand: int) -> tuple[int, ...]:
        atom: Atom = self.eqn.invars[operand]
        return atom.aval.shape

    def grows(self, operand: int) -> set[int]:
        """The dims of an operand that there are more of with more rows."""
        return growing(self.eqn.invars[operand], self.twin.invars[operand]) if self.twin is not None else set()

    def kinds(self) -> set[str]:
        return {value.kind for value in self.values} - {"fixed"}

    def make(self, value: Value, ignoring: tuple[int, ...] = (), **changes: object) -> Value:
        """`value` with `changes`, and with what all operands hand on; those `ignoring` were used as indices alone, each
        row its own."""
        trained = value.trained or any(v.trained for v in self.values)
        varies = value.varies or any(v.varies for v in self.values)
        value = replace(value, trained=trained, varies=varies, **changes)
        # Notes follow every value that is made of these: a rule that could lose one on the way to the loss would let a
        # wrong number through.
        couplings = value.couplings.union(*(v.couplings for v in self.values))
        taints = value.taints.union(*(v.taints for i, v in enumerate(self.values) if i not in ignoring))
        if value.kind == "fixed":
            return replace(value, couplings=couplings, taints=taints)
        if value.kind != "rows":
            value = replace(value, left=any(v.left for v in self.values) or not self.is_inside)
        # What is fixed and differs by row does no harm until it meets examples; from here on it decides about them.
        if taints:  # in the model if both ends are
            couplings |= {Place(taint.text, taint.inside and self.is_inside) for taint in taints}
        return replace(value, couplings=couplings, taints=frozenset())

    def rows(self, dim: int, outer: int = 1, inner: int = 1, **changes: Any) -> Value:
        return self.make(Value("rows", dim, outer, inner), **changes)

    def moved(self, value: Value, dim: int, outer: int, inner: int) -> Value:
        """The rows of `value` in another place."""
        return self.make(Value("rows", dim, outer, inner, weight=value.weight, power=value.power))

    def coupled(self, row: Value, ignoring: tuple[int, ...] = (), **changes: Any) -> Value:
        """Rows laid out as `row` that see statistics of the batch."""
        # A row that reads a statistic of the batch reads another one on a micro-batch. Whether it may depends on where
        # it does: inside a model that is BatchNorm, in a loss it is another loss. `verdict` judges; a note is made
        # here. A loss that hands a statistic to the model again (weights after a step on these examples) has made it.
        others = [v for v in self.values if v.kind not in ("fixed", "rows")]
        joined = ((self.joined(v.origin), v.left) for v in others)
        places = frozenset(Place(place.text, place.inside and not left) for place, left in joined)
        return self.make(Value("rows", *row.layout, couplings=places), ignoring, **changes)

    def joined(self, origin: Place | None) -> Place:
        """Where examples met that meet others here: in the model if all of it is."""
        here = self.here
        return here if origin is None else Place(origin.text, origin.inside and here.inside)

    def meeting(self, value: Value) -> Value:
        """`value`, whose examples meet here; in the model if what they were scaled by is too."""
        here, scaled = self.here, [v.origin for v in self.values if v.is_scaled and v.origin is not None]
        outside = next((origin for origin in scaled if not origin.inside), here)
        return replace(value, couplings=value.couplings | {outside})

    def traced(self, value: Value) -> Value:
        """`value`, if it is scaled by what all examples decide, with a note of where that began."""
        if not value.is_scaled:
            return value
        origins = [v.origin for v in self.values if v.is_scaled and v.origin is not None]
        return replace(value, origin=next((o for o in origins if not o.inside), origins[0] if origins else self.here))

    def aggregate(self) -> Value:
        """A function of all examples that is no sum, made here."""
        origins = [v.origin for v in self.values if v.origin]
        inside = all(origin.inside for origin in origins) and self.is_inside
        text = next((origin.text for origin in origins), self.where)
        return self.make(Value("aggregate", origin=Place(text, inside)))

    def pairs(self) -> Value:
        return self.make(Value("pairs", origin=self.here))

    def unknown(self) -> Value:
        return self.make(Value("unknown", origin=self.here))

    def sum(self, power: int, weight: RowWeight | None = None) -> Value:
        """A sum over rows that grow as n ** (power - 1)."""
        # n ** 2 or 1 / n in all: neither the sum of the parts' results nor their mean is the whole's.
        if power not in (0, 1):
            return self.aggregate()
        weight = weight and replace(weight, is_mean=power == 0)
        return self.make(Value("sum" if power else "mean", origin=self.here, weight=weight))


def growing(atom: Atom, other: Atom) -> set[int]:
    """The dims in which an atom and its twin differ in size."""
    return {i for i, (a, b) in enumerate(zip(atom.aval.shape, other.aval.shape, strict=False)) if a != b}


def power_of(const: float, twin: float, ratio: float) -> int | None:
    """p where const / twin is ratio ** p; None where no small p will do."""
    # Powers beyond 2 are no author's counting of rows, and with a tolerance some p fits any two numbers in the end. The
    # tolerance is float32's, in which constants reach a trace.
    if const == twin or (np.isnan(const) and np.isnan(twin)):
        return 0
    if not (np.isfinite(const) and np.isfinite(twin)):
        return None
    return next((p for p in (1, -1, 2, -2) if np.isclose(const, twin * ratio**p, rtol=1e-6, atol=0)), None)


def constant(value: ArrayLike, other: ArrayLike | None, ratio: float, here: Place) -> Value:
    """What is known of a constant and its twin (None: it has none)."""
    a, b = _plain(value), _plain(other)
    if a is None:
        # Keys and numbers that are not real have no power to find, but they may differ; one that does was made for a
        # number of rows.
        alike = other is None or (b is None and _alike(value, other))
        return FIXED if alike else replace(FIXED, taints=frozenset({here}))
    first = None if a.size == 0 or (a != a.flat[0]).any() else float(a.flat[0])
    if b is not None and a.shape == b.shape and np.array_equal(a, b, equal_nan=True):
        return replace(FIXED, const=first, twin=first)
    if b is not None and a.ndim == b.ndim and first is not None and b.size and not (b != b.flat[0]).any():
        second = float(b.flat[0])
        power = power_of(first, second, ratio)
        if power is not None:
            return replace(FIXED, const=first, twin=second, power=power)
    # [0, 1, 2, ...] of as many as there are rows: as indices (`x[arange(n), labels]`) these name each row its own, and
    # are the one array that may differ between two numbers of rows. All else that does taints what it is used for.
    counted = None
    if b is not None and a.shape != b.shape and a.dtype.kind in "iu":
        for dim in range(a.ndim):
            numbers = np.arange(a.shape[dim]).reshape([-1 if i == dim else 1 for i in range(a.ndim)])
            counted = dim if (a == numbers).all() else counted
    return replace(FIXED, taints=frozenset({here}), iota=counted)


def _plain(value: ArrayLike | None) -> np.ndarray | None:
    """A constant's numbers, if it is made of real ones."""
    if value is None or not isinstance(getattr(value, "dtype", np.dtype(bool)), np.dtype):
        return None
    array = np.asarray(value)
    if array.dtype.kind == "c":
        return np.real(array) if not np.imag(array).any() else None
    if array.dtype.kind not in "iufb":  # bfloat16 and its kin among them
        try:
            array = array.astype(np.float32)
        except (TypeError, ValueError):
            return None
    return array


def _alike(value: ArrayLike, other: ArrayLike | None) -> bool:
    """Whether constants that are no real numbers, complex ones or keys, are the same, as far as that can be asked."""
    if not all(isinstance(getattr(x, "dtype", None), np.dtype) for x in (value, other)):
        return True
    return np.array_equal(np.asarray(value), np.asarray(other))
