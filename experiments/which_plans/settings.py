"""What is asked: the rows of each question."""

import dataclasses
import math
from collections.abc import Callable

from shared.results import Results, Row

from cjax.machines import Cluster
from cjax.planner.costs.calibration import TEN_PERCENT, calibration_of
from cjax.planner.hardware import hardware_of_cluster

from .asking import Asking
from .flavours import BEST, COMBINED, FLAVOURS
from .largest import Sizes, largest
from .models import Case

NVLINK, PCIE = Cluster("a100-40gb"), Cluster("a100-40gb-pcie")
FOUR = 4
GPTS = tuple(Case(name, 32) for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"))
OTHERS = (Case("bert-large", 64, 512), Case("vit-l16", 256), Case("t5-large", 32, 512), Case("resnet-50", 256))
MEDIUM = GPTS[1]
BATCHES = (2, 4, 8, 16, 32, 64, 256)
LINKS = (1.25, 3.125, 6.25, 12.5, 25, 50, 100, 300)  # GB/s between cards of a host
NETWORKS = (1.25, 3.125, 6.25, 12.5, 25)  # GB/s of a host's one adapter: 10 to 200 Gb/s
LINES = ("data", "zero=1", "zero=3", "tensor", "tensor=2d", "sequence=ring", "pipeline=1f1b", "pipeline=interleaved",
         "pipeline=zero_bubble", BEST)  # fmt: skip
MIXED = ("data", "zero=1", "zero=3", "tensor", "tensor=2d", "tensor=2.5d", "tensor=3d", "sequence=ring",
         "pipeline=1f1b", "pipeline=interleaved", "pipeline=zero_bubble")  # fmt: skip
BIG = Cluster("a100")
GPT3_DEVICES = (32, 40, 48, 64, 96, 128)
BERT = Case("bert-large", 64, 512)
HOLDING = ("data", "zero=3", "tensor", "sequence=gather", "sequence=all_to_all", "sequence=ring")
WEAK = (8, 32, 128, 512)
ROWS_EACH = 8  # of a card, in weak scaling


def constants(results: Results) -> None:
    """What durations stand on."""

    def make() -> Row:
        found = calibration_of(hardware_of_cluster(NVLINK, FOUR))
        assert found is not None, "A100 is a chip of which runs are known"
        wide = math.exp(TEN_PERCENT * found.spread)
        return {"source": found.source, "low": 1 / wide, "high": wide}

    results.get({"part": "constants"}, make)


def sizes(results: Results) -> None:
    """By model, on four cards."""
    for case in (*GPTS, *OTHERS):
        asking = Asking(results, case)
        asking.ask("one", NVLINK, 1, "data")
        for cluster in (NVLINK, PCIE):
            for flavour in (*FLAVOURS, BEST):
                asking.ask("size", cluster, FOUR, flavour)


def links(results: Results) -> None:
    """By the bandwidth between four cards of a host, and by cards a host and the network between hosts."""
    asking = Asking(results, MEDIUM)
    for rate in LINKS:
        cluster = Cluster("a100-40gb", cards_per_host=FOUR, host_bandwidth=rate * 1e9)
        for flavour in LINES:
            asking.ask("link", cluster, FOUR, flavour)
    for cards in (1, 2):
        for rate in NETWORKS:
            cluster = Cluster("a100-40gb", cards_per_host=cards, network_bandwidth=rate * 1e9, adapters_per_host=1)
            for flavour in LINES:
                asking.ask(f"node{cards}", cluster, FOUR, flavour)


def batches(results: Results) -> None:
    """By batch."""
    for rows in BATCHES:
        asking = Asking(results, dataclasses.replace(MEDIUM, rows=rows))
        for flavour in LINES:
            asking.ask("batch", NVLINK, FOUR, flavour)


def numbers(results: Results) -> None:
    """GPT-2 on 4, 16 and 64 cards, a large ViT on 64: each flavour on as many as suit it, and copies of that."""
    for model in ("gpt2", "gpt2-xl"):
        asking = Asking(results, Case(model, 512))
        for num in (4, 16, 64):
            for flavour in MIXED:
                asking.ask("number", NVLINK, num, flavour, is_pure=False)
    asking = Asking(results, Case("vit-g14", 4096))
    for flavour in MIXED:
        asking.ask("vit", NVLINK, 64, flavour, is_pure=False)


def gpt3(results: Results) -> None:
    """175 billion parameters on few cards."""
    asking = Asking(results, Case("gpt3-175b", 1536, 2048))
    for num in GPT3_DEVICES:
        for flavour in ("zero=3", *COMBINED):
            asking.ask("gpt3", BIG, num, flavour)


def bert(results: Results) -> None:
    """The largest batch and the longest sequence that fit, by flavour."""
    rows = Sizes.of(results, BERT, "rows", (64, 256))
    lengths = Sizes.of(results, BERT, "length", (512, 1536, 3072), step=64)
    for num in (4, 8, 16):
        for flavour in HOLDING:
            largest(results, rows, NVLINK, num, flavour)
            largest(results, lengths, NVLINK, num, flavour)


def weak(results: Results) -> None:
    """The same number of rows a card on more and more of them."""
    for num in WEAK:
        asking = Asking(results, Case("gpt2-large", ROWS_EACH * num))
        for flavour in ("data", "zero=1", "zero=3", "tensor", "pipeline=1f1b", "pipeline=interleaved"):
            asking.ask("weak", NVLINK, num, flavour, is_pure=False)


PARTS: dict[str, Callable[[Results], None]] = {
    "constants": constants,
    "sizes": sizes,
    "links": links,
    "batches": batches,
    "numbers": numbers,
    "gpt3": gpt3,
    "bert": bert,
    "weak": weak,
}
