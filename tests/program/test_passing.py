"""What a budget leaves for passes forward beside a state whose rows are at home here or there."""

from contract import walking_program

from cjax.planner.homes import Homes
from cjax.program.composed import Composed
from cjax.program.passing import STATE, host_left, room_of
from cjax.walk.measured import num_bytes, row_sizes

BUDGET, HOST = 2**20, 3 * 2**20


def composed() -> Composed:
    return walking_program("linen_tied", f"data=8 budget={BUDGET}B host={HOST}B")._composed


def test_rows_at_home_on_the_device_take_room_and_those_that_pass_two_of_each_kind() -> None:
    made = composed()
    walker = made.walker
    assert walker is not None
    sizes, lengths = row_sizes(walker), walker.lengths
    outside = num_bytes(made.state_shape._model_state)
    outside += sum(num_bytes(walker.outside_structs(kind)) for kind in STATE)
    all_rows = {kind: [row.device for rows in sizes[kind] for row in rows] for kind in STATE}
    assert len(lengths) == 1 and lengths[0] > 2 and all(all_rows["params"]) and all(all_rows["opt"])

    here, there = (Homes.all_at(home, lengths) for home in ("device", "host"))
    assert room_of(made, here) == BUDGET - outside - sum(sum(rows) for rows in all_rows.values())
    assert room_of(made, there) == BUDGET - outside - 2 * all_rows["params"][0] - 2 * all_rows["frozen"][0]
    assert room_of(made, there, STATE) == room_of(made, there) - 2 * all_rows["opt"][0]


def test_rows_at_home_on_the_host_take_its_room() -> None:
    made = composed()
    walker = made.walker
    assert walker is not None
    sizes, lengths = row_sizes(walker), walker.lengths
    assert host_left(made, Homes.all_at("device", lengths)) == host_left(made, Homes.all_at("disk", lengths)) == HOST
    held = sum(row.host for kind in STATE for rows in sizes[kind] for row in rows)
    assert host_left(made, Homes.all_at("host", lengths)) == HOST - held < HOST
