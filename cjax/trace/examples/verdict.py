"""How a loss is made of its examples, read off its trace: may micro-batches be averaged, and with what weight?

What cannot be followed is refused. A rule that says too little costs a refusal; one that says too much, a wrong number.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cjax.jax_compat.core import ClosedJaxpr, Equation, Jaxpr, Literal, Var
from cjax.jax_compat.jaxprs import name_stack
from cjax.trace.examples.arithmetic import ELEMENTWISE, elementwise
from cjax.trace.examples.in_order import InOrder
from cjax.trace.examples.method import is_method
from cjax.trace.examples.own_gradients import judged, operands
from cjax.trace.examples.rules import apply_rule, as_rows
from cjax.trace.examples.values import FIXED, LOST, Atom, Context, Place, RowWeight, Value, constant, growing
from cjax.trace.jaxpr.evaluate import Step, equations, evaluate
from cjax.trace.jaxpr.identity import equation_key
from cjax.trace.jaxpr.own_derivative import backward, scales
from cjax.trace.jaxpr.primitives import facts_of, having, named
from cjax.trace.jaxpr.twins import Twins
from cjax.trace.jaxpr.view import cond_of, consts_of, literal_of, opened, scan_of, while_of

APART = "loss=microbatch, if each micro-batch may be a batch of its own"


@dataclass(frozen=True)
class Lifted:
    """How the losses of micro-batches give the loss of the batch.

    kind is one of
      mean     their average is it
      ratio    it is `total / weight` with totals and weights added up; where `total` is None, take each micro-batch's
               loss times its own weight for it
      blend    ratios and means, or ratios with several weights, added up: their average is it once the denominators are
               those of the whole batch
      sum      the loss grows with the batch
      coupled  the loss is no sum over examples
      unknown  the trace could not be followed
    of which the last three are refused. `reason` says it to people. `couplings` name where examples see statistics of
    the batch inside the model (BatchNorm, expert capacity): each micro-batch then has its own, which is reported.
    """

    kind: str
    reason: str
    total: Atom | None = None
    weight: RowWeight | None = None
    couplings: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        return self.kind in ("sum", "coupled", "unknown")


@dataclass
class Divisions:
    """The divisions by weights found at the top of a trace: (equation, weight)."""

    found: list[tuple[Equation, RowWeight]] = field(default_factory=list)


def lift_mean(closed: ClosedJaxpr, other: ClosedJaxpr, batch_invars: set[int], num_params_invars: int) -> Lifted:
    """How micro-batches of a loss combine; the loss is the first result of a flat trace.

    Args:
        closed: the trace. Its first `num_params_invars` inputs are trained: a weight must not depend on them.
        other: the trace of the same loss on another number of rows.
        batch_invars: positions of the inputs that are the batch; dim 0 of those that are no scalars is the batch.

    >>> import jax, jax.numpy as jnp
    >>> traces = [jax.make_jaxpr(lambda w, x: ((x * w) ** 2).mean())(2.0, jnp.ones((n, 3))) for n in (4, 8)]
    >>> lift_mean(*traces, {1}, 1).kind
    'mean'
    """
    return verdict(follow(closed, other, batch_invars, num_params_invars)[0])


def follow(
    closed: ClosedJaxpr,
    other: ClosedJaxpr,
    batch_invars: set[int],
    num_params_invars: int,
    shares: dict[int, Value] | None = None,
    divisions: Divisions | None = None,
) -> list[Value]:
    """What each result of a flat trace has to do with the examples; arguments as for `lift_mean`.

    Args:
        shares: what is known of operands of divisions that stand for denominators of the whole batch, by equation id.
        divisions: where to note divisions by weights.
    """
    jaxpr = closed.jaxpr
    sizes = [{j.invars[i].aval.shape[0] for i in batch_invars if j.invars[i].aval.shape} for j in (jaxpr, other.jaxpr)]
    assert all(len(found) == 1 for found in sizes), f"leaves of the batch differ in dim 0: {sizes}"
    (batch,), (others,) = sizes
    values = []
    for position, var in enumerate(jaxpr.invars):
        if position in batch_invars and var.aval.shape:
            values.append(Value("rows"))
        else:
            # What else there is: the model's state, and behind the batch the key and the micro-batch's number.
            varies = position not in batch_invars and position >= num_params_invars
            values.append(replace(FIXED, trained=position < num_params_invars, varies=varies))
    twin, method = Twins(closed, other), is_method(jaxpr, batch_invars)
    reader = _PairReader(twin, batch, batch / others, shares or {}, divisions or Divisions(), by_method=method)
    twins = other.jaxpr.outvars
    return reader.read(closed, [*reader.consts(closed), *values], False, twins)


def verdict(loss: Value, what: str = "The loss", of_mean: bool = False) -> Lifted:
    """What micro-batches of a loss are allowed, and how they combine; `of_mean` if it is a part of a `Mean` already."""
    couplings = tuple(sorted(str(place) for place in loss.couplings))
    instead = f"Use microbatches=1{'' if of_mean else ', return cjax.Mean(total, weight)'}, or write {APART}."
    # Inside the model, layers that look at a batch (BatchNorm, capacities of experts) look at a micro-batch instead:
    # what everybody accepts who uses them, and the report names it. The loss is what is being minimised; were it to
    # look at fewer examples it would be another, so there it is refused.
    outside = sorted(place for place in (*loss.couplings, *loss.taints) if not place.inside or place in loss.taints)
    if loss.kind not in LOST and outside:
        reason = (
            f"{what} looks at the examples together, or at how many there are, at {outside[0]}: on a micro-batch it "
            f"would be another number. {instead}"
        )
        return Lifted("coupled", reason, couplings=couplings)
    match loss.kind:
        case "fixed" if not loss.power:
            return Lifted("mean", "does not depend on the batch")
        case "mean":
            return Lifted("mean", "a mean over the examples", couplings=couplings)
        case "ratio" if loss.weight is not None and loss.weight.atom.aval.shape == ():
            # Without the sum itself, each part's loss times its own weight stands for it. That is right as far as
            # weights add up, which guarded ones do not: a part without a token would count as one. Those are blends,
            # given the whole's denominator beforehand.
            total = loss.total if loss.total is not None and loss.total.aval.shape == () else None
            guarded = loss.weight.is_guarded and (loss.weight.offset or loss.weight.floor > 1e-20)
            kind = "blend" if loss.blended or (total is None and guarded) else "ratio"
            reason = f"a sum over a weight that depends on the batch, at {loss.origin}"
            return Lifted(kind, reason, total, loss.weight, couplings)
        case "sum" | "mixed" | "fixed":
            at = f" ({loss.origin})" if loss.origin else ""
            reason = (
                f"{what} is a sum over the examples{at}, not a mean: it would change with the number of "
                "micro-batches. Take .mean(), divide by the number of examples in the batch it is given "
                f"(x.shape[0]), return cjax.Mean(total, weight), or write {APART}."
            )
            return Lifted("sum", reason, couplings=couplings)
        case "pairs":
            reason = (
                f"Examples of the batch meet each other at {loss.origin}: a micro-batch would see fewer of them. "
                f"Use microbatches=1, or write {APART}."
            )
            return Lifted("coupled", reason, couplings=couplings)
        case "unknown":
            reason = (
                f"{what} can't be followed beyond {loss.origin}, which may let examples of the batch meet each other. "
                f"Use microbatches=1, or write {APART}."
            )
            return Lifted("unknown", reason, couplings=couplings)
    reason = (
        f"{what} is no mean over the examples: what was brought together at {loss.origin or 'its end'} goes "
        f"through another function. {instead}"
    )
    return Lifted("coupled", reason, couplings=couplings)


@dataclass(frozen=True)
class _PairReader:
    """Reads the equations of a trace beside those of its twin."""

    twins: Twins
    batch: int
    ratio: float  # how many times as many rows there are here
    shares: dict[int, Value]
    divisions: Divisions
    gradients: dict[Hashable, tuple[list[Value] | None, list[bool]]] = field(default_factory=dict)
    is_gradient: bool = False  # whether what is read is such a derivative itself, of which none is taken
    by_method: bool = False
    in_order: InOrder = field(default_factory=InOrder)

    def consts(self, closed: ClosedJaxpr | Jaxpr) -> list[Value]:
        """The values of a trace's constants."""
        jaxpr = opened(closed)
        here = Place("a constant array of the loss that is made for one number of rows")
        return [
            constant(const, self.twins.const(var), self.ratio, here)
            for var, const in zip(jaxpr.constvars, consts_of(closed), strict=False)
        ]

    def read(
        self, closed: ClosedJaxpr | Jaxpr, values: Sequence[Value], inside: bool, twins: Sequence[Atom] | None = None
    ) -> list[Value]:
        """The values of a jaxpr's results, from those of its constants and inputs."""
        jaxpr = opened(closed)
        self.in_order.learn(jaxpr)
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], values, strict=True))

        def context(eqn: Equation, values: list[Value]) -> Context:
            top = twins is not None
            return Context(eqn, values, self.batch, self.twins[eqn], self.ratio, inside, top, self.by_method)

        def number(eqn: Equation, place: int) -> Value:
            # An equation without a twin came about otherwise with other rows (JAX or the author branched on a shape):
            # what it makes is followed here, and noted as knowing how many rows there are.
            twin = self.twins[eqn]
            return self._constant(
                literal_of(eqn, place), None if twin is None else twin.invars[place], context(eqn, [])
            )

        def apply(step: Step[Equation, Var], values: list[Value]) -> list[Value]:
            if id(step.of) in self.shares:
                values[1] = self.shares[id(step.of)]
            here = context(step.of, values)
            return [here.traced(value) for value in self.results(here)]

        evaluate(equations(jaxpr.eqns), env.__getitem__, env.update, number, apply)
        atoms = jaxpr.outvars
        others = [None] * len(atoms) if twins is None else twins
        end = Place("its end")
        return [
            self._constant(atom, other, end) if isinstance(atom, Literal) else env[atom]
            for atom, other in zip(atoms, others, strict=False)
        ]

    def _constant(self, atom: Literal, other: Atom | None, context: Context | Place) -> Value:
        twin = np.asarray(other.val) if isinstance(other, Literal) else None
        value = np.asarray(atom.val)
        if twin is not None and np.array_equal(value, twin):
            return constant(value, twin, self.ratio, Place(""))
        return constant(value, twin, self.ratio, context if isinstance(context, Place) else context.here)

    def results(self, context: Context) -> list[Value]:
        eqn, name = context.eqn, context.name
        in_order = self.in_order.results(context)
        if in_order is not None:
            return in_order
        for kind in LOST:
            lost = next((value for value in context.values if value.kind == kind), None)
            if lost is not None:
                return [context.make(lost)] * len(eqn.outvars)
        if name == "optimization_barrier":
            return [elementwise(replace(context, values=[value])) for value in context.values]
        if name in _CONTROL:
            return _CONTROL[name](self, context)
        # Before `body`: an equation with a derivative by hand has one too, but what it computes says nothing about its
        # gradient.
        facts = facts_of(eqn)
        if facts.own_derivative:
            return self._with_gradient(context, self.call(context, eqn.params[facts.body]))
        if facts.body:
            return self.call(context, eqn.params[facts.body])
        value = self._checked(context, apply_rule(context))
        own = value.weight is not None and context.eqn.outvars and value.weight.atom is context.out
        if own and len(eqn.outvars) > 1:
            assert value.weight is not None
            return [replace(value, weight=replace(value.weight, atom=var)) for var in eqn.outvars]
        return [value] * len(eqn.outvars)

    def _with_gradient(self, context: Context, results: list[Value]) -> list[Value]:
        """The results of an equation with a derivative of its own, which is read as the loss is."""
        # Of what is neither trained nor made of examples there is no gradient.
        if self.is_gradient or context.twin is None or not any(v.trained or v.kind != "fixed" for v in context.values):
            return results
        eqn = context.eqn
        atoms = [*eqn.invars, *context.twin.invars]
        shapes = tuple(atom.aval.shape for atom in atoms)
        known = tuple(value.layout if value.kind == "rows" else value.kind for value in (*context.values, *results))
        key = (equation_key(eqn), shapes, known)
        if key not in self.gradients:
            closed, other = backward(eqn), backward(context.twin)
            grads, scaled = None, list[bool]()
            if closed is not None and other is not None:
                reader = replace(self, twins=Twins(closed, other), shares={}, divisions=Divisions(), is_gradient=True)
                grads = reader.read(closed, [*reader.consts(closed), *operands(context, results)], False)
                scaled = scales(closed, len(eqn.invars))
            self.gradients[key] = grads, scaled
        return judged(context, results, *self.gradients[key])

    def _checked(self, context: Context, value: Value) -> Value:
        """What a rule says of a result, and what no rule may forget."""
        values, eqn = context.values, context.eqn
        if value.kind in ("ratio", "inverse", "rows") and context.is_top and context.name == "div":
            divisor = values[1]
            if value.weight is not None and divisor.weight == value.weight:
                self.divisions.found.append((eqn, value.weight))
        if value.kind == "fixed":
            return self._checked_fixed(context, value)
        merged = {v.layout for i, v in enumerate(values) if v.is_merged and context.grows(i)}
        alike = merged | {v.layout for v in values if v.kind == "rows"}
        if context.twin is None or (merged and (len(alike) > 1 or context.name not in ELEMENTWISE)):
            value = context.meeting(value)
        elif value.kind == "rows":
            grown = [growing(a, b) for a, b in zip(eqn.outvars, context.twin.outvars, strict=True)]
            # As long as there are rows by chance: `x.reshape(4, -1)` of micro-batches of four.
            if any(value.dim not in dims for dims in grown):
                return context.unknown()
            # Beside the rows a dim that is longer with more of them (`broadcast_to(x, (n, n))`): summed over it, a row
            # would be as large as there are rows.
            value = context.meeting(value) if any(dims - {value.dim} for dims in grown) else value
        if value.kind in ("rows", "sum", "mean", "aggregate") and value.weight is None:
            if any(v.kind == "rows" and v.weight is not None for v in values):
                value = context.meeting(value)
        # A rule that does not say how its result grows with n has not looked: rows made of what grows with n are then
        # taken to see how many there are.
        scales = any(v.power for v in values if v.kind in ("rows", "fixed"))
        if scales and value.kind == "rows" and not value.power and context.name not in _POWERS:
            value = context.meeting(value)
        return value

    def _checked_fixed(self, context: Context, value: Value) -> Value:
        """What is fixed must not come to differ by row, or by the number of rows, without a note of it."""
        eqn, twin, name = context.eqn, context.twin, context.name
        if value.const is not None or not eqn.outvars:
            return value
        if twin is None:
            return replace(value, taints=value.taints | {context.here})
        # A fixed value with a dim as long as the batch is not the same whatever the batch holds: it may differ row by
        # row (`arange(n)`, `eye(n)`). It is fixed only if it went through operations that treat each element alike; any
        # other marks it, and the mark counts once it meets examples.
        made = set().union(*(growing(a, b) for a, b in zip(eqn.outvars, twin.outvars, strict=True)))
        grows = bool(made) or any(map(context.grows, range(len(context.values))))
        # Noise for each row is each row's own: micro-batches draw other numbers than the batch would, from the same
        # distribution, as dropout does. Of a key that the author made, all of them would draw the same.
        if name == "random_bits" and made and value.kind == "fixed":
            if not value.varies:
                return replace(value, taints=value.taints | {context.here})
            dim = min(made)
            if len(made) == 1 and context.out.aval.shape[dim] == self.batch:
                return replace(context.make(Value("rows", dim)), trained=value.trained)
        product = name == "dot_general" and not any(
            context.grows(side) & set(eqn.params["dimension_numbers"][0][side]) for side in (0, 1)
        )
        looks_up = name == "gather" and not context.grows(0)
        goes_by_element = name in _BY_ELEMENT or product or looks_up
        scales = any(v.power for v in context.values) and not value.power and name not in _POWERS
        # Counted along another dim than the rows' are, as argsort counts, numbers are every row's alike.
        counts_rows = name == "iota" and eqn.params["dimension"] in made
        taint = replace(value, taints=value.taints | {context.here})
        if scales or counts_rows:
            return taint
        # Merged with another dim, what is alike for all rows goes by their numbers (`tile([1, -1], n // 2)`), and is
        # alike for rows of the same layout alone.
        if grows and (name == "reshape" or any(v.is_merged for v in context.values)):
            laid = as_rows(context)
            return taint if laid is None else replace(value, dim=laid.dim, outer=laid.outer, inner=laid.inner)
        if grows and name != "iota" and not goes_by_element and as_rows(context) is None:
            return taint
        return value

    def call(self, context: Context, body: ClosedJaxpr | Jaxpr, values: Sequence[Value] | None = None) -> list[Value]:
        """The results of an equation with a body that runs once."""
        jaxpr = opened(body)
        given = context.values if values is None else values
        inner = self.read(body, [*self.consts(body), *given], context.is_inside)
        results = []
        prefix = str(name_stack(context.eqn))
        for value, outvar in zip(inner, context.eqn.outvars, strict=True):
            if value.kind in ("sum", "mean"):
                value = replace(value, weight=RowWeight(outvar, is_mean=value.kind == "mean"))
            elif value.weight is not None:
                value = _outside(context, value, jaxpr)
            if value.origin and not value.origin.text.startswith(prefix):
                value = replace(value, origin=Place(f"{prefix}/{value.origin}", value.origin.inside))
            value = replace(value, total=None)
            results.append(_noted(context, value) if context.twin is None else value)
        return results


