"""What makes tests cheaper and changes nothing that they find: fewer collections of garbage, fewer contexts."""

import gc
import itertools

from jax._src.interpreters import mlir


def few_collections() -> None:
    """Traces are millions of small objects, which live as long as a module's programs do: Python would look through all
    of them every few seconds of tracing, and find nothing."""
    gc.set_threshold(100_000, 50, 100)


def few_contexts() -> None:
    """JAX lowers each program in a context of its own, which takes a quarter of what the smallest programs compile for;
    here 200 share one. Where a JAX has no such function, nothing is changed."""
    make = getattr(mlir, "make_ir_context", None)
    if make is None:
        return
    contexts: list[object] = []

    def shared() -> object:
        number = next(counted)
        if number % 200 == 0:
            contexts[:] = [make()]
        return contexts[0]

    counted = itertools.count()
    mlir.make_ir_context = shared
