"""Memory of a device under each plan, by arithmetic: what is stored between steps, and what a step needs beside it."""

import collections
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np
from jax.sharding import PartitionSpec

from cjax.jax_compat.backends import needs_more_memory
from cjax.mesh import DEPTH, EXPERT, SEQUENCE, TENSOR
from cjax.pipeline.partition import partition
from cjax.plan import Plan
from cjax.planner.costs.moved import splits_examples
from cjax.planner.costs.places import places, route_of
from cjax.planner.hardware import Hardware
from cjax.planner.table import PRECISIONS, REMATS, SCHEDULES, PlanTable
from cjax.planner.work import BATCH, Form, Kept, NamedTensor, Work, WorkSplit, elements
from cjax.sharding.layout.zero import shard_over
from cjax.sharding.products.blocks import rows_in_blocks
from cjax.sharding.products.tiles import suits

# Of what a step needs beside what is stored, what XLA leaves free between values of all sizes and lifetimes; the second
# for an old XLA (`needs_more_memory`), the third where positions or grids make it move pieces of what layers read, or
# stages hand on what branches made.
GAPS, GAPS_OLD, GAPS_MOVED = 0.04, 0.06, 0.08
_ONE_D = {TENSOR, SEQUENCE, EXPERT}


@dataclass(frozen=True)
class MemoryCost:
    """Bytes a device by use, one number a plan; what a step needs beside what is stored is of its fullest moment.

    Args:
      params, optimizer, batch: stored between steps.
      grads: gradients, in the dtype they are added up in.
      activations: what the forward pass keeps for the backward pass, of all micro-batches in flight.
      working: what the layer, or the loss, needs whose backward pass needs the most: gathered and rounded weights,
        logits, one layer whole under recomputation.
      sent: what stages of a pipeline hand on.
      other: what XLA needs more, since values of all sizes and lifetimes leave gaps between them, and for what a layer
        lays out anew for its experts.
    """

    params: np.ndarray
    optimizer: np.ndarray
    batch: np.ndarray
    grads: np.ndarray
    activations: np.ndarray
    working: np.ndarray
    sent: np.ndarray
    other: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return sum((getattr(self, field.name) for field in fields(self)), np.zeros(()))


def memory_of(work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware) -> MemoryCost:
    """What each plan of a table needs on the device that needs the most.

    Args:
      work: of the whole batch.
      split: what the tensor and sequence words that the plans share make of it.
      table: the plans.
      hardware: what they are for; on GPUs a kernel computes attentions.
    """
    return _Memory(work, split, table, hardware).cost()


@dataclass(frozen=True)
class PartMemory:
    """Bytes a device of one part of a model under one plan: of one layer, where it is a stack.

    Args:
      repeats: layers.
      params, frozen: trained and other parameters, as ZeRO shares them out.
      grads, optimizer: of trained ones; gradients are shared out as they are made.
      handed: what a layer is handed and hands on, of one micro-batch.
      passing: what besides passes all layers of the stack as it is.
      working: what its backward pass needs at its fullest moment, the layer made again with it.
    """

    repeats: int
    params: float
    frozen: float
    grads: float
    optimizer: float
    handed: float
    passing: float
    working: float