# What moves whole dims about, or draws numbers that are random anyway; and what goes by element or along other dims.
_BY_ELEMENT = (
    ELEMENTWISE | having("whole_dims") | having("draws") | having("opaque") | having("reduces")
    | (having("window") & having("reads")) | having("rekeys") | named("empty")
)  # fmt: skip
# Rules that say how their results grow with the number of rows.
_POWERS = having("adds") | having("joins") | named("sub mul div select_n neg reduce_sum dot_general")


def _noted(context: Context, value: Value) -> Value:
    """A value that comes about otherwise with another number of rows."""
    if value.kind == "fixed":
        return replace(value, taints=value.taints | {context.here})
    return context.meeting(value)


def _outside(context: Context, value: Value, jaxpr: Jaxpr) -> Value:
    """A ratio's weight, which is a variable of the body, named by the equation's own variables."""
    assert value.weight is not None
    names = dict(zip(jaxpr.invars, context.eqn.invars, strict=False))
    results = zip(jaxpr.outvars, context.eqn.outvars, strict=True)
    names.update((inner, outer) for inner, outer in results if type(inner) is not Literal)
    if value.weight.atom in names:
        return replace(value, weight=replace(value.weight, atom=names[value.weight.atom]))
    return context.make(Value("unknown", origin=Place(f"{context.where}, which hides the loss's weight")))


