"""What a user of each system would know of a run beside its row: card, year, kernels, what is overlapped."""

import dataclasses
import re
from typing import Any, Literal

from cjax.planner.costs.calibration import Software
from cjax.planner.hardware import Hardware

Kernel = Literal["none", "flash", "flash 2023", "flash 2024"]

# Jean Zay's hosts of 8: "NVLink 4 inter-gpu connects, 4 OmniPath links", in the project's own words. 4 of an A100's 12.
JEAN_ZAY = {"links": 100e9, "adapter": 50e9 / 8}


def _card_of(name: str, memory: int, memory_bandwidth: float, flops: float, links: float, adapter: float) -> Hardware:
    """Eight of them on a host, with an adapter each; 16 bits at `flops`, TF32 at half of it."""
    return Hardware(
        name, 8, 8, memory * 2**30, memory_bandwidth=memory_bandwidth, bf16_flops=flops, f16_flops=flops,
        f32_flops=flops / 2, host_bandwidth=links, network_bandwidth=adapter, adapters_per_host=8,
    )  # fmt: skip


# V100's 16 bits are float16; rows do not tell the two apart.
CARDS = {
    "V100": _card_of("V100", 32, 0.9e12, 125e12, 150e9, 12.5e9),
    "A100-40": _card_of("A100-40", 40, 1.555e12, 312e12, 300e9, 25e9),
    "A100": _card_of("A100", 80, 2.039e12, 312e12, 300e9, 25e9),
    "H100": _card_of("H100", 80, 3.352e12, 989.4e12, 450e9, 50e9),
    "H200": _card_of("H200", 141, 4.8e12, 989.4e12, 450e9, 50e9),
    "H800": _card_of("H800", 80, 3.352e12, 989.4e12, 200e9, 50e9),
    "A800": _card_of("A800", 80, 2.039e12, 312e12, 200e9, 25e9),
}
CHIPS = {"V100": "V100", "A100-40": "A100", "A100": "A100", "A800": "A100", "H100": "H100", "H200": "H100",
         "H800": "H100"}  # fmt: skip
CORES = {"V100": 80, "A100": 108, "H100": 132}  # by chip


@dataclasses.dataclass(frozen=True)
class Facts:
    """Of one run.

    Args:
      system: the software and its time, for whose runs one factor is fitted.
      source: of the row.
      card: of `CARDS`.
      kernel: that computes attention.
      software: what it does with a plan.
      is_compiled: whether a step is one program, with nothing in between.
      is_float8: whether the layers' matmuls run in 8 bits.
      adapter: bytes/s of the network for each device, where it is not the card's usual.
      flops: how FLOP/s were counted, where tokens are not given.
      micro_batch, microbatches, recompute, chunks, zero: where the row does not say.
      power: share of the card's usual limit in watts. Clocks under load follow about its root.
      scale: what the published rate is multiplied with.
    """

    system: str
    source: str
    card: str
    kernel: Kernel
    software: Software
    is_compiled: bool = False
    is_float8: bool = False
    adapter: float = 0.0
    links: float = 0.0
    flops: str = ""
    micro_batch: int = 0
    microbatches: int = 0
    recompute: str = ""
    chunks: int = 1
    zero: int | None = None
    power: float = 1.0
    scale: float = 1.0

    def hardware(self, num_devices: int) -> Hardware:
        card = CARDS[self.card]
        network = self.adapter or card.network_bandwidth
        flops = card.bf16_flops * self.power**0.5
        return dataclasses.replace(
            card,
            num_devices=num_devices,
            network_bandwidth=network,
            bf16_flops=flops,
            host_bandwidth=self.links or card.host_bandwidth,
        )


# What all of them differ in from cjax: stages that do not wait for each other's ticks.
PLAIN = Software(is_lockstep=False, gradient_bytes=2.0, weight_bytes=2.0, fuses_split=True, pads=False)
EARLY = dataclasses.replace(PLAIN, is_fused=False, hides_gradients=False, cuts_sends=True)
MEGATRON_2022 = dataclasses.replace(EARLY, adds_in_matmuls=True)
NEMO = dataclasses.replace(PLAIN, gradient_bytes=2.0, hides_tensor=True, cuts_sends=True, adds_in_matmuls=True)


def facts_of(row: dict[str, str], guesses: bool = False) -> Facts | str:
    """Of a row, or why it is none of these.

    Args:
      row: of the file.
      guesses: whether a system that nothing is known of is taken for one that does as most do, and a card for that
        whose chip it has. Nothing is fitted on such rows.
    """
    card = _card(row) or (_like(row) if guesses else None)
    if card is None:
        return "card"
    found = _system(row, row["source"], card) or (_usual(row, card) if guesses else None)
    if found is None:
        return "system"
    name, kernel, software, more = found
    more: dict[str, Any] = {
        "is_float8": "8" in row["dtype"] and "fp" in row["dtype"].lower().replace("float", "fp")
    } | more
    return Facts(name, row["source"], card, kernel, software, **more)


def _like(row: dict[str, str]) -> str | None:
    return next((card for card in ("H200", "H800", "A800") if card in row["hardware"]), None)


