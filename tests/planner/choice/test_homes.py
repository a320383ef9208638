"""Homes: always within what they were chosen for, the least that moves, and no more of it for more room."""

import itertools
import re
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cjax.plan import Plan
from cjax.plan.sizes import CLASSES, Offloaded, num_bytes
from cjax.planner.choice.homes import CHAIN, KINDS_OF, choose_homes, places, rounded_up, times_moved
from cjax.planner.costs.walk import WalkRates, walk_cost
from cjax.planner.homes import HALVES, KINDS, Home, Homes, Kind, Peaks, RowBytes, RowSizes, most_alive, occupied


@st.composite
def models(draw: st.DrawFn, most_layers: int = 3) -> tuple[RowSizes, Peaks]:
    lengths = draw(st.lists(st.integers(1, most_layers), min_size=1, max_size=2))
    kinds = ["params", *draw(st.lists(st.sampled_from(KINDS[1:]), unique=True))]
    devices = draw(st.integers(1, 3))

    def row(is_trained: bool, kind: str) -> RowBytes:
        size = draw(st.integers(1, 9)) if is_trained or kind in ("params", "frozen", "inputs") else 0
        return RowBytes(size, size * devices, size * draw(st.integers(1, devices)))

    trained = [[draw(st.booleans()) for _ in range(length)] for length in lengths]
    sizes: dict[Any, Any] = {
        kind: tuple(tuple(row(is_trained, kind) for is_trained in of) for of in trained) for kind in kinds
    }
    numbers = st.integers(0, 12)
    return sizes, Peaks(draw(numbers), *(draw(numbers) for _ in range(5)))


def moved(sizes: RowSizes, homes: Homes) -> int:
    return sum(
        row.device * times_moved(kind)
        for kind in sizes
        for rows, of in zip(sizes[kind], homes.of[kind], strict=True)
        for row, home in zip(rows, of, strict=True)
        if home != "device"
    )


def with_kept(sizes: RowSizes, kept: set[Any]) -> Homes:
    def home(at: Any, row: RowBytes) -> Home:
        return "device" if at in kept or not row.device else "host"

    return Homes({
        kind: tuple(
            tuple(home((kind, k, layer), row) for layer, row in enumerate(rows)) for k, rows in enumerate(sizes[kind])
        )
        for kind in sizes
    })  # fmt: skip


def choices(sizes: RowSizes, forced: set[Kind] = frozenset()) -> list[Homes]:  # pyright: ignore
    """All of which the best is to be found, made one by one."""
    chain = [at for kind in CHAIN if kind not in forced for at in places(sizes, kind)]
    grads = [] if "grads" in forced else list(places(sizes, "grads"))
    inputs = [] if "inputs" in forced else list(places(sizes, "inputs"))
    return [
        with_kept(sizes, {*chain[:a], *grads[:b], *inputs[len(inputs) - c :]})
        for a, b, c in itertools.product(range(len(chain) + 1), range(len(grads) + 1), range(len(inputs) + 1))
    ]


@settings(max_examples=80, deadline=None)
@given(models(), st.integers(0, 120), st.lists(st.sampled_from(CLASSES), unique=True))
def test_the_least_that_moves_of_all_that_fits(
    model: tuple[RowSizes, Peaks], budget: int, offload: list[Offloaded]
) -> None:
    sizes, peaks = model
    forced: set[Kind] = {kind for name in offload for kind in KINDS_OF[name]}
    every = choices(sizes, forced)
    fitting = [homes for homes in every if occupied(sizes, peaks, homes).peak <= budget]
    if not fitting:
        with pytest.raises(ValueError, match="less than a device needs at least") as raised:
            choose_homes(sizes, peaks, budget, offload=offload)
        found = re.search(r"write (budget=\w+)", str(raised.value))
        least = min(occupied(sizes, peaks, homes).peak for homes in every)
        assert found and Plan.parse(found[1]).budget == least  # sizes this small are exact
        choose_homes(sizes, peaks, least, offload=offload)
        return
    chosen = choose_homes(sizes, peaks, budget, offload=offload)
    assert occupied(sizes, peaks, chosen).peak <= budget
    assert moved(sizes, chosen) == min(moved(sizes, homes) for homes in fitting)
    assert chosen == choose_homes(sizes, peaks, budget, offload=offload)
    gone: set[Kind] = {kind for kind in forced if kind in sizes}
    for kind in gone:
        rows = zip(sum(sizes[kind], ()), sum(chosen.of[kind], ()), strict=True)
        assert all(home == "host" for row, home in rows if row.device)


