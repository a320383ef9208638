"""`cjax.plans`: what is listed is what the search found, what is compiled is the compiled program's."""

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import jax
import optax
import pytest

import cjax
from cjax.planner.choice.scored import Scored
from cjax.planner.choice.search import Found
from cjax.program import plans as plans_module
from cjax.report import MemoryUse

from .conftest import Net, make

ROWS = 64
BATCH = {"x": jax.ShapeDtypeStruct((ROWS, 8), "float32"), "y": jax.ShapeDtypeStruct((ROWS, 1), "float32")}


def loss(model: Any, batch: Any) -> Any:
    return ((model(batch["x"]) - batch["y"]) ** 2).mean()


CALL = (Net(64), loss, optax.adam(1e-3), BATCH)


@pytest.fixture(scope="module")
def on_paper() -> Any:
    return cjax.plans(CALL, "h100:16", verify=0, top=5)


def test_plans_for_cards_that_are_not_here_have_times_with_intervals(on_paper: Any) -> None:
    assert len(on_paper.plans) >= 5 and on_paper.on == "16 x NVIDIA H100 80GB HBM3"
    times = [each.seconds for each in on_paper.plans[:5]]
    assert times == sorted(times) and all(each.num_devices == 16 for each in on_paper.plans)
    for each in on_paper.plans:
        low, high = each.interval
        assert low < each.seconds < high and each.bytes <= each.limit and not each.is_exact
        assert each.tokens_per_second == pytest.approx(ROWS / each.seconds)
        assert each.dollars and each.kwh and each.mfu is not None
    assert on_paper.best.marks[0] == "fastest" and any("leanest" in each.marks for each in on_paper.plans)
    text = str(on_paper)
    assert "constants " in text and "$ /" in text and "fastest" in text
    assert on_paper._repr_html_().count("<svg") == 1


def test_nothing_is_traced_twice_for_the_same_answer() -> None:
    assert str(cjax.plans(CALL, "h100:16", verify=0, top=5)) == str(cjax.plans(CALL, "h100:16", verify=0, top=5))


def test_a_row_is_explained(on_paper: Any) -> None:
    found = on_paper.explain()
    assert found.plan == on_paper.best.plan and any(row[1].startswith("zero=") for row in found.rows)
    assert on_paper.explain(2).plan == on_paper.plans[1].plan
    for wrong in (0, 99, True):
        with pytest.raises(ValueError, match=f"there are rows 1 to {len(on_paper.plans)}"):
            on_paper.explain(wrong)


def test_words_that_are_fixed_and_the_number_of_devices_that_is_not() -> None:
    found = cjax.plans(CALL, "h100", "cost", top=4, verify=0, plan="auto precision=bfloat16 microbatches=1", price=2.0)
    assert all("precision=bfloat16" in each.plan and "microbatches" not in each.plan for each in found.plans)
    assert len({each.num_devices for each in found.plans}) > 1 and found.on.startswith("1 to ")
    spent = [each.dollars for each in found.plans[:4]]
    assert spent == sorted(spent)
    first = found.best
    assert first.dollars == pytest.approx(first.num_devices * 2.0 / 3600 * first.seconds / ROWS * 1e9)
    marks = [mark for each in found.plans for mark in each.marks]
    assert sorted(marks) == ["cheapest", "fastest", "fewest devices", "leanest"]


def test_compiled_plans_have_the_programs_own_memory() -> None:
    program = make("data=8", model=Net(64))
    found = cjax.plans(program, top=3, verify=2)
    assert found.on == "8 x cpu"
    assert [each.is_exact for each in found.plans[:3]] == [True, True, False]
    for each in found.plans[:2]:
        assert each.bytes == program.replan(each.plan).report().memory.total
    assert not found.best.parts and "how" not in found.best.plan
    assert any("nobody has measured these devices" in note for note in found.notes)


def test_a_plan_that_compiled_is_over_is_left_out_and_the_next_one_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    program = make("data=8", model=Net(64))
    first, second = (each.plan for each in cjax.plans(program, top=2, verify=0).plans[:2])
    honest = plans_module._compiled

    def over(given: Any, scored: Scored, devices: Any) -> Any:
        outcome = honest(given, scored, devices)
        return "compiled it needs too much" if str(scored.plan) == first else outcome

    monkeypatch.setattr(plans_module, "_compiled", over)
    found = cjax.plans(program, top=1, verify=1)
    assert found.best.plan == second and found.best.is_exact
    assert f"{first} is left out: compiled it needs too much" in found.notes
    assert first not in [each.plan for each in found.plans] + [text for _, _, text in found.front]


