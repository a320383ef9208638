import pytest

from cjax.train.pace import MEASURED_BEHIND, Pace, best_interval


def expected_loss(interval: float, cost: float, between: float) -> float:
    """The share of time that goes into checkpoints and into steps repeated after failures, to first order."""
    return cost / interval + interval / (2 * between)


def test_the_interval_is_the_one_that_loses_least():
    best = best_interval(3.0, 40_000.0)
    for other in (best / 2, best * 0.9, best * 1.1, best * 2):
        assert expected_loss(best, 3.0, 40_000.0) < expected_loss(other, 3.0, 40_000.0)


def test_steps_are_as_they_were_said():
    assert [step for step in range(1, 13) if Pace(4, 1.0, 0).is_due(step)] == [4, 8, 12]
    assert not any(Pace(None, 1.0, 0).is_due(step) for step in range(100))


def test_auto_measures_first_and_then_follows_the_cost():
    pace = Pace("auto", 20_000.0, 50)
    assert not pace.is_due(50 + MEASURED_BEHIND - 1) and pace.is_due(50 + MEASURED_BEHIND)
    assert not pace.saved(60, cost=9.0, step_seconds=2.0), "which compiled"
    assert not pace.is_due(69) and pace.is_due(70)
    assert pace.saved(70, cost=1.0, step_seconds=2.0), "what they cost is news"
    assert pace.interval == 100 and not pace.is_due(169) and pace.is_due(170)
    assert not pace.saved(170, cost=4.0, step_seconds=2.0)
    assert pace.interval == 200 and not pace.is_due(369) and pace.is_due(370)


def test_an_interval_is_a_step_at_least():
    pace = Pace("auto", 1.0, 0)
    for step in (10, 20):
        pace.saved(step, cost=0.001, step_seconds=100.0)
    assert pace.interval == 1


@pytest.mark.parametrize("cost", [60.0, 1e6])
def test_what_costs_more_than_failures_is_not_done_all_the_time(cost: float):
    assert best_interval(cost, 100.0) == 100.0
