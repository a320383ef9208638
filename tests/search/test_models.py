"""Random models under random plans: those that failed once, and some in which every block and kind of plan comes.

More of them: `make search`. Pairs run in processes of their own, so that one that hangs or aborts fails like any other.
"""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from search import models, plans, reach
from search.blocks import BLOCKS
from search.processes import Process
from search.run import KEPT, alike, next_seed, shrink, signature

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
ROWS = json.loads(KEPT.read_text())


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    process = Process()
    yield process
    process.close()


def assert_equal_or_refused(process: Process, spec: Any, chosen: Sequence[str], own_init: int | None = None) -> None:
    found = process.outcomes(spec, chosen, own_init)
    failed = [pair for pair in found if pair["kind"] not in ("equal", "refused")]
    assert not failed, f"{json.dumps(spec)}\n" + "\n".join(f"{f['plan']}: {f['kind']}: {f['what']}" for f in failed)


@pytest.mark.full(
    "1 entropy of one position under microbatches tensor=2d",
    "13 noise under microbatches tensor=1d",
    "18 batch_norm under microbatches pipeline=1f1b",
    "19 applied_again+batch_norm+take_along under microbatches pipeline=gpipe",
    "21 scatter under microbatches",
)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["id"])
def test_what_failed_once(row: dict[str, Any], process: Process) -> None:
    assert_equal_or_refused(process, row["spec"], [row["plan"]])


COVER = (
    ("tensor=4", "zero=3 microbatches=2"),
    ("tensor=2d:4", "tensor=2 zero=3"),
    ("zero=2", "tensor=2.5d:8/2"),
    ("tensor=2 zero=1 remat=block", "data=8"),
    ("tensor=8", "tensor=3d:8"),
)


LATER = ("branches",)  # blocks that came when the others' models had been chosen: not every mixture can be trained


