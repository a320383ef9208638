"""All plans that a model, its batch and a number of devices allow, always in the same order.

An arrangement is what the tensor, sequence and expert words say; whether the model can be split so, the layout knows,
and says so when it is asked for the split. All other words only divide, so that the plans of one arrangement are the
rows of a `PlanTable`: none of them is a `Plan` until somebody wants to see it.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from cjax.plan import Auto, Pipeline, Plan, Tensor, Zero
from cjax.plan import Sequence as SequencePlan
from cjax.plan.parts import TensorMode
from cjax.planner.table import PRECISIONS, REMATS, SCHEDULES, PlanTable
from cjax.planner.work import Work, elements
from cjax.sharding.layout.grid import grid_of

MODES: tuple[TensorMode, ...] = ("1d", "2d", "2.5d", "3d")
WIDEST = 256  # devices that share one layer of one copy: on more, the messages of each are too small for any links
CARRIED = ("loss", "reduce", "unroll", "rules")  # words that no search changes
COLUMNS = tuple(each.name for each in fields(PlanTable))


@dataclass(frozen=True)
class Space:
    """What may be chosen from.

    Args:
      num_rows: rows of each leaf of the batch.
      stacks: layers of each stack that a pipeline cuts; none where it can't.
      heads: of each attention that has any, those of queries and those of keys.
      lengths: of each attention, how many positions.
      experts: of each mixture, how many experts.
      devices_per_host: so many share fast links: a ZeRO group is at most that large.
      auto: words that are fixed.
      splits_model: whether tensor and sequence parallelism and pipelines are among the plans.
      cuts_batch: whether micro-batches are.
      without: arrangements, as plans of these two words alone, that have been refused.
      hands_on: whether a micro-batch makes what the next one reads, running statistics say, so that none overlap.
    """

    num_rows: tuple[int, ...]
    stacks: tuple[int, ...] = ()
    heads: tuple[tuple[int, int], ...] = ()
    lengths: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    devices_per_host: int = 8
    auto: Auto = field(default_factory=Auto)
    splits_model: bool = True
    cuts_batch: bool = True
    without: frozenset[str] = frozenset()
    hands_on: bool = False

    @property
    def fixed(self) -> Mapping[str, Any]:
        return self.auto.fixed

    # -- tensor, sequence and expert -----------------------------------------------------------------------------
    def arrangements(self, num_devices: int) -> list[Plan]:
        """These three words for so many devices, the plainest first, as plans that leave the rest open.

        Those are left out that heads, positions or the batch rule out, and those of more than `WIDEST` devices unless
        the user fixed a word of them. What else a layout refuses it says itself.
        """
        carried = {name: self.fixed[name] for name in CARRIED if name in self.fixed}
        found = []
        for size in divisors(num_devices):
            for tensor in self._tensors(size):
                for sequence in self._sequences(num_devices // size, tensor):
                    if size * sequence.size > WIDEST and not self.fixed.keys() & {"tensor", "sequence"}:
                        continue
                    for expert in self._shares(num_devices // (size * sequence.size), tensor):
                        plan = Plan(tensor=tensor, sequence=sequence, expert=expert, **carried)
                        if words_of(plan) not in self.without:
                            found.append(plan)
        return sorted(found, key=_plainest)

    def _tensors(self, size: int) -> Iterator[Tensor]:
        if "tensor" in self.fixed:
            given = self.fixed["tensor"]
            yield from (given,) if given.size == size else ()
            return
        if size == 1 or not self.splits_model:
            yield from (Tensor(),) if size == 1 else ()
            return
        for mode in MODES:
            for tensor in tensors_of(mode, size):
                if all(heads % side_of(tensor) == 0 for heads, _ in self.heads):
                    yield tensor

    def _sequences(self, left: int, tensor: Tensor) -> Iterator[SequencePlan]:
        fixed = self.fixed.get("sequence")
        for size in divisors(left):
            for mode in ("gather", "ring", "all_to_all"):
                if (mode == "gather") != (size == 1):
                    continue
                sequence = SequencePlan(size, mode)
                if fixed in (None, sequence) and self._splits_positions(tensor, sequence):
                    yield sequence
            if size == 1 and fixed in (None, SequencePlan()):
                yield SequencePlan()

    def _splits_positions(self, tensor: Tensor, sequence: SequencePlan) -> bool:
        if sequence != self.fixed.get("sequence") and not (self.splits_model and self.lengths):
            return False
        if sequence.mode == "gather":
            return tensor.mode == "1d" and tensor.size > 1
        if any(length < sequence.size for length in self.lengths):
            return False
        side = side_of(tensor)
        # Groups of heads that share keys stay together, on split positions.
        if side > 1 and any(keys % side for _, keys in self.heads):
            return False
        return sequence.mode == "ring" or all(
            _deals_out(heads // keys, keys // side, sequence.size) for heads, keys in self.heads
        )

    def _shares(self, left: int, tensor: Tensor) -> list[int]:
        """Among how many data-parallel devices experts could be shared out."""
        if (given := self.fixed.get("expert")) is not None:
            return [given] if left % given == 0 and (given == 1 or tensor.mode == "1d") else []
        can = self.splits_model and bool(self.experts) and tensor.mode == "1d"
        return [n for n in divisors(left) if n == 1 or (can and all(number % n == 0 for number in self.experts))]

    # -- the other words -----------------------------------------------------------------------------------------
    def table(self, arrangement: Plan, num_devices: int) -> PlanTable:
        """All plans of an arrangement on so many devices; empty where the batch does not divide."""
        copies = num_devices // (arrangement.tensor.size * arrangement.sequence.size)
        expert, blocks = arrangement.expert, []
        for pipeline in self._pipelines(copies):
            data = copies // pipeline.size
            if self.fixed.get("data", data) != data or data % expert:
                continue
            plan = replace(arrangement, data=data, pipeline=pipeline)
            counts = [(m, overlap) for m in self.counts(plan) for overlap in self.overlaps(plan, m)]
            zeros = self._zeros(arrangement, data // expert)
            if counts and zeros:
                blocks.append(self._block(data // expert, pipeline, counts, zeros))
        columns = np.concatenate(blocks, axis=1) if blocks else np.zeros((len(COLUMNS), 0), np.int64)
        return PlanTable(*columns)

    def counts(self, plan: Plan) -> list[int]:
        """Numbers of micro-batches that a resolved plan could have."""
        sizes, grid = plan.tensor.axis_sizes(), grid_of(plan.tensor.axis_sizes())
        shares = math.prod(sizes[axis] for axis in grid.batch) if grid else 1
        return [m for m in self._microbatches(plan.data * shares) if self._runs(plan.pipeline, m)]

    def overlaps(self, plan: Plan, microbatches: int) -> list[int]:
        """How many of so many micro-batches a resolved plan could compute at a time. Two: of more, as many activations
        are alive, and no more is hidden. And of 1d alone: what grids and split positions move stays as it is."""
        is_plain = plan.sequence == SequencePlan() and plan.pipeline.size == 1 and not self.hands_on
        can = is_plain and plan.tensor.mode == "1d" and plan.tensor.size > 1
        found = [1, 2] if can and microbatches % 2 == 0 else [1]
        if (given := self.fixed.get("overlap")) is not None:
            found = [given] if microbatches % given == 0 and (given == 1 or plan.pipeline.size == 1) else []
        return found

    def nearest(self, plan: Plan, num_devices: int) -> Plan | str:
        """A resolved plan with micro-batches that divide, as near as can be to those that it has; or why there is none.

        What no arrangement of this space has, heads that are not divided, say, is told by whoever splits.
        """
        if words_of(plan) not in {words_of(each) for each in self.arrangements(num_devices)}:
            return "the model or the batch can't be split so"
        if not self._cuts(plan.pipeline):
            return f"the model has {' and '.join(map(str, self.stacks)) or 'no'} layers that stages could share"
        counts = self.counts(plan)
        if not counts:
            return f"{' and '.join(map(str, self.num_rows))} rows can't be shared so"
        wanted = math.log(plan.microbatches)
        found = min(counts, key=lambda m: (abs(math.log(m) - wanted), m))
        overlap = plan.overlap if plan.overlap in self.overlaps(plan, found) else 1
        return replace(plan, microbatches=found, overlap=overlap)

    def _block(
        self, data: int, pipeline: Pipeline, counts: Sequence[tuple[int, int]], zeros: Sequence[tuple[int, int]]
    ) -> np.ndarray:
        remats = [REMATS.index(self.fixed["remat"])] if "remat" in self.fixed else range(len(REMATS))
        precision = PRECISIONS.index(self.fixed.get("precision", "float32"))
        m, overlap = np.asarray(counts, np.int64).T
        turn, zero, remat = (
            x.ravel() for x in np.meshgrid(range(len(counts)), range(len(zeros)), remats, indexing="ij")
        )
        stages, groups = np.asarray(zeros, np.int64).T

        def same(value: int) -> np.ndarray:
            return np.full(len(turn), value)

        schedule, chunks = SCHEDULES.index(pipeline.schedule), pipeline.chunks
        return np.stack(
            [same(data), same(pipeline.size), same(schedule), same(chunks), m[turn], stages[zero], groups[zero], remat,
             same(precision), overlap[turn]]
        )  # fmt: skip

    def _pipelines(self, copies: int) -> list[Pipeline]:
        if "pipeline" in self.fixed:
            given = self.fixed["pipeline"]
            return [given] if copies % given.size == 0 and self._cuts(given) else []
        found = [Pipeline()]
        if self.fixed.get("unroll") == "layers":
            return found
        if not self.stacks or not self.splits_model:
            return found
        most = min(self.stacks)
        for size in divisors(copies)[1:]:
            found += [Pipeline(size, schedule) for schedule in ("1f1b", "gpipe")]
            # Chunks of unequal sizes leave stages waiting for the largest at every turn.
            whole = [c for c in divisors(most // size) if c > 1 and all(n % (size * c) == 0 for n in self.stacks)]
            found += [Pipeline(size, "interleaved", chunks) for chunks in whole]
            found += [Pipeline(size, "zero_bubble", chunks) for chunks in (1, 2)]
        return [pipeline for pipeline in found if self._cuts(pipeline)]

    def _cuts(self, pipeline: Pipeline) -> bool:
        """Whether the layers make so many blocks: each stack is cut over all stages, and is a chunk more."""
        if pipeline.size == 1:
            return True
        chunks = pipeline.chunks * len(self.stacks)
        few = pipeline.schedule == "zero_bubble" and chunks > 2
        return bool(self.stacks) and min(self.stacks) >= pipeline.size * pipeline.chunks and not few

    def _runs(self, pipeline: Pipeline, microbatches: int) -> bool:
        """Whether the schedule takes so many micro-batches; 1F1B of several stacks is the interleaved one."""
        several = pipeline.schedule == "1f1b" and len(self.stacks) > 1
        in_groups = pipeline.size > 1 and (pipeline.schedule == "interleaved" or several)
        return not in_groups or microbatches % pipeline.size == 0

    def _microbatches(self, shares: int) -> list[int]:
        rows = math.gcd(*self.num_rows) if self.num_rows else 1
        if self.num_rows and rows % shares:
            return []
        counts = divisors(rows // shares) if self.num_rows and self.cuts_batch else [1]
        return [m for m in counts if self.fixed.get("microbatches", m) == m]

    def _zeros(self, arrangement: Plan, data: int) -> list[tuple[int, int]]:
        """Stages and groups. State is shared over data-parallel devices, those of a sequence and the depth of 2.5d."""
        if (given := self.fixed.get("zero")) is not None:
            group = given.group or data
            clashes = given.group is not None and arrangement.expert > 1
            return [(given.stage, group)] if data % group == 0 and not clashes else []
        if data * arrangement.expert * arrangement.sequence.size * arrangement.tensor.depth == 1:
            return [(0, data)]
        found = [(stage, data) for stage in range(4)]
        # A group that stays in a host where all of them would not.
        near = self.devices_per_host // (arrangement.tensor.size * arrangement.sequence.size)
        groups = [group for group in divisors(data) if 1 < group <= near < data]
        return found + [(stage, groups[-1]) for stage in (1, 2, 3) if groups and arrangement.expert == 1]


def space_of(
    work: Work,
    num_rows: Sequence[int],
    stacks: Sequence[int],
    devices_per_host: int,
    auto: Auto,
    hands_on: bool = False,
) -> Space:
    """What a work allows.

    Args:
      work: of the model and its batch.
      num_rows: rows of each leaf of the batch.
      stacks: layers of each stack that a pipeline cuts.
      devices_per_host: of the devices.
      auto: words that are fixed.
      hands_on: whether a micro-batch makes what the next one reads.
    """
    attentions = [each for part in work.parts for each in part.attentions]
    products = [each for part in work.parts for each in part.products]
    return Space(
        tuple(dict.fromkeys(num_rows)),
        tuple(stacks),
        tuple(dict.fromkeys((elements(each.heads), each.kv_heads) for each in attentions if each.heads)),
        tuple(dict.fromkeys(elements(dims) for each in attentions for dims in (each.queries, each.keys))),
        tuple(dict.fromkeys(elements(each.batch) for each in products if each.is_weight and each.batch)),
        devices_per_host,
        auto,
        hands_on=hands_on,
    )


def plan_at(arrangement: Plan, table: PlanTable, row: int) -> Plan:
    """One row of a table as a resolved plan, as its author would have written it."""
    at = {name: int(getattr(table, name)[row]) for name in COLUMNS}
    return replace(
        arrangement,
        data=at["data"] * arrangement.expert,
        pipeline=Pipeline(at["pipeline"], SCHEDULES[at["schedule"]], at["chunks"]),
        microbatches=at["microbatches"],
        zero=Zero(at["zero"], at["zero_group"] if at["zero"] and at["zero_group"] < at["data"] else None),
        remat=REMATS[at["remat"]],
        precision=PRECISIONS[at["precision"]],
        overlap=at["overlap"],
    )


def arrangement_of(plan: Plan) -> Plan:
    """What all plans of its arrangement have in common with a plan."""
    words = ("tensor", "sequence", "expert", *CARRIED)
    return Plan(**{name: getattr(plan, name) for name in words})


def words_of(plan: Plan) -> str:
    """What a split depends on, as text."""
    return str(Plan(tensor=plan.tensor, sequence=plan.sequence, expert=plan.expert, rules=plan.rules))


def take(table: PlanTable, rows: np.ndarray) -> PlanTable:
    """Some rows of a table: a mask, or numbers of rows."""
    return PlanTable(*(getattr(table, name)[rows] for name in COLUMNS))


def num_words(arrangement: Plan, table: PlanTable) -> np.ndarray:
    """How many words the text of each plan has, `data` among them."""
    own = (arrangement.tensor.size > 1) + (arrangement.sequence != SequencePlan()) + (arrangement.expert > 1) + 1
    words = [table.pipeline > 1, table.microbatches > 1, table.zero > 0, table.remat > 0, table.precision > 0]
    words.append(table.overlap > 1)
    return own + np.sum(words, axis=0)


def tensors_of(mode: TensorMode, size: int) -> list[Tensor]:
    """The arrangements of so many devices, several of them, in one mode: one, none, or of 2.5d one for each depth."""
    found = []
    for depth in divisors(size)[1:] if mode == "2.5d" else [1]:
        try:
            found.append(Tensor(size, mode, depth))
        except ValueError:  # no such arrangement of so many devices
            continue
    return [tensor for tensor in found if side_of(tensor) > 1]


def side_of(tensor: Tensor) -> int:
    """Devices along the axis of a tensor mode that heads are split over."""
    sizes = tensor.axis_sizes()
    return sizes.get("tensor") or sizes.get("col") or sizes["j"]


def _deals_out(groups: int, keys: int, size: int) -> bool:
    """Whether `keys` heads, each read by `groups` of queries, can be dealt out to `size` devices."""
    of_keys = math.gcd(keys, size)
    of_groups = size // of_keys
    return groups % of_groups == 0 and (of_keys == keys or of_groups == 1)


def _plainest(plan: Plan) -> tuple[int, int, int, str]:
    return plan.tensor.size * plan.sequence.size, plan.tensor.size, plan.expert, str(plan)


def divisors(number: int) -> list[int]:
    """Ascending; of 12: 1, 2, 3, 4, 6, 12."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})
