"""Experts shared out among data-parallel devices, `expert=N` (Lepikhin et al., GShard, 2020; Rajbhandari et al.,
DeepSpeed-MoE, 2022).

Each device has some of the experts whole. What is sent to an expert and what it makes of it are where the expert is;
who is sent where, and what comes back to each example, are where the examples are. Between the two, devices exchange
what is sent. A tensor is on the experts' side if it has, beside the experts, a dim that an expert multiplies or makes.
"""

from collections.abc import Sequence, Set

from cjax.sharding.layout.one_d import experts_of, find_products
from cjax.trace.reading import Trace, primitives


def shared_experts(trace: Trace, size: int, excluded: Set[int]) -> tuple[list[int], list[str]]:
    """Classes of experts to share out among `size` devices, and what there is to say about others.

    Args:
      trace: the model.
      size: of the axis.
      excluded: classes that have their place already.

    Raises:
      ValueError: no experts, a number of them that the axis does not divide, or a place that they have already.
    """
    dims, numbers = trace.dims, dict[int, set[int]]()
    for ids in dims.inputs:
        for d in ids:
            c = dims.class_of(d)
            if c in experts_of(trace) - excluded and dims.size[d] > 1:
                numbers.setdefault(c, set()).add(dims.size[d])
    chosen = [c for c, found in sorted(numbers.items()) if all(number % size == 0 for number in found)]
    uneven = sorted({number for c, found in numbers.items() if c not in chosen for number in found})
    if chosen:
        notes = [f"{number} experts are whole on every device: expert={size} does not divide them" for number in uneven]
        return chosen, notes
    if uneven:
        works = sorted({d for number in uneven for d in range(2, number + 1) if number % d == 0})
        raise ValueError(
            f"expert={size} can't share out {' or '.join(map(str, uneven))} experts evenly. Write a size that divides "
            f"them: {', '.join(map(str, works))}."
        )
    if experts_of(trace) & excluded:
        raise ValueError(f"expert={size} shares out experts that `rules` has placed already: leave one of the two out.")
    sorts = "ragged_dot_general" in primitives(trace)
    why = (
        "it sorts tokens for its experts (lax.ragged_dot), whose rows are no expert's alone"
        if sorts
        else "no product in it has a weight of its own for each of several experts"
    )
    raise ValueError(
        f"expert={size} shares out the experts of a mixture, and this model has none that it can: {why}. "
        f"Leave expert={size} out{f', or write tensor={size}, which splits each of them inside' if sorts else ''}."
    )


def features_of(trace: Trace, experts: Sequence[int]) -> frozenset[int]:
    """Classes that weights have beside their experts: what an expert multiplies, and what it makes.

    Args:
      trace: the model.
      experts: classes that are shared out.
    """
    mine = [product for product in find_products(trace)[0] if product.batched & set(experts)]
    return frozenset(c for product in mine for c in product.weight) - frozenset(experts)
