"""Bytes as text, and the words of plans that walk over layers: what they take, and what does not combine."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cjax.plan import Auto, Plan
from cjax.plan.sizes import UNITS, num_bytes, offloaded, size_text

numbers = st.integers(0, 2**60)
numbers |= st.builds(lambda count, unit: count * unit, st.integers(0, 5000), st.sampled_from([*UNITS.values()]))


@given(numbers)
@example(2**30 * 5**9)  # 1953125GiB, or 2097152GB
def test_text_is_exact_and_shortest(number: int) -> None:
    text = size_text(number)
    assert num_bytes("host", text, least=0) == number
    assert all(len(text) <= len(f"{number // unit}{name}") for name, unit in UNITS.items() if number % unit == 0)


@pytest.mark.parametrize(
    ("text", "instead"),
    [
        ("16", "budget=16GiB"),
        ("16G", "budget=16GiB"),
        ("16M", "budget=16MiB"),
        ("16gb", "budget=16GB"),
        ("1.5tib", "budget=1.5TiB"),
        ("16KB", "budget=16kB"),
        ("7Mb", "budget=7MB"),
        ("GiB", "budget=16GiB"),
        ("-1GiB", "budget=16GiB"),
        ("16parsecs", "budget=16GiB"),
        ("0.5B", "budget=1B"),
    ],
)
def test_a_wrong_size_names_one_that_works(text: str, instead: str) -> None:
    with pytest.raises(ValueError) as raised:
        Plan.parse(f"zero=1 budget={text}")
    message, line, under = str(raised.value).split("\n")
    assert message.endswith(instead) or f"{instead}," in message
    assert line[under.index("^") : under.rindex("^") + 1] == f"budget={text}"
    Plan.parse(instead)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("budget=1024MiB", "budget=1GiB"),
        ("budget=1.5TiB", "budget=1536GiB"),
        ("disk=2000GB host=0GiB budget=80GB", "budget=80GB host=0B disk=2TB"),
        ("offload=optimizer+params", "offload=params+optimizer"),
        ("offload=activations budget=16GiB zero=3", "zero=3 budget=16GiB offload=activations"),
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    plan = Plan.parse(text)
    assert plan.walks and str(plan) == canonical and Plan.parse(canonical) == plan


def test_text_and_numbers_are_the_same() -> None:
    plan = Plan(budget=2**34, host="1TiB", offload=["optimizer"])
    assert plan == Plan.parse("budget=16GiB host=1TiB offload=optimizer")
    assert Plan(budget=2**34).budget == 2**34 and Plan(offload="gradients").offload == ("gradients",)
    assert not Plan(zero=3).walks
    # Who has the model says what the least is that works.
    assert Plan.parse("budget=0") == Plan.parse("budget=0GiB") == Plan(budget=0) and Plan(budget=0).walks
    assert str(Plan.parse("budget=0 host=0")) == "budget=0B host=0B"


@pytest.mark.parametrize(
    ("text", "underlined", "message"),
    [
        ("host=1TiB zero=3", "host=1TiB", "offload=optimizer host=1TiB"),
        ("disk=1TiB", "disk=1TiB", "budget=16GiB host=64GiB disk=1TiB"),
        ("budget=1GiB disk=1TiB", "disk=1TiB", "host=64GiB disk=1TiB, or host=0B disk=1TiB"),
        ("pipeline=4 microbatches=8 budget=1GiB", "pipeline=4", "zero=3"),
        ("offload=params tensor=2d:4", "tensor=2d:4", "write tensor=4 (1d)"),
        ("tensor=3d:8 budget=1GiB", "tensor=3d:8", "write tensor=8 (1d)"),
        ("budget=1GiB reduce=float32", "reduce=float32", "leave out reduce=float32"),
        ("host=0B disk=0 budget=1GiB", "disk=0", "at least 1"),
        ("offload=opt_state", "offload=opt_state", "write offload=optimizer"),
        ("offload=params+grads", "offload=params+grads", "write offload=params+gradients"),
        ("offload=params+params", "offload=params+params", "write it once"),
        ("offload=none", "offload=none", "params, optimizer, gradients, activations"),
        ("budget=16 GiB", "GiB", "without a space"),
        ("cpu_offload=1", "cpu_offload", "write offload=optimizer"),
    ],
)
def test_refused(text: str, underlined: str, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        Plan.parse(text)
    said, line, under = str(raised.value).split("\n")
    assert message in said and line[under.index("^") : under.rindex("^") + 1] == underlined


@pytest.mark.parametrize("value", [3, {"params"}, ["weights"], "params+", ("params", "params")])
def test_wrong_classes(value: object) -> None:
    with pytest.raises(ValueError, match="offload"):
        offloaded(value)


@pytest.mark.parametrize("word", ["budget=1GiB", "offload=params", "host=1TiB"])
def test_no_search_is_over_walks(word: str) -> None:
    with pytest.raises(ValueError, match=f"does not go behind auto; write out the plan(.|\n)*{word}"):
        Auto.parse(f"auto {word}")
