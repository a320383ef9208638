"""Stacks cut where layers begin to be trained otherwise."""

from typing import Any

import pytest
from traces import BATCH, DEPTH, ends, hidden, plain_trace, weights

from cjax.trace.reading import Trace
from cjax.trace.stages.alike import find_alike_stacks
from cjax.trace.stages.stacks import cut, find_stacks


def partly(is_trained: list[bool], names: tuple[str, ...] = ("up", "down")) -> Trace:
    """A trace of as many layers, of which some have weights of these names trained and the others all frozen."""
    layers = [weights()[at % DEPTH] for at in range(len(is_trained))]
    split = [
        {name: w for name, w in layer.items() if on and name in names}
        for on, layer in zip(is_trained, layers, strict=True)
    ]
    left = [{name: w for name, w in layer.items() if name not in own} for own, layer in zip(split, layers, strict=True)]

    def loss(params: Any, frozen: Any, model_state: Any, batch: Any, key: Any, index: Any) -> Any:
        x = batch["x"] @ params["in"]
        for own, rest in zip(params["layers"], frozen["layers"], strict=True):
            x = x + hidden(x, {**rest, **own})
        return (x @ params["out"]).sum(), {}, model_state

    return plain_trace(loss, params=ends(layers=split), frozen={"layers": left}, batch=BATCH)


@pytest.mark.parametrize(
    ("is_trained", "lengths"),
    [
        ("ffftt", [3, 2]),
        ("ttff", [2, 2]),
        ("fffft", [4]),  # one alone is no stack
        ("fttf", [2]),
        ("ffttff", [2, 2, 2]),
        ("tttt", [4]),
        ("ffff", [4]),
        ("ftft", [4]),  # left as it is, since none is like its neighbour
    ],
)
@pytest.mark.parametrize("names", [("up", "down"), ("up",)])
def test_layers_of_a_stack_are_trained_alike(is_trained: str, lengths: list[int], names: tuple[str, ...]) -> None:
    trace = partly([letter == "t" for letter in is_trained], names)
    (whole,) = find_stacks(trace)
    stacks = find_alike_stacks(trace)
    assert [stack.length for stack in stacks] == lengths
    for stack in stacks:
        kinds = [{trace.leaves[i].kind for i in group} for group in stack.weights]
        assert all(len(kind) == 1 for kind in kinds)
        if stack.length < len(is_trained):
            assert len(stack.weights) == 2, "each layer of it has all of its weights"
            assert stack.flops * whole.length == whole.flops * stack.length
    assert whole.start <= stacks[0].start and stacks[-1].stop <= whole.stop
    assert all(one.stop <= two.start for one, two in zip(stacks, stacks[1:], strict=False))
    # What is left of the layers stands among the equations outside.
    items = cut(trace, stacks).items
    assert len(items) == len(trace.closed.jaxpr.eqns) - sum(stack.stop - stack.start for stack in stacks)
