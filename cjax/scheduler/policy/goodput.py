"""The goodput policy: sizes that make the sum of all jobs' (goodput / work left)^power largest, if changes pay."""

from collections.abc import Sequence

from cjax.scheduler.policy.choose import choose, steps_of
from cjax.scheduler.policy.job import Allocation, Job, Nodes, Placement, size_of
from cjax.scheduler.policy.packing import counted, fits, place, place_beside, rooms
from cjax.scheduler.policy.worth import RULES, Rules, Worth, worth_of


def allocate(
    jobs: Sequence[Job], nodes: Nodes, current: Allocation, now: float, rules: Rules = RULES
) -> dict[str, Placement]:
    """Who gets which devices from now on; who is not in it waits.

    Args:
        jobs: all that have not ended.
        nodes: devices of each node.
        current: who holds what.
        now: seconds; what is known of jobs says when that is, so that equal jobs get equal answers at any time.
        rules: the policy's constants.

    Raises:
        ValueError: two jobs have one name, or hold one device.

    >>> from cjax.scheduler.policy.job import Speed, SpeedTable
    >>> table = SpeedTable([Speed(1, 100.0), Speed(2, 190.0), Speed(4, 340.0)])
    >>> jobs = [Job("long", table, work_left=1e6), Job("short", table, work_left=1e4)]
    >>> found = allocate(jobs, {"a": 4, "b": 2}, current={}, now=0.0)
    >>> found["long"], found["short"]
    ({'b': (0, 1)}, {'a': (0, 1, 2, 3)})
    """
    del now
    if len({job.name for job in jobs}) < len(jobs):
        raise ValueError(f"jobs have names of their own, and these do not: {', '.join(job.name for job in jobs)}")
    if not jobs or not nodes:
        return {}
    current = standing(current, nodes)
    room = rooms(nodes)
    worths = [worth_of(job, size_of(current.get(job.name)), room, rules) for job in jobs]
    there = {worth.job.name: worth.held for worth in worths if worth.held in worth.sizes[1:]}
    steps = steps_of(worths)
    options = [place(choose(worths, room, steps=steps), nodes, current)]
    if fits(counted(there.values()), room):
        stayed = place(choose(worths, room, there, steps), nodes, current)
        options.append(stayed)
        if any(size_of(stayed[name]) == size and stayed[name] != current[name] for name, size in there.items()):
            # Room for more is made by moving somebody, which may cost more than it brings.
            options.append(_beside({name: current[name] for name in there}, worths, nodes))
    return max(options, key=lambda allocation: total(worths, allocation, current))


def _beside(kept: Allocation, worths: Sequence[Worth], nodes: Nodes) -> dict[str, Placement]:
    """Who waits, where there is room without moving anybody: who is worth most a device first."""
    placed = dict(kept)
    waiting = [
        (worth.values[at] / size, worth.values[at], worth.job.name, size)
        for worth in worths
        for at, size in enumerate(worth.sizes)
        if size and worth.job.name not in kept
    ]
    for _, _, name, size in sorted(waiting, reverse=True):
        if name not in placed:
            held = {other: size_of(placement) for other, placement in placed.items()}
            placed = place_beside(held | {name: size}, nodes, placed) or placed
    return placed


def standing(current: Allocation, nodes: Nodes) -> dict[str, Placement]:
    """What is left of an allocation: who is on a node that is gone, or has become smaller, holds nothing any more.

    Raises:
        ValueError: two jobs hold one device.
    """
    holders: dict[tuple[str, int], str] = {}
    for name, placement in current.items():
        for device in ((node, number) for node, numbers in placement.items() for number in numbers):
            if holders.setdefault(device, name) != name:
                raise ValueError(f"{holders[device]} and {name} both hold device {device[1]} of {device[0]}")
    return {
        name: placement
        for name, placement in current.items()
        if placement and all(max(numbers) < nodes.get(node, 0) for node, numbers in placement.items())
    }


def total(worths: Sequence[Worth], allocation: Allocation, current: Allocation) -> float:
    """The sum that an allocation makes; who is moved at the same size pays for it."""
    found = 0.0
    for worth in worths:
        name, size = worth.job.name, size_of(allocation.get(worth.job.name))
        found += worth.at(size)
        if size and size == worth.held and allocation[name] != current[name]:
            found -= worth.at(size) - worth.moved
    return found
