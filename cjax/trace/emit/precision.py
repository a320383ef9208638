"""bfloat16 or float16 for a float32 model: which equations compute low, decided on the trace.

Matmuls, convolutions and lookups in a table of weights take low operands and store low (the hardware sums in float32).
What only moves or adds such values stays low, weights being rounded where they meet them. Lookups that matmuls alone
read, such as tokens in the order of their experts, find what was rounded before: no other numbers, half the bytes of
devices' and of memory's. Everything
else - exp, log, reductions, statistics, and all that comes after the last matmul - is float32. Values of dtypes other
than float32 were chosen by the model's author and stay.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal, Params, jaxprs_in_params
from cjax.trace.dims.find import Dims, Scope
from cjax.trace.jaxpr.primitives import facts_of, having, name_of
from cjax.trace.jaxpr.view import is_scan, opened, scan_of

Values = list[jax.Array]

LOWS = {"bfloat16": jnp.dtype(jnp.bfloat16), "float16": jnp.dtype(jnp.float16)}
HIGH = jnp.dtype(jnp.float32)

MATMULS = having("product")
_STAYS_LOW = having("moves") | (having("same") - having("rounds")) | having("low")


class Lowering:
    """Evaluates equations in the dtype `low` where the rules above allow."""

    def __init__(self, closed: ClosedJaxpr, low: np.dtype) -> None:
        self.low = low
        self._feeding: set[int] = set()
        self._mark(closed.jaxpr, [False] * len(closed.jaxpr.outvars))
        self._multiplied = _multiplied(closed.jaxpr)

    def _mark(self, jaxpr: Jaxpr, wanted: list[bool]) -> list[bool]:
        """Remember the equations whose results a later matmul reads, however far on; returns which inputs it does."""
        live = {v for v, w in zip(jaxpr.outvars, wanted, strict=True) if w and not isinstance(v, Literal)}
        for eqn in reversed(jaxpr.eqns):
            feeds = [v in live for v in eqn.outvars]
            if any(feeds):
                self._feeding.add(id(eqn))
            inner = eqn.params["jaxpr"] if is_scan(eqn) or facts_of(eqn).remat else None
            if inner is not None:
                reads = self._mark(opened(inner), feeds)
                if is_scan(eqn):  # what one turn hands on, the next may multiply
                    carries = scan_of(eqn).carries(reads)
                    again = [f or c for f, c in zip(feeds, carries, strict=False)] + feeds[len(carries) :]
                    reads = self._mark(inner.jaxpr, again)
                live.update(v for v, r in zip(eqn.invars, reads, strict=True) if r and not isinstance(v, Literal))
            elif any(feeds) or name_of(eqn) in MATMULS:
                live.update(v for v in eqn.invars if not isinstance(v, Literal))
        return [v in live for v in jaxpr.invars]

    def operands(self, eqn: Equation, ins: Values) -> tuple[Values, np.dtype]:
        """Operands of a matmul as they are multiplied, and the dtype of its result."""
        if _is_wide(eqn):
            low = [jnp.asarray(x).astype(self.low) for x in ins[:2]]
            return [*low, *ins[2:]], self.low  # how many rows each group has, where they are in groups
        return [self.raised(x, v) for x, v in zip(ins, eqn.invars, strict=True)], eqn.outvars[0].aval.dtype

    def given(self, eqn: Equation, ins: Values, scope: Scope) -> tuple[Values, Params]:
        """Operands and parameters to evaluate one equation with; float32 results may come back low."""
        name = name_of(eqn)
        if name in MATMULS:
            ins, dtype = self.operands(eqn, ins)
            stored = {"preferred_element_type": dtype} if dtype == self.low else {}
            return ins, eqn.params | stored
        floats = [i for i, v in enumerate(eqn.invars) if getattr(v.aval, "dtype", None) == HIGH]
        lowers = all(getattr(v.aval, "dtype", None) == HIGH for v in eqn.outvars)
        if lowers and floats and id(eqn) in self._feeding and self._stays_low(eqn, ins, floats, scope):
            return [jnp.asarray(x).astype(self.low) if i in floats else x for i, x in enumerate(ins)], eqn.params
        return [self.raised(x, v) for x, v in zip(ins, eqn.invars, strict=True)], eqn.params

    def _stays_low(self, eqn: Equation, ins: Values, floats: list[int], scope: Scope) -> bool:
        def is_low(i: int) -> bool:
            return getattr(ins[i], "dtype", None) == self.low

        def is_weight(i: int) -> bool:
            var = eqn.invars[i]
            return self._holds(var.val) if isinstance(var, Literal) else var in scope.origin

        if name_of(eqn) == "gather":
            return is_low(0) or is_weight(0) or id(eqn) in self._multiplied
        known = name_of(eqn) in _STAYS_LOW
        return known and any(map(is_low, floats)) and all(is_low(i) or is_weight(i) for i in floats)

    def _holds(self, number: ArrayLike) -> bool:
        """Whether a literal is in range: a mask's -1e9 would be -inf in float16, a row of them NaN after softmax."""
        return bool(np.all(np.abs(number) <= float(jnp.finfo(self.low).max)))

    def raised(self, value: jax.Array, var: Atom) -> jax.Array:
        """`value` in the dtype that the trace says it has."""
        dtype = getattr(var.aval, "dtype", None)
        return value.astype(dtype) if getattr(value, "dtype", None) == self.low and dtype != self.low else value


def _multiplied(jaxpr: Jaxpr) -> set[int]:
    """Lookups by id, at every depth, that nothing but matmuls read, whatever shape they are given before."""
    found = {place for eqn in jaxpr.eqns for inner in jaxprs_in_params(eqn.params) for place in _multiplied(inner)}
    otherwise = {v for v in jaxpr.outvars if not isinstance(v, Literal)}  # read by others, too
    for eqn in reversed(jaxpr.eqns):
        name, is_view = name_of(eqn), facts_of(eqn).view and not facts_of(eqn).rounds
        if name == "gather" and otherwise.isdisjoint(eqn.outvars):
            found.add(id(eqn))
        if not (name in MATMULS and _is_wide(eqn)) and not (is_view and otherwise.isdisjoint(eqn.outvars)):
            otherwise.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _is_wide(eqn: Equation) -> bool:
    """Whether a matmul's operands and result are float32 in the trace: of such, operands are rounded."""
    return all(getattr(v.aval, "dtype", None) == HIGH for v in (*eqn.invars[:2], *eqn.outvars))


def rounded_leaves(dims: Dims) -> set[int]:
    """Inputs that are multiplied or looked up in: weights that are rounded to the precision of the plan."""
    products = [origin for m in (*dims.matmuls, *dims.grouped) for origin in (m.lhs_origin, m.rhs_origin)]
    return {o for o in products if o is not None} | {leaf for leaf, _, _ in dims.tables}
