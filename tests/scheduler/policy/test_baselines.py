"""The policies that ours is compared with; experiments/scheduling.py holds them against what was published."""

from cjax.scheduler.policy.baselines import Tiresias, fifo, optimus
from cjax.scheduler.policy.job import Job, Speed, SpeedTable, size_of

ONE = SpeedTable([Speed(1, 1.0)])
NODES = {"a": 4, "b": 4}


def test_fifo_goes_by_submission_and_lets_small_ones_by() -> None:
    jobs = [
        Job("third", ONE, submitted=3, asked=2),
        Job("first", ONE, submitted=1, asked=6),
        Job("second", ONE, submitted=2, asked=4),
    ]
    found = fifo(jobs, NODES, {}, 0.0)
    assert {name: size_of(placement) for name, placement in found.items()} == {"first": 6, "third": 2}
    assert fifo(jobs[:2], NODES, found, 60.0) == found  # nobody moves
    assert "second" in fifo([jobs[2]], NODES, {}, 120.0)


def test_tiresias_sends_who_had_much_behind_who_had_little() -> None:
    policy = Tiresias(threshold=100.0)
    old, new = Job("old", ONE, asked=8), Job("new", ONE, asked=4)
    found = policy([old, new], NODES, {}, 0.0)
    assert set(found) == {"old"}  # it came first
    later = Job("old", ONE, asked=8, service=100.0)
    assert set(policy([later, new], NODES, found, 60.0)) == {"new"}
    assert set(policy([later], NODES, {}, 120.0)) == {"old"}


def test_optimus_gives_each_device_to_whose_end_it_brings_nearest() -> None:
    table = SpeedTable([Speed(n, n**0.5) for n in range(1, 9)])
    jobs = [Job("long", table, work_left=1000.0), Job("short", table, work_left=10.0), Job("fixed", ONE, work_left=1e6)]
    found = optimus(jobs, NODES, {}, 0.0)
    assert {name: size_of(placement) for name, placement in found.items()} == {"long": 6, "short": 1, "fixed": 1}
    assert optimus(jobs, NODES, found, 60.0) == found
    many = [Job(str(n), ONE, work_left=1.0) for n in range(10)]
    assert len(optimus(many, NODES, {}, 0.0)) == 8


def test_optimus_gives_no_device_that_brings_an_end_no_nearer() -> None:
    slower = SpeedTable([Speed(1, 10.0), Speed(2, 9.0)])
    found = optimus([Job("job", slower, work_left=100.0)], NODES, {}, 0.0)
    assert size_of(found["job"]) == 1


def test_what_somebody_holds_is_not_given_and_the_emptiest_node_comes_first() -> None:
    held = {"old": {"b": (0, 2)}}
    jobs = [Job("old", ONE, asked=2), Job("new", ONE, submitted=1, asked=3), Job("last", ONE, submitted=2, asked=3)]
    found = fifo(jobs, {"a": 3, "b": 4}, held, 0.0)
    assert found == held | {"new": {"a": (0, 1, 2)}}
    assert fifo([jobs[0], Job("new", ONE, asked=4)], {"a": 3, "b": 4}, held, 0.0)["new"] == {"a": (0, 1, 2), "b": (1,)}
    assert fifo([Job("new", ONE, asked=2)], {"a": 1, "b": 2}, {}, 0.0) == {"new": {"b": (0, 1)}}
