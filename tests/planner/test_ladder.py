import re

import pytest

from cjax.plan import Plan
from cjax.planner.ladder import LADDER, candidates, first_fitting


def bytes_of(plan: Plan) -> int:
    """A model of 100, to which each remedy on the ladder brings something."""
    parts = {0: 100, 1: 80, 2: 60, 3: 40}[plan.zero_stage] // plan.microbatches
    return parts - {"none": 0, "dots": 5, "block": 10}[plan.remat]


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        (100, "data=-1"),
        (99, "zero=1"),
        (60, "zero=2"),
        (59, "zero=3"),
        (36, "zero=3 remat=dots"),
        (31, "zero=3 remat=block"),
        (10, "microbatches=2 zero=3 remat=block"),
        (0, "microbatches=4 zero=3 remat=block"),
    ],
)
def test_the_first_that_fits_is_the_cheapest(limit: int, wanted: str) -> None:
    plan, size, fits = first_fitting(64, 8, limit, bytes_of)
    assert (str(plan), fits) == (wanted, True) and size == bytes_of(plan) <= limit


def test_where_nothing_fits_the_leanest_is_given_and_said_not_to() -> None:
    plan, size, fits = first_fitting(64, 8, -100, bytes_of)
    assert (plan.zero_stage, plan.remat, plan.microbatches, fits) == (3, "block", 8, False)
    assert size == bytes_of(plan)


def test_candidates_are_those_whose_micro_batches_the_devices_share() -> None:
    assert [plan.microbatches for plan in candidates(24, 8)] == [1] * 7  # 24 rows: 3 each, which 2 does not divide
    assert max(plan.microbatches for plan in candidates(1024, 8)) == 64
    assert len(list(candidates(1024, 8))) == len(LADDER)
    assert list(candidates(6, 8)) == []


def test_one_device_has_nothing_to_shard() -> None:
    assert {plan.zero_stage for plan in candidates(64, 1)} == {0}


@pytest.mark.parametrize(("rows", "num_devices", "said"), [(6, 8, ["8 rows", "[:6]"]), (20, 8, ["16 rows", "[:8]"])])
def test_rows_that_the_devices_cannot_share_are_refused(rows: int, num_devices: int, said: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"all {num_devices} devices, and {rows} rows")) as raised:
        first_fitting(rows, num_devices, 100, bytes_of)
    assert all(text in str(raised.value) for text in said)
