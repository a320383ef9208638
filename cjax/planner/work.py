"""What a step has to do, whatever the plan: plain numbers by named dims, for the whole batch.

A `Work` is read off a trace (`cjax.planner.reading`) or written down from a model's published shapes
(`cjax.planner.costs.transformer`). A `WorkSplit` says what the tensor and sequence words of a plan make of it. All
other words of a plan only divide: they are columns of a `PlanTable`, and every cost is an array with one entry a plan.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from cjax.plan import Remat

Dims = tuple[tuple[str, int], ...]  # (name, size) of each dim; equal names are split alike

BATCH = "batch"  # the name of the dim that data parallelism and micro-batches divide
ROWS = "rows of all"  # of what all examples of a micro-batch make together, which data parallelism divides


def elements(dims: Dims) -> int:
    """How many numbers a tensor with these dims has."""
    return math.prod(size for _, size in dims)


def shares_rows(dims: Dims, data: Any) -> Any:
    """Whether so many data-parallel devices each make their part of such rows, if there are any in a tensor: where
    their number divides the rows'. Numbers of devices may be an array.

    >>> shares_rows(((ROWS, 12), ("width", 8)), 4), shares_rows(((ROWS, 12), ("width", 8)), 8)
    (True, False)
    """
    number = math.gcd(*(size for name, size in dims if name == ROWS))
    return (number % data == 0) & (number > 0)


@dataclass(frozen=True)
class NamedTensor:
    """A tensor that the forward pass makes, and how many of it."""

    dims: Dims
    itemsize: int  # bytes of an element under precision=float32
    is_computed: bool = True  # whether a half precision halves it: a float of the computation, and no index or mask
    times: int = 1


@dataclass(frozen=True)
class MatmulWork:
    """A matmul or convolution of the forward pass: [batch, rows, inner] x [batch, inner, outer].

    `batch` is in both operands (heads of an attention that no kernel computes, experts). `rows` are the activation's
    own dims, `outer` the other operand's. `reads` numbers the activation that is read: products that read the same one
    share one reduction of its gradient. Where `is_weight` is False, both operands are activations. `is_remade`: whether
    a layer that is made again for its backward pass makes it again; of its last product, nothing needs the result.
    `groups`: how many weights there are, of which each row meets one.
    """

    batch: Dims
    rows: Dims
    inner: Dims
    outer: Dims
    reads: int
    is_weight: bool = True
    times: int = 1
    is_remade: bool = True
    groups: int = 1

    @property
    def flops(self) -> int:
        """Of one forward pass over the whole batch: 2 for each multiply-add."""
        return 2 * self.times * math.prod(map(elements, (self.batch, self.rows, self.inner, self.outer)))

    @property
    def sent(self) -> Dims | None:
        """Of a product that makes rows of all out of examples, or gives them back: the dims of what is there for each
        example. Devices gather it, or scatter the sum of their parts of it, once each way."""
        groups = (self.rows, self.inner, self.outer)
        names = [{name for name, _ in dims} for dims in groups]
        if self.is_weight or not all(any(one in some for some in names) for one in (BATCH, ROWS)):
            return None
        return tuple(dim for dims, some in zip(groups, names, strict=True) if ROWS not in some for dim in dims)


class Told(NamedTuple):
    """What says which example a row of all is, and how much of it: gathered to where rows are made, in each pass."""

    value: NamedTensor
    has_gradient: bool  # which comes back to the examples


class Ordered(NamedTuple):
    """Rows of the batch that are put in another order, for which devices gather each other's in the forward pass."""

    value: NamedTensor
    has_gradient: bool  # which is scattered
    is_remade: bool  # whether a layer that is made again for its backward pass makes what is found again


@dataclass(frozen=True)
class AttentionWork:
    """An attention that a flash kernel may compute: sizes, and what limits it.

    Args:
      batch, heads, queries, keys: dims of the scores.
      kv_heads: how many heads keys and values have.
      features: of one head; `value_features` of its values.
      is_causal: whether a query sees no later key (half of the work).
      is_fused: whether a kernel computes it where there is one (GPUs, half precision); scores are then never stored.
      why_not: why it can't be, in words for the user.
    """

    batch: Dims
    heads: Dims
    queries: Dims
    keys: Dims
    features: int
    kv_heads: int
    is_causal: bool = False
    is_fused: bool = True
    why_not: str = ""
    times: int = 1


