"""How the results of parts of a batch make up those of the whole: a traced loss lifted to sums that can be added.

A ratio alone becomes its total and its weight, which are added up. Where a loss adds means to ratios, or ratios with
several weights, each denominator becomes an input: what it is for the whole batch, shared out among the parts. Then
the parts' mean is the whole. That takes weights which follow from the batch alone, since they are needed first.
"""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from cjax.jax_compat.core import Atom, ClosedJaxpr, Jaxpr, Literal, Var
from cjax.jax_compat.jaxprs import new_var
from cjax.trace.examples.values import RowWeight, Value
from cjax.trace.examples.verdict import APART, Divisions, Lifted, follow, verdict
from cjax.trace.jaxpr.primitives import facts_of, name_of
from cjax.trace.jaxpr.twins import Twins
from cjax.trace.microbatches.mirror import Unlike, check_growth, counterparts
from cjax.trace.reading import Leaf, Shared, Trace
from cjax.tree import leaf_names

Again = Callable[[int], ClosedJaxpr]


def lift(trace: Trace, again: Again, num_rows: int, shares: bool = False, apart: bool = False) -> Trace:
    """`trace` with a loss that can be added up over parts of the batch, and what each result has to do with examples.

    A scalar that is a ratio with a denominator that depends on the batch becomes its total and weight; a part's total
    is then `loss_total(...)` and the weight of the whole `denominator(trace, weight)`.

    Args:
      trace: of a loss.
      again: rows -> the flat trace of the same loss on so many. What a loss does with the number of its rows is read
        off two numbers; and since JAX takes short cuts past dims of size 1, never off one row.
      num_rows: of the whole batch.
      shares: whether denominators may become inputs (`Trace.shared`), to be given by the caller.
      apart: whether each part is a batch of its own, so that nothing is refused.

    Raises:
      ValueError: the loss is no mean, or its examples meet each other; the message says where, and what to write.
    """
    batch = [i for i in trace.leaves_of("batch") if trace.leaves[i].shape]
    if not batch or not trace.num_loss:
        return trace
    rows = trace.leaves[batch[0]].shape[0]
    # Of one row JAX leaves out broadcasts and sums over it, so that a sum over examples does not show. Two rows are
    # read in its place, and what was found there is carried over.
    if rows == 1:
        two, num = replace(trace, closed=again(2)), max(4, num_rows)
        many = again(num)
        return _lift_one(trace, two, _lift(two, many, shares, apart), None if apart else (many, num))
    return _lift(trace, again(num_rows if num_rows > rows else 2 * rows), shares, apart)


def _lift(trace: Trace, other: ClosedJaxpr, shares: bool, apart: bool) -> Trace:
    """`lift`, of two rows or more."""
    batch, num_params = set(trace.leaves_of("batch")), len(trace.leaves_of("params"))
    # First reading: which denominators there are. If they have to be the whole batch's, they become inputs, and the
    # trace is read a second time with that known.
    divisions = Divisions()
    results = follow(trace.closed, other, batch, num_params, divisions=divisions)
    # `loss=microbatch`: the author has said that each micro-batch is a batch, so nothing is wrong whatever the loss
    # does.
    if apart:
        return replace(trace, results=tuple(results))
    found = verdict(results[0])
    needs = not trace.has_weight and (found.kind == "blend" or (found.kind == "ratio" and found.total is None))
    needs = needs or any(value.kind == "ratio" for _, _, value in _plain_aux(trace, results))
    if shares and needs:
        return _share(trace, other, divisions)
    if shares:
        trace = _with_aux(trace, results)
    if trace.has_weight:
        _check_mean(results)
        return replace(trace, results=tuple(results))
    if found.refused:
        raise ValueError(found.reason)
    if found.kind == "blend":
        raise ValueError(
            "The loss adds means to ratios, or ratios with several weights. Return cjax.Mean(total, weight), with "
            f"all of it over one weight, or write {APART}."
        )
    if found.kind != "ratio":
        return replace(trace, results=tuple(results))
    assert found.weight is not None
    jaxpr: Jaxpr = trace.closed.jaxpr
    loss, *rest = jaxpr.outvars
    total = loss if found.total is None else found.total
    sums = [replace(results[0], kind="sum"), Value("sum")]
    return replace(
        trace,
        closed=ClosedJaxpr(jaxpr.replace(outvars=[total, found.weight.atom, *rest]), trace.closed.consts),
        num_loss=2,
        ratio=found,
        results=(*sums, *results[1:]),
    )


