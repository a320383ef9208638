"""FLOPs and bytes of a jaxpr, trip counts included.

XLA's own cost analysis counts the body of a scan once, whatever its length, so it cannot say what a rolled model costs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from cjax.jax_compat.core import Atom, ClosedJaxpr, Equation, Jaxpr, Literal
from cjax.trace.jaxpr.primitives import facts_of, having, name_of, named
from cjax.trace.jaxpr.view import bodies, cond_of, scan_of, while_of


@dataclass(frozen=True)
class Cost:
    """What a computation costs on one device.

    `flops` counts 2 for each multiply-add of a matmul or convolution, 1 for each element that a reduction reads and 1
    for each that other arithmetic makes; `matmul_flops` are the first alone. `bytes` are the operands and results of
    matmuls and convolutions, and what other equations write: an upper bound for memory traffic, since the compiler
    fuses. `unbounded_loops` counts `while` equations, whose trip count nobody knows: they are counted as one pass.
    """

    flops: int = 0
    bytes: int = 0
    matmul_flops: int = 0
    unbounded_loops: int = 0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            self.flops + other.flops,
            self.bytes + other.bytes,
            self.matmul_flops + other.matmul_flops,
            self.unbounded_loops + other.unbounded_loops,
        )

    def __mul__(self, times: int) -> "Cost":
        return Cost(self.flops * times, self.bytes * times, self.matmul_flops * times, self.unbounded_loops)


def cost(closed: ClosedJaxpr | Jaxpr) -> Cost:
    """The cost of a trace, flat or not: bodies of `scan` times their length, of `cond` the dearest branch.

    Remat costs what it costs where it stands: in the trace of a gradient, its forward pass appears a second time inside
    the backward pass and is counted there.

    >>> import jax, jax.numpy as jnp
    >>> cost(jax.make_jaxpr(jnp.matmul)(jnp.ones((2, 3)), jnp.ones((3, 5)))).matmul_flops
    60
    """
    return sum((equation_cost(eqn) for eqn in closed.eqns), Cost())


def cost_by_equation(closed: ClosedJaxpr | Jaxpr) -> tuple[Cost, ...]:
    """The cost of each top-level equation, in order."""
    return tuple(equation_cost(eqn) for eqn in closed.eqns)


def equation_cost(eqn: Equation) -> Cost:
    """The cost of one equation, with all it contains."""
    match name_of(eqn):
        case "scan":
            loop = scan_of(eqn)
            return cost(loop.closed) * loop.length
        case "while":
            endless = while_of(eqn)
            return cost(endless.condition) + cost(endless.closed) + Cost(unbounded_loops=1)
        case "cond":
            return max(map(cost, cond_of(eqn).branches), key=lambda c: (c.flops, c.bytes))
        case "shard_map":  # its body is one device's shard
            return cost(eqn.params["jaxpr"])
    held = list(bodies(eqn))
    if held and not facts_of(eqn).combines:
        return sum((cost(body) for body in held), Cost())
    written = sum(_num_bytes(var) for var in eqn.outvars)
    if name_of(eqn) in _MULTIPLY_ADDS:
        flops = 2 * _MULTIPLY_ADDS[name_of(eqn)](eqn)
        return Cost(flops, written + sum(_num_bytes(atom) for atom in eqn.invars), flops)
    if facts_of(eqn).free:
        return Cost()
    return Cost(_flops(eqn), written)


def _dot_general(eqn: Equation) -> int:
    (lhs_contracting, _), _ = eqn.params["dimension_numbers"]
    return _num_elements(eqn.outvars[0]) * math.prod(eqn.invars[0].aval.shape[dim] for dim in lhs_contracting)


def _convolution(eqn: Equation) -> int:
    """Each output element sums over the kernel and the input features of its group (the kernel's own count). A dilated
    input is mostly zeros (a strided convolution's gradient): those are not multiplied."""
    kernel = eqn.invars[1].aval
    spec = eqn.params["dimension_numbers"].rhs_spec  # output features, input features, spatial dims
    per_output = math.prod(kernel.shape[dim] for dim in spec[1:])
    return _num_elements(eqn.outvars[0]) * per_output // math.prod(eqn.params["lhs_dilation"])


def _ragged_dot(eqn: Equation) -> int:
    return _num_elements(eqn.outvars[0]) * eqn.invars[0].aval.shape[-1]


_MULTIPLY_ADDS: dict[str, Callable[[Equation], int]] = {
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "ragged_dot_general": _ragged_dot,
}
_MOVES = having("moves") | having("same") | named("bitcast_convert_type iota select_n")  # no arithmetic


def _flops(eqn: Equation) -> int:
    name = name_of(eqn)
    if name in _MOVES:
        return 0
    made = sum(_num_elements(var) for var in eqn.outvars)
    if facts_of(eqn).reads:
        return max(made, sum(_num_elements(atom) for atom in eqn.invars if type(atom) is not Literal))
    if facts_of(eqn).scatter:
        return _num_elements(eqn.invars[2])
    return made


def _num_elements(atom: Atom) -> int:
    return math.prod(getattr(atom.aval, "shape", ()))


def _num_bytes(atom: Atom) -> int:
    dtype = getattr(atom.aval, "dtype", None)
    return 0 if dtype is None else _num_elements(atom) * dtype.itemsize
