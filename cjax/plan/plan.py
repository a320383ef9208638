"""The plan itself: what is parallel and how much, as text or as an object, whichever is nearer at hand."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from cjax.plan.colossal import plan_text
from cjax.plan.parts import (
    LossOf,
    Pipeline,
    Precision,
    Remat,
    Sequence,
    Tensor,
    Unroll,
    Zero,
    check_choice,
    store,
    whole_number,
)
from cjax.plan.sizes import Offloaded, num_bytes, offloaded, size_text
from cjax.plan.text import Word, choice, classes, number, sized, split, underline

Axes = str | tuple[str, ...] | None
SIZES = ("budget", "host", "disk")
WALKED = (*SIZES, "offload")  # the words of plans that walk over layers


class Clash(ValueError):
    """Words that are right alone, and not together: `name` is the one to change."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


@dataclass(frozen=True, init=False)
class Plan:
    """How many devices each kind of parallelism gets.

    Args:
      data: copies of the model that see different examples; -1 takes the devices that are left.
      tensor: `Tensor`, or a number for 1d.
      sequence: `Sequence`, or a number for ring.
      pipeline: `Pipeline`, or a number for 1f1b.
      expert: how many of the data-parallel devices have different experts of a mixture: each has some of the experts
        whole, and is sent what others' examples have for them. It divides `data`.
      microbatches: pieces of a batch that run one after another (gradient accumulation without a pipeline).
      overlap: how many of them are computed at a time, in one loop over the layers, so that what one of them sends is
        on its way while another is multiplied. Of tensor=N, whose sums a layer waits for.
      loss: what the loss is of. By default of the batch, however many micro-batches it runs in, and a loss for which
        that can't be shown is refused; "microbatch": each is a batch of its own, whose losses are averaged.
      zero: `Zero`, or a stage.
      precision: of matmuls and activations; master weights stay float32.
      reduce: the dtype in which devices that saw different examples add up their gradients, each its own sum first and
        all together once a step; None leaves it to the precision, and to when XLA reduces best.
      remat: what is recomputed in the backward pass: nothing, all but matmul outputs, or each block from its input.
      unroll: whether layers are compiled one by one, rather than as a loop that takes each layer's weights and results
        out of stacks and puts them back: "layers", "none", or "auto", on a single GPU. Compiling takes a second
        or so a layer longer. With "none", the first and last of several micro-batches are not compiled apart either.
      budget: bytes that a device may hold, as a number or as text such as "16GiB": the step then walks over the layers,
        and what does not fit waits in host memory, or on disk. None: all that it has, and nothing is moved out.
      host: bytes that each process may keep in host memory of what is moved out; None: as much as that is.
      disk: bytes that each process may keep on disk of what host memory doesn't take; None: nothing.
      offload: what leaves the devices even where it would fit: "params", "optimizer" (its state), "gradients" and
        "activations" (what layers were handed), with "+" between several.
      rules: dim -> mesh axis or axes (None: kept whole), where a dim is a found name or `path/of/parameter:number`.

    Raises:
      ValueError: values that no number of devices can satisfy.
      Clash: words that exclude each other; a ValueError too.

    >>> str(Plan(tensor=4, zero=1))
    'tensor=4 zero=1'
    >>> Plan.parse("tensor=2.5d:8/2").tensor
    Tensor(size=8, mode='2.5d', depth=2)
    """

    data: int
    tensor: Tensor
    sequence: Sequence
    pipeline: Pipeline
    expert: int
    microbatches: int
    overlap: int
    loss: LossOf
    zero: Zero
    precision: Precision
    reduce: Precision | None
    remat: Remat
    unroll: Unroll
    budget: int | None
    host: int | None
    disk: int | None
    offload: tuple[Offloaded, ...]
    rules: Mapping[str, Axes]

    def __init__(
        self,
        data: int = -1,
        tensor: Tensor | int = 1,
        sequence: Sequence | int = 1,
        pipeline: Pipeline | int = 1,
        microbatches: int = 1,
        zero: Zero | int = 0,
        precision: Precision = "float32",
        remat: Remat = "none",
        rules: Mapping[str, Axes] = MappingProxyType({}),
        reduce: Precision | None = None,
        loss: LossOf = "batch",
        budget: int | str | None = None,
        host: int | str | None = None,
        disk: int | str | None = None,
        offload: str | tuple[str, ...] | list[str] = (),
        unroll: Unroll = "auto",
        overlap: int = 1,
        expert: int = 1,
    ) -> None:
        tensor = tensor if isinstance(tensor, Tensor) else Tensor(tensor)
        sequence = sequence if isinstance(sequence, Sequence) else Sequence(sequence)
        pipeline = pipeline if isinstance(pipeline, Pipeline) else Pipeline(pipeline)
        check_choice("loss", loss, LossOf)
        check_choice("precision", precision, Precision)
        if reduce is not None:
            check_choice("reduce", reduce, Precision)
        check_choice("remat", remat, Remat)
        check_choice("unroll", unroll, Unroll)
        if sequence.mode == "gather" and tensor.axis_sizes().get("tensor", 1) == 1:
            raise ValueError(f"sequence=gather lives on the axis of tensor=N (1d), which tensor={tensor} has not")
        store(
            self,
            data=-1 if data == -1 else whole_number("data", data),
            # One device is one device in every arrangement, so equal plans compare equal and print alike.
            tensor=Tensor() if tensor.size == 1 else tensor,
            sequence=Sequence() if sequence.size == 1 and sequence.mode != "gather" else sequence,
            pipeline=Pipeline() if pipeline.size == 1 else pipeline,
            expert=whole_number("expert", expert),
            microbatches=whole_number("microbatches", microbatches),
            overlap=whole_number("overlap", overlap),
            loss=loss,
            zero=zero if isinstance(zero, Zero) else Zero(zero),
            precision=precision,
            reduce=reduce,
            remat=remat,
            unroll=unroll,
            budget=None if budget is None else num_bytes("budget", budget, least=0),
            host=None if host is None else num_bytes("host", host, least=0),
            disk=None if disk is None else num_bytes("disk", disk),
            offload=offloaded(offload),
            rules=MappingProxyType({key: _check_rule(key, axes) for key, axes in sorted(rules.items())}),
        )
        self._check_walk()
        self._check_overlap()
        self._check_expert()
        if unroll == "layers" and (self.walks or self.pipeline.size > 1):
            kind = "a pipeline" if self.pipeline.size > 1 else "a step that walks over layers (budget=, offload=)"
            raise Clash(
                "unroll",
                f"{kind} has a loop of its own, which takes one layer after the other; leave out unroll=layers",
            )

    def __hash__(self) -> int:
        return hash(str(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return Plan.parse, (str(self),)  # a read-only mapping does not pickle; the text does, and stays readable

    def __repr__(self) -> str:
        return f"Plan.parse({str(self)!r})"

    def __str__(self) -> str:
        items = {item.name: getattr(self, item.name) for item in fields(self)}
        shown = {name: value for name, value in items.items() if value != getattr(_DEFAULT, name)}
        if "rules" in shown:
            shown["rules"] = json.dumps(dict(self.rules), separators=(",", ":"))
        shown |= {name: size_text(shown[name]) for name in SIZES if name in shown}
        if "offload" in shown:
            shown["offload"] = "+".join(self.offload)
        return " ".join(f"{name}={value}" for name, value in shown.items()) or "data=-1"

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The plan that `text` spells: `name=[mode:]size[/part]`, space-separated; what is left out is its default.

        Rules are JSON, so that any path can be written: `rules={"mlp/fc1/kernel:1":"tensor","vocab":null}`.

        Raises:
          ValueError: with the wrong word underlined, and what to write instead.

        >>> print(Plan.parse("zero=1   data=2 tensor=2d:4"))
        data=2 tensor=2d:4 zero=1
        """
        items: dict[str, Any] = {}
        words = split(text)
        for word in words:
            try:
                items[word.name] = build(word)
            except ValueError as error:
                raise ValueError(underline(text, word.start, word.stop, str(error))) from None
        try:
            return cls(**items)
        except Clash as clash:
            word = next(word for word in words if word.name == clash.name)
            raise ValueError(underline(text, word.start, word.stop, str(clash))) from None

    @classmethod
    def from_colossal(cls, config: Mapping[str, Any] | None = None, **kwargs: Any) -> "Plan":
        """The plan that a Colossal-AI configuration asks for: its config dict, or a Booster plugin's arguments.

        What is not given keeps cjax's default (float32, where Colossal-AI's plugins default to fp16). No key is dropped
        silently: those that XLA makes needless are named in one warning.

        Raises:
          ValueError: keys that ask for something a plan cannot say, and unknown ones; all at once, with what to write.

        >>> print(Plan.from_colossal({"parallel": {"pipeline": 1, "tensor": {"size": 8, "mode": "2.5d", "depth": 2}}}))
        tensor=2.5d:8/2
        >>> print(Plan.from_colossal(tp_size=2, zero_stage=1, precision="bf16"))
        tensor=2 zero=1 precision=bfloat16
        """
        return cls.parse(plan_text({**(config or {}), **kwargs}))

    @property
    def model_size(self) -> int:
        """Devices that hold one copy of the model between them: tensor x sequence x pipeline."""
        return self.tensor.size * self.sequence.size * self.pipeline.size

    @property
    def num_devices(self) -> int:
        """Devices in all, of a resolved plan."""
        return self._resolved().data * self.model_size

    @property
    def walks(self) -> bool:
        """Whether a step goes from layer to layer, with what it has moved out of the devices brought in for each.

        >>> Plan(budget="16GiB").walks, Plan(offload="optimizer").walks, Plan(zero=3).walks
        (True, True, False)
        """
        return self.budget is not None or bool(self.offload)

    @property
    def zero_stage(self) -> int:
        """The number of `zero`: 0, 1, 2 or 3."""
        return self.zero.stage

    @property
    def in_lockstep(self) -> bool:
        """Whether all stages of a pipeline run in a tick what any of them has to, and throw away what is not their own:
        positions and grids are moved by permutes inside of stages, to which XLA wants every device of the program.
        """
        return self.sequence != Sequence() or self.tensor.mode != "1d"

    @property
    def zero_group(self) -> int:
        """Data-parallel devices that share one sharded copy, of a resolved plan: the group, or all of them."""
        return self.zero.group or self._resolved().data

    @property
    def tensor_size(self) -> int:
        """Devices that share each matmul, in whatever arrangement."""
        return self.tensor.size

    def axis_sizes(self) -> dict[str, int]:
        """Mesh axes and their sizes, outermost first, of a resolved plan.

        `data` and the axes of the tensor mode are always there, with size 1 where nothing is split; the rest only when
        asked for. A ZeRO group smaller than data splits it: `data` counts the groups and `zero` the devices in one; as
        do experts: `expert` are devices with different ones, `data` those with the same.

        >>> Plan.parse("data=8 tensor=2 zero=3/4").axis_sizes()
        {'data': 2, 'zero': 4, 'tensor': 2}
        """
        data, group = self._resolved().data, self.zero_group
        sizes = {"pipe": self.pipeline.size} if self.pipeline.size > 1 else {}
        if self.expert > 1:
            sizes |= {"data": data // self.expert, "expert": self.expert}
        else:
            sizes |= {"data": data // group, "zero": group} if 1 < group < data and self.zero.group else {"data": data}
        sizes |= {"sequence": self.sequence.size} if self.sequence.size > 1 else {}
        return sizes | self.tensor.axis_sizes()

    def resolve(self, num_devices: int) -> "Plan":
        """This plan with `data` filled in for `num_devices` devices.

        Raises:
          ValueError: sizes that don't multiply up to `num_devices`, or a ZeRO group or `expert` that doesn't divide
            `data`; with the product, the number here and what to type.

        >>> print(Plan.parse("tensor=4").resolve(8))
        data=2 tensor=4
        """
        if problem := self._misfit(num_devices):
            raise ValueError(problem)
        return replace(self, data=num_devices // self.model_size)

    def _check_walk(self) -> None:
        """Raises `Clash` for words that don't go with each other or with a walk over layers."""
        rooms = [f"{name}={size_text(room)}" for name in ("host", "disk") if (room := getattr(self, name)) is not None]
        if not self.walks and rooms:
            needed = " ".join(rooms if self.host is not None else ["host=64GiB", *rooms])
            raise Clash(
                rooms[0].partition("=")[0],
                f"{' and '.join(rooms)} {'is' if len(rooms) == 1 else 'are'} room for what leaves the devices, and "
                f"nothing does; write budget=16GiB {needed} (of each device), or offload=optimizer {needed}",
            )
        if self.disk is not None and self.host is None:
            raise Clash(
                "disk",
                "the disk takes what host memory does not, and nothing says how much that takes; write "
                f"host=64GiB {rooms[0]}, or host=0B {rooms[0]} to keep all of it on disk",
            )
        if not self.walks:
            return
        why = "a step that walks over layers (budget=, offload=)"
        if self.pipeline.size > 1:
            instead = "leave it out, or write zero=3, which shares out layers too"
            raise Clash(
                "pipeline", f"{why} has all layers on all devices, and pipeline={self.pipeline} does not; {instead}"
            )
        if self.tensor.mode != "1d":
            instead = f"write tensor={self.tensor.size} (1d)"
            raise Clash("tensor", f"{why} does not go with the grid tensor={self.tensor}; {instead}")
        if self.reduce is not None:
            raise Clash(
                "reduce",
                f"{why} adds up the gradients of each layer in their own dtype, and not in {self.reduce}; leave out "
                f"reduce={self.reduce}",
            )

    def _check_overlap(self) -> None:
        """Raises `Clash` for micro-batches that can't be computed so many at a time."""
        if self.overlap == 1:
            return
        if self.pipeline.size > 1 or self.walks:
            kind = "a pipeline" if self.pipeline.size > 1 else "a step that walks over layers (budget=, offload=)"
            raise Clash(
                "overlap", f"{kind} decides itself which micro-batch runs when; leave out overlap={self.overlap}"
            )
        if self.microbatches % self.overlap:
            more = -(-self.microbatches // self.overlap) * self.overlap
            raise Clash(
                "overlap",
                f"overlap={self.overlap} computes {self.overlap} micro-batches at a time, and microbatches="
                f"{self.microbatches} is no multiple of that; write microbatches={more} overlap={self.overlap}",
            )

    def _check_expert(self) -> None:
        """Raises `Clash` for words that don't go with experts on data-parallel devices."""
        given = f"expert={self.expert}"
        if self.expert == 1:
            return
        if self.zero.group is not None:
            raise Clash(
                "zero",
                f"{given} splits the data-parallel devices, and so do ZeRO's groups in zero={self.zero}; write "
                f"zero={self.zero.stage} {given}, whose sharing takes in all of them",
            )
        if self.tensor.mode != "1d":
            raise Clash(
                "expert",
                f"{given} does not go with the grid tensor={self.tensor}; write tensor={self.tensor.size} (1d) {given}",
            )
        if self.walks:
            raise Clash(
                "expert",
                "a step that walks over layers (budget=, offload=) has all experts on all devices, and "
                f"{given} does not; leave it out, or write tensor={self.expert}, which shares out experts too",
            )

    def _resolved(self) -> "Plan":
        if self.data == -1:
            raise ValueError(f"plan {str(self)!r} leaves data open: plan.resolve(num_devices) fills it in")
        return self

    def _misfit(self, num_devices: int) -> str:
        """Why this plan can't run on exactly `num_devices` devices; empty when it can."""
        if self.data % self.expert and self.data != -1:
            divisors = [f"expert={n}" for n in range(2, self.data + 1) if self.data % n == 0]
            return (
                f"expert={self.expert} gives so many of the data-parallel devices different experts, and does not "
                f"divide data={self.data}; " + (f"write {' or '.join(divisors)}" if divisors else "leave it out")
            )
        sizes = {"data": self.data, "tensor": self.tensor.size, "sequence": self.sequence.size}
        sizes |= {"pipeline": self.pipeline.size} | ({"expert": self.expert} if self.data == -1 else {})
        product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        unit = self.model_size * self.expert
        if self.data == -1 and num_devices % unit:
            needs = f"a multiple of {unit} devices ({product})"
            enough = max(1, round(num_devices / unit)) * unit
        elif self.data != -1 and self.data * self.model_size != num_devices:
            enough = self.data * self.model_size
            needs = f"{enough} devices ({product or 'data 1'})"
        else:
            return self._group_misfit(num_devices // self.model_size)
        here = f"{num_devices} {'is' if num_devices == 1 else 'are'} here"
        works = {f'plan="{plan}"': "on the devices here" for plan in self._nearest(num_devices)}
        if enough < num_devices:
            works[f"devices=jax.devices()[:{enough}]"] = f"{enough} of the devices here"
        works[f"cjax.simulate({enough})"] = f"{enough} virtual CPU devices, to try it"
        works[f'devices="h100:{enough}"'] = "compile only, for hardware that is not here"
        works['plan="auto"'] = "let cjax choose"
        width = max(map(len, works))
        lines = [f"    {what.ljust(width)}  {why}" for what, why in works.items()]
        return f"plan {str(self)!r} needs {needs}, and {here}. Any of these works:\n" + "\n".join(lines)

    def _group_misfit(self, data: int) -> str:
        group = self.zero.group
        if group is None or data % group == 0:
            return ""
        groups = sorted((n for n in range(2, data + 1) if data % n == 0), key=lambda n: abs(n - group))[:2]
        instead = [f"zero={self.zero.stage}/{n}" for n in sorted(groups)] + [f"zero={self.zero.stage}"]
        return f"zero={self.zero} needs groups of {group}, which don't divide data={data}; write {' or '.join(instead)}"

    def _nearest(self, num_devices: int) -> list["Plan"]:
        """Up to two plans that do run on `num_devices`, each differing from this one in as little as can be."""
        found: list[Plan] = [replace(self, data=-1)]
        divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
        if self.expert > 1:
            nearest = sorted(divisors, key=lambda size: abs(size - self.expert))
            found += [replace(self, data=-1, expert=size) for size in nearest]
        for name in ("tensor", "sequence", "pipeline"):
            part = getattr(self, name)
            for size in sorted(divisors, key=lambda size: abs(size - part.size)) if part.size > 1 else ():
                try:
                    found.append(replace(self, **{"data": -1, name: replace(part, size=size)}))
                except ValueError:  # no such arrangement of `size` devices; the next size may have one
                    continue
        fitting = [plan for plan in dict.fromkeys(found) if num_devices % (plan.model_size * plan.expert) == 0]
        return [plan for plan in fitting if not plan._group_misfit(num_devices // plan.model_size)][:2]


_DEFAULT = Plan()


def build(word: Word) -> Any:
    """The value of one word of a plan's text, as the Plan takes it."""
    match word.name:
        case "data":
            return -1 if (size := number(word)) == -1 else whole_number("data", size)
        case "microbatches" | "overlap" | "expert":
            return whole_number(word.name, number(word))
        case "tensor":
            return Tensor(**_renamed(sized(word), part="depth"))
        case "sequence":
            given = sized(word)
            if "part" in given:
                instead = word.value.partition("/")[0]
                raise ValueError(f"sequence={word.value}: sequence has no part after a slash; write sequence={instead}")
            return Sequence(**given)
        case "pipeline":
            return Pipeline(**_renamed(sized(word), mode="schedule", part="chunks"))
        case "zero":
            return Zero(**_renamed(sized(word), size="stage", part="group"))
        case "budget" | "host" | "disk":
            return num_bytes(word.name, word.value, least=1 if word.name == "disk" else 0)
        case "offload":
            return offloaded(classes(word))
        case "rules":
            return json.loads(word.value, object_pairs_hook=_distinct)
        case _:
            return choice(word)


def _renamed(given: dict[str, Any], **names: str) -> dict[str, Any]:
    return {names.get(name, name): value for name, value in given.items()}


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON lets a key come twice and keeps the last; a rule that silently wins is a rule that silently loses."""
    rules = dict(pairs)
    if len(rules) < len(pairs):
        raise ValueError(f"a dim has two rules among {', '.join(key for key, _ in pairs)}; keep one of them")
    return rules


def _check_rule(dim: Any, axes: Any) -> Axes:
    if not isinstance(dim, str) or not dim:
        raise ValueError(f"rules name a dim by text, such as 'vocab' or 'mlp/kernel:1', not by {dim!r}")
    if axes is None or isinstance(axes, str):
        return axes
    if isinstance(axes, list | tuple) and axes and all(isinstance(axis, str) for axis in axes):
        return tuple(axes)
    raise ValueError(f"rule {dim!r}: a mesh axis, several, or None, not {axes!r}")