def _plain_aux(trace: Trace, results: Sequence[Value]) -> list[tuple[int, str, Value]]:
    """Which value of aux, what it is called, and what is known of it, those aside that are a `Mean`."""
    names = leaf_names(trace.aux_tree.unflatten(list(range(trace.aux_tree.num_leaves))))
    left, found = iter(results[trace.num_loss :]), []
    for i, (name, is_mean) in enumerate(zip(names, trace.aux_is_mean, strict=True)):
        value = next(left)
        if is_mean:
            next(left)
        else:
            found.append((i, name, value))
    return found


def place_of_aux(trace: Trace, i: int) -> int:
    """Which of a trace's results is the i-th value of aux, or its total."""
    return trace.num_loss + i + sum(trace.aux_is_mean[:i])


def averages(trace: Trace) -> bool:
    """Whether a loss that was lifted, and what of aux is no `Mean`, is for the whole as the parts' sums and means say;
    True where there is no loss."""
    if not trace.num_loss:
        return True
    aux = [value for _, _, value in _plain_aux(trace, trace.results)] if trace.results else []
    return bool(trace.results) and all(value.kind in ("mean", "fixed") for value in aux)


def _with_aux(trace: Trace, results: Sequence[Value]) -> Trace:
    """`trace` that knows which values of aux are sums; what is neither that nor a mean is refused."""
    sums = set()
    for i, name, value in _plain_aux(trace, results):
        found = verdict(value, f"Aux value {name!r}")
        if found.refused and value.kind != "sum":
            raise ValueError(found.reason)
        if value.kind == "sum":
            if found.kind != "sum":
                raise ValueError(found.reason)
            sums.add(i)
    return replace(trace, aux_sums=frozenset(sums))


def with_ratios(trace: Trace) -> Trace:
    """A trace that was lifted, of which values of aux that are ratios are totals and weights, as a `Mean` is."""
    outs, results = list(trace.closed.jaxpr.outvars), list(trace.results)
    is_mean, ratios = list(trace.aux_is_mean), list[tuple[int, Lifted]]()
    for i, name, value in reversed(_plain_aux(trace, results) if results else []):
        found = verdict(value, f"Aux value {name!r}")
        if found.weight is None or value.blended:
            continue
        at = place_of_aux(trace, i)  # the last first, so that those before stay where they are
        outs[at : at + 1] = [outs[at] if found.total is None else found.total, found.weight.atom]
        results[at : at + 1] = [replace(value, kind="sum"), Value("sum")]
        is_mean[i] = True
        ratios.append((i, found))
    closed = ClosedJaxpr(trace.closed.jaxpr.replace(outvars=outs), trace.closed.consts)
    return replace(trace, closed=closed, results=tuple(results), aux_is_mean=tuple(is_mean), aux_ratios=tuple(ratios))


def _check_mean(results: Sequence[Value]) -> None:
    """The total and the weight of a `Mean`, which its author says can be added up, must be such sums or means."""
    kinds = set()
    for value, name in zip(results[:2], ("total", "weight"), strict=True):
        found = verdict(value, f"The {name} of the loss", of_mean=True)
        if found.refused and found.kind != "sum":
            raise ValueError(found.reason)
        if value.kind in ("mixed", "ratio"):
            raise ValueError(
                f"The {name} of the loss adds what grows with the examples to what does not: multiply a mean by the "
                f"weight before it is added to a total, or write {APART}."
            )
        # Added up over m parts, a total that is a sum over a weight that is a mean (or a constant) would be m times too
        # small a loss, or too large.
        kinds.add(("mean", "sum")[bool(value.power)] if value.kind == "fixed" else value.kind)
    if kinds == {"sum", "mean"}:
        raise ValueError(
            "Of the loss's total and weight one is a sum over the examples and the other a mean, or a number that does "
            f"not grow with them: both must grow, or neither, or write {APART}."
        )


