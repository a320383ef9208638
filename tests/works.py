"""The tables of what works, read off the contract's own; tests/pages.py writes them into README.md and docs/."""

from collections.abc import Iterable
from typing import Any

import test_checkpoints
import test_contract
import test_expert_plans
import test_optimizers
import test_pipeline_plans
import test_sequence_plans
import test_walks
from optimizers import OPTAX, OPTIMIZERS, OURS
from plans import LOW, tensor_of
from test_contract import EXACT_PLANS, REFUSED
from zoo import MODELS

# The kinds of models, and what is particular to each of the kind.
KINDS: dict[str, dict[str, str]] = {
    "transformers, Linen": {
        "linen_decoder": "decoder with Flax's own attention and dropout",
        "linen_encoder": "encoder with a padding mask, accuracy reported with the loss",
        "linen_scan": "layers under `nn.scan`",
        "linen_remat": "layers under `nn.remat`",
        "linen_tied": "tied embedding",
        "linen_packed_qkv": "queries, keys and values in one matmul",
        "linen_masked_mean": "a mean over true tokens only",
        "linen_encoder_decoder": "encoder and decoder with cross-attention",
        "linen_vit": "vision transformer",
    },
    "transformers, NNX": {
        "nnx_decoder": "decoder with Flax's own attention and dropout",
        "nnx_encoder": "encoder, given as an instance that holds its weights",
        "nnx_scan": "layers under `nnx.scan`",
        "nnx_llama": "Llama's kind: rotary positions, grouped queries, gated MLP",
    },
    "`cjax.models`": {
        "cjax_gpt": "GPT, some positions classified at a time",
        "cjax_bert": "BERT with padding, words hidden",
        "cjax_vit": "ViT",
        "cjax_t5": "T5: relative positions, encoder and decoder of other depths",
        "cjax_llama": "Llama with grouped queries",
    },
    "mixture of experts": {
        "linen_moe_soft": "soft routing",
        "linen_moe_capacity": "experts with a capacity",
    },
    "convolutional": {"linen_conv": "BatchNorm, Linen", "nnx_conv": "BatchNorm, NNX"},
    "LSTM, MLP": {"linen_lstm": "LSTM", "linen_mixer": "MLP-mixer", "nnx_mlp": "MLP for regression, NNX"},
}
MARKS = {
    "precision=bfloat16": "bfloat16",
    "precision=float16": "float16",
    "remat=": "remat",
    "microbatches=": "micro-batches",
}


EVERY = [*EXACT_PLANS, *LOW]


def family(plan: str) -> str:
    """The row of a plan."""
    if tensor_of(plan)[0] != "1d":
        return "2D, 2.5D, 3D tensor"
    for word, row in MARKS.items():
        if word in plan:
            return row
    if "tensor=" in plan:
        return "tensor with ZeRO" if "zero=" in plan else "tensor"
    return "ZeRO" if "zero=" in plan else "data"


