"""A process that takes models and plans as lines of JSON and answers what came of each pair; run.py starts it.

It may hang, abort or be killed at any time: what it began, it says before it begins.
"""

import json
import os
import sys
from importlib import metadata
from pathlib import Path

TESTS = Path(__file__).parent.parent
FLAGS = (
    # As cjax tells the compiler of its own steps, for what is jitted here; and a collective that some device never
    # reaches ends the process after half a minute.
    "--xla_cpu_multi_thread_eigen=false --xla_cpu_enable_concurrency_optimized_scheduler=false "
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20 --xla_cpu_collective_call_terminate_timeout_seconds=30"
)
# The older generator of code compiles these small programs in less than half the time; jaxlib 0.11 has it no more, and
# stops at the flag. Nor are they cut into parts to be compiled on many cores: cutting is a third of compiling.
QUICK = " --xla_cpu_parallel_codegen_split_count=1"
QUICK += " --xla_cpu_use_fusion_emitters=false" if metadata.version("jaxlib").startswith("0.10.") else ""
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",
    "JAX_ENABLE_X64": "1",
    "JAX_NUM_CPU_DEVICES": "8",
    "NPROC": "32",
    "XLA_FLAGS": FLAGS + QUICK,
}


def serve() -> None:
    # Answers go where nobody else prints.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(TESTS))
    import jax
    from quick import few_collections, few_contexts
    from search.pairs import Outcome, Pairs

    few_collections()
    few_contexts()

    def answer(**what: object) -> None:
        answers.write(json.dumps(what) + "\n")

    answer(jax=jax.__version__)
    for line in sys.stdin:
        job = json.loads(line)
        answer(began="model")
        try:
            pairs = Pairs(job["spec"], job["own_init"] is not None)
        except Exception as error:
            answer(model=f"{type(error).__name__}: {error}"[:600])
            continue
        for number, plan in enumerate(job["plans"]):
            answer(began=plan)
            outcome: Outcome = pairs.outcome(plan, own_init=job["own_init"] == number)
            answer(plan=plan, kind=outcome.kind, what=outcome.what)
        answer(done=True)
        del pairs
        jax.clear_caches()


if __name__ == "__main__":
    serve()
