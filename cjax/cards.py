"""Accelerator cards by name: datasheet figures, and the description by which XLA compiles for an absent card."""

import dataclasses

# Kernel launch limits that XLA asks for and that no card listed here differs in.
_LAUNCH_LIMITS = """
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
"""


@dataclasses.dataclass(frozen=True)
class Chip:
    """What XLA is told of a chip, for its cost model and its choice of instructions.

    Args:
      cores, units_per_core, threads_per_core: multiprocessors, float32 units in one, threads that one holds.
      clock_ghz, l2_cache: GHz at full speed, bytes.
      shared_memory, shared_memory_optin: bytes of a core, and of it what one block may ask for.
      compute_capability: in XLA's own text format.
      nvlinks: links to other cards.

    >>> chip = CARDS["h100"].chip
    >>> chip.cores, chip.nvlinks
    (132, 18)
    """

    cores: int
    units_per_core: int
    threads_per_core: int
    clock_ghz: float
    l2_cache: int
    shared_memory: int
    shared_memory_optin: int
    compute_capability: str
    nvlinks: int = 0


@dataclasses.dataclass(frozen=True)
class Card:
    """What one accelerator card can do, and the hosts that vendors build of it.

    Rates are the vendor's dense peaks (no sparsity), in FLOP/s and bytes/s; interconnects count one direction.

    Args:
      name: what a user types, as in `"h100:64"`.
      kind: `device_kind` as JAX reports it on a real card, and as XLA is told when there is none.
      memory: bytes of device memory that CUDA shows, before any driver or library takes its part.
      memory_bandwidth: bytes/s.
      bf16_flops, f16_flops, tf32_flops, f32_flops: matmul peaks, with sums in float32; None for what a card has not.
        XLA runs a float32 matmul of default precision as TF32.
      host_bandwidth: bytes/s from one card to the others in its host, over NVLink or else PCIe.
      network_bandwidth: bytes/s of one network adapter.
      power: watts that the board draws at most.
      price: dollars for an hour of one card; None where nobody asks one.
      cards_per_host, adapters_per_host: as vendors build their hosts.
      chip: what XLA is told of it; None for a card that is for planning alone.
      pcie_bandwidth: bytes/s from the memory of its host to one card, and as much back at once: PCIe 4.0 x16.

    >>> CARDS["h100"].cards_per_host, f"{CARDS['h100'].bf16_flops / 1e12:.0f} TFLOP/s"
    (8, '989 TFLOP/s')
    """

    name: str
    kind: str
    memory: int
    memory_bandwidth: float
    bf16_flops: float | None
    f16_flops: float | None
    tf32_flops: float | None
    f32_flops: float
    host_bandwidth: float
    network_bandwidth: float
    power: float
    price: float | None = None
    cards_per_host: int = 8
    adapters_per_host: int = 8
    chip: Chip | None = None
    pcie_bandwidth: float = 32e9

    @property
    def is_compilable(self) -> bool:
        """Whether XLA compiles for this card when it is not here."""
        return self.chip is not None

    @property
    def is_hopper(self) -> bool:
        """Whether JAX's kernels for NVIDIA's Hopper cards are for this one."""
        return self.chip is not None and self.chip.compute_capability.startswith("major: 9")

    def xla_target(self) -> str:
        """This card as the text proto that `jax.experimental.topologies` takes as `target_config`."""
        assert self.chip is not None, "asked before: is_compilable"
        return (
            f"gpu_device_info {{{_LAUNCH_LIMITS}"
            f"  threads_per_core_limit: {self.chip.threads_per_core}\n"
            f"  shared_memory_per_core: {self.chip.shared_memory}\n"
            f"  shared_memory_per_block_optin: {self.chip.shared_memory_optin}\n"
            f"  core_count: {self.chip.cores}\n"
            f"  fpus_per_core: {self.chip.units_per_core}\n"
            f"  memory_bandwidth: {int(self.memory_bandwidth)}\n"
            f"  l2_cache_size: {self.chip.l2_cache}\n"
            f"  clock_rate_ghz: {self.chip.clock_ghz}\n"
            f"  device_memory_size: {self.memory}\n"
            f"  cuda_compute_capability {{ {self.chip.compute_capability} }}\n"
            f"  device_interconnect_info {{ active_links: {self.chip.nvlinks} }}\n"
            "}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
            f'device_description_str: "{self.kind}"\n'
        )