@settings(max_examples=30, deadline=None)
@given(models(), st.lists(st.sampled_from(CLASSES), unique=True))
def test_more_budget_never_moves_more(model: tuple[RowSizes, Peaks], offload: list[Offloaded]) -> None:
    sizes, peaks = model
    last = None
    for budget in range(0, 150, 3):
        try:
            now = moved(sizes, choose_homes(sizes, peaks, budget, offload=offload))
        except ValueError:
            assert last is None, "a larger budget was refused"
            continue
        assert last is None or now <= last
        last = now


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(0, 100), st.integers(1, 200))
def test_host_and_disk_hold_no_more_than_they_may(model: tuple[RowSizes, Peaks], host: int, disk: int) -> None:
    sizes, peaks = model
    try:
        homes = choose_homes(sizes, peaks, host=host, disk=disk, offload=CLASSES)
    except ValueError as error:
        words = re.findall(r"(host|disk)=(\w+)", str(error).partition("; write ")[2])
        for name, text in words:  # either of them is enough
            room: Any = {"host": host, "disk": disk, name: num_bytes(name, text, least=0)}
            choose_homes(sizes, peaks, **room, offload=CLASSES)
        return
    found = occupied(sizes, peaks, homes)
    assert sum(found.host.values()) <= host and sum(found.disk.values()) <= disk
    rows: list[tuple[Kind, int, int]] = [
        (kind, k, layer) for kind in sizes for k, of in enumerate(sizes[kind]) for layer in range(len(of))
    ]
    on_disk = [at for at in rows if homes.of[at[0]][at[1]][at[2]] == "disk"]
    assert sum(found.disk.values()) == sum(sizes[k][s][i].disk * HALVES[k] for k, s, i in on_disk)


SECONDS = st.floats(0, 50)


@settings(max_examples=60, deadline=None)
@given(models(), st.integers(0, 120), SECONDS, SECONDS, st.booleans(), st.booleans())
def test_where_seconds_are_known_no_step_is_slower_for_it(
    model: tuple[RowSizes, Peaks], budget: int, forward: float, backward: float, on_disk: bool, defers: bool
) -> None:
    sizes, peaks = model
    options: Any = {"host": 0, "disk": 10**6, "alone": [True] * len(sizes["params"])} if on_disk else {}
    options |= {"defers": defers}

    def seconds(homes: Homes) -> float:
        compute: Any = {"forward": forward, "backward": backward}
        return walk_cost(sizes, homes, WalkRates(1.0, 1.0, 1.0), compute, 1).total or 0.0

    try:
        by_bytes = choose_homes(sizes, peaks, budget, **options)
    except ValueError:
        return
    by_time = choose_homes(sizes, peaks, budget, seconds=seconds, **options)
    assert seconds(by_time) <= seconds(by_bytes) and occupied(sizes, peaks, by_time).peak <= budget
    assert defers or not by_time.deferred


