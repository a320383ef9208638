"""LoRA under any plan: a Llama learns one text, then adapters of low rank learn another while all else is frozen.

    python experiments/finetune_llama.py --data tinyshakespeare.txt --compare            # what is kept in docs/results
    python experiments/finetune_llama.py                  # the second text: what installed packages say of themselves
    python experiments/finetune_llama.py --weights FOLDER --plan "zero=3 precision=bfloat16"    # a Llama of your own
    python experiments/finetune_llama.py --plan "data=2 tensor=2 zero=1" --rank 4 --layers query value

Without `--weights`, a folder in Hugging Face's form, a Llama of 0.8 million parameters first learns the sources of
Python's standard library. The adapters are Flax's `nnx.LoRA`, and `wrt=nnx.LoRAParam` is all that cjax is told. At the
end they are merged into plain weights, saved in Hugging Face's form and read back. `--compare` trains the first steps
again under five plans.

6 to 7 minutes on 2 quiet CPU cores, 3 of them for `--compare`.

Expected: the loss on the held-out tenth of tinyshakespeare falls from 2.85 to 1.90 nats a byte; not a bit of the frozen
weights changes; merging changes no logit by more than rounding; the losses of each step under all plans agree to 1e-3
(they do to 6e-6).
"""

import argparse
import importlib.metadata
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from training.lora import LAYERS, adapt, merge
from training.runs import Clock, adamw, devices_for, devices_of, make_parser

import cjax
from cjax.data import Bytes, TextData, read_tokenizer, text_data
from cjax.models import Llama, LlamaConfig, config_of, llama_loss, load, save
from cjax.train import fit

PLANS = ("data=1", "data=2 tensor=2 zero=1", "data=2 tensor=2d:4", "zero=3", "pipeline=1f1b:2 microbatches=4 data=2")
TOLERANCE = 1e-3


def packages() -> list[bytes]:
    """What the installed packages say of themselves: real text that is on every machine with JAX."""
    found = sorted(importlib.metadata.distributions(), key=lambda each: each.name.lower())
    return [text.encode() for each in found if (text := each.read_text("METADATA"))]


def read_text(options: argparse.Namespace) -> TextData:
    """The text that the adapters learn; its last tenth is held out."""
    place = options.tokenizer or options.weights
    has_one = options.tokenizer or (place and (place / "tokenizer.json").is_file())
    vocabulary = read_tokenizer(place) if has_one else Bytes()
    sizes = dict(batch_size=options.batch, sequence=options.seq, seed=options.seed)
    if options.data is not None:
        return text_data(options.data, vocabulary=vocabulary, held_out=0.1, **sizes)
    tokens = vocabulary.encode(packages())
    split = len(tokens) * 9 // 10
    return TextData(tokens[:split], tokens[split:], vocabulary, **sizes)


