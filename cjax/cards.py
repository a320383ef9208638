"""Accelerator cards by name: datasheet figures, and the description by which XLA compiles for an absent card."""

import dataclasses
import math

# Kernel launch limits that XLA asks for and that no card listed here differs in.
_LAUNCH_LIMITS = """
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
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
class Card:
    """What one accelerator card can do.

    Rates are the vendor's dense peaks (no sparsity), in FLOP/s and bytes/s; interconnects count one direction.

    Args:
      name: what a user types, as in `"h100:64"`.
      kind: `device_kind` as JAX reports it on a real card, and as XLA is told when there is none.
      memory: bytes of device memory, before any driver or library takes its part.
      memory_bandwidth: bytes/s.
      bf16_flops, f16_flops, tf32_flops, f32_flops: matmul peaks, with sums in float32; None for what a card has not.
        XLA runs a float32 matmul of default precision as TF32.
      nvlink_bandwidth: bytes/s from one card to the others in its host.
      network_bandwidth: bytes/s of one network adapter.
      cores, units_per_core, clock_ghz, l2_cache, shared_memory, shared_memory_optin: the chip, for XLA's cost model.
      compute_capability, nvlinks: likewise, in XLA's own text format where it has one.
      power: watts that the board draws at most.
      price: dollars for an hour of one card.
      cards_per_host, adapters_per_host: as vendors build their hosts.
    """

    name: str
    kind: str
    memory: int
    memory_bandwidth: float
    bf16_flops: float
    f16_flops: float
    tf32_flops: float
    f32_flops: float
    nvlink_bandwidth: float
    network_bandwidth: float
    cores: int
    units_per_core: int
    clock_ghz: float
    l2_cache: int
    shared_memory: int
    shared_memory_optin: int
    compute_capability: str
    nvlinks: int
    power: float
    price: float | None = None
    cards_per_host: int = 8
    adapters_per_host: int = 8

    def xla_target(self) -> str:
        """This card as the text proto that `jax.experimental.topologies` takes as `target_config`."""
        return (
            f"gpu_device_info {{{_LAUNCH_LIMITS}"
            f"  shared_memory_per_core: {self.shared_memory}\n"
            f"  shared_memory_per_block_optin: {self.shared_memory_optin}\n"
            f"  core_count: {self.cores}\n"
            f"  fpus_per_core: {self.units_per_core}\n"
            f"  memory_bandwidth: {int(self.memory_bandwidth)}\n"
            f"  l2_cache_size: {self.l2_cache}\n"
            f"  clock_rate_ghz: {self.clock_ghz}\n"
            f"  device_memory_size: {self.memory}\n"
            f"  cuda_compute_capability {{ {self.compute_capability} }}\n"
            f"  device_interconnect_info {{ active_links: {self.nvlinks} }}\n"
            "}\n"
            'platform_name: "CUDA"\n'
            "dnn_version_info { major: 9 minor: 10 patch: 0 }\n"
            f'device_description_str: "{self.kind}"\n'
        )

    def xla_topology(self, num_cards: int) -> str:
        """`num_cards` cards as "slices x hosts x cards": full hosts, or one host in part.

        A slice is what fast links join. JAX counts every host of a real cluster of these cards as a slice of its own,
        and XLA chooses its collective kernels by it, so the same is said here.

        Raises:
          ValueError: when the cards fill no whole number of hosts.
        """
        if num_cards < 1:
            raise ValueError(f"{self.name}:{num_cards} names no device: ask for at least one, such as {self.name}:8.")
        if num_cards <= self.cards_per_host:
            return f"1x1x{num_cards}"
        if num_cards % self.cards_per_host:
            up = math.ceil(num_cards / self.cards_per_host) * self.cards_per_host
            raise ValueError(
                f"{self.name}:{num_cards} is more than one host and not a multiple of {self.cards_per_host}, the cards "
                f"in a host: write {self.name}:{up - self.cards_per_host} or {self.name}:{up}."
            )
        return f"{num_cards // self.cards_per_host}x1x{self.cards_per_host}"


_A100 = Card(
    name="a100",
    kind="NVIDIA A100-SXM4-80GB",
    memory=85100068864,
    memory_bandwidth=2.03904e12,
    bf16_flops=312e12,
    f16_flops=312e12,
    tf32_flops=156e12,
    f32_flops=19.5e12,
    nvlink_bandwidth=300e9,
    network_bandwidth=25e9,
    cores=108,
    units_per_core=64,
    clock_ghz=1.41,
    l2_cache=41943040,
    shared_memory=167936,
    shared_memory_optin=166912,
    compute_capability="major: 8",
    nvlinks=12,
    power=400,
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
    nvlink_bandwidth=450e9,
    network_bandwidth=50e9,
    cores=132,
    units_per_core=128,
    clock_ghz=1.98,
    l2_cache=52428800,
    shared_memory=233472,
    shared_memory_optin=232448,
    compute_capability="major: 9 feature_extension: ACCELERATED_FEATURES",
    nvlinks=18,
    power=700,
)
# The chip of an H100 with more and faster memory.
_H200 = dataclasses.replace(
    _H100, name="h200", kind="NVIDIA H200", memory=143771 * 2**20, memory_bandwidth=4.8e12, price=3.5
)

CARDS: dict[str, Card] = {card.name: card for card in (_A100, _H100, _H200)}


def card_of_kind(kind: str) -> Card | None:
    """The card whose `device_kind` is `kind`, or None for a card (or a processor) not listed here.

    >>> card_of_kind("NVIDIA H200").name
    'h200'
    """
    return next((card for card in CARDS.values() if card.kind == kind), None)
