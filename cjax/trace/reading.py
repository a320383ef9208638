"""What the user's model is: a flat trace, the dims and stacks of layers found in it, and names for both."""

import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from cjax.jax_compat.core import ClosedJaxpr, Var, make_jaxpr
from cjax.trace.author.capture import Capture, Mean
from cjax.trace.author.loss import Loss
from cjax.trace.dims.find import Dims, find_dims
from cjax.trace.dims.packed import packed_forms
from cjax.trace.dims.refine import refine
from cjax.trace.dims.refine_rules import Form, expand, whole
from cjax.trace.examples.values import RowWeight, Value
from cjax.trace.examples.verdict import Lifted
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.jaxpr.unchanged import unchanged
from cjax.trace.jaxpr.view import every_equation
from cjax.trace.layers.at_once import all_at_once
from cjax.trace.layers.repeats import RepeatedLayers, find_runs, paired
from cjax.trace.layers.rows import looped_over_rows
from cjax.tree import PyTree, leaf_names

T = TypeVar("T")


@dataclass(frozen=True)
class Leaf:
    """One input of the trace: an array of the user's own tree, packed dims taken apart (see `Trace.forms`)."""

    name: str
    kind: str  # "params" | "frozen" | "model_state" | "batch" | "key" | "index"
    shape: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Shared:
    """Denominators that are inputs of a trace: those of the whole batch, each part given its share."""

    closed: ClosedJaxpr  # (batch, key, index) of a micro-batch -> its weights
    weights: tuple[RowWeight, ...]  # how denominators follow from their sums, or means, over micro-batches
    before: ClosedJaxpr  # the trace before its divisions were by inputs
    divisors: Mapping[int, Var]  # id of a division in it -> the input


@dataclass(frozen=True)
class Trace:
    """A loss, read. `print` it to see the dims found, the stacks of layers, and what was not understood."""

    closed: ClosedJaxpr
    leaves: tuple[Leaf, ...]
    forms: Mapping[int, Form]  # inputs that pack several tensors: parts that each of the user's dims is made of
    dims: Dims
    runs: tuple[RepeatedLayers, ...]
    names: Mapping[int, str]  # class -> name
    batch_class: int | None
    stream: frozenset[int]  # classes of what is handed from layer to layer, the batch aside
    num_loss: int  # results that are the loss: a scalar, or the total and weight of a `Mean`; 0 if there is none
    aux_tree: PyTree  # the user's aux, `Mean`s as leaves
    aux_is_mean: tuple[bool, ...]
    results: tuple[Value, ...] = ()  # what each result has to do with the examples, once `lift` has found out
    ratio: Lifted | None = None  # of a loss that was one number, and now is its total and weight
    shared: Shared | None = None  # of a loss that takes denominators behind its batch
    aux_sums: frozenset[int] = frozenset()  # which of aux grow with the examples, once `lift` has found out
    aux_ratios: tuple[tuple[int, Lifted], ...] = ()  # of those of aux that are pairs and were one number
    counters: frozenset[int] = frozenset()  # leaves of the model state that the last micro-batch alone updates
    is_chain: bool = False  # whether one weight leads from layer to layer in some stack, with nothing in between
    pairs: bool = False  # whether such layers were taken two by two
    at_once: bool = False  # whether loops that add up over parts of the examples are evaluated at once

    @property
    def has_weight(self) -> bool:
        return self.num_loss == 2

    def leaves_of(self, kind: str) -> list[int]:
        """Indices of the inputs of one kind, in the order of the user's tree."""
        return [i for i, leaf in enumerate(self.leaves) if leaf.kind == kind]

    def dims_of(self, leaf: int) -> tuple[str, ...]:
        """The names of the dims of input `leaf`."""
        return tuple(self.names.get(c, "?") for c in self.classes_of(leaf))

    def form_of(self, leaf: int) -> Form | None:
        """How input `leaf` differs from the user's array: the parts that each of its dims is made of."""
        return self.forms.get(leaf)

    def user_dims_of(self, leaf: int) -> tuple[int, ...]:
        """For each dim of input `leaf`, which dim of the user's array it comes from."""
        form = self.forms.get(leaf) or whole(self.leaves[leaf].shape)
        return tuple(dim for dim, parts in enumerate(form) for _ in range(2 if parts > 1 else 1))

    def user_classes_of(self, leaf: int) -> tuple[int, ...]:
        """A class for each dim of the user's array; for a packed one that of what a part holds."""
        return tuple(dict(zip(self.user_dims_of(leaf), self.classes_of(leaf), strict=True)).values())

    @property
    def part_classes(self) -> frozenset[int]:
        """Classes of the dims that count the tensors packed in a weight."""
        return frozenset(c for i in self.forms for c in self.classes_of(i) if c not in self.user_classes_of(i))

    def classes_of(self, leaf: int) -> tuple[int, ...]:
        return tuple(self.dims.class_of(d) for d in self.dims.inputs[leaf])


