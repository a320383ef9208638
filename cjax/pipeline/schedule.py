"""Schedules: pure functions from (stages, micro-batches) to tables of ticks.

Stages that go through ticks in lockstep are busy in another way than in the papers' charts. There, a stage runs one op
at a time, and a micro-batch comes back to a stage two ops later for every stage behind it. Here a tick takes an F and a
B, and to run both in every tick, a stage starts two micro-batches for every stage behind it (`lead=2`) before its first
backward, where the papers start one (`lead=1`). So 1F1B holds 2 (p - r) - 1 activations on stage r instead of p - r. It
takes m + 2 (p - 1) ticks, of which the first p - 1 run F alone and the last p - 1 B alone: the papers' bubble,
(p - 1) / (m + p - 1). The interleaved schedule has that lead in the papers too.

With `lead=2`, every message is used in the tick after it was sent: no stage needs an inbox.
"""

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence

from cjax.pipeline.route import KINDS, block_of, check_route, needs, sends
from cjax.pipeline.table import Op, Placed, Schedule, Ticks, held_in

Orders = Sequence[Sequence[Op]]


def gpipe(num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """All forwards, then all backwards: every stage holds every micro-batch.

    Args:
      num_stages: p.
      num_microbatches: m, any number.
      num_chunks: blocks of layers on each stage, run one after the other: an encoder's, then a decoder's.

    >>> gpipe(4, 8).held()
    (8, 8, 8, 8)
    """
    p, m = _counts(num_stages, num_microbatches)
    chunks = range(_chunks(p, num_chunks))
    order = [Op("F", i, chunk) for chunk in chunks for i in range(m)]
    order += [Op("B", i, chunk) for chunk in reversed(chunks) for i in range(m)]
    return from_orders("gpipe", tuple(range(p)) * num_chunks, [order] * p)


def forward_only(route: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Forwards alone, for evaluation, of the blocks of any schedule's route.

    >>> forward_only((0, 1), 3).num_ticks
    4
    """
    p, m = _counts(max(route) + 1, num_microbatches)
    order = [Op("F", i, chunk) for chunk in range(len(route) // p) for i in range(m)]
    return from_orders("forward_only", route, [order] * p)


def one_f_one_b(num_stages: int, num_microbatches: int, lead: int = 2) -> Schedule:
    """One forward, one backward. Stage r of p holds `lead * (p - 1 - r) + 1` micro-batches.

    Args:
      num_stages: p.
      num_microbatches: m, any number.
      lead: 2 runs F and B in each tick; 1 is the papers' order, one op a tick: about half the memory, but a tick in
        which one stage runs F and another B lasts as long as the longer of the two.

    >>> one_f_one_b(4, 8).held(), one_f_one_b(4, 8, lead=1).held()
    ((7, 5, 3, 1), (4, 3, 2, 1))
    """
    p, m = _counts(num_stages, num_microbatches)
    forwards, backwards = [Op("F", i) for i in range(m)], [Op("B", i) for i in range(m)]
    orders = [_alternate(forwards, backwards, _lead(lead) * (p - 1 - stage) + 1) for stage in range(p)]
    return from_orders("1f1b", tuple(range(p)), orders, fused=lead == 2)


def interleaved(num_stages: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over chunks: stage r holds blocks r, r + p, r + 2p, ..., for a bubble `num_chunks` times as small.

    Stage r holds `num_chunks * p + p - 1 - 2 * r` chunk activations, 1 / num_chunks of a stage each.

    Args:
      num_stages: p, at least 1.
      num_microbatches: m, a multiple of p.
      num_chunks: chunks of layers that a stage holds, at least 1.

    Raises:
      ValueError: counts below 1; m no multiple of p, since micro-batches go round the ring in groups of p.

    >>> interleaved(4, 8, 2).held()
    (11, 9, 7, 5)
    """
    p, m = _counts(num_stages, num_microbatches)
    _chunks(p, num_chunks)
    # With a group that is not whole, stages would wait for micro-batches that do not come, in the middle of the table.
    # Megatron's asks for the same.
    if m % p:
        fits = [str(count) for count in (m // p * p, (m // p + 1) * p) if count]
        raise ValueError(
            f"interleaved over {p} stages takes micro-batches in groups of {p}, and {m} are not whole groups: "
            f"write microbatches={' or microbatches='.join(fits)}"
        )
    steps = [(group + i, chunk) for group in range(0, m, p) for chunk in range(num_chunks) for i in range(p)]
    forwards = [Op("F", i, chunk) for i, chunk in steps]
    backwards = [Op("B", i, num_chunks - 1 - chunk) for i, chunk in steps]
    warm_up = [(num_chunks - 1) * p + 2 * (p - 1 - stage) + 1 for stage in range(p)]
    orders = [_alternate(forwards, backwards, warm_up[stage]) for stage in range(p)]
    return from_orders("interleaved", tuple(range(p)) * num_chunks, orders)


def zero_bubble(num_stages: int, num_microbatches: int, lead: int = 2) -> Schedule:
    """1F1B with the backward in two: B goes on to the previous stage at once, W fills what would be idle.

    Every stage holds up to 2p - 1 micro-batches. The bubble is that of the papers' ZB-H1, (p - 1) (F + B - W), if m is
    at least 2p - 2 and W takes no longer than F or B: beside another stage that runs an op more in the same tick, W
    costs nothing. With fewer micro-batches, from p on, it is at most (p - 1) (F + B).

    Args:
      num_stages: p.
      num_microbatches: m, any number.
      lead: as in `one_f_one_b`; 1 is ZB-H1 in the papers' order, with p micro-batches on every stage.

    >>> zero_bubble(4, 8).held(), zero_bubble(4, 8, lead=1).held()
    ((7, 7, 7, 7), (4, 4, 4, 4))
    """
    p, m = _counts(num_stages, num_microbatches)
    route = tuple(range(p))
    if _lead(lead) == 1:
        whole = one_f_one_b(p, m, lead=1)
        orders = [_delay_weights(whole.order(stage), stage) for stage in range(p)]
        return from_orders("zero_bubble", route, orders, fused=False)
    return _with_weights("zero_bubble", route, list(one_f_one_b(p, m).placed()), 2 * p - 1)


def zero_bubble_v(num_stages: int, num_microbatches: int) -> Schedule:
    """Zero bubble in a V: stage r holds blocks r and 2p - 1 - r, so input and loss are both on stage 0.

    A micro-batch goes down and up the V, then its gradient does; a new one starts every second tick, so that F and B
    of one tick always leave a stage in different directions. The bubble is that of `zero_bubble`, from m = p on, with
    5/8 of its memory: every stage holds up to 5p / 2 chunk activations, half a stage each. Asynchronous stages do
    better with a V; those that go through ticks in lockstep wait while the first and the last micro-batch cross it.

    Args:
      num_stages: p, at least 1.
      num_microbatches: m, at least 1.

    Raises:
      ValueError: counts below 1.

    >>> zero_bubble_v(4, 16).route
    (0, 1, 2, 3, 3, 2, 1, 0)
    """
    p, m = _counts(num_stages, num_microbatches)
    placed = []
    for i in range(m):
        for stage in range(p):
            down, up = 2 * i + stage, 2 * i + 2 * p - 1 - stage
            back = 2 * i + 2 * p - 1 + stage
            placed += [Placed(down, stage, Op("F", i, 0)), Placed(up, stage, Op("F", i, 1))]
            placed += [Placed(back, stage, Op("B", i, 1)), Placed(up + 2 * p - 1, stage, Op("B", i, 0))]
    return _with_weights("zero_bubble_v", (*range(p), *reversed(range(p))), placed, max(2 * p + 1, (5 * p - 1) // 2))


def split_backward(schedule: Schedule) -> Schedule:
    """The same table with W behind each B, in its tick: the gradient is transferred while W runs, and no more is held.

    Worth it where transfers take long beside a tick, so most for the interleaved schedule's short ones.

    Args:
      schedule: any table; one that has W already comes back as it is.

    >>> split_backward(gpipe(1, 1)).order(0)[1:]
    [Op(kind='B', microbatch=0, chunk=0), Op(kind='W', microbatch=0, chunk=0)]
    """
    if schedule.split:
        return schedule
    weights = [Placed(tick, stage, op._replace(kind="W")) for tick, stage, op in schedule.placed() if op.kind == "B"]
    return _schedule(schedule.name, schedule.route, [*schedule.placed(), *weights], schedule.slots)


def build(kind: str, num_stages: int, num_microbatches: int, num_chunks: int = 1) -> Schedule:
    """The schedule that a plan names: `pipeline=interleaved:4/2 microbatches=8` is build("interleaved", 4, 8, 2).

    Args:
      kind: "gpipe", "1f1b", "interleaved" or "zero_bubble"; the last one with 2 chunks is `zero_bubble_v`.
      num_stages: devices, or groups of them, that the layers are cut over.
      num_microbatches: pieces of a batch.
      num_chunks: chunks of layers that a stage holds: any number for gpipe and interleaved, 1 for 1f1b, 1 or 2 for
        zero_bubble.

    Raises:
      ValueError: another kind, or counts that it does not take.

    >>> build("zero_bubble", 4, 8, num_chunks=2).name
    'zero_bubble_v'
    """
    match kind, num_chunks:
        case "gpipe", _:
            return gpipe(num_stages, num_microbatches, num_chunks)
        case "1f1b", 1:
            return one_f_one_b(num_stages, num_microbatches)
        case "interleaved", _:
            return interleaved(num_stages, num_microbatches, num_chunks)
        case "zero_bubble", 1:
            return zero_bubble(num_stages, num_microbatches)
        case "zero_bubble", 2:
            return zero_bubble_v(num_stages, num_microbatches)
    raise ValueError(
        f"no schedule {kind!r} with {num_chunks} chunks a stage: there are gpipe and interleaved with any "
        "number, 1f1b with 1, zero_bubble with 1 or 2"
    )


def from_orders(
    name: str, route: tuple[int, ...], orders: Orders, slots: int | None = None, fused: bool = True
) -> Schedule:
    """The table in which every stage runs its ops in the order given, each in the first tick that can take it.

    Args:
      name: for people.
      route: the stage of each block of layers, in the model's order.
      orders: for each stage, its ops, first to last.
      slots: chunk activations that every stage has room for; None takes what the orders need.
      fused: whether a stage may run several ops in one tick.

    Raises:
      ValueError: stages wait for each other, or the table breaks another law.

    >>> f, b = Op("F", 0), Op("B", 0)
    >>> from_orders("one", (0, 1), [[f, b], [f, b]]).num_ticks
    3
    """
    where = f"schedule {name}:"
    check_route(where, route)
    if len(orders) != max(route) + 1:
        raise ValueError(f"{where} {len(orders)} orders for the {max(route) + 1} stages of route={route}")
    for stage, order in enumerate(orders):
        for op in order:
            if op.kind not in KINDS or op.chunk not in range(route.count(stage)):
                raise ValueError(f"{where} {op} on stage {stage}: ops are F, B or W of {route.count(stage)} chunks")
    queues = [deque(order) for order in orders]
    done: dict[tuple[str, int, int], int] = {}
    placed: list[Placed] = []
    tick = 0
    while any(queues):
        before = len(placed)
        for stage, queue in enumerate(queues):
            for op in _next_ops(route, stage, queue, done, tick, fused):
                queue.popleft()
                placed.append(Placed(tick, stage, op))
        if len(placed) == before:
            stuck = "; ".join(f"{queue[0]} on stage {stage}" for stage, queue in enumerate(queues) if queue)
            raise ValueError(f"{where} in this order each of these waits for another: {stuck}")
        tick += 1
    return _schedule(name, route, placed, slots)


def _next_ops(
    route: tuple[int, ...],
    stage: int,
    queue: Sequence[Op],
    done: dict[tuple[str, int, int], int],
    tick: int,
    fused: bool,
) -> list[Op]:
    """What of its next ops a stage runs in this tick; noted in `done`."""
    ops: list[Op] = []
    ways: set[int] = set()
    for op in queue:
        block = block_of(route, stage, op.chunk)
        for kind, source in needs(op.kind, block, len(route)):
            sent = done.get((kind, op.microbatch, source))
            if sent is None or sent + (source != block) > tick:
                return ops
        # Only in the order F, B, W within a tick, since that is the order in which a stage runs them, and with one
        # message each way.
        way = sends(route, op.kind, block)
        if ops and (not fused or KINDS.index(op.kind) <= KINDS.index(ops[-1].kind) or (way and way in ways)):
            return ops
        ops.append(op)
        ways.add(way)
        done[op.kind, op.microbatch, block] = tick
    return ops


def _with_weights(name: str, route: tuple[int, ...], placed: Sequence[Placed], slots: int) -> Schedule:
    """Adds the W of every B: wherever a stage has less to do than another in that tick, and where it needs the room.

    W is taken to be no longer than F or B. Where a stage has no room left for its next F, it has to run W in a full
    tick; that makes the tick longer, so all stages run one. What is left over runs at the end, in ticks of its own.
    """
    num_stages = max(route) + 1
    rows: dict[int, list[list[Op]]] = defaultdict(lambda: [[] for _ in range(num_stages)])
    for tick, stage, op in placed:
        rows[tick][stage].append(op)
    last, tick = max(rows), 0
    undone: list[deque[Op]] = [deque() for _ in range(num_stages)]
    held = [0] * num_stages
    out = list(placed)
    while tick <= last or any(undone):
        most = max(len(ops) for ops in rows[tick])
        for stage, ops in enumerate(rows[tick]):
            held[stage] += sum(op.kind == "F" for op in ops)
            undone[stage] += [op._replace(kind="W") for op in ops if op.kind == "B"]
        # A tick lasts as long as its busiest stage, so a W on a stage that has less to do is free. One that makes a
        # tick longer is put off until some stage would run out of room, and then all stages take theirs, for the price
        # of one.
        starts = [any(op.kind == "F" for op in ops) for ops in rows[tick + 1]]
        longer = tick > last or any(w and n + f > slots for w, n, f in zip(undone, held, starts, strict=True))
        for stage, ops in enumerate(rows[tick]):
            if undone[stage] and (longer or len(ops) < most):
                out.append(Placed(tick, stage, undone[stage].popleft()))
                held[stage] -= 1
        tick += 1
    return _schedule(name, route, out)


def _delay_weights(order: Sequence[Op], delay: int) -> list[Op]:
    """The order with W after every B, `delay` micro-batches later."""
    out: list[Op] = []
    for op in order:
        out.append(op)
        if op.kind == "B" and op.microbatch >= delay:
            out.append(Op("W", op.microbatch - delay))
    num_microbatches = sum(op.kind == "B" for op in order)
    return out + [Op("W", i) for i in range(max(0, num_microbatches - delay), num_microbatches)]


def _alternate(forwards: Sequence[Op], backwards: Sequence[Op], lead: int) -> list[Op]:
    """`lead` forwards, then backwards and forwards in turn until both are done."""
    pairs = itertools.zip_longest(backwards, forwards[lead:])
    return [*forwards[:lead], *(op for pair in pairs for op in pair if op is not None)]


def _schedule(name: str, route: tuple[int, ...], placed: Sequence[Placed], slots: int | None = None) -> Schedule:
    """A table from where its ops stand; without `slots`, with as many as it needs."""
    num_ticks = max((at.tick for at in placed), default=-1) + 1
    rows: list[list[list[Op]]] = [[[] for _ in range(max(route) + 1)] for _ in range(num_ticks)]
    for tick, stage, op in sorted(placed, key=lambda at: KINDS.index(at.op.kind)):
        rows[tick][stage].append(op)
    ticks: Ticks = tuple(tuple(tuple(ops) for ops in row) for row in rows)
    num_microbatches = max((at.op.microbatch for at in placed), default=-1) + 1
    return Schedule(name, route, num_microbatches, max(held_in(ticks), default=0) if slots is None else slots, ticks)


def _counts(num_stages: int, num_microbatches: int) -> tuple[int, int]:
    for name, count in (("stages", num_stages), ("micro-batches", num_microbatches)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"a schedule needs a whole number of {name}, 1 or more: not {count!r}")
    return num_stages, num_microbatches


def _chunks(num_stages: int, num_chunks: int) -> int:
    if isinstance(num_chunks, bool) or not isinstance(num_chunks, int) or num_chunks < 1:
        raise ValueError(f"{num_stages} stages need a whole number of chunks, 1 or more: not {num_chunks!r}")
    return num_chunks


def _lead(lead: int) -> int:
    if lead not in (1, 2):
        raise ValueError(f"lead={lead!r}: 2 fills every tick, 1 is the papers' order with about half the memory")
    return lead
