"""How a traced model goes through a pipeline: its layers cut into blocks, who works when, where each block is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cjax.jax_compat.core import Var
from cjax.mesh import PIPE
from cjax.pipeline.partition import Partition, partition
from cjax.pipeline.schedule import build
from cjax.pipeline.simulate import simulate
from cjax.pipeline.table import Schedule
from cjax.plan import Plan
from cjax.sharding.storage.storage import StageRows
from cjax.trace.jaxpr.cost import equation_cost
from cjax.trace.jaxpr.view import is_scan, scan_of
from cjax.trace.reading import Trace
from cjax.trace.stages.stacks import LayerStack, find_stacks, reads_states, torn_states

MUCH_IDLE = 0.3  # of a step, with what comes before and after the layers left out


@dataclass(frozen=True)
class Line:
    """A model on its way through the stages.

    Args:
      stacks: of layers, in the trace.
      schedule: which stage does what when.
      partition: the layers of each block.
      lockstep: whether stages have to take all branches in lockstep, as far as the plan tells: positions and grids are
        moved by permutes. Of other plans the compiled program tells.
      whole: names of weights that layers have one each of and every stage keeps all of.
    """

    stacks: tuple[LayerStack, ...]
    schedule: Schedule
    partition: Partition
    lockstep: bool
    whole: tuple[str, ...] = ()

    @property
    def rows(self) -> Mapping[tuple[int, ...], StageRows]:
        """For the weights of layers, how these are spread over the stages."""
        return {
            group: StageRows(PIPE, self.partition.order(k))
            for k, stack in enumerate(self.stacks)
            for group in stack.weights
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: stages that mostly wait, and weights that are kept more than once."""
        idle, size, found = simulate(self.schedule).bubble, self.schedule.num_stages, []
        if idle >= MUCH_IDLE:
            now = f"stages wait {idle:.0%} of the time with microbatches={self.schedule.num_microbatches}"
            found.append(f"{now}: take 4 for each stage, {4 * size}, or more")
        if self.whole:
            found.append(
                f"every stage keeps all of {_two_of(self.whole)}, read outside of the layers too; a "
                "penalty on weights is better left to the optimizer (optax.add_decayed_weights)"
            )
        return tuple(found)

    def stacks_of(self, trace: Trace) -> tuple[LayerStack, ...] | None:
        """The same stacks in another trace of this model, the loss on other rows or something else of it; None if it
        has not these layers."""
        stacks = find_stacks(trace)
        # By weights, not by equations: those differ with the rows, but slots were laid out for these groups of leaves.
        same = [(stack.weights, stack.length) for stack in stacks] == [(s.weights, s.length) for s in self.stacks]
        return stacks if same else None


