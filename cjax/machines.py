"""Machines that are not here: a card, how many, how they are joined, what they cost; and the text that says it."""

import dataclasses
import math
import re
from difflib import get_close_matches
from typing import Any

from cjax.cards import CARDS, Card
from cjax.plan.text import underline

# What each word of a cluster's text is of, and how it is written.
_WORDS = {
    "node": "node=8",
    "nvlink": "nvlink=450GB/s",
    "network": "network=8x50GB/s",
    "memory": "memory=80GiB",
    "price": "price=2.5",
    "power": "power=700",
}
_FOREIGN = {
    **dict.fromkeys(("cards", "cards_per_host", "gpus", "gpus_per_node", "host", "per_host", "nodes"), "node"),
    **dict.fromkeys(("pcie", "link", "links", "inside", "intra", "host_bandwidth", "nvswitch"), "nvlink"),
    **dict.fromkeys(("net", "ib", "infiniband", "ethernet", "adapter", "adapters", "nic", "inter"), "network"),
    **dict.fromkeys(("mem", "hbm", "ram", "vram"), "memory"),
    **dict.fromkeys(("cost", "dollars", "usd"), "price"),
    **dict.fromkeys(("watts", "watt", "tdp"), "power"),
}
_PREFIXES = {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_NUMBER = r"\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+"
_LEAST_BYTES = 2**20  # a memory or a rate below it was meant in other units
_MOST = 10**6  # cards


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Machines to plan and compile for without having them; stands where `devices` is asked for.

    What is not given is as vendors build hosts of the card (`cjax.cards`). The same as text, wherever `devices` or
    `--target` takes one: `"h100:64/node=8,nvlink=450GB/s,network=8x50GB/s,price=2.5,power=700,memory=80GiB"`.

    Args:
      card: its name, such as `"h100"`, or a `cjax.cards.Card` of your own.
      num_devices: cards in all; None where a search is to find it.
      cards_per_host: cards of one host; with fewer or more than vendors put there, adapters are in proportion.
      host_bandwidth: bytes/s from a card to the others of its host, one direction, over NVLink or else PCIe.
      network_bandwidth: bytes/s of one network adapter, one direction.
      adapters_per_host: network adapters of one host.
      memory: bytes of one card.
      price: dollars for an hour of one card.
      power: watts that one card draws at most.

    Raises:
      ValueError: for a card that is not known, and for numbers that can't be or contradict each other.

    >>> Cluster("h100", 64, network_bandwidth=25e9)
    h100:64/network=8x25GB/s
    >>> Cluster.parse("a100:16/node=4").adapters_per_host
    4
    """

    card: Card
    num_devices: int | None
    cards_per_host: int
    host_bandwidth: float
    network_bandwidth: float
    adapters_per_host: int
    memory: int
    price: float | None
    power: float

    def __init__(
        self,
        card: Card | str,
        num_devices: int | None = None,
        *,
        cards_per_host: int | None = None,
        host_bandwidth: float | None = None,
        network_bandwidth: float | None = None,
        adapters_per_host: int | None = None,
        memory: float | None = None,
        price: float | None = None,
        power: float | None = None,
    ) -> None:
        card = card if isinstance(card, Card) else card_named(card)
        cards = card.cards_per_host if cards_per_host is None else cards_per_host
        _check_counts(num_devices, cards, adapters_per_host)
        facts = {
            "card": card,
            "num_devices": num_devices,
            "cards_per_host": cards,
            "host_bandwidth": card.host_bandwidth if host_bandwidth is None else host_bandwidth,
            "network_bandwidth": card.network_bandwidth if network_bandwidth is None else network_bandwidth,
            "adapters_per_host": _adapters(card, cards) if adapters_per_host is None else adapters_per_host,
            "memory": card.memory if memory is None else memory,
            "price": card.price if price is None else price,
            "power": card.power if power is None else power,
        }
        _check_amounts(facts)
        for name, value in facts.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "memory", int(self.memory))
        _check_hosts(self)

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """The cluster that a text describes; `"h100"` alone leaves the number open.

        Raises:
          ValueError: with the text underlined where it is wrong, and what to write.
        """
        match = re.match(r"\s*([^\s:/,=]*)\s*(?::\s*([^\s/,]*))?\s*(/|$)", text)
        if match is None or not match[1]:
            raise ValueError(_underlined(text, 0, len(text), f'write a card and a number, as "h100:64"; {_known()}'))
        if match[1].lower() not in CARDS:
            short, how = unknown_card(match[1])
            raise ValueError(f"{_underlined(text, *match.span(1), short)}\n{how}")
        if match[2] is not None and not re.fullmatch(r"0*[1-9]\d*", match[2]):
            message = f"ask for at least one card, in digits: {match[1]}:8"
            raise ValueError(_underlined(text, *match.span(2), message))
        num = None if match[2] is None else int(match[2])
        given, places = _options(text, match.end()) if match[3] else ({}, {})
        try:
            return cls(match[1].lower(), num, **given)
        except _Contradiction as error:
            place = next((places[of] for of in error.of if of in places), match.span(2))
            raise ValueError(_underlined(text, *place, str(error))) from None

    def with_devices(self, num_devices: int) -> "Cluster":
        """The same machines, `num_devices` cards of them."""
        facts: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        facts["num_devices"] = num_devices
        return Cluster(**facts)

    def fits(self, num_devices: int) -> bool:
        """Whether so many cards fill whole hosts, or one host in part."""
        return 1 <= num_devices <= self.cards_per_host or (num_devices > 0 and num_devices % self.cards_per_host == 0)

    @property
    def topology(self) -> str:
        """The cards as XLA's "slices x hosts x cards": full hosts, or one host in part.

        A slice is what fast links join. JAX counts every host of a real cluster of these cards as a slice of its own,
        and XLA chooses its collective kernels by it, so the same is said here.
        """
        assert self.num_devices is not None, "asked before"
        cards = min(self.num_devices, self.cards_per_host)
        return f"{self.num_devices // cards}x1x{cards}"

    @property
    def xla_target(self) -> str:
        """The card as XLA's compiler is told of it."""
        return dataclasses.replace(self.card, memory=self.memory).xla_target()

    def __str__(self) -> str:
        number = "" if self.num_devices is None else f":{self.num_devices}"
        words = []
        if self.cards_per_host != self.card.cards_per_host:
            words.append(f"node={self.cards_per_host}")
        if self.host_bandwidth != self.card.host_bandwidth:
            words.append(f"nvlink={_amount(self.host_bandwidth)}B/s")
        network = (self.adapters_per_host, self.network_bandwidth)
        if network != (_adapters(self.card, self.cards_per_host), self.card.network_bandwidth):
            words.append(f"network={self.adapters_per_host}x{_amount(self.network_bandwidth)}B/s")
        if self.memory != self.card.memory:
            words.append(f"memory={_amount(self.memory)}B")
        words += [
            f"{name}={getattr(self, name)!r}"
            for name in ("price", "power")
            if getattr(self, name) != getattr(self.card, name)
        ]
        return f"{self.card.name}{number}" + ("/" if words else "") + ",".join(words)

    def __repr__(self) -> str:
        return str(self)


class _Contradiction(ValueError):
    """What can't be, and the arguments that say it, the first of them that is given."""

    def __init__(self, message: str, *of: str) -> None:
        super().__init__(message)
        self.of = of


def card_named(name: str) -> Card:
    """The card of this name. Raises ValueError for one that is not known, with those that are."""
    if not isinstance(name, str):
        raise TypeError(f'a card is a name, such as "h100", or a cjax.cards.Card, not {name!r}')
    if name.lower() not in CARDS:
        raise ValueError("\n".join(unknown_card(name)))
    return CARDS[name.lower()]


def unknown_card(name: str) -> tuple[str, str]:
    """What to say of a card that is not known, and how one is described."""
    near = get_close_matches(name.lower(), CARDS, 1, 0.5)
    if not near:
        near = [known for known in CARDS if name.lower() in known][:1]
    meant = f" (did you mean {near[0]}?)" if near else ""
    return (
        f"no card is called {name!r}{meant}; {_known()}",
        "Describe one of your own:\n"
        "  import dataclasses; from cjax.cards import CARDS\n"
        '  card = dataclasses.replace(CARDS["h100"], name="mine", kind="mine", memory=..., memory_bandwidth=...,\n'
        "      bf16_flops=..., f16_flops=..., tf32_flops=..., f32_flops=..., power=..., price=..., chip=None)\n"
        "  devices=cjax.Cluster(card, 64)",
    )


def _known() -> str:
    return f"the cards known are {', '.join(CARDS)}"


def _adapters(card: Card, cards: int) -> int:
    """The adapters of a host with so many cards, in the proportion of the vendors' hosts."""
    return max(1, math.ceil(card.adapters_per_host * cards / card.cards_per_host))


def _check_counts(num_devices: int | None, cards: int, adapters: int | None) -> None:
    counts = {"num_devices": num_devices, "cards_per_host": cards, "adapters_per_host": adapters}
    for name, value in counts.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise _Contradiction(f"{name} is a whole number from 1 on, not {value!r}", name)
        if value is not None and value > _MOST:
            raise _Contradiction(f"{name} is {value}, and no machine has more than a million", name)


def _check_amounts(facts: dict[str, object]) -> None:
    units = {
        "host_bandwidth": "bytes/s: 450e9 is 450 GB/s",
        "network_bandwidth": "bytes/s: 50e9 is 50 GB/s, or 400 Gb/s",
        "memory": "bytes: 80 * 2**30 is 80 GiB",
        "price": "dollars for an hour of one card: 2.5",
        "power": "watts: 700",
    }
    for name, unit in units.items():
        value = facts[name]
        if name == "price" and value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Contradiction(f"{name} is a number of {unit}; not {value!r}", name)
        least = 0 if name == "price" else 1 if name == "power" else _LEAST_BYTES
        if value < least:
            raise _Contradiction(f"{name} is a number of {unit}; {value!r} can't be meant", name)


def _check_hosts(cluster: Cluster) -> None:
    num, cards = cluster.num_devices, cluster.cards_per_host
    if num is None or cluster.fits(num):
        return
    down, name = num // cards * cards, cluster.card.name
    raise _Contradiction(
        f"{num} cards are more than one host and no multiple of {cards}, the cards in a host: write {name}:{down} or "
        f"{name}:{down + cards}, or how many a host has: {name}:{num}/node={_nearest_divisor(num, cards)}",
        "cards_per_host",
    )


def _nearest_divisor(number: int, near: int) -> int:
    return min((d for d in range(1, 2 * near) if number % d == 0), key=lambda d: (abs(d - near), d))


# -- text -------------------------------------------------------------------------------------------------------------
def _options(text: str, place: int) -> tuple[dict[str, Any], dict[str, tuple[int, int]]]:
    """The arguments that the words behind "/" give, and where each stands."""
    given: dict[str, Any] = {}
    places: dict[str, tuple[int, int]] = {}
    seen: dict[str, str] = {}
    for match in re.compile(r"\s*([^,]*?)\s*(?:,|$)").finditer(text, place):
        if match.start() == len(text) and not match[1] and match.start() > place:
            break
        start, stop = match.span(1)
        word = re.fullmatch(r"(\w+)\s*=\s*(\S.*)", match[1])
        name = match[1].partition("=")[0].strip()
        if word is None or name not in _WORDS:
            raise ValueError(_underlined(text, start, max(stop, start + 1), _instead(name, match[1])))
        if name in seen:
            raise ValueError(_underlined(text, start, stop, f"{name} is given twice: {seen[name]} before; give one"))
        seen[name] = match[1]
        try:
            found = _value(name, word[2])
        except ValueError as error:
            raise ValueError(_underlined(text, start, stop, f"{error}; write {_WORDS[name]}")) from None
        given |= found
        places |= dict.fromkeys(found, (start, stop))
    return given, places


def _instead(name: str, word: str) -> str:
    if name in _WORDS:
        return f"{name} needs a value; write {_WORDS[name]}"
    plain = _FOREIGN.get(name.lower()) or next(iter(get_close_matches(name.lower(), _WORDS, 1)), None)
    if plain:
        return f"{name!r} is no word of a cluster; write {_WORDS[plain]}"
    if not word:
        return f"a word is missing here; write {', '.join(_WORDS.values())}"
    return f"{name!r} is no word of a cluster; there are {', '.join(_WORDS.values())}"


def _value(name: str, value: str) -> dict[str, Any]:
    """The arguments of `Cluster` that one word gives."""
    if name == "node":
        if not re.fullmatch(r"0*[1-9]\d*", value):
            raise ValueError(f"{value!r} is no number of cards from 1 on")
        return {"cards_per_host": int(value)}
    if name == "nvlink":
        return {"host_bandwidth": _bytes(value, "/s")}
    if name == "network":
        many = re.fullmatch(r"(\d+)\s*[x*]\s*(.*)", value)
        if many and int(many[1]) < 1:
            raise ValueError("a host of a cluster has an adapter, at least one")
        return {
            "adapters_per_host": int(many[1]) if many else 1,
            "network_bandwidth": _bytes(many[2] if many else value, "/s"),
        }
    if name == "memory":
        return {"memory": _bytes(value, "")}
    plain = re.fullmatch(rf"({_NUMBER})\s*(?:W|w)?" if name == "power" else rf"\$?\s*({_NUMBER})", value)
    if plain is None:
        raise ValueError(f"{value!r} is no number of " + ("watts" if name == "power" else "dollars an hour"))
    return {name: float(plain[1])}


def _bytes(value: str, per: str) -> float:
    """Bytes (`per` second) of `450GB/s`, `400Gb/s`, `80GiB`: bits are an eighth."""
    match = re.fullmatch(rf"({_NUMBER})\s*(Ki|Mi|Gi|Ti|k|M|G|T|)(B|b)(/s|ps)?", value)
    what = "a rate, in GB/s, GiB/s or (bits) Gb/s" if per else "a size, in GiB or GB"
    if match is None or bool(match[4]) != bool(per) or (match[3] == "b" and not per):
        raise ValueError(f"{value!r} is not {what}")
    return float(match[1]) * _PREFIXES[match[2]] / (8 if match[3] == "b" else 1)


def _amount(size: float) -> str:
    """A number of bytes without a loss, in the unit that takes the fewest digits."""
    shown = {}
    for prefix, unit in _PREFIXES.items():
        number = f"{size / unit:.12g}"
        if "e" not in number and float(number) * unit == size >= unit:
            shown[number + prefix] = (len(number.replace(".", "")), -unit)
    return min(shown, key=shown.__getitem__, default=repr(size))


def _underlined(text: str, start: int, stop: int, message: str) -> str:
    return underline(text, start, stop, message, of="devices")