def _share(trace: Trace, other: ClosedJaxpr, divisions: Divisions) -> Trace:
    """`trace` whose denominators are inputs behind the batch."""
    weights = dict.fromkeys(weight for _, weight in divisions.found if weight.atom.aval.shape == ())
    inputs = {weight: new_var(eqn.invars[1].aval) for eqn, weight in divisions.found if weight in weights}
    given = {id(eqn): weight for eqn, weight in divisions.found if weight in inputs}
    known = {at: Value("fixed", power=0 if weight.is_mean else 1) for at, weight in given.items()}
    batch, num_params = set(trace.leaves_of("batch")), len(trace.leaves_of("params"))
    results = follow(trace.closed, other, batch, num_params, shares=known)
    if trace.has_weight:
        _check_mean(results)
    else:
        found = verdict(results[0])
        if found.kind != "mean":
            raise ValueError(found.reason)
    trace = _with_aux(trace, results)
    divisors = {at: inputs[weight] for at, weight in given.items()}
    shared = Shared(_weights_alone(trace, list(inputs)), tuple(inputs), trace.closed, divisors)
    return replace(_with_inputs(trace, shared), results=tuple(results))


def _weights_alone(trace: Trace, weights: Sequence[RowWeight]) -> ClosedJaxpr:
    """What makes the weights: of the batch, the key and the micro-batch's index."""
    jaxpr: Jaxpr = trace.closed.jaxpr
    live, kept = {weight.atom for weight in weights}, []
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            kept.append(eqn)
            live.update(v for v in eqn.invars if not isinstance(v, Literal))
    state = [i for kind in ("params", "frozen", "model_state") for i in trace.leaves_of(kind)]
    # Denominators are added up in a pass of their own, ahead of the first micro-batch. That costs nothing as long as
    # they are made of labels and masks; of parameters they would be another forward pass, and of the model state one
    # that changes it.
    held = next((trace.leaves[i].name for i in state if jaxpr.invars[i] in live), None)
    if held is not None:
        raise ValueError(
            f"The loss divides a sum by a weight that depends on {held}, and adds other means: micro-batches need such "
            f"weights before they run, from the batch alone. Use microbatches=1, or write {APART}."
        )
    invars = [v for i, v in enumerate(jaxpr.invars) if i not in state]
    alone = jaxpr.replace(invars=invars, outvars=[weight.atom for weight in weights], eqns=kept[::-1])
    return ClosedJaxpr(alone, trace.closed.consts)


def _with_inputs(trace: Trace, shared: Shared) -> Trace:
    """`trace` that divides by inputs where `shared` says so."""
    jaxpr: Jaxpr = trace.closed.jaxpr
    new = list(dict.fromkeys(shared.divisors.values()))
    at = max(trace.leaves_of("batch")) + 1
    eqns = []
    for eqn in jaxpr.eqns:
        divisor = shared.divisors.get(id(eqn))
        eqns.append(eqn if divisor is None else eqn.replace(invars=[eqn.invars[0], divisor]))
    leaves = [Leaf(f"denominator {i}", "batch", (), var.aval.dtype) for i, var in enumerate(new)]
    trace.dims.top.ids.update((var, []) for var in new)
    dims = copy.copy(trace.dims)
    dims.inputs = [*dims.inputs[:at], *[()] * len(new), *dims.inputs[at:]]
    closed = jaxpr.replace(invars=[*jaxpr.invars[:at], *new, *jaxpr.invars[at:]], eqns=eqns)
    return replace(
        trace,
        closed=ClosedJaxpr(closed, trace.closed.consts),
        leaves=(*trace.leaves[:at], *leaves, *trace.leaves[at:]),
        dims=dims,
        shared=shared,
    )


