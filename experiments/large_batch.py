"""Large batches: LAMB and LARS beside SGD and Adam at equal epochs, all trained through `cjax.parallelize`.

    python experiments/large_batch.py --data mnist.npz --text tinyshakespeare.txt     # what is kept in docs/results
    python experiments/large_batch.py                      # scikit-learn's digits; Python's own sources as the text
    python experiments/large_batch.py --tables-only --out FOLDER                      # tables and pictures again
    python experiments/large_batch.py --parts a --data mnist.npz --epochs 6 --optimizers lamb --batches 512 \\
        --rates 0.0075 0.015                                                          # how a rate was tuned

Parts: a, a small ViT, its test accuracy and the epochs to a target, at batches of 512 images to the whole set; b, an
encoder that fills in masked bytes (BERT's task), trained by LAMB at batches of 256 to 8,192 pieces of text and equal
samples. Rates were tuned at batch 512 in runs of 6 epochs, by test accuracy, and follow the batch by the usual rules;
those of LAMB and LARS up to a limit found at 8,192, see `large_batches/recipes.py`. Each run is kept in `results.jsonl`
of the folder `--out` as soon as it ends, and isn't done again. On 2 quiet CPU cores about 2 minutes a run of part a, 45
for all of them on MNIST, and 3 for part b.

Expected: in a, LAMB and LARS at batch 8,192 are within 0.3 points of themselves at 512 after 120 epochs (after 60 they
lack 0.4: a large batch needs the steps) and reach 97.2 to 97.5 % with the whole set in each of 120 steps. At 8,192 Adam
lacks 1 point, and SGD diverges. In b the loss grows with the batch, from 2.0 to 3.2 nats a byte: the same samples are
1,024 steps at batch 256 and 32 at 8,192, which is too few.
"""

import argparse
import datetime
import os
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    # Two devices share the cores with whatever else runs: one that waits long for the other's turn is not a deadlock.
    patience = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {patience}".strip()

from large_batches.data import VOCAB_SIZE, images, stripes, text
from large_batches.models import Encoder, ViT, image_loss, masked_loss
from large_batches.plots import write_plots
from large_batches.recipes import RECIPES
from large_batches.runs import Task, run
from large_batches.tables import write_tables
from shared.results import KEPT, Results

import cjax

FOLDER = Path(__file__).parent.parent / "docs" / "results"
IMAGE_BATCHES = (512, 2048, 8192, 16384)  # and the whole set
TEXT_BATCHES = (256, 1024, 4096, 8192)


def image_task(options: argparse.Namespace) -> tuple[Task, list[int]]:
    """Part a, and its batches: those that the data can fill, and all of it."""
    source = stripes() if options.tiny else images(options.data)
    epochs = options.epochs or source.epochs
    wanted = options.batches or ((64,) if options.tiny else (*IMAGE_BATCHES, len(source)))
    batches = sorted({min(batch, len(source)) for batch in wanted})
    model = ViT(source.patch, num_layers=1 if options.tiny else 2)
    return Task("a", model, image_loss, source, epochs * len(source), epochs, options.plan), batches


def text_task(options: argparse.Namespace) -> tuple[Task, list[int]]:
    """Part b, and its batches."""
    source = text(options.text, options.length, 64 if options.tiny else 4096)
    samples = 512 if options.tiny else options.samples
    batches = options.batches or ((64,) if options.tiny else TEXT_BATCHES)
    model = Encoder(VOCAB_SIZE, num_layers=1 if options.tiny else 2)
    return Task("b", model, masked_loss, source, samples, 8, options.plan), list(batches)


def train(results: Results, task: Task, batches: Sequence[int], options: argparse.Namespace, default: str) -> None:
    """Every optimizer at every batch with every seed; with `--rates`, these in place of the recipes'."""
    for name in options.optimizers or ("lamb" if options.tiny else default).split():
        for batch in batches:
            if not options.rates:
                for seed in range(options.seeds):
                    run(results, task, name, batch, seed, RECIPES[name].rate_at(batch))
            for rate in options.rates:
                run(results, task, name, batch, 0, rate)


def main(arguments: Sequence[str] | None = None) -> None:
    options = read_options(arguments)
    results = Results(options.out / "results.jsonl")
    if not options.tables_only:
        if not options.here:
            cjax.simulate(cjax.Plan.parse(options.plan).num_devices)
        if "a" in options.parts:
            train(results, *image_task(options), options, " ".join(RECIPES))
        if "b" in options.parts:
            train(results, *text_task(options), options, "lamb")
    print(write_tables(results, options.out))
    write_plots(results, options.out)


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="ab", help="of a, b")
    parser.add_argument("--data", type=Path, help="MNIST as .npz with x_train, y_train, x_test, y_test")
    parser.add_argument("--text", type=Path, help="a text file or a folder of them")
    parser.add_argument("--optimizers", nargs="+", choices=RECIPES, help="all of them in part a, lamb in part b")
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="peak rates to try in place of the recipes'")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each, with seeds 0, 1, ...")
    parser.add_argument("--epochs", type=int, help="of part a")
    parser.add_argument("--samples", type=int, default=2**18, help="of part b")
    parser.add_argument("--length", type=int, default=16, help="bytes of a sample in part b")
    parser.add_argument("--plan", default="data=2", help="for every run; micro-batches are added to it")
    parser.add_argument("--here", action="store_true", help="on this machine's devices, not on virtual ones")
    parser.add_argument("--tiny", action="store_true", help="images of stripes and few samples, to see that it runs")
    parser.add_argument("--tables-only", action="store_true", help="of the rows that are there; trains nothing")
    parser.add_argument("--out", type=Path, default=KEPT / f"large_batch-{datetime.date.today()}")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
