"""Rows of published_runs.csv as what the planner reads: work, split, table, hardware, and what the software does."""

import csv
import dataclasses
import functools
import math
import re
from pathlib import Path

from cjax.plan import Plan
from cjax.planner.costs.transformer import Decoder, Sharing, split_of_decoder, work_of_decoder
from cjax.planner.hardware import Hardware
from cjax.planner.table import PlanTable
from cjax.planner.work import Work, WorkSplit
from published.facts import Facts, facts_of
from published.models import decoder_of

ROWS = Path(__file__).parent / "published_runs.csv"

Row = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Args:
      line: of the file, its head being 1.
      facts: card, software, kernels.
      decoder, spread, plan: model and plan; of the plan the words that a table has.
      batch, positions: of a step.
      gpus: devices.
      rate: tokens/s of a device, as published.
    """

    line: int
    facts: Facts
    decoder: Decoder
    spread: Sharing
    plan: Plan
    batch: int
    positions: int
    gpus: int
    rate: float

    @property
    def step(self) -> float:
        """Seconds."""
        return self.batch * self.positions / (self.rate * self.gpus)

    @functools.cached_property
    def work(self) -> Work:
        return work_of_decoder(self.decoder, self.batch, self.positions, self.spread)

    @functools.cached_property
    def split(self) -> WorkSplit:
        return split_of_decoder(self.decoder, self.work, self.spread)

    @property
    def table(self) -> PlanTable:
        return PlanTable.of([self.plan])

    @property
    def hardware(self) -> Hardware:
        return self.facts.hardware(self.gpus)

    @property
    def setting(self) -> tuple[object, ...]:
        """What plans are compared for: model, batch, devices, software."""
        return (
            self.facts.system,
            self.facts.source,
            self.decoder,
            self.batch,
            self.positions,
            self.gpus,
            self.facts.is_float8,
        )


def read(path: Path = ROWS, guesses: bool = False) -> tuple[list[Run], dict[str, int]]:
    """All rows that say enough, and why the others do not; `guesses` as in `facts_of`."""
    runs, left_out = [], {}
    with path.open() as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            found = run_of(line, row, guesses)
            if isinstance(found, Run):
                runs.append(found)
            else:
                left_out[found] = left_out.get(found, 0) + 1
    return runs, left_out


def run_of(line: int, row: Row, guesses: bool = False) -> Run | str:
    """A row, or what it lacks."""
    facts = facts_of(row, guesses)
    if isinstance(facts, str):
        return facts
    decoder = decoder_of(row)
    if decoder is None or not row["seq_len"]:
        return "shapes of the model"
    if not row["gpus"] or not row["tp"] or not row["pp"]:
        return "plan"
    if "LoRA" in row["notes"]:
        return "trains adapters alone"
    gpus, positions = int(row["gpus"]), int(row["seq_len"])
    tensor, pipeline, context = (int(row[name] or 1) for name in ("tp", "pp", "cp"))
    data = gpus // (tensor * pipeline * context)
    if data != int(row["dp"] or data):
        return "sizes that multiply to the devices"
    micro = facts.micro_batch or int(row["micro_batch"] or 0)
    batch = int(row["global_batch"] or 0) or micro * data
    micro = micro or (batch // (data * facts.microbatches) if facts.microbatches else 0)
    if not batch:
        return "batch"
    micro = micro or (1 if pipeline > 1 or batch < data * 16 or facts.system == "NeMo" else 0)
    if not micro:
        return "micro-batch"
    microbatches = max(1, round(batch / (data * micro)))
    batch = batch if batch % (data * microbatches) == 0 else data * microbatches * micro
    rate = facts.scale * _rate(row, decoder, positions, facts)
    if not rate:
        return "rate"
    spread = Sharing(tensor, "sp" in row["tp_mode"] and tensor > 1, context)
    plan = _plan(row, facts, data, pipeline, microbatches, decoder.layers)
    return Run(line, facts, decoder, spread, plan, batch, positions, gpus, rate)


def _rate(row: Row, decoder: Decoder, positions: int, facts: Facts) -> float:
    """Tokens/s of a device: as printed, or from FLOP/s by the formula of those who print them."""
    if row["tokens_per_s_per_gpu"]:
        return float(row["tokens_per_s_per_gpu"])
    if row["step_time_s"] and row["global_batch"]:
        return int(row["global_batch"]) * positions / float(row["step_time_s"]) / int(row["gpus"])
    if not row["tflops_per_gpu"] or not facts.flops:
        return 0.0
    h, layers, s = decoder.hidden, decoder.layers, positions
    if facts.flops == "megatron":
        each = 96 * layers * h**2 * (1 + s / (6 * h) + decoder.vocab / (16 * layers * h))
    else:
        matrices = decoder.layers * decoder.layer_parameters + decoder.vocab * h
        each = 6 * matrices + 12 * layers * s * h * (0.5 if facts.flops == "causal" else 1.0)
    return float(row["tflops_per_gpu"]) * 1e12 / each


def _plan(row: Row, facts: Facts, data: int, pipeline: int, microbatches: int, layers: int) -> Plan:
    words = [f"data={data}", "precision=bfloat16", f"microbatches={microbatches}"]
    if pipeline > 1:
        words.append(f"pipeline={_schedule(row, facts, pipeline, microbatches, layers)}")
    zero, group = _zero(row, facts, data)
    words.append(f"zero={zero}" + (f"/{group}" if group and group < data else "") if data > 1 else "")
    remat = {"full": "block", "selective": "dots", "selective per-op": "dots", "minimal_flash": "dots"}
    words.append(f"remat={remat.get(facts.recompute or row['recompute'], 'none')}")
    return Plan.parse(" ".join(words))


def _schedule(row: Row, facts: Facts, pipeline: int, microbatches: int, layers: int) -> str:
    text = row["schedule"]
    if text.startswith("ZB"):
        return f"zero_bubble:{pipeline}" + ("/2" if text == "ZB-2p" else "")
    chunks = facts.chunks
    if found := re.search(r"VP=(\d+)|\((\d+) chunks", text):
        # NeMo's VP is the number of chunks, except where so many do not fit.
        chunks = int(found[1] or found[2])
    elif text == "1F1B-I":
        chunks = math.ceil((layers + 2) / pipeline)
    if chunks > 1 and microbatches % pipeline == 0:
        return f"interleaved:{pipeline}/{chunks}"
    return f"1f1b:{pipeline}"


def _zero(row: Row, facts: Facts, data: int) -> tuple[int, int]:
    text = row["zero"]
    if facts.zero is not None:
        return facts.zero, 0
    if found := re.match(r"1 \(group (\d+)\)", text):
        return 1, int(found[1])
    if text.startswith("HSDP"):
        return 3, 8
    if text == "FSDP SHARD_GRAD_OP":
        return 2, 0
    if "distributed optimizer" in text or text.startswith("FSDP (optimizer"):
        return 1, 0
    if text.startswith(("FSDP", "Megatron-FSDP")):
        return 3, 0
    return int(text[0]) if text[:1].isdigit() else 0, 0
