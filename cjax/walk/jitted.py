"""A program of a walk: jitted, compiled ahead of its first call where its memory is asked for, and counted."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from cjax.mesh import alone, compile_lowered, compiler_options
from cjax.tree import PyTree


class Jitted:
    """A function, jitted. What was compiled ahead is what runs.

    Args:
      function: of arrays.
      mesh: what it is compiled for.
      donate: names of arguments that are given up.
      placed: where its results go, if it does not say so itself.
    """

    def __init__(
        self, function: Callable[..., Any], mesh: Mesh, donate: Sequence[str] = (), placed: PyTree = None
    ) -> None:
        self._mesh = mesh
        more = {} if placed is None else {"out_shardings": placed}
        options = compiler_options(mesh)
        self._jit: Any = jax.jit(function, donate_argnames=tuple(donate), compiler_options=options, **more)
        self.compiled: jax.stages.Compiled | None = None
        self._have_run: set[Any] = set()

    def __call__(self, *args: Any) -> Any:
        """Its results; of shapes, their shapes."""
        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args)):
            return self.eval_shape(*args)
        run = self._jit if self.compiled is None else self.compiled
        # What was compiled ahead takes one kind of arguments; of others each kind is a program.
        kind = self.compiled or tuple(map(jax.typeof, jax.tree.leaves(args)))
        if kind in self._have_run:
            return run(*args)
        jax.block_until_ready(args)
        with alone():
            done = jax.block_until_ready(run(*args))
        self._have_run.add(kind)
        return done

    def eval_shape(self, *args: Any) -> Any:
        """The shapes of its results."""
        return self._jit.eval_shape(*args)

    def compile(self, *args: Any) -> PyTree:
        """Compiles it for arguments, as structs with their placements; returns its results as such."""
        lowered = self._jit.lower(*args)
        self.compiled = compile_lowered(lowered, list(self._mesh.devices.flat))
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            lowered.out_info,
            self.compiled.output_shardings,
        )

    @property
    def temporary(self) -> int:
        """Bytes of a device beside arguments and results."""
        assert self.compiled is not None, "not compiled ahead"
        stats = self.compiled.memory_analysis()
        return 0 if stats is None else stats.temp_size_in_bytes
