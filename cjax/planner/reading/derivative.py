"""The step that a trace becomes: the loss and its gradients as one flat trace, with remat, precision and kernels.

Nothing of it runs. It is the trace emitted again, as a program emits it on one device, under `jax.vjp`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from cjax.jax_compat.core import Atom, Aval, ClosedJaxpr, Equation, Literal, Var, make_jaxpr
from cjax.planner.reading.naming import Naming
from cjax.planner.work import BATCH, Dims, NamedTensor
from cjax.sharding.attention.kernel import Fused, fused_groups
from cjax.sharding.place.saved import checkpointed, has_complex, keep_sum, kept, with_bias
from cjax.sharding.products.lookup import look_up_whole
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import Node
from cjax.trace.attention.positions import attention_groups
from cjax.trace.dims.find import Dims as Classes
from cjax.trace.dims.find import Scope, find_dims
from cjax.trace.emit.emit import Hooks, bind, emit, number
from cjax.trace.emit.precision import LOWS, Lowering, rounded_leaves
from cjax.trace.jaxpr.evaluate import Step as Applied
from cjax.trace.jaxpr.evaluate import equations, evaluate
from cjax.trace.jaxpr.groups import Changed, Group
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.reading import Trace

UNNAMED = "?"
KERNEL = "cjax.kernel"  # what a kernel makes, in a derivative
WIDEST = 128  # features of a head that kernels take on every card


@dataclass(frozen=True)
class Named:
    """A flat trace that was made of another one: what its dims are called there.

    Args:
      closed: the trace.
      classes: of its dims.
      names: of these classes, by the size of a dim.
      num_microbatches: of how many such traces the batch is.
    """

    closed: ClosedJaxpr
    classes: Classes
    names: Mapping[int, Callable[[int], str]]
    num_microbatches: int

    def dims(self, var: Var, scope: Scope, first: int = 0) -> Dims:
        """Names and sizes of a value's dims from `first` on; what is no dim of the other trace gets a name that nothing
        splits."""
        found = []
        for c, size in list(zip(self.classes.of(var, scope), var.aval.shape, strict=True))[first:]:
            if size > 1:
                name = self.names[c](size) if c in self.names else UNNAMED
                found.append((name, size * self.num_microbatches if name == BATCH else size))
        return tuple(found)

    def value(self, var: Atom, scope: Scope | None = None, first: int = 0) -> NamedTensor:
        """A variable as a value, or a number."""
        aval = var.aval
        dims = () if isinstance(var, Literal) else self.dims(var, scope or self.classes.top, first)
        return NamedTensor(dims, itemsize_of(aval), bool(jnp.issubdtype(aval.dtype, jnp.floating)))


def itemsize_of(aval: Aval) -> int:
    """Bytes of an element; of a random key those of what it is made of."""
    return 8 if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key) else aval.dtype.itemsize


def named(closed: ClosedJaxpr, inputs: Sequence[Sequence[int]], naming: Naming) -> Named:
    """The dims of a flat trace by the names that those of its inputs have in another.

    Args:
      closed: the trace.
      inputs: for each of its inputs, classes of its last dims in the other.
      naming: of those classes; none is below 0.
    """
    classes = find_dims(closed)
    names: dict[int, Callable[[int], str]] = {}
    for ids, its in zip(classes.inputs, inputs, strict=True):
        for mine, c in zip(ids[len(ids) - len(its) :], its, strict=True):
            if c >= 0:
                names.setdefault(classes.class_of(mine), lambda size, c=c: naming.name(c, size))
    return Named(closed, classes, names, naming.num_microbatches)


@dataclass(frozen=True)
class StepTrace:
    """A loss and its gradients, as one trace: from the loss's own derivative, which is its first input, and the leaves
    of the other trace, those of a stack's layers stacked, to gradients.

    Args:
      of: the trace.
      places: by leaf of the other trace, the input that it is in.
    """

    of: Named
    places: Mapping[int, int]


def derive(trace: Trace, naming: Naming, hooks: "Planned") -> StepTrace:
    """The loss and gradients of a trace.

    Args:
      trace: of the loss.
      naming: of its dims.
      hooks: how its equations are evaluated.
    """
    closed, weights = trace.closed, set(trace.leaves_of("params"))
    place = {var: i for i, var in enumerate(closed.jaxpr.invars)}
    stacks = [tuple(place.get(var, -1) for var in group) for run in trace.runs for group in run.stacked]
    stacks = [group for group in stacks if weights.issuperset(group)]
    alone = set(range(len(trace.leaves))).difference(*stacks)
    groups = sorted([*stacks, *((i,) for i in alone)])
    outs = [(i,) for i in range(trace.num_loss or 1)]
    function = emit(closed, trace.runs, trace.dims.top, groups, outs, hooks)
    lead = [(len(group),) if len(group) > 1 else () for group in groups]
    leaves = [trace.leaves[group[0]] for group in groups]
    shapes = [jax.ShapeDtypeStruct((*n, *leaf.shape), leaf.dtype) for n, leaf in zip(lead, leaves, strict=True)]
    trained = [i for i, group in enumerate(groups) if group[0] in weights]

    def step(seed: jax.Array, *args: jax.Array) -> Any:
        def loss(*params: jax.Array) -> jax.Array:
            given = list(args)
            for i, value in zip(trained, params, strict=True):
                given[i] = value
            results = function(given)
            return results[0] if len(results) == 1 else results[0] / lax.stop_gradient(results[1])

        value, derivative = jax.vjp(loss, *(args[i] for i in trained))
        return derivative(seed.astype(value.dtype))

    made = simplify(make_jaxpr(step)(jax.ShapeDtypeStruct((), jnp.float32), *shapes))
    inputs = [(), *(naming.trace.classes_of(group[0]) for group in groups)]
    places = {leaf: at for at, group in enumerate(groups, 1) for leaf in group}
    return StepTrace(named(made, inputs, naming), places)


class Planned(Hooks):
    """A trace as a program emits it on one device.

    Args:
      trace: of the loss.
      remat: what layers save, as a plan says it.
      precision: of the computation, as a plan says it.
      has_kernel: whether attentions that have a kernel's form are computed by one.
      keeps_bias: whether layers save what a kernel adds to scores.
    """

    def __init__(self, trace: Trace, remat: str, precision: str, has_kernel: bool, keeps_bias: bool = False) -> None:
        self._trace, self._remat, self._has_kernel = trace, remat, has_kernel
        self._keeps_bias = keeps_bias
        self._lowering = Lowering(trace.closed, LOWS[precision]) if precision in LOWS else None
        self._complexes = has_complex(trace.closed.jaxpr)
        self._with_bias = with_bias(trace.closed.jaxpr)
        self._rounded = rounded_leaves(trace.dims)

    def weight(self, leaf: int, value: jax.Array) -> jax.Array:
        is_low = self._lowering is not None and leaf in self._rounded and value.dtype == "float32"
        return value.astype(self._lowering.low) if self._lowering is not None and is_low else value

    def equation(self, eqn: Equation, ins: list[Any], scope: Scope) -> list[Any]:
        given, params = self._lowering.given(eqn, ins, scope) if self._lowering else (ins, eqn.params)
        outs = look_up_whole(eqn, given, params) if name_of(eqn) == "gather" else bind(eqn, given, params)
        if id(eqn) in self._with_bias:
            outs = [keep_sum(outs[0], given, self._remat)]
        return kept(eqn, outs, self._remat)

    def groups(self, eqns: Sequence[Equation], results: Sequence[Atom], scope: Scope) -> Sequence[Group[Any]]:
        if not self._has_kernel:
            return []
        return fused_groups([group.of for group in attention_groups(self._trace, eqns, results, scope)])

    def group(self, group: Group[Any], ins: list[Any], changed: Changed, scope: Scope) -> list[Any]:
        fused: Fused = group.of
        values = dict(zip(group.ins, ins, strict=True))
        if self._lowering is not None and _suits(fused.attention):
            products = [values[node.var].astype(self._lowering.low) for node in _products(fused.attention)]
            added = [values[node.var] for node in _added(fused)]
            return [_kernel(fused, self._keeps_bias)(*products, *added)]

        def apply(step: Applied[Equation, Any], read: list[Any]) -> list[Any]:
            return self.equation(step.of, read, scope)

        evaluate(equations(group.eqns), values.__getitem__, values.update, number(changed), apply)
        return [values[var] for var in group.outs]

    def layer(self, body: Callable[..., Any]) -> Callable[..., Any]:
        return checkpointed(body, self._remat, self._complexes)

    def block(self, body: Callable[..., Any]) -> Callable[..., Any]:
        return body if self._remat == "none" else checkpointed(body, self._remat, self._complexes)


def _products(attention: Attention) -> tuple[Node, Node, Node]:
    return attention.query, attention.key, attention.value


def _added(fused: Fused) -> list[Node]:
    """Floats that the logits are made of beside queries and keys: a bias, which may have a gradient."""
    return [node for node in fused.attention.leaves if jnp.issubdtype(node.var.aval.dtype, jnp.floating)]


def _suits(attention: Attention) -> bool:
    """Whether heads are as wide as a kernel takes them."""
    widths = {_width(node) for node in _products(attention)}
    return len(widths) == 1 and all(width % 8 == 0 and width <= WIDEST for width in widths)


def _width(node: Node) -> int:
    pairs = zip(node.labels, node.var.aval.shape, strict=True)
    return math.prod(size for label, size in pairs if not label)


def _kernel(fused: Fused, keeps_bias: bool) -> Callable[..., jax.Array]:
    """What stands for a kernel in a trace that nobody runs: it reads, saves and makes what the kernel does, with dims
    that are known to be the same."""
    attention = fused.attention

    @jax.custom_vjp
    def attend(*operands: jax.Array) -> jax.Array:
        return forward(*operands)[0]

    def forward(*operands: jax.Array) -> tuple[jax.Array, Any]:
        query, key, value = map(_stored, operands[:3])
        bias = _bias(fused, query, key)
        # Made where the kernel is called, a bias is a result like the kernel's own to whoever saves results there.
        bias = [checkpoint_name(x, KERNEL) if keeps_bias else _stored(x) for x in bias]
        others = _first(key, value, *bias)
        flat, labels = _flat(query, attention.query, attention)
        out = checkpoint_name(_shaped(flat + others, labels, attention), KERNEL)
        sums = checkpoint_name((flat + others).astype(jnp.float32).sum(-1), KERNEL)
        return out, (operands, bias, out, sums)

    def backward(saved: Any, cotangent: jax.Array) -> tuple[jax.Array, ...]:
        operands, bias, out, sums = saved
        query, key, value = map(_stored, operands[:3])
        read = _first(query, key, value, *bias, out, sums, _stored(cotangent))
        return tuple(checkpoint_name(x + read.astype(x.dtype), KERNEL) for x in (query, key, value, *operands[3:]))

    attend.defvjp(forward, backward)
    return attend


def _bias(fused: Fused, query: jax.Array, key: jax.Array) -> list[jax.Array]:
    """What stands for the bias that a kernel is given, if any, and where it has a gradient, for what it is rounded
    from."""
    attention, form = fused.attention, fused.form
    if not form.added and not form.masks:
        return []
    nodes = [node for node, _ in (*form.added, *form.masks)]
    seen = {one for node in nodes for label in node.labels for one in label}
    sides = (_flat(x, node, attention) for x, node in ((query, attention.query), (key, attention.key)))
    labels = list(attention.roles)
    of_query, of_key = (_spread(x[..., 0], own, labels) for x, own in sides)
    whole = of_query + of_key
    positions = {attention.label("query"), attention.label("key")}
    for axis, one in enumerate(labels):
        if one not in seen | positions:
            whole = lax.slice_in_dim(whole, 0, 1, axis=axis)
    return [whole, whole.astype(jnp.float32)] if form.added else [whole]


def _stored(value: jax.Array) -> jax.Array:
    """A copy: whoever follows lifetimes takes it for a value that stands in memory."""
    return jnp.array(value, copy=True)


def _first(*values: jax.Array) -> jax.Array:
    """A number made of all values."""
    return sum((value[(0,) * value.ndim].astype(values[0].dtype) for value in values), jnp.zeros((), values[0].dtype))


def _flat(value: jax.Array, node: Node, attention: Attention) -> tuple[jax.Array, list[int]]:
    """A value with a dim for each label, the width of a head behind them."""
    places = [d for d, label in enumerate(node.labels) if label]
    rest = [d for d in range(value.ndim) if d not in places]
    labels = [one for label in node.labels for one in label]
    ordered = value.transpose(*places, *rest)
    return ordered.reshape(*(attention.sizes[one] for one in labels), -1), labels


def _spread(value: jax.Array, own: Sequence[int], labels: Sequence[int]) -> jax.Array:
    """A value of some labels with a dim for each of all labels."""
    ordered = value.transpose([own.index(one) for one in labels if one in own])
    return ordered.reshape([size for size in _sizes(ordered, own, labels)])


def _sizes(value: jax.Array, own: Sequence[int], labels: Sequence[int]) -> list[int]:
    sizes = iter(value.shape)
    return [next(sizes) if one in own else 1 for one in labels]


def _shaped(flat: jax.Array, labels: Sequence[int], attention: Attention) -> jax.Array:
    """The result of an attention, made of its query."""
    node = attention.out
    wanted = [one for label in node.labels for one in label]
    behind = [d for d, label in enumerate(node.labels) if not label]
    ordered = flat.transpose([labels.index(one) for one in wanted] + [len(labels)])
    shape = node.var.aval.shape
    sizes = [shape[d] for d, label in enumerate(node.labels) if label] + [shape[d] for d in behind]
    ordered = ordered.reshape(sizes)
    order = [d for d, label in enumerate(node.labels) if label] + behind
    return ordered.transpose([order.index(d) for d in range(len(shape))])
