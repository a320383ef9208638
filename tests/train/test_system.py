import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from cjax.job.files import WholeLines
from cjax.train import fit
from cjax.train.readings import Cards, Host, Package
from cjax.train.system import HardwareLog, energy, said

from .conftest import SmallData, SmallProgram

psutil = pytest.importorskip("psutil", reason="the extra `hardware` is not installed")


def lines(folder: Path, name: str = "system.jsonl") -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


@pytest.fixture
def rapl(tmp_path: Path, monkeypatch) -> Path:
    """Two CPUs' counters, as the kernel shows them, and a part of one, which would be counted twice."""
    root = tmp_path / "powercap"
    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        (root / name).mkdir(parents=True)
        (root / name / "energy_uj").write_text("9000000\n")
        (root / name / "max_energy_range_uj").write_text("10000000\n")
        (root / name / "name").write_text("core" if name.count(":") > 1 else f"package-{name[-1]}")
    monkeypatch.setattr("cjax.train.readings.RAPL", root)
    return root


def test_a_run_leaves_what_its_hardware_did(tmp_path: Path, rapl: Path):
    class Slow(SmallData):
        def batches(self, start: int = 0):
            for step, batch in enumerate(super().batches(start)):
                time.sleep(0.02)
                if step == 5:
                    (rapl / "intel-rapl:1" / "energy_uj").write_text("4000000")  # 5 J, once around
                yield batch

    result = fit(SmallProgram(), Slow(), steps=10, folder=tmp_path / "run", hardware=0.05, evaluate_every=5)
    found = lines(tmp_path / "run")
    assert len(found[0]["devices"]) == 1 and found[0]["host"]
    readings = [line for line in found if "cpu_percent" in line]
    assert len(readings) >= 4 and readings[-1]["step"] == 10 and readings[0]["step"] == 0
    for line in readings:
        assert 0 < line["process_memory_bytes"] <= line["memory_total_bytes"]
        assert line["memory_used_bytes"] <= line["memory_total_bytes"]
    times = [line["time"] for line in readings]
    assert times == sorted(times) and abs(times[-1] - time.time()) < 60
    summary = found[-1]["summary"]
    assert summary == result.hardware and summary["steps"] == 10
    assert summary["cpu_joules"] == pytest.approx(5.0) and summary["cpu_joules_per_step"] == pytest.approx(0.5)
    assert summary["cpu_joules_per_sample"] == pytest.approx(5 / 40)
    assert not any(name.startswith("gpu") for name in summary), "there is none"
    page = (tmp_path / "run" / "report.html").read_text()
    assert "CPUs at work" in page and "0.5</td>" in page


def test_what_can_not_be_read_is_null_and_said_and_never_0(tmp_path: Path, monkeypatch):
    def refuse(*_: Any) -> Any:
        raise PermissionError

    monkeypatch.setattr("cjax.train.readings.RAPL", tmp_path / "none")
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    monkeypatch.setattr(psutil, "net_io_counters", refuse)
    host = Host()
    nulls = {name for name, value in host.read().items() if value is None}
    assert (
        nulls
        == set(host.unknown)
        == {
            "cpu_energy_joules",
            "disk_read_bytes_per_second",
            "disk_written_bytes_per_second",
            "network_received_bytes_per_second",
            "network_sent_bytes_per_second",
        }
    )
    assert "RAPL" in host.unknown["cpu_energy_joules"]


def test_rates_are_since_the_reading_before(monkeypatch):
    now, sent = [100.0], [1000]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr(psutil, "net_io_counters", lambda: types.SimpleNamespace(bytes_sent=sent[0], bytes_recv=0))
    host = Host()
    now[0], sent[0] = 104.0, 3000
    assert host.read()["network_sent_bytes_per_second"] == 500


def test_a_counter_of_energy_goes_round(rapl: Path):
    package = Package(rapl / "intel-rapl:0")
    first = package.joules()
    (rapl / "intel-rapl:0" / "energy_uj").write_text("1000000")
    assert package.joules() == pytest.approx(first + 2.0)
    (rapl / "intel-rapl:0" / "energy_uj").unlink()
    assert package.joules() is None


def test_the_platform_that_holds_the_cpus_is_not_added_to_them(rapl: Path):
    before = Host().read()["cpu_energy_joules"]
    (rapl / "intel-rapl:2").mkdir()
    for name, text in (("energy_uj", "5000000"), ("max_energy_range_uj", "10000000"), ("name", "psys\n")):
        (rapl / "intel-rapl:2" / name).write_text(text)
    assert Host().read()["cpu_energy_joules"] == before == pytest.approx(18.0)


def test_what_psutil_or_older_bindings_refuse_is_unknown(rapl: Path, monkeypatch):
    def refuse(*_: Any) -> Any:
        raise psutil.AccessDenied(1)

    monkeypatch.setattr(psutil.Process, "memory_info", refuse)
    assert "process_memory_bytes" in Host().unknown

    class Older(FakeNVML):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("nvmlGpm"):
                raise AttributeError(name)
            return super().__getattribute__(name)

    monkeypatch.setitem(sys.modules, "pynvml", Older())
    cards = Cards([gpu(3)])
    assert set(cards.unknown) == {"gpu3/memory_bandwidth_percent"} and cards.read()["gpu3/power_watts"] == 350.5


