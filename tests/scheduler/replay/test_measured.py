"""Tables as they were published: times between what was measured, and none beyond it."""

from pathlib import Path

import pytest

from cjax.scheduler.replay.measured import (
    MOST_DEVICES,
    MeasuredModel,
    StepTimes,
    Validation,
    Way,
    least_turn,
    packed,
    rows_of,
)

from .logs import step_seconds, write_tables


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tables(tmp_path) / "bert"


def test_times_lie_between_those_that_were_measured(folder: Path) -> None:
    times = StepTimes(folder)
    for shape, rows in (((1,), 4), ((4,), 6), ((4, 4), 12), ((1, 3), 3), ((3, 1), 3), ((4, 4, 4), 5)):
        assert times(shape, rows) == pytest.approx(step_seconds(shape, rows)), (shape, rows)
    for shape, rows in (((1,), 17), ((4,), 1), ((4, 4, 4), 40)):
        with pytest.raises(ValueError, match=f"around {sum(shape)} devices on {len(shape)} nodes with {rows} rows"):
            times(shape, rows)


def test_nodes_stand_in_a_ring() -> None:
    assert {least_turn(shape) for shape in ((1, 2, 3), (2, 3, 1), (3, 1, 2))} == {(1, 2, 3)}
    assert least_turn((1, 3, 2)) == (1, 3, 2), "the other way round it is another one"
    assert [packed(n, 4) for n in (3, 4, 6, 8)] == [(3,), (4,), (4, 2), (4, 4)]


def test_devices_wait_for_each_other_in_the_last_pass_alone(folder: Path) -> None:
    model = MeasuredModel(folder, epochs=2)
    step, sync = step_seconds((4,), 8)
    assert model.seconds((4,), Way(8, 0, 4)) == pytest.approx(step)
    assert model.seconds((4,), Way(8, 3, 4)) == pytest.approx(4 * (step - sync) + sync)


def test_ways_to_make_a_batch(folder: Path) -> None:
    model = MeasuredModel(folder, epochs=2)
    assert model.way(8, 1) == Way(8, 0, 1), "the base batch"
    assert model.way(16, 1) == Way(8, 1, 1), "of one pass nobody knows how noisy it is"
    assert model.way(64, 1) == Way(16, 3, 1) and model.way(64, 2) == Way(16, 1, 2)
    for number in (1, 2, 4):
        ways = model.ways(number)
        assert [way.batch for way in ways] == sorted(model.batches_of_ways(number).tolist())
        assert all(2 <= way.rows <= 16 and 8 <= way.batch <= 64 for way in ways)
    assert MeasuredModel(folder, epochs=2, fixed=16).ways(1) == (Way(8, 1, 1),)


def test_sizes_are_parts_of_a_node_and_whole_ones_that_were_measured(folder: Path) -> None:
    model = MeasuredModel(folder, epochs=2)
    assert model.sizes({4: 3}) == [1, 2, 3, 4, 8, 12]
    assert model.most_devices == 32 and model.sizes({4: 40})[-1] == 32
    model.largest_batch = 1024
    assert model.most_devices > MOST_DEVICES and model.sizes({4: 40})[-1] == MOST_DEVICES


def test_gradients_and_steps_by_epoch_and_batch(folder: Path) -> None:
    found = Validation.read(folder, 2)
    assert found.batches == (8, 64) and found.progress.tolist() == [100.0, 200.0]
    assert found.gradient(36, 0) == pytest.approx((1.0, 18.0)), "half the way between 4 and 32"
    assert found.steps_left(8, 0) == 100.0 and found.steps_left(64, 0) == pytest.approx((210 - 101) / 8)
    assert found.steps_left(8, 1) == found.steps_left(64, 1) == 1.0, "the last epoch"
    with pytest.raises(ValueError, match="has 2 epochs, and 3 are to be trained"):
        Validation.read(folder, 3)
    with pytest.raises(FileNotFoundError, match="no validation-BATCH.csv"):
        Validation.read(folder.parent, 2)


def test_a_column_that_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,c\n1,2\n")
    assert rows_of(tmp_path / "x.csv", "c") == [{"a": "1", "c": "2"}]
    with pytest.raises(ValueError, match="has no column b; it needs a,b"):
        rows_of(tmp_path / "x.csv", "a,b")
