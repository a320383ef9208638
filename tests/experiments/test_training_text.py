"""Experiments that train on text, at their smallest: data is read, the plan makes no difference, losses fall."""

import json
from pathlib import Path

import finetune_bert
import numpy as np
import pytest
import train_t5
from flax import nnx

from cjax.data import train_tokenizer
from cjax.models import BERT, bert, save


@pytest.fixture
def sentences(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    words = [("good", "fine", "lovely"), ("bad", "dull", "awful")]
    nouns = ("film", "book", "play", "song", "story")
    lines = ["text\tlabel"]
    for number in range(160):
        noun, other = rng.choice(nouns, 2)
        lines.append(f"a {rng.choice(words[number % 2])} {noun} number {number} with a {other}\t{number % 2}")
    path = tmp_path / "sentences.tsv"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.full
def test_sentences_are_told_apart_from_weights_on_any_plan(sentences: Path, tmp_path: Path, capsys) -> None:
    weights, folder = tmp_path / "weights", tmp_path / "run"
    tokenizer = train_tokenizer([sentences.read_text()], 200, kind="wordpiece")
    config = bert(
        "bert-mini", num_layers=1, num_heads=2, embed_dim=32, vocab_size=tokenizer.size, head="none", pooling="first"
    )
    save(weights, BERT(config, rngs=nnx.Rngs(1)))
    tokenizer.save(weights)
    arguments = "--tiny --compare --devices cpu:8 --batch 8 --plan".split()
    arguments += [
        "data=2 tensor=2 zero=1",
        "--folder",
        str(folder),
        "--weights",
        str(weights),
        "--data",
        str(sentences),
    ]
    accuracy, apart = finetune_bert.main(arguments)
    assert accuracy == 1.0 and apart < 1e-4
    said = capsys.readouterr().out
    assert "no weights" not in said and "plan data=2 tensor=2 zero=1 on 4 x cpu" in said and "data=1 on 1 x" in said
    losses = [
        row["loss"]
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if "loss" in (row := json.loads(line))
    ]
    assert len(losses) == 40 and losses[-1] < 0.5 < losses[0]


def test_docstrings_of_classes_and_functions() -> None:
    examples = finetune_bert.docstrings(400_000)
    assert len(set(examples.texts)) == len(examples.texts) > 40
    assert examples.labels.count("class") == examples.labels.count("function")
    assert all("\n" not in text for text in examples.texts)


@pytest.mark.full
def test_spans_are_filled_in(tmp_path: Path, capsys) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten\n" * 300)
    # The suite's own devices: any other number would replace them, under arrays of other tests.
    arguments = ["--tiny", "--devices", "8", "--data", str(text), "--folder", str(tmp_path / "run")]
    score, baseline = train_t5.main(arguments)
    assert score < 0.65 * baseline
    said = capsys.readouterr().out
    assert "filled in by the model:\n" in said and (tmp_path / "run" / "tokenizer.json").exists()
    # Again from the folder: nothing is left to do, and the vocabulary is that of the run.
    again, _ = train_t5.main([*arguments, "--resume"])
    assert again == pytest.approx(score, rel=1e-6)


def test_what_is_filled_in() -> None:
    tokenizer = train_tokenizer(["abcdefg"], 262, num_sentinels=3)
    a, b, c, d = tokenizer.encode_each(["abcd"])[0]
    first, second, _ = tokenizer.sentinels
    source = np.array([a, first, d, second, tokenizer.end])
    assert train_t5.fill(source, np.array([first, b, c, second, tokenizer.end, a]), tokenizer) == "a[bc]d[]"
    assert train_t5.fill(source, np.array([second, a, -100]), tokenizer) == "a[]d[a]"
