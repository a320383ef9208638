"""The table of what works, read off the contract's own tables: `python tests/works.py` writes it into README.md."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import test_checkpoints
import test_contract
import test_optimizers
import test_pipeline_plans
import test_sequence_plans
from optimizers import OPTAX, OPTIMIZERS, OURS
from plans import LOW, tensor_of
from test_contract import EXACT_PLANS, REFUSED
from zoo import MODELS

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- works: written by tests/works.py -->\n", "<!-- end of works -->"
COMMAND = "python tests/works.py"

# The kinds of models, and what is particular to each of the kind.
KINDS: dict[str, dict[str, str]] = {
    "transformers, Linen": {
        "linen_decoder": "decoder with Flax's own attention and dropout",
        "linen_encoder": "encoder with a padding mask, accuracy beside the loss",
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


def table() -> str:
    """In Markdown: a row for each kind of plan, a column for each kind of model, and what is checked of each pair."""
    missing = set(MODELS) ^ {name for models in KINDS.values() for name in models}
    assert not missing, f"models that tests/works.py and tests/zoo.py don't share: {sorted(missing)}"
    trains, rounds = "test_trains_as_its_author_would", "test_low_precision_is_as_good_as_on_one_device"
    tests = (getattr(test_contract, trains), getattr(test_contract, rounds))
    default = {pair for test in tests for pair in parametrized(test)}
    broken = set().union(*map(failing, tests))
    plans = [*EXACT_PLANS, *LOW]
    rows = [["plans", *KINDS], ["---"] * (len(KINDS) + 1)]
    for row in dict.fromkeys(map(family, plans)):
        mine = [plan for plan in plans if family(plan) == row]
        rows.append([_label(row, mine), *(_cell(list(models), mine, default, broken) for models in KINDS.values())])
    for row, every, default in (
        ("sequence parallelism", test_sequence_plans.PAIRS, test_sequence_plans.PAIRS),
        ("pipelines", test_pipeline_plans.every_pair(), test_pipeline_plans.pairs()),
    ):
        mine = list(dict.fromkeys(plan for _, plan in every))
        counts = [[sum(name in models for name, _ in some) for some in (every, default)] for models in KINDS.values()]
        rows.append([_label(row, mine), *(f"{good} / {short}" for good, short in counts)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    models = [f"- **{kind}**: {'; '.join(phrases.values())}." for kind, phrases in KINDS.items()]
    parts = [*lines, "", _legend(plans), "", *_guarantees(), "", _optimizers(), "", "The models:", "", *models]
    return "\n".join(parts) + "\n"


def _optimizers() -> str:
    ours, optax = (", ".join(name for name in table if "," not in name) for table in (OURS, OPTAX))
    return (
        f"{len(OPTIMIZERS)} optimizers under {len(test_optimizers.PLANS)} plans: given the same gradients, parameters "
        "and every leaf of the state as on one device; whole steps as the model's author would take them; state in "
        f"parts wherever its parameter's is. cjax's own: {ours}, with variants. optax's: {optax}, and others."
    )


def _label(row: str, plans: list[str]) -> str:
    shown = ", ".join(f"`{plan}`" for plan in plans[:3])
    return f"**{row}**: {shown}" + (f" and {len(plans) - 3} more" if len(plans) > 3 else "")


def _cell(models: list[str], plans: list[str], default: set[tuple[str, str]], broken: set[tuple[str, str]]) -> str:
    pairs = {(model, plan) for model in models for plan in plans}
    good, short = len(pairs - broken), len(pairs & default)
    return f"{good}{f' of {len(pairs)}' if good < len(pairs) else ''} / {short}"


def _legend(plans: list[str]) -> str:
    return (
        f"{len(MODELS)} models under {len(plans)} plans on 8 virtual devices. The first number of a cell counts the "
        "pairs of a model and a plan that `make test-all` trains, the second those of every `make test`, which takes "
        "each model and each plan at least once (in low precision each plan). "
        f"{len(REFUSED)} more plans must be refused, as 16 rows can't be shared that way. The last two rows have "
        "tables of their own: plans that suit a model's "
        "lengths and layers. What is checked:"
    )


def _guarantees() -> Iterable[str]:
    for name, test in (*vars(test_contract).items(), *vars(test_checkpoints).items()):
        if name.startswith("test_") and any(mark.name == "parametrize" for mark in getattr(test, "pytestmark", ())):
            said = " ".join((test.__doc__ or "").split())
            yield f"- *{name.removeprefix('test_').replace('_', ' ')}*" + (f": {said}" if said else "")


def written(text: str) -> str:
    """`text` of the README with the table in place."""
    assert BEGIN in text and END in text, f"README.md has lost its marker {BEGIN.strip()} or {END}"
    new = BEGIN + "\n" + table() + "\n" + END
    return re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), lambda _: new, text, flags=re.DOTALL)


if __name__ == "__main__":
    old = README.read_text()
    new = written(old)
    if "--check" in sys.argv:
        sys.exit(f"README.md's table of what works is stale; type: {COMMAND}" if new != old else 0)
    README.write_text(new)