def share_alike(trace: Trace, like: Trace) -> Trace:
    """`trace`, of the loss of `like` on another number of rows, with the same denominators as inputs.

    Raises:
      Unlike: it divides otherwise.
    """
    if like.shared is None:
        return trace
    twins, divisors = Twins(like.shared.before, trace.closed), {}
    for eqn in like.shared.before.jaxpr.eqns:
        divisor = like.shared.divisors.get(id(eqn))
        if divisor is None:
            continue
        twin = twins[eqn]
        if twin is None:
            raise Unlike("the loss divides otherwise for fewer rows")
        divisors[id(twin)] = divisor
    return _with_inputs(trace, replace(like.shared, before=trace.closed, divisors=divisors))


def _lift_one(trace: Trace, two: Trace, lifted: Trace, more: tuple[ClosedJaxpr, int] | None) -> Trace:
    """`trace`, of one row, lifted as that of two rows is, if it does the same; `more` is one of so many rows."""
    try:
        if more is not None:
            many, num = more
            check_growth(trace.closed.jaxpr, two.closed.jaxpr, many.jaxpr, num)
        if lifted.shared is not None:
            alone = replace(lifted.shared, closed=_weights_alone_of(trace, lifted))
            made = share_alike(trace, replace(lifted, shared=alone))
            return replace(made, results=lifted.results, aux_sums=lifted.aux_sums)
        if lifted.ratio is None:
            return replace(trace, results=lifted.results, aux_sums=lifted.aux_sums)
        jaxpr, other, wanted = trace.closed.jaxpr, two.closed.jaxpr, lifted.closed.jaxpr.outvars[:2]
        sums = counterparts(wanted, other, jaxpr)
    except Unlike as difference:
        raise ValueError(f"With one row in a micro-batch, {difference}. Use fewer micro-batches.") from None
    closed = ClosedJaxpr(jaxpr.replace(outvars=[*sums, *jaxpr.outvars[1:]]), trace.closed.consts)
    results, aux_sums = lifted.results, lifted.aux_sums
    return replace(trace, closed=closed, num_loss=2, ratio=lifted.ratio, results=results, aux_sums=aux_sums)


def _weights_alone_of(trace: Trace, lifted: Trace) -> ClosedJaxpr:
    """The weights of one row's trace, found by those of two rows'."""
    assert lifted.shared is not None
    atoms = counterparts([w.atom for w in lifted.shared.weights], lifted.shared.before.jaxpr, trace.closed.jaxpr)
    weights = [replace(w, atom=atom) for w, atom in zip(lifted.shared.weights, atoms, strict=True)]
    return _weights_alone(trace, weights)


def counters(trace: Trace, random: Sequence[bool]) -> frozenset[int]:
    """Which leaves of the model state of a lifted trace change, and not by what the examples are: step counters,
    averages of weights, how often a random stream was drawn from (`random`). However many micro-batches there are, they
    are to change once. What is drawn differs between micro-batches in any case, so statistics may read it.

    Raises:
      ValueError: what is made of examples depends on one: either way it would not be as with the whole batch.
    """
    model_state = trace.leaves_of("model_state")
    if not trace.results or not model_state:
        return frozenset()
    jaxpr = trace.closed.jaxpr
    made = list(zip(model_state, jaxpr.outvars[-len(model_state) :], trace.results[-len(model_state) :], strict=True))
    changes = [jaxpr.invars[i] is not var for i, var, _ in made]
    fixed = [value.kind == "fixed" and not value.taints and not value.power for _, _, value in made]
    # A counter moves at each call of the model. Called once a micro-batch it would count m where the author, with the
    # whole batch, counts 1; so only the last one's change is kept.
    found = {n for n in range(len(made)) if changes[n] and fixed[n]}
    for n, (i, var, value) in enumerate(made):
        by_row = value.kind == "fixed" and n not in found and changes[n] and not random[n]
        # Number of examples seen: right, if it is added. Anything else of that number (a rate, a decay of so many) is
        # another thing m times over.
        if by_row and not _adds(jaxpr, var, jaxpr.invars[i]):
            raise ValueError(
                f"The model makes {trace.leaves[i].name} of the number of examples: micro-batches have fewer. Use "
                f"microbatches=1, or write {APART}."
            )
    # A counter that stands still until the last micro-batch, and a running statistic that reads it (a debiased
    # average): all of the micro-batches would read the same count, which neither m calls nor one would have.
    reads = {jaxpr.invars[model_state[n]] for n in found if not random[n]}
    for n, (i, var, _) in enumerate(made):
        if changes[n] and n not in found and not random[n] and not reads.isdisjoint(_sources(jaxpr, var)):
            names = " and ".join(trace.leaves[model_state[k]].name for k in sorted(found) if not random[k])
            raise ValueError(
                f"The model makes {trace.leaves[i].name} of the examples and of {names}, which changes at every call: "
                "with micro-batches neither would be as the whole batch leaves it. Use microbatches=1, or write "
                f"{APART}."
            )
    return frozenset(found)


