"""`cjax generate`."""

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro

from cjax.cli.devices import quiet_devices
from cjax.cli.options import check_options
from cjax.data.text.tokenizer import read_tokenizer
from cjax.data.text.vocabulary import BPE
from cjax.generate import generate
from cjax.models import T5, load
from cjax.models.transformers.folder import read_json
from cjax.planner.choice.homes import TooLittle
from cjax.streamed import StreamedModel

Continue = Callable[[np.ndarray], np.ndarray]  # prompts of one length, continued


@dataclasses.dataclass(frozen=True)
class Generate:
    """Continues texts with a GPT, Llama or T5 in a folder of Hugging Face's, also one that fits in no memory here.

    With a budget, layers that the device and the host have no room for are read from the folder in every pass, one pass
    a token for all prompts of one length together: many prompts read no more than one.

    Attributes:
        folder: with config.json and safetensors, as save_pretrained writes it.
        prompt: texts, each in quotes.
        ids: prompts as numbers, such as "12 5 99", where there is no tokenizer; texts are then printed as numbers.
        tokens: how many to add at most.
        budget: bytes that the device may hold, such as 8GiB; all that it has if not given.
        host: bytes of weights, keys and values in host memory; no limit if not given.
        weights: quantize layers' matrices by Qwix as they are read.
        batch: prompts a pass at most; as many as there are, or as the budget allows, if not given.
        temperature: 0 takes the likeliest token; 1 samples as the model says.
        top_k: sample among the k likeliest only.
        top_p: sample among the likeliest only, as few as have this probability together.
        seed: of the samples.
        tokenizer: a folder with tokenizer.json, or with vocab.json and merges.txt; the model's own if not given.
    """

    folder: tyro.conf.Positional[str]
    prompt: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    tokens: int = 32
    budget: str | None = None
    host: str | None = None
    weights: Literal["int8", "int4"] | None = None
    batch: int | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    tokenizer: str | None = None

    @staticmethod
    def parse(arguments: Sequence[str]) -> "Generate":
        return tyro.cli(Generate, args=arguments, prog="cjax generate")

    def run(self) -> int:
        check_options(self, {"tokens": 0, "batch": 1, "top_k": 1, "seed": 0})
        if bool(self.prompt) == bool(self.ids):
            raise ValueError('give texts, --prompt "Once upon a time", or numbers, --ids "12 5 99"')
        if self.host is not None and self.budget is None:
            raise ValueError(f"--host {self.host} is room for what the device has none for: give --budget too")
        json = read_json(Path(self.folder))
        encode, decode = self._texts()
        prompts = [encode(text) for text in self.prompt or self.ids]
        ends = json.get("eos_token_id")
        # Some folders name one that is no token, for none.
        size = json.get("vocab_size", 2**31)
        stop = [end for end in (ends if isinstance(ends, list) else [ends]) if isinstance(end, int) and 0 <= end < size]
        with self._model() as model:
            for number, tokens in sorted(self._answers(model, prompts, stop).items()):
                print(decode(tokens), flush=True)
                if number + 1 < len(prompts):
                    print()
            if isinstance(model, StreamedModel):
                print(_told(model), file=sys.stderr)
        return 0

    def _texts(self) -> tuple[Callable[[str], np.ndarray], Callable[[Any], str]]:
        """Prompts to tokens, and tokens to text."""
        if self.ids:
            return _numbers, lambda tokens: " ".join(map(str, tokens))
        own = Path(self.folder)
        folder = Path(self.tokenizer) if self.tokenizer else own.parent if own.is_file() else own
        if (folder / "tokenizer.json").is_file() or folder.is_file():
            tokenizer = read_tokenizer(folder)
            return tokenizer.encode_prompt, lambda tokens: tokenizer.decode(tokens, skip_special=True)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            vocabulary = BPE(folder / "vocab.json", folder / "merges.txt")
            return lambda text: vocabulary.encode([text.encode()]).astype(np.int32), vocabulary.decode
        raise FileNotFoundError(
            f"{folder} has no tokenizer.json, and no vocab.json with merges.txt: name a folder that has, --tokenizer "
            'FOLDER, or give prompts as numbers, --ids "12 5 99"'
        )

    @contextlib.contextmanager
    def _model(self) -> Iterator[Any]:
        device = quiet_devices()[:1]
        if self.budget is None and self.weights is None:
            yield load(self.folder)
            return
        sizes = {"budget": self.budget, "host": self.host}
        plan = " ".join(f"{name}={size}" for name, size in sizes.items() if size is not None)
        with StreamedModel(self.folder, plan, weights=self.weights, devices=device) as model:
            yield model

    def _check_lengths(self, prompts: Sequence[np.ndarray], context: int | None) -> None:
        """Raises ValueError for a prompt that is empty, or longer than the model's context."""
        for text, tokens in zip(self.prompt or self.ids, prompts, strict=True):
            if not len(tokens):
                raise ValueError(f"the prompt {text!r} has no tokens, and a text begins with one: write a word into it")
            if context is not None and len(tokens) > context:
                start = text if len(text) <= 40 else f"{text[:40]}..."
                raise ValueError(
                    f"the prompt {start!r} has {len(tokens)} tokens, and this model's context {context}: give its end"
                )

    def _answers(self, model: Any, prompts: Sequence[np.ndarray], stop: Sequence[int]) -> dict[int, np.ndarray]:
        """The texts by the number of their prompt: prompts of one length go together."""
        decoder = model.texts.model() if isinstance(model, StreamedModel) else model
        is_t5 = isinstance(decoder, T5)
        self._check_lengths(prompts, None if is_t5 else decoder.config.context)
        seeds = itertools.count(self.seed)  # or two passes would draw the same numbers

        def rows(tokens: np.ndarray) -> np.ndarray:
            key = jax.random.key(next(seeds)) if self.temperature else None
            made = generate(
                model, tokens, self.tokens, key, temperature=self.temperature, top_k=self.top_k, top_p=self.top_p,
                stop=stop,
            )  # fmt: skip
            return np.asarray(made)

        found: dict[int, np.ndarray] = {}
        for length in dict.fromkeys(map(len, prompts)):
            numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
            made = _in_passes(rows, np.stack([prompts[number] for number in numbers]), self.batch)
            for number, text in zip(numbers, made, strict=True):
                found[number] = _ended(text, 1 if is_t5 else length, stop)[is_t5:]  # a T5's begins with its padding
        return found


