"""Eight virtual CPU devices for every test, and compiled programs kept between runs.

With CJAX_TEST_GPU=1 (make test-gpu) the GPUs that are here come first, for tests marked `gpu`.
"""

import os
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

# Environment, not only jax.config: tests that start a subprocess want the same platform and the same cache there.
# A GPU plugin may be installed for compile-only tests; without this it would look for a GPU and complain.
PLATFORMS = "cuda,cpu" if os.environ.get("CJAX_TEST_GPU") == "1" else "cpu"
os.environ["JAX_PLATFORMS"] = PLATFORMS
# Eight devices share few cores here: a collective that waits for a device which has had no turn yet is not a deadlock.
patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
# And as cjax tells the compiler of its own steps (`cjax.mesh.compiler_options`), for what tests jit themselves: all
# devices of a CPU must run collectives in the same order.
in_order = "--xla_cpu_multi_thread_eigen=false --xla_cpu_enable_concurrency_optimized_scheduler=false"
# Compiling is most of what tests do, and optimizing most of that. Exponentials differ by 1e-9 then. On a GPU, memory
# and kernels are those of optimized programs.
if PLATFORMS == "cpu":
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# XLA's newer generator of CPU code compiles a third longer. Only the full product runs with it, and jaxlib 0.11 and
# later, which have no other.
is_quick = os.environ.get("CJAX_TEST_ALL") != "1" and metadata.version("jaxlib").startswith("0.10.")
generator = "--xla_cpu_use_fusion_emitters=false" if is_quick else ""
# XLA cuts a program into 32 parts, to compile them on as many cores; with two, cutting costs a third of all compiling.
uncut = "--xla_cpu_parallel_codegen_split_count=1"
# Nor need long sums become trees of short ones, each level with a kernel of its own: a tenth of compiling a step.
straight = "--xla_disable_hlo_passes=tree_reduction_rewriter" if is_quick else ""
# Each operation would carry the lines of Python that it was written in, ten of them: an eighth of all compiling.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# A device that waits in a collective keeps a thread: with one for each device, those that wait can starve the others.
os.environ.setdefault("NPROC", "32")
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "0"  # nor should the next step take threads from one that waits
flags = (os.environ.get("XLA_FLAGS", ""), patience, in_order, generator, uncut, straight)
os.environ["XLA_FLAGS"] = " ".join(filter(None, flags))
cache_home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_home / "cjax" / "jax"))
# Whether somebody has run `cjax calibrate` on this machine is nothing that a test should depend on.
os.environ.setdefault("HF_HOME", str(cache_home / "huggingface"))
unmeasured = tempfile.TemporaryDirectory()
os.environ["XDG_CACHE_HOME"] = unmeasured.name

import gc  # noqa: E402

import jax  # noqa: E402
import pytest  # noqa: E402
from forked import Forks  # noqa: E402
from full import by_default, stretch  # noqa: E402
from hypothesis import settings  # noqa: E402
from quick import few_collections, few_contexts  # noqa: E402

# The first example of a property may compile; a deadline would fail it on a slow machine and pass it on the next run.
settings.register_profile("cjax", deadline=None, max_examples=100 if os.environ.get("CJAX_TEST_ALL") == "1" else 30)
settings.load_profile("cjax")

jax.config.update("jax_platforms", PLATFORMS)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
# By default only programs that took a second to compile are kept; tests compile hundreds of small ones. The smallest of
# all are compiled as soon as read.
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

few_collections()
few_contexts()

assert jax.device_count("cpu") == 8, f"tests need 8 virtual CPU devices, found {jax.device_count('cpu')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is marked `full` is left out by default, as other rows of the tables are; `parts.py` asks for stretches."""
    if which := os.environ.get("CJAX_TEST_STRETCH"):
        mine = stretch(items, which)
        config.hook.pytest_deselected(items=[*{*items} - {*mine}])
        items[:] = mine
    if os.environ.get("CJAX_TEST_ALL") == "1" or any("::" in given for given in config.args):
        return  # who names a test wants to see it run
    kept = by_default(items, bool(config.getoption("lf", False)))
    if left := {*items} - {*kept}:
        config.hook.pytest_deselected(items=[*left])
        items[:] = kept


def pytest_sessionfinish() -> None:
    """pytest looks for garbage five times at its end, each time among millions of objects: ten seconds. Once does, in
    the full product: what it finds is resources that were left open."""
    if os.environ.get("CJAX_TEST_ALL") == "1":
        gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def kept_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where `contract.kept` keeps what all workers of this run share."""
    base = tmp_path_factory.getbasetemp()
    os.environ["CJAX_TEST_KEPT"] = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "kept")


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """For scripts that need a process of their own, but not to import JAX anew."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture(scope="module")
def settled() -> Iterator[None]:
    """For modules that collect garbage themselves, or have JAX do it at each trace to look for leaks: programs of other
    modules are millions of objects, which each collection would go through for seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def compiles_as_marked(request: pytest.FixtureRequest) -> Iterator[None]:
    """With all of XLA's optimizations in modules that measure what it makes of a program for GPUs."""
    marks = {mark.name for mark in request.node.iter_markers()}
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", before and not marks & {"aot", "gpu"})
    yield
    jax.config.update("jax_disable_most_optimizations", before)