def _adds(jaxpr: Jaxpr, var: Atom, old: Var) -> bool:
    """Whether a variable is the old one and a number: added part by part, such numbers are as added at once."""
    eqn = next((eqn for eqn in jaxpr.eqns if var in eqn.outvars), None)
    if eqn is None or not facts_of(eqn).adds:
        return False
    return any(a is old and isinstance(b, Literal) for a, b in (eqn.invars, eqn.invars[::-1]))


def _sources(jaxpr: Jaxpr, var: Atom) -> set[Var]:
    """All variables that one is made of."""
    if isinstance(var, Literal):
        return set()
    live = {var}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars):
            live.update(v for v in eqn.invars if not isinstance(v, Literal))
    return live


def loss_size(trace: Trace) -> int:
    """How many numbers the total of a lifted loss adds up, by the shapes of the trace; 1 for a mean."""
    if not trace.has_weight:
        return 1
    jaxpr: Jaxpr = trace.closed.jaxpr
    # Float16 overflows by the size of the total, not of the mean; so the scale is divided by how many numbers the total
    # adds up, and means the same under every plan.
    wanted, largest = {jaxpr.outvars[0]}, 1
    for eqn in reversed(jaxpr.eqns):
        if wanted.isdisjoint(eqn.outvars):
            continue
        inputs = [v for v in eqn.invars if not isinstance(v, Literal)]
        if name_of(eqn) == "reduce_sum":
            largest = max([largest, *(v.aval.size for v in inputs)])
        elif all(v.aval.size == 1 for v in inputs):
            wanted.update(inputs)
        else:  # a loop, say, that adds up as it goes: over labels, which are whole numbers
            labels = [trace.leaves[i] for i in trace.leaves_of("batch")]
            sizes = [math.prod(x.shape) for x in labels if jnp.issubdtype(x.dtype, jnp.integer)]
            largest = max([largest, *sizes])
    return largest


def loss_total(ratio: Lifted | None, total: jax.Array, weight: jax.Array) -> jax.Array:
    """The total of one part, from the results of a lifted trace."""
    # A part's mean times its own denominator is its sum again.
    if ratio is None or ratio.total is not None:
        return total
    return total * denominator(ratio, weight)


def denominator(ratio: Lifted | None, weight: jax.Array) -> jax.Array:
    """What a sum of totals is divided by, from the sum of the weights."""
    if ratio is None:
        return weight
    assert ratio.weight is not None
    return guarded(ratio.weight, weight)


def guarded(weight: RowWeight, value: jax.Array) -> jax.Array:
    """A weight of the whole batch as the loss divides by it."""
    divisor = jnp.maximum(value, weight.floor) if weight.floor else value
    if weight.zero is not None:
        divisor = jnp.where(value <= 0 if weight.below else value == 0, weight.zero, divisor)
    return divisor + weight.offset
