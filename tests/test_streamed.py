"""Models of folders that fit in no memory: the same tokens, within a budget, and of the whole model no copy."""

import dataclasses
import functools
import gc
import json
import math
import re
import sys
import tracemalloc
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from alive import alive
from flax import nnx
from starts import drawn
from zoo_cjax import ROWS

import cjax
from cjax import StreamedModel
from cjax.models import GPT, T5, gpt, load, readers, save
from cjax.planner.choice.homes import TooLittle
from cjax.program import texts
from cjax.walk.jitted import Jitted
from cjax.walk.moving import MovedRows
from cjax.walk.quantized import quantize

pytestmark = pytest.mark.usefixtures("settled")

PROMPT = np.random.default_rng(0).integers(0, 101, (4, 5)).astype(np.int32)
NUM = 9  # of a GPT and a Llama the context is 12: the window slides at the end
NAMES = ["cjax_gpt", "cjax_llama", "cjax_t5"]
TIGHT = {"cjax_gpt": "205KiB", "cjax_llama": "225KiB", "cjax_t5": "315KiB"}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @functools.cache
    def folder(name: str) -> Path:
        kind, config, *_ = ROWS[name]
        if kind is T5:
            config = dataclasses.replace(config, tied=False)  # tied and untrained, it says the same whatever it reads
        path = tmp_path_factory.mktemp(name)
        save(path, _with_numbers(lambda: kind(config, rngs=nnx.Rngs(0))), max_bytes=60_000)
        return path

    return folder


def _with_numbers(build: Any) -> Any:
    """With attention so sharp that a text doesn't come to one token for ever, whatever went before."""
    graph, state = nnx.split(nnx.eval_shape(build))
    sharp = [
        (path, leaf.replace(3 * leaf[...]) if {"attention", "cross"} & set(path) else leaf)
        for path, leaf in nnx.to_flat_state(drawn(state, 0))
    ]
    return nnx.merge(graph, nnx.from_flat_state(sharp))


@functools.cache
def wanted(folder: Path) -> np.ndarray:
    """The tokens of the model in device memory."""
    return greedy(load(folder))


def greedy(model: Any, num: int = NUM, **options: Any) -> np.ndarray:
    return np.asarray(cjax.generate(model, PROMPT, num, temperature=0, **options))


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.full) for name in NAMES[1:])])
def test_tokens_are_those_in_device_memory_wherever_layers_are(name: str, folder_of: Any) -> None:
    folder = folder_of(name)
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()}
    with StreamedModel(folder, f"budget={TIGHT[name]} host=70KiB") as model:
        np.testing.assert_array_equal(greedy(model), wanted(folder))
        assert model.homes["weights"]["folder"] >= 2
    with StreamedModel(folder, f"budget={TIGHT[name]} offload=params+activations") as model:
        np.testing.assert_array_equal(greedy(model), wanted(folder))
        assert not model.homes["weights"]["device"] and not model.homes["memory"]["device"]
    assert {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in folder.iterdir()} == before
    new = wanted(folder)[:, -NUM:]
    assert len({tuple(row) for row in new}) > 1, "rows differ, so that mixing them up would show"
    assert max(len(set(row)) for row in new.tolist()) > 4, "and so do tokens, so that forgetting some would"


@pytest.mark.full
def test_rows_are_shared_by_devices_and_matrices_split(folder_of: Any) -> None:
    folder = folder_of("cjax_gpt")
    with StreamedModel(
        folder, "data=2 tensor=2 budget=160KiB host=0B offload=params", devices=jax.devices()[:4]
    ) as model:
        np.testing.assert_array_equal(greedy(model), wanted(folder))
        assert model.homes["weights"]["folder"]
        with pytest.raises(ValueError, match="3 rows of tokens don't divide"):
            cjax.generate(model, PROMPT[:3], 2, temperature=0)


