"""Texts of a model that fits in no memory that it is given: how fast, what is read, and what the process holds at most.

A folder of random weights is written once, and each row of the table is a process of its own that reads nothing else.
"""

import functools
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from shared.results import Results, Row

import cjax
from cjax.models import GPT, gpt, load, save
from cjax.walk.moving import MovedRows

SIZES: Mapping[str, Any] = dict(num_layers=32, num_heads=6, embed_dim=384, context=64, vocab_size=512)
PROMPT, TOKENS = 16, 9  # the first pass over the prompt, and eight of one token each
MIB = 2**20


def write(folder: Path, sizes: Mapping[str, Any]) -> int:
    """A model's folder; the bytes of its weights."""
    config = gpt("gpt-mini", **sizes)
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def numbers(path: Sequence[Any], x: Any) -> Any:
        """Attention is so sharp that a text doesn't come to one token for ever, whatever went before."""
        spread = x.size**-0.25 if len(x.shape) > 1 else 0.1
        made = rng.normal("scale" in path, spread * (3 if "attention" in path else 1), x.shape)
        return x.replace(made.astype(np.float32))

    drawn = nnx.from_flat_state([(path, numbers(path, x)) for path, x in nnx.to_flat_state(state)])
    save(folder, nnx.merge(graph, drawn), max_bytes=64 * MIB)
    return 4 * config.num_params


def alone(folder: str, plan: str, weights: str | None, rows: int) -> None:
    """What a process of its own does: one line of JSON."""
    prompt = np.random.default_rng(1).integers(0, SIZES["vocab_size"], (rows, PROMPT)).astype(np.int32)
    jax.block_until_ready(jax.jit(lambda x: x @ x)(np.ones((64, 64), np.float32)))
    before = _peak()
    model: Any = load(folder) if plan == "none" else cjax.StreamedModel(folder, plan, weights=weights)

    def text() -> np.ndarray:
        return np.asarray(cjax.generate(model, prompt, TOKENS, temperature=0))

    held, fetch = [_on_devices()], MovedRows.fetch

    def watched(self: MovedRows, layer: int) -> Any:
        row = fetch(self, layer)
        held.append(_on_devices())
        return row

    MovedRows.fetch = watched
    text()  # compiles
    MovedRows.fetch = fetch
    read, began = _read(), time.perf_counter()
    tokens = text()
    seconds = time.perf_counter() - began
    homes = model.homes if isinstance(model, cjax.StreamedModel) else {}
    row = {
        "seconds_a_pass": round(seconds / TOKENS, 4),
        "tokens_a_second": round(rows * TOKENS / seconds, 2),
        "load": round(os.getloadavg()[0], 1),
        "read_a_pass": (_read() - read) // TOKENS,
        "device": max(held),
        "rss": _peak() - before,
        "homes": homes,
        "tokens": hashlib.sha256(tokens.tobytes()).hexdigest()[:16],
        "kinds": len(np.unique(tokens[:, -TOKENS:])),
    }
    print(json.dumps(row))


def _on_devices() -> int:
    """Bytes of arrays, those in host memory aside."""
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted() and x.sharding.memory_kind == "device")


def _peak() -> int:
    """The most that this process has had in memory, in bytes. `getrusage` begins with the parent's."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def _read() -> int:
    """Bytes that this process has read from files, whether they were in the system's memory already or not."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def measured(folder: Path, plan: str, weights: str | None, rows: int) -> Row:
    """A row of the table, from a process of its own."""
    command = [sys.executable, "-m", "offloads.generation", str(folder), plan, weights or "none", str(rows)]
    place = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([place, os.environ.get("PYTHONPATH", "")])}
    environment |= {"JAX_PLATFORMS": "cpu"}  # on which the bandwidth is measured
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def bandwidth(folder: Path) -> float:
    """Bytes a second with which this machine reads the folder's files, once they have been read."""
    data, rates = bytearray(8 * MIB), []
    for _ in range(3):
        began, size = time.perf_counter(), 0
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb", buffering=0) as opened:
                while num := opened.readinto(data):
                    size += num
        rates.append(size / (time.perf_counter() - began))
    return max(rates)


def generation(results: Results, folder: Path) -> None:
    """All rows, and the table of them; folders of weights are written into `folder`."""
    few, many = folder / "few", folder / "many"
    total = write(few, SIZES)
    write(many, {**SIZES, "num_layers": 2 * SIZES["num_layers"]})
    tenth = f"{total // 10 // MIB}MiB"
    rate = results.get({"part": "generation", "what": "bandwidth"}, lambda: {"rate": bandwidth(few)})["rate"]
    little = f"budget={tenth} host={tenth}"
    cases: list[tuple[Path, str, str | None, int]] = [(few, "none", None, 8), (few, little, None, 8)]
    if importlib.util.find_spec("qwix"):
        cases += [(few, plan, kind, 8) for kind in ("int8", "int4") for plan in ("budget=8GiB", little)]
    # Twice the layers have twice the keys and values, for which the device has no more room.
    cases += [(many, f"budget={tenth} host={2 * total // 10 // MIB}MiB", None, 8)]
    # Four times the prompts take a seventh: two layers with their keys and values.
    cases += [(few, "none", None, 32), (few, f"budget={total // 7 // MIB}MiB", None, 32)]
    rows = []
    for weights_in, plan, weights, num in cases:
        layers = SIZES["num_layers"] * (2 if weights_in is many else 1)
        key = {"part": "generation", "plan": plan, "weights": weights, "prompts": num, "layers": layers}
        made = results.get(key, functools.partial(measured, weights_in, plan, weights, num))
        rows.append({**made, "floor": made["read_a_pass"] / rate})
    print(table(rows, total))


def table(rows: Sequence[Row], total: int) -> str:
    """Rows as Markdown; tokens are compared with those of the first row of the same weights and prompts."""
    lines = [
        f"Weights of {total / MIB:.0f} MiB in {SIZES['num_layers']} layers. Read is what a pass reads of the folder; "
        "its floor is that over the bandwidth of reading files that the system has in memory. On device: arrays that "
        "are there at any layer, at most. More: what the process takes at most beside what it took at its start. Load: "
        "how many programs wanted the machine's cores on average; seconds of rows where they were more than it has say "
        "little.",
        "",
        "| plan | layers | weights | prompts | MiB on device | MiB read a pass | MiB more | s a pass | floor s | "
        "tokens/s | load | tokens |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    first: dict[Any, Any] = {}
    for row in rows:
        alike = row["weights"], row["prompts"], row["layers"]
        same = "" if alike not in first else "same" if first[alike] == row["tokens"] else "OTHERS"
        first.setdefault(alike, row["tokens"])
        lines.append(
            f"| {row['plan']} | {row['layers']} | {row['weights'] or 'float32'} | {row['prompts']} | "
            f"{row['device'] / MIB:.0f} | {row['read_a_pass'] / MIB:.0f} | {row['rss'] / MIB:.0f} | "
            f"{row['seconds_a_pass']:.3f} | {row['floor']:.3f} | {row['tokens_a_second']:.1f} | "
            f"{row['load']:.0f} | {same} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    folder, plan, weights, rows = sys.argv[1:]
    alone(folder, plan, None if weights == "none" else weights, int(rows))
