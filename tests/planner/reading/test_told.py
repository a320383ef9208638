"""Who is sent where: what a mixture's masks and gates are made of, as XLA gathers it."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from contract import trace_of

from cjax.planner.reading.work import work_of
from cjax.planner.work import Told, elements
from cjax.trace.author.capture import capture
from cjax.trace.reading import Trace
from cjax.trace.source import TraceSource

EXPERTS, ROOM, WIDTH, TOKENS = 3, 10, 4, 16


class Switch(nn.Module):
    """Tokens that go to one of three experts: by numbers, or by a mask and a place; weighted when they come back."""

    is_weighted: bool = True

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        gates = nn.softmax(nn.Dense(EXPERTS, use_bias=False)(x))
        chosen = jax.nn.one_hot(gates.argmax(-1), EXPERTS)
        place = (jnp.cumsum(chosen, 0) * chosen).astype(int) - 1
        dispatch = chosen[..., None] * jax.nn.one_hot(place, ROOM)
        up = self.param("up", nn.initializers.lecun_normal(), (EXPERTS, WIDTH, WIDTH))
        made = jnp.einsum("ecd,edf->ecf", jnp.einsum("nec,nd->ecd", dispatch, x), up)
        back = dispatch * gates[..., None] if self.is_weighted else dispatch
        return jnp.einsum("nec,ecd->nd", back, made)


def told(trace: Trace) -> list[Told]:
    return [each for part in work_of(trace).parts for each in part.told]


def switch(is_weighted: bool) -> Trace:
    batch = {"x": jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.float32)}
    model = capture(Switch(is_weighted), lambda model, batch: jnp.square(model(batch["x"])).mean(), batch)
    return TraceSource(model, batch).read()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_mask_and_a_place_and_what_it_counts(is_weighted: bool) -> None:
    found = told(switch(is_weighted))
    # One byte of the mask, and not the four of numbers made of it; each once, though two products read them.
    kinds = [(each.value.itemsize, each.has_gradient) for each in found]
    assert sorted(kinds) == sorted([(1, False), (4, False), *([(4, True)] * is_weighted)])
    assert {elements(each.value.dims) for each in found} == {TOKENS * EXPERTS}
    assert not any(each.value.is_computed for each in found), "a half precision halves none of them"


def test_masks_that_products_make_are_followed_to_what_those_read() -> None:
    found = told(trace_of("linen_moe_capacity"))
    assert {each.value.dims[1:] for each in found} == {(("heads_2", 2), ("experts", 4))}  # of two for each, and of four
    kinds = [(each.value.itemsize, each.value.is_computed, each.has_gradient) for each in found]
    assert sorted(kinds) == [(1, False, False), (4, False, False), (4, True, True)]  # a mask, a seat, what it counts


@pytest.mark.parametrize("name", ["nnx_llama", "linen_encoder_decoder", "linen_moe_soft"])
def test_nothing_where_no_rows_are_of_all_examples(name: str) -> None:
    assert not told(trace_of(name))
