"""How far real devices and software stay behind the datasheet: a few constants a card, each with where it is from.

The constants of cards were fitted, all at once, on published training runs (`experiments/planner.py`, whose log is in
docs/results), with one factor for each system whose runs these are. They are shares of the datasheet's rates, so that a
card of the same kind with other memory or links needs none of its own.
"""

import dataclasses
import math

from cjax.planner.hardware import Hardware

TEN_PERCENT = 1.2815515594600038  # of a normal distribution lies above so many standard deviations


@dataclasses.dataclass(frozen=True)
class Software:
    """What a training system does with a plan, as far as time depends on it. The defaults are cjax's.

    Args:
      is_lockstep: whether all stages of a pipeline wait for each other in each tick.
      gradient_bytes: of an element of a gradient as devices add it up; 0 for cjax's: the precision's, and float32 where
        micro-batches were added up before.
      weight_bytes: of an element of a parameter as ZeRO 1 and 2 gather it behind the optimizer.
      reduces_each: whether gradients are reduced in each micro-batch under every ZeRO stage.
      is_fused: whether a kernel computes attention where it can.
      fuses_split: the same where positions are split over devices.
      masks_whole: whether causal attentions compute the half that is masked, too.
      passes: passes over memory for each that a compiler which fuses well would make, outside of matmuls.
      hides_tensor: whether transfers of tensor parallelism are cut up and laid beside the matmul that needs them.
      hides_gradients: whether gradients are reduced beside the backward pass.
      rings: adapters that a collective between hosts uses; 0 for one for each member on a host.
      adds_in_matmuls: whether a matmul adds a gradient to that of the micro-batches before, in place of a pass for it.
      cuts_sends: whether the devices of a tensor axis send a stage's output in parts, each its own.
    """

    is_lockstep: bool = True
    gradient_bytes: float = 0.0
    weight_bytes: float = 4.0
    reduces_each: bool = False
    is_fused: bool = True
    fuses_split: bool = False
    masks_whole: bool = False
    passes: float = 1.0
    hides_tensor: bool = False
    hides_gradients: bool = True
    rings: int = 0
    adds_in_matmuls: bool = False
    cuts_sends: bool = False


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What turns the datasheet's seconds into those of a clock.

    Args:
      source: where the constants are from, for the user.
      cores: of the chip, among which the tiles of a matmul's result are shared out.
      matmul: share of the peak that a large aligned matmul reaches.
      attention: share of the peak that a flash kernel reaches.
      thin: how soon matmuls get slower as their least dim shrinks: half the rate at `thin` x peak / memory bandwidth.
      memory: share of the memory's bandwidth that elementwise operations reach.
      links, adapters: shares of the links' and of the network adapters' bandwidth that collectives reach.
      latency: seconds a collective takes for each member on a host; `hop`: for each host on its way.
      hidden_data, hidden_gather, hidden_tensor, hidden_pipeline: share of transfers that is hidden where there is
        computation beside: of gradients, ZeRO-3's parameters, tensor parallelism, stages.
      overlapped: the same of transfers that were cut up to lie beside the computation that needs them.
      launch: seconds of a layer's pass that no size explains.
      step: seconds of a step that nothing here explains.
      straggling: share of a step by which it gets longer with each doubling of hosts.
      faster: how much faster than in 16 bits the layers' matmuls are (float8; 1 elsewhere), of a peak `peak` times as
        high.
      factor: how much faster all is than this says; from runs of the same software.
      spread: standard deviation of log time around the prediction.
      software: what runs the plan.
    """

    source: str
    cores: int = 108
    matmul: float = 0.75
    attention: float = 0.35
    thin: float = 0.3
    memory: float = 0.8
    links: float = 0.8
    adapters: float = 0.6
    latency: float = 6e-6
    hop: float = 20e-6
    hidden_data: float = 0.4
    hidden_gather: float = 0.6
    hidden_tensor: float = 0.1
    hidden_pipeline: float = 0.9
    overlapped: float = 0.6
    launch: float = 2e-5
    step: float = 5e-3
    straggling: float = 0.004
    faster: float = 1.0
    peak: float = 1.0
    factor: float = 1.0
    spread: float = 0.1
    software: Software = Software()

    @property
    def interval(self) -> tuple[float, float]:
        """What a prediction is multiplied with for the ends of its 80 % interval."""
        return math.exp(-TEN_PERCENT * self.spread), math.exp(TEN_PERCENT * self.spread)

    def measured(self, ratio: float, source: str) -> "Calibration":
        """This one after a step of the program itself took `ratio` times what was predicted."""
        return dataclasses.replace(
            self, factor=self.factor / ratio, spread=min(self.spread, MEASURED_SPREAD), source=source
        )


MEASURED_SPREAD = 0.06  # of other plans of a program, once one was measured


_SOURCE = "fitted on published training runs"
_SHARED = dict(
    thin=0.013, memory=0.81, links=0.86, adapters=0.65, latency=3.0e-5, hop=7.2e-5, hidden_data=0.73,
    hidden_gather=0.45, hidden_tensor=0.12, overlapped=0.87, hidden_pipeline=0.61, launch=1.95e-4, step=0.039,
    straggling=1e-4,
)  # fmt: skip
# What cjax, and XLA under it, make of the same: the factor of JAX's runs.
_JAX = dict(factor=1.05, spread=0.12)

# By chip, in the order in which chips came.
_CHIPS: dict[str, Calibration] = {
    "V100": Calibration(f"{_SOURCE}: 20 on V100", cores=80, matmul=0.78, attention=0.33, **_SHARED, **_JAX),
    "A100": Calibration(f"{_SOURCE}: 287 on A100", cores=108, matmul=0.82, attention=0.33, **_SHARED, **_JAX),
    "H100": Calibration(f"{_SOURCE}: 94 on H100", cores=132, matmul=0.71, attention=0.26, **_SHARED, **_JAX),
}
# Chips of which there are no runs: whose shares they are given.
_LIKE = {"H200": "H100", "H800": "H100", "H20": "H100", "GH200": "H100", "A800": "A100"}


def calibration_of(hardware: Hardware) -> Calibration | None:
    """The constants for these devices; None where nothing is known of their rates, as of CPUs.

    A card with a datasheet but without runs gets the shares of the one nearest to it, and twice the interval.
    """
    if hardware.bf16_flops is None or hardware.memory_bandwidth is None:
        return None
    words = hardware.name.upper().replace("-", " ").split()
    for name, calibration in _CHIPS.items():
        if any(word.startswith(name) for word in words):
            return calibration
    near = next((_LIKE[name] for word in words for name in _LIKE if word.startswith(name)), None)
    if near is not None:
        return dataclasses.replace(
            _CHIPS[near], source=f"of {near}, whose chip it shares", spread=1.2 * _CHIPS[near].spread
        )
    # How many operations a chip does for each byte of its memory says most about its generation.
    ratio = hardware.bf16_flops / hardware.memory_bandwidth
    near = min(_CHIPS, key=lambda name: abs(math.log(ratio / _OPERATIONS_PER_BYTE[name])))
    return dataclasses.replace(
        _CHIPS[near],
        source=f"no runs of {hardware.name} are known: the shares of {near}",
        spread=2 * _CHIPS[near].spread,
    )


_OPERATIONS_PER_BYTE = {"V100": 139.0, "A100": 153.0, "H100": 295.0}