# Where the figures come from: rates, links and power from NVIDIA's datasheets and architecture papers (A100 2021, H100
# 2023, H200 2024, V100 2020, GA102 and AD102 papers of 2021 and 2023, L40S 2023, L4 2023; A10G from the sheet of
# 2021 for the hosts that have it), whose figures with sparsity are halved here. Memory is what CUDA shows. Hosts:
# HGX and DGX boards with an adapter a card; for PCIe cards NVIDIA's design of 8 cards and 4 adapters; for A10G and L4
# the largest hosts that clouds rent; for GeForce a workstation on 10 Gb/s Ethernet. Prices are what single cards were
# listed at, on demand: March 2026 where RunPod has the card, 2025 at Lambda (A100 40 GB, V100) and AWS (A10G). They
# move by a third in a year and from seller to seller: who compares money gives a price of their own.
_AMPERE = Chip(
    cores=108,
    units_per_core=64,
    threads_per_core=2048,
    clock_ghz=1.41,
    l2_cache=41943040,
    shared_memory=167936,
    shared_memory_optin=166912,
    compute_capability="major: 8",
    nvlinks=12,
)
_HOPPER = Chip(
    cores=132,
    units_per_core=128,
    threads_per_core=2048,
    clock_ghz=1.98,
    l2_cache=52428800,
    shared_memory=233472,
    shared_memory_optin=232448,
    compute_capability="major: 9 feature_extension: ACCELERATED_FEATURES",
    nvlinks=18,
)
# Chips for graphics hold fewer threads in a core, and less shared memory.
_GA102 = Chip(
    cores=82,
    units_per_core=128,
    threads_per_core=1536,
    clock_ghz=1.695,
    l2_cache=6 * 2**20,
    shared_memory=102400,
    shared_memory_optin=101376,
    compute_capability="major: 8 minor: 6",
)
_ADA = dataclasses.replace(
    _GA102, cores=128, clock_ghz=2.52, l2_cache=72 * 2**20, compute_capability="major: 8 minor: 9"
)

