"""What makes nothing that a step computes with: `jax.debug.print`, callbacks without a result."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import ArrayLike

from cjax.jax_compat.core import Equation
from cjax.jax_compat.jaxprs import traceback_of
from cjax.mesh import PIPE
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.primitives import name_of
from cjax.trace.jaxpr.tracebacks import place


def tell(eqn: Equation, ins: Sequence[ArrayLike], mesh: Mesh) -> list[Any]:
    """Evaluates such an equation: once for all devices, or where each computes by itself, on each with its examples.

    Raises:
      ValueError: in a stage of a pipeline, which would tell of micro-batches that are none, and where devices compute
        by themselves along some axes and not along two or more others, for which JAX (0.10 to 0.12) compiles none.
    """
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if manual and (PIPE in manual or len(mesh.axis_names) - len(manual) > 1):
        raise ValueError(
            f"{place(traceback_of(eqn))} prints or calls back ({name_of(eqn)}), which this plan's devices cannot: they "
            "are stages of a pipeline, or add up micro-batches of their own. Leave it out under this plan, or return "
            "what you want to see beside the loss: return loss, {'name': value}"
        )
    return bind(eqn, ins)