def test_no_number_is_unknown(monkeypatch):
    class Early(FakeNVML):
        def nvmlGpmMetricsGet(self, asked: Any) -> None:
            asked.metrics[0].value, asked.metrics[0].nvmlReturn = float("nan"), 0

    monkeypatch.setitem(sys.modules, "pynvml", Early())
    assert Cards([gpu(3)]).read()["gpu3/memory_bandwidth_percent"] is None


def test_energy_is_the_difference_of_counters_and_unknown_if_one_is():
    first = {"gpu0/energy_joules": 100.0, "gpu1/energy_joules": 50.0, "cpu_energy_joules": None}
    last = {"gpu0/energy_joules": 160.0, "gpu1/energy_joules": 90.0, "cpu_energy_joules": 3.0}
    found = energy(first, last, 10, 80)
    assert (found["gpu_joules"], found["gpu_joules_per_step"], found["gpu_joules_per_sample"]) == (100, 10, 1.25)
    assert found["cpu_joules"] is None
    assert said(found) == "energy: GPUs 100 J (10 J a step, 1.25 J a sample), CPUs unknown"
    assert energy(first, {**last, "gpu1/energy_joules": None}, 10, 80)["gpu_joules"] is None
    assert energy(first, last, 0, 0)["gpu_joules_per_step"] is None


class FakeNVML(types.ModuleType):
    """NVML's bindings, as of nvidia-ml-py 13, with one card that is of Hopper's kind and one that is older."""

    NVML_TEMPERATURE_GPU, NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_DRAM_BW_UTIL = 0, 1, 10

    class NVMLError(Exception): ...

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.asked: list[Any] = []
        self.samples = 0

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None: ...

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        self.asked.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> Any:
        self.asked.append(name)
        return 9

    def nvmlDeviceGetUtilizationRates(self, card: Any) -> Any:
        return types.SimpleNamespace(gpu=87, memory=45)

    def nvmlDeviceGetMemoryInfo(self, card: Any) -> Any:
        return types.SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetPowerUsage(self, card: Any) -> int:
        return 350_500

    def nvmlDeviceGetTotalEnergyConsumption(self, card: Any) -> int:
        if card != 3:
            raise self.NVMLError("Not Supported")
        return 12_345_678

    def nvmlDeviceGetTemperature(self, card: Any, which: int) -> int:
        return 61

    def nvmlGpmQueryDeviceSupport(self, card: Any) -> Any:
        return types.SimpleNamespace(isSupportedDevice=int(card == 3))

    def nvmlGpmSampleAlloc(self) -> Any:
        self.samples += 1
        return types.SimpleNamespace(number=self.samples)

    def nvmlGpmSampleGet(self, card: Any, sample: Any) -> None: ...

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.samples -= 1

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return types.SimpleNamespace(metrics=[types.SimpleNamespace()])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.version == 1 and asked.sample1 is not asked.sample2
        asked.metrics[0].value, asked.metrics[0].nvmlReturn = 33.5, 0


def gpu(number: int) -> Any:
    return types.SimpleNamespace(id=number, local_hardware_id=number, platform="gpu")


def test_cards_are_those_that_cuda_sees_and_say_what_they_know(monkeypatch):
    nvml = FakeNVML()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-abc")
    cards = Cards([gpu(0), gpu(1)])
    assert nvml.asked == [3, "GPU-abc"]
    found = cards.read()
    assert {name: found[f"gpu0/{name}"] for name in ("utilization_percent", "memory_busy_percent")} == {
        "utilization_percent": 87,
        "memory_busy_percent": 45,
    }
    assert (found["gpu0/power_watts"], found["gpu0/energy_joules"]) == (350.5, 12345.678)
    assert (found["gpu0/memory_bandwidth_percent"], found["gpu0/temperature_celsius"]) == (33.5, 61)
    assert set(cards.unknown) == {"gpu1/energy_joules", "gpu1/memory_bandwidth_percent"}
    assert found["gpu1/energy_joules"] is None and nvml.samples == 1, "each sample is given back"
    cards.close()


def test_cards_without_the_bindings_are_unknown(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    cards = Cards([gpu(0)])
    assert cards.read() == {} and 'pip install "cjax[hardware]"' in cards.unknown["gpu"]
    cards.close()


def test_without_psutil_it_is_said_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(ImportError, match=r'pip install "cjax\[hardware\]"'):
        HardwareLog()


def test_a_full_disk_is_said_once_and_the_thread_goes_on(tmp_path: Path, monkeypatch, capfd):
    (tmp_path / "system.jsonl").write_text('{"time": 1}\n{"ti')
    add, failed = WholeLines.add, [0]

    def full(self: WholeLines, line: str) -> None:
        if "cpu_percent" in line and failed[0] < 2:
            failed[0] += 1
            raise OSError(28, "No space left on device")
        add(self, line)

    class Slow(SmallData):
        def batches(self, start: int = 0):
            for batch in super().batches(start):
                time.sleep(0.03)
                yield batch

    def no_page(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WholeLines, "add", full)
    monkeypatch.setattr(sys.modules["cjax.train.fit"], "write_page", no_page)
    result = fit(SmallProgram(), Slow(), steps=10, folder=tmp_path, hardware=0.05)
    found = lines(tmp_path)
    assert found[0] == {"time": 1} and sum("cpu_percent" in line for line in found) >= 2
    assert found[-1]["summary"] == result.hardware and result.step == 10
    said = capfd.readouterr().err
    assert said.count("what the hardware does could not be written") == 1
    assert said.count("report.html could not be written: [Errno 28]") == 1