def arrange_stages(trace: Trace, plan: Plan, table: Schedule | None = None) -> Line:
    """Cut a model into the stages that a plan asks for.

    Args:
      trace: of a micro-batch.
      plan: the plan.
      table: the user's own schedule, in the place of the one that the plan names.

    Raises:
      ValueError: no stack of layers, or too few layers; a schedule that does not suit the number of micro-batches; a
        model whose loss depends on state that it makes of examples, or that makes it in one place and reads it in
        another.
    """
    size, chunks = plan.pipeline.size, plan.pipeline.chunks
    stacks = find_stacks(trace)
    if not stacks:
        raise ValueError(
            f"pipeline={plan.pipeline} needs layers that repeat, and none were found: {_found(trace)}. Give the model "
            "two or more equal layers in a row, each with weights of its own (a list of blocks, or nn.scan), or leave "
            "`pipeline` out of the plan."
        )
    # A user's own table says how many chunks there are, whatever the plan's word says.
    chunks = chunks if table is None else max(1, table.num_chunks // len(stacks))
    short = min(stacks, key=lambda stack: stack.length)
    # With fewer layers than blocks, a stage would have nothing to do but wait.
    if short.length < size * chunks:
        works = _fewer(plan, short.length, chunks, is_own=table is not None)
        each, instead = f" and {chunks} chunks each" if chunks > 1 else "", f"write {works}, or" if works else "write"
        raise ValueError(
            f"pipeline={plan.pipeline} needs {size * chunks} layers for {size} stages{each}, and "
            f"{_named(trace, short)} has {short.length}: {instead} a plan without pipeline."
        )
    # Both of these would run, and give numbers: a stage would read state that is a step old.
    if names := reads_states(trace, stacks):
        raise ValueError(
            f"pipeline={plan.pipeline}: this model's loss depends on {_two_of(names)}, which it makes anew "
            "of each micro-batch: none could start before the one in front of it is through. Leave `pipeline` out of "
            "the plan, or let the loss in training not read it."
        )
    if names := torn_states(trace, stacks):
        raise ValueError(
            f"pipeline={plan.pipeline}: this model makes {_two_of(names)} of the examples in one place and "
            "reads it in another, which other stages compute: those would read what it was before the step. Update "
            "state where it is read, in the layer, or leave `pipeline` out of the plan."
        )
    schedule = _schedule(plan, len(stacks)) if table is None else table
    if table is not None:
        _check_table(table, plan, len(stacks))
    lengths = [stack.length for stack in stacks]
    # Stages in lockstep all run what comes after the layers: to have fewer of these would not help the last one.
    head = 0.0 if plan.in_lockstep else _head(trace, stacks[-1])
    whole = tuple(dict.fromkeys(name for stack in stacks for name in _kept_whole(trace, stack)))
    return Line(stacks, schedule, partition(lengths, schedule.route, head), plan.in_lockstep, whole)


def _fewer(plan: Plan, length: int, chunks: int, is_own: bool) -> str:
    """The words for as many stages as there are layers for, and as divide the devices: of the same schedule, or of one
    without chunks."""

    def most(limit: int) -> int:
        return max((size for size in range(2, limit + 1) if plan.num_devices % size == 0), default=0)

    if size := most(length // chunks):
        return f"pipeline={plan.pipeline.schedule}:{size}{f'/{chunks}' if chunks > 1 else ''}"
    size = 0 if is_own else most(min(plan.pipeline.size, length))
    return f"pipeline=1f1b:{size}" if size else ""


def _head(trace: Trace, last: LayerStack) -> float:
    """What comes after the last layer, in the arithmetic of one."""
    # In matmuls alone, as layers are told: what else comes after them is small beside a vocabulary.
    after = sum(equation_cost(eqn).matmul_flops for eqn in trace.closed.jaxpr.eqns[last.stop :])
    return after / max(1, last.flops // last.length)


def _schedule(plan: Plan, num_stacks: int) -> Schedule:
    """The table. Every stage holds a part of each stack, so that of several stacks each is a chunk more."""
    kind, size, chunks = plan.pipeline.schedule, plan.pipeline.size, plan.pipeline.chunks * num_stacks
    # An encoder's and a decoder's blocks on each stage are two chunks, and 1F1B over chunks is the interleaved
    # schedule.
    if num_stacks > 1 and kind == "1f1b":
        kind = "interleaved"
    try:
        return build(kind, size, plan.microbatches, chunks)
    except ValueError as error:
        what = f" for a model of {num_stacks} stacks of layers" if num_stacks > 1 else ""
        raise ValueError(f"pipeline={plan.pipeline}{what}: {error}") from None


def _check_table(table: Schedule, plan: Plan, num_stacks: int) -> None:
    """A user's own schedule has to be for this plan and this model."""
    given = f"schedule {table.name} is for {table.num_stages} stages and {table.num_microbatches} micro-batches"
    if (table.num_stages, table.num_microbatches) != (plan.pipeline.size, plan.microbatches):
        words = f"pipeline={plan.pipeline.schedule}:{table.num_stages} microbatches={table.num_microbatches}"
        raise ValueError(f"{given}, the plan for {plan.pipeline.size} and {plan.microbatches}: write {words}")
    # Each stack is cut over all stages, in as many chunks as any other; a rest would be chunks of no stack.
    if table.num_chunks % num_stacks:
        raise ValueError(
            f"{given}, with {table.num_chunks} chunks each, and the model has {num_stacks} stacks of layers, of which "
            f"each stage holds a share: give each stage {num_stacks} chunks, or a multiple of that"
        )
    # Such tables are for evaluation; trained by one, a model would get no gradients and stay as it is.
    if table.forward_only:
        raise ValueError(f"{given}, and has no B: training needs backwards")


def _two_of(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _weights_of(trace: Trace, stack: LayerStack) -> list[tuple[Var, ...]]:
    """What a stack's layers have one each of, kept with other stages or not."""
    weights = {trace.closed.jaxpr.invars[i] for kind in ("params", "frozen") for i in trace.leaves_of(kind)}
    return [group for _, group in stack.xs if weights.issuperset(group)]


def _names(trace: Trace) -> dict[Var, str]:
    return dict(zip(trace.closed.jaxpr.invars, (leaf.name for leaf in trace.leaves), strict=True))


def _named(trace: Trace, stack: LayerStack) -> str:
    """By its largest weight; layers whose weights are all read elsewhere too have none in `stack.weights`."""
    first = max((group[0] for group in _weights_of(trace, stack)), key=lambda var: var.aval.size)
    return f"the stack of {_names(trace)[first]!r}"


def _kept_whole(trace: Trace, stack: LayerStack) -> list[str]:
    """Names of weights, of the first layer's where each is kept alone, that are read outside of their layers too."""
    names, invars = _names(trace), trace.closed.jaxpr.invars
    own = {tuple(invars[i] for i in group) for group in stack.weights}
    return [names[group[0]] for group in _weights_of(trace, stack) if group not in own]


def _found(trace: Trace) -> str:
    if any(is_scan(eqn) and scan_of(eqn).reverse for eqn in trace.closed.jaxpr.eqns):
        return "a loop goes through its rows from the last to the first (`reverse=True`), where stages go the other way"
    if not trace.runs:
        return f"{len(trace.closed.jaxpr.eqns)} operations, of which no stretch repeats"
    lengths = ", ".join(f"{run.repeats} times {run.period} operations" for run in trace.runs)
    return f"what repeats ({lengths}) has no weights of its own"
