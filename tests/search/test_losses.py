"""A kept choice of the search over random losses; `python tests/search/losses.py` goes on."""

import jax
import pytest
from search.losses import FINE, OPERATIONS, Recipe, Term, make_batch, search, verdict

BATCH = make_batch(0)


@pytest.fixture(autouse=True)
def float64():
    before = jax.config.values["jax_enable_x64"]
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.mark.parametrize("name", [name for name in OPERATIONS if name not in FINE])
def test_operations_on_other_rows_are_refused(name):
    assert verdict(Recipe((Term("ce", (name,), "mean", 1.0),)), BATCH) in ("refused", "equal")


KEPT = [
    Recipe((Term("ce", (), "masked", 1.0), Term("z", (), "mean", 0.1)), plan="data=2 microbatches=2 zero=2"),
    Recipe((Term("ce", ("stack",), "masked", 1.0), Term("square", (), "other_weight", -0.5)), plan="microbatches=4"),
    Recipe((Term("ce", ("unstack", "mask"), "guarded_high", 2.0),), (Term("largest", (), "sum", 1.0),)),
    Recipe((Term("hinge", (), "sum_size", 1.0),), (Term("onehot", (), "group_weight", 0.1),), "mean"),
    # Of one row the elements were made three times: some equalled the largest, and then none did.
    Recipe((Term("vmapped", (), "max_then", -0.5),), (), "scalar", "microbatches=8"),
]


@pytest.mark.parametrize("recipe", KEPT, ids=str)
def test_kept(recipe):
    assert verdict(recipe, BATCH) == "equal"


@pytest.mark.full
def test_some_at_random():
    counts, failed = search(12, seed=3, shrinks=False)
    assert not failed and counts["equal"]
