"""Which dimensions of which tensors are the same dimension, read off a flat trace by union-find.

Every dimension of every tensor starts as its own; an equation unites those that it makes move together: elementwise
operations unite all, a matmul its contracted and batch dims, a scan its carries. What is left are *classes*: the batch
of a transformer is one class from its tokens to its logits, and so are its heads and its vocabulary, in weights and in
activations alike. A primitive without a rule relates nothing, which is always safe, and is counted in `Dims.unknown`.

A reshape unites a dim with the *major* factor it is split into or merged from ([batch * seq] moves with batch), since
blocks of the one are blocks of the other; `Dims.splits` remembers the sizes, so that a layout can ask how far a class
can be divided.
"""

from collections.abc import Callable, Collection

from cjax.jax_compat.core import ClosedJaxpr, Equation, Literal
from cjax.trace.dims import rules as dim_rules
from cjax.trace.dims.classes import Dims as Dims
from cjax.trace.dims.classes import Ids
from cjax.trace.dims.classes import Matmul as Matmul
from cjax.trace.dims.classes import Scope as Scope
from cjax.trace.dims.classes import Split as Split
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.sources import GIVEN, WEIGHT


def find_dims(closed: ClosedJaxpr, num_weights: int = 0, given: Collection[int] = ()) -> Dims:
    """Find the dims of a flat trace whose first `num_weights` inputs are parameters.

    Args:
      closed: a flat trace (`cjax.trace.jaxpr.simplify`).
      num_weights: how many of its leading inputs are weights; matmuls and lookups remember them as operands.
      given: inputs that are neither weights nor made of the batch: random keys, the state that a model carries.

    >>> import jax, jax.numpy as jnp
    >>> dims = find_dims(jax.make_jaxpr(jnp.dot)(jnp.ones((4, 3)), jnp.ones((3, 5))))
    >>> dims.class_of(dims.inputs[0][1]) == dims.class_of(dims.inputs[1][0])
    True
    """
    dims = Dims(_rule_of)
    for index, var in enumerate(closed.jaxpr.invars):
        dims.ids_of(var, dims.top)
        if index < num_weights:
            dims.top.origin[var] = index
            dims.top.source[var] = WEIGHT
        elif index in given:
            dims.top.source[var] = GIVEN
    dims.top.source.update(dict.fromkeys(closed.jaxpr.constvars, GIVEN))
    dims.run(closed.jaxpr, dims.top)
    # Ids, not classes: a class may hold dims of several sizes (query heads and key-value heads), an id has its own.
    dims.inputs = [tuple(dims.ids_of(var, dims.top)) for var in closed.jaxpr.invars]
    return dims


def _rule_of(eqn: Equation) -> Callable[..., bool | None]:
    name = name_of(eqn)
    rule = dim_rules.RULES.get(name, dim_rules.unrelated)
    return _keeping_origin(rule) if name in dim_rules.KEEPS_ORIGIN else rule


def _keeping_origin(rule: Callable[..., bool | None]) -> Callable[..., bool | None]:
    def kept(dims: Dims, eqn: Equation, ins: list[Ids], outs: list[Ids], scope: Scope) -> bool | None:
        source = eqn.invars[0]
        if not isinstance(source, Literal) and source in scope.origin:
            scope.origin[eqn.outvars[0]] = scope.origin[source]
        return rule(dims, eqn, ins, outs, scope)

    return kept