@dataclass(frozen=True)
class Weight:
    """A parameter of the model, as a device would hold it whole."""

    name: str
    dims: Dims
    itemsize: int = 4
    is_trained: bool = True
    is_multiplied: bool = True  # whether matmuls read it: converted to the precision, gathered by ZeRO-3
    times: int = 1  # of layers that hold one each
    is_scanned: bool = False  # one leaf holds it for all layers, as `nn.scan` keeps them


@dataclass(frozen=True)
class Kept:
    """What a part keeps in memory for its backward pass, and beside that.

    Args:
      saved: what the backward pass needs from the forward pass, of one layer where it is a layer of a stack.
      working: sets of values that are in memory together while the backward pass runs, each at another moment; the
        fullest of them counts. What a stack saved is not among them: all of it is there all the time.
      staged: of a layer, what a stage of a pipeline saves of a micro-batch; `crossing`, what it hands from B to W.
      payload: what it is handed there, and hands on; `passing`, what of that all layers read and hand on as it is.
      waiting: the largest of what products for parameters' gradients alone read: XLA may put them off until all layers'
        are made.
      ahead: of what stands in front of a stack that is not the first, its forward pass's fullest moment, and what the
        stack's backward pass will write beside parameters' gradients.
    """

    saved: tuple[NamedTensor, ...]
    working: tuple[tuple[NamedTensor, ...], ...] = ()
    staged: tuple[NamedTensor, ...] = ()
    crossing: tuple[NamedTensor, ...] = ()
    payload: tuple[NamedTensor, ...] = ()
    passing: tuple[NamedTensor, ...] = ()
    waiting: tuple[NamedTensor, ...] = ()
    ahead: tuple[NamedTensor, ...] = ()


# How a step computes: in float32; in a half precision, attentions as they are written; or these by a kernel.
Form = Literal["float32", "half", "fused"]


@dataclass(frozen=True)
class Part:
    """A stretch of the model: what comes before the layers, one layer of a stack, what comes after.

    Args:
      name: as the report says it.
      repeats: how many such layers there are; 1 for what is no stack.
      products, attentions: matmuls; an attention's own two are in `attentions` alone.
      touched: what elementwise operations, norms and softmaxes outside of kernels read and write in one forward pass.
      weights: its parameters, those of one layer.
      stream: what it hands on.
      told: of what rows of all examples are made beside the examples themselves.
      ordered: rows that each other's place is looked up for.
    """

    name: str
    repeats: int = 1
    products: tuple[MatmulWork, ...] = ()
    attentions: tuple[AttentionWork, ...] = ()
    touched: tuple[NamedTensor, ...] = ()
    weights: tuple[Weight, ...] = ()
    stream: NamedTensor | None = None
    told: tuple[Told, ...] = ()
    ordered: tuple[Ordered, ...] = ()


@dataclass(frozen=True)
class Work:
    """A model and a batch: parts in the order in which they run, and what of them a plan must divide.

    Args:
      parts: stacks of layers among them; pipelines cut where `repeats` > 1.
      num_rows: rows of the whole batch.
      tokens: what a rate is counted in: positions of the whole batch, or its rows where it has none.
      optimizer_bytes: bytes of optimizer state for each byte of trained parameters (Adam in float32: 2).
      batch_bytes: of one step's batch.
      handed: what a stage of a pipeline hands to the next, all of it in every tick; `handed_low`, where plans compute
        in a half precision.
      notes: what could not be read, for the user.
      kept: what each part keeps in memory, by remat, how the step computes, and whether loops that add up over parts of
        the examples are evaluated at once, as grids do; sizes are those under that precision.
    """

    parts: tuple[Part, ...]
    num_rows: int
    tokens: int
    optimizer_bytes: float = 2.0
    batch_bytes: int = 0
    handed: tuple[NamedTensor, ...] = ()
    handed_low: tuple[NamedTensor, ...] = ()
    notes: tuple[str, ...] = ()
    kept: Mapping[tuple[Remat, Form, bool], tuple[Kept, ...]] = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_layers(self) -> int:
        return sum(part.repeats for part in self.parts if part.repeats > 1)

    @property
    def model_flops(self) -> float:
        """Of a step: forward and backward, nothing recomputed; causal attentions count half."""
        forward = 0.0
        for part in self.parts:
            forward += part.repeats * sum(product.flops for product in part.products)
            for each in part.attentions:
                scores = math.prod(map(elements, (each.batch, each.heads, each.queries, each.keys)))
                forward += part.repeats * each.times * 4 * scores * each.features / (2 if each.is_causal else 1)
        return 3 * forward


Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]


