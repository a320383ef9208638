"""What JAX decides once for a process, decided again."""

import logging
import os
import sys
import textwrap
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from forked import Forks
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.cards import CARDS
from cjax.jax_compat.backends import (
    absent_gpus,
    compiles_cpu_programs_anew,
    coordinator_address,
    each_process_writes_its_cache,
    gathers_ahead,
    gloo_stays_on_loopback,
    is_compiling,
    is_of_this_process,
    keeps_behind_barriers,
    made_together,
    names_in_cache_key,
    needs_more_memory,
    only_compiles,
    splits_what_has_a_layout,
    without_plugin_failures,
)
from cjax.mesh import compile_lowered


def run(forks: Forks, code: str, **environment: str) -> None:
    done = forks.run(["-c", textwrap.dedent(code)], os.environ | environment)
    assert done.returncode == 0, done.stderr


def test_names_count_for_the_cache_while_they_are_asked_for() -> None:
    def counts() -> bool:
        return jax.config.jax_compilation_cache_include_metadata_in_key

    before = counts()
    with names_in_cache_key(False):
        assert counts() == before
    with pytest.raises(KeyError), names_in_cache_key(True):
        assert counts()
        with names_in_cache_key(False):
            assert counts(), "who asked for them before, asked for all programs"
        raise KeyError
    assert counts() == before


def test_plugins_are_quiet_for_a_while() -> None:
    logger = logging.getLogger("jax._src.xla_bridge")
    assert logger.name in logging.Logger.manager.loggerDict and sys.modules[logger.name].logger is logger
    before = logger.isEnabledFor(logging.ERROR)
    with pytest.raises(KeyError), without_plugin_failures():
        assert not logger.isEnabledFor(logging.ERROR)
        raise KeyError
    assert logger.isEnabledFor(logging.ERROR) == before


def test_a_device_that_is_here_runs() -> None:
    assert not only_compiles(jax.devices()[0]) and all(map(is_of_this_process, jax.devices()))


def test_a_device_of_another_process_is_told_by_its_client() -> None:
    class Client:
        process_index = staticmethod(lambda: 1)

    class Device:
        client = Client()

        def __init__(self, process: int):
            self.process_index = process

    assert [is_of_this_process(Device(process)) for process in range(3)] == [False, True, False]


@pytest.mark.aot
def test_a_device_that_is_not_here_compiles() -> None:
    devices = absent_gpus(CARDS["h100"].xla_target(), "1x1x8")
    assert len(devices) == 8 and all(map(only_compiles, devices))


@pytest.mark.aot
def test_what_branches_change_is_copied_or_not() -> None:
    """Two buffers in a loop, each changed by a loop in a branch of its own, as stages change those of their stacks."""
    devices, size = absent_gpus(CARDS["h100"].xla_target(), "1x1x1"), 1 << 16

    def changed(rows: jax.Array) -> jax.Array:
        return lax.scan(lambda rows, i: (rows.at[i].set(2 * rows[i] + 1), None), rows, jnp.arange(4))[0]

    def tick(both: Any, which: jax.Array) -> Any:
        ways = [lambda a, b: (a, b), lambda a, b: (changed(a), b), lambda a, b: (a, changed(b))]
        return lax.switch(which, ways, *both), None

    def run(which: jax.Array) -> Any:
        rows = jnp.zeros((4, size))
        return jax.tree.map(jnp.sum, lax.scan(tick, (rows, rows), which)[0])

    placed = jax.sharding.SingleDeviceSharding(devices[0])
    lowered = jax.jit(run, in_shardings=placed).lower(jax.ShapeDtypeStruct((8,), "int32"))
    memory = compile_lowered(lowered, devices).memory_analysis().temp_size_in_bytes
    assert round(memory / (4 * 4 * size)) == (4 if needs_more_memory() else 2)


@pytest.mark.aot
def test_what_is_behind_a_barrier_is_computed_behind_it() -> None:
    """The last of several passes reads no sum of the others'. Ahead of them, what it saves would be kept beside what
    they save: as much memory again as a pass saves."""
    devices = absent_gpus(CARDS["h100"].xla_target(), "1x1x1")
    layers, rows, width = 16, 2048, 128

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.square(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]).sum()

    def run(weights: jax.Array, xs: jax.Array) -> jax.Array:
        def one(sums: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss)(weights, x)), None

        (total, sums), _ = lax.scan(one, (jnp.float32(0), jnp.zeros_like(weights)), xs[:-1])
        _, last = lax.optimization_barrier((total, xs[-1]))
        return sums + jax.grad(loss)(weights, last)

    shapes = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((layers, width, width), (4, rows, width))]
    lowered = jax.jit(run, in_shardings=jax.sharding.SingleDeviceSharding(devices[0])).lower(*shapes)
    memory = compile_lowered(lowered, devices).memory_analysis().temp_size_in_bytes
    assert (memory < 3 * 4 * layers * rows * width) == keeps_behind_barriers()


