"""How far real devices and software stay behind the datasheet: a few constants a card, each with where it is from.

The constants of cards were fitted, all at once, on published training runs (`experiments/planner.py`, whose log is in
docs/results), with one factor for each system whose runs these are. They are shares of the datasheet's rates, so that a
card of the same kind with other memory or links needs none of its own.
"""

import dataclasses
import math

from cjax.cards import card_of_kind
from cjax.planner.hardware import Hardware

TEN_PERCENT = 1.2815515594600038  # of a normal distribution lies above so many standard deviations


@dataclasses.dataclass(frozen=True)
class Software:
    """What a training system does with a plan, as far as time depends on it. The defaults are cjax's.

    Args:
      is_lockstep: whether all stages of a pipeline wait for each other in each tick.
      gradient_bytes: of an element of a gradient as devices add it up; 0 for cjax's: the precision's, and float32 where
        micro-batches were added up before.
      weight_bytes: of an element of a parameter as ZeRO 1 and 2 gather it; 0 for cjax's: the precision's.
      reduces_each: whether gradients are reduced in each micro-batch under every ZeRO stage.
      is_fused: whether a kernel computes attention where it can.
      fuses_split: the same where positions are split over devices.
      masks_whole: whether causal attentions compute the half that is masked, too.
      passes: passes over memory for each that a compiler which fuses well would make, outside of matmuls.
      hides_tensor: whether transfers of tensor parallelism are cut up and laid beside the matmul that needs them.
      hides_gradients: whether gradients are reduced beside the backward pass.
      rings: adapters that a collective between hosts uses; 0 for one for each member on a host.
      adds_in_matmuls: whether a matmul adds a gradient to that of the micro-batches before, in place of a pass for it.
      pads: whether matmuls in 16 bits are filled up to dims that tensor cores take: XLA does.
      cuts_sends: whether the devices of a tensor axis send a stage's output in parts, each its own.
      scatters: whether each device is sent its part alone of gradients that ZeRO divides; XLA's CPU compiler adds all
        of them up everywhere and takes the part then.
      gathers: collectives in which ZeRO 1 and 2 gather a layer's parameters: one, or one for each
        of its arrays where whoever updated an array sends it to all others.
      copies_weights: whether a loop over layers copies a layer's weights out of their stack in each pass. XLA's CPU
        compiler does; where there are matmuls that read them in place, it is a small part of what is read anyway.
    """

    is_lockstep: bool = True
    gradient_bytes: float = 0.0
    weight_bytes: float = 0.0
    reduces_each: bool = False
    is_fused: bool = True
    fuses_split: bool = False
    masks_whole: bool = False
    passes: float = 1.0
    hides_tensor: bool = False
    hides_gradients: bool = True
    rings: int = 0
    adds_in_matmuls: bool = False
    pads: bool = True
    cuts_sends: bool = False
    scatters: bool = True
    gathers: int = 1
    copies_weights: bool = False


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What turns the datasheet's seconds into those of a clock.

    Args:
      source: where the constants are from, for the user.
      cores: of the chip, among which the tiles of a matmul's result are shared out; 0 for what has no tiles.
      shares_cores: whether the devices are virtual, and share one processor's cores.
      kinds: collectives that are faster or slower than the links' rate, and how many times.
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
    shares_cores: bool = False
    kinds: tuple[tuple[str, float], ...] = ()
    software: Software = Software()

    def measured(self, ratio: float, source: str) -> "Calibration":
        """This one after a step of the program itself took `ratio` times what was predicted."""
        return dataclasses.replace(
            self, factor=self.factor / ratio, spread=min(self.spread, MEASURED_SPREAD), source=source
        )


MEASURED_SPREAD = 0.06  # of other plans of a program, once one was measured


