"""A plan's text taken apart: words, their places, and what to write instead of a wrong one. Knows no Plan."""

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn, get_args

from cjax.plan.parts import LossOf, Precision, Remat, Schedule, SequenceMode, TensorMode, Unroll
from cjax.plan.sizes import CLASSES, UNITS

NAMES = (
    *("data", "tensor", "sequence", "pipeline", "expert", "microbatches", "overlap", "loss"),
    *("zero", "precision", "reduce", "remat", "unroll", "budget", "host", "disk", "offload", "rules"),
)

WORDS: dict[str, tuple[str, ...]] = {
    "tensor": get_args(TensorMode),
    "sequence": get_args(SequenceMode),
    "pipeline": get_args(Schedule),
    "loss": get_args(LossOf),
    "precision": get_args(Precision),
    "reduce": get_args(Precision),
    "remat": get_args(Remat),
    "unroll": get_args(Unroll),
    "offload": CLASSES,
}

# What other systems call it. None of these is an alias: one way to write a plan, and the error teaches it.
FOREIGN_NAMES = {
    "fsdp": "zero=3 data={value}",
    "hsdp": "zero=3/{value}",
    **dict.fromkeys(("dp", "ddp", "data_parallel", "dp_size", "replicas"), "data={value}"),
    **dict.fromkeys(("tp", "mp", "model", "model_parallel", "tensor_parallel", "tp_size"), "tensor={value}"),
    **dict.fromkeys(("ep", "experts", "expert_parallel", "ep_size", "moe"), "expert={value}"),
    **dict.fromkeys(("pp", "pipe", "stages", "pipeline_parallel", "pp_size"), "pipeline=1f1b:{value}"),
    **dict.fromkeys(("cp", "context", "context_parallel", "sp_size", "seq"), "sequence=ring:{value}"),
    **dict.fromkeys(("sp", "sequence_parallel"), "sequence=gather (on the tensor axis) or sequence=ring:{value}"),
    "ulysses": "sequence=all_to_all:{value}",
    **dict.fromkeys(
        ("accumulate", "accumulation", "grad_accum", "grad_accumulation", "gradient_accumulation", "accum"),
        "microbatches={value}",
    ),
    **dict.fromkeys(("accumulation_steps", "num_microbatches", "micro_batches"), "microbatches={value}"),
    **dict.fromkeys(("domino", "tp_comm_overlap", "tp_overlap", "comm_overlap"), "microbatches=2 overlap=2"),
    **dict.fromkeys(("zero_stage", "stage"), "zero={value}"),
    **{f"zero{stage}": f"zero={stage}" for stage in (1, 2, 3)},
    **dict.fromkeys(("bf16", "mixed_precision", "amp"), "precision=bfloat16"),
    **dict.fromkeys(("fp16", "half"), "precision=float16"),
    **dict.fromkeys(("fp32", "full_precision"), "precision=float32"),
    "dtype": "precision={value}",
    **dict.fromkeys(("reduce_dtype", "grad_reduce", "communication_dtype"), "reduce={value}"),
    **dict.fromkeys(
        ("checkpoint", "checkpointing", "gradient_checkpointing", "activation_checkpointing", "recompute"),
        "remat=block",
    ),
    **dict.fromkeys(("scan", "scan_layers"), "unroll=none (a loop over layers) or unroll=layers"),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "optimizer_offload", "offload_optim"), "offload=optimizer"),
    **dict.fromkeys(("offload_params", "offload_param", "param_offload"), "offload=params"),
    **dict.fromkeys(("offload_activations", "activation_offloading", "cpu_checkpointing"), "offload=activations"),
    **dict.fromkeys(("max_memory", "device_memory", "gpu_memory"), "budget=16GiB"),
    **dict.fromkeys(("cpu_memory", "host_memory", "ram"), "budget=16GiB host=200GiB"),
    **dict.fromkeys(("nvme", "nvme_offload", "ssd"), "budget=16GiB host=200GiB disk=2TiB"),
    "auto": 'plan="auto", with the words that it may not change behind it, as in "auto precision=bfloat16"',
}
FOREIGN_WORDS = {
    **{"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "full": "block", "all": "block"},
    **{"ulysses": "all_to_all", "ring_attn": "ring", "split_gather": "gather", "megatron": "1d", "summa": "2d"},
    **{"tesseract": "2.5d", "2p5d": "2.5d", "zbv": "zero_bubble", "zb": "zero_bubble", "true": "block"},
    **{"parameters": "params", "weights": "params", "opt_state": "optimizer", "optim": "optimizer"},
    **{"optimizer_state": "optimizer", "grads": "gradients", "acts": "activations"},
}
EXAMPLES = {
    "tensor": "tensor=4 or tensor=2d:4",
    "sequence": "sequence=ring:4",
    "pipeline": "pipeline=1f1b:4",
    "expert": "expert=4",
    "zero": "zero=1 or zero=3/8",
    "data": "data=2",
    "microbatches": "microbatches=4",
    "overlap": "microbatches=2 overlap=2",
    "loss": "loss=microbatch",
    "rules": 'rules={"vocab":null}',
    "precision": "precision=bfloat16",
    "reduce": "reduce=float32",
    "remat": "remat=block",
    "unroll": "unroll=layers",
    "budget": "budget=16GiB",
    "host": "budget=16GiB host=200GiB",
    "disk": "budget=16GiB host=200GiB disk=2TiB",
    "offload": "offload=params+optimizer",
}


@dataclass(frozen=True)
class Word:
    """One `name=value` of a plan, and where it stands in the text."""

    name: str
    value: str
    start: int
    stop: int


def underline(text: str, start: int, stop: int, message: str, of: str = "plan") -> str:
    """What the text is `of`, `message`, then the text with the characters from `start` to `stop` underlined."""
    line = re.sub(r"\s", " ", text)
    return f"{of}: {message}\n    {line}\n    {' ' * start}{'^' * max(1, stop - start)}"


def split(text: str) -> list[Word]:
    """The words of a plan's text, in order; raises ValueError at the first name that no plan has."""
    words: list[Word] = []
    place = 0
    while found := re.compile(r"\s*([^\s=]+)(=?)").match(text, place):
        name, start = found[1], found.start(1)
        if name not in NAMES or not found[2]:
            value = re.compile(r"\S*").match(text, found.end())
            _refuse_name(text, start, found.end(1), name, value[0] if value and found[2] else "")
        place = _value_end(text, name, start, found.end())
        words.append(Word(name, text[found.end() : place], start, place))
        if name in {word.name for word in words[:-1]}:
            raise ValueError(underline(text, start, place, f"{name} is given twice"))
    if text[place:].strip():
        raise ValueError(
            underline(text, place, len(text.rstrip()), "no name before this '='; write name=value, no spaces")
        )
    return words


def _value_end(text: str, name: str, start: int, place: int) -> int:
    plain = re.compile(r"\S*").match(text, place)
    assert plain is not None  # matches the empty text too
    if name != "rules":
        return plain.end()
    try:
        if text.startswith("{", place):
            return json.JSONDecoder().raw_decode(text, place)[1]
        problem, stop = "no '{'", plain.end()
    except json.JSONDecodeError as error:
        problem, stop = error.msg, len(text)
    except RecursionError:
        problem, stop = "too many brackets inside each other", len(text)
    raise ValueError(underline(text, start, stop, f"rules are JSON, as in {EXAMPLES['rules']}: {problem}"))


def _refuse_name(text: str, start: int, stop: int, name: str, value: str) -> NoReturn:
    plain = name.lower()
    owners = [owner for owner, words in WORDS.items() if plain in words]
    near = get_close_matches(plain, NAMES, n=1)
    if plain in NAMES and plain != name:
        message = f"names are in small letters; write {plain}={value}"
    elif plain in NAMES:
        message = f"{name} needs a value, with no space around '='; write {EXAMPLES[plain]}"
    elif plain in FOREIGN_NAMES:
        message = f"{name!r} is not a name here; write {FOREIGN_NAMES[plain].format(value=value or 'N')}"
    elif name in UNITS:
        message = f"{name!r} stands alone; write a size without a space, as in {EXAMPLES['budget']}"
    elif owners:
        sized = f":{value or 'N'}" if owners[0] in ("tensor", "sequence", "pipeline") and plain != "gather" else ""
        message = f"{name!r} is no name; write {owners[0]}={plain}{sized}"
    elif near:
        message = f"unknown name {name!r}; did you mean {near[0]}={value or 'N'}?"
    else:
        message = f"unknown name {name!r}; a plan has {', '.join(NAMES)}"
    raise ValueError(underline(text, start, stop, message))


def choice(word: Word) -> str:
    """The value of a name that takes one word, such as precision."""
    allowed = WORDS[word.name]
    if word.value not in allowed:
        _refuse_word(word, word.value, "{}")
    return word.value


def classes(word: Word) -> str:
    """The value of a name that takes several words with "+" between them."""
    given = word.value.split("+")
    for i, each in enumerate(given):
        if each not in WORDS[word.name]:
            _refuse_word(word, each, "+".join([*given[:i], "{}", *given[i + 1 :]]))
    return word.value


def number(word: Word) -> int:
    """The value of a name that takes one number."""
    if not re.fullmatch(r"-?[0-9]+", word.value):
        hint = "put a space between one word and the next" if "," in word.value else f"write {EXAMPLES[word.name]}"
        raise ValueError(f"{word.value!r} is not a whole number; {hint}")
    return int(word.value)


def sized(word: Word) -> dict[str, Any]:
    """The given ones of `mode`, `size` and `part` in `[mode:]size[/part]`; some modes stand alone."""
    name, modes = word.name, WORDS.get(word.name, ())
    if word.value == "gather" and name == "sequence":
        return {"mode": "gather"}
    mode, colon, rest = word.value.rpartition(":")
    if rest in modes and mode.isdigit():
        raise ValueError(f"the mode comes first; write {name}={rest}:{mode}")
    if rest in modes and not colon:
        raise ValueError(f"{name}={rest} needs a number of devices; write {name}={rest}:4")
    if colon and mode not in modes:
        _refuse_word(word, mode, "{}:" + rest)
    size, slash, part = rest.partition("/")
    if not re.fullmatch(r"-?[0-9]+", size) or (slash and not re.fullmatch(r"[0-9]+", part)):
        hint = "put a space between one word and the next" if "," in word.value else f"write {EXAMPLES[name]}"
        raise ValueError(f"{word.value!r} is no [mode:]size[/part]; {hint}")
    given = {"mode": mode} if colon else {}
    return given | {"size": int(size)} | ({"part": int(part)} if slash else {})


def _refuse_word(word: Word, given: str, template: str) -> NoReturn:
    allowed = WORDS.get(word.name, ())
    plain = given.lower()
    near = [FOREIGN_WORDS[plain]] if FOREIGN_WORDS.get(plain) in allowed else get_close_matches(plain, allowed, n=1)
    instead = f"write {word.name}={template.format(near[0])}" if near else f"{word.name} knows {', '.join(allowed)}"
    raise ValueError(f"{word.name} has no {given!r}; {instead}" if allowed else f"{word.name} takes no mode")
