"""Laws of the goodput policy, on random clusters; and its sums beside those of a solver."""

import dataclasses
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduler.policy.clusters import clusters
from scipy.optimize import Bounds, LinearConstraint, milp

from cjax.scheduler.policy import choose
from cjax.scheduler.policy.baselines import free_devices
from cjax.scheduler.policy.goodput import allocate, standing, total
from cjax.scheduler.policy.job import Allocation, Job, Nodes, Placement, Speed, SpeedTable, size_of
from cjax.scheduler.policy.packing import counted, fits, rooms
from cjax.scheduler.policy.worth import Worth, worth_of

Cluster = tuple[list[Job], Nodes, dict[str, Placement]]
LAW = settings(max_examples=30, deadline=None)


def worths_of(jobs: list[Job], nodes: Nodes, current: Allocation) -> list[Worth]:
    return [worth_of(job, size_of(current.get(job.name)), rooms(nodes)) for job in jobs]


@LAW
@given(clusters())
def test_no_device_is_given_twice_and_ranges_are_kept(cluster: Cluster) -> None:
    jobs, nodes, current = cluster
    given_ = allocate(jobs, nodes, current, 0.0)
    devices = [(node, number) for placement in given_.values() for node, ns in placement.items() for number in ns]
    assert len(devices) == len(set(devices))
    assert all(0 <= number < nodes[node] for node, number in devices)
    of = {job.name: job for job in jobs}
    for name, placement in given_.items():
        job, size = of[name], size_of(placement)
        assert size in job.speeds.sizes
        assert job.least <= size <= (job.most or size)
        assert len(placement) == 1 or all(len(ns) == nodes[n] == max(nodes.values()) for n, ns in placement.items())


@LAW
@given(clusters(), st.booleans())
def test_what_changes_pays_for_its_restarts(cluster: Cluster, is_small: bool) -> None:
    jobs, nodes, current = cluster
    with mock.patch.object(choose, "MOST_CHOICES", choose.MOST_CHOICES if is_small else 0):
        given_ = allocate(jobs, nodes, current, 0.0)
    worths = worths_of(jobs, nodes, current)
    allowed = {w.job.name for w in worths if w.held in w.sizes}
    kept = {name: placement for name, placement in current.items() if name in allowed}
    if len(kept) == len(current):
        assert total(worths, given_, current) >= total(worths, kept, current) * (1 - 1e-9)
    for worth in worths:  # who grows gains by it, restart and all
        size = size_of(given_.get(worth.job.name))
        if size > worth.held and worth.held in worth.sizes:
            assert worth.at(size) > worth.at(worth.held)


@LAW
@given(clusters())
def test_nobody_waits_beside_free_devices(cluster: Cluster) -> None:
    jobs, nodes, current = cluster
    given_ = allocate(jobs, nodes, current, 0.0)
    free = [len(devices) for devices in free_devices(nodes, given_.values()).values()]
    whole = max(nodes.values())
    for worth in worths_of(jobs, nodes, current):
        if worth.job.name not in given_:
            for size in worth.sizes[1:]:
                assert free.count(whole) < size // whole if size >= whole else max(free) < size


@LAW
@given(clusters())
def test_who_waited_very_long_runs(cluster: Cluster) -> None:
    jobs, nodes, current = cluster
    for index, worth in enumerate(worths_of(jobs, nodes, current)):
        if any(fits(counted([size]), rooms(nodes)) for size in worth.sizes[1:]):
            patient = list(jobs)
            patient[index] = dataclasses.replace(worth.job, waited=1e12)
            assert worth.job.name in allocate(patient, nodes, current, 0.0)


@LAW
@given(clusters())
def test_the_same_facts_again_change_nothing_in_the_end(cluster: Cluster) -> None:
    jobs, nodes, current = cluster
    for _ in range(4):
        before, current = current, allocate(jobs, nodes, current, 0.0)
        if current == before:
            return
    pytest.fail("the allocation goes on changing")


def test_a_long_job_ends_although_short_ones_never_cease() -> None:
    """One device, and every minute a job comes that takes a minute."""
    one = SpeedTable([Speed(1, 1.0)])
    left, waited, current = 6 * 3600.0, 0.0, {}
    for minute in range(60 * 24 * 7):
        jobs = [Job("long", one, work_left=left, waited=waited), Job(f"short{minute}", one, work_left=60.0)]
        current = allocate(jobs, {"node": 1}, current, 60.0 * minute)
        left, waited = (left - 60, waited) if "long" in current else (left, waited + 60)
        if left <= 0:
            return
    pytest.fail(f"{left / 3600:.1f} hours are left after a week")


