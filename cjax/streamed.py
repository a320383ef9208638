"""Models of Hugging Face's folders that are larger than the memory: their weights stay in the files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jax

from cjax.mesh import Device, own_context, resolve_devices
from cjax.models import T5
from cjax.models.generation import Decoder, last_logits, next_logits
from cjax.models.transformers.weights import opened, read_whole
from cjax.plan import Plan
from cjax.program.compose import compose
from cjax.program.composed import Given
from cjax.program.streamed import Streamed
from cjax.program.texts import Needs, Texts, Weights
from cjax.trace.author.capture import capture
from cjax.trace.source import TraceSource
from cjax.walk.quantized import Bits, library

KINDS = ("int8", "int4")
_WORDS = ("data", "tensor", "budget", "host", "offload")
_UNLIMITED = 2**60


class StreamedModel:
    """A GPT, Llama or T5 in a folder of Hugging Face's, for `cjax.generate` alone.

    Each token is a pass over the layers. As many of them as the plan allows are kept on the devices, then in host
    memory; the others are read from the folder's safetensors files in every pass, ahead of their turn. No file is
    written. What is in the files in bfloat16 or float16 stays so until it is computed with, in float32 as `load` has
    it: to the same numbers.

    Args:
        path: the folder.
        plan: `budget=` of a device and `host=` of a process, with `data=` and `tensor=`; "offload=params" keeps no
            layer on the devices, "offload=activations" no keys and values.
        weights: "int8" or "int4" for layers' matrices quantized by Qwix as they are read; as in the files if None.
        devices: what it runs on; the first device if not given.

    Raises:
        FileNotFoundError: no such folder, or a file of it is missing.
        ValueError: a folder of another model, or of one with a single layer, a damaged file, or a plan with words that
            generation has no use for.
        ImportError: Qwix is needed and not installed.

    >>> import tempfile
    >>> import cjax
    >>> from flax import nnx
    >>> from cjax.models import GPT, gpt, save
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, GPT(gpt("gpt-mini"), rngs=nnx.Rngs(0)))
    ...     with cjax.StreamedModel(folder, "budget=8MiB host=2MiB") as model:
    ...         text = cjax.generate(model, [[1, 2, 3]], 5, temperature=0)
    >>> text.shape
    (1, 8)
    """

    @own_context
    def __init__(
        self, path: str | Path, plan: Plan | str = "", *, weights: str | None = None,
        devices: Sequence[Device] | None = None,
    ) -> None:  # fmt: skip
        given = devices or resolve_devices(None)[:1]
        if jax.process_count() > 1:
            raise ValueError("weights are streamed from files in one process; cjax.parallelize has plans for several")
        self.plan = _checked(Plan.parse(plan) if isinstance(plan, str) else plan, weights).resolve(len(given))
        kind, config, stored = opened(path)
        if kind not in Decoder.__args__:
            raise ValueError(f"{path} holds a {kind.__name__}, which continues no texts; give a GPT, Llama or T5")
        _check_layers(path, kind, config)
        batch = _batch(kind, config, len(given) // self.plan.tensor.size)
        source = TraceSource(capture(lambda rngs: kind(config, rngs=rngs), _loss, batch, None), batch)
        composed = compose(Given(source, None), self._walking(), given)
        self.mesh = composed.mesh
        self._streamed = Streamed(
            composed,
            next_logits,
            stored,
            read_whole,
            cast(Bits | None, weights),
            self.plan.budget is not None,
        )

    def _walking(self) -> Plan:
        """The plan, with a budget that nothing exceeds where it has none: weights come layer by layer all the same."""
        if self.plan.budget is not None:
            return self.plan
        words = {name: getattr(self.plan, name) for name in ("data", "tensor", "host", "offload")}
        return Plan(**words, budget=_UNLIMITED)

    @property
    def texts(self) -> Texts:
        """Its passes."""
        return self._streamed.texts

    def ready(self, needs: Needs) -> tuple[Weights, Any]:
        """Weights for passes that need so much, and the homes of keys and values."""
        return self._streamed.ready(needs)

    @property
    def homes(self) -> dict[str, dict[str, int]]:
        """How many layers' weights and how many layers' keys and values the last call of `cjax.generate` had on the
        devices, in host memory and, of weights, in the folder; nothing before the first."""
        held = self._streamed.held
        if held is None:
            return {}
        weights = [home for stack in held.weights for home in stack]
        found = {"weights": {"device": 0, "host": 0, "folder": 0}, "memory": {"device": 0, "host": 0}}
        for home in weights:
            found["weights"]["folder" if home == "disk" else home] += 1
        for home in held.memory:
            found["memory"][home] += 1
        return found

    def close(self) -> None:
        """Gives up all layers; the next call reads them again."""
        self._streamed.close()

    def __enter__(self) -> "StreamedModel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(plan: Plan, weights: str | None) -> Plan:
    for name in ("zero", "pipeline", "sequence", "microbatches", "precision", "remat", "loss", "reduce", "disk"):
        if getattr(plan, name) != getattr(Plan(), name):
            more = ": the layers that host memory has no room for stay in their folder" if name == "disk" else ""
            raise ValueError(f"{name}= has no use in generation from a folder{more}; there are {', '.join(_WORDS)}")
    if useless := sorted(set(plan.offload) - {"params", "activations"}):
        raise ValueError(f"offload={useless[0]} has no use in generation: there are params, and activations")
    if weights is None:
        return plan
    if weights not in KINDS:
        raise ValueError(f"weights={weights!r}: write {' or '.join(map(repr, KINDS))}, or leave it out")
    if plan.tensor.size > 1:
        raise ValueError(f"weights={weights!r} are whole on every device: leave tensor= out, or weights=")
    library()
    return plan


def _check_layers(path: str | Path, kind: type, config: Any) -> None:
    """Raises where there is nothing to go through layer by layer: no two layers of those that remember a text."""
    num = getattr(config, "num_decoder_layers", None) or config.num_layers
    if num < 2:
        what = "its decoder has" if kind is T5 else "it has"
        raise ValueError(
            f"the {kind.__name__} in {path} can't be streamed layer by layer: {what} one layer, and it takes two "
            f"or more. Load it whole: cjax.generate(cjax.models.load({str(path)!r}), ...), or `cjax generate {path}` "
            "without --budget, --host and --weights"
        )


def _loss(model: Any, batch: Any) -> jax.Array:
    """All that generation computes, in one pass: what is known of the model's layers is read off it."""
    if isinstance(model, T5):
        return last_logits(model, model.decode(batch["new"], model.remember_each(model.encode(batch["source"])))).mean()
    return last_logits(model, model.hidden(batch["new"])).mean()


def _batch(kind: type, config: Any, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    length = 8 if kind is T5 else min(8, config.context)
    tokens = jax.ShapeDtypeStruct((rows, length), "int32")
    return {"new": tokens, "source": tokens} if kind is T5 else {"new": tokens}
