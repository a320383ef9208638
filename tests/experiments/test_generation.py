"""Texts of a model larger than the memory: the folder that is measured, and the table of what was."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from offloads import generation as streamed

import cjax
from cjax.models import GPT, load

SMALL = {**streamed.SIZES, "num_layers": 2, "embed_dim": 24, "num_heads": 3, "vocab_size": 64}


@pytest.mark.full
def test_a_written_folder_is_read_in_parts_to_the_same_tokens(tmp_path: Path) -> None:
    size = streamed.write(tmp_path, SMALL)
    assert size == sum(4 * np.prod(x.shape) for x in cjax.models.readers(tmp_path).values())
    prompt = np.arange(6, dtype=np.int32).reshape(2, 3)
    with cjax.StreamedModel(tmp_path, "offload=params host=0B budget=1MiB") as model:
        found = np.asarray(cjax.generate(model, prompt, 6, temperature=0))
    np.testing.assert_array_equal(found, cjax.generate(load(tmp_path, GPT), prompt, 6, temperature=0))
    assert len(np.unique(found[:, 3:])) > 2, "layers change what is said"


def test_other_tokens_are_said_in_the_table() -> None:
    row: dict[str, Any] = dict.fromkeys(("device", "read_a_pass", "rss"), 2**20)
    row |= dict.fromkeys(("seconds_a_pass", "floor", "tokens_a_second", "load"), 1.0)
    row |= {"layers": 2, "weights": None, "prompts": 8}
    found = streamed.table([row | {"plan": plan, "tokens": tokens} for plan, tokens in ("ax", "bx", "cy")], 2**20)
    assert [line.split(" | ")[-1] for line in found.splitlines()[4:]] == [" |", "same |", "OTHERS |"]
