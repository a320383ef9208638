import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from models import by_hand as hand

from cjax.models import BERT, GPT, T5, Llama, ViT, config_of, load, readers, save
from cjax.models.bert import BERTConfig
from cjax.models.gpt import GPTConfig
from cjax.models.llama import LlamaConfig
from cjax.models.t5 import T5Config
from cjax.models.transformers.tables import tables
from cjax.models.vit import ViTConfig

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = dict(num_layers=2, num_heads=2, embed_dim=6, mlp_dim=10, vocab_size=13, context=8)
MODELS = {
    "gpt": (GPT, GPTConfig(**TEXT)),
    "gpt-untied": (GPT, GPTConfig(**TEXT, tied=False)),
    "bert-masked": (BERT, BERTConfig(**TEXT)),
    "bert-untied": (BERT, BERTConfig(**TEXT, tied=False, dropout=0.2)),
    "bert-classes": (BERT, BERTConfig(**TEXT, head="classes", pooling="first", num_classes=3)),
    "bert-bare": (BERT, BERTConfig(**TEXT, head="none", pooling="first")),
    "bert-no-pooling": (BERT, BERTConfig(**TEXT, head="none")),
    "vit": (ViT, ViTConfig(2, 2, 6, 10, image_size=6, patch_size=3, num_channels=2, num_classes=2)),
    "t5": (T5, T5Config(2, 1, num_heads=2, head_dim=4, embed_dim=6, mlp_dim=10, vocab_size=13, num_buckets=8)),
    "t5-gated": (T5, T5Config(1, 2, 2, 4, 6, 10, 13, gated=True, tied=False)),
    "llama": (Llama, LlamaConfig(**TEXT, num_kv_heads=1, head_dim=4)),
    "llama-scaled": (Llama, LlamaConfig(**TEXT, num_kv_heads=2, head_dim=4, tied=True, rope_factor=8.0)),
}


def make(name: str) -> nnx.Module:
    kind, config = MODELS[name]
    sizes = dataclasses.replace(config, **_no_dropout(config))
    return hand.generic(lambda: kind(sizes, rngs=nnx.Rngs(0)))


def _no_dropout(config) -> dict:
    return {"dropout": 0.0} if hasattr(config, "dropout") else {}


def params_of(model: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in flat}


@pytest.mark.full("t5-gated")
@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_what_is_loaded(name: str, tmp_path: Path):
    model = make(name)
    save(tmp_path, model)
    again = load(tmp_path, MODELS[name][0])
    assert again.config == model.config
    jax.tree.map(np.testing.assert_array_equal, params_of(again), params_of(model))


