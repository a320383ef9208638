"""What is timed on the devices that are here."""

import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import cjax
from cjax.audit import audit_text
from cjax.audit.read import RECEIVED
from cjax.calibrate import COLLECTIVES, DTYPES, calibrate
from cjax.mesh import DATA, build_mesh, compiler_options
from cjax.planner.hardware import hardware_of, with_measured
from cjax.planner.profile import OUTER, Profile

module = sys.modules["cjax.calibrate"]  # `cjax.calibrate` is the function


@pytest.fixture(scope="module")
def profile() -> Profile:
    return calibrate(seconds=1)


def test_rates_are_of_one_device_while_all_work(profile: Profile) -> None:
    assert (profile.kind, profile.num_devices, profile.shares_cores) == ("cpu", 8, True)
    assert set(profile.matmul) == set(DTYPES) and set(profile.link_bandwidth) == set(COLLECTIVES)
    for what, rate in {"elementwise": profile.memory_bandwidth, "matmul float32": profile.matmul["float32"]}.items():
        assert rate == max(row["size"] / row["seconds"] for row in profile.samples if row["what"] == what)
    for what, rate in profile.link_bandwidth.items():
        small, large = (row for row in profile.samples if row["what"] == what)
        assert 2**12 <= small["size"] < 2**14 and 2**22 <= large["size"] < 2**22 + 2**13
        assert large["size"] / large["seconds"] <= 1.01 * rate
    assert "shares its cores" not in profile.source and "which share its cores" in str(profile)


def test_thin_matmuls_are_slower(profile: Profile) -> None:
    (row,) = (row for row in profile.samples if row["what"] == "thin")
    slower = max(0.0, row["seconds"] / row["size"] - 1 / profile.matmul["float32"])
    assert profile.thin == pytest.approx(64 * slower)


def test_planning_reads_them_where_no_datasheet_is(profile: Profile) -> None:
    facts = with_measured(hardware_of(jax.devices()[:4]), profile)
    assert facts.memory_bandwidth == 2 * profile.memory_bandwidth  # half as many share the cores
    assert facts.matmul_flops("bfloat16") == 2 * profile.matmul["bfloat16"]
    assert facts.bandwidth(4, 4) == 2 * profile.links
    assert facts.memory == hardware_of(jax.devices()[:4]).memory


def test_a_collective_costs_cores_that_are_shared_what_it_costs_between_products(profile: Profile) -> None:
    rows = {row["what"]: row for row in profile.samples}
    alone, waiting = rows["turns"], rows["turns with a collective each"]
    assert alone["size"] == waiting["size"]
    assert profile.latency >= (waiting["seconds"] - alone["seconds"]) / waiting["size"]


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_a_collective_receives_what_is_counted(kind: str) -> None:
    mesh = build_mesh({DATA: 8}, jax.devices())
    mapped = jax.shard_map(COLLECTIVES[kind], mesh=mesh, in_specs=P(DATA), out_specs=P(DATA), check_vma=False)
    program = jax.jit(mapped, compiler_options=compiler_options(mesh))
    (found,) = audit_text(program.lower(jnp.ones((8 * 8, 8))).compile().as_text(), mesh).collectives
    assert found.kind == kind.removeprefix(OUTER) and found.bytes == RECEIVED[found.kind](8) * 4 * 64


def test_one_device_has_no_links() -> None:
    profile = cjax.calibrate(jax.devices()[:1], seconds=0.1)
    assert profile.link_bandwidth == {} and profile.links is None and profile.latency == 0
    assert not profile.shares_cores and with_measured(hardware_of(jax.devices()[:1]), profile).host_bandwidth is None


def test_sizes_grow_until_one_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = module._Bench(jax.devices()[:1])
    monkeypatch.setattr(module, "_EDGES", (8, 16, 32))
    monkeypatch.setattr(module, "_LONG", 60.0)
    assert [timed.size for timed in bench.matmuls("float32", 60)] == [2 * 8**3, 2 * 16**3, 2 * 32**3]
    monkeypatch.setattr(module, "_LONG", 0.0)
    assert len(bench.matmuls("float32", 60)) == 1


def test_what_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "is_compile_only", lambda devices: True)
    with pytest.raises(ValueError, match="these devices are not here"):
        calibrate("cpu:2")
