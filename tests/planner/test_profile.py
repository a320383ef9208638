"""The file of a profile: where it is, and that no other one is taken for it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from cjax.planner import profile as module
from cjax.planner.profile import Profile, factor_of, machine_of, profile_path, read_profile, write_profile

PROFILE = Profile(
    kind="cpu", machine=machine_of("cpu"), num_devices=8, shares_cores=True, matmul={"float32": 1e9, "bfloat16": 5e8},
    thin=6.4e-8, memory_bandwidth=2e9, link_bandwidth={"all-reduce": 1e8, "all-gather": 3e8, "all-to-all": 1e6},
    latency=1e-4, launch=1e-5, jax="0.10.2", date="2026-11-23",
    samples=({"what": "elementwise", "size": 4, "seconds": 2e-9},),
)  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "cjax"


def test_thin_matmuls_are_told() -> None:
    assert "half the rate of float32 where the least dim is 64" in str(PROFILE)


def test_it_is_kept_for_the_kind_of_device_and_the_processor(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_profile("cpu") is None
    path = write_profile(PROFILE)
    assert path.parent == cache and path == profile_path("cpu") and list(cache.iterdir()) == [path]
    found = read_profile("cpu")
    assert found is not None and dataclasses.replace(found, samples=PROFILE.samples) == PROFILE
    assert found.samples == [{"what": "elementwise", "size": 4, "seconds": 2e-9}]
    assert read_profile("NVIDIA H200") is None and profile_path("NVIDIA H200").name == "profile-nvidia-h200.json"
    # A home is shared among machines: another processor has a file of its own.
    monkeypatch.setattr(module, "machine_of", lambda kind: "Another Processor, 64 cores")
    assert read_profile("cpu") is None and profile_path("cpu").name == "profile-cpu-another-processor-64-cores.json"


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert profile_path("x") == Path.home() / ".cache/cjax/profile-x.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert profile_path("x") == Path.home() / ".cache/cjax/profile-x.json"


def test_another_file_can_be_named(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "mine.json"
    assert write_profile(PROFILE, path) == path and read_profile("cpu") is None
    assert read_profile("cpu", path) is not None
    with pytest.raises(FileNotFoundError):
        read_profile("cpu", tmp_path / "none.json")
    with pytest.raises(ValueError, match="and these are NVIDIA H200: measure again with cjax calibrate"):
        read_profile("NVIDIA H200", path)
    write_profile(dataclasses.replace(PROFILE, machine="Another Processor, 64 cores"), path)
    with pytest.raises(ValueError, match="Another Processor, 64 cores.*, and these are cpu"):
        read_profile("cpu", path)


@pytest.mark.parametrize(
    "change",
    [
        {"form": 1}, {"thin": -1e-9}, {"matmul": {}}, {"matmul": {"float32": -1.0}}, {"memory_bandwidth": 0},
        {"latency": -1.0}, {"latency": "soon"}, {"link_bandwidth": {"all-reduce": float("nan")}}, {"more": 1},
        {"samples": [{"what": 1}]},
    ],
)  # fmt: skip
def test_a_file_that_is_no_profile_is_refused(cache: Path, change: dict[str, Any]) -> None:
    path = write_profile(PROFILE)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=f"no profile that this cjax can read .*cjax calibrate, or delete {path}"):
        read_profile("cpu")


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "3"])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    write_profile(PROFILE).write_text(text)
    with pytest.raises(ValueError, match="no profile that this cjax can read"):
        read_profile("cpu")


def test_devices_that_share_cores_share_them_out() -> None:
    four = PROFILE.at(4)
    assert four.matmul == {"float32": 2e9, "bfloat16": 1e9} and four.memory_bandwidth == 4e9
    assert four.thin == 3.2e-8, "half the rate at the same dim as before"
    assert four.links == 2 * PROFILE.links == 2e8 and four.latency == PROFILE.latency and four.num_devices == 4
    own = dataclasses.replace(PROFILE, shares_cores=False)
    assert own.at(4) == own


def test_the_factor_is_that_of_the_median_step() -> None:
    assert factor_of(1.5, 1.0) == 1.5 and factor_of([3, 1, 2, 2, 90], 4) == 0.5
    for measured, predicted in (([], 1), ([0.0], 1), ([-1], 1), (float("nan"), 1), (1, 0), (1, float("inf"))):
        with pytest.raises(ValueError, match="step"):
            factor_of(measured, predicted)
