"""1D, 2D, 2.5D and 3D tensor parallelism and sequence parallelism beside each other.

    python experiments/tensor_parallel.py                     # parts a, b, c: compiled for absent H100s (`cjax[aot]`)
    python experiments/tensor_parallel.py --timed             # part d: step times on 8 virtual CPU devices
    python experiments/tensor_parallel.py --parts b --plans 2.5d --out tp

Parts: a, what each mode moves, holds and takes for layers of three widths, beside the formulas; b, the largest batch
that fits; c, BERT's largest batch and longest sequence under sequence parallelism; d, wall time beside the same layers
written with GSPMD's constraints alone. Each row is kept in `results.jsonl` of the folder `--out` as soon as it is
known, and isn't computed again; tables and pictures are made of all that is there. A compilation takes 5 to 30 s:
about 10 minutes for a, 15 for b, 30 for c on 2 cores; d takes 3 on 2 quiet ones.
Expected: at width 8192 1D moves fewer elements than any grid up to 8 devices, 2D as many at 16, 3D a third at 64; a
ViT's largest batch on 64 devices is 12 times that of 1D in any other mode; BERT's longest sequence under
`sequence=gather` 1.6 to 3.5 times that of 1D, under a ring up to 2.5 times.
"""

import argparse
import datetime
import functools
from dataclasses import replace
from pathlib import Path

import jax

if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)

from shared.results import KEPT, Results, Row
from tensor_modes.measure import largest, measure
from tensor_modes.models import Case
from tensor_modes.plots import write_plots
from tensor_modes.tables import write_tables
from tensor_modes.timed import GSPMD, SIZES, counted, timed

# 4 layers: they are one loop, so bytes and arithmetic of more are these times more.
LAYERS = {
    "GPT-3-like": Case("GPT-3-like", "blocks", width=8192, heads=64, layers=4, length=1024, batch=16),
    "GPT-2-like": Case("GPT-2-like", "blocks", width=1024, heads=16, layers=4, length=512, batch=16),
    "ViT-like": Case("ViT-like", "vit", width=1280, heads=16, layers=4, length=256, batch=32),
}
MODES = [
    "tensor=4", "tensor=2d:4",
    "tensor=8", "tensor=2.5d:8/2", "tensor=3d:8",
    "tensor=16", "tensor=2d:16", "tensor=2.5d:16/4",
    "tensor=64", "tensor=2d:64", "tensor=2.5d:64/4", "tensor=3d:64",
]  # fmt: skip
# 64 devices in one grid, or as copies of a host's 8.
COPIES = ["tensor=64", "tensor=2d:64", "tensor=3d:64", "data=8 tensor=8 zero=1", "data=8 tensor=3d:8 zero=1"]
BY_HAND = ["tensor=4", "tensor=2d:4", "tensor=2.5d:8/2", "tensor=3d:8", "tensor=2d:16", "tensor=3d:64"]

GPT3 = Case("GPT", "gpt", width=8192, heads=64, layers=24, length=1024, batch=1, vocab=51200)
VIT = Case("ViT", "vit", width=4096, heads=64, layers=24, length=256, batch=1)
BERT = Case("BERT", "bert", width=1024, heads=16, layers=24, length=512, batch=64, vocab=30592)
# case, plan, the batch's unit, two batches to start from
BATCHES = [
    (VIT, "tensor=64", 1, (512, 1024)),
    (VIT, "tensor=2d:64", 8, (4096, 8192)),
    (VIT, "tensor=2.5d:64/4", 16, (4096, 8192)),
    (VIT, "tensor=3d:64", 16, (4096, 8192)),
    (GPT3, "tensor=16", 1, (32, 64)),
    (GPT3, "tensor=2d:16", 4, (128, 256)),
    (GPT3, "tensor=2.5d:16/4", 8, (8, 16)),
    (GPT3, "tensor=2.5d:16/4 zero=3", 8, (128, 256)),
    (GPT3, "tensor=64", 1, (64, 128)),
    (GPT3, "tensor=2d:64", 8, (512, 1024)),
    (GPT3, "tensor=2.5d:64/4", 16, (512, 1024)),
    (GPT3, "tensor=3d:64", 16, (512, 1024)),
]
SEQUENCES = ["tensor={}", "sequence=ring:{}", "sequence=all_to_all:{}", "tensor={} sequence=gather"]


def layers(results: Results, wanted: str) -> None:
    """Part a: bytes, partners, memory and floors of every mode, of copies, and of GSPMD's own form of the layers."""
    for case in LAYERS.values():
        for plan in MODES:
            if wanted in plan:
                measure(results, "a", case, plan)
    for batch in (16, 128):
        for plan in COPIES:
            if wanted in plan:
                measure(results, "a: copies", replace(LAYERS["GPT-3-like"], batch=batch), plan)
    for plan in BY_HAND:
        if wanted in plan:
            counted(results, LAYERS["GPT-3-like"], plan)


def batches(results: Results, wanted: str) -> None:
    """Part b: the largest batch that fits an H100."""
    for case, plan, unit, starts in BATCHES:
        if wanted in plan:
            search(results, "b", case, "batch", plan, unit, starts)


def sequences(results: Results, wanted: str) -> None:
    """Part c: a step of BERT, its largest batch at 512 tokens, and longest sequence at batch 64."""
    for num_devices in (4, 8, 16):
        for plan in (text.format(num_devices) for text in SEQUENCES):
            if wanted in plan:
                measure(results, "c", BERT, plan)
                search(results, "c", BERT, "batch", plan, 1, (512, 1024))
                search(results, "c", BERT, "length", plan, 64, (4096, 8192))


def search(results: Results, part: str, case: Case, field: str, plan: str, unit: int, starts: tuple[int, int]) -> Row:
    """The largest value of one field of the case that fits, kept as a row of its own."""

    def peak_at(size: int) -> Row:
        return measure(results, part, replace(case, **{field: size}), plan)

    key = {"part": f"{part}: largest", "name": case.name, "field": field, "plan": plan}
    row = results.get(key, functools.partial(largest, peak_at, unit, starts, max_compiles=6))
    print(f"{case.name:10s} {plan:28s} largest {field}: {row['fits']} fits, {row['fails']} does not", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="abc", help="of a, b, c; none with --parts ''")
    parser.add_argument("--plans", default="", help="only plans whose text contains this")
    parser.add_argument("--timed", action="store_true", help="part d, alone: step times on virtual CPU devices")
    parser.add_argument("--rounds", type=int, default=11, help="steps of each program in part d")
    parser.add_argument("--out", type=Path, default=KEPT / f"tensor_parallel-{datetime.date.today()}")
    options = parser.parse_args()
    results = Results(options.out / "results.jsonl")
    if options.timed:
        for plan in GSPMD:
            if options.plans in plan:
                timed(results, SIZES, plan, options.rounds)
    else:
        for part, run in (("a", layers), ("b", batches), ("c", sequences)):
            if part in options.parts:
                run(results, options.plans)
    print(write_tables(results, options.out))
    write_plots(results, options.out)


if __name__ == "__main__":
    main()