def _numbers(text: str) -> np.ndarray:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() for word in words):
        raise ValueError(f'--ids {text!r}: give the numbers of tokens, such as "12 5 99"')
    numbers = list(map(int, words))
    if max(numbers) > np.iinfo(np.int32).max:
        raise ValueError(f"--ids {text!r}: {max(numbers)} is no token; the largest vocabularies have some 300,000")
    return np.array(numbers, np.int32)


def _in_passes(run: Continue, prompts: np.ndarray, most: int | None) -> list[np.ndarray]:
    """All rows, as many at once as fit a budget: nothing is computed before that is known."""
    num, found = min(most or len(prompts), len(prompts)), []
    while len(found) < len(prompts):
        try:
            found += list(run(prompts[len(found) : len(found) + num]))
        except TooLittle as error:
            if num == 1:
                raise
            num = -(-num // 2)
            print(f"{error}\n{num} prompt{'s' if num > 1 else ''} a pass instead.", file=sys.stderr)
    return found


def _ended(text: np.ndarray, length: int, stop: Sequence[int]) -> np.ndarray:
    """Without what repeats the token that ended it, and without that."""
    ends = np.flatnonzero(np.isin(text[length:], stop))
    return text[: length + ends[0]] if len(ends) else text


def _told(model: StreamedModel) -> str:
    weights = model.homes.get("weights", {})
    words = {"device": "on the device", "host": "in host memory", "folder": "read from the folder in every pass"}
    said = ", ".join(f"{num} {words[home]}" for home, num in weights.items() if num)
    return f"layers: {said}" if said else "nothing was computed"
