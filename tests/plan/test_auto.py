"""`auto`, and the words behind it that a search may not change."""

import pytest

from cjax.plan import Auto, Pipeline, Tensor, is_auto


@pytest.mark.parametrize(
    ("text", "fixed"),
    [
        ("auto", {}),
        ("  auto\n", {}),
        ("auto precision=bfloat16", {"precision": "bfloat16"}),
        ("auto tensor=2 pipeline=interleaved:4/2", {"tensor": Tensor(2), "pipeline": Pipeline(4, "interleaved", 2)}),
        ("auto data=-1 microbatches=1", {"microbatches": 1}),
        ("auto unroll=none", {"unroll": "none"}),
        ('auto rules={"vocab":null} loss=microbatch', {"rules": {"vocab": None}, "loss": "microbatch"}),
    ],
)
def test_words_behind_it_are_fixed(text: str, fixed: dict[str, object]) -> None:
    assert is_auto(text) and dict(Auto.parse(text).fixed) == fixed


@pytest.mark.parametrize("text", ["", "zero=1", "tensor=2 auto", "auto=1", "autos"])
def test_what_asks_for_no_search(text: str) -> None:
    assert not is_auto(text)


@pytest.mark.parametrize(
    ("text", "marked", "said"),
    [
        ("auto tensr=2", "tensr", "did you mean tensor=2"),
        ("  auto zero=4", "zero=4", "stages are 0, 1, 2 and 3"),
        ("auto zero=1 zero=2", "zero=2", "given twice"),
        ("auto tp=2", "tp", "write tensor=2"),
    ],
)
def test_a_wrong_word_is_underlined_where_it_stands(text: str, marked: str, said: str) -> None:
    with pytest.raises(ValueError) as raised:
        Auto.parse(text)
    message, line, under = str(raised.value).split("\n")
    start = under.index("^")
    assert said in message and line[start : start + under.count("^")] == marked


def test_words_that_exclude_each_other_are_refused_where_they_stand() -> None:
    for text, named, said in (
        ("auto pipeline=2 unroll=layers", "unroll=layers", "leave out unroll=layers"),
        ("auto unroll=layers pipeline=2", "pipeline=2", "leave out unroll=layers"),
        ("auto pipeline=2 overlap=2", "overlap=2", "leave out overlap=2"),
        ("auto overlap=4 microbatches=6", "microbatches=6", "write microbatches=8 overlap=4"),
    ):
        with pytest.raises(ValueError, match=said) as caught:
            Auto.parse(text)
        assert "^" * len(named) in str(caught.value)
    assert Auto.parse("auto overlap=2 zero=1").fixed["overlap"] == 2
    assert Auto.parse("auto unroll=layers tensor=2").fixed["unroll"] == "layers"
