"""Continuing texts on one GPU, beside transformers: milliseconds a token, and the bytes that a token has to read.

    python experiments/bench_generate.py                            # every row and side, each in a process of its own
    python experiments/bench_generate.py --rows gpt2-xl --batches 1 --sides cjax torch
    python experiments/bench_generate.py --tiny                     # small sizes, on CPUs too: what the suite runs

Prompts of 128 random tokens are continued by 128, always the likeliest. A token takes what 128 take more than 1, over
127, so that neither the pass over the prompt nor compiling counts. Sides:

- cjax, cjax-16: `cjax.generate`, and with precision="bfloat16".
- folder-16: a `cjax.StreamedModel` of a folder in bfloat16, all of whose layers stay on the device.
- torch: transformers' `generate` in bfloat16, which most people call. Its steps are not compiled.

The floor is the bytes of weights, and of all keys and values at the middle of the text, over the card's bandwidth:
`--bandwidth`, 3.35 TB/s of an H100 if not given. Expected on an H200, with 4.8: the numbers of docs/gpu.md.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import cjax
from cjax.models import GPT, Llama, gpt, llama, save
from cjax.models.gpt import GPTConfig

SIDES = ("cjax", "cjax-16", "folder-16", "torch")
ROWS: dict[str, Any] = {
    "gpt2": gpt("gpt2"),
    "gpt2-xl": gpt("gpt2-xl"),
    "llama-1b": llama("llama-3.2-1b", context=4096),
}
TINY: dict[str, Any] = {
    "gpt": gpt("gpt-mini", num_layers=2, embed_dim=64, context=32),
    "llama": llama("llama-mini", num_layers=2, num_heads=4, embed_dim=64, context=32),
}
REPEATS = 5

Generate = Callable[[np.ndarray, int], Any]  # prompts and how many tokens to add; the whole texts


def model_of(config: Any) -> GPT | Llama:
    # Not in one jit: XLA takes the better part of a minute for all the random numbers of a Llama.
    return (GPT if isinstance(config, GPTConfig) else Llama)(config, rngs=nnx.Rngs(0))


def with_cjax(config: Any, precision: str) -> Generate:
    model = model_of(config)
    return lambda prompts, count: np.asarray(cjax.generate(model, prompts, count, temperature=0, precision=precision))


def from_folder(config: Any, folder: Path) -> Generate:
    graph, state = nnx.split(model_of(config))
    save(folder, nnx.merge(graph, jax.tree.map(lambda x: x.astype(jnp.bfloat16), state)))
    streamed = cjax.StreamedModel(folder)
    return lambda prompts, count: np.asarray(cjax.generate(streamed, prompts, count, temperature=0))


def with_torch(config: Any) -> Generate:
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {"vocab_size": config.vocab_size}
    if isinstance(config, GPTConfig):
        made = transformers.GPT2Config(
            n_embd=config.embed_dim, n_layer=config.num_layers, n_head=config.num_heads, n_positions=config.context,
            bos_token_id=None, eos_token_id=None, **sizes,
        )  # fmt: skip
    else:
        made = transformers.LlamaConfig(
            hidden_size=config.embed_dim, intermediate_size=config.mlp_dim, num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads, head_dim=config.width,
            max_position_embeddings=config.context, tie_word_embeddings=config.tied,
            bos_token_id=None, eos_token_id=None, pad_token_id=None, **sizes,
        )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16).to(device).eval()

    def run(prompts: np.ndarray, count: int) -> np.ndarray:
        given = torch.from_numpy(prompts.astype(np.int64)).to(device)
        with torch.inference_mode():
            made = model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=count, min_new_tokens=count,
                do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return made.cpu().numpy()

    return run


def measured(config: Any, side: str, batch: int, prompt: int, count: int) -> dict[str, Any]:
    """Seconds of a token, and of the first call with everything compiled."""
    with tempfile.TemporaryDirectory() as folder:
        makers: dict[str, Callable[[], Generate]] = {
            "cjax": lambda: with_cjax(config, "float32"),
            "cjax-16": lambda: with_cjax(config, "bfloat16"),
            "folder-16": lambda: from_folder(config, Path(folder)),
            "torch": lambda: with_torch(config),
        }
        run = makers[side]()
        prompts = np.random.default_rng(0).integers(0, config.vocab_size, (batch, prompt), dtype=np.int32)
        took: dict[int, float] = {}
        start = time.perf_counter()
        for tokens in (count, 1):
            text = run(prompts, tokens)
            assert text.shape == (batch, prompt + tokens), text.shape
            if tokens == count:
                first = time.perf_counter() - start
            seconds = []
            for _ in range(REPEATS):
                before = time.perf_counter()
                run(prompts, tokens)
                seconds.append(time.perf_counter() - before)
            took[tokens] = statistics.median(seconds)
    return {"token": (took[count] - took[1]) / (count - 1), "prompt": took[1], "first": first}


def read(config: Any, side: str, batch: int, length: int) -> int:
    """Bytes that a token reads: every weight that is multiplied by, and the keys and values before."""
    width = 4 if side == "cjax" else 2
    heads = getattr(config, "num_kv_heads", None) or config.num_heads
    past = 2 * batch * length * heads * (getattr(config, "head_dim", None) or config.embed_dim // config.num_heads)
    return width * (config.num_params + config.num_layers * past)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--bandwidth", type=float, default=3.35, help="of the card's memory, TB/s")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    table = TINY if options.tiny else ROWS
    prompt, count = (8, 8) if options.tiny else (128, options.tokens)
    if options.one:
        name, side, batch = options.one
        print(json.dumps(measured(table[name], side, int(batch), prompt, count)))
        return []
    results = []
    for name in options.rows or table:
        for batch in options.batches:
            for side in options.sides:
                command = [sys.executable, __file__, "--one", name, side, str(batch), "--tokens", str(options.tokens)]
                done = subprocess.run(
                    command + ["--tiny"] * options.tiny, capture_output=True, text=True, check=False
                )  # a process of its own: its memory is nobody else's
                head = f"{name:10} {side:10} batch {batch:3}"
                if done.returncode:
                    print(f"{head}  {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}", flush=True)
                    results.append({"row": name, "side": side, "batch": batch, "failed": done.stderr})
                    continue
                found = json.loads(done.stdout.splitlines()[-1])
                least = read(table[name], side, batch, prompt + count // 2) / (1e12 * options.bandwidth)
                results.append({"row": name, "side": side, "batch": batch, "floor": least, **found})
                print(
                    f"{head}  {1e3 * found['token']:7.3f} ms a token (floor {1e3 * least:.3f}), "
                    f"{batch / found['token']:8.0f} tokens/s, prompt {1e3 * found['prompt']:.1f} ms, "
                    f"first call {found['first']:.1f} s", flush=True,
                )  # fmt: skip
    return results


if __name__ == "__main__":
    main()
