"""Models whose attentions a fused kernel computes, on devices that have one: as their authors train them.

The kernel here is plain JAX, so that what is checked is which attentions have a kernel's form, and what it is handed:
bias, masks, groups of heads, parts of a mesh.
"""

import os
from typing import Any

import jax
import pytest
from contract import assert_trained_alike, program_of
from kernels import plain

import cjax.sharding.place.model

ALL = os.environ.get("CJAX_TEST_ALL") == "1"
Asked = dict[str, bool]
CAUSAL, MASKED = {"causal": True, "bias": False}, {"causal": False, "bias": True}
PAIRS = [
    ("linen_tied", "pipeline=gpipe:2 microbatches=4", CAUSAL),
    ("cjax_llama", "tensor=2 sequence=gather", CAUSAL),
    ("nnx_llama", "tensor=4", None),  # fewer heads of keys than devices: the author's equations
    ("cjax_bert", "tensor=2", MASKED),
    ("cjax_t5", "data=4 tensor=2 zero=1", MASKED),
    ("cjax_vit", "data=8", {"causal": False, "bias": False}),
]
MORE = [
    ("cjax_bert", "pipeline=gpipe:2 microbatches=4", MASKED),
    ("linen_tied", "tensor=3d:8", CAUSAL),
    ("linen_packed_qkv", "data=4 tensor=2", CAUSAL),
    ("nnx_llama", "pipeline=1f1b:2 microbatches=4 tensor=2", CAUSAL),
    ("nnx_llama", "tensor=2 sequence=gather", CAUSAL),
    ("linen_tied", "tensor=2d:4", CAUSAL),
    ("linen_tied", "pipeline=1f1b:2 microbatches=4 tensor=2", CAUSAL),
    ("linen_masked_mean", "zero=2 microbatches=2", CAUSAL),
    ("linen_tied", "data=8", CAUSAL),
    ("linen_tied", "data=2 tensor=4 zero=3", CAUSAL),
    ("linen_moe_soft", "data=4 tensor=2 zero=1", CAUSAL),
    ("nnx_llama", "zero=3", CAUSAL),
    ("nnx_llama", "data=4 tensor=2 remat=dots", CAUSAL),
    ("cjax_gpt", "data=4 tensor=2", CAUSAL),
    ("cjax_bert", "zero=3", MASKED),
]
PAIRS += MORE if ALL else []
REFUSED = [("nnx_llama", "zero=3")]
REFUSED += (
    [("cjax_bert", "data=4 tensor=2"), ("linen_tied", "zero=3"), ("linen_masked_mean", "tensor=2d:4")] if ALL else []
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Asked]:
    """What the kernel was asked."""
    found = []

    def kernel(*operands: Any, **options: Any) -> jax.Array:
        found.append({"causal": options["causal"], "bias": operands[3] is not None})
        return plain(*operands, **options)

    monkeypatch.setattr(cjax.sharding.place.model, "kernel_for", lambda mesh: kernel)
    return found


@pytest.mark.parametrize(("name", "plan", "how"), PAIRS)
def test_trains_as_its_author_would(name: str, plan: str, how: Asked | None, asked: list[Asked]) -> None:
    assert_trained_alike(name, plan)
    assert how in asked if how else not asked


@pytest.mark.full
@pytest.mark.parametrize(("name", "plan"), REFUSED)
def test_where_the_kernel_refuses_its_authors_equations_are_left(
    name: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*operands: Any, **options: Any) -> jax.Array:
        raise NotImplementedError("no such dtype")

    monkeypatch.setattr(cjax.sharding.place.model, "kernel_for", lambda mesh: kernel)
    assert_trained_alike(name, plan)


@pytest.mark.parametrize("name", ["nnx_decoder", *(["linen_decoder"] if ALL else [])])
def test_dropout_stays_with_the_author(name: str, asked: list[Asked]) -> None:
    program_of(name, "data=8", wide=False).lower()
    assert not asked


def test_cpus_have_no_kernel() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("data",))
    assert cjax.sharding.place.model.kernel_for(mesh) is None