def test_a_growth_that_the_restart_eats_is_left_alone() -> None:
    table = SpeedTable([Speed(1, 1.0), Speed(2, 1.05), Speed(4, 1.9)])
    job = Job("job", table, work_left=1e5, restart=30.0)
    held = {"job": {"node": (0,)}}
    assert allocate([dataclasses.replace(job, most=2)], {"node": 4}, held, 0.0) == held
    assert size_of(allocate([dataclasses.replace(job, most=2, restart=1.0)], {"node": 4}, held, 0.0)["job"]) == 2
    assert size_of(allocate([job], {"node": 4}, held, 0.0)["job"]) == 4
    # Near its end, the same growth does not pay any more.
    assert allocate([dataclasses.replace(job, work_left=60.0)], {"node": 4}, held, 0.0) == held


def test_nobody_moves_for_what_is_worth_less_than_the_move() -> None:
    one, four = SpeedTable([Speed(1, 1.0)]), SpeedTable([Speed(4, 1.0)])
    jobs = [Job(name, one, work_left=1e3, restart=300.0) for name in "ab"]
    held = {"a": {"x": (0,)}, "b": {"y": (0,)}}
    nodes = {"x": 4, "y": 4}
    assert allocate([*jobs, Job("c", four, work_left=1e6, least=4)], nodes, held, 0.0) == held
    assert "c" in allocate([*jobs, Job("c", four, work_left=1e3, least=4)], nodes, held, 0.0)
    # Beside who stays, there is room for who is small enough.
    more = allocate([*jobs, Job("c", four, work_left=1e6, least=4), Job("d", one, work_left=1e6)], nodes, held, 0.0)
    assert set(more) == {"a", "b", "d"} and more["a"] == held["a"]


def test_greedy_steps_alone_do_not_undo_what_is_better() -> None:
    """A step up the steepest hull leaves no room for two that together are worth more, and that run already."""
    jobs = [Job(name, SpeedTable([Speed(2, 2.0)]), work_left=1e6) for name in "ab"]
    steep = Job("c", SpeedTable([Speed(3, 4.0)]), work_left=1e6, restart=0.0)
    held = {"a": {"x": (0, 1)}, "b": {"x": (2, 3)}}
    with mock.patch.object(choose, "MOST_CHOICES", 0):
        assert allocate([*jobs, steep], {"x": 4}, held, 0.0) == held


def test_who_finds_no_room_at_its_best_size_is_not_cut_back_to_a_slow_one() -> None:
    """Worth most at 8, little at 4: beside a job that has the only node of 8, one device is better than four."""
    steep = Job("steep", SpeedTable([Speed(1, 1.0), Speed(4, 0.5), Speed(8, 30.0)]), work_left=1e6, restart=0.0)
    whole = Job("whole", SpeedTable([Speed(8, 100.0)]), work_left=1e6, restart=0.0)
    for held in ({}, {"whole": {"y": tuple(range(8))}, "steep": {"x": (0,)}}):
        with mock.patch.object(choose, "MOST_CHOICES", 0):
            found = allocate([steep, whole], {"x": 4, "y": 8}, held, 0.0)
        assert (size_of(found["whole"]), size_of(found["steep"])) == (8, 1)


def test_shorter_jobs_come_first_and_unknown_ones_by_what_they_have_behind_them() -> None:
    one = SpeedTable([Speed(1, 1.0)])
    known = [Job("long", one, work_left=1e4), Job("short", one, work_left=1e2)]
    assert set(allocate(known, {"node": 1}, {}, 0.0)) == {"short"}
    unknown = [Job("old", one, work_done=1e4), Job("new", one)]
    assert set(allocate(unknown, {"node": 1}, {}, 0.0)) == {"new"}


def test_noise_says_what_a_larger_batch_is_worth() -> None:
    table = SpeedTable([Speed(1, 100.0, 32), Speed(4, 100.0, 32), Speed(4, 300.0, 256)])
    job = Job("job", table, batch=32, work_left=1e6)
    assert size_of(allocate([job], {"node": 4}, {}, 0.0)["job"]) == 1
    assert size_of(allocate([dataclasses.replace(job, noise=1e4)], {"node": 4}, {}, 0.0)["job"]) == 4
    assert table.best(4, 32, 0.0).batch == 32
    assert table.best(4, 32, 1e4).batch == 256


