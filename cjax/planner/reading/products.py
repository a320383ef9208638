"""The products and attentions of a body, by the names of their dims."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

from cjax.jax_compat.core import Atom, Equation, Literal
from cjax.planner.reading.derived import Derived
from cjax.planner.reading.naming import Naming
from cjax.planner.reading.stretches import Body, Operation, Spot
from cjax.planner.reading.traffic import forms_of
from cjax.planner.work import AttentionWork, Dims, MatmulWork
from cjax.sharding.attention.kernel import refusal
from cjax.trace.attention.find import Attention
from cjax.trace.attention.form import NoForm, kernel_form
from cjax.trace.attention.labels import Node
from cjax.trace.dims.find import Scope
from cjax.trace.jaxpr.primitives import facts_of, name_of
from cjax.trace.jaxpr.sources import WEIGHT
from cjax.trace.jaxpr.view import is_by_rows


@dataclass(frozen=True)
class Operands:
    """Which dims of a product's operands do what, and which operand is the weight, if one is.

    Args:
      batch, inner: positions in the left and in the right operand, of the dims both have, and of those summed over.
      weight: 0 or 1; None where both operands are activations.
      window: of a convolution, positions of the kernel's own dims, the features aside.
    """

    batch: tuple[tuple[int, ...], tuple[int, ...]]
    inner: tuple[tuple[int, ...], tuple[int, ...]]
    weight: int | None
    window: tuple[int, ...] = ()

    def free(self, side: int, ndim: int) -> tuple[int, ...]:
        """Positions of the dims that only one operand has."""
        taken = {*self.batch[side], *self.inner[side], *(self.window if side else ())}
        return tuple(d for d in range(ndim) if d not in taken)


def operands_of(eqn: Equation, scope: Scope) -> Operands | None:
    """How the operands of a product meet; None for any other equation."""
    if not facts_of(eqn).product:
        return None
    weights = [is_weight(atom, scope) for atom in eqn.invars[:2]]
    weight = weights.index(True) if sum(weights) == 1 else None
    if name_of(eqn) == "dot_general":
        inner, batch = eqn.params["dimension_numbers"]
        both = [(tuple(of[0]), tuple(of[1])) for of in (batch, inner)]
        return Operands(both[0], both[1], weight)
    if name_of(eqn) == "conv_general_dilated":
        numbers = eqn.params["dimension_numbers"]
        x, w = numbers.lhs_spec, numbers.rhs_spec
        return Operands(((), ()), ((x[1],), (w[1],)), weight, tuple(w[2:]))
    # [rows, inner] x [groups, inner, outer]: each row meets one group.
    inner, _ = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return Operands(((), ()), (tuple(inner[0]), tuple(inner[1])), weight, (0,))


def is_weight(atom: Atom, scope: Scope) -> bool:
    """Whether an operand is a parameter, or a function of parameters alone."""
    return not isinstance(atom, Literal) and (atom in scope.origin or scope.source.get(atom) == WEIGHT)


def products_of(
    body: Body, naming: Naming, numbers: dict[Spot, int], derivative: Derived | None
) -> Iterator[MatmulWork]:
    """The products of a body, those of its attentions left out.

    Args:
      body: whose steps.
      naming: of dims.
      numbers: of the activations that products read; new ones are added.
      derivative: of the body; if not given, its backward pass counts as needing all that it makes.
    """
    roots = forms_of(body)
    for step in body.steps:
        eqn = step.eqn
        how = None if eqn is None else operands_of(eqn, step.scope)
        if eqn is None or how is None:
            continue
        activation = 1 if how.weight == 0 else 0
        read = step.reads[activation]
        root = None if read is None else roots.get(read, read)
        number = -1 if root is None else numbers.setdefault(root, len(numbers))
        is_remade = derivative is None or not derivative.needed.isdisjoint(step.writes)
        yield dataclasses.replace(product_of(eqn, step.scope, how, naming, number, body.times), is_remade=is_remade)


def product_of(eqn: Equation, scope: Scope, how: Operands, naming: Naming, reads: int, times: int) -> MatmulWork:
    dims = naming.trace.dims

    def named(atom: Atom, positions: tuple[int, ...]) -> Dims:
        shape = atom.aval.shape
        classes = [-1] * len(shape) if isinstance(atom, Literal) else dims.of(atom, scope)
        return naming.dims([classes[d] for d in positions], [shape[d] for d in positions])

    x, w = (1, 0) if how.weight == 0 else (0, 1)
    sides = eqn.invars[:2]
    rows = named(sides[x], how.free(x, len(sides[x].aval.shape)))
    outer = named(sides[w], how.free(w, len(sides[w].aval.shape)))
    inner = named(sides[w], how.inner[w])
    if name_of(eqn) == "conv_general_dilated":
        rows, outer, inner = _convolved(eqn, scope, naming)
    groups = sides[w].aval.shape[0] if is_by_rows(eqn) else 1
    return MatmulWork(
        named(sides[x], how.batch[x]), rows, inner, outer, reads, how.weight is not None, times, groups=groups
    )  # fmt: skip


def _convolved(eqn: Equation, scope: Scope, naming: Naming) -> tuple[Dims, Dims, Dims]:
    """A convolution as a matmul: each place of its result sums over a window of the input's features."""
    numbers = eqn.params["dimension_numbers"]
    (out,), kernel = eqn.outvars, eqn.invars[1].aval.shape
    y, w = numbers.out_spec, numbers.rhs_spec
    classes, shape = naming.trace.dims.of(out, scope), out.aval.shape
    at = [y[0], *y[2:]]
    rows = naming.dims([classes[d] for d in at], [shape[d] for d in at])
    outer = naming.dims([classes[y[1]]], [shape[y[1]]])
    of_kernel = None if isinstance(eqn.invars[1], Literal) else naming.trace.dims.of(eqn.invars[1], scope)
    inner = naming.dims([-1 if of_kernel is None else of_kernel[w[1]]], [kernel[w[1]]])
    # A dilated input is mostly zeros, which are not multiplied.
    window = math.prod(kernel[d] for d in w[2:]) // math.prod(eqn.params["lhs_dilation"])
    return rows, outer, (*inner, ("window", window)) if window > 1 else inner


