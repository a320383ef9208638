"""The mesh, virtual and absent devices, and processes that find each other."""

import dataclasses
import os
import socket
import subprocess
import textwrap
import threading
from collections.abc import Callable
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked import Forks, without_settings
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cjax.mesh as mesh_lib
from cjax.audit import audit
from cjax.cards import CARDS
from cjax.jax_compat.backends import gathers_ahead
from cjax.machines import Cluster
from cjax.mesh import (
    BATCH_AXES,
    DATA,
    EXPERT,
    TENSOR,
    ZERO,
    alone,
    build_mesh,
    compile_lowered,
    compiler_options,
    is_compile_only,
    launch,
    moving,
    resolve_devices,
)
from cjax.mesh.axes import _place_in_machine
from cjax.mesh.devices import SCATTERED_TOGETHER

LAUNCHER_VARIABLES = ("WORLD_SIZE", "RANK", "SLURM_", "OMPI_", "MASTER_", "LOCAL_", "JAX_COORDINATOR", "XLA_FLAGS")


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(LAUNCHER_VARIABLES):
            monkeypatch.delenv(name)


@pytest.fixture
def run(forks: Forks) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in a process of its own, without what the tests set for JAX."""
    return lambda code, **env: forks.run(["-c", textwrap.dedent(code)], without_settings(os.environ) | env)


def test_axes_are_auto_and_ordered_outermost_first():
    mesh = build_mesh({TENSOR: 2, ZERO: 2, DATA: 2}, jax.devices())
    assert mesh.axis_names == (DATA, ZERO, TENSOR) and mesh.devices.shape == (2, 2, 2)
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert [device.id for device in mesh.devices[0, 0]] == [0, 1]
    assert NamedSharding(mesh, P((DATA, ZERO))).shard_shape((8,)) == (2,)
    apart = build_mesh({TENSOR: 2, EXPERT: 2, DATA: 2}, jax.devices())
    assert apart.axis_names == (DATA, EXPERT, TENSOR) and {*apart.axis_names} - {*BATCH_AXES} == {TENSOR}


def test_order_of_given_devices_does_not_matter():
    mesh = build_mesh({DATA: 4, TENSOR: 2}, jax.devices()[::-1])
    np.testing.assert_array_equal(np.vectorize(lambda device: device.id)(mesh.devices), np.arange(8).reshape(4, 2))


def test_tensor_axis_stays_within_a_host_when_processes_are_dealt_in_turn():
    class Gpu:
        platform = "gpu"

        def __init__(self, id: int):
            self.id, self.process_index, self.slice_index = id, id, id % 2

    devices = sorted((Gpu(i) for i in range(8)), key=_place_in_machine)
    assert [device.id for device in devices] == [0, 2, 4, 6, 1, 3, 5, 7]


@pytest.mark.parametrize(
    "axis_sizes, words",
    [
        ({DATA: 2, TENSOR: 2}, ["needs 4 devices", "data 2 x tensor 2 = 4", "here: 8 cpu", "jax.devices()[:4]"]),
        ({DATA: 8, TENSOR: 2}, ["needs 16 devices", "cjax.simulate(16)", '"h100:16"', 'plan="auto"']),
        ({"model": 8}, ["'model'", "data, zero, expert, sequence, depth"]),
        ({DATA: -1, TENSOR: -8}, ["at least one"]),
    ],
)
def test_impossible_mesh_is_refused(axis_sizes, words):
    with pytest.raises(ValueError) as error:
        build_mesh(axis_sizes, jax.devices())
    assert all(word in str(error.value) for word in words), error.value


def test_resolve_devices():
    assert resolve_devices() == jax.devices()
    assert resolve_devices(jax.devices()[2:4]) == jax.devices()[2:4]
    assert resolve_devices(np.array(jax.devices()[:2])) == jax.devices()[:2]
    assert resolve_devices("cpu:3") == jax.devices()[:3]
    assert not is_compile_only(jax.devices())


@pytest.mark.parametrize(
    "text, word",
    [("cpu:9", "simulate(9)"), ("h100:", "h100:8"), ("b17:8", "h200"), ("cpu:0", "CPU"), ([], "h100:64"), ([3], "[3]")],
)
def test_devices_that_make_no_sense_are_refused(text, word):
    with pytest.raises(ValueError) as error:
        resolve_devices(text)
    assert word in str(error.value)


def test_each_device_is_given_once_and_all_are_of_a_kind():
    first, second = jax.devices()[:2]
    with pytest.raises(ValueError, match="holds .* twice, and a device has one part of the work: give each once"):
        resolve_devices([first, second, first])
    card = Mock(spec=jax.Device, platform="gpu")
    with pytest.raises(ValueError, match=r"of cpu and gpu, and a program runs on one kind: give jax.devices\('gpu'\)"):
        resolve_devices([first, card])
    assert resolve_devices([card]) == [card]


def test_what_programs_for_gpus_are_compiled_with():
    mesh = SimpleNamespace(devices=np.array([SimpleNamespace(platform="gpu")] * 4), size=4)
    plain = compiler_options(mesh)
    assert plain == {"xla_gpu_enable_triton_gemm": False}
    assert compiler_options(mesh, scatters_in_layers=True) == plain | {
        "xla_gpu_reduce_scatter_combine_threshold_bytes": SCATTERED_TOGETHER
    }
    assert compiler_options(mesh, saves_gathered=True) == plain | gathers_ahead()
    assert compiler_options(mesh, leaves_apart=True) == plain | {"xla_gpu_dot_merger_threshold_mb": 0}
    alone = build_mesh({"data": 1}, jax.devices()[:1])
    assert compiler_options(alone, True, True, True) is None


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        ("cpu", 'as "cpu:8"'),
        ("cpu:8/node=4", "links and prices are of cards that are not here"),
        ("h100", 'says no number of cards, .* write one, as "h100:8"'),
        (Cluster("h100"), "says no number"),
        ("v100:8", "nothing compiles for Tesla V100-SXM2-32GB, so v100 is for planning alone"),
        (
            Cluster(dataclasses.replace(CARDS["h100"], name="mine", chip=None), 8),
            "a card of your own compiles with chip=",
        ),
        ("h100:20", "h100:16 or h100:24, or how many a host has: h100:20/node=10"),
    ],
)
def test_machines_that_nothing_can_be_compiled_for(devices, message):
    with pytest.raises(ValueError, match=message):
        resolve_devices(devices)


def test_flags_set_too_late_are_noticed(run):
    done = run(
        """
        import jax, os, cjax.mesh
        jax.devices()
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        cjax.mesh.resolve_devices()
        """,
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode and "cjax.simulate(8)" in done.stderr and "after JAX had started" in done.stderr


def test_simulate_before_and_after_jax_has_started(run):
    done = run(
        """
        import jax, jax.numpy as jnp
        from cjax.mesh import simulate
        assert len(simulate(4)) == 4
        print(jnp.arange(3).sum())          # the result is dropped: nothing lives
        assert len(simulate(4)) == 4        # already so
        assert len(simulate(8)) == len(jax.devices()) == 8
        held = jnp.arange(3)
        simulate(2)
        """,
        JAX_PLATFORMS="cpu",
    )
    assert done.returncode and "would destroy the 1 JAX array" in done.stderr, done.stderr
    assert "import cjax; cjax.simulate(2)" in done.stderr


@pytest.mark.parametrize("torchrun", [True, False])
def test_two_processes_meet_by_the_variables_of_torchrun_or_mpirun(forks, torchrun):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = """
        import jax, jax.numpy as jnp
        import cjax.mesh
        from jax.sharding import NamedSharding, PartitionSpec as P
        cjax.mesh.initialize()
        cjax.mesh.initialize()      # a second time does nothing
        mesh = cjax.mesh.build_mesh({"data": 2, "tensor": 2}, cjax.mesh.resolve_devices())
        assert [d.process_index for d in mesh.devices[1]] == [1, 1]
        x = jax.make_array_from_callback((4,), NamedSharding(mesh, P(("data", "tensor"))), lambda i: jnp.arange(4.0)[i])
        total = jax.jit(jnp.sum)(x).item()
        print("sum", total, jax.process_index(), jax.process_count())
    """
    clean = without_settings(os.environ)
    clean |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environments = []
    for rank in range(2):
        own = {"RANK": f"{rank}", "WORLD_SIZE": "2", "LOCAL_RANK": f"{rank}", "LOCAL_WORLD_SIZE": "2"}
        if not torchrun:
            size = {"WORLD_SIZE": "SIZE", "LOCAL_WORLD_SIZE": "LOCAL_SIZE"}
            own = {f"OMPI_COMM_WORLD_{size.get(name, name)}": value for name, value in own.items()}
        environments.append(clean | own)
    for rank, done in enumerate(forks.together([["-c", textwrap.dedent(code)]] * 2, environments)):
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1].split() == ["sum", "6.0", str(rank), "2"]


def test_alone_there_is_nothing_to_initialize():
    mesh_lib.initialize()
    assert not jax.distributed.is_initialized()


@pytest.mark.parametrize(
    "env, word",
    [
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"}, "srun python"),
        ({"WORLD_SIZE": "8", "MASTER_ADDR": "a"}, "RANK and MASTER_PORT"),
        ({"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun -x MASTER_ADDR"),
    ],
)
def test_half_a_launch_is_refused(monkeypatch, env, word):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=word):
        mesh_lib.initialize()
    with pytest.raises(RuntimeError, match="initialize"):
        resolve_devices()


def test_coordinator_avoids_the_port_of_torchruns_own_store(monkeypatch):
    called = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda **arguments: called.update(arguments))
    for name, value in {
        "WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    mesh_lib.initialize()
    assert called == dict(coordinator_address="node0:29501", num_processes=16, process_id=9, local_device_ids=1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    mesh_lib.initialize()
    assert called["local_device_ids"] is None
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(launch, "gloo_stays_on_loopback", lambda: called.update(stays=True))
    mesh_lib.initialize()
    assert called["coordinator_bind_address"] == "127.0.0.1:29501" and called["stays"], "and on no other network"


@pytest.mark.aot
@pytest.mark.parametrize("name", [name for name, card in CARDS.items() if card.is_compilable])
def test_compiles_for_cards_that_are_not_here(name):
    devices = resolve_devices(f"{name}:16/node=8")
    assert len(devices) == 16 and is_compile_only(devices) and devices[0].device_kind == CARDS[name].kind
    assert [device.process_index for device in devices] == [0] * 8 + [1] * 8
    mesh = build_mesh({DATA: 2, TENSOR: 8}, devices)
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=NamedSharding(mesh, P(DATA, TENSOR)))
    jax.jit(jnp.sin).lower(1.0).compile()  # JAX decides here whether this process caches
    for _ in range(2):  # the second time, a cached program would be read back, which JAX cannot do
        compiled = compile_lowered(jax.jit(lambda x: x @ x.T).lower(x), devices)
    assert compiled.memory_analysis().argument_size_in_bytes == 64 * 64 * 4 // 16


@pytest.mark.aot
@pytest.mark.parametrize("first", ["", "jax.numpy.ones(3).sum()"], ids=["first", "after JAX has started"])
def test_absent_cards_need_no_environment(run, first):
    done = run(f"""
        import jax, cjax.mesh
        {first}
        devices = cjax.mesh.resolve_devices("h100:8")
        assert cjax.mesh.is_compile_only(devices) and len(devices) == 8
        assert jax.numpy.arange(3).sum() == 3       # and real computations still find the CPU
    """)
    assert done.returncode == 0, done.stderr


def test_absent_cards_without_the_compiler_say_what_to_install(run):
    # Hides the plugin, should it be installed, from both places where JAX looks for plugins.
    done = run(
        """
        import importlib.metadata, pkgutil
        importlib.metadata.entry_points = lambda **which: []
        pkgutil.iter_modules = lambda *where: iter(())
        import cjax.mesh
        cjax.mesh.resolve_devices("h100:8")
        """
    )
    assert done.returncode and "pip install 'cjax[aot]'" in done.stderr, done.stderr


def test_several_devices_of_a_cpu_have_one_thread_each():
    def threads(num_devices: int) -> bool:
        mesh = build_mesh({"data": num_devices}, jax.devices()[:num_devices])
        options = compiler_options(mesh) or {}
        jax.jit(lambda x: x + 1, compiler_options=options or None)(1.0)  # which XLA knows
        return options.get("xla_cpu_multi_thread_eigen", True)

    assert threads(1) and not threads(8)


@pytest.mark.aot
def test_larger_gradients_of_a_layer_are_scattered_one_by_one():
    """Under ZeRO-3, so that the first is on its way while the next is made: all together, none would be."""
    mesh = build_mesh({"data": 4}, resolve_devices("h100:4"))
    rows, whole = (NamedSharding(mesh, P(*spec)) for spec in (("data",), ()))
    x = jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=rows)
    ws = [jax.ShapeDtypeStruct((4096, 4096), "bfloat16", sharding=whole)] * 3

    def loss(ws, x):
        for w in ws:
            x = jnp.tanh(x @ w)
        return x.astype("float32").mean()

    def scattered(scatters: bool) -> int:
        step = jax.jit(jax.grad(loss), out_shardings=[rows] * 3, compiler_options=compiler_options(mesh, scatters))
        compiled = compile_lowered(step.lower(ws, x), list(mesh.devices.flat))
        return len(audit(compiled, mesh).select("reduce-scatter", ["data"]))

    assert scattered(False) == 1 and scattered(True) == 3


def test_nothing_moves_while_a_program_runs_for_the_first_time() -> None:
    """And the program waits for what moves already."""
    seen: list[str] = []
    begun, goes_on = threading.Event(), threading.Event()

    def mover(name: str, then: Callable[[], object]) -> threading.Thread:
        def run() -> None:
            with moving():
                then()
                seen.append(name)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def first() -> None:
        begun.set()
        goes_on.wait(10)

    before = mover("before", first)
    assert begun.wait(10)
    threads = [before]

    def program() -> None:
        with alone():
            seen.append("program")
            threads.append(mover("behind", lambda: None))
            threads[-1].join(0.2)
            seen.append("done")

    running = threading.Thread(target=program, daemon=True)
    running.start()
    running.join(0.2)
    assert running.is_alive() and not seen
    goes_on.set()
    running.join(10)
    for thread in threads:
        thread.join(10)
    assert seen == ["before", "program", "done", "behind"]


def test_who_fails_leaves_the_way_free() -> None:
    for way in (moving, alone):
        with pytest.raises(OSError), way():
            raise OSError
    with alone():
        pass
    with moving():
        pass


def test_an_interrupt_while_it_waits_leaves_the_way_free(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("cjax.mesh.first_run._changed.wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), alone():
            pass
    done = threading.Event()

    def move() -> None:
        with moving():
            done.set()

    threading.Thread(target=move, daemon=True).start()
    assert done.wait(10)
