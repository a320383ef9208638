"""Parameters by the part of a model that reads them, as one layer has them."""

from collections.abc import Mapping, Sequence

from cjax.jax_compat.core import Var
from cjax.planner.reading.naming import Naming
from cjax.planner.reading.stretches import Stretch
from cjax.planner.work import Weight
from cjax.trace.emit.precision import rounded_leaves
from cjax.trace.reading import Trace


def leaves_of(trace: Trace, found: Sequence[Stretch]) -> list[list[int]]:
    """For each stretch, the leaves of the parameters that it reads first; of a stack, those of its first layer.

    A weight that is read in several places is kept once, with the first.
    """
    index: dict[Var, int] = {var: i for i, var in enumerate(trace.closed.jaxpr.invars)}
    weights = {*trace.leaves_of("params"), *trace.leaves_of("frozen")}
    layered = {i for stretch in found if stretch.stack for group in stretch.stack.weights for i in group}
    taken: set[int] = set()
    leaves: list[list[int]] = []
    for stretch in found:
        mine = [group[0] for group in stretch.stack.weights] if stretch.stack else []
        nodes = (node for body in stretch.bodies for step in body.steps for node in step.reads if node is not None)
        others = dict.fromkeys(index[node.var] for node in nodes if node.var in index and not node.path)
        if stretch.stack:
            others |= dict.fromkeys(index[v] for entry in stretch.stack.reads for v in entry if v in index)
        mine += [i for i in others if i in weights and i not in layered and i not in taken]
        taken.update(mine)
        leaves.append(mine)
    # What no equation reads, a loop over layers reads, or nobody: it is kept all the same.
    leaves[-1] += [i for i in sorted(weights - layered - taken)]
    return leaves


def weight_of(trace: Trace, leaf: int, stretch: Stretch, multiplied: Mapping[int, bool], naming: Naming) -> Weight:
    """A parameter as one layer has it."""
    whole = trace.leaves[leaf]
    first = 1 if stretch.stack and not stretch.stack.is_run and (leaf,) in stretch.stack.weights else 0
    return Weight(
        whole.name,
        naming.dims(trace.classes_of(leaf)[first:], whole.shape[first:]),
        whole.dtype.itemsize,
        whole.kind == "params",
        multiplied.get(leaf, False),
        is_scanned=first == 1,
    )


def multiplied(trace: Trace) -> dict[int, bool]:
    """The leaves that products and lookups read: these are rounded to a half precision before they are sent."""
    return dict.fromkeys(rounded_leaves(trace.dims), True)
