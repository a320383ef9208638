"""What a value of a trace has to do with the examples of a batch: the vocabulary of `cjax.trace.patterns`."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import JaxprEqn

Atom = Any  # Var or Literal; JAX declares their avals without shape and dtype


@dataclass(frozen=True)
class Weight:
    """A denominator `max(atom, floor) + offset`, where `atom` is a sum, or mean, over examples."""

    atom: Atom
    floor: float = 0.0
    offset: float = 0.0
    is_mean: bool = False


@dataclass(frozen=True)
class Value:
    """What is known of a value. Its kind is one of

    fixed      the same whatever the batch holds
    rows       dim `dim` is (outer, batch, inner) merged, and each row depends on its own example
    sum, mean  added up over examples, or averaged
    inverse    one over a weight
    ratio      a sum over a weight, and possibly means; `total` is the sum where nothing else was done to it
    aggregate  another function of all examples together
    pairs      examples meet one by one
    unknown    made by a primitive that cannot be followed
    """

    kind: str
    dim: int = 0
    outer: int = 1
    inner: int = 1
    trained: bool = False  # depends on trained parameters
    const: float | None = None  # every element is this number
    weight: Weight | None = None  # of a ratio or inverse; of rows that were divided by it; of a sum: itself, guarded
    total: Atom | None = None
    later: int = 1  # how many elements were added up after the examples had been
    origin: str = ""  # where the examples came together, or where they were lost from sight
    couplings: frozenset[str] = frozenset()  # where rows saw statistics of the batch
    iota: int | None = None  # counts rows along this dim
    columns: frozenset[int] = frozenset()  # entries of the last dim that count rows: indices of gather and scatter

    @property
    def layout(self) -> tuple[int, int, int]:
        return self.dim, self.outer, self.inner


FIXED = Value("fixed")
LOST = ("pairs", "unknown")


@dataclass(frozen=True)
class Context:
    """One equation, and what is known of its operands."""

    eqn: JaxprEqn
    values: list[Value]
    batch: int

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def where(self) -> str:
        return f"{self.eqn.source_info.name_stack or _place(self.eqn.source_info.traceback)} ({self.name})"

    @property
    def out(self) -> Any:
        return self.eqn.outvars[0]

    def shape(self, operand: int) -> tuple[int, ...]:
        atom: Atom = self.eqn.invars[operand]
        return atom.aval.shape

    def kinds(self) -> set[str]:
        return {value.kind for value in self.values} - {"fixed"}

    def make(self, value: Value, **changes: Any) -> Value:
        """`value` with `changes`, and with what all operands hand on."""
        couplings = value.couplings.union(*(v.couplings for v in self.values))
        trained = value.trained or any(v.trained for v in self.values)
        return replace(value, couplings=couplings, trained=trained, **changes)

    def rows(self, dim: int, outer: int = 1, inner: int = 1, **changes: Any) -> Value:
        return self.make(Value("rows", dim, outer, inner), **changes)

    def coupled(self, row: Value) -> Value:
        """Rows laid out as `row` that see statistics of the batch."""
        origins = frozenset(v.origin for v in self.values if v.kind not in ("fixed", "rows"))
        return self.make(Value("rows", *row.layout, couplings=origins))

    def aggregate(self) -> Value:
        origin = next((v.origin for v in self.values if v.origin), "") or self.where
        return self.make(Value("aggregate", origin=origin))

    def pairs(self) -> Value:
        return self.make(Value("pairs", origin=self.where))

    def unknown(self) -> Value:
        return self.make(Value("unknown", origin=self.where))


def _place(traceback: Any) -> str:
    """Who wrote an equation without a name stack, as NNX's are: the innermost module called, or the line of code."""
    frames = [] if traceback is None else list(traceback.frames)
    frames = [frame for frame in frames if not Path(frame.file_name).is_relative_to(Path(jax.__file__).parent)]
    for frame in frames:
        *owner, method = frame.function_name.split(".")
        if method == "__call__" and owner:
            return owner[-1]
    return f"{Path(frames[0].file_name).name}:{frames[0].line_num}" if frames else "the loss"
