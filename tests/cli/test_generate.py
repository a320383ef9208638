"""`cjax generate`: texts of a folder, with a budget and without."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer, models, pre_tokenizers

from cjax.cli import main
from cjax.cli.generate import _in_passes
from cjax.models import GPT, gpt, save
from cjax.planner.choice.homes import TooLittle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gpt")
    save(path, GPT(gpt("gpt-mini", embed_dim=32, vocab_size=13, context=16), rngs=nnx.Rngs(0)))
    words = {
        word: number for number, word in enumerate("once upon a time there was the cat sat on mat far away".split())
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="far"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert main(["generate", *arguments]) == 0
    return capsys.readouterr()


def test_texts_are_the_same_within_a_budget(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = (str(folder), "--prompt", "once upon a time", "the cat", "the mat sat far", "--tokens", "5")
    whole, told = said(capsys, *given)
    texts = whole.split("\n\n")
    assert len(texts) == 3 and texts[0].startswith("once upon a time ") and texts[1].startswith("the cat ") and not told
    little, told = said(capsys, *given, "--budget", "170KiB", "--host", "0B")
    assert little == whole and "read from the folder in every pass" in told
    one, _ = said(capsys, *given, "--batch", "1")
    assert one == whole


@pytest.mark.full
def test_rows_a_pass_are_as_many_as_a_budget_allows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    many = [str(folder), "--ids", *["1 2 3", "3,2,1"] * 8, "--tokens", "3"]
    whole, _ = said(capsys, *many)
    little, told = said(capsys, *many, "--budget", "150KiB")
    assert little == whole and "8 prompts a pass instead" in told


def test_what_does_not_fit_is_tried_in_half_as_many_rows(capsys: pytest.CaptureFixture[str]) -> None:
    tried = []

    def run(prompts: np.ndarray) -> np.ndarray:
        tried.append(len(prompts))
        if len(prompts) > most:
            raise TooLittle("too many", "budget", 1)
        return prompts + 1

    prompts, most = np.arange(14).reshape(7, 2), 2
    np.testing.assert_array_equal(_in_passes(run, prompts, None), prompts + 1)
    assert tried == [7, 4, 2, 2, 2, 1] and "4 prompts a pass instead" in capsys.readouterr().err
    most = 0
    with pytest.raises(TooLittle):
        _in_passes(run, prompts, None)


def test_a_text_ends_with_the_token_that_the_config_names(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    given = ("--ids", "1 2 3", "--tokens", "4")
    text = said(capsys, str(folder), *given)[0].split()
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": int(text[3])}))
    assert said(capsys, str(tmp_path), *given)[0].split() == text[:3]


@pytest.mark.full("arguments6-less than a device needs at least", "arguments9-the prompt '' has no tokens")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give texts, --prompt"),
        (["--ids", "1 b"], "give the numbers of tokens"),
        (["--ids", "99999999999"], "99999999999 is no token"),
        (["--ids", "1", "--host", "1GiB"], "give --budget too"),
        (["--ids", "1", "--tokens", "-1"], "--tokens -1"),
        (["--ids", "99"], "outside this model's vocabulary of 13"),
        (["--ids", "1 2", "--budget", "20KiB"], "less than a device needs at least"),
        (["--ids", "1 2", "--budget", "2"], "has no unit"),
        (["--prompt", "a", "--tokenizer", "."], "has no tokenizer.json"),
        (["--prompt", "the cat", ""], "the prompt '' has no tokens"),
        (["--ids", "1 2", " ".join(["7"] * 17)], "has 17 tokens, and this model's context 16: give its end"),
    ],
)
def test_what_is_wrong_is_said_in_one_message(
    arguments: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), *arguments]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_may_be_named_by_a_file_in_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--prompt", "the cat", "--tokens", "0")
    assert said(capsys, str(folder / "model.safetensors"), *given) == said(capsys, str(folder), *given)


def test_a_folder_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tmp_path / "none"), "--ids", "1", "--budget", "1GiB"]) == 1
    assert "no such folder" in capsys.readouterr().err
