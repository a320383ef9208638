"""What a compiled step really does: collectives by kind, axis and bytes; memory; exposed transfers; FLOPs."""

import dataclasses

import jax
from jax.sharding import Mesh, NamedSharding

from cjax.audit import hlo
from cjax.audit.facts import Audit, Collective, Memory
from cjax.audit.read import ModuleReader

__all__ = ["Audit", "Collective", "Memory", "audit", "audit_text"]


def audit(compiled: jax.stages.Compiled, mesh: Mesh | None = None) -> Audit:
    """Reads off a compiled step what it does on each device; anyone's jitted function will do.

    Judge transfers on a program compiled for the hardware in question: CPU programs have no asynchronous collectives,
    and show as all-reduce what becomes a reduce-scatter elsewhere.

    Args:
      compiled: `jax.jit(step).lower(...).compile()`.
      mesh: names the axes; by default the mesh of the arguments' or results' shardings.

    Raises:
      ValueError: when the program has no HLO text (another runtime than XLA's).

    >>> import jax.numpy as jnp
    >>> compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    >>> audit(compiled).flops
    1024.0
    """
    text = compiled.as_text()
    if not text:
        raise ValueError(
            "This compiled program offers no HLO text to read: give one that XLA compiled in this process, as "
            "jax.jit(f).lower(...).compile() does."
        )
    stats = compiled.memory_analysis()
    memory = stats and Memory(
        arguments=stats.argument_size_in_bytes,
        outputs=stats.output_size_in_bytes,
        aliased=stats.alias_size_in_bytes,
        temporary=stats.temp_size_in_bytes,
    )
    return audit_text(text, mesh or _mesh_of(compiled), memory)


def audit_text(text: str, mesh: Mesh | None = None, memory: Memory | None = None) -> Audit:
    """`audit` of optimized HLO text, such as a dump."""
    module = hlo.parse(text)
    if mesh is not None and mesh.size != module.num_devices:
        raise ValueError(
            f"The program is for {module.num_devices} devices, and {mesh} has {mesh.size}: give the mesh that it was "
            "compiled for, or leave it out."
        )
    reader = ModuleReader(module, mesh)
    total = reader.work(module.entry)
    return Audit(
        collectives=tuple(dataclasses.replace(each, count=round(each.count)) for each in total.collectives),
        memory=memory,
        flops=total.flops,
        flops_float32=total.flops_float32,
        bytes_accessed=total.bytes,
        num_devices=module.num_devices,
        num_partners=reader.num_partners(),
        unknown_loops=reader.unknown_loops,
        uncounted=tuple(sorted(reader.uncounted)),
        attention_kernels=tuple(sorted(reader.attention_kernels)),
    )


def _mesh_of(compiled: jax.stages.Compiled) -> Mesh | None:
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None
