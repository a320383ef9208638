"""Sizes onto nodes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cjax.scheduler.policy.job import size_of
from cjax.scheduler.policy.packing import counted, fits, place, rooms

NODES = {"a": 4, "b": 4, "c": 2}


def test_small_jobs_share_nodes_and_large_ones_take_whole_ones() -> None:
    assert fits(counted([3, 3, 2, 1, 1]), rooms(NODES))
    assert not fits(counted([3, 3, 3]), rooms(NODES))  # 9 of 10 devices, and no room for the third
    assert fits(counted([8, 2]), rooms(NODES))
    assert not fits(counted([8, 3]), rooms(NODES))
    assert not fits(counted([12]), rooms(NODES))
    assert fits(counted([1, 1]), {4: 0, 2: 1}) and not fits(counted([3]), {4: 0, 2: 1})


def test_who_keeps_its_size_stays_where_it_is() -> None:
    current = place({"x": 2, "y": 1}, NODES, {})
    after = place({"x": 2, "y": 1, "z": 4}, NODES, current)
    assert {name: after[name] for name in current} == current
    assert size_of(after["z"]) == 4


def test_small_jobs_move_where_a_large_one_needs_their_node() -> None:
    current = {"x": {"a": (0,)}, "y": {"b": (3,)}}
    after = place({"x": 1, "y": 1, "z": 8}, {"a": 4, "b": 4, "c": 4}, current)
    assert size_of(after["z"]) == 8
    assert len({node for name in ("x", "y") for node in after[name]}) == 1
    assert sum(after[name] == current[name] for name in ("x", "y")) == 1  # and only the one that has to


def test_who_lies_over_parts_of_nodes_is_put_together() -> None:
    after = place({"x": 2}, NODES, {"x": {"a": (0,), "b": (0,)}})
    assert len(after["x"]) == 1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([1, 1, 2, 3, 4, 8]), max_size=8), st.lists(st.sampled_from([1, 2, 3, 4]), max_size=6))
def test_what_fits_is_placed_whatever_is_in_the_way(sizes: list[int], others: list[int]) -> None:
    nodes = {"a": 4, "b": 4, "c": 4, "d": 2}
    if not (fits(counted(sizes), rooms(nodes)) and fits(counted(others), rooms(nodes))):
        return
    current = place({f"job{n}": size for n, size in enumerate(others)}, nodes, {})
    wanted = {f"job{n}": size for n, size in enumerate(sizes)}
    placed = place(wanted, nodes, current)
    devices = [(node, d) for placement in placed.values() for node, ds in placement.items() for d in ds]
    assert {name: size_of(p) for name, p in placed.items()} == wanted
    assert len(devices) == len(set(devices)) and all(d < nodes[node] for node, d in devices)
