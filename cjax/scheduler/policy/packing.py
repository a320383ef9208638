"""Sizes onto nodes: whether they go, and which devices each job gets."""

from collections import Counter
from collections.abc import Iterable, Mapping

from cjax.scheduler.policy.baselines import free_devices
from cjax.scheduler.policy.job import Allocation, Nodes, Placement, size_of


def fits(sizes: Mapping[int, int], nodes: Mapping[int, int]) -> bool:
    """Whether jobs of these sizes (size: how many) go onto nodes of these sizes (devices: how many).

    Jobs as large as the largest node or larger take whole ones of these; each of the others goes onto one node, largest
    first, into the tightest room that is left.
    """
    per_node = max(nodes)
    free = dict(nodes)
    whole = sum(size // per_node * count for size, count in sizes.items() if size >= per_node)
    free[per_node] -= whole
    if free[per_node] < 0:
        return False
    for size in sorted((size for size in sizes if size < per_node), reverse=True):
        count = sizes[size]
        while count:
            room = min((room for room, number in free.items() if room >= size and number), default=0)
            if not room:
                return False
            moved = min(count, free[room])
            free[room] -= moved
            free[room - size] = free.get(room - size, 0) + moved
            count -= moved
    return True


def place(sizes: Mapping[str, int], nodes: Nodes, current: Allocation) -> dict[str, Placement]:
    """Devices for jobs of sizes that `fits`: who keeps its size stays where it is, unless room has to be made."""
    per_node = max(nodes.values())
    stays = {
        name: current[name]
        for name, size in sizes.items()
        if size and size_of(current.get(name)) == size and _is_tight(current[name], nodes, per_node)
    }
    while (found := place_beside(sizes, nodes, stays)) is None:
        # Small jobs lie so that no room is left for the others: those on the emptiest node among theirs go elsewhere.
        used = Counter[str]()
        for placement in stays.values():
            if size_of(placement) < per_node:
                used.update({node: len(devices) for node, devices in placement.items()})
        node = min(used, key=lambda node: (used[node], node))
        stays = {name: p for name, p in stays.items() if node not in p or size_of(p) >= per_node}
    return found


def _is_tight(placement: Placement, nodes: Nodes, per_node: int) -> bool:
    """Whether it is of one node or of whole ones, all of them still there."""
    if any(node not in nodes or max(devices) >= nodes[node] for node, devices in placement.items()):
        return False
    return len(placement) == 1 or all(len(devices) == nodes[node] == per_node for node, devices in placement.items())


def place_beside(sizes: Mapping[str, int], nodes: Nodes, stays: Allocation) -> dict[str, Placement] | None:
    """All of them, beside those that stay where they are; None if some do not go."""
    per_node = max(nodes.values())
    free = free_devices(nodes, stays.values())
    placed = dict(stays)
    waiting = sorted((name for name, size in sizes.items() if size and name not in stays), key=lambda n: -sizes[n])
    for name in waiting:
        size = sizes[name]
        if size >= per_node:
            empty = [node for node, devices in free.items() if len(devices) == per_node][: size // per_node]
            if len(empty) * per_node < size:
                return None
            placed[name] = {node: tuple(free[node]) for node in empty}
            for node in empty:
                free[node] = []
            continue
        node = min((node for node in free if len(free[node]) >= size), key=lambda n: len(free[n]), default=None)
        if node is None:
            return None
        placed[name] = {node: tuple(free[node][:size])}
        free[node] = free[node][size:]
    return placed


def rooms(nodes: Nodes) -> Counter[int]:
    """Nodes by their number of devices."""
    return Counter(nodes.values())


def counted(sizes: Iterable[int]) -> Counter[int]:
    """Jobs by their size."""
    return Counter(size for size in sizes if size)