def _join(context: Context, x: Value, y: Value) -> Value:
    """What is known of a value that is either of two, as after a branch or another turn of a loop."""
    both = replace(context, values=[x, y])
    kinds = both.kinds()
    for kind in LOST:
        if kind in kinds:
            return both.make(next(value for value in (x, y) if value.kind == kind))
    if not kinds:
        if x.power != y.power or ((x.is_merged or y.is_merged) and x.layout != y.layout):
            return both.make(FIXED, taints=frozenset({both.here}))
        same = x.const == y.const and x.twin == y.twin
        made = both.make(FIXED, const=x.const if same else None, twin=x.twin if same else None, power=x.power)
        return replace(made, dim=x.dim, outer=x.outer, inner=x.inner)
    if "rows" in kinds:
        rows = [value for value in (x, y) if value.kind == "rows"]
        if len({row.layout for row in rows}) > 1:
            return both.unknown()
        # A row that may be divided by n, or may not, is neither; and an atom of one branch is no variable outside of
        # it, so no weight gets out.
        alike = len({(row.weight, row.power) for row in rows}) == 1 and not any(v.weight for v in (x, y))
        made = replace(both.coupled(rows[0]), power=rows[0].power)
        return made if alike and (len(rows) == 2 or not rows[0].power) else both.meeting(made)
    first = x if x.kind != "fixed" else y
    if kinds == {"mean"} or (kinds == {"sum"} and _adds_to(x, y)):
        return both.make(Value(first.kind, origin=first.origin))
    return both.make(first) if len(kinds) == 1 and x.kind == y.kind and x.weight == y.weight else both.aggregate()


