"""In which dtype devices add up their gradients: read off values here, off the compiled program for GPUs elsewhere."""

import math
import os
from typing import Any

import jax
import numpy as np
import optax
import pytest
from contract import begun, norm, on_host, program_of, subject

import cjax
from cjax.audit import audit
from cjax.models.gpt import GPT, gpt
from cjax.models.gpt import loss as gpt_loss

ALL = os.environ.get("CJAX_TEST_ALL") == "1"


def gradients(name: str, plan: str) -> Any:
    program = program_of(name, plan, wide=False)
    return on_host(program.value_and_grad(begun(program, name, wide=False), subject(name, False).batches[0])[1])


def apart(a: Any, b: Any) -> float:
    return norm(jax.tree.map(lambda x, y: x.astype(np.float64) - y, a, b)) / norm(b)


PLANS = ["data=4 tensor=2 microbatches=2 zero=2", "data=8"]


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS if ALL else PLANS[:1])
@pytest.mark.parametrize("name", ["nnx_llama", *(["linen_tied"] if ALL else [])])
def test_devices_add_up_in_the_dtype_that_is_asked_for(name: str, plan: str) -> None:
    """Rounding each device's sum to bfloat16 costs about 2^-9; adding the same sums up in float32 nothing."""
    wanted = gradients(name, plan)
    exact, rounded = (gradients(name, f"{plan} reduce={dtype}") for dtype in ("float32", "bfloat16"))
    assert apart(exact, wanted) < 1e-6
    assert 1e-4 < apart(rounded, wanted) < 5e-3


def test_refuses_what_has_no_sums_of_its_own() -> None:
    with pytest.raises(ValueError, match="reduce=float32 needs each device's own sum .* zero=3 .*: .* write zero=2"):
        program_of("nnx_llama", "zero=3 reduce=float32", wide=False)
    with pytest.raises(ValueError, match="positions are split: leave `reduce` out"):
        program_of("nnx_decoder", "data=2 sequence=all_to_all:4 reduce=float32", wide=False)


@pytest.mark.aot
@pytest.mark.full(
    "data=8 precision=bfloat16-bf16",
    "data=8 precision=bfloat16 reduce=float32-f32",
    "data=8 microbatches=2 precision=bfloat16-f32",
)
@pytest.mark.parametrize(
    ("plan", "dtype"),
    [
        ("data=8 precision=bfloat16", "bf16"),
        ("data=8 precision=bfloat16 reduce=float32", "f32"),
        ("data=8 microbatches=2 precision=bfloat16", "f32"),
        ("data=8 microbatches=2 precision=bfloat16 reduce=bfloat16", "bf16"),
    ],
)
def test_gpus_send_that_dtype(plan: str, dtype: str) -> None:
    """All but the loss and norms of it."""
    sizes, tokens = gpt("gpt-mini", vocab_size=512), jax.ShapeDtypeStruct((16, 32), np.int32)
    batch = {"inputs": tokens, "targets": tokens}
    program = cjax.parallelize(
        lambda rngs: GPT(sizes, rngs=rngs), gpt_loss, optax.adamw(1e-3), batch, plan, devices="h100:8"
    )
    found: dict[str, int] = {}
    for each in audit(program._compiled, program.mesh).collectives:
        if each.kind == "all-reduce":
            for shape in each.shapes:
                found[shape.dtype] = found.get(shape.dtype, 0) + each.count * math.prod(shape.dims)
    assert found[dtype] == max(found.values())
    assert sum(n for name, n in found.items() if name != dtype) < 0.01 * found[dtype]