def train_base(folder: Path, options: argparse.Namespace, devices: Sequence[Any]) -> None:
    """A small Llama that has learned Python, saved in Hugging Face's form."""
    data = text_data(batch_size=options.batch, sequence=options.seq, held_out=0.05, seed=options.seed)
    size = (2, 2, 1, 32, 64) if options.tiny else (4, 4, 2, 128, 352)
    config = LlamaConfig(*size, context=options.seq, vocab_size=data.vocab_size)
    tx = adamw(options.base_rate, options.base_steps, warmup=options.base_steps // 20)
    program = cjax.parallelize(
        lambda rngs: Llama(config, rngs=rngs), llama_loss, tx, next(data.batches()), options.plan, devices=devices
    )
    print(f"first a Llama of {config.num_params:,} parameters learns {len(data.train):,} bytes of Python")
    result = fit(program, data, steps=options.base_steps, seed=options.seed, log_every=50)
    print(f"its loss there: {score(program, result.state, data):.4f} nats a byte")
    save(folder, program.model(result.state))


def make_program(
    config: LlamaConfig, data: TextData, options: argparse.Namespace, plan: str, devices: Sequence[Any]
) -> cjax.Program:
    """Adapters and nothing else are trained, under `plan`."""

    def build(rngs: nnx.Rngs) -> Llama:
        return adapt(Llama(config, rngs=rngs), options.rank, options.alpha, options.layers, rngs=rngs)

    tx = adamw(options.rate, options.steps, warmup=options.steps // 20, decay=0.0)
    return cjax.parallelize(build, llama_loss, tx, next(data.batches()), plan, wrt=nnx.LoRAParam, devices=devices)


def score(program: cjax.Program, state: cjax.State, data: TextData) -> float:
    """Nats a token on up to 32 batches of held-out text."""
    return float(program.evaluate(state, data.validation(32))["loss"])


def frozen(program: cjax.Program, state: cjax.State) -> dict[str, np.ndarray]:
    """The weights that `wrt` leaves out, by path."""
    state_of_model = nnx.state(program.model(state), nnx.Not(nnx.LoRAParam))
    return {"/".join(map(str, path)): np.array(leaf[...]) for path, leaf in nnx.to_flat_state(state_of_model)}


def finetune(base: Path, options: argparse.Namespace, devices: Sequence[Any]) -> Llama:
    """The Llama in `base` with trained adapters."""
    data, config = read_text(options), config_of(base)
    program = make_program(config, data, options, options.plan, devices)
    state = program.init(options.seed, params=base)
    plain = cjax.parallelize(
        lambda rngs: Llama(config, rngs=rngs), llama_loss, None, next(data.batches()), options.plan, devices=devices
    )
    before, unadapted = score(program, state, data), score(plain, plain.init(params=base), data)
    weights = frozen(program, state)
    num_trained = sum(leaf.size for leaf in jax.tree.leaves(program.params(state)))
    memory = program.report().memory
    print(
        f"adapters of rank {options.rank} in {', '.join(options.layers)}: {num_trained:,} parameters are trained, "
        f"{num_trained / config.num_params:.1%} of {config.num_params:,}; plan {program.plan}\n"
        f"optimizer state: {memory.optimizer:,} bytes a device, gradients {memory.grads:,}; "
        f"all parameters would need {8 * config.num_params:,} and {4 * config.num_params:,} on one\n"
        f"loss on held-out text before: {before:.6f}; without adapters {unadapted:.6f}"
    )
    result = fit(
        program, data, steps=options.steps, state=None if options.resume else state, folder=options.folder,
        resume=options.resume, seed=options.seed, evaluate_every=options.steps // 4, log_every=50,
        validation=lambda: data.validation(32),
    )  # fmt: skip
    after = frozen(program, result.state)
    changed = [name for name, value in weights.items() if value.tobytes() != after[name].tobytes()]
    print(
        f"loss on held-out text after {result.step} steps: {score(program, result.state, data):.4f} nats a token\n"
        f"frozen weights that changed: {len(changed)} of {len(weights)} {' '.join(changed)}"
    )
    if changed or weights.keys() != after.keys():
        raise SystemExit("frozen weights should be as they were, to the last bit")
    return program.model(result.state)


def compare(base: Path, options: argparse.Namespace, devices: Sequence[Any]) -> float:
    """The first steps again under each plan; the largest difference of a step's loss from one device's."""
    data, config = read_text(options), config_of(base)
    losses: dict[str, np.ndarray] = {}
    largest = 0.0
    for plan in options.compare:
        program = make_program(config, data, options, plan, devices_for(plan, devices))
        state = program.init(options.seed, params=base)
        found = []
        for _, batch in zip(range(options.compare_steps), data.batches(), strict=False):
            state, metrics = program.step(state, batch)
            found.append(float(metrics["loss"]))
        losses[plan] = np.array(found)
        difference = float(np.abs(losses[plan] - losses[options.compare[0]]).max())
        largest = max(largest, difference)
        memory = program.report().memory
        print(
            f"  {plan:46s} on {program.mesh.size}: loss {found[0]:.6f} to {found[-1]:.6f}, at most {difference:.1e} "
            f"from the first plan; optimizer {memory.optimizer:,} bytes a device, parameters {memory.params:,}",
            flush=True,
        )
    if not largest <= TOLERANCE:
        raise SystemExit(f"losses under these plans differ by {largest:.1e}, more than {TOLERANCE}")
    return largest


def keep(adapted: Llama, folder: Path) -> None:
    """Merges the adapters, saves plain weights, reads them back and compares logits."""
    graph, state = nnx.split(adapted)  # on one device, where equal weights give equal logits
    adapted = nnx.merge(graph, jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), state))
    merged = merge(adapted)
    save(folder, merged)
    tokens = np.random.default_rng(0).integers(0, adapted.config.vocab_size, (4, min(64, adapted.config.context)))
    before, after, again = (np.asarray(model(jnp.asarray(tokens))) for model in (adapted, merged, load(folder, Llama)))
    difference = np.abs(before - after).max()
    print(
        f"merged and saved in Hugging Face's form; logits up to {np.abs(before).max():.1f}, merging changes them by at "
        f"most {difference:.1e}, saving and loading by {np.abs(after - again).max():.1e}"
    )
    if not difference <= 1e-4 * np.abs(before).max() or not np.array_equal(after, again):
        raise SystemExit("the merged model should give the same logits")


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    clock = Clock()
    devices = devices_of([options.plan, *options.compare], options.devices)
    mine = devices_for(options.plan, devices)
    with tempfile.TemporaryDirectory() as made:
        base = options.weights or Path(made) / "base"
        if options.weights is None:
            train_base(base, options, mine)
        keep(finetune(base, options, mine), options.out or Path(made) / "merged")
        if options.compare:
            print(f"the first {options.compare_steps} steps under {len(options.compare)} plans:")
            print(f"largest difference of a step's loss: {compare(base, options, devices):.1e}")
    print(f"all of this took {clock}")


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, steps=600, rate=3e-3, disk=False)  # each run begins with weights anew
    parser.add_argument("--weights", type=Path, help="the Llama to start from; a small one is trained if not given")
    parser.add_argument("--data", type=Path, help="the text to learn; the metadata of installed packages if not given")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; that of --weights if not given, else bytes")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    parser.add_argument("--base-steps", type=int, default=1000)
    parser.add_argument("--base-rate", type=float, default=2e-3)
    parser.add_argument("--compare", nargs="*", metavar="PLAN", default=(), help="plans; five of them if none is named")
    parser.add_argument("--compare-steps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="where the merged weights go; nowhere if not given")
    options = parser.parse_args(arguments)
    options.compare = PLANS if options.compare == [] else options.compare
    if options.tiny:
        options.steps, options.base_steps, options.compare_steps, options.rank = 16, 16, 3, 2
    return options


if __name__ == "__main__":
    main()