def _adds_to(x: Value, y: Value) -> bool:
    """Whether a value that is either of two is a sum over examples: both are, or one is zero."""
    return all(value.kind == "sum" or value.const == 0 for value in (x, y))


def _loop(
    reader: _PairReader,
    context: Context,
    body: ClosedJaxpr | Jaxpr,
    before: list[Value],
    carry: list[Value],
    after: list[Value],
) -> list[Value]:
    """A body's results once what it hands on has settled."""
    # What a turn makes of its carry may be known less well than the carry was, and so on, until nothing changes. Kinds
    # only ever get less certain, so a few turns settle it; what does not settle is refused.
    for _ in range(8):
        results = reader.call(context, body, [*before, *carry, *after])
        joined = [_join(context, old, new) for old, new in zip(carry, results[: len(carry)], strict=True)]
        if joined == carry:
            return results
        carry = joined
    return [context.unknown()] * len(context.eqn.outvars)


def _scan(reader: _PairReader, context: Context) -> list[Value]:
    loop, xs = scan_of(context.eqn), []
    for value in loop.xs(context.values):
        # `lax.map` over the examples: what a turn does with its example could be told from the body, but what it hands
        # to the next turn could not.
        if value.kind == "rows" and value.dim == 0:
            return [context.unknown()] * len(context.eqn.outvars)  # one example after the other
        xs.append(replace(value, dim=value.dim - 1, iota=None, columns=frozenset(), const=None, twin=None))
    carries = [replace(value, iota=None) for value in loop.carries(context.values)]
    results = _loop(reader, context, loop.closed, loop.consts(context.values), carries, xs)
    stacked = [replace(value, dim=value.dim + 1, const=None, twin=None, iota=None) for value in loop.ys(results)]
    results = [*loop.last(results), *stacked]
    as_long = context.twin is not None and context.twin.params["length"] == loop.length
    return results if as_long else [_noted(context, value) for value in results]


