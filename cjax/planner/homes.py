"""Where what belongs to layers lives between its uses: on the devices, in host memory, or on disk."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Home = Literal["device", "host", "disk"]
Kind = Literal["params", "frozen", "opt", "grads", "inputs"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Homes:
    """For each kind of what layers have, each stack and each layer in it: its home.

    Args:
      of: kind -> stack -> layer -> home. "inputs" are what layers were handed going forward, of all micro-batches.
    """

    of: Mapping[Kind, tuple[tuple[Home, ...], ...]]
