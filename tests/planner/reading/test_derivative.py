"""The step that a trace becomes: which attentions a kernel computes in it, and what of it is the whole batch's."""

from small_gpt import EMBED, HEADS, MLP, ROWS, SEQ, gpt

from cjax.planner.reading.work import work_of
from cjax.planner.work import BATCH, elements


def test_a_kernel_takes_heads_that_are_multiples_of_8_wide() -> None:
    """This model's are 12, so that its scores are saved."""
    assert EMBED // HEADS == 12
    (_, layer, _) = work_of(gpt()).kept["none", "fused", False]
    assert ROWS * HEADS * SEQ * SEQ in [elements(value.dims) for value in layer.saved]


def test_what_a_step_keeps_is_of_all_rows() -> None:
    (_, layer, _) = work_of(gpt(), num_microbatches=3).kept["none", "float32", False]
    rows = {size for value in layer.saved for name, size in value.dims if name == BATCH}
    assert rows == {3 * ROWS} and 3 * ROWS * SEQ * MLP in [elements(value.dims) for value in layer.saved]