def covering() -> list[tuple[Any, tuple[str, ...]]]:
    """Every block once, a few to a model, with plans in turns."""
    rng, names = np.random.default_rng(0), sorted(BLOCKS.keys() - set(LATER))
    order = [*(names[i] for i in rng.permutation(len(names))), *LATER]
    found, size = [], 4 if ALL else 6
    for number, start in enumerate(range(0, len(order), size)):
        parts = [{"op": op, "config": BLOCKS[op].sample(rng), "wrap": "residual"} for op in order[start : start + size]]
        sizes = {"length": (4, 5, 6)[number % 3], "width": (8, 6, 7)[number // 3 % 3], "features": 3, "classes": 3}
        spec = {"flavour": ("linen", "nnx")[number % 2], "rows": models.ROWS, **sizes, "parts": parts, "wrt": None}
        first = number // len(COVER) % 2  # of two plans, by default one
        chosen = COVER[number % len(COVER)] if ALL else COVER[number % len(COVER)][first : first + 1]
        found.append((spec | {"loss": list(models.LOSSES)[number % len(models.LOSSES)]}, chosen))
    return found


@pytest.mark.full(
    "experts_soft-experts_capacity-linalg-bilinear-attention-fourier-",
    "pool-tied-group_norm-flax_recurrent-rotary_attention-conv1d-",
)
@pytest.mark.parametrize(("spec", "chosen"), covering(), ids=lambda value: "-".join(
    part["op"] for part in value["parts"]) if isinstance(value, dict) else "")  # fmt: skip
def test_every_block(spec: Any, chosen: tuple[str, ...], process: Process) -> None:
    # Some with the author's own first numbers, compared with the program's; each init is a program of its own.
    own = ALL or spec["length"] == 4
    assert_equal_or_refused(process, spec, chosen, 0 if own else None)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning")  # Flax's statistics
def test_primitives_are_reached() -> None:
    """All that JAX differentiates, but for what reach.py names with a reason."""
    with jax.enable_x64(True):
        left = reach.unreached()
    assert not left, f"no random model has {sorted(left)}: add a block, or a reason to reach.py"


# -- the search itself ------------------------------------------------------------------------------------------------
def test_a_seed_is_a_model() -> None:
    drawn = [models.draw(seed) for seed in range(200)]
    assert drawn == [models.draw(seed) for seed in range(200)]
    assert json.loads(json.dumps(drawn)) == json.loads(json.dumps([models.draw(seed) for seed in range(200)]))
    used = {part["op"] for spec in drawn for part in models.parts_of(spec)}
    assert used == set(BLOCKS)


def test_smaller_specs_are_smaller() -> None:
    spec = models.draw(1)
    for small in models.smaller(spec):
        assert len(list(models.parts_of(small))) <= len(list(models.parts_of(spec))) and small != spec


def test_plans_parse_and_share_rows() -> None:
    chosen = plans.draws(0, 200, 16, True, 0.3)
    assert len(set(chosen)) == len(chosen) > 150
    assert all(plans.num_parts(plan) in (1, 2, 4, 8) for plan in chosen)
    assert plans.shares_rows("tensor=2d:4 microbatches=2", 16) and not plans.shares_rows("data=8 microbatches=4", 16)
    assert plans.kind("data=2 tensor=2d:4 zero=3/2 microbatches=4") == "microbatches tensor=2d zero=3"
    for plan in chosen[:50]:
        assert all(simple != plan for simple in plans.simpler(plan))


def test_positions_can_be_searched_alone() -> None:
    """Every model's blocks then lie between attentions, and most plans split what these look at."""
    ends = [models.draw(seed, between_attentions=True)["parts"] for seed in range(50)]
    assert all(parts[0]["op"] == parts[-1]["op"] == "attention" and len(parts) > 2 for parts in ends)
    chosen = plans.draws(0, 100, 16, False, 0.95)
    assert sum("sequence=" in plan for plan in chosen) > 50


class Planted:
    """Fails whenever a model has a certain block and the plan tensor parallelism."""

    def outcomes(self, spec: Any, chosen: list[str], own_init: int = 0) -> list[dict[str, str]]:
        fails = any(part["op"] == "sort" for part in models.parts_of(spec))
        return [
            {"plan": plan, "kind": "wrong", "what": "step 0, gradient of x: off"} if fails and "tensor" in plan else
            {"plan": plan, "kind": "equal", "what": ""}
            for plan in chosen
        ]  # fmt: skip


def test_failures_are_shrunk() -> None:
    sort = {"op": "sort", "config": {"axis": -1, "how": "sort"}, "wrap": "raw"}
    stack = [sort, {"op": "one_hot", "config": {"vocab": 5}, "wrap": "raw"}]
    parts = [models.draw_part(np.random.default_rng(0), ["mlp"]), {"stack": stack, "times": 3, "how": "scan"}]
    row = {"spec": models.draw(3) | {"parts": parts}, "plan": "tensor=2d:4 zero=3 microbatches=2"}
    row |= {"kind": "wrong", "what": "step 0, gradient of x: off"}
    small = shrink(Planted(), row, 50)  # type: ignore[arg-type]
    assert [part["op"] for part in models.parts_of(small["spec"])] == ["sort"] and small["plan"] == "tensor=2"
    other = row | {"plan": "tensor=4 zero=1"}
    assert alike(other, [small]) and not alike(row, [small]), "a grid is another kind of plan"
    assert not alike(other, [small | {"plan": "tensor=2 sequence=ring:2"}])
    assert signature(row) == "wrong: gradient"


def test_goes_on_behind_the_last_seed() -> None:
    assert next_seed("search-models") > 0


@pytest.mark.full
def test_a_model_that_amplifies_rounding_is_no_plans_fault(process: Process) -> None:
    """The last bit of its first parameters moves its author's own third step by more than what is allowed."""
    part = {"op": "rotary_attention", "config": {"heads": 2}, "wrap": "residual"}
    spec = models.draw(17) | {"length": 12, "features": 6, "width": 11, "classes": 3, "loss": "squares", "wrt": None}
    spec |= {"parts": [{"stack": [part], "times": 3, "how": "unrolled"}], "flavour": "nnx"}
    (found,) = process.outcomes(spec, ["data=8"], -1)
    assert found["kind"] == "model" and "rounding grows" in found["what"]


@pytest.mark.full
def test_a_process_that_dies_is_a_row(process: Process) -> None:
    spec = models.draw(0) | {"parts": [{"op": "no such block", "config": {}, "wrap": "raw"}]}
    assert [found["kind"] for found in process.outcomes(spec, ["data=8"])] == ["model"]
    process._process.kill()
    assert [found["kind"] for found in process.outcomes(spec, ["data=8"])] == ["model"]
