"""What a plan's text is refused for: the wrong word underlined, and what to write instead, which must then work."""

import re

import pytest

from cjax.plan import Plan
from cjax.plan.text import EXAMPLES, FOREIGN_NAMES, FOREIGN_WORDS, NAMES, WORDS


def refusal(text: str) -> tuple[str, str]:
    """The message, and the part of the text that is underlined."""
    with pytest.raises(ValueError) as caught:
        Plan.parse(text)
    message, shown, marks = str(caught.value).split("\n")
    assert shown.strip() == text.strip()
    return message, shown[marks.index("^") : marks.rindex("^") + 1]


@pytest.mark.parametrize(
    "text, underlined, message",
    [
        ("data=2 tensr=4 zero=1", "tensr", "did you mean tensor=4?"),
        ("foo=1", "foo", "a plan has data, tensor"),
        ("data=2 fsdp=8", "fsdp", "write zero=3 data=8"),
        ("data=2 ep=4", "ep", "write expert=4"),
        ("data=2 experts=4", "experts", "write expert=4"),
        ("data=4 expert=4/2", "expert=4/2", "'4/2' is not a whole number; write expert=4"),
        ("data=4 expert=0", "expert=0", "expert is a whole number of at least 1, not 0"),
        ("tensor=2d:4 expert=2", "expert=2", "write tensor=4 (1d) expert=2"),
        ("zero=3/4 expert=2", "zero=3/4", "write zero=3 expert=2"),
        ("budget=1GiB expert=2", "expert=2", "leave it out, or write tensor=2"),
        ("hsdp=8", "hsdp", "write zero=3/8"),
        ("ddp=8", "ddp", "write data=8"),
        ("dp=8", "dp", "write data=8"),
        ("tp=4", "tp", "write tensor=4"),
        ("pp=4", "pp", "write pipeline=1f1b:4"),
        ("cp=4", "cp", "write sequence=ring:4"),
        ("sp=4", "sp", "write sequence=gather"),
        ("accumulate=4", "accumulate", "write microbatches=4"),
        ("grad_accum=4", "grad_accum", "write microbatches=4"),
        ("tensor=4 bf16", "bf16", "write precision=bfloat16"),
        ("fp16=true", "fp16", "write precision=float16"),
        ("FSDP", "FSDP", "write zero=3 data=N"),
        ("2d=4", "2d", "write tensor=2d:4"),
        ("tensor=2 gather", "gather", "write sequence=gather"),
        ("auto", "auto", 'write plan="auto", with the words that it may not change behind it'),
        ("tensor=2 auto", "auto", "auto precision=bfloat16"),
        ("tensor", "tensor", "tensor needs a value"),
        ("tensor = 4", "tensor", "no space around '='"),
        ("Data=8", "Data", "names are in small letters; write data=8"),
        ("=4", "=4", "no name before"),
        ("data=2 data=3", "data=3", "given twice"),
        ("data=2,tensor=4", "data=2,tensor=4", "put a space between"),
        ("tensor=2,zero=1", "tensor=2,zero=1", "put a space between"),
        ("data=two", "data=two", "not a whole number; write data=2"),
        ("data=0", "data=0", "at least 1, not 0"),
        ("microbatches=-1", "microbatches=-1", "at least 1, not -1"),
        ("zero=1 tensor=2d:8", "tensor=2d:8", "nearest that work: tensor=2d:4, tensor=2d:9"),
        ("tensor=2d", "tensor=2d", "write tensor=2d:4"),
        ("tensor=4:2d", "tensor=4:2d", "the mode comes first; write tensor=2d:4"),
        ("tensor=2dd:4", "tensor=2dd:4", "write tensor=2d:4"),
        ("tensor=tesseract:8/2", "tensor=tesseract:8/2", "write tensor=2.5d:8/2"),
        ("tensor=zzz:4", "tensor=zzz:4", "tensor knows 1d, 2d, 2.5d, 3d"),
        ("tensor=2.5d:8/", "tensor=2.5d:8/", "no [mode:]size[/part]"),
        ("sequence=ring:4/2", "sequence=ring:4/2", "no part after a slash"),
        ("sequence=ulysses:4", "sequence=ulysses:4", "write sequence=all_to_all:4"),
        ("zero=4", "zero=4", "stages are 0, 1, 2 and 3"),
        ("zero=a:3", "zero=a:3", "zero takes no mode"),
        ("precision=bf16", "precision=bf16", "write precision=bfloat16"),
        ("remat=full", "remat=full", "write remat=block"),
        ("remat=x", "remat=x", "remat knows none, dots, block"),
        ("unroll=true", "unroll=true", "unroll knows auto, layers, none"),
        ("scan_layers=true zero=1", "scan_layers", "write unroll=none (a loop over layers) or unroll=layers"),
        ("pipeline=2 microbatches=2 unroll=layers", "unroll=layers", "a pipeline has a loop of its own"),
        ("pipeline=2 microbatches=4 overlap=2", "overlap=2", "a pipeline decides itself which micro-batch runs when"),
        ("offload=optimizer microbatches=2 overlap=2", "overlap=2", "leave out overlap=2"),
        ("tensor=2 overlap=2", "overlap=2", "write microbatches=2 overlap=2"),
        ("microbatches=3 overlap=2", "overlap=2", "no multiple of that; write microbatches=4 overlap=2"),
        ("overlap=0", "overlap=0", "at least 1, not 0"),
        ("domino=2 tensor=4", "domino", "write microbatches=2 overlap=2"),
        ("unroll=layers budget=1GiB", "unroll=layers", "a step that walks over layers (budget=, offload=)"),
        ("offload=optimizer unroll=layers", "unroll=layers", "leave out unroll=layers"),
        ("zero=1 rules={x", "rules={x", "rules are JSON"),
        ("rules=4 zero=1", "rules=4", "no '{'"),
        ('rules={"a":null,"a":"x"}', 'rules={"a":null,"a":"x"}', "a dim has two rules"),
    ],
)
def test_refused(text: str, underlined: str, message: str) -> None:
    found, marked = refusal(text)
    assert message in found and marked == underlined


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_advice_on_names_works(name: str) -> None:
    """What the error says to write parses."""
    is_dtype = name.endswith("dtype") or name == "grad_reduce"
    advice = refusal(f"{name}={'float32' if is_dtype else 2}")[0].partition("; write ")[2]
    for option in re.sub(r" \(.*?\)", "", advice).split(" or "):
        if name != "auto":
            Plan.parse(option if option != "sequence=gather" else f"tensor=2 {option}")


@pytest.mark.parametrize("given, ours", FOREIGN_WORDS.items())
def test_advice_on_words_works(given: str, ours: str) -> None:
    owners = [name for name, words in WORDS.items() if ours in words]
    assert owners
    for owner in owners:
        sized = {"tensor": ":4", "sequence": ":4", "pipeline": ":4"}.get(owner, "")
        assert f"write {owner}={ours}{sized}" in refusal(f"{owner}={given}{sized}")[0]


def test_examples_work() -> None:
    assert set(EXAMPLES) == set(NAMES)
    for example in EXAMPLES.values():
        for option in example.split(" or "):
            assert str(Plan.parse(option)) == option


def test_lines_and_tabs_are_spaces() -> None:
    assert Plan.parse("\n  data=2\n\ttensor=4  ") == Plan(data=2, tensor=4)
    assert refusal("data=2\ttensr=4".replace("\t", " "))[1] == "tensr"
