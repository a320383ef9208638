import time

import pytest

from cjax.train.meter import Meter

from .conftest import SmallProgram


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_rates_leave_out_compilation_and_pauses(clock: list[float]):
    meter = Meter(SmallProgram(), sequence=16)
    clock[0] += 60  # compiling
    assert "tokens/s" not in meter.tick(samples=8)
    clock[0] += 2
    assert meter.tick(samples=16)["tokens/s"] == pytest.approx(8 * 16 / 2)
    meter.pause()
    clock[0] += 500  # evaluating
    assert "tokens/s" not in meter.tick(samples=24)
    clock[0] += 2
    assert meter.tick(samples=32)["tokens/s"] == pytest.approx(8 * 16 / 2)
    assert meter.step_seconds == (2, 2)


def test_mfu_is_what_the_operations_of_a_step_take_of_the_peak(clock: list[float], monkeypatch):
    program = SmallProgram()
    peak = 2e6

    class Known:
        num_devices = 3

        def matmul_flops(self, dtype: str) -> float:
            assert dtype == "float32"
            return peak

    monkeypatch.setattr("cjax.train.meter.hardware_of", lambda devices: Known())
    meter = Meter(program, None)
    meter.tick(4)
    clock[0] += 0.001
    facts = meter.tick(8)
    assert facts["mfu"] == pytest.approx(60 / (0.001 * 3 * peak))
    assert facts["samples/s"] == pytest.approx(4000)


def test_memory_is_the_compilers_where_the_device_says_nothing(clock: list[float]):
    assert Meter(SmallProgram(), None).tick(4)["memory"] == 24
