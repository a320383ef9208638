"""Which products are sums over devices, each of which has multiplied a part of what is contracted."""

from typing import Any

from jax.sharding import Mesh

from cjax.jax_compat.core import Equation, Literal
from cjax.sharding.layout.layout import Layout
from cjax.sharding.storage.storage import axes_of_entry
from cjax.trace.dims.classes import Dims, Scope
from cjax.trace.emit.abreast import awaited
from cjax.trace.jaxpr.primitives import name_of


class PartialProducts:
    """Marks such products, for micro-batches that run abreast (`cjax.trace.emit.abreast`).

    Args:
      dims: of the trace.
      layout: where its tensors are.
      mesh: the mesh.
      marks: whether to; otherwise results are left as they are.
    """

    def __init__(self, dims: Dims, layout: Layout, mesh: Mesh, marks: bool) -> None:
        self._dims, self._layout, self._mesh, self._marks = dims, layout, mesh, marks

    def mark(self, result: Any) -> Any:
        """A result of which devices have parts, marked."""
        return awaited(result) if self._marks else result

    def marked(self, eqn: Equation, outs: list[Any], scope: Scope) -> list[Any]:
        """The results of an equation, marked if they are such a sum."""
        if not self._marks or name_of(eqn) != "dot_general":
            return outs
        contracted, _ = eqn.params["dimension_numbers"]
        is_sum = any(self._splits(eqn.invars[place], dims, scope) for place, dims in enumerate(contracted))
        return list(map(self.mark, outs)) if is_sum else outs

    def _splits(self, atom: Any, dims: Any, scope: Scope) -> bool:
        if isinstance(atom, Literal):
            return False
        spec = self._layout.spec(self._dims.of(atom, scope), atom.aval.shape)
        return any(self._mesh.shape[axis] > 1 for dim in dims for axis in axes_of_entry(spec[dim]))