@pytest.mark.parametrize("name", ["gpt", "llama", "vit"])
def test_parts_of_a_file_are_parts_of_the_model(name: str, tmp_path: Path):
    model = make(name)
    save(tmp_path, model, max_bytes=700)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    found = readers(tmp_path)
    for path, whole in params_of(model).items():
        index = tuple(slice(0, size // 2) if i % 2 else slice(size // 2, size) for i, size in enumerate(whole.shape))
        assert found[path].shape == whole.shape
        np.testing.assert_array_equal(found[path](index), whole[index])


@pytest.mark.parametrize("folder", sorted(GOLDEN.iterdir()), ids=lambda folder: folder.name)
def test_golden_folders_of_transformers_give_its_logits(folder: Path):
    """Written by transformers (`test_parity.py` says how, and checks that they still say what it says)."""
    model, arrays = load(folder), np.load(folder / "expected.npz")
    given = [jnp.asarray(arrays[name]) for name in ("inputs", "decoder_inputs") if name in arrays]
    np.testing.assert_allclose(model(*given), arrays["logits"], atol=1e-5, rtol=1e-4)


@pytest.mark.full
def test_every_row_of_every_table_is_of_some_model():
    named = {type(model): set() for model in map(make, MODELS)}
    for model in map(make, MODELS):
        named[type(model)] |= {
            "/".join("{i}" if p.isdigit() else p for p in path.split("/")) for path in params_of(model)
        }
    for table in tables:
        assert {row.ours for row in table.rows} == named[table.kind]


def test_arrays_go_where_they_are_wanted(tmp_path: Path):
    save(tmp_path, make("gpt"))
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    split, whole = (jax.NamedSharding(mesh, jax.P(*spec)) for spec in (("x",), ()))
    model = load(tmp_path, shardings=lambda path, shape: split if path.endswith("up/kernel") else whole)
    kernel = model.blocks[0].mlp.up.kernel[...]
    assert kernel.sharding.is_equivalent_to(split, 2) and kernel.addressable_shards[0].data.shape == (3, 10)
    assert model.norm.scale[...].sharding.is_equivalent_to(whole, 1)
    jax.tree.map(np.testing.assert_array_equal, params_of(model), params_of(make("gpt")))


@pytest.mark.full
def test_another_head_starts_fresh_on_the_same_encoder(tmp_path: Path):
    model = make("bert-masked")
    save(tmp_path, model)
    other = load(tmp_path, BERT, head="classes", pooling="mean", num_classes=4, dropout=0.5)
    assert not hasattr(other, "word_head") and other.class_head.kernel.shape == (6, 4)
    assert 0 < np.abs(other.class_head.kernel[...]).max() < 0.1
    np.testing.assert_array_equal(other.blocks[1].mlp.up.kernel[...], model.blocks[1].mlp.up.kernel[...])
    tokens = jnp.ones([1, 5], int)
    assert not np.allclose(other(tokens), other(tokens))  # it has the dropout that was asked for


def test_bfloat16_files_are_read(tmp_path: Path):
    model = make("llama")
    save(tmp_path, model)
    file = tmp_path / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    safetensors.numpy.save_file({name: array.astype(jnp.bfloat16) for name, array in tensors.items()}, file)
    again = params_of(load(tmp_path))
    for name, array in params_of(model).items():
        assert again[name].dtype == np.float32
        np.testing.assert_array_equal(again[name], array.astype(jnp.bfloat16).astype(np.float32))


def damage(folder: Path, change) -> Path:
    """A copy of a saved GPT with other tensors."""
    save(folder, make("gpt"))
    file = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file)
    return folder


def test_all_that_is_wrong_with_the_tensors_is_listed_at_once(tmp_path: Path):
    def change(tensors):
        del tensors["transformer.h.1.attn.c_attn.weight"], tensors["transformer.wpe.weight"]
        tensors["transformer.h.0.mlp.c_fc.bias"] = np.zeros(9, np.float32)
        tensors["transformer.h.2.ln_1.weight"] = np.zeros(6, np.float32)
        tensors["transformer.h.0.attn.masked_bias"] = np.zeros(1, np.float32)  # in old files; nobody needs it

    with pytest.raises(ValueError) as error:
        load(damage(tmp_path, change))
    lines = str(error.value).splitlines()[1:]
    assert sorted(line.strip() for line in lines) == [
        "transformer.h.0.mlp.c_fc.bias: [9] given, [10] needed",
        "transformer.h.1.attn.c_attn.weight: missing, [6, 18] needed",
        "transformer.h.2.ln_1.weight: not of this model",
        "transformer.wpe.weight: missing, [8, 6] needed",
    ]


def edit(folder: Path, **changes) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_names_without_their_prefix_are_read(tmp_path: Path):
    def change(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)

    folder = edit(damage(tmp_path, change), architectures=["GPT2Model"])
    jax.tree.map(np.testing.assert_array_equal, params_of(load(folder)), params_of(make("gpt")))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mistral"}, "another architecture, 'mistral'; there are GPT"),
        ({"architectures": ["GPT2ForSequenceClassification"]}, "one of GPT2LMHeadModel"),
        (
            {"activation_function": "relu", "scale_attn_weights": False},
            r"(?s)relu.*gelu_new.*scale_attn_weights is False",
        ),
        ({"n_embd": 7}, "embed_dim=8"),
        ({"n_layer": 3}, "h.2.attn.c_attn.weight: missing"),
    ],
)
def test_other_kinds_of_models_are_refused(changes: dict, message: str, tmp_path: Path):
    save(tmp_path, make("gpt"))
    with pytest.raises(ValueError, match=message):
        load(edit(tmp_path, **changes))