def test_fewer_layers_stay_at_home_where_that_leaves_room_to_update_the_others_on_the_way() -> None:
    row = {"params": 4, "opt": 8, "grads": 4, "inputs": 2}
    sizes: Any = {kind: ((RowBytes(size, size, size),) * 12,) for kind, size in row.items()}
    peaks = Peaks(10, 4, 4, 8, 4)

    def seconds(homes: Homes) -> float:
        return walk_cost(sizes, homes, WalkRates(1.0, 1.0, 1.0), {"forward": 1.0, "backward": 1.0}, 1).total or 0.0

    options: Any = {"host": 0, "disk": 10**6, "alone": [True]}
    away = choose_homes(sizes, peaks, None, offload=CLASSES, **options)
    least = occupied(sizes, peaks, away).peak
    assert len(away.fused) == 12
    found = []
    for budget in range(least, least + 50):
        plain = choose_homes(sizes, peaks, budget, **options)
        timed = choose_homes(sizes, peaks, budget, seconds=seconds, **options)
        assert occupied(sizes, peaks, timed).peak <= budget and seconds(timed) <= min(map(seconds, (plain, away)))
        found.append((bool(plain.fused), bool(timed.fused)))
    assert found[0] == (False, True)


def test_an_update_is_deferred_where_devices_and_disk_have_the_room() -> None:
    options: Any = {"host": 0, "offload": CLASSES, "defers": True, "record": 7}
    found = {
        disk: choose_homes(ROWS, PEAKS, disk=disk, **options) for disk in (2 * 8 * 6 + 2 * 16 * 6 + 12 * 6 + 7, 10**6)
    }
    (near, tight), (_, wide) = found.items()
    assert not tight.deferred and sum(occupied(ROWS, PEAKS, tight).disk.values()) + 7 == near
    assert len(wide.deferred) == 6 and sum(occupied(ROWS, PEAKS, wide).disk.values()) + 7 == near + 8 * 6
    least = occupied(ROWS, PEAKS, tight).peak
    for budget in range(least, least + 40):
        homes = choose_homes(ROWS, PEAKS, budget, disk=10**6, **options)
        assert occupied(ROWS, PEAKS, homes).peak <= budget and bool(homes.deferred) == (
            occupied(ROWS, PEAKS, wide).peak <= budget
        )
    # Two rows of state and two of gradients are there beside what the forward pass has, or are at home there.
    assert occupied(ROWS, PEAKS, wide).peaks["forward"] - occupied(ROWS, PEAKS, tight).peaks["forward"] == 2 * (8 + 4)
    # A killed run goes on from its disk: what is due is there with all that it reads.
    lost: Any = {"host": 0, "disk": 10**6, "offload": ["params", "optimizer"], "defers": True}
    assert not choose_homes(ROWS, PEAKS, **lost).deferred
    here = choose_homes(ROWS, PEAKS, offload=["optimizer"], defers=True)
    assert len(here.deferred) == 6 and not choose_homes(ROWS, PEAKS, defers=True).deferred
    held = [
        occupied(ROWS, PEAKS, homes).peaks["forward"]
        for homes in (here, choose_homes(ROWS, PEAKS, offload=["optimizer"]))
    ]
    assert held[0] - held[1] == 2 * 8 + 6 * 4


def test_gradients_go_to_a_disk_that_has_all_else_where_updates_are_hidden_then() -> None:
    def seconds(homes: Homes) -> float:
        return walk_cost(ROWS, homes, WalkRates(1.0, 1.0, 1.0), {"forward": 1e3, "backward": 1e3}, 1).total or 0.0

    options: Any = {"host": 0, "disk": 10**6, "offload": ["params", "optimizer"], "seconds": seconds}
    passes = choose_homes(ROWS, PEAKS, **options)
    homes = choose_homes(ROWS, PEAKS, defers=True, **options)
    assert not passes.deferred and kept(passes)["grads"] == 6
    assert len(homes.deferred) == 6 and homes.of["grads"] == (("disk",) * 6,) and seconds(homes) < seconds(passes)
    # Where the disk has no room for them, they stay, and the update is a pass.
    full = {**options, "disk": sum(occupied(ROWS, PEAKS, passes).disk.values())}
    assert choose_homes(ROWS, PEAKS, defers=True, **full) == passes


