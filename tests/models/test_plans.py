"""The models under cjax, which knows nothing of them: their dims are found, and each trains on eight devices."""

import dataclasses
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from starts import begin

import cjax
from cjax.models import (
    BERT,
    GPT,
    T5,
    Llama,
    ViT,
    generate,
    llama_loss,
    load,
    loss,
    masked_loss,
    save,
    t5_loss,
    vit_loss,
)
from cjax.models.bert import BERTConfig
from cjax.models.gpt import GPTConfig
from cjax.models.llama import LlamaConfig
from cjax.models.t5 import T5Config
from cjax.models.vit import ViTConfig
from cjax.tree import leaf_names

BATCH, LENGTH, SOURCE, VOCAB = 8, 12, 20, 64
SIZES: dict[str, Any] = dict(num_layers=3, num_heads=4, embed_dim=40, vocab_size=VOCAB)


def tokens(length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, VOCAB, (BATCH, length)).astype(np.int32)


def some(labels: np.ndarray) -> np.ndarray:
    """Labels of which a fifth don't count."""
    return np.where(np.random.default_rng(1).random(labels.shape) < 0.2, -100, labels).astype(np.int32)


def present(length: int) -> np.ndarray:
    return np.arange(length) < np.random.default_rng(2).integers(4, length + 1, BATCH)[:, None]


def classes(number: int) -> np.ndarray:
    return np.random.default_rng(3).integers(0, number, BATCH)


def text(length: int = LENGTH) -> dict[str, np.ndarray]:
    whole = tokens(length + 1)
    return {"inputs": whole[:, :-1], "targets": some(whole[:, 1:])}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its loss and a batch; what of its parameters `tensor` splits, and which runs of equal layers it has."""

    kind: Callable[..., nnx.Module]
    config: Any
    loss: Callable[..., Any]
    batch: Callable[[], dict[str, np.ndarray]]
    split: str = "(query|key|value)/(kernel|bias)|out/kernel|(up|gate|linear)/(kernel|bias)|down/kernel|token_embed"
    layers: dict[int, str] = dataclasses.field(default_factory=lambda: {3: "blocks/0"})


CASES = {
    "gpt": Case(GPT, GPTConfig(**SIZES, context=64), functools.partial(loss, chunk=16), lambda: text(64)),  # in 4
    "bert": Case(
        BERT, BERTConfig(**SIZES, context=32), masked_loss, lambda: {**text(), "present": present(LENGTH)},
        layers={3: "embed_norm"},  # each layer ends with a norm, and the one before the first looks like theirs
    ),
    "vit": Case(
        ViT, ViTConfig(3, 4, 40, image_size=12, patch_size=4, num_classes=10), vit_loss,
        lambda: {"images": np.random.default_rng(0).normal(size=(BATCH, 12, 12, 3)), "labels": classes(10)},
    ),
    "t5": Case(
        T5, T5Config(**SIZES, num_decoder_layers=2, head_dim=6, mlp_dim=64, gated=True), t5_loss,
        lambda: {**text(), "source": tokens(SOURCE, 4), "present": present(SOURCE)},
        layers={3: "encoder/0", 2: "decoder/0"},
    ),
    "llama": Case(
        Llama, LlamaConfig(**{**SIZES, "num_heads": 8}, num_kv_heads=4, head_dim=6, mlp_dim=64, context=32),
        llama_loss, text,
    ),
}  # fmt: skip


@functools.cache
def program(name: str) -> cjax.Program:
    case = CASES[name]
    batch = jax.tree.map(jnp.asarray, case.batch())
    build = lambda rngs: case.kind(case.config, rngs=rngs)  # noqa: E731
    return cjax.parallelize(build, case.loss, optax.adam(1e-2), batch, plan="data=2 tensor=4")


# Beside these, `cjax.models` are trained beside their author's own in the tables of tests/test_tables.py, in float64.
@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_it_trains_on_eight_devices_as_on_one(name: str):
    batch = jax.tree.map(jnp.asarray, CASES[name].batch())
    state = begin(program(name))
    check = program(name).check(state, batch)
    assert "agrees with one device" in str(check)
    losses = []
    for _ in range(4):
        state, metrics = program(name).step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1 and np.isfinite(losses).all()


@pytest.mark.full("bert", "gpt", "t5", "vit")
@pytest.mark.parametrize("name", CASES)
def test_its_large_parameters_are_split(name: str):
    state = begin(program(name))
    params = program(name).params(state)
    held = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    wanted = {path for path in held if re.search(CASES[name].split, path)}
    split = {path for path, leaf in held.items() if leaf.addressable_shards[0].data.size * 4 == leaf.size}
    assert wanted and not wanted - split, f"whole: {sorted(wanted - split)}"


@pytest.mark.parametrize("name", CASES)
def test_its_layers_are_found(name: str):
    described = str(program(name).trace)
    for number, stack in CASES[name].layers.items():
        assert f"{number} x {stack} " in described, described


# name: leaf, how many rows its table has, and what may stand there besides
INDICES = {
    "gpt": ("targets", VOCAB, ", and -100"),
    "bert": ("targets", VOCAB, ", and -100"),
    "vit": ("labels", 10, ""),
    "t5": ("source", VOCAB, ""),
    "llama": ("inputs", VOCAB, ""),
}


@pytest.mark.full("gpt", "t5")
@pytest.mark.parametrize("name", CASES if os.environ.get("CJAX_TEST_ALL") == "1" else ["gpt", "t5", "vit"])
def test_a_label_or_token_out_of_range_is_named(name: str):
    batch, (leaf, size, also) = CASES[name].batch(), INDICES[name]
    program(name).evaluate(begin(program(name)), batch)
    where = (3, 2)[: batch[leaf].ndim]
    batch[leaf][where] = size
    said = re.escape(f"{leaf!r} holds {size} at {list(where)}, outside a table of {size} rows")
    with pytest.raises(ValueError, match=rf"{said}.*which are 0 to {size - 1}{also}\."):
        program(name).step(begin(program(name)), batch)


@pytest.mark.full
@pytest.mark.parametrize("name", ["gpt", *(pytest.param(name, marks=pytest.mark.full) for name in ("t5", "llama"))])
def test_greedy_texts_do_not_depend_on_where_parameters_are(name: str):
    state = begin(program(name))
    split = program(name).model(state)
    graph, leaves = nnx.split(split)
    whole = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), leaves))
    prompt = jnp.asarray(tokens(6))
    made = generate(split, prompt, 8, temperature=0)
    assert len(jax.tree.leaves(leaves)[0].sharding.device_set) == 8
    np.testing.assert_array_equal(made, generate(whole, prompt, 8, temperature=0))


@pytest.mark.full
def test_weights_in_a_folder_start_a_program(tmp_path: Path):
    case = CASES["llama"]
    model = case.kind(case.config, rngs=nnx.Rngs(5))
    save(tmp_path, model)
    state = program("llama").init(0, params=tmp_path)
    found, wanted = program("llama").params(state), nnx.state(load(tmp_path), nnx.Param)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(found), jax.tree.leaves(wanted))
    kernel = jax.tree.leaves(found)[0]
    assert len(kernel.sharding.device_set) == 8
    save(tmp_path / "gpt", GPT(CASES["gpt"].config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="position_embed/embedding: this model has no such parameter"):
        program("llama").init(0, params=tmp_path / "gpt")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text((tmp_path / "config.json").read_text())
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="pickle"):
        program("llama").init(0, params=tmp_path / "pickled")
