"""What a step compiled for a GPU that is not here shows: its attention, its logits, its matmuls, its memory."""

import re
from dataclasses import dataclass
from typing import Any

import optax

import cjax
from cjax.mesh import compile_lowered

from .models import Row

MADE = re.compile(r"%([\w.\-]+) = \(?(\w+)\[([\d,]*)\]")
MATMUL = re.compile(r"%[\w.\-]+ = .*?(?: dot|custom-call)\(([^)]*)\)")


@dataclass(frozen=True)
class Check:
    """kernels: names of attention kernels; float32: matmuls with an operand in float32; largest: elements of the
    largest array with a dim of the vocabulary; memory: bytes of state (with gradients), of Megatron's formula, peak."""

    kernels: tuple[str, ...]
    float32: int
    largest: int
    state: int
    formula: int
    peak: int

    def problems(self, row: Row, batch: int) -> list[str]:
        found = []
        if not any(name.endswith("Backward") for name in self.kernels):
            found.append("attention is not a flash kernel")
        if self.float32:
            found.append(f"{self.float32} matmuls in float32")
        if row.kind != "vit" and self.largest >= batch * row.seq * row.config.vocab_size:
            found.append("logits are whole")
        if self.peak > self.state + 1.1 * self.formula:
            found.append("peak is above state + formula + 10 %")
        return found


def check(row: Row, batch: int, plan: str, devices: str) -> Check:
    """One compilation."""
    program = cjax.parallelize(
        row.build, row.loss, optax.adamw(1e-4), row.shapes(batch), f"{plan} precision=bfloat16", devices=devices
    )
    compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
    text, sizes = compiled.as_text(), compiled.memory_analysis()
    params = 4 * row.config.num_params
    return Check(
        tuple(sorted(set(re.findall(r"__cudnn\$(fmha\w+)", text)))),
        _float32_matmuls(text),
        _largest(text, getattr(row.config, "vocab_size", 0)),
        sizes.argument_size_in_bytes + params,
        row.activation_bytes(batch),
        sizes.peak_memory_in_bytes,
    )


def _float32_matmuls(text: str) -> int:
    dtypes = {name: dtype for name, dtype, _ in MADE.findall(text)}
    found = 0
    for line in text.splitlines():
        is_matmul = " dot(" in line or "__cublas$" in line
        made = MATMUL.search(line) if is_matmul else None
        operands: list[Any] = re.findall(r"%([\w.\-]+)", made[1])[:2] if made else []
        found += any(dtypes.get(name) == "f32" for name in operands)
    return found


def _largest(text: str, vocab: int) -> int:
    """Elements of the largest array whose last dim is the vocabulary, a few classes more for odd sizes."""
    found = 0
    for _, _, dims in MADE.findall(text):
        sizes = [int(size) for size in dims.split(",") if size]
        if sizes and vocab and vocab <= sizes[-1] <= vocab + 64:
            size = 1
            for one in sizes:
                size *= one
            found = max(found, size)
    return found
