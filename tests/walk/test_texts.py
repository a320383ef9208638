"""Greedy texts of programs that walk are those of a model in device memory."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from contract import no_compilation
from starts import begin
from zoo_cjax import ROWS

import cjax
from cjax.models import T5
from cjax.models.generation import next_logits
from cjax.planner.choice.homes import TooLittle
from cjax.program import texts as texts_room
from cjax.program.passing import room_of
from cjax.program.texts import Texts
from cjax.tree import leaf_names

PROMPT = np.random.default_rng(0).integers(0, 101, (4, 5)).astype(np.int32)


@functools.cache
def program(name: str, plan: str) -> tuple[cjax.Program, Any]:
    kind, config, loss, batch, _ = ROWS[name]
    if kind is T5:
        config = dataclasses.replace(config, tied=False)  # tied and untrained, it says the same whatever it reads
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch())
    made = cjax.parallelize(
        lambda rngs: kind(config, rngs=rngs),
        loss,
        None,
        shapes,
        plan,
        devices=jax.devices()[: 1 if plan == "data=1" else 2],
    )
    return made, begin(made)


def text(name: str, plan: str, num: int, **options: Any) -> np.ndarray:
    made, state = program(name, plan)
    return np.asarray(cjax.generate(made, PROMPT, num, temperature=0, state=state, **options))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param("cjax_gpt", "data=2 offload=params+activations", marks=pytest.mark.full),
        pytest.param("cjax_llama", "tensor=2 offload=params+activations", marks=pytest.mark.full),
        pytest.param("cjax_t5", "data=2 zero=3 offload=params", marks=pytest.mark.full),
        ("cjax_t5", "tensor=2 offload=params"),  # of its two kinds of pass one does not read what the other keeps
    ],
)
def test_greedy_texts_are_those_in_device_memory(name: str, plan: str) -> None:
    # Of a GPT and a Llama the context is 12: the window slides at the end.
    wanted = text(name, "data=1", 9)
    np.testing.assert_array_equal(text(name, plan, 9), wanted)
    with no_compilation():
        text(name, plan, 9)
    assert len({tuple(row) for row in wanted}) > 1, "rows differ, so that mixing them up would show"


@pytest.mark.full
def test_texts_end_and_padding_counts_as_in_device_memory() -> None:
    wanted, plan = text("cjax_gpt", "data=1", 4), "data=2 offload=params+activations"
    stop = [int(wanted[0, 6]), int(wanted[1, 5])]
    np.testing.assert_array_equal(text("cjax_gpt", plan, 4, stop=stop), text("cjax_gpt", "data=1", 4, stop=stop))
    assert text("cjax_gpt", plan, 0).shape == (4, 5)
    present = np.arange(5) < np.array([[5], [3], [1], [4]])
    found = text("cjax_t5", "data=2 zero=3 offload=params", 3, present=present)
    np.testing.assert_array_equal(found, text("cjax_t5", "data=1", 3, present=present))


@pytest.mark.full
def test_samples_are_those_in_device_memory() -> None:
    found = []
    for plan in ("data=1", "data=2 offload=params+activations"):
        made, state = program("cjax_gpt", plan)
        found.append(cjax.generate(made, PROMPT, 4, jax.random.key(3), state=state, top_k=5, top_p=0.9))
    np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(found[1]))
    with pytest.raises(ValueError, match="longer than this model's context"):
        cjax.generate(made, np.zeros((2, 13), np.int32), 2, temperature=0, state=state)


def needs_of(name: str, rows: int, lengths: tuple[int, ...] = (5,)) -> Any:
    """What passes over so many rows need under a budget, and a way to ask for homes with another."""
    made, state = program(name, "data=2 offload=params+activations")
    plan = dataclasses.replace(made.plan, budget=2**30, offload=("params",))
    texts = Texts(dataclasses.replace(made._composed, plan=plan), next_logits)
    struct = functools.partial(jax.ShapeDtypeStruct, dtype="int32")
    memory = jax.eval_shape(lambda: [(jax.numpy.zeros([rows, 12, 8, 5]),) * 2] * 4)
    found = texts.needs([{"new": struct((rows, new)), "length": struct(())} for new in lengths], memory)

    def homes(budget: int | None, host: int | None = None, offload: Any = ("params",)) -> Any:
        plan = dataclasses.replace(made.plan, budget=budget, host=host, offload=offload)
        composed = dataclasses.replace(made._composed, plan=plan)
        return Texts(composed, next_logits).homes(state._held.homes, found)

    return found, room_of(texts._composed, state._held.homes), homes


def test_texts_are_in_the_precision_of_the_weights_whatever_was_trained_in() -> None:
    made, _ = program("cjax_gpt", "data=2 offload=params precision=bfloat16")
    assert Texts(made._composed, next_logits)._composed.plan == dataclasses.replace(made.plan, precision="float32")


def test_programs_of_the_lengths_that_were_asked_for_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = program("cjax_gpt", "data=2 offload=params+activations")
    texts = Texts(made._composed, next_logits)
    monkeypatch.setattr(texts_room, "MOST_MADE", 2)
    monkeypatch.setattr(texts, "_make", lambda given, memory: object())

    def walk(length: int) -> Any:
        return texts._walk({"new": jax.ShapeDtypeStruct((4, length), "int32")}, ())

    first, second = walk(1), walk(2)
    assert walk(1) is first and walk(3) is not first
    assert walk(1) is first and walk(2) is not second, "2 was asked for longest ago"


def test_memory_is_on_the_host_where_the_plan_asks_for_that() -> None:
    _, _, homes = needs_of("cjax_gpt", 4)
    for budget in (None, 2**30):
        assert homes(budget) == ("device",) * 4
        assert homes(budget, offload=("params", "activations")) == ("host",) * 4


def test_memory_is_on_the_host_where_a_budget_has_no_room() -> None:
    needs, room, homes = needs_of("cjax_gpt", 4)
    row = 4 * 2 * 2 * 12 * 40  # bytes of a device: half of the rows
    assert needs.memory.row.device == row and needs.peak > 0
    beside = 2**30 - room + needs.peak  # what a device holds besides memory
    for kept in (4, 1, 0):
        found = homes(beside + row * (4 if kept == 4 else kept + 2))
        assert found == (*("device",) * kept, *("host",) * (4 - kept))
    with pytest.raises(
        TooLittle, match=r"needs .* beside weights and memory.*give fewer rows a pass, or write budget="
    ):
        homes(beside + 2 * row - 1)
    with pytest.raises(TooLittle, match=r"keys and values of 4 layers need .* of host memory"):
        homes(beside + 2 * row, host=8 * row)


@pytest.mark.full
def test_passes_of_more_rows_need_more() -> None:
    (few, *_), (many, *_) = needs_of("cjax_gpt", 4), needs_of("cjax_gpt", 64)
    assert needs_of("cjax_gpt", 4, (5, 12))[0].peak > few.peak, "the fullest pass counts"
    assert many.peak > 8 * few.peak / 2 and many.memory.row.device == 16 * few.memory.row.device


def test_a_t5s_decoder_reads_the_encoders_text_in_rows_of_its_layers() -> None:
    made, _ = program("cjax_t5", "data=2 zero=3 offload=params")
    walker = made._composed.walker
    assert walker is not None
    names = leaf_names(made._composed.shelves.params.leaf_shapes())
    inside = {
        leaf for k in (0, 1) for at in walker.slots("params", k) for leaf in walker.storage.params.slots[at].leaves
    }
    outside = [name for leaf, name in enumerate(names) if leaf not in inside]
    assert len(outside) == 6 and not any("cross" in name for name in outside)