def _while(reader: _PairReader, context: Context) -> list[Value]:
    loop, values = while_of(context.eqn), context.values
    carry = [replace(c, const=None, twin=None, iota=None) for c in loop.carries(values)]
    results = _loop(reader, context, loop.closed, loop.consts(values), carry, [])
    asked = [*reader.consts(loop.condition), *loop.asked(values), *results]
    (goes_on,) = reader.read(loop.condition, asked, context.inside)
    return _conditioned(context, goes_on, results)


def _cond(reader: _PairReader, context: Context) -> list[Value]:
    view = cond_of(context.eqn)
    index, operands = view.which(context.values), view.given(context.values)
    first, *rest = view.branches
    results = reader.call(context, first, operands)
    for branch in rest:
        others = reader.call(context, branch, operands)
        results = [_join(context, one, other) for one, other in zip(results, others, strict=True)]
    return _conditioned(context, index, results)


def _conditioned(context: Context, condition: Value, results: list[Value]) -> list[Value]:
    """Results that came about under a condition: one that the batch decides couples its examples."""
    # Any other condition is a function of the examples, or of how many there are, by which all rows turn out one way or
    # another.
    if condition.kind == "fixed" and not condition.taints and not condition.power:
        return results
    return [
        replace(value, couplings=value.couplings | {context.joined(condition.origin)} | condition.couplings)
        if value.kind == "rows"
        else context.aggregate()
        for value in results
    ]


_CONTROL = {"scan": _scan, "while": _while, "cond": _cond}