def attentions_of(body: Body, naming: Naming) -> Iterator[AttentionWork]:
    """The attentions of a body."""
    for step in body.steps:
        if isinstance(step.of, Attention):
            yield _attention(step, step.of, naming, body.times)


def _attention(step: Operation, attention: Attention, naming: Naming, times: int) -> AttentionWork:
    dims, query = naming.trace.dims, attention.query
    classes = dict(zip(range(len(query.labels)), dims.of(query.var, step.scope), strict=True))
    of = {label[0]: classes[d] for d, label in enumerate(query.labels) if label}
    keys = dict(zip(attention.key.labels, dims.of(attention.key.var, step.scope), strict=False))
    of[attention.label("key")] = keys.get((attention.label("key"),), -1)

    def named(labels: list[int]) -> Dims:
        return naming.dims([of.get(one, -1) for one in labels], [attention.sizes[one] for one in labels])

    def width(node: Node) -> int:
        found = zip(node.labels, node.var.aval.shape, strict=True)
        return math.prod(size for label, size in found if not label)

    roles = attention.roles
    heads = [one for one in of if roles[one] == "heads"]
    shared = {one for label in attention.key.labels for one in label}
    reason = refusal(attention) or ""
    return AttentionWork(
        named([one for one in of if roles[one] == "batch"]),
        named(heads),
        named([attention.label("query")]),
        named([attention.label("key")]),
        width(attention.query),
        math.prod(attention.sizes[one] for one in heads if one in shared),
        _is_causal(attention),
        not reason,
        reason,
        times,
    )


def _is_causal(attention: Attention) -> bool:
    try:
        return kernel_form(attention).causal
    except NoForm:
        return False