@dataclass(frozen=True)
class AxisMove:
    """A collective that the tensor or sequence words bring into one pass over one part (one layer of a stack).

    Args:
      kind: as the audit names it.
      axes: mesh axes along which the members of a group differ.
      elements: numbers that a device receives, for the whole batch, were it on one data-parallel copy.
      is_forward: whether it belongs to the forward pass (and is repeated where that is recomputed).
      is_wide: whether it stays float32 under every precision.
      count: how many collectives that is.
      of_weights: whether it is of weights or their gradients: independent of the batch's size.
      is_remade: of the forward pass, whether to make a layer again under remat=block makes it again: not what only the
        next layer reads, as no derivative of this one needs it.
      is_outer: of a gather or a scatter, whether it is along the outermost dim: each member's part is one piece.
      is_kept: where only plans move it under which layers save what it is of, or only those that make it again.
      looked_up: where only plans move it that look up fewer rows in a table at once than it has, or only others: how
        many they look up in the whole batch, over those of the table, and whether it is those of few.
      held: of a sum over all examples, those of other copies too: how many numbers each device has; `elements` is 0.
    """

    kind: Kind
    axes: tuple[str, ...]
    elements: float
    is_forward: bool
    is_wide: bool = False
    count: int = 1
    of_weights: bool = False
    is_remade: bool = True
    is_outer: bool = False
    is_kept: bool | None = None
    looked_up: tuple[float, bool] | None = None
    held: float = 0.0


@dataclass(frozen=True)
class HeldWeight:
    """What a device keeps of a weight, of one layer, before ZeRO divides it.

    Args:
      shape: of the whole weight.
      shards: in how many parts each dim is cut.
      sums: mesh axes of the tensor and sequence words along which its gradient is summed, beside data parallelism.
      uses: how often its gradient is summed in one pass: a tied table's is, for its lookup and its product each.
      joint: whether what its uses give is added up before it is reduced; in a pipeline it never is.
      parts: in how many parts its gradient is summed, those of devices with other positions; they are gathered then.
    """

    shape: tuple[int, ...]
    shards: tuple[int, ...]
    sums: tuple[str, ...] = ()
    uses: int = 1
    joint: bool = False
    parts: int = 1

    @property
    def elements(self) -> int:
        """On one device; dims that do not divide are padded."""
        return math.prod(-(-n // s) for n, s in zip(self.shape, self.shards, strict=True))


class RingWork(NamedTuple):
    """Scores that a ring computes: the share of them, and into how many chunks a device cuts its positions."""

    share: float
    chunks: int


@dataclass(frozen=True)
class WorkSplit:
    """What the tensor and sequence words of a plan make of a work.

    Args:
      axes_of: by dim, the mesh axes that split it; a dim that is missing stays whole.
      sizes: devices along each of these axes.
      moves: for each part of the work, its collectives.
      held: for each part, elements of its weights on one device (of one layer), before ZeRO divides them.
      notes: what stays whole and why.
      weights: for each part, what of each of its weights is held, where that is known; what ZeRO can divide follows.
      rings: for each part, the ring of each of its attentions; empty where they are in none.
      in_lockstep: whether stages of a pipeline run in a tick what any of them has to (`Plan.in_lockstep`).
    """

    axes_of: Mapping[str, tuple[str, ...]]
    sizes: Mapping[str, int]
    moves: tuple[tuple[AxisMove, ...], ...]
    held: tuple[int, ...]
    notes: tuple[str, ...] = ()
    weights: tuple[tuple[HeldWeight, ...], ...] = ()
    rings: tuple[tuple[RingWork, ...], ...] = ()
    in_lockstep: bool = False

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes.values())

    def parts_of(self, dims: Dims) -> int:
        """In how many parts a tensor of these dims is cut: an axis serves one dim, whichever of them it is."""
        axes = {axis for name, size in dims for axis in self._axes(name, size)}
        return math.prod(self.sizes[axis] for axis in axes)

    def local(self, dims: Dims) -> float:
        """Elements of such a tensor on one device; dims that do not divide are padded."""
        held, used = 1, set[str]()
        for name, size in dims:
            axes = [axis for axis in self._axes(name, size) if axis not in used]
            used.update(axes)
            held *= -(-size // math.prod(self.sizes[axis] for axis in axes))
        return held

    def _axes(self, name: str, size: int) -> Sequence[str]:
        axes = self.axes_of.get(name, ())
        return axes if size >= math.prod(self.sizes[axis] for axis in axes) else ()
