"""Room that stages have, without making a table: what the table and its wiring have."""

import pytest

from cjax.pipeline.partition import partition
from cjax.pipeline.schedule import build
from cjax.pipeline.wiring import wire
from cjax.planner.costs.places import places, route_of


@pytest.mark.parametrize(
    ("kind", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("zero_bubble", 2), ("interleaved", 3)]
)
@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_of_one_stack_they_are_those_of_the_table(kind: str, chunks: int, stages: int) -> None:
    for microbatches in range(1, 2 * stages + 4):
        if kind != "interleaved" or microbatches % stages == 0:
            schedule = build(kind, stages, microbatches, chunks)
            cut = partition((16,), schedule.route, 0.5)
            wiring = wire(schedule, cut)
            found = places(kind, stages, microbatches, chunks, cut)
            assert found == (wiring.slots, wiring.end_slots, wiring.num_messages), microbatches
            assert route_of(kind, stages, chunks) == schedule.route


@pytest.mark.parametrize(("kind", "name"), [("interleaved", "interleaved"), ("gpipe", "gpipe")])
def test_of_several_stacks_they_are_full_after_two_micro_batches_a_stage(kind: str, name: str) -> None:
    cut = partition((4, 4), route_of(name, 2, 2), 0.5)
    few, many = (places(kind, 2, m, 2, cut) for m in (4, 8))
    assert (few == many) == (kind != "gpipe")
