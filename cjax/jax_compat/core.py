"""The classes of traces, as `jax.extend.core` has them, with the types that JAX leaves out.

JAX declares that a variable has an abstract value, and not that this has a shape and a dtype; of parameters, and of
what `replace` takes, it says nothing. To a type checker the classes here say what they have on every supported JAX;
when cjax runs they are JAX's own, so that what JAX makes is one of them.

Private: nothing; `jax.extend.core` is public. The fields named here are those that the house reads.
Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
Public instead: types in `jax.extend.core`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, final, overload
from typing import Literal as OneOf

import jax
import numpy as np
from jax.extend import core

# What a primitive is told beside its operands, by name: each has names of its own, so that nothing holds for all.
Params: TypeAlias = dict[str, Any]

if TYPE_CHECKING:

    class Aval:
        """An array's type. Tokens have neither shape nor dtype; whoever may meet one asks by `getattr`."""

        shape: tuple[int, ...]
        dtype: np.dtype[Any]
        weak_type: bool
        ndim: int
        size: int

        def __init__(self, shape: Sequence[int], dtype: np.dtype[Any], weak_type: bool = False) -> None: ...

    class Var:
        """What an equation makes, or what a trace is of."""

        aval: Aval

        def __init__(self, aval: Aval) -> None: ...

    @final
    class Literal:
        """A number among the operands of an equation."""

        val: Any  # of NumPy or of Python
        aval: Aval

        def __init__(self, val: Any, aval: Aval) -> None: ...

    class Primitive:
        """What an equation does."""

        name: str
        multiple_results: bool

        def bind(self, *args: Any, **params: Any) -> Any: ...

        def get_bind_params(self, params: Mapping[str, Any]) -> Params: ...

    class Equation:
        """One operation of a trace."""

        primitive: Primitive
        invars: Sequence[Var | Literal]
        outvars: Sequence[Var]
        params: Params
        effects: Collection[object]
        source_info: Any  # private, as is the next; see `cjax.jax_compat.jaxprs`
        ctx: Any

        def replace(
            self, *, invars: Sequence[Var | Literal] = ..., outvars: Sequence[Var] = ..., params: Params = ...,
            **place: Any,
        ) -> "Equation": ...  # fmt: skip

    class Jaxpr:
        """A trace, or the body of an equation. Arrays that it closes over are variables (`constvars`)."""

        constvars: Sequence[Var]
        invars: Sequence[Var]
        outvars: Sequence[Var | Literal]
        eqns: Sequence[Equation]
        effects: Collection[object]

        def replace(
            self, *, constvars: Sequence[Var] = ..., invars: Sequence[Var] = ...,
            outvars: Sequence[Var | Literal] = ..., eqns: Sequence[Equation] = ...,
        ) -> "Jaxpr": ...  # fmt: skip

    class ClosedJaxpr:
        """A trace with the arrays that it closes over."""

        jaxpr: Jaxpr
        consts: Sequence[Any]
        eqns: Sequence[Equation]
        effects: Collection[object]

        def __init__(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> None: ...

    @overload
    def make_jaxpr(fun: Callable[..., Any]) -> Callable[..., ClosedJaxpr]: ...

    @overload
    def make_jaxpr(fun: Callable[..., Any], *, return_shape: OneOf[True]) -> Callable[..., tuple[ClosedJaxpr, Any]]: ...

    def make_jaxpr(fun: Callable[..., Any], *, return_shape: bool = False) -> Callable[..., Any]:
        """`jax.make_jaxpr`."""
        ...

    def jaxpr_as_fun(closed: ClosedJaxpr) -> Callable[..., list[jax.Array]]:
        """`jax.extend.core.jaxpr_as_fun`."""
        ...

    def jaxprs_in_params(params: Params) -> Iterator[Jaxpr]:
        """`jax.extend.core.jaxprs_in_params`."""
        ...

else:
    Aval = jax.core.ShapedArray
    Var, Literal, Primitive, Equation = core.Var, core.Literal, core.Primitive, core.JaxprEqn
    Jaxpr, ClosedJaxpr = core.Jaxpr, core.ClosedJaxpr
    jaxpr_as_fun, jaxprs_in_params = core.jaxpr_as_fun, core.jaxprs_in_params
    make_jaxpr = jax.make_jaxpr

Atom: TypeAlias = Var | Literal
