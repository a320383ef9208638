"""Steps that walk over layers: what they move and how long they take, against arithmetic that was done by hand."""

import dataclasses
from typing import Any

import pytest

from cjax.machines import Cluster
from cjax.planner.choice.homes import choose_homes
from cjax.planner.costs.walk import DISK_READ, DISK_WRITE, WalkCost, WalkRates, rates_of, reading_again, walk_cost
from cjax.planner.hardware import hardware_of_cluster
from cjax.planner.homes import TRAFFIC, Home, Homes, Peaks, RowBytes, RowSizes

FLOPS = 989.4e12 / 2  # of an H100 at half of its peak
H100 = WalkRates(55e9, 12e9, 9e9)
# The update in the backward pass, without a norm of all gradients before it.
FUSED: Any = {
    "forward": {"params": (1, 0), "inputs": (0, 1)},
    "backward": {"params": (1, 1), "opt": (1, 1), "inputs": (1, 0)},
}


@dataclasses.dataclass(frozen=True)
class Shape:
    params: float
    layers: int
    width: int

    def sizes(self, tokens: int, has_grads: bool = True) -> RowSizes:
        """Float32 parameters, Adam's state, gradients; what a layer is handed in half precision."""

        def rows(size: float) -> Any:
            return ((RowBytes(int(size), int(size), int(size)),) * self.layers,)

        weights = 4 * self.params / self.layers
        found: Any = {"params": rows(weights), "opt": rows(2 * weights), "inputs": rows(2 * tokens * self.width)}
        return found | ({"grads": rows(weights)} if has_grads else {})

    def compute(self, tokens: int) -> Any:
        return {"forward": 2 * self.params * tokens / FLOPS, "backward": 6 * self.params * tokens / FLOPS}

    def cost(self, tokens: int, split: tuple[int, int], is_fused: bool, inputs: Home = "device") -> WalkCost:
        """With so many layers on the device and in host memory, the rest on disk."""
        device, host = split
        places: Any = ("device",) * device + ("host",) * host + ("disk",) * (self.layers - device - host)
        sizes = self.sizes(tokens, not is_fused)
        homes = Homes({kind: (places,) for kind in sizes if kind != "inputs"} | {"inputs": ((inputs,) * self.layers,)})
        return walk_cost(sizes, homes, H100, self.compute(tokens), tokens, FUSED if is_fused else TRAFFIC)


SEVEN, THIRTEEN = Shape(6.74e9, 32, 4096), Shape(13.0e9, 40, 5120)
SEVENTY, LARGE = Shape(69.0e9, 80, 8192), Shape(174.6e9, 96, 12288)


@pytest.mark.parametrize(
    ("shape", "tokens", "split", "fused", "in_passes", "bound"),
    [
        # 75 GB of an H100, 220 GB of host memory and a disk, as whole layers.
        (SEVEN, 2**14, (25, 7), 1.8, 2.2, "compute"),
        (THIRTEEN, 2**14, (15, 25), 3.4, 5.8, "compute"),
        (THIRTEEN, 2**16, (10, 30), 13.8, 16.7, "compute"),
        (SEVENTY, 2**14, (2, 22), 129, 183, "disk"),
        (SEVENTY, 2**17, (5, 5), 179, 308, "disk"),
        (LARGE, 2**14, (1, 9), 420, 595, "disk"),
    ],
)
def test_a_step_of_published_shapes(
    shape: Shape, tokens: int, split: tuple[int, int], fused: float, in_passes: float, bound: str
) -> None:
    found = [shape.cost(tokens, split, is_fused, "host").total for is_fused in (True, False)]
    assert found == pytest.approx([fused, in_passes], rel=0.03)
    assert shape.cost(tokens, split, True, "host").bound == bound
    assert shape.cost(tokens, split, False).compute == pytest.approx(8 * shape.params * tokens / FLOPS)


@pytest.mark.parametrize("shape", [SEVEN, SEVENTY, LARGE])
@pytest.mark.parametrize(("link", "tokens"), [(55e9, 18_000), (25e9, 40_000), (200e9, 5_000)])
def test_tokens_from_which_all_is_hidden_hang_on_the_link_alone(shape: Shape, link: float, tokens: int) -> None:
    """(Bytes a parameter / link) / (operations a parameter and token / rate), whatever the number of parameters."""
    sizes = {kind: rows for kind, rows in shape.sizes(1, False).items() if kind != "inputs"}
    homes = Homes({kind: (("host",) * shape.layers,) for kind in sizes})
    found = walk_cost(sizes, homes, WalkRates(link), shape.compute(1024), 1024, FUSED).hidden_from  # pyright: ignore
    assert found == pytest.approx(tokens, rel=0.04)
    homes = Homes({kind: (("disk",) * shape.layers,) for kind in sizes})
    rates = WalkRates(link, 12e9, 12e9)
    on_disk = walk_cost(sizes, homes, rates, shape.compute(1024), 1024, FUSED).hidden_from  # pyright: ignore
    assert on_disk == pytest.approx(165_000, rel=0.01)