@pytest.mark.full
def test_rows_of_a_t5_are_shared_with_what_the_encoder_made_of_them(folder_of: Any) -> None:
    folder = folder_of("cjax_t5")
    with StreamedModel(folder, "data=2 budget=400KiB offload=params+activations", devices=jax.devices()[:2]) as model:
        np.testing.assert_array_equal(greedy(model), wanted(folder))
        assert model.homes["memory"] == {"device": 0, "host": 2}
        # Of half of the rows, keys and values of the decoder's own text and of the source, of 8 heads of 5 numbers.
        [walk] = {made.walk.structs()[0].shape: made.walk for made in model.texts._made.values()}.values()
        parts = [math.prod(x.sharding.shard_shape(x.shape)) for x in walk.structs()]
        assert parts == [2 * (NUM + 1) * 40] * 2 + [2 * 5 * 40] * 2
    with StreamedModel(folder, "tensor=2", devices=jax.devices()[:2]) as model:
        np.testing.assert_array_equal(greedy(model), wanted(folder))


@pytest.mark.full
def test_a_device_holds_no_more_than_was_said(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, seen = MovedRows.fetch, []

    def watched(self: MovedRows, layer: int) -> Any:
        row = fetch(self, layer)
        seen.append(alive() - before)
        return row

    gc.collect()
    before = alive()
    monkeypatch.setattr(MovedRows, "fetch", watched)
    with StreamedModel(folder_of("cjax_t5"), f"budget={TIGHT['cjax_t5']} host=70KiB") as model:
        cjax.generate(model, PROMPT, 3, temperature=0)
        with pytest.raises(TooLittle, match=r"less than a device needs at least.*Write budget=.*or give fewer rows a"):
            cjax.generate(model, np.tile(PROMPT, (8, 1)), 3, temperature=0)
    assert 100_000 < max(seen) <= 315 * 1024


def test_the_least_budget_is_enough_and_layers_give_way_to_more_rows(folder_of: Any) -> None:
    folder, many = folder_of("cjax_llama"), np.tile(PROMPT, (8, 1))
    with StreamedModel(folder, "budget=1KiB") as model, pytest.raises(TooLittle) as error:
        cjax.generate(model, many, 2, temperature=0)
    said = re.search(r"of weights, (\S+) KiB for the programs of a pass.*Write budget=(\d+)KiB,", str(error.value))
    assert said
    least, sizes = int(said[2]) * 1024, {name: 4 * math.prod(x.shape) for name, x in readers(folder).items()}
    outside = sum(size for name, size in sizes.items() if not name.startswith("blocks/"))
    layer, memory = (sum(sizes.values()) - outside) / 4, 4 * 2 * 32 * (5 + 2) * 4 * 6  # 32 rows of 7 tokens, 4 heads
    assert least == pytest.approx(outside + 1024 * float(said[1]) + 2 * (layer + memory), abs=1024)
    with StreamedModel(folder, f"budget={least}B") as model:
        np.testing.assert_array_equal(greedy(model, 2), wanted(folder)[:, :7])
        assert model.homes["weights"]["device"] > 0, "few rows leave room for layers"
        np.testing.assert_array_equal(
            cjax.generate(model, many, 2, temperature=0), np.tile(wanted(folder), (8, 1))[:, :7]
        )
        assert model.homes["weights"]["device"] == 0
        assert not model._streamed._last[1].params[0]._resident  # pyright: ignore[reportOptionalSubscript, reportAttributeAccessIssue]


@pytest.mark.full
def test_never_is_more_in_host_memory_than_a_few_layers(tmp_path: Path) -> None:
    config = gpt("gpt-mini", num_layers=24, vocab_size=101, context=12)
    save(tmp_path, _with_numbers(lambda: GPT(config, rngs=nnx.Rngs(0))))
    layer = 4 * (12 * 192 * 192 + 13 * 192)
    with StreamedModel(tmp_path, "budget=8MiB host=0B offload=params") as model:
        text = greedy(model, 2)  # with it programs are made
        tracemalloc.start()
        np.testing.assert_array_equal(greedy(model, 2), text)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert model.homes["weights"] == {"device": 0, "host": 0, "folder": 24}
    # On a CPU the two that the device has are among them; one more is read meanwhile, and laid out anew.
    assert layer < peak < 6.5 * layer, f"{peak / layer:.1f} layers of 24"


def test_short_numbers_stay_short_until_they_are_computed_with(folder_of: Any, tmp_path: Path) -> None:
    for file in folder_of("cjax_llama").iterdir():
        if file.suffix == ".safetensors":
            short = {k: np.asarray(x, jnp.bfloat16) for k, x in safetensors.numpy.load_file(file).items()}
            safetensors.numpy.save_file(short, tmp_path / file.name, metadata={"format": "pt"})
        else:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with StreamedModel(tmp_path, "budget=200KiB host=0B offload=params") as model:
        np.testing.assert_array_equal(greedy(model), wanted(tmp_path))
        assert {x.dtype for x in model._streamed._structs(0)} == {np.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("kind", [pytest.param("int8", marks=pytest.mark.full), "int4"])
def test_quantized_weights_are_those_of_qwix_wherever_layers_are(kind: Any, folder_of: Any) -> None:
    pytest.importorskip("qwix", reason="the extra quantize is not installed")
    folder = folder_of("cjax_gpt")
    expected = greedy(_quantized(folder, kind))
    for plan in ("", "budget=185KiB host=20KiB offload=params"):
        with StreamedModel(folder, plan, weights=kind) as model:
            np.testing.assert_array_equal(greedy(model), expected)
            assert bool(plan) == bool(model.homes["weights"]["folder"] + model.homes["weights"]["host"])
    assert (expected != wanted(folder)).any(), "a model that is not quantized says something else"


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_what_is_quantized_is_the_hosts_also_where_the_cpu_is_the_device(kind: Any) -> None:
    """Of a view, the array would be there as long as the row is, and be counted with what the device has."""
    pytest.importorskip("qwix", reason="the extra quantize is not installed")
    before = len(jax.live_arrays())
    row = quantize(np.ones((256, 128), np.float32), 1, kind)
    assert all(x.flags.owndata for x in row) and len(jax.live_arrays()) == before


def _quantized(folder: Path, kind: str) -> Any:
    """The whole model, each matrix of a layer as Qwix has it."""
    import qwix  # pyright: ignore[reportMissingImports]

    model, stored = load(folder), readers(folder)
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        name = "/".join(map(str, path))
        if "blocks" in name and (num := stored[name].num_inputs):
            matrix = leaf[...].reshape(math.prod(leaf.shape[:num]), -1)
            block = math.gcd(len(matrix), 128)
            tiles = {0: block} if kind == "int4" and block >= 32 else {}
            array = qwix.quantize(matrix, kind, channelwise_axes=[1], tiled_axes=tiles)
            leaf[...] = qwix.dequantize(array).reshape(leaf.shape)
    return model


def test_without_qwix_is_said_what_to_install(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match=r"pip install 'cjax\[quantize\]'"):
        StreamedModel(folder_of("cjax_gpt"), "budget=1MiB", weights="int8")


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a pipeline": ("pipeline=2 microbatches=2", {}, "pipeline= has no use in generation from a folder"),
    "a disk": ("budget=1MiB host=0B disk=1GiB", {}, "disk= has no use.*stay in their folder"),
    "other weights": ("", {"weights": "int3"}, "write 'int8' or 'int4'"),
    "both at once": ("tensor=2", {"weights": "int8"}, "leave tensor= out"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_meaning_is_refused(case: str, folder_of: Any) -> None:
    plan, options, said = REFUSED[case]
    with pytest.raises(ValueError, match=said):
        StreamedModel(folder_of("cjax_gpt"), plan, devices=jax.devices()[:2], **options)


def test_a_model_of_one_layer_is_to_be_loaded_whole(tmp_path: Path) -> None:
    for name, more in (("cjax_llama", {}), ("cjax_t5", {"num_decoder_layers": 1})):
        kind, config, *_ = ROWS[name]
        config = dataclasses.replace(config, **({"num_layers": 1} | more))
        save(tmp_path / name, kind(config, rngs=nnx.Rngs(0)))
        with pytest.raises(ValueError, match=rf"has one layer.*Load it whole: cjax.generate\(cjax.models.load.*{name}"):
            StreamedModel(tmp_path / name, "budget=1MiB")


@pytest.mark.full
def test_an_encoder_of_one_layer_is_gone_through_whole(tmp_path: Path) -> None:
    kind, config, *_ = ROWS["cjax_t5"]
    config = dataclasses.replace(config, num_layers=1, num_decoder_layers=2, tied=False)
    save(tmp_path, _with_numbers(lambda: kind(config, rngs=nnx.Rngs(0))))
    with StreamedModel(tmp_path, "budget=8MiB offload=params+activations") as model:
        np.testing.assert_array_equal(greedy(model, 4), greedy(load(tmp_path), 4))
        assert sum(model.homes["weights"].values()) == 2


@pytest.mark.full
def test_prompts_of_many_lengths_keep_the_programs_of_a_few(folder_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each length are the tokens those in device memory, also when its programs are made a second time."""
    monkeypatch.setattr(texts, "MOST_MADE", 4)
    folder, compiled = folder_of("cjax_gpt"), 0
    whole, compile = load(folder), Jitted.compile

    def counted(self: Jitted, *args: Any) -> Any:
        nonlocal compiled
        compiled += 1
        return compile(self, *args)

    monkeypatch.setattr(Jitted, "compile", counted)
    with StreamedModel(folder, "budget=2MiB offload=params") as model:
        made, counts, walks = model.texts._made, [], []
        for length in (2, 3, 4, 4, 3, 2):  # a pass over the prompt and one of a token each
            before = compiled
            text = cjax.generate(model, PROMPT[:, :length], 3, temperature=0)
            np.testing.assert_array_equal(text, cjax.generate(whole, PROMPT[:, :length], 3, temperature=0))
            counts.append(compiled - before)
            walks.append([weakref.ref(each.walk) for each in made.values()])
            assert len(made) <= 4
        each = counts[0]
        assert each > 0 and counts == [each, each, each, 0, 0, each], "the two lengths that came last are there"
        gc.collect()
        assert [walk() for walk in walks[0]] == [None, None], "others are in memory no more"


def test_folders_that_are_not_whole_say_so(folder_of: Any, tmp_path: Path) -> None:
    for file in folder_of("cjax_gpt").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    shards = sorted(tmp_path.glob("*.safetensors"))
    model = StreamedModel(tmp_path, "budget=245KiB host=0B offload=params")
    whole = shards[3].read_bytes()
    with shards[3].open("r+b") as file:  # while the model is open
        file.truncate(len(whole) - 1000)
    with pytest.raises(ValueError, match="was cut short since it was opened"):
        greedy(model)
    with pytest.raises(ValueError, match="is no whole safetensors file"):
        StreamedModel(tmp_path, "budget=1MiB")
    damaged = safetensors.numpy.load_file(folder_of("cjax_gpt") / shards[3].name)
    next(x for x in damaged.values() if x.ndim > 1)[0, 0] = np.nan
    safetensors.numpy.save_file(damaged, shards[3], metadata={"format": "pt"})
    with pytest.raises(ValueError, match="holds NaN: its file is damaged"):
        greedy(StreamedModel(tmp_path, "budget=245KiB host=0B offload=params"))
    shards[3].unlink()
    with pytest.raises(FileNotFoundError, match=f"lacks {shards[3].name}"):
        StreamedModel(tmp_path, "budget=1MiB")
    with pytest.raises(FileNotFoundError, match="no such folder"):
        StreamedModel(tmp_path / "other", "budget=1MiB")
    config = json.loads((tmp_path / "config.json").read_text())
    shards[3].write_bytes(whole)
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": 1}))
    with pytest.raises(ValueError, match="not of this model"):
        StreamedModel(tmp_path, "budget=1MiB")