@pytest.mark.aot
def test_what_has_a_layout_is_gathered_or_not() -> None:
    devices = absent_gpus(CARDS["h100"].xla_target(), "1x1x2")
    split = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))

    def run(x: jax.Array) -> jax.Array:
        return jnp.sin(with_layout_constraint(jnp.cos(x), Layout((0, 1, 2))))

    lowered = jax.jit(run, in_shardings=split, out_shardings=split).lower(jax.ShapeDtypeStruct((8, 128, 64), "float32"))
    assert ("all-gather" in compile_lowered(lowered, devices).as_text()) != splits_what_has_a_layout()


@pytest.mark.aot
def test_a_loop_gathers_a_turn_ahead_if_it_is_told_to() -> None:
    """So that there is a gather in front of the loop as well: what its first turn reads."""
    devices = absent_gpus(CARDS["h100"].xla_target(), "1x1x2")
    mesh = Mesh(np.array(devices), ("data",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((), (None, "data")))

    def turn(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(x @ lax.with_sharding_constraint(w, whole)), None

    def run(x: jax.Array, ws: jax.Array) -> jax.Array:
        return lax.scan(turn, x, ws)[0]

    given = jax.ShapeDtypeStruct((512, 1024), "bfloat16"), jax.ShapeDtypeStruct((6, 1024, 1024), "bfloat16")

    def gathers(**options: Any) -> int:
        jitted = jax.jit(run, in_shardings=(whole, split), out_shardings=whole, compiler_options=options)
        return compile_lowered(jitted.lower(*given), devices).as_text().count(" all-gather-start(")

    assert gathers() == 1 and gathers(**gathers_ahead()) == (2 if gathers_ahead() else 1)
    assert bool(gathers_ahead()) == (jax.__version_info__ >= (0, 11))


@pytest.mark.aot
def test_devices_of_one_topology_are_told_from_those_of_another() -> None:
    one, other = (absent_gpus(CARDS["h100"].xla_target(), "1x1x2") for _ in range(2))
    known = weakref.WeakKeyDictionary({made_together(one[0]): "one", made_together(other[0]): "other"})
    assert [known[made_together(device)] for device in (*one, *other)] == ["one", "one", "other", "other"]


def test_a_process_forgets_its_devices_and_whether_it_caches(tmp_path: Path, forks: Forks) -> None:
    code = """
        import pathlib, jax
        from cjax.jax_compat.backends import clear_backends, without_compilation_cache

        kept = lambda: len(list(pathlib.Path(jax.config.jax_compilation_cache_dir).iterdir()))
        compile = lambda number: jax.jit(lambda x: x * number).lower(1.0).compile()
        compile(2)
        first = kept()
        assert first
        with without_compilation_cache():
            compile(3)
            assert kept() == first
        compile(4)
        assert kept() > first

        jax.numpy.ones(1).delete()
        assert jax.device_count() != 3
        clear_backends()
        jax.config.update("jax_num_cpu_devices", 3)
        assert jax.device_count() == 3 and jax.numpy.arange(3).sum() == 3
    """
    run(
        forks, code, JAX_COMPILATION_CACHE_DIR=str(tmp_path), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES="-1",
    )  # fmt: skip


def test_cards_without_the_compiler_are_an_error_and_leave_the_environment_alone(forks: Forks) -> None:
    # Hides the plugin, should it be installed, from both places where JAX looks for plugins.
    code = """
        import importlib.metadata, os, pkgutil
        importlib.metadata.entry_points = lambda **which: []
        pkgutil.iter_modules = lambda *where: iter(())
        from cjax.jax_compat.backends import absent_gpus
        before = dict(os.environ)
        try:
            absent_gpus("", "1x1x8")
        except NotImplementedError:
            assert os.environ == before
        else:
            raise AssertionError("absent cards without a compiler for them")
    """
    run(forks, code)


def test_each_process_keeps_what_it_compiles(forks: Forks, tmp_path: Path) -> None:
    code = """
        import sys
        import jax
        from jax._src import distributed
        from cjax.jax_compat.backends import each_process_writes_its_cache

        if sys.argv[1] == "each":
            each_process_writes_its_cache()
            each_process_writes_its_cache()
        distributed.global_state.process_id = 1
        jax.jit(lambda x: x * 3 + 1)(2.0)
        assert distributed.global_state.process_id == 1
    """
    for who in ("first", "each"):
        keeps = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / who), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        done = forks.run(["-c", textwrap.dedent(code), who], os.environ | keeps)
        assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "first").glob("*-cache")), "JAX's own way, which makes ours needed"
    assert list((tmp_path / "each").glob("*-cache"))
    assert callable(each_process_writes_its_cache)