def test_a_node_that_is_gone_takes_its_jobs_devices_along() -> None:
    one = SpeedTable([Speed(1, 1.0)])
    current = {"a": {"gone": (0,)}, "b": {"node": (1,)}}
    assert standing(current, {"node": 2}) == {"b": {"node": (1,)}}
    found = allocate([Job("a", one, work_left=1.0), Job("b", one, work_left=1.0)], {"node": 2}, current, 0.0)
    assert found == {"a": {"node": (0,)}, "b": {"node": (1,)}}


def test_contradictions_are_refused() -> None:
    one = SpeedTable([Speed(1, 1.0)])
    with pytest.raises(ValueError, match="names of their own"):
        allocate([Job("a", one), Job("a", one)], {"node": 1}, {}, 0.0)
    with pytest.raises(ValueError, match="both hold device 0 of node"):
        allocate([Job("a", one), Job("b", one)], {"node": 1}, {"a": {"node": (0,)}, "b": {"node": (0,)}}, 0.0)
    with pytest.raises(ValueError, match="Speed\\(devices=1"):
        SpeedTable([])
    with pytest.raises(ValueError, match="above 0 samples/s"):
        Speed(1, float("nan"))
    with pytest.raises(ValueError, match="on 2 devices; there are 1"):
        one.best(2, 1.0, 0.0)


# -- beside a solver --------------------------------------------------------------------------------------------------
def solved(worths: list[Worth], num_nodes: int, per_node: int) -> float:
    """The largest sum, by HiGHS: each job a size, small sizes on one node each, large ones on whole nodes."""
    small = [
        (j, s, n)
        for j, w in enumerate(worths)
        for s in range(1, len(w.sizes))
        for n in range(num_nodes)
        if w.sizes[s] < per_node
    ]
    large = [(j, s) for j, w in enumerate(worths) for s in range(1, len(w.sizes)) if w.sizes[s] >= per_node]
    width = len(small) + len(large)
    values = [worths[j].values[s] for j, s, *_ in [*small, *large]]
    once = np.zeros((len(worths), width + num_nodes))
    room = np.zeros((num_nodes, width + num_nodes))
    whole = np.zeros((1, width + num_nodes))
    for column, (j, s, *n) in enumerate([*small, *large]):
        once[j, column] = 1
        if n:
            room[n[0], column] = worths[j].sizes[s]
        else:
            whole[0, column] = worths[j].sizes[s] // per_node
    for n in range(num_nodes):  # 1 where a node is given away whole
        room[n, width + n] = per_node
        whole[0, width + n] = -1
    found = milp(
        -np.array([*values, *[0.0] * num_nodes]),
        constraints=[LinearConstraint(once, ub=1), LinearConstraint(room, ub=per_node), LinearConstraint(whole, ub=0)],
        integrality=np.ones(width + num_nodes),
        bounds=Bounds(0, 1),
    )
    return -found.fun


def random_jobs(random: np.random.Generator, num_jobs: int, num_nodes: int, per_node: int) -> list[Job]:
    """Speeds that grow like a power of the devices, give or take a third, and lengths over three decades."""
    sizes = [*range(1, per_node), *(per_node * n for n in range(1, num_nodes + 1))]
    jobs = []
    for number in range(num_jobs):
        power = random.uniform(0.3, 1.0)
        speeds = [Speed(size, size**power * float(np.exp(random.uniform(-0.3, 0.3)))) for size in sizes]
        jobs.append(Job(f"job{number}", SpeedTable(speeds), work_left=float(10 ** random.uniform(2, 5))))
    return jobs


@pytest.mark.parametrize("seed", range(24))
def test_sums_are_within_2_percent_of_the_optimum(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_nodes, per_node = int(random.integers(1, 5)), int(random.choice([2, 4, 8]))
    jobs = random_jobs(random, int(random.integers(2, 9)), num_nodes, per_node)
    nodes = {f"node{n}": per_node for n in range(num_nodes)}
    current = allocate(jobs[::2], nodes, {}, 0.0)  # half of them are there before the others come
    worths = worths_of(jobs, nodes, current)
    best = solved(worths, num_nodes, per_node)
    found = sum(worth.at(size_of(allocate(jobs, nodes, current, 0.0).get(worth.job.name))) for worth in worths)
    assert 0.98 * best <= found <= best * (1 + 1e-6)
