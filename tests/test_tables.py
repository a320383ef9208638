"""What the default run trains beside its author, all tables of models and plans together.

Each table covers the words that are its own; a kind of model need come in one of them alone.
"""

import test_contract
import test_expert_plans
import test_fused_attention
import test_pipeline_plans
import test_sequence_plans
import test_walks
from contract import UNDER_ALL
from full import is_row_left_out
from plans import features

TABLES = [
    (test_contract.test_trains_as_its_author_would, test_contract.exact_pairs()),
    (test_pipeline_plans.test_trains_as_its_author_would, test_pipeline_plans.pairs()),
    (test_expert_plans.test_trains_as_its_author_would, test_expert_plans.PAIRS),
    (test_sequence_plans.test_trains_as_its_author_would, test_sequence_plans.PAIRS),
    (test_fused_attention.test_trains_as_its_author_would, [pair[:2] for pair in test_fused_attention.PAIRS]),
    (test_walks.test_trains_as_its_author_would, test_walks.PAIRS),
]


def trained() -> list[tuple[str, str]]:
    """What is left of all tables by their marks."""
    return [pair for test, table in TABLES for pair in table if not is_row_left_out(test, "-".join(pair))]


PAIRS = trained()


# What stands for a kind of model: NNX has nothing of its own here that other models don't have, and T5 has an encoder.
ALIKE = {"nnx_encoder": "linen_encoder", "nnx_decoder": "linen_decoder", "linen_encoder_decoder": "cjax_t5"}


def test_every_kind_of_model_is_trained() -> None:
    trained = {name for name, _ in PAIRS}
    assert trained >= {*UNDER_ALL} - {*ALIKE} and trained >= {*ALIKE.values()}


def test_every_word_is_trained_with_attention() -> None:
    """Not by models alone that a plan has little to ask of."""
    words = {
        word
        for name, plan in PAIRS
        if name not in ("layered", "layered_28", "two_layered", "nnx_mlp")
        for word in features(plan)
    }
    assert words >= {
        "zero=1", "zero=2", "zero=3", "zero=1/4", "zero=3/4", "tensor=2", "tensor=4", "tensor=8", "tensor=2d:4",
        "tensor=2.5d:8/2", "tensor=3d:8", "sequence=ring:4", "sequence=all_to_all:2", "sequence=gather", "microbatches",
        "remat=block", "remat=dots", "overlap=2", "pipeline=gpipe:2", "pipeline=1f1b:2", "pipeline=interleaved:2/2",
        "pipeline=zero_bubble:2", "expert=2", "expert=4",
    }  # fmt: skip


def test_a_transformer_is_trained_in_several_ways() -> None:
    """One that a plan splits along every dim."""
    assert len({plan for name, plan in PAIRS if name == "nnx_llama"}) >= 6
