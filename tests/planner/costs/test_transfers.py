"""Who is in a group, what it moves, and how fast: against values by hand, and laws that hold for any."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from cjax.planner.costs.transfers import Receipt, group_bandwidth, group_of
from cjax.planner.hardware import Hardware

HOSTS = Hardware("card", 512, 8, 1, host_bandwidth=400e9, network_bandwidth=50e9, adapters_per_host=8)
POWERS = some.integers(0, 8).map(lambda exponent: 2**exponent)


def hosts(**others: float) -> Hardware:
    return Hardware(**{**vars(HOSTS), **others})


@pytest.mark.parametrize(
    ("size", "stride", "gb"),
    [
        (8, 1, 400),  # one host: its links
        (2, 4, 400),
        (64, 1, 400),  # eight members on each of 8 hosts: eight adapters
        (16, 2, 200),  # four on each
        (8, 8, 50),  # one on each
        (4, 64, 50),
        (1, 1, 400),
    ],
)
def test_a_group_has_an_adapter_for_each_member_on_a_host(size: int, stride: int, gb: float) -> None:
    found = group_of(HOSTS, size, stride)
    rate = float(np.minimum(found.fast, found.slow))
    assert rate == pytest.approx(gb * 1e9) or (size == 1 and rate == np.inf)


def test_members_that_share_an_adapter_share_its_rate() -> None:
    assert group_bandwidth(hosts(adapters_per_host=4), 64, 1) == pytest.approx(200e9)
    assert group_bandwidth(hosts(adapters_per_host=4), 8, 8) == pytest.approx(25e9)


def test_software_that_uses_one_adapter_has_one() -> None:
    assert float(group_of(HOSTS, 64, 1, rings=1).slow) == pytest.approx(50e9)


def test_gradients_over_eight_hosts_take_a_tenth_of_what_one_adapter_would() -> None:
    """GPT-2 XL's 1.56 billion gradients, reduced and gathered in float32 on 64 H100."""
    h100 = hosts(host_bandwidth=450e9)
    bytes_ = 2 * 4 * 1.558e9 * 63 / 64
    moved = Receipt.over(group_of(h100, 64, 1), "reduce-scatter", np.array([bytes_]), 1.0)
    assert moved.least[0] == pytest.approx(0.0307, rel=0.01)


def test_seconds_by_hand() -> None:
    group = group_of(HOSTS, 32, 2)  # 4 members on each of 8 hosts
    moved = Receipt.over(group, "all-gather", np.array([8e9]), 3.0)
    # 8 GB by 4 adapters of 50 GB/s, of which half is reached; three times 3 members and 7 hosts.
    seconds = moved.seconds(links=0.8, adapters=0.5, latency=1e-3, hop=1e-2)
    assert seconds[0] == pytest.approx(8 / (200 * 0.5) + 3 * 3e-3 + 3 * 7e-2)
    tree = Receipt.over(group, "all-reduce", np.array([8e9]), 1.0)
    assert tree.hops[0] == 2 * 3


def test_a_group_of_one_moves_nothing() -> None:
    moved = Receipt.over(group_of(HOSTS, np.array([1, 2]), 1), "all-reduce", np.array([1e9, 1e9]), 1.0)
    assert moved.bytes.tolist() == [0, 1e9]
    assert moved.seconds(1.0, 1.0, 1e-6, 1e-6)[0] == 0


@settings(deadline=None, max_examples=60)
@given(POWERS, POWERS, some.floats(1.0, 8.0), some.sampled_from(["host_bandwidth", "network_bandwidth"]))
def test_more_bandwidth_is_never_slower(size: int, stride: int, more: float, name: str) -> None:
    faster = hosts(**{name: more * getattr(HOSTS, name)})
    assert group_bandwidth(faster, size, stride) >= group_bandwidth(HOSTS, size, stride)


@settings(deadline=None, max_examples=60)
@given(POWERS, POWERS)
def test_members_fill_hosts(size: int, stride: int) -> None:
    found = group_of(HOSTS, size, stride)
    assert 1 <= found.on_host <= min(size, 8)
    assert found.on_host * found.hosts >= size
    assert (found.hosts == 1) == np.isinf(found.slow)


def test_threads_that_meet_at_once_pay_once() -> None:
    group = group_of(HOSTS, 8, 1)
    each = Receipt.over(group, "all-reduce", np.array([8e9]), 3.0)
    together = Receipt.over(group, "all-reduce", np.array([8e9]), 3.0, at_once=True)
    assert each.members[0] == 3 * (group.on_host - 1) and together.members[0] == 3
    assert together.bytes == each.bytes
