"""The parts of README.md and docs/ that are read off the code: `python tests/pages.py` writes them in their places.

A part stands between `<!-- NAME: written by tests/pages.py -->` and `<!-- end of NAME -->`; `--check` writes nothing
and tells what is stale.
"""

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import docstring_parser
import works

import cjax
from cjax import cards
from cjax.cli.cluster import VERBS, ClusterCommand
from cjax.cli.commands import COMMANDS
from cjax.plan import Plan
from cjax.plan.colossal import ELSEWHERE, NEEDLESS
from cjax.plan.text import FOREIGN_NAMES, FOREIGN_WORDS, WORDS

ROOT = Path(__file__).parent.parent
COMMAND = "python tests/pages.py"

# Rooms whose names users call, by how they are headed: all names of a room, or those that are named here.
ROOMS: dict[str, dict[str, tuple[str, ...]]] = {
    "Reports": {
        "cjax.report": (),
        "cjax.program": ("Check",),
        "cjax.audit.facts": ("Audit",),
        "cjax.planner.profile": ("Profile",),
    },
    "Training loop": {"cjax.train": (), "cjax.train.pace": ("best_interval",)},
    "Many jobs on one cluster": {
        "cjax.cluster": (),
        "cjax.scheduler.policy.goodput": ("allocate",),
        "cjax.scheduler.policy.baselines": ("Tiresias", "fifo", "optimus"),
        "cjax.scheduler.policy.job": ("Job", "Speed", "SpeedTable"),
    },
    "Checkpoints": {"cjax.checkpoint": ()},
    "Optimizers and their parts": {"cjax.optim": ()},
    "Schedules": {"cjax.optim.schedules": ()},
    "Data": {"cjax.data": ()},
    "Models": {"cjax.models": ()},
    "Cards": {"cjax.cards": ()},
    "Schedules of pipelines": {"cjax.pipeline": ()},
}
# Of `cjax` itself, in the order in which they are met. The rest of what `dir(cjax)` shows are rooms.
FRONT = (
    *("parallelize", "Program", "State", "Mean", "Plan", "Tensor", "Sequence", "Pipeline", "Zero", "Cluster"),
    *(
        "plans",
        "Plans",
        "simulate",
        "initialize",
        "attention",
        "generate",
        "StreamedModel",
        "audit",
        "calibrate",
        "OutOfMemory",
        "MismatchError",
    ),
)
# What Colossal-AI's users write, as keyword arguments of `Plan.from_colossal`.
COLOSSAL: tuple[dict[str, Any], ...] = (
    {"plugin": "TorchDDPPlugin"},
    {"plugin": "LowLevelZeroPlugin", "stage": 2},
    {"plugin": "GeminiPlugin", "precision": "bf16"},
    {"plugin": "TorchFSDPPlugin"},
    {"plugin": "HybridParallelPlugin", "tp_size": 2, "pp_size": 4, "num_microbatches": 16, "zero_stage": 1},
    {"plugin": "MoeHybridParallelPlugin", "ep_size": 4, "tp_size": 2, "zero_stage": 1},
    {"tp_size": 4, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
    {"sp_size": 4, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
    {"sp_size": 4, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
    {"pp_size": 4, "pp_style": "interleaved", "num_model_chunks": 2, "num_microbatches": 16},
    {"pp_size": 4, "pp_style": "zbv", "num_model_chunks": 2, "num_microbatches": 16},
    {"parallel": {"tensor": {"size": 4, "mode": "2d"}}},
    {"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}},
    {"parallel": {"tensor": {"size": 8, "mode": "3d"}}},
    {"enable_gradient_checkpointing": True, "precision": "fp16"},
    {"zero_stage": 1, "precision": "bf16", "communication_dtype": "fp32"},
)


def rows(*lines: Iterable[str]) -> str:
    """A table of Markdown, its head first."""
    head, *body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]
    return "\n".join([head, "|" + " --- |" * (head.count(" | ") + 1), *body]) + "\n"


def words_elsewhere() -> str:
    """What other systems call a word of a plan, and what to write."""
    written: dict[str, list[str]] = {}
    for name, instead in FOREIGN_NAMES.items():
        written.setdefault(instead.format(value="N"), []).append(name)
    for word, ours in FOREIGN_WORDS.items():
        (*owners,) = (name for name, words in WORDS.items() if ours in words and name != "reduce")
        sized = ":N" if owners[0] in ("tensor", "sequence", "pipeline") and ours not in ("gather",) else ""
        written.setdefault(f"{owners[0]}={ours}{sized}", []).append(word)
    lines = ((f"`{plan}`" if "(" not in plan else plan, ", ".join(f"`{n}`" for n in names))
             for plan, names in sorted(written.items()))  # fmt: skip
    return rows(("write", "where others say"), *lines)


def values() -> str:
    """The words that each name of a plan takes."""
    return rows(
        ("name", "takes"), *((f"`{name}`", ", ".join(f"`{w}`" for w in words)) for name, words in WORDS.items())
    )


def commands() -> str:
    """Each command's arguments, with what they mean and their defaults."""
    parts = []
    named = {name: command for name, command in COMMANDS.items() if command is not ClusterCommand}
    named |= {f"cluster {verb}": command for verb, command in VERBS.items()}
    for name, command in named.items():
        said = docstring_parser.parse(command.__doc__ or "")
        parts.append(f"## cjax {name}\n\n{_escaped(said.description or '')}\n")
        fields = {field.name: field for field in dataclasses.fields(command)}
        lines = [
            (_typed(fields[each]), _escaped(text), _default(fields[each])) for each, text in meant(command).items()
        ]
        if lines:
            parts.append(rows(("argument", "means", "default"), *lines))
    return "\n".join(parts)


def meant(command: type[Any]) -> dict[str, str]:
    """What a command's docstring says of each argument, then those of the classes that it inherits arguments from."""
    documented = (docstring_parser.parse(each.__doc__ or "") for each in command.__mro__ if each is not object)
    return {item.arg_name: " ".join((item.description or "").split()) for said in documented for item in said.params}


def _typed(field: dataclasses.Field[Any]) -> str:
    is_positional = "Positional" in str(field.type)
    return f"`{field.name.upper() if is_positional else '--' + field.name.replace('_', '-')}`"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "needed"
    return "" if field.default in (None, ()) else f"`{field.default}`"


def _escaped(text: str) -> str:
    return text.replace("<", "&lt;").strip()


def colossal() -> str:
    """Configurations of Colossal-AI, and the plans that `Plan.from_colossal` makes of them."""
    shown = []
    for given in COLOSSAL:
        text = ", ".join(f"{key}={value!r}" for key, value in given.items()).replace("'", '"')
        shown.append((f"`{text}`", f"`{Plan.from_colossal(**given)}`"))
    return rows(("Colossal-AI", "plan"), *shown)


def colossal_elsewhere() -> str:
    """Keys of Colossal-AI that no plan can say, and who can; then those that nobody needs here."""
    by_reason: dict[str, list[str]] = {}
    for key, reason in ELSEWHERE.items():
        by_reason.setdefault(reason, []).append(key)
    lines = [(", ".join(f"`{key}`" for key in keys), _escaped(reason)) for reason, keys in by_reason.items()]
    lines += [(", ".join(f"`{key}`" for key in keys), f"nothing: {why}") for why, keys in NEEDLESS.items()]
    return rows(("key", "what to do"), *lines)


def absent_cards() -> str:
    """The cards that plans are compiled for without having them."""
    lines = []
    for card in cards.CARDS.values():
        half = card.bf16_flops or card.f16_flops or card.f32_flops
        note = "" if card.bf16_flops else " (float16)"
        network = f"{card.adapters_per_host} x {card.network_bandwidth / 1e9:g}"
        price = "" if card.price is None else f"{card.price:.2f}"
        lines.append((
            f"`{card.name}`", card.kind, f"{card.memory / 2**30:.0f}", f"{half / 1e12:.0f}{note}",
            str(card.cards_per_host), f"{card.host_bandwidth / 1e9:g}", network, f"{card.power:g}", price,
            "yes" if card.is_compilable else "no",
        ))  # fmt: skip
    head = ("name", "card", "GiB", "bfloat16 TFLOP/s", "a host", "GB/s inside", "GB/s between", "watts", "$ an hour")
    return rows((*head, "compiles"), *lines)


def reference() -> str:
    """The public names: of `cjax`, then of its rooms."""
    parts = ["## cjax\n", *(f"::: {place_of('cjax', name)}\n" for name in FRONT)]
    for title, rooms in ROOMS.items():
        parts.append(f"## {title}: {next(iter(rooms))}\n")
        for room, names in rooms.items():
            parts += [f"::: {place_of(room, name)}\n" for name in names or public_names(room)]
    return "\n".join(parts)


def place_of(room: str, name: str) -> str:
    """Where the parser finds a room's name: in its own file, if a file or room of that name would be found first."""
    value = getattr(importlib.import_module(room), name)
    return f"{value.__module__}.{name}" if f"{room}.{name}" in sys.modules else f"{room}.{name}"


def public_names(room: str) -> list[str]:
    """What users may call of a room, classes and functions alone."""
    module = importlib.import_module(room)
    names = getattr(module, "__all__", None) or [name for name, value in vars(module).items() if _is_own(value)]
    return sorted(name for name in names if callable(getattr(module, name)) and not name.startswith("_"))


def _is_own(value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", "").startswith("cjax.")


PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"works": works.marks},
    "docs/what-works.md": {"works": works.table},
    "docs/plans.md": {"words": values, "elsewhere": words_elsewhere},
    "docs/reports.md": {"cards": absent_cards},
    "docs/command-line.md": {"commands": commands},
    "docs/coming-from.md": {"colossal": colossal, "colossal-elsewhere": colossal_elsewhere},
    "docs/api.md": {"reference": reference},
}


def written(text: str, name: str, part: str) -> str:
    """`text` of a page with one of its parts in place."""
    begin, end = f"<!-- {name}: written by tests/pages.py -->\n", f"<!-- end of {name} -->"
    assert begin in text and end in text, f"a page has lost its marker {begin.strip()} or {end}"
    return re.sub(re.escape(begin) + ".*?" + re.escape(end), lambda _: f"{begin}\n{part}\n{end}", text, flags=re.DOTALL)


def main(check: bool) -> int:
    stale = []
    for page, parts in PARTS.items():
        old = new = (ROOT / page).read_text()
        for name, make in parts.items():
            new = written(new, name, make())
        if new != old and not check:
            (ROOT / page).write_text(new)
        stale += [page] if new != old else []
    if check and stale:
        print(f"stale: {', '.join(stale)}; type: {COMMAND}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    assert cjax.__file__, "cjax is a package of this clone"
    sys.exit(main("--check" in sys.argv))