def once(function: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """A function of nothing but a trace, evaluated once for each: a search asks for hundreds of layouts of one. What it
    gives is everybody's, so nobody may change it."""

    @functools.wraps(function)
    def kept(trace: Trace) -> T:
        known = vars(trace).setdefault("_known", {})
        if function not in known:
            known[function] = function(trace)
        return known[function]

    return kept


def primitives(trace: Trace) -> frozenset[str]:
    """The names of all primitives in a trace, those inside loops and custom derivatives too."""
    return frozenset(map(name_of, every_equation(trace.closed.jaxpr)))


@dataclass(frozen=True)
class Traced:
    """A loss on some rows, as its author's Python made it: equations that nobody has read yet.

    Args:
      closed: from the leaves of params, frozen, model_state and batch, a random key and a micro-batch's index to the
        total of the loss, its weight if it has one, the leaves of aux, and the new model state.
      leaves: its inputs.
      num_loss: results that are the loss.
      aux: the shape of the author's aux, `Mean`s as they are.
    """

    closed: ClosedJaxpr
    leaves: tuple[Leaf, ...]
    num_loss: int
    aux: PyTree


def trace_part(
    capture: Capture,
    part_shape: PyTree,
    num_microbatches: int,
    train: bool,
    call: Loss | None = None,
    counters: frozenset[int] = frozenset(),
) -> Traced:
    """Run the user's Python on one micro-batch.

    Args:
      capture: the user's model and loss.
      part_shape: the micro-batch, as ShapeDtypeStructs.
      num_microbatches: into how many the batch is cut; each of several draws random numbers of its own.
      train: whether to trace the loss as in training.
      call: `(model, batch, key, train) -> (None, results)` to trace in place of the loss; its results become aux.
      counters: leaves of the model state that the last micro-batch alone updates, from what they were before the first.
    """

    def function(
        params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: jax.Array, index: jax.Array
    ) -> tuple[PyTree, PyTree, PyTree, dict[str, jax.Array]]:
        # One part draws the numbers that the author's own loop would; each of several draws its own.
        inner = model_state
        if num_microbatches > 1:
            key = jax.random.fold_in(key, index)
            inner = capture.fold_model_state(model_state, index)
        given: dict[str, Loss | dict[str, jax.Array]] = {} if call is None else {"call": call}
        rewritten: dict[str, jax.Array] = {}
        if train and capture.kind == "nnx":
            given["rewritten"] = rewritten
        loss, aux, new = capture.apply(params, frozen, inner, batch, key, train, **given)
        if num_microbatches > 1:
            new = capture.unfold(new, model_state)
        if counters:
            leaves, treedef = jax.tree.flatten(new)
            pairs = zip(leaves, jax.tree.leaves(model_state), strict=True)
            last = index == num_microbatches - 1
            new = treedef.unflatten(
                [jnp.where(last, x, old) if i in counters else x for i, (x, old) in enumerate(pairs)]
            )
        return loss, aux, new, rewritten

    trees = {
        "params": capture.params_shape,
        "frozen": capture.frozen_shape,
        "model_state": capture.model_state_shape,
        "batch": part_shape,
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "index": jax.ShapeDtypeStruct((), jnp.int32),
    }
    closed, (loss, aux, _, rewritten) = make_jaxpr(function, return_shape=True)(*trees.values())
    closed = _without_writes(closed, sorted(rewritten))
    leaves = []
    for kind, tree in trees.items():
        for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
            leaves.append(Leaf(name or kind, kind, tuple(leaf.shape), leaf.dtype))
    return Traced(closed, tuple(leaves), len(jax.tree.leaves(loss)), aux)


def _without_writes(closed: ClosedJaxpr, names: Sequence[str]) -> ClosedJaxpr:
    """The trace without its last results, parameters of these names, if they are what they were.

    Raises:
      ValueError: they are not: only optimizers change parameters, and what a loss writes would be lost.
    """
    if not names:
        return closed
    jaxpr, num = closed.jaxpr, len(closed.jaxpr.outvars) - len(names)
    written = [
        n for n, atom in zip(names, unchanged(jaxpr)[num:], strict=True) if all(atom is not v for v in jaxpr.invars)
    ]
    if written:
        few = ", ".join(written[:4]) + (f", ... ({len(written)} in all)" if len(written) > 4 else "")
        raise ValueError(
            f"the loss, or the model, writes the parameters {few}, which here only the optimizer changes: what is "
            "written would be lost. Compute with the new value without writing it to the nnx.Param; keep what is no "
            "weight (an average, a codebook) in a type of your own, class Average(nnx.Variable); clip weights in the "
            "optimizer, optax.chain(..., optax.keep_params_nonnegative()) or a transformation of yours."
        )
    return ClosedJaxpr(jaxpr.replace(outvars=jaxpr.outvars[:num]), closed.consts)


def flattened(traced: Traced, like: Trace) -> ClosedJaxpr:
    """The equations of a loss on other rows than those of the trace `like`, in its form, and nothing read off them."""
    closed, num_weights = simplify(traced.closed), sum(leaf.kind in ("params", "frozen") for leaf in traced.leaves)
    if like.at_once:
        closed = all_at_once(closed, num_weights)
    closed = looped_over_rows(closed, num_weights)
    if not like.forms:
        return closed
    dims = find_dims(closed, num_weights)
    return _refined(closed, traced.leaves, like.forms, dims)


def read(
    traced: Traced,
    given_names: Mapping[str, Sequence[str | None]],
    forms: Mapping[int, Form] | None = None,
    pairs: bool = False,
    at_once: bool = False,
    counters: frozenset[int] = frozenset(),
) -> Trace:
    """What a loss is made of.

    Args:
      traced: the loss on one micro-batch.
      given_names: the author's own names for dims, by the path of a weight.
      forms: of the weights, as an earlier trace of this model has them; found in this one if left out.
      pairs: whether layers that are one weight each are taken two by two, so that what lies between two can be split.
      at_once: whether loops that add up over parts of the examples, each with products of its own, are evaluated at
        once: see `all_at_once`.
      counters: leaves of the model state that it updates in the last micro-batch alone.
    """
    closed, leaves = simplify(traced.closed), list(traced.leaves)
    aux_leaves, aux_tree = jax.tree.flatten(traced.aux, is_leaf=lambda x: isinstance(x, Mean))
    aux_is_mean = tuple(isinstance(x, Mean) for x in aux_leaves)
    num_weights = sum(leaf.kind in ("params", "frozen") for leaf in leaves)
    if at_once:
        closed = all_at_once(closed, num_weights)
    closed = looped_over_rows(closed, num_weights)
    given = {i for i, leaf in enumerate(leaves) if leaf.kind in ("model_state", "key", "index")}
    dims = find_dims(closed, num_weights, given)
    forms = packed_forms(dims, num_weights) if forms is None else forms
    if forms:
        ins = [forms.get(i, whole(leaf.shape)) for i, leaf in enumerate(leaves)]
        closed = _refined(closed, leaves, forms, dims)
        dims = find_dims(closed, num_weights, given)
        names = {leaves[i].name: _part_names(form, given_names.get(leaves[i].name, ())) for i, form in forms.items()}
        given_names = {**given_names, **names}
        leaves = [replace(leaf, shape=expand(leaf.shape, form)) for leaf, form in zip(leaves, ins, strict=True)]
    runs = find_runs(closed)
    is_chain = any(_is_chain(run, dims) for run in runs)
    if pairs and is_chain:
        found = [paired(closed, run) if _is_chain(run, dims) else run for run in runs]
        runs = tuple(run for run in found if run is not None)
    for run in runs:
        for group in (*run.corresponding(closed.jaxpr.eqns), *run.stacked):
            for var in group[1:]:
                for a, b in zip(dims.of(group[0]), dims.of(var), strict=True):
                    dims.unite(a, b)
    batch = [dims.inputs[i][0] for i, leaf in enumerate(leaves) if leaf.kind == "batch" and leaf.shape]
    for dim in batch[1:]:
        dims.unite(batch[0], dim)
    batch_class = dims.class_of(batch[0]) if batch else None
    stream = _stream(dims, runs, batch_class)
    names = _names(dims, leaves, given_names, batch_class, stream)
    return Trace(
        closed, tuple(leaves), forms, dims, runs, names, batch_class, stream, traced.num_loss, aux_tree, aux_is_mean,
        counters=counters, is_chain=is_chain, pairs=pairs, at_once=at_once,
    )  # fmt: skip


def _is_chain(run: RepeatedLayers, dims: Dims) -> bool:
    """Whether one weight makes what a layer hands on of what it was handed: two equal convolutions of a block, or a
    plain stack of square layers. As repeats of a loop, all their dims are one, which no axis can split."""
    weights = [{dims.class_of(d) for d in m.weight or ()} for m in dims.matmuls]
    for _, read, written, _ in run.carries:
        ends = [(a, b) for a, b in zip(dims.of(read), dims.of(written), strict=True) if a != b]
        if any(a in weight and b in weight for a, b in ends for weight in weights):
            return True
    return False


def _refined(closed: ClosedJaxpr, leaves: Sequence[Leaf], forms: Mapping[int, Form], dims: Dims) -> ClosedJaxpr:
    """The equations on weights whose packed dims are taken apart."""
    ins = [forms.get(i, whole(leaf.shape)) for i, leaf in enumerate(leaves)]
    outs = [whole(atom.aval.shape) for atom in closed.jaxpr.outvars]
    return refine(closed, ins, outs, dims)


def _part_names(form: Form, given: Sequence[str | None]) -> list[str | None]:
    names = [*given, *[None] * (len(form) - len(given))]
    return [name for parts, old in zip(form, names, strict=True) for name in (("parts", old) if parts > 1 else (old,))]


def _stream(dims: Dims, runs: Sequence[RepeatedLayers], batch_class: int | None) -> frozenset[int]:
    carries = [c for run in runs for carry in run.carries for c in dims.of(carry[0])]
    carries += [dims.class_of(d) for ids in dims.layer_carries for d in ids]
    return frozenset(carries) - {batch_class}


def _names(
    dims: Dims,
    leaves: Sequence[Leaf],
    given: Mapping[str, Sequence[str | None]],
    batch_class: int | None,
    stream: frozenset[int],
) -> dict[int, str]:
    """Textbook names, from the part that each class plays in the matmuls; numbered where a part is played twice."""
    names: dict[int, str] = {}
    taken: collections.Counter[str] = collections.Counter()

    def name(dim: int, text: str) -> None:
        root = dims.class_of(dim)
        if root not in names and dims.size[dim] > 1:
            taken[text] += 1
            names[root] = text if taken[text] == 1 else f"{text}_{taken[text]}"

    for leaf, ids in zip(leaves, dims.inputs, strict=True):
        for dim, text in zip(ids, given.get(leaf.name, ()), strict=False):
            if text:
                name(dim, text)
    if batch_class is not None:
        name(batch_class, "batch")
    weighted = [m for m in (*dims.matmuls, *dims.grouped) if m.weights[0] != m.weights[1]]
    between = [m for m in dims.matmuls if not any(m.weights)]
    roles: collections.Counter[int] = collections.Counter()
    contracted, free = set(), set()
    for m in weighted:
        weight = m.weight
        assert weight is not None
        roles.update({dims.class_of(d) for d in weight})
        inside = {dims.class_of(d) for d in m.contracted}
        contracted |= inside
        free |= {dims.class_of(d) for d in weight} - inside
    for leaf, ids in zip(leaves, dims.inputs, strict=True):
        if leaf.kind == "batch" and len(ids) > 1 and np.issubdtype(leaf.dtype, np.integer):
            name(ids[1], "sequence")
    for _, dim, rows in dims.tables:
        name(dim, "vocab" if batch_class in [dims.class_of(d) for d in rows] else "positions")
    for dim in (d for m in weighted for d in m.batched):
        name(dim, "experts")
    for m in between:
        for dim in m.batched:
            name(dim, "heads")
        for dim in m.contracted:
            if dims.class_of(dim) in roles:
                name(dim, "head_dim")
        for dim in (*m.lhs, *m.rhs):
            if dims.class_of(dim) in stream and dims.class_of(dim) not in roles:
                name(dim, "sequence")
    for m in weighted:
        if any(names.get(dims.class_of(d), "").startswith("heads") for d in m.contracted):
            for dim in m.contracted:
                name(dim, "value_dim")
    widest = [c for c, _ in roles.most_common() if c in stream and c not in names] or [
        c for c, _ in roles.most_common(1) if roles[c] > 2
    ]
    if widest:
        name(widest[0], "embed")
    for c in [c for c, _ in roles.most_common() if c in contracted and c in free and c not in stream]:
        name(c, "ffn")
    vocab = {dims.size[dim] for _, dim, rows in dims.tables if batch_class in [dims.class_of(d) for d in rows]}
    for c in roles:
        if dims.size[c] in vocab and c in free and c not in contracted:
            name(c, "vocab")
        name(c, "out" if c in free and c not in contracted else "in" if c not in free else "features")
    for ids in dims.inputs:
        for dim in ids:
            name(dim, "dim")
    return names