def test_what_several_cpu_devices_run_keeps_its_order(forks: Forks, tmp_path: Path) -> None:
    """In a second process too, which finds programs that the first has kept: weights are gathered in three loops and
    between them, in whichever order XLA is free to take. Where it may take any, this hangs within a few steps."""
    code = """
        import jax, jax.numpy as jnp
        from jax import monitoring
        from jax.sharding import NamedSharding, PartitionSpec as P
        from cjax.mesh import build_mesh, simulate

        mesh, width = build_mesh({"data": 8}, simulate(8)), 96

        def gathered(weight):
            return jax.lax.all_gather(weight, "data", tiled=True)

        def turn(x, weight):
            own = gathered(weight)
            return sum(jnp.tanh(x @ own * (1 + i)) for i in range(10)), None

        def step(x, layers, others):
            x, _ = jax.lax.scan(turn, x, layers)
            for half in (others[:12], others[12:]):
                x = sum(jnp.tanh(x @ whole) for whole in map(gathered, half))
                x, _ = jax.lax.scan(turn, x, layers)
            return x

        specs = P("data"), P(None, "data"), P("data")
        normal = lambda *shape: 0.1 * jax.random.normal(jax.random.key(0), shape)
        given = normal(512, width), normal(3, width, width), [normal(width, width)] * 24
        placed = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(given, specs)]
        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs[0]))
        found = []
        monitoring.register_event_listener(lambda name, **_: found.append(name))
        for _ in range(20):
            step(*placed).block_until_ready()
        jax.jit(lambda x: jnp.cos(x) * 3)(2.0)  # on one device
        print(sum(name.endswith("cache_hits") for name in found))
    """
    keeps = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    soon = os.environ["XLA_FLAGS"] + " --xla_cpu_collective_call_terminate_timeout_seconds=40"
    hits = []
    for _ in range(2):
        done = forks.run(["-c", textwrap.dedent(code)], os.environ | keeps | {"XLA_FLAGS": soon})
        assert done.returncode == 0, done.stderr
        hits.append(int(done.stdout))
    assert hits == [0, 1 + (jax.__version_info__ >= (0, 11))]
    assert callable(compiles_cpu_programs_anew)


def test_collectives_between_processes_are_told_where_to_listen(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import xla_bridge

    told = {}
    monkeypatch.setattr(xla_bridge._jax, "make_gloo_tcp_collectives", lambda **given: told.update(given))
    for _ in range(2):
        gloo_stays_on_loopback()
    xla_bridge._jax.make_gloo_tcp_collectives(distributed_client=1)
    assert told == {"distributed_client": 1, "hostname": "127.0.0.1"}


def test_a_thread_that_compiles_is_told() -> None:
    me, seen, is_over = threading.get_ident(), [], threading.Event()

    def look() -> None:
        while not is_over.wait(0.002):
            seen.append(is_compiling(me))

    looker = threading.Thread(target=look)
    looker.start()
    jax.jit(lambda x: jax.numpy.linalg.svd(jax.numpy.sin(x @ x) + x)[1].sum()).lower(jax.numpy.ones((7, 7))).compile()
    compiled = len(seen)
    time.sleep(0.1)
    is_over.set()
    looker.join()
    assert any(seen[:compiled]) and not any(seen[compiled + 2 :]) and not is_compiling(0)


def test_a_process_that_is_alone_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax._src import distributed

    assert coordinator_address() == ""
    monkeypatch.setattr(distributed.global_state, "coordinator_address", "here:7")
    assert coordinator_address() == "here:7"