def test_inputs_that_take_longer_than_the_arithmetic_are_never_hidden() -> None:
    thin = Shape(1e3, 4, 4096)  # hardly any arithmetic for each number that is handed on
    assert thin.cost(2**14, (4, 0), False, "host").hidden_from is None
    assert thin.cost(2**14, (4, 0), False).hidden_from == 0


def test_at_the_tokens_named_nothing_waits() -> None:
    for shape, split in ((SEVEN, (5, 27)), (THIRTEEN, (0, 40)), (SEVENTY, (0, 40))):
        found = shape.cost(2**12, split, False, "host").hidden_from
        assert found is not None
        for tokens, hides in ((found, True), (0.98 * found, False)):
            cost = shape.cost(int(tokens), split, False, "host")
            assert (max(cost.seconds[phase].waits for phase in ("forward", "backward")) < 1e-4) == hides


def test_bytes_by_kind_and_what_wears_out_the_disk() -> None:
    sizes: RowSizes = {kind: ((RowBytes(10, 20, 15),) * 3,) for kind in ("params", "opt", "grads", "inputs")}
    places: Any = (("device", "host", "disk"),)
    cost = walk_cost(sizes, Homes({kind: places for kind in sizes}), H100, None, 1)  # pyright: ignore
    moved = {kind: dataclasses.astuple(each) for kind, each in cost.moved.items()}
    assert moved == {
        "params": (3 * 20, 20, 3 * 15, 15),
        "opt": (20, 20, 15, 15),
        "grads": (20, 20, 15, 15),
        "inputs": (20, 20, 15, 15),
    }
    assert cost.disk_written == 60 and cost.total is None and cost.bound is None and cost.hidden_from is None
    again = walk_cost(sizes, Homes({kind: places for kind in sizes}), H100, None, 1, reading_again({"grads": 2}))  # pyright: ignore  # fmt: skip
    assert again.moved["grads"].link_in == 60 and again.moved["params"] == cost.moved["params"]


def test_what_is_chosen_costs_little_more_than_without_places_for_gradients() -> None:
    """The figures above leave gradients out of what memory holds; with them, steps are up to a half longer."""
    for shape, bound, least in ((SEVEN, "compute", 2.2), (THIRTEEN, "link", 5.8), (SEVENTY, "disk", 183)):
        sizes, working = shape.sizes(2**14), 34 * 8192 * shape.width * 2
        peaks = Peaks(0, working // 3, 0, working, 0)
        homes = choose_homes(sizes, peaks, int(75e9), int(220e9), int(3.9e12))
        cost = walk_cost(sizes, homes, H100, shape.compute(2**14), 2**14)
        assert cost.total is not None and 0.9 * least < cost.total < 1.6 * least
        assert cost.bound in (bound, "compute")


def test_rates_of_cards() -> None:
    links = {name: rates_of(hardware_of_cluster(Cluster.parse(name), 1)).link for name in ("h100:1", "a100:1")}
    assert links == pytest.approx({"h100:1": 55e9, "a100:1": 27.5e9}, rel=0.01)
    assert (DISK_READ, DISK_WRITE) == (12e9, 9e9)


def test_an_update_that_is_deferred_moves_beside_the_next_forward_pass() -> None:
    """Parameters come once less, and the update's own time is that of what it reads more often than once."""
    row = (RowBytes(4, 8, 16),) * 3
    sizes: RowSizes = {"params": (row,), "opt": (row,), "grads": (row,), "inputs": (row,)}
    homes = Homes({kind: (("disk",) * 3,) for kind in sizes})
    costs = {
        name: walk_cost(sizes, each, H100, {"forward": 1.0, "backward": 1.0}, 1, reading_again({"grads": 1}))
        for name, each in (("in a pass", homes), ("deferred", homes.with_deferred(sizes)))
    }
    for kind, (more, out) in {"params": (1, 1), "opt": (0, 1), "grads": (0, 1), "inputs": (0, 1)}.items():
        there, after = (costs[name].moved[kind] for name in ("in a pass", "deferred"))
        assert there.disk_read - after.disk_read == more * 48 and there.link_in - after.link_in == more * 12
        assert after.disk_written == there.disk_written == out * 48
    update = costs["deferred"].seconds["update"]
    assert (update.link_in, update.link_out) == (12 / 55e9, 0.0)
    assert costs["deferred"].seconds["forward"].link_in == 3 * 12 / 55e9