def part_memory(work: Work, split: WorkSplit, plan: Plan, hardware: Hardware) -> list[PartMemory]:
    """What each part of a model needs where layers are made again in the backward pass, of a resolved plan without
    stages; with the larger gaps under any XLA, since a budget is a promise."""
    table = PlanTable.of([dataclasses.replace(plan, remat="block")])
    found = _Memory(work, split, table, hardware)
    over = found._zero_shares()[0, 0]  # no part has experts that others have not
    weights, trained = (sizes[:, 0] / found._repeats()[:, 0] for sizes in found._weights())
    passing, working = found._each(lambda kept: kept.passing)[:, 0], found._fullest()[:, 0]
    handed = found._each(lambda kept: kept.payload)[:, 0] - passing
    state, params = (over if plan.zero_stage >= least else 1.0 for least in (1, 3))
    return [
        PartMemory(
            part.repeats, learned / params, (every - learned) / params, learned / state,
            work.optimizer_bytes * learned / state, float(stream), float(beside), (1 + GAPS_OLD) * float(most),
        )
        for part, every, learned, stream, beside, most in zip(
            work.parts, weights, trained, handed, passing, working, strict=True
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class _Rows:
    """How layers lie on the stages of a pipeline, by stack and plan.

    Args:
      kept: layers of each stack that a stage keeps.
      saved: layers whose activations it keeps, each of one micro-batch.
      ends: what the last layers of a stack handed on, kept for what comes after it.
      messages: places for what arrives.
    """

    kept: np.ndarray
    saved: np.ndarray
    ends: np.ndarray
    messages: np.ndarray


class _Memory:
    def __init__(self, work: Work, split: WorkSplit, table: PlanTable, hardware: Hardware) -> None:
        self.work, self.split, self.table = work, split, table
        self.shares = table.data * table.turns
        self.stacks = [at for at, part in enumerate(work.parts) if part.repeats > 1]
        self.is_staged = table.pipeline > 1
        # A gradient is scattered where it is made, but where devices add up micro-batches of their own.
        alone = (table.microbatches > 1) & (table.data > 1) & (not splits_examples(split))
        self.scattered = (table.zero == 3) | ((table.zero >= 1) & ~alone)
        self.is_grid = bool(split.sizes.keys() - _ONE_D)
        queries = {name for part in work.parts for each in part.attentions for name, _ in each.queries}
        self.moves_pieces = self.is_grid or not queries.isdisjoint(split.axes_of)
        self.forms, self.exchanges = _forms(work, split, hardware), _exchanges_heads(split)
        self.is_old = needs_more_memory()
        self.gaps = GAPS_OLD if self.is_old else GAPS
        self.rows = self._rows()
        self.has_tiles = hardware.is_hopper

    def cost(self) -> MemoryCost:
        table, over = self.table, self._zero_shares()
        weights, trained = self._weights()
        ahead, shares = self._rounds_ahead(), self._state_shares()
        in_parts = (weights - trained + np.where(ahead, trained / shares, trained)).sum(0)
        params = np.where(table.zero == 3, (weights / over).sum(0), in_parts)
        optimizer = self.work.optimizer_bytes * (trained / shares).sum(0)
        batch = self.work.batch_bytes / (table.data * self.split.sizes.get(EXPERT, 1))
        grads = np.where(self.scattered, trained / over, trained)
        # An old XLA keeps whole what branches of stages add up, though they give it a device's part alone.
        staged = np.where(self.is_old & (table.zero < 3), trained, grads)
        found = [self._whole_step(grads), self._pipeline(staged)]
        parts = [np.where(self.is_staged, b, a) for a, b in zip(*found, strict=True)]
        gaps = np.where(self.is_staged | self.moves_pieces, GAPS_MOVED, self.gaps)
        # What a layer lays out anew for its experts finds no place among what layers before it left; in an old XLA,
        # what its backward pass lays out does not either. Stages have it in what their layers need.
        anew = (1 + self.is_old) * self._each(self._of_experts).max(0)
        other = gaps * np.sum(parts, axis=0) + np.where(self.is_staged, 0.0, anew) + self._in_blocks()
        grads, activations, working, sent = parts
        # They are there from the first micro-batch to the last.
        working = working + np.where(ahead, self._rounded(trained), 0.0).sum(0) + self._in_flight(trained)
        return MemoryCost(params, optimizer, batch, grads, activations, working, sent, other)

    def _whole_step(self, grads: np.ndarray) -> tuple[np.ndarray, ...]:
        """Gradients, activations and what stands beside them at the fullest moment of a backward pass."""
        zeros = np.zeros(len(self.table))
        saved = self._each(lambda kept: kept.saved) * self._repeats()
        working, ahead = self._fullest(), self._each(lambda kept: kept.ahead)
        working[self.stacks] += self._partial()[self.stacks]
        sums = np.where(self.table.turns > 1, grads.sum(0), 0.0)
        # Gradients of what was rounded ahead come in its precision, and are added to wide sums.
        made = np.where(self._rounds_ahead(), self._rounded(grads), grads)
        turned, of_layers = self._turned(grads), made * (self._repeats() > 1)
        unscattered = self._unscattered()
        waiting = np.where(self.scattered, 0.0, self._each(lambda kept: kept.waiting))
        # What backward loops write is cleared in front of the first of them; before the loss, where that is in a loop
        # over micro-batches or products are a grid's.
        is_early = (self.table.turns > 1) | self.is_grid
        last, looked_up, tables = max(self.stacks, default=-1), self._looked_up(), self._gathered_twice()
        best = [zeros, zeros, zeros, zeros]
        for at, part in enumerate(self.work.parts):
            layers = of_layers.sum(0) if at <= last else np.where(is_early, of_layers.sum(0), 0.0)
            mine = layers + (made - of_layers)[at:].sum(0) + turned[at:].sum(0) + sums
            held = saved[: at + (part.repeats > 1)].sum(0)
            # Of what comes after a stack, a gradient may wait until its layers' are made, or to be made itself.
            waits = np.maximum(unscattered[at:].max(0), waiting[at + 1 :].max(0, initial=0.0))
            beside = tables + (looked_up[:at].sum(0) if at <= last else zeros)
            now = [mine, held, working[at] + waits + beside, zeros]
            # Where layers' parameters are gathered, it is all cleared in front of the forward pass.
            gathers = (self.table.zero == 3) & (ahead[at] > 0)
            first = [of_layers.sum(0) + turned.sum(0) + sums, zeros, ahead[at], zeros]
            for each, counts in ((now, True), (first, gathers)):
                fuller = (sum(each) > sum(best)) & counts
                best = [np.where(fuller, a, b) for a, b in zip(each, best, strict=True)]
        return tuple(best)

    def _turned(self, grads: np.ndarray) -> np.ndarray:
        """What stands of layers in a second order. ZeRO-3 gathers a stack's weights along the dim that it splits: where
        that is not the first, what a device has of them is turned so that it is, for the whole step; experts are, as
        their products read them, and of those that are shared out gradients too. In a grid gradients are, in the order
        that the optimizer reads."""
        found, shares, experts = np.zeros_like(grads), self._zero_shares(), self._experts()
        for at in self.stacks:
            held = list(zip(self.work.parts[at].weights, self.split.weights[at], strict=True))
            for num in np.unique(shares[at]):
                turned = [
                    each
                    for weight, each in held
                    if any(name in experts for name, _ in weight.dims) or _is_turned(each.shape, each.shards, int(num))
                ]
                own = [each for each in turned if EXPERT in self.split.sizes and EXPERT not in each.sums]
                size, more = (4.0 * sum(each.elements for each in some) for some in (turned, own))
                mine = self.work.parts[at].repeats * (size + more * (self.table.data > 1)) / num
                found[at] = np.where((self.table.zero == 3) & (shares[at] == num), mine, found[at])
        return grads * (self._repeats() > 1) if self.is_grid else found

    def _looked_up(self) -> np.ndarray:
        """Of what stands before layers, the largest table that is looked up in and read by no product: what its
        gradient is added up in is cleared before theirs are made."""
        found = np.zeros((len(self.work.parts), len(self.table)))
        size = np.where(np.isin(self.table.precision, self.forms["float32"]), 4.0, 2.0)
        for at, part in enumerate(self.work.parts):
            if part.repeats == 1 and not self.is_grid:
                tables = (each.elements for each in self.split.weights[at] if each.uses == 1 and len(each.shape) > 1)
                found[at] = size * max(tables, default=0)
        return found

    def _gathered_twice(self) -> np.ndarray:
        """Of an old XLA under ZeRO-3, the largest weight of no layer: in the order that it is gathered in, too."""
        outside = [self.split.weights[at] for at, part in enumerate(self.work.parts) if part.repeats == 1]
        largest = max((each.elements for held in outside for each in held), default=0)
        item = np.where(np.isin(self.table.precision, self.forms["float32"]), 4.0, 2.0)
        return np.where(self.is_old & (self.table.zero == 3), item * largest, 0.0)

    def _partial(self) -> np.ndarray:
        """Under sequence=gather, what devices add up for the gradient of what they gathered: for each product that
        reads it all positions, in float32, before each keeps its own."""
        found = np.zeros((len(self.work.parts), len(self.table)))
        for at, part in enumerate(self.work.parts):
            dims = part.stream.dims if part.stream is not None else ()
            if any(TENSOR in self.split.axes_of.get(name, ()) for name, _ in dims):
                readers = collections.Counter(each.reads for each in part.products if each.is_weight)
                size = 4.0 * self.split.local(dims) * self.split.sizes[TENSOR]
                found[at] = size * max(readers.values(), default=0) / self.shares
        return found

    def _in_flight(self, trained: np.ndarray) -> np.ndarray:
        """Where each layer gathers its weights and saves them (ZeRO-1 and -2, one pass), those of a layer once more,
        and gradients that wait to be scattered: XLA has places of their own for these, so that they count beside
        whatever moment is the fullest."""
        in_turn = self._rounds_ahead() & self.scattered & (self._repeats() > 1) & ~self.is_staged
        return np.where(in_turn, 2 * self._rounded(trained) / self._repeats(), 0.0).max(0)

    def _unscattered(self) -> np.ndarray:
        """Of parts that run once, the largest gradient: it is whole when it is made, and then scattered. In a grid it
        is there for each of the axes that split it, while all layers' gradients are made."""
        found = np.zeros((len(self.work.parts), len(self.table)))
        if self.is_grid:
            weights = [weight for part in self.work.parts if part.repeats == 1 for weight in part.weights]
            return found + 2 * max((elements(weight.dims) * weight.itemsize for weight in weights), default=0)
        for at, part in enumerate(self.work.parts):
            if part.repeats == 1 and part.weights:
                count = sum(weight.times * elements(weight.dims) for weight in part.weights)
                largest = max(elements(weight.dims) * weight.itemsize for weight in part.weights)
                found[at] = np.where(self.scattered, largest * self.split.held[at] / count, 0.0)
        return found

    def _pipeline(self, grads: np.ndarray) -> tuple[np.ndarray, ...]:
        """The same for the stages of a pipeline."""
        rows, stacks = self.rows, self.stacks
        if not self.is_staged.any():
            return tuple(np.zeros(len(self.table)) for _ in range(4))
        split = np.where(self.table.schedule == SCHEDULES.index("zero_bubble"), 1.0, 0.0)
        layer = self._each(lambda kept: kept.staged) + split * self._each(lambda kept: kept.crossing)
        activations = (rows.saved * layer[stacks]).sum(0)
        payload = self._each(lambda kept: kept.payload)[stacks]
        sent = (rows.ends * payload).sum(0) + (rows.messages + 1 + 4) * payload.max(0, initial=0.0)
        outside = [at for at in range(len(self.work.parts)) if at not in stacks]
        shared = grads[outside].sum(0)
        working = self._fullest()
        inner = np.max(working[stacks] + rows.saved * self._each(self._of_experts)[stacks], axis=0)
        outer = np.max(working[outside], axis=0, initial=0.0) + shared
        # Of several stacks XLA may copy sums of gradients as well as what they saved: see `_places`.
        copied = grads[stacks].sum(0) if len(stacks) > 1 and self.is_old else 0.0
        return grads.sum(0) + copied, activations, np.maximum(inner, outer), sent

    def _of_experts(self, kept: Kept) -> Iterable[NamedTensor]:
        """What a layer saves for products of experts, laid out anew for these; stages do so with all they keep."""
        experts = self._experts()
        products = [each for part in self.work.parts for each in part.products if each.is_weight and each.batch]
        features = {name for each in products for name, _ in (*each.inner, *each.outer)}
        for value in kept.staged:
            names = {name for name, _ in value.dims}
            if names & experts and names & features:
                yield value

    def _experts(self) -> set[str]:
        """Dims of weights by each of which something else is multiplied."""
        products = (each for part in self.work.parts for each in part.products if each.is_weight)
        return {name for each in products for name, _ in each.batch}

    def _in_blocks(self) -> np.ndarray:
        """What products of rows in groups are handed and make, in blocks or by a kernel, in both passes, and the sum of
        their weights' gradients, of the part that needs the most. A layer that is made again has room for it nowhere
        else; an old XLA finds some."""
        sizes = np.zeros((len(self.work.parts), len(self.table)))
        half = np.where(self.table.precision == PRECISIONS.index("float32"), 4, 2)
        for at, part in enumerate(self.work.parts):
            for product in (each for each in part.products if each.groups > 1):
                inner, outer = self.split.local(product.inner), self.split.local(product.outer)
                rows = np.ceil(self.split.local(product.rows) / self.shares).astype(int)
                filled = np.asarray([rows_in_blocks(num, product.groups) for num in rows.tolist()], float)
                by_kernel = self.has_tiles & (half == 2) & suits(rows, inner, outer)
                filled, item = np.where(by_kernel, rows, filled), np.where(by_kernel, half, 4)
                sizes[at] += filled * (inner + outer) * half + (filled > 0) * product.groups * inner * outer * item
        again = (self.table.remat == REMATS.index("block")) & (not self.is_old)
        return again * sizes.max(0, initial=0.0)

    # -- what a device keeps of the model --
    def _repeats(self) -> np.ndarray:
        return np.asarray([part.repeats for part in self.work.parts], float)[:, None]

    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes of parameters, and of trained ones, by part and plan, before ZeRO divides them."""
        layers = self._repeats() * np.ones((1, len(self.table)))
        layers[self.stacks] = self.rows.kept
        sizes = []
        for part, held in zip(self.work.parts, self.split.held, strict=True):
            counts = max(1, sum(w.times * elements(w.dims) for w in part.weights))
            every = sum(w.times * elements(w.dims) * w.itemsize for w in part.weights)
            trained = sum(w.times * elements(w.dims) * w.itemsize for w in part.weights if w.is_trained)
            sizes.append((every * held / counts, trained * held / counts))
        both = np.asarray(sizes, float)
        return both[:, :1] * layers, both[:, 1:] * layers

    def _rounds_ahead(self) -> np.ndarray:
        """By part and plan, whether weights are rounded ahead of a step: those of stacks, and those kept in parts."""
        is_low = ~np.isin(self.table.precision, self.forms["float32"])
        return (self.table.zero < 3) & is_low & ((self._state_shares() > 1) | (self._repeats() > 1))

    def _state_shares(self) -> np.ndarray:
        """By part and plan, among how many devices optimizer state is shared out: ZeRO's, and of what is in no layer
        the stages of a pipeline too."""
        zero = np.where(self.table.zero >= 1, self._zero_shares(), 1)
        return np.where(self._repeats() > 1, 1, self.table.pipeline) * zero

    def _rounded(self, sizes: np.ndarray) -> np.ndarray:
        """Of trained weights, by part and plan, what they come to in half precision where products read them."""
        shares = []
        for part in self.work.parts:
            trained = [(w.times * elements(w.dims) * w.itemsize, w.is_multiplied) for w in part.weights if w.is_trained]
            rounded = sum(size / 2 for size, is_multiplied in trained if is_multiplied)
            kept = sum(size for size, is_multiplied in trained if not is_multiplied)
            shares.append((rounded + kept) / max(1.0, sum(size for size, _ in trained)))
        return sizes * np.asarray(shares)[:, None]

    def _zero_shares(self) -> np.ndarray:
        """By part and plan, among how many devices ZeRO shares out a parameter: of experts that devices with other
        examples have others of, among those with the same, which makes fewer for a part's weights on the whole."""
        inner = self.split.sizes.get(SEQUENCE, 1) * self.split.sizes.get(DEPTH, 1)
        grouped = self.table.zero_group < self.table.data
        found = np.where(grouped, self.table.zero_group, self.table.data * inner)
        return found * self._alike()[:, None]

    def _alike(self) -> np.ndarray:
        """By part, among how many devices with different experts ZeRO shares out what a device has of its weights: all
        of them, or none where it is experts."""
        size, found = self.split.sizes.get(EXPERT, 1), np.ones(len(self.work.parts))
        for at, held in enumerate(self.split.weights):
            every = sum(each.elements for each in held)
            own = sum(each.elements for each in held if EXPERT not in each.sums)
            found[at] = size * every / (every + (size - 1) * own) if every else 1
        return found

    def _rows(self) -> _Rows:
        """How layers lie on stages; without a pipeline one stage has all of them."""
        table, count = self.table, len(self.stacks)
        lengths = tuple(self.work.parts[at].repeats for at in self.stacks)
        found = np.zeros((4, max(count, 1), len(table)))
        columns = np.stack([table.schedule, table.pipeline, table.microbatches, table.chunks])
        head = 0.0 if self.split.in_lockstep else _head(self.work, self.stacks)
        kinds, place = np.unique(columns, axis=1, return_inverse=True)
        order = np.argsort(place.reshape(-1), kind="stable")
        ends = np.cumsum(np.bincount(place.reshape(-1), minlength=kinds.shape[1]))
        for (kind, size, microbatches, chunks), mine in zip(kinds.T.tolist(), np.split(order, ends[:-1]), strict=True):
            if size == 1:
                found[0][:, mine] = np.asarray(lengths or (0,), float)[:, None]
                continue
            kept, saved, ends, messages = _places(
                SCHEDULES[kind], size, microbatches, chunks, lengths, head, self.is_old
            )
            spare = int(self.split.in_lockstep)  # for what stages in lockstep throw away
            found[0][:, mine] = np.asarray(kept, float)[:, None]
            found[1][:, mine] = (np.asarray(saved, float) + spare * np.asarray(kept) / chunks)[:, None]
            found[2][:, mine] = (np.asarray(ends, float) + spare)[:, None]
            found[3][:, mine] = messages
        return _Rows(found[0][:count], found[1][:count], found[2][:count], found[3][0])

    # -- what a step keeps beside it --
    def _each(self, of: Callable[[Kept], Iterable[NamedTensor]]) -> np.ndarray:
        """Bytes of some values of each part, by part and plan."""
        return self._by_kept(lambda kept, shares: self._bytes(of(kept), shares))

    def _fullest(self) -> np.ndarray:
        """Bytes of the fullest moment of each part."""

        def most(kept: Kept, shares: np.ndarray) -> np.ndarray:
            sets = [self._bytes(values, shares) for values in kept.working]
            return np.max(sets, axis=0) if sets else np.zeros(len(shares))

        return self._by_kept(most)

    def _by_kept(self, of: Callable[[Kept, np.ndarray], np.ndarray]) -> np.ndarray:
        found = np.zeros((len(self.work.parts), len(self.table)))
        for remat, name in enumerate(REMATS):
            for form, precisions in self.forms.items():
                mine = (self.table.remat == remat) & np.isin(self.table.precision, precisions)
                if mine.any():
                    for at, kept in enumerate(self.work.kept[name, form, self.is_grid]):
                        found[at, mine] = of(kept, self.shares[mine])
        return found

    def _bytes(self, values: Iterable[NamedTensor], shares: np.ndarray) -> np.ndarray:
        divided = whole = 0.0
        for value in values:
            # Between two all-to-alls scores are float32, whatever the precision.
            itemsize = max(4, value.itemsize) if self.exchanges and _is_scores(value) else value.itemsize
            size = self.split.local(value.dims) * value.times * itemsize
            if any(name == BATCH for name, _ in value.dims):
                divided += size
            else:
                whole += size
        return divided / shares + whole


def _forms(work: Work, split: WorkSplit, hardware: Hardware) -> dict[Form, list[int]]:
    """How the precisions of a table are computed."""
    heads = min((each.kv_heads for part in work.parts for each in part.attentions), default=0)
    # Every axis has to split a kernel's examples or heads, and each device needs the keys of its own heads.
    takes = not _exchanges_heads(split) and split.sizes.get(TENSOR, 1) <= heads
    half: Form = "fused" if hardware.memory_bandwidth is not None and takes else "half"
    return {"float32": [PRECISIONS.index("float32")], half: [1, 2]}


def _exchanges_heads(split: WorkSplit) -> bool:
    """Whether attentions get all positions of some heads, as they do under sequence=all_to_all."""
    return any(move.kind == "all-to-all" and SEQUENCE in move.axes for moves in split.moves for move in moves)


@functools.cache
def _is_turned(shape: tuple[int, ...], shards: tuple[int, ...], num: int) -> bool:
    """Whether the dim that ZeRO splits of a weight over `num` devices is an inner one."""
    spec = PartitionSpec(*(str(dim) if size > 1 else None for dim, size in enumerate(shards)))
    split = shard_over(spec, shape, ("zero",), {"zero": num} | {str(dim): size for dim, size in enumerate(shards)})
    changed = [dim for dim in range(len(shape)) if split != spec and split[dim] != spec[dim]]
    return any(size > 1 for dim in changed for size in shape[:dim])


def _is_scores(value: NamedTensor) -> bool:
    """Whether a value has two dims of positions."""
    names = [name for name, _ in value.dims]
    return len(names) > len(set(names))


def _head(work: Work, stacks: Sequence[int]) -> float:
    """What comes after the last layer, in the arithmetic of one."""
    if not stacks:
        return 0.0
    layer = sum(product.flops for product in work.parts[stacks[-1]].products)
    after = sum(product.flops for part in work.parts[stacks[-1] + 1 :] for product in part.products)
    return after / max(1, layer)


@functools.cache
def _places(
    kind: str, size: int, microbatches: int, chunks: int, lengths: tuple[int, ...], head: float, copies: bool
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]:
    """By stack, the layers that a stage keeps, layers whose activations it has room for, and places for what ends a
    stack; and places for messages."""
    name = "interleaved" if len(lengths) > 1 and kind == "1f1b" else kind
    count = chunks * len(lengths)
    cut = partition(lengths, route_of(name, size, count), head)
    slots, ends, messages = places(name, size, microbatches, count, cut)
    # XLA may copy what a branch hands on, where it is not the only one that changes it: of stages that skip a layer
    # which they have but room for, and of several stacks.
    twice = [copies and not (cut.is_even(k) and len(lengths) == 1) for k in range(len(lengths))]
    saved = tuple((1 + more) * room * rows for more, room, rows in zip(twice, slots, cut.rows, strict=True))
    return tuple(rows * chunks for rows in cut.rows), saved, ends, messages
