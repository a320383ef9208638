"""Machines that are not here: what their text says, and what is refused."""

import dataclasses
import re

import pytest

import cjax
from cjax.cards import CARDS
from cjax.machines import Cluster


@pytest.mark.parametrize(("num", "topology"), [(1, "1x1x1"), (5, "1x1x5"), (8, "1x1x8"), (16, "2x1x8"), (64, "8x1x8")])
def test_cards_fill_hosts(num: int, topology: str) -> None:
    assert Cluster("h100", num).topology == topology


def test_a_card_alone_is_as_vendors_build_its_hosts() -> None:
    cluster, card = cjax.Cluster("h100", 64), CARDS["h100"]
    assert cluster == Cluster.parse("h100:64") == Cluster.parse(" H100 : 64 ") == Cluster(card, 64)
    assert (cluster.cards_per_host, cluster.adapters_per_host, cluster.memory) == (8, 8, card.memory)
    assert (cluster.host_bandwidth, cluster.network_bandwidth) == (card.host_bandwidth, card.network_bandwidth)
    assert (cluster.price, cluster.power) == (card.price, card.power)
    assert cluster.xla_target == card.xla_target()


def test_every_word_says_one_thing() -> None:
    text = "h100:64/node=4,nvlink=450GiB/s,network=2x400Gb/s,memory=64GiB,price=$2.5,power=650W"
    cluster = Cluster.parse(text)
    assert cluster == Cluster(
        "h100", 64, cards_per_host=4, host_bandwidth=450 * 2**30, network_bandwidth=50e9, adapters_per_host=2,
        memory=64 * 2**30, price=2.5, power=650.0,
    )  # fmt: skip
    assert f"device_memory_size: {64 * 2**30}\n" in cluster.xla_target
    assert cluster.topology == "16x1x4"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("h100", "h100"),
        ("h100:64/node=8,nvlink=450GB/s,network=8x50GB/s,price=2.69,power=700", "h100:64"),
        ("a100:16/ node=4 , nvlink=25 GB/s ,", "a100:16/node=4,nvlink=25GB/s"),
        ("h100:8/network=100Gbps", "h100:8/network=1x12.5GB/s"),
        ("h100:8/network=8 x 3125MB/s,memory=80e9B", "h100:8/network=8x3.125GB/s,memory=80GB"),
        ("rtx4090:8/node=2,price=0", "rtx4090:8/node=2,price=0.0"),
    ],
)
def test_it_is_written_as_it_is_read(text: str, shown: str) -> None:
    assert str(Cluster.parse(text)) == repr(Cluster.parse(text)) == shown
    assert Cluster.parse(shown) == Cluster.parse(text)


def test_adapters_are_in_proportion_to_the_cards_of_a_host() -> None:
    assert [Cluster("h100", cards_per_host=n).adapters_per_host for n in (1, 4, 8, 16)] == [1, 4, 8, 16]
    assert [Cluster("h100-pcie", cards_per_host=n).adapters_per_host for n in (1, 4, 8)] == [1, 2, 4]
    assert Cluster("rtx4090", cards_per_host=8).adapters_per_host == 2
    # What the text says of a network is of one adapter, if it does not say of how many.
    assert Cluster.parse("h100:64/network=100Gb/s").adapters_per_host == 1


def test_the_number_can_be_left_open() -> None:
    cluster = Cluster.parse("h100/node=4,price=2")
    assert cluster.num_devices is None and str(cluster) == "h100/node=4,price=2.0"
    assert [n for n in range(0, 14) if cluster.fits(n)] == [1, 2, 3, 4, 8, 12]
    assert cluster.with_devices(12) == Cluster.parse("h100:12/node=4,price=2")
    with pytest.raises(ValueError, match="no multiple of 4"):
        cluster.with_devices(6)