def _usual(row: dict[str, str], card: str) -> tuple[str, Kernel, Software, dict[str, Any]]:
    """Today's kernels, and adapters as the row has them."""
    kernels: dict[str, Kernel] = {"V100": "none", "A100": "flash", "H100": "flash 2024"}
    kernel = kernels[CHIPS[card]]
    more: dict[str, Any] = {"flops": "whole"}
    if found := re.search(r"(\d+)x(\d+) ?Gb/s", row["interconnect"]):
        more["adapter"] = int(found[1]) * int(found[2]) / 8 * 1e9 / int(row["gpus_per_node"] or 8)
    software = dataclasses.replace(PLAIN, is_fused=kernel != "none")
    return f"{row['source'].split(' ')[0]} (not among those fitted on)", kernel, software, more


def _card(row: dict[str, str]) -> str | None:
    text = row["hardware"]
    if "V100" in text:
        return "V100"
    if "A100-40" in text:
        return "A100-40"
    if "A100" in text:
        return "A100"
    return "H100" if "H100" in text else None


def _system(row: dict[str, str], source: str, card: str) -> tuple[str, Kernel, Software, dict[str, Any]] | None:
    hopper: Kernel = "flash 2024"
    match source.split(" ")[0]:
        case "Megatron-LM" if "Table 2" in source and row["zero"] == "3":
            return (
                "DeepSpeed 2021",
                "none",
                dataclasses.replace(EARLY, rings=1),
                {"flops": "megatron"},
            )
        case "Megatron-LM" if "(2020)" not in source:
            # Micro-batch and chunks, from examples/sc21 of Megatron-LM.
            # fmt: off
            sizes = {"1.7B": (16, 1), "3.6B": (16, 1), "7.5B": (16, 1), "18.4B": (8, 1), "39.1B": (4, 1),
                     "76.1B": (2, 3), "145.6B": (2, 2), "310.1B": (1, 2), "529.6B": (1, 3), "1008B": (1, 1)}
            # fmt: on
            micro, chunks = sizes.get(row["params"], (1, 1)) if "Table 1" in source else (1, 1)
            # Those scripts take PyTorch's data parallelism, which overlaps, where there is no pipeline.
            software = dataclasses.replace(EARLY, hides_gradients=row["pp"] == "1")
            return "Megatron 2021", "none", software, {"flops": "megatron", "micro_batch": micro, "chunks": chunks}
        case "Reducing":
            return "Megatron 2022", "none", MEGATRON_2022, {}
        case "Zero":
            # The memory that these runs report has room for the scores, and is too much without them.
            return "Megatron 2022", "none", MEGATRON_2022, {}
        case "OneFlow":
            name = "OneFlow" if "(OneFlow)" in source else "Megatron 2021"
            return name, "none", EARLY, {"adapter": 12.5e9 / 8}
        case "torchtitan" if card == "H100":
            hides = "sync" in row["notes"] and "vanilla" not in row["notes"]
            software = dataclasses.replace(PLAIN, gradient_bytes=4.0, hides_tensor=hides)
            # Scales of each row are a pass of their own over what is multiplied, and cost all that 8 bits save; a stage
            # of a pipeline keeps its parameters from the first micro-batch to the last.
            more = {"power": 500 / 700 if "500W" in row["hardware"] else 1.0}
            more |= {"is_float8": False} if "rowwise" in row["dtype"] else {}
            if row["pp"] != "1":  # as many micro-batches as stages, unless told otherwise
                more |= {"zero": 2, "microbatches": int(row["pp"])}
            return "torchtitan", hopper, software, more
        case "JAX-Toolbox" if "ViT" not in source and "T5X" not in source:
            # On H100, XLA replaces attention by cuDNN's kernel without Transformer Engine, too: scores would not fit.
            is_fused = "TE" in row["dtype"] or card == "H100"
            kernel = ("flash" if card == "A100" else hopper) if is_fused else "none"
            software = dataclasses.replace(PLAIN, is_fused=is_fused, gradient_bytes=4.0)
            recompute = "full" if row["params"] == "175B" or (not is_fused and row["params"] == "5B") else ""
            return (
                "JAX",
                kernel,
                software,
                {"is_compiled": True, "recompute": recompute, **({"zero": 0} if row["zero"] == "DP" else {})},
            )
        case "MosaicML":
            return "Composer", "flash" if card != "H100" else "flash 2023", PLAIN, {}
        case "NeMo":
            return "NeMo", hopper, NEMO, {"flops": "whole"}
        case "Megatron-Bridge":
            return "NeMo", hopper, NEMO, {}
        case "InternEvo":
            # Its ranks broadcast what they updated, array by array: two products and their norm in an attention, three
            # and theirs behind it.
            return "InternEvo", "flash", dataclasses.replace(PLAIN, gathers=7), {"adapter": 50e9 / 8}
        case "IBM":
            return (
                "torch FSDP",
                "flash" if card != "H100" else "flash 2023",
                PLAIN,
                {"adapter": (50e9 if card == "A100" else 100e9) / 8},
            )
        case "BigScience":
            return "Megatron-DeepSpeed", "none", EARLY, JEAN_ZAY
        case "Llama":
            return "Meta", hopper, PLAIN, {"flops": "causal", "chunks": 8, "micro_batch": 1}
        case "MegaScale":
            is_new = "MegaScale;" in row["notes"]
            software = dataclasses.replace(
                PLAIN, hides_tensor=is_new, hides_gradients=is_new, cuts_sends=True, adds_in_matmuls=True
            )
            return (
                ("MegaScale" if is_new else "Megatron 2022"),
                "flash",
                software,
                {"zero": 2 if is_new else 0, "micro_batch": 1},
            )
        case "Alpa":
            return "Alpa", "none", EARLY, {"is_compiled": True}
    return None