def test_what_computing_hides_leaves_before_what_the_update_waits_for() -> None:
    """With room for the inputs or for as much of the optimizer's state: the former move beside the backward pass."""

    sizes: RowSizes = {**ROWS, "inputs": ((RowBytes(16, 32, 32),) * 6,)}

    def seconds(homes: Homes) -> float:
        return walk_cost(sizes, homes, WalkRates(1.0), {"forward": 1e3, "backward": 1e3}, 1).total or 0.0

    found = [choose_homes(sizes, PEAKS, 120), choose_homes(sizes, PEAKS, 120, seconds=seconds)]
    assert kept(found[1])["inputs"] < kept(found[0])["inputs"] and seconds(found[1]) < seconds(found[0])


ROWS: RowSizes = {
    "params": ((RowBytes(4, 8, 8),) * 6,),
    "opt": ((RowBytes(8, 16, 16),) * 6,),
    "grads": ((RowBytes(4, 8, 8),) * 6,),
    "inputs": ((RowBytes(2, 4, 4),) * 6,),
}
PEAKS = Peaks(outside=10, forward=3, after=5, backward=7, update=2)


def kept(homes: Homes) -> dict[str, int]:
    return {kind: sum(home == "device" for home in sum(of, ())) for kind, of in homes.of.items()}


@pytest.mark.parametrize(
    ("offload", "away"),
    [
        (["optimizer"], {"opt"}),
        (["params", "optimizer"], {"params", "opt"}),
        (["activations"], {"inputs"}),
        (["gradients"], {"grads"}),
    ],
)
def test_without_a_budget_the_named_go_and_all_else_stays(offload: list[Offloaded], away: set[str]) -> None:
    assert kept(choose_homes(ROWS, PEAKS, offload=offload)) == {kind: 0 if kind in away else 6 for kind in ROWS}


def test_whole_layers_from_the_first_on_and_inputs_from_the_last_back() -> None:
    homes = choose_homes(ROWS, PEAKS, budget=10 + 7 + 4 * 6 + 8 * 3 + 8)
    assert kept(homes)["params"] == 6
    for kind in ("opt", "grads"):
        of = homes.of[kind][0]
        assert list(of) == sorted(of)  # "device" comes before "host"
    assert list(homes.of["inputs"][0]) == sorted(homes.of["inputs"][0], reverse=True)


def test_what_was_short_is_said() -> None:
    with pytest.raises(ValueError, match=r"host=100B takes them in part; write host=216B, or host=100B disk="):
        choose_homes(ROWS, PEAKS, host=100, offload=CLASSES)
    with pytest.raises(ValueError, match=r"disk=10B is .* less; write disk=\w+, or host=216B"):
        choose_homes(ROWS, PEAKS, host=100, disk=10, offload=CLASSES)
    with pytest.raises(ValueError, match=r"disk=200B is 45 B less; write disk=245B"):
        choose_homes(ROWS, PEAKS, host=100, disk=200, offload=CLASSES, record=77)
    with pytest.raises(ValueError, match="no layers that repeat"):
        choose_homes({}, PEAKS, budget=100)
    with pytest.raises(ValueError, match=r"10 B outside of layers, 2 B the update itself, 32 B rows of layers"):
        choose_homes(ROWS, PEAKS, budget=20)


def test_the_fullest_moment_of_a_backward_pass() -> None:
    assert most_alive([1, 2, 3], []) == 6 == most_alive([], [3, 2, 1])
    assert most_alive([5, 1, 1], [1, 1, 5]) == max(5 + 7, 6 + 6, 7 + 5)
    assert most_alive([0, 0, 4], [4, 0, 0]) == 4  # one is used up before the other is made


@given(st.integers(1, 2**62))
def test_rounded_up_is_enough_and_little_more(number: int) -> None:
    text = rounded_up(number)
    found = Plan(budget=text).budget
    assert found is not None and number <= found <= number * 1.01


def test_homes_are_ordered_by_how_far_they_are() -> None:
    assert get_args(Home) == ("device", "host", "disk")