def test_a_plan_that_needs_more_than_there_is_says_so_and_another_has_its_marks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = make("data=8", model=Net(64))
    memory = MemoryUse(params=3 * 2**30, limit=2**30)
    monkeypatch.setattr(
        plans_module, "Program", lambda composed: SimpleNamespace(report=lambda: SimpleNamespace(memory=memory))
    )
    a, b, c = (Scored(cjax.Plan(data=n), n, {}, 1, {"matmul": float(n)}, 1, 2, 0, 1, {}) for n in (2, 4, 8))
    said = plans_module._compiled(program._composed.given, dataclasses.replace(a, plan=program.plan), jax.devices())
    assert said == f"compiled it needs {memory}"
    found = Found(best=[a, b], front=[a, c], fastest=a, leanest=b, cheapest=a, fewest=a)
    plans_module._leave_out(found, a)
    assert (found.best, found.front) == ([b], [c])
    assert (found.fastest, found.leanest, found.cheapest, found.fewest) == (b, b, b, b)


def test_numbers_of_cards_are_parts_of_a_host_and_hosts() -> None:
    numbers = plans_module._numbers(cjax.Cluster.parse("h100/node=6"))
    assert numbers[:6] == (1, 2, 4, 6, 12, 18) and numbers[-1] <= plans_module.MOST_DEVICES
    assert all(n < 6 or n % 6 == 0 for n in numbers)


def test_a_plan_is_left_out_whatever_its_compilation_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's own errors are no ValueErrors, and some say nothing: the others are listed all the same."""
    program = make("data=8", model=Net(64))
    first, second, third = (each.plan for each in cjax.plans(program, top=3, verify=0).plans[:3])
    errors = {
        first: jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory\nallocating 3 GiB"),
        second: NotImplementedError(),
    }
    honest = plans_module.compose

    def compose(given: Any, decision: Any, devices: Any) -> Any:
        if str(decision.plan) in errors:
            raise errors[str(decision.plan)]
        return honest(given, decision, devices)

    monkeypatch.setattr(plans_module, "compose", compose)
    found = cjax.plans(program, top=1, verify=1)
    assert found.best.plan == third and found.best.is_exact
    assert f"{first} is left out: JaxRuntimeError: RESOURCE_EXHAUSTED: out of memory" in found.notes
    assert f"{second} is left out: NotImplementedError" in found.notes

    monkeypatch.setattr(plans_module, "SPARE", 1)
    errors[third] = NotImplementedError()
    with pytest.raises(ValueError, match=f"None of the 2 best plans can be had: {first} is left out: JaxRuntimeError"):
        cjax.plans(program, top=1, verify=1)

    def stopped(given: Any, decision: Any, devices: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(plans_module, "compose", stopped)
    with pytest.raises(KeyboardInterrupt):
        cjax.plans(program, top=1, verify=1)


def test_transfers_are_scaled_to_what_the_program_sends() -> None:
    seconds = {"matmul": 1.0, "data": 0.2, "gather": 0.1, "tensor": 0.3}
    scored = Scored(cjax.Plan(data=2), 8, {}, 1, seconds, 1, 2, 0, 1, {"data": 50.0, "zero": 50.0, "row": 10.0})
    report = type("Moved", (), {"bytes_moved_by_axis": {"data+zero": 50, "row+col": 20, "pipe": 7}})()
    found = plans_module._with_transfers(scored, report)
    assert found == {"matmul": 1.0, "data": 0.1, "gather": 0.05, "tensor": 0.6}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (dict(objective="speed"), "objective is one of time, memory, cost, energy, not 'speed'"),
        (dict(top=0), "top=0: it is a whole number, at least 1"),
        (dict(verify=-1), "verify=-1"),
        (dict(price=-2.5), "price=-2.5: it is dollars for an hour"),
        (dict(plan="data=8"), 'write "auto"'),
        (dict(plan="auto tensr=2"), "did you mean tensor=2"),
        (dict(devices="h1000:8"), "h1000"),
        (dict(devices="h100:16/node=3"), "16 cards are more than one host"),
        (dict(devices="h100:8", plan="auto data=3"), "no plan shares 64 rows over 8 devices"),
    ],
)
def test_what_can_not_be_asked_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        cjax.plans(CALL, **({"devices": "h100:8", "verify": 0} | arguments))


def test_what_is_no_program_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a Program, or in one tuple .*\(\(model, loss, .*, not a Net$"):
        cjax.plans(Net(64), "h100:8")


def test_where_nothing_fits_the_leanest_is_told_and_how_many_devices_it_takes() -> None:
    wide = (Net(2**18), loss, optax.adam(1e-3), BATCH)  # 3 million parameters, 50 MB with their state
    with pytest.raises(ValueError) as raised:
        cjax.plans(wide, "h100:1/memory=1.51GiB", verify=0)
    text = str(raised.value)
    assert "no plan fits memory; on 1 devices the leanest, " in text and " MiB" in text
    assert re.search(r"From (\d+) devices on one does", text)
