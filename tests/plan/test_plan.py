import copy
import math
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cjax.plan import Pipeline, Plan, Sequence, Tensor, Zero

sizes = st.integers(1, 6)
tensors = st.one_of(
    st.builds(Tensor, st.integers(1, 64)),
    st.builds(lambda q: Tensor(q * q, "2d"), sizes),
    st.builds(lambda d, q: Tensor(d * q * q, "2.5d", d), sizes, sizes),
    st.builds(lambda side: Tensor(side**3, "3d"), sizes),
)
pipelines = st.one_of(
    st.builds(Pipeline, sizes, st.sampled_from(["1f1b", "gpipe", "zero_bubble"])),
    st.builds(Pipeline, st.integers(2, 8), st.just("interleaved"), st.integers(2, 5)),
)
zeros = st.one_of(st.integers(0, 3).map(Zero), st.builds(Zero, st.integers(1, 3), st.none() | st.integers(2, 16)))
rules = st.dictionaries(
    st.text(min_size=1), st.none() | st.text() | st.lists(st.text(), min_size=1).map(tuple), max_size=3
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    tensor = draw(tensors)
    sequences = [Sequence(draw(sizes), draw(st.sampled_from(["ring", "all_to_all"])))]
    if tensor.mode == "1d" and tensor.size > 1:
        sequences.append(Sequence(mode="gather"))
    pipeline, zero = draw(pipelines), draw(zeros)
    can_share = tensor.mode == "1d" and zero.group is None
    overlap = draw(st.integers(1, 4)) if pipeline.size == 1 else 1
    return Plan(
        data=draw(st.just(-1) | st.integers(1, 64)),
        tensor=tensor,
        sequence=draw(st.sampled_from(sequences)),
        pipeline=pipeline,
        expert=draw(sizes) if can_share else 1,
        microbatches=overlap * draw(st.integers(1, 16)),
        overlap=overlap,
        loss=draw(st.sampled_from(["batch", "microbatch"])),
        zero=zero,
        precision=draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        remat=draw(st.sampled_from(["none", "dots", "block"])),
        unroll=draw(st.sampled_from(["auto", "none", "layers"][: 3 if pipeline.size == 1 else 2])),
        rules=draw(rules),
    )


@given(plans())
def test_text_and_object_are_the_same(plan: Plan) -> None:
    text = str(plan)
    assert Plan.parse(text) == plan
    assert str(Plan.parse(text)) == text
    assert pickle.loads(pickle.dumps(plan)) == copy.deepcopy(plan) == eval(repr(plan)) == plan
    assert hash(Plan.parse(text)) == hash(plan)


@given(plans(), plans())
def test_different_plans_print_differently(one: Plan, other: Plan) -> None:
    assert (one == other) == (str(one) == str(other))


@given(plans(), st.integers(1, 512))
def test_resolved_plans_multiply_up(plan: Plan, num_devices: int) -> None:
    try:
        resolved = plan.resolve(num_devices)
    except ValueError:
        product = (1 if plan.data == -1 else plan.data) * plan.model_size
        data, rest = divmod(num_devices, plan.model_size)
        group = plan.zero.group or 1
        assert rest or data % group or data % plan.expert or (plan.data != -1 and product != num_devices), (
            "refused, yet it fits"
        )
    else:
        assert resolved.num_devices == math.prod(resolved.axis_sizes().values()) == num_devices
        assert replace(resolved, data=plan.data) == plan
        assert resolved.resolve(num_devices) == resolved


@given(plans(), st.integers(1, 64))
def test_what_a_refusal_offers_works(plan: Plan, num_devices: int) -> None:
    try:
        plan.resolve(num_devices)
    except ValueError as error:
        lines = [line.strip().partition("  ")[0] for line in str(error).splitlines()[1:]]
        for line in lines:
            if line.startswith('plan="') and line != 'plan="auto"':
                assert Plan.parse(line[len('plan="') : -1]).resolve(num_devices).num_devices == num_devices
            elif line.startswith("cjax.simulate(") and plan.zero.group is None:
                enough = int(line[len("cjax.simulate(") : -1])
                assert plan.resolve(enough).num_devices == enough


@pytest.mark.parametrize(
    "text, num_devices, message",
    [
        ("data=4 tensor=4", 8, r"needs 16 devices \(data 4 x tensor 4\), and 8 are here"),
        ("tensor=3", 8, r"needs a multiple of 3 devices \(tensor 3\), and 8 are here"),
        ("tensor=3", 8, r'plan="tensor=2" (.|\n)*plan="tensor=4" '),
        ("tensor=2d:9", 16, r'plan="tensor=2d:4" '),
        ("data=2", 1, r'and 1 is here(.|\n)*cjax.simulate\(2\)(.|\n)*devices="h100:2"(.|\n)*plan="auto"'),
        ("data=2", 8, r"jax.devices\(\)\[:2\]"),
        ("zero=3/3", 8, "groups of 3, which don't divide data=8; write zero=3/2 or zero=3/4 or zero=3"),
        ("data=1 zero=1/8", 1, "groups of 8, which don't divide data=1; write zero=1"),
        ("expert=3", 8, r'needs a multiple of 3 devices \(expert 3\), and 8 are here(.|\n)*plan="expert=2" '),
        ("expert=4 tensor=2", 12, r"needs a multiple of 8 devices \(tensor 2 x expert 4\), and 12 are here"),
        ("data=8 expert=3", 8, "expert=3 .* does not divide data=8; write expert=2 or expert=4 or expert=8"),
        ("data=1 expert=2", 1, "expert=2 .* does not divide data=1; leave it out"),
    ],
)
def test_refusals_of_device_numbers(text: str, num_devices: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.parse(text).resolve(num_devices)


def test_shorthands_and_normal_forms() -> None:
    assert Plan(tensor=4, sequence=2, pipeline=2, zero=1) == Plan(
        tensor=Tensor(4), sequence=Sequence(2), pipeline=Pipeline(2), zero=Zero(1)
    )
    one = Plan(tensor=Tensor(1, "2d"), sequence=Sequence(1, "all_to_all"), pipeline=Pipeline(1, "gpipe"))
    assert one == Plan() == Plan.parse("") and str(one) == "data=-1"
    assert Plan(tensor=4).tensor_size == 4 and Plan(zero=Zero(2, 4)).zero_stage == 2
    assert str(Plan.parse("remat=block   zero=1 data=2 tensor=1d:4")) == "data=2 tensor=4 zero=1 remat=block"
    assert str(Plan.parse("unroll=layers remat=block")) == "remat=block unroll=layers"
    assert Plan(unroll="auto") == Plan() != Plan(unroll="none")


@pytest.mark.parametrize(
    "text, num_devices, axes",
    [
        ("data=-1", 8, {"data": 8, "tensor": 1}),
        ("tensor=2 zero=3", 8, {"data": 4, "tensor": 2}),
        ("tensor=2 zero=3/2", 8, {"data": 2, "zero": 2, "tensor": 2}),
        ("zero=3/8", 8, {"data": 8, "tensor": 1}),
        ("pipeline=gpipe:2 sequence=ring:2 tensor=2.5d:8/2", 32,
         {"pipe": 2, "data": 1, "sequence": 2, "depth": 2, "row": 2, "col": 2}),
        ("expert=4 tensor=2 zero=1", 16, {"data": 2, "expert": 4, "tensor": 2}),
        ("data=8 expert=8", 8, {"data": 1, "expert": 8, "tensor": 1}),
        ("tensor=3d:8 zero=1/2", 32, {"data": 2, "zero": 2, "i": 2, "j": 2, "k": 2}),
    ],
)  # fmt: skip
def test_axes(text: str, num_devices: int, axes: dict[str, int]) -> None:
    found = Plan.parse(text).resolve(num_devices).axis_sizes()
    assert list(found.items()) == list(axes.items())  # outermost first: the order counts


@pytest.mark.parametrize(
    ("text", "together"),
    [("", False), ("tensor=4", False), ("zero=3", False), ("sequence=ring:2", True), ("sequence=all_to_all:2", True),
     ("tensor=4 sequence=gather", True), ("tensor=2d:4", True), ("tensor=2.5d:8/2", True), ("tensor=3d:8", True),
     ("sequence=ring:1", False)],
)  # fmt: skip
def test_stages_whose_insides_have_permutes_go_together(text: str, together: bool) -> None:
    assert Plan.parse(f"data=2 pipeline=2 microbatches=4 {text}").in_lockstep == together


def test_zero_group_is_all_of_data_unless_given() -> None:
    assert Plan.parse("zero=3").resolve(8).zero_group == 8
    assert Plan.parse("zero=3/2 tensor=2").resolve(8).zero_group == 2


@pytest.mark.parametrize("ask", [Plan.axis_sizes, lambda plan: plan.num_devices, lambda plan: plan.zero_group])
def test_open_plans_have_no_sizes(ask) -> None:
    with pytest.raises(ValueError, match=r"plan.resolve\(num_devices\) fills it in"):
        ask(Plan(tensor=2))


def test_gather_needs_a_tensor_axis() -> None:
    for tensor in (1, Tensor(4, "2d")):
        with pytest.raises(ValueError, match="lives on the axis of tensor=N"):
            Plan(tensor=tensor, sequence=Sequence(mode="gather"))


def test_two_rules_for_one_dim_are_refused() -> None:
    """JSON keeps the last of them, and says nothing."""
    with pytest.raises(ValueError, match="two rules among vocab, embed, vocab"):
        Plan.parse('rules={"vocab":null,"embed":"tensor","vocab":"tensor"}')


@pytest.mark.parametrize("rules", [{"vocab": 3}, {"vocab": ()}, {"vocab": ["x", 1]}, {3: "x"}, {"": "x"}])
def test_bad_rules(rules) -> None:
    with pytest.raises(ValueError, match="rule"):
        Plan(rules=rules)


def test_plans_are_frozen() -> None:
    given = {"vocab": None}
    plan = Plan(rules=given)
    given["vocab"] = "tensor"
    assert plan.rules == {"vocab": None}
    with pytest.raises(TypeError):
        plan.rules["vocab"] = "tensor"  # pyright: ignore
    with pytest.raises(AttributeError):
        plan.data = 3  # pyright: ignore