# Fitted by `experiments/planner.py`, which prints them. "JAX" is the factor of JAX's runs; "spread" is that of runs of
# a system that the fit had not seen, and of this factor. A kernel of 2023 reached 0.18 of an H100's peak, today's 0.29.
FITTED = {
    "matmul V100": 0.7887,
    "matmul A100": 0.812,
    "matmul H100": 0.7071,
    "faster": 1.522,
    "attention A100": 0.3249,
    "attention H100 2023": 0.1804,
    "attention H100 2024": 0.295,
    "thin": 0.7212,
    "memory": 0.911,
    "links": 0.9122,
    "adapters": 0.624,
    "latency": 2.984e-05,
    "hop": 4.055e-05,
    "hidden data": 0.5551,
    "hidden gather": 0.4527,
    "hidden tensor": 0.1132,
    "overlapped": 0.8894,
    "hidden pipeline": 0.7814,
    "step": 0.03566,
    "straggling": 0.001688,
    "JAX": 0.997,
    "spread": 0.1171,
}

# Seconds that a step takes beside a program that holds all of it, optimizer too: in published runs, which are of
# several devices; and of one alone, as measured (docs/gpu.md: 1 to 2 ms of H100s and H200s).
_STEP, _STEP_ALONE = 1e-2, 2e-3
_LAUNCH = 1e-5
_RUNS = {"V100": 21, "A100": 275, "H100": 104}
_CORES = {"V100": 80, "A100": 108, "H100": 132}
_KERNEL = {"V100": "attention A100", "A100": "attention A100", "H100": "attention H100 2024"}
# Operations at the peak for each byte of memory, which says most about a chip's generation.
_OPERATIONS_PER_BYTE = {"V100": 139.0, "A100": 153.0, "H100": 295.0}
# The same chips with other memory or links, of which there are no runs.
_LIKE = {"H200": "H100", "H800": "H100", "GH200": "H100", "A800": "A100"}


def _of_chip(chip: str, num_devices: int) -> Calibration:
    return Calibration(
        f"fitted on {_RUNS[chip]} published runs on {chip}, with the factor of JAX's runs",
        cores=_CORES[chip],
        matmul=FITTED[f"matmul {chip}"],
        attention=FITTED[_KERNEL[chip]],
        launch=_LAUNCH,
        step=_STEP if num_devices > 1 else _STEP_ALONE,
        factor=FITTED["JAX"],
        spread=FITTED["spread"],
        thin=FITTED["thin"],
        memory=FITTED["memory"],
        links=FITTED["links"],
        adapters=FITTED["adapters"],
        latency=FITTED["latency"],
        hop=FITTED["hop"],
        hidden_data=FITTED["hidden data"],
        hidden_gather=FITTED["hidden gather"],
        hidden_tensor=FITTED["hidden tensor"],
        hidden_pipeline=FITTED["hidden pipeline"],
        overlapped=FITTED["overlapped"],
        straggling=FITTED["straggling"],
    )


def calibration_of(hardware: Hardware) -> Calibration | None:
    """The constants for these devices; None where nothing is known of their rates, as of CPUs.

    A card with a datasheet but without runs gets the shares of the one nearest to it, and a wider interval.
    """
    peak = hardware.bf16_flops or hardware.f16_flops
    if peak is None or hardware.memory_bandwidth is None:
        return None
    words = hardware.name.upper().replace("-", " ").split()
    for chip in _RUNS:
        if any(word.startswith(chip) for word in words):
            return _of_chip(chip, hardware.num_devices)
    for name, chip in _LIKE.items():
        if any(word.startswith(name) for word in words):
            found = _of_chip(chip, hardware.num_devices)
            return dataclasses.replace(found, source=f"{found.source}, the same chip", spread=1.2 * found.spread)
    ratio = peak / hardware.memory_bandwidth
    chip = min(_RUNS, key=lambda name: abs(math.log(ratio / _OPERATIONS_PER_BYTE[name])))
    found, card = _of_chip(chip, hardware.num_devices), card_of_kind(hardware.name)
    source = f"no published run on {hardware.name} is known; of the nearest chip: {found.source}"
    cores = card.chip.cores if card is not None and card.chip is not None else found.cores
    return dataclasses.replace(found, source=source, spread=2 * found.spread, cores=cores)