_A100 = Card(
    name="a100",
    kind="NVIDIA A100-SXM4-80GB",
    memory=85100068864,
    memory_bandwidth=2.03904e12,
    bf16_flops=312e12,
    f16_flops=312e12,
    tf32_flops=156e12,
    f32_flops=19.5e12,
    host_bandwidth=300e9,
    network_bandwidth=25e9,
    power=400,
    price=1.39,
    chip=_AMPERE,
)
_A100_40 = dataclasses.replace(
    _A100,
    name="a100-40gb",
    kind="NVIDIA A100-SXM4-40GB",
    memory=42505273344,
    memory_bandwidth=1.555e12,
    price=1.29,
)
# Cards in slots talk over PCIe 4.0 x16 (32 GB/s a direction) or 5.0 (64 GB/s): no bridge between pairs is assumed.
_A100_PCIE = dataclasses.replace(
    _A100,
    name="a100-pcie",
    kind="NVIDIA A100 80GB PCIe",
    memory_bandwidth=1.935e12,
    host_bandwidth=32e9,
    adapters_per_host=4,
    power=300,
    price=1.19,
    chip=dataclasses.replace(_AMPERE, nvlinks=0),
)
_A100_40_PCIE = dataclasses.replace(
    _A100_PCIE,
    name="a100-40gb-pcie",
    kind="NVIDIA A100-PCIE-40GB",
    memory=_A100_40.memory,
    memory_bandwidth=1.555e12,
    power=250,
)
_H100 = Card(
    name="h100",
    kind="NVIDIA H100 80GB HBM3",
    memory=84942979072,
    memory_bandwidth=3.35232e12,
    bf16_flops=989.4e12,
    f16_flops=989.4e12,
    tf32_flops=494.7e12,
    f32_flops=66.9e12,
    host_bandwidth=450e9,
    network_bandwidth=50e9,
    power=700,
    price=2.69,
    chip=_HOPPER,
    pcie_bandwidth=64e9,
)
_H100_PCIE = dataclasses.replace(
    _H100,
    name="h100-pcie",
    kind="NVIDIA H100 PCIe",
    memory_bandwidth=2.039e12,
    bf16_flops=756e12,
    f16_flops=756e12,
    tf32_flops=378e12,
    f32_flops=51.2e12,
    host_bandwidth=64e9,
    adapters_per_host=4,
    power=350,
    price=1.99,
    chip=dataclasses.replace(_HOPPER, cores=114, clock_ghz=1.755, nvlinks=0),
)
# The chip of an H100 with more and faster memory.
_H200 = dataclasses.replace(
    _H100, name="h200", kind="NVIDIA H200", memory=143771 * 2**20, memory_bandwidth=4.8e12, price=3.59
)
# No bfloat16 and no TF32: float32 goes at the float32 units' rate. CUDA 13 compiles for no chip of this generation.
_V100 = Card(
    name="v100",
    kind="Tesla V100-SXM2-32GB",
    memory=34089730048,
    memory_bandwidth=0.9e12,
    bf16_flops=None,
    f16_flops=125e12,
    tf32_flops=None,
    f32_flops=15.7e12,
    host_bandwidth=150e9,
    network_bandwidth=12.5e9,
    power=300,
    price=0.55,
    adapters_per_host=4,
    pcie_bandwidth=16e9,
)
_V100_16 = dataclasses.replace(_V100, name="v100-16gb", kind="Tesla V100-SXM2-16GB", memory=16945512448)
_RTX3090 = Card(
    name="rtx3090",
    kind="NVIDIA GeForce RTX 3090",
    memory=25447170048,
    memory_bandwidth=936e9,
    bf16_flops=71e12,
    f16_flops=71e12,
    tf32_flops=35.6e12,
    f32_flops=35.6e12,
    host_bandwidth=32e9,
    network_bandwidth=1.25e9,
    power=350,
    price=0.22,
    cards_per_host=4,
    adapters_per_host=1,
    chip=_GA102,
)
_RTX4090 = dataclasses.replace(
    _RTX3090,
    name="rtx4090",
    kind="NVIDIA GeForce RTX 4090",
    memory=25393692672,
    memory_bandwidth=1008e9,
    bf16_flops=165.2e12,
    f16_flops=165.2e12,
    tf32_flops=82.6e12,
    f32_flops=82.6e12,
    power=450,
    price=0.34,
    chip=_ADA,
)
_L40S = Card(
    name="l40s",
    kind="NVIDIA L40S",
    memory=47810936832,
    memory_bandwidth=864e9,
    bf16_flops=362e12,
    f16_flops=362e12,
    tf32_flops=183e12,
    f32_flops=91.6e12,
    host_bandwidth=32e9,
    network_bandwidth=50e9,
    power=350,
    price=0.79,
    adapters_per_host=4,
    chip=dataclasses.replace(_ADA, cores=142, l2_cache=96 * 2**20),
)
_A10G = Card(
    name="a10g",
    kind="NVIDIA A10G",
    memory=23827185664,
    memory_bandwidth=600e9,
    bf16_flops=70e12,
    f16_flops=70e12,
    tf32_flops=35e12,
    f32_flops=35e12,
    host_bandwidth=32e9,
    network_bandwidth=12.5e9,
    power=300,
    price=2.04,
    adapters_per_host=1,
    chip=dataclasses.replace(_GA102, cores=80, clock_ghz=1.71),
)
_L4 = Card(
    name="l4",
    kind="NVIDIA L4",
    memory=23669374976,
    memory_bandwidth=300e9,
    bf16_flops=121e12,
    f16_flops=121e12,
    tf32_flops=60e12,
    f32_flops=30.3e12,
    host_bandwidth=32e9,
    network_bandwidth=12.5e9,
    power=72,
    price=0.44,
    adapters_per_host=1,
    chip=dataclasses.replace(_ADA, cores=58, clock_ghz=2.04, l2_cache=48 * 2**20),
)

CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        *(_A100, _A100_40, _A100_PCIE, _A100_40_PCIE, _H100, _H100_PCIE, _H200, _V100, _V100_16),
        *(_RTX3090, _RTX4090, _L40S, _A10G, _L4),
    )
}


def card_of_kind(kind: str) -> Card | None:
    """The card whose `device_kind` is `kind`, or None for a card (or a processor) not listed here.

    Args:
      kind: as `jax.Device.device_kind` says it.

    >>> card_of_kind("NVIDIA H200").name
    'h200'
    """
    return next((card for card in CARDS.values() if card.kind == kind), None)
