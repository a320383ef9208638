"""Transfers: bytes, who is in a group and where its members sit, and what rate that gives."""

import dataclasses

import numpy as np

from cjax.planner.hardware import Hardware

Shares = tuple[float, float]  # of the links' rate, and of the adapters'
RINGS = ("all-gather", "reduce-scatter")  # rings: a step for each host on the way


@dataclasses.dataclass(frozen=True)
class Members:
    """Devices that exchange something; all fields are arrays or numbers that broadcast with plans.

    Args:
      size: members.
      on_host: how many of them share a host.
      hosts: how many hosts they are on.
      fast, slow: bytes/s of the links inside of a host, and of the adapters that the members on a host have together;
        `slow` is infinite where nobody leaves a host.
    """

    size: np.ndarray
    on_host: np.ndarray
    hosts: np.ndarray
    fast: np.ndarray
    slow: np.ndarray


def group_of(hardware: Hardware, size: np.ndarray | int, stride: np.ndarray | int, rings: int = 0) -> Members:
    """The group of `size` devices that are `stride` neighbours apart in the mesh's order.

    A ring of k members on each host enters and leaves it over k devices' share of its adapters, since cuts of the ring
    start at each of them. So 8 members on a host have 8 times the bandwidth of a group with one there.

    Args:
      hardware: what they run on; unknown links count as infinitely fast, since nothing can be said of them.
      size: members.
      stride: devices from one member to the next.
      rings: most adapters that the software uses; 0 for all.
    """
    size, stride = np.asarray(size, float), np.asarray(stride, float)
    on_host = np.clip(np.floor(hardware.devices_per_host / stride), 1.0, size)
    hosts = np.ceil(size / on_host)
    adapters = np.minimum(on_host, rings) if rings else on_host
    fast = hardware.host_bandwidth or np.inf
    share = (hardware.adapters_per_host or hardware.devices_per_host) / hardware.devices_per_host
    slow = (hardware.network_bandwidth or np.inf) * share * adapters
    slow, inside = np.where(hosts > 1, slow, np.inf), np.where(on_host > 1, fast, np.inf)
    return Members(size, on_host, hosts, inside, slow)


def group_bandwidth(hardware: Hardware, size: int, stride: int) -> float:
    """Bytes/s that a member receives at the datasheet's rates.

    >>> from cjax.planner.hardware import Hardware
    >>> hosts = Hardware("card", 64, 8, 1, host_bandwidth=450e9, network_bandwidth=50e9, adapters_per_host=8)
    >>> [group_bandwidth(hosts, *group) / 1e9 for group in ((8, 1), (64, 1), (8, 8), (16, 4))]
    [450.0, 400.0, 50.0, 100.0]
    """
    group = group_of(hardware, size, stride)
    return float(np.minimum(group.fast, group.slow))


@dataclasses.dataclass(frozen=True)
class Receipt:
    """What a device receives, before any share of a rate is known; arrays [plans].

    Args:
      bytes: in all.
      fast, slow: seconds at the full rate of the links inside of hosts, for collectives that wait for these, and of the
        adapters for the others.
      members, hops: how often a latency is paid.
    """

    bytes: np.ndarray
    fast: np.ndarray
    slow: np.ndarray
    members: np.ndarray
    hops: np.ndarray

    @classmethod
    def none(cls, count: int) -> "Receipt":
        return cls(*(np.zeros(count) for _ in range(5)))

    @classmethod
    def over(
        cls,
        group: Members,
        kind: str,
        bytes: np.ndarray,
        count: np.ndarray | float,
        shares: Shares = (1.0, 1.0),
        at_once: bool = False,
    ) -> "Receipt":
        """`count` collectives that receive so many bytes together; nothing where the group has one member.

        Whether they wait for the links or for the adapters depends on the shares of their rates that are reached. Where
        all members meet `at_once`, as threads do, the latency is paid once for all of them.
        """
        there = group.size > 1
        moved = np.where(there, bytes, 0.0)
        hops = group.hosts - 1 if kind in RINGS else 2 * np.ceil(np.log2(np.maximum(group.hosts, 1.0)))
        hops = np.where(kind == "collective-permute", np.minimum(group.hosts - 1, 1.0), hops)
        members = np.where(at_once or kind == "collective-permute", 1.0, group.on_host - 1)
        times = np.where(there, count, 0.0)
        shape = np.broadcast(moved, times, hops).shape
        fast, slow = moved / group.fast, moved / group.slow
        is_slow = slow / shares[1] > fast / shares[0]
        arrays = (moved, fast * ~is_slow, slow * is_slow, times * members, times * hops)
        return cls(*(np.array(np.broadcast_to(array, shape)) for array in arrays))

    def __add__(self, other: "Receipt") -> "Receipt":
        return Receipt(*(mine + theirs for mine, theirs in zip(_arrays(self), _arrays(other), strict=True)))

    def __mul__(self, times: np.ndarray | float) -> "Receipt":
        return Receipt(*(array * times for array in _arrays(self)))

    def seconds(self, links: float, adapters: float, latency: float, hop: float) -> np.ndarray:
        """With these shares of the rates."""
        return self.fast / links + self.slow / adapters + self.members * latency + self.hops * hop

    @property
    def least(self) -> np.ndarray:
        """Seconds that nothing can save."""
        return self.fast + self.slow


def _arrays(transfer: Receipt) -> tuple[np.ndarray, ...]:
    return tuple(getattr(transfer, field.name) for field in dataclasses.fields(transfer))