@pytest.mark.parametrize(
    ("text", "underlined", "instead"),
    [
        ("h100:64/node=7", "node=7", "h100:63 or h100:70, or how many a host has: h100:64/node=8"),
        ("h100:20", "20", "h100:16 or h100:24, or how many a host has: h100:20/node=10"),
        ("h100:64/node=-8", "node=-8", "write node=8"),
        ("h100:64/node=0", "node=0", "write node=8"),
        ("h100:64/node=2.5", "node=2.5", "write node=8"),
        ("h100:64/node", "node", "node needs a value; write node=8"),
        ("h100:64/nvlink=-1GB/s", "nvlink=-1GB/s", "write nvlink=450GB/s"),
        ("h100:64/nvlink=0GB/s", "nvlink=0GB/s", "can't be meant"),
        ("h100:64/nvlink=450", "nvlink=450", "write nvlink=450GB/s"),
        ("h100:64/nvlink=450GB", "nvlink=450GB", "is not a rate"),
        ("h100:64/nvlink=450B/s", "nvlink=450B/s", "can't be meant"),
        ("h100:64/network=0x50GB/s", "network=0x50GB/s", "at least one"),
        ("h100:64/memory=80", "memory=80", "write memory=80GiB"),
        ("h100:64/memory=640Gb", "memory=640Gb", "write memory=80GiB"),
        ("h100:64/price=free", "price=free", "write price=2.5"),
        ("h100:64/price=-1", "price=-1", "write price=2.5"),
        ("h100:64/power=0", "power=0", "can't be meant"),
        ("h100:64/node=8,price=2,node=4", "node=4", "node is given twice: node=8 before"),
        ("h100:64/pcie=32GB/s", "pcie=32GB/s", "write nvlink="),
        ("h100:64/pricee=2", "pricee=2", "write price="),
        ("h100:64/foo=3", "foo=3", "there are node=8, nvlink="),
        ("h100:64/", " ", "a word is missing here"),
        ("h100:64/,node=8", ",", "a word is missing here"),
        ("h100:0", "0", "h100:8"),
        ("h100:-8", "-8", "h100:8"),
        ("h100:many", "many", "in digits"),
        ("h100:", " ", "in digits"),
        ("h100:9999999999999999999", "9999999999999999999", "more than a million"),
        ("h100 64", "h100 64", 'as "h100:64"'),
        ("h100,64", "h100,64", 'as "h100:64"'),
        ("", " ", 'as "h100:64"'),
        ("4090:8", "4090", "did you mean rtx4090"),
        ("b17:8", "b17", "the cards known are a100"),
    ],
)
def test_contradictory_text_is_underlined(text: str, underlined: str, instead: str) -> None:
    with pytest.raises(ValueError, match=re.escape(instead)) as error:
        Cluster.parse(text)
    _, shown, marks, *_ = str(error.value).splitlines()
    start, stop = marks.index("^"), marks.rindex("^") + 1
    assert shown.strip() == text.strip() and shown[start:stop] in (underlined, underlined.strip()), str(error.value)


def test_an_unknown_card_can_be_described() -> None:
    with pytest.raises(ValueError, match="dataclasses.replace.*\n.*\n *devices=cjax.Cluster"):
        Cluster("b17", 8)
    card = dataclasses.replace(CARDS["h100"], name="b17", kind="B17", memory=192 * 2**30, bf16_flops=2.25e15, chip=None)
    cluster = Cluster(card, 16, host_bandwidth=900e9)
    assert str(cluster) == "b17:16/nvlink=900GB/s" and not cluster.card.is_compilable


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_devices": 0}, "num_devices is a whole number"),
        ({"num_devices": 8.0}, "num_devices is a whole number"),
        ({"cards_per_host": True}, "cards_per_host is a whole number"),
        ({"host_bandwidth": 450}, "bytes/s: 450e9 is 450 GB/s; 450 can't be meant"),
        ({"network_bandwidth": float("nan")}, "50e9 is 50 GB/s"),
        ({"network_bandwidth": "50GB/s"}, "50e9 is 50 GB/s"),
        ({"memory": 80}, "bytes: 80 \\* 2\\*\\*30 is 80 GiB"),
        ({"price": -1}, "dollars"),
        ({"num_devices": 12}, "no multiple of 8"),
    ],
)
def test_numbers_that_cannot_be_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster("h100", **given)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a card is a name"):
        Cluster(100)  # type: ignore[arg-type]