def test_a_folder_of_another_kind_than_asked_for_is_refused(tmp_path: Path):
    save(tmp_path, make("gpt"))
    with pytest.raises(ValueError, match="holds a GPT .gpt2., not a BERT"):
        load(tmp_path, BERT)
    with pytest.raises(ValueError, match="GPTConfig has no width"):
        load(tmp_path, width=3)
    with pytest.raises(ValueError, match=r"position_embed/embedding: \[8, 6\] given, \[9, 6\] needed"):
        load(tmp_path, context=9)
    with pytest.raises(ValueError, match="fewer layers than you ask for: blocks/2/"):
        load(tmp_path, num_layers=3)


def test_a_truncated_file_is_refused(tmp_path: Path):
    save(tmp_path, make("gpt"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match="no whole safetensors file.*download it again"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "flax_model.msgpack"])
def test_pickles_are_refused_with_the_way_to_convert_them(name: str, tmp_path: Path):
    save(tmp_path, make("gpt"))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(ValueError, match="save_pretrained"):
            load(path)


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load(tmp_path)
    save(tmp_path, make("gpt"), max_bytes=700)
    missing = sorted(tmp_path.glob("*.safetensors"))[0]
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {missing.name}"):
        load(tmp_path)
    shutil.rmtree(tmp_path)
    save(tmp_path, make("gpt"))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        load(tmp_path)
    edit(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="no JSON"):
        config_of(tmp_path)


@pytest.mark.full
def test_saving_refuses_what_it_would_spoil_or_cannot_say(tmp_path: Path):
    save(tmp_path, make("gpt"))
    with pytest.raises(FileExistsError, match="name another folder"):
        save(tmp_path, make("gpt"))
    with pytest.raises(ValueError, match="this is a Linear"):
        save(tmp_path / "other", nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    mean = BERT(BERTConfig(**TEXT, head="classes", pooling="mean"), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="transformers has no BERT with head='classes', pooling='mean'"):
        save(tmp_path / "other", mean)


def deep() -> str:
    return "[" * 100_000


BROKEN_CONFIGS: dict[str, tuple[str | bytes, str]] = {
    "deep": (deep(), "config.json is no JSON"),
    "no text": (b"\xff\xfe\x00", "config.json is no JSON"),
    "a list": ("[]", "holds a list"),
    "names that are none": ('{"model_type": "gpt2", "architectures": 3}', "architectures is 3"),
}


@pytest.mark.parametrize("name", BROKEN_CONFIGS)
def test_a_config_that_is_none_is_named(name: str, tmp_path: Path):
    content, said = BROKEN_CONFIGS[name]
    save(tmp_path, make("gpt"))
    (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=said):
        load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_layer": 1_000_000}, "n_layer=1,000,000, and its files hold .* tensors, of layers 0 to 1: write n_layer=2"),
        ({"n_layer": "2"}, "n_layer is '2'; a whole number is needed"),
        ({"n_layer": 2.5}, "n_layer is 2.5; a whole number"),
        ({"n_embd": True}, "n_embd is True; a whole number"),
        ({"n_head": [4]}, r"n_head is \[4\]"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; true or false"),
        ({"n_layer": -1}, "num_layers is -1"),
    ],
)
def test_sizes_that_cannot_be_are_refused_at_once(changes: dict, said: str, tmp_path: Path):
    save(tmp_path, make("gpt"))
    with pytest.raises(ValueError, match=said):
        load(edit(tmp_path, **changes))


@pytest.mark.parametrize("content", [deep(), "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[1]", "\x00"])
def test_an_index_that_is_none_is_named(content: str, tmp_path: Path):
    save(tmp_path, make("gpt"), max_bytes=700)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match="model.safetensors.index.json.*again"):
        load(tmp_path)


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path):
    def change(tensors):
        tensors["transformer.h.1.mlp.c_fc.bias"][3] = np.nan

    with pytest.raises(ValueError, match="h.1.mlp.c_fc.bias holds NaN"):
        load(damage(tmp_path, change))