def parametrized(test: Any) -> list[tuple[str, str]]:
    """(model, plan) pairs of a contract test in the default run; those marked as failing are none of them."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    return [tuple(pair) for pair in mark.args[1] if not getattr(pair, "marks", ())]


def failing(test: Any) -> set[tuple[str, str]]:
    """Pairs that a contract test itself marks as failing."""
    (mark,) = (mark for mark in test.pytestmark if mark.name == "parametrize")
    return {tuple(pair.values) for pair in mark.args[1] if getattr(pair, "marks", ())}


def counted() -> list[tuple[str, list[str], list[tuple[int, int, int]]]]:
    """Each kind of plan, its plans, and for each kind of model how many pairs there are, how many of them train in the
    full product, and how many run by default."""
    missing = set(MODELS) ^ {name for models in KINDS.values() for name in models}
    assert not missing, f"models that tests/works.py and tests/zoo.py don't share: {sorted(missing)}"
    trains, rounds = "test_trains_as_its_author_would", "test_low_precision_is_as_good_as_on_one_device"
    tests = (getattr(test_contract, trains), getattr(test_contract, rounds))
    default = {pair for test in tests for pair in parametrized(test)}
    broken = set().union(*map(failing, tests))
    found = []
    for row in dict.fromkeys(map(family, EVERY)):
        mine = [plan for plan in EVERY if family(plan) == row]
        pairs = [{(model, plan) for model in models for plan in mine} for models in KINDS.values()]
        found.append((row, mine, [(len(some), len(some - broken), len(some & default)) for some in pairs]))
    for row, every, few in (
        ("sequence parallelism", test_sequence_plans.EVERY_PAIR, test_sequence_plans.PAIRS),
        ("experts", [*test_expert_plans.PAIRS, *test_expert_plans.MORE], test_expert_plans.PAIRS),
        ("pipelines", test_pipeline_plans.every_pair(), test_pipeline_plans.pairs()),
        ("host memory and disk", [*test_walks.MORE, *test_walks.PAIRS], test_walks.PAIRS),
    ):
        mine = list(dict.fromkeys(plan for _, plan in every))
        counts = [[sum(name in models for name, _ in some) for some in (every, few)] for models in KINDS.values()]
        found.append((row, mine, [(good, good, short) for good, short in counts]))
    return found


def marks() -> str:
    """In Markdown: a row for each kind of plan, a column for each kind of model, and whether the pairs train."""
    rows = [["plans", *KINDS], ["---"] * (len(KINDS) + 1)]
    for row, mine, cells in counted():
        rows.append([f"**{row}**, such as `{mine[0]}`", *map(_mark, cells)])
    return _lines(rows) + "\n"


def _mark(cell: tuple[int, int, int]) -> str:
    every, good, _ = cell
    return "" if not every else "✓" if good == every else f"{good} of {every}"


def table() -> str:
    """In Markdown: a row for each kind of plan, a column for each kind of model, and what is checked of each pair."""
    rows = [["plans", *KINDS], ["---"] * (len(KINDS) + 1)]
    for row, mine, cells in counted():
        rows.append([_label(row, mine), *(f"{_count(*cell)} / {cell[2]}" for cell in cells)])
    models = [f"- **{kind}**: {'; '.join(phrases.values())}." for kind, phrases in KINDS.items()]
    parts = [_lines(rows), "", _legend(EVERY), "", *_guarantees(), "", _optimizers(), "", "The models:", "", *models]
    return "\n".join(parts) + "\n"


def _lines(rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _count(every: int, good: int, _: int) -> str:
    return f"{good} of {every}" if good < every else f"{good}"


def _optimizers() -> str:
    ours, optax = (", ".join(name for name in table if "," not in name) for table in (OURS, OPTAX))
    return (
        f"{len(OPTIMIZERS)} optimizers under {len(test_optimizers.PLANS)} plans. Given the same gradients, parameters "
        "and every leaf of the state are as on one device; whole steps are as the model's author would take them; and "
        f"state is split wherever its parameter is. cjax's own: {ours}, with variants. optax's: {optax}, and others."
    )


def _label(row: str, plans: list[str]) -> str:
    shown = ", ".join(f"`{plan}`" for plan in plans[:3])
    return f"**{row}**: {shown}" + (f" and {len(plans) - 3} more" if len(plans) > 3 else "")


def _legend(plans: list[str]) -> str:
    return (
        f"{len(MODELS)} models under {len(plans)} plans on 8 virtual devices. First number: pairs of a model and a "
        "plan trained by `make test-all`. Second: pairs in every `make test`, which covers each model and each plan "
        "word at least once over all tables (this one, and those of pipelines, sequences, fused attention and disks). "
        f"{len(REFUSED)} more plans must be refused, because 16 rows can't be shared that way. The last three rows "
        "have plans of their own, which suit a model's lengths and layers. What is checked:"
    )


def _guarantees() -> Iterable[str]:
    for name, test in (*vars(test_contract).items(), *vars(test_checkpoints).items()):
        if name.startswith("test_") and any(mark.name == "parametrize" for mark in getattr(test, "pytestmark", ())):
            said = " ".join((test.__doc__ or "").split())
            yield f"- *{name.removeprefix('test_').replace('_', ' ')}*" + (f": {said}" if said else "")
