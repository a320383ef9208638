"""The ring's order kept through a model: whatever its equations ask of positions, values are those of one device."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from starts import begin

import cjax
from cjax.jax_compat.core import make_jaxpr
from cjax.sharding.attention.zigzag import zigzag
from cjax.sharding.place import order as orders
from cjax.sharding.place.order import Order, order_of
from cjax.trace.attention.bounds import bounds
from cjax.trace.attention.find import Attention, find_attentions
from cjax.trace.jaxpr.simplify import simplify

ROWS, LENGTH, WIDTH, VOCAB, RING = 4, 16, 8, 24, 4
Mix = Callable[[jax.Array, Any], jax.Array]


def shifted(x: jax.Array, own: Any) -> jax.Array:
    return x + 0.5 * jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


def cut(x: jax.Array, own: Any) -> jax.Array:
    early, late = jnp.split(x, 2, axis=1)
    return jnp.concatenate([late, early], axis=1) + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, 1:] * 0.3


def summed(x: jax.Array, own: Any) -> jax.Array:
    weights = jax.nn.softmax(x @ own("pool", (WIDTH,)), axis=1)
    pooled = jnp.einsum("bs,bse->be", weights, x)
    return x + pooled[:, None] + jnp.cumsum(x, axis=1) / 9 + x.max(axis=1, keepdims=True)


def mixed(x: jax.Array, own: Any) -> jax.Array:
    """A weight with positions on both sides, and one with them on one."""
    long = jnp.einsum("bse,st->bte", x, own("across", (LENGTH, LENGTH)))
    return x + long + x * own("along", (1, LENGTH, WIDTH)) + jnp.einsum("bse,s->be", x, own("of", (LENGTH,)))[:, None]


def ranked(x: jax.Array, own: Any) -> jax.Array:
    first = jnp.argmax(x, axis=1)
    at = jax.nn.one_hot(first, LENGTH, axis=1, dtype=x.dtype)
    rows = jnp.take_along_axis(x, (jnp.arange(LENGTH)[None, :, None] * 5) % LENGTH + jnp.zeros_like(x, int), axis=1)
    return x + at + jnp.sort(x, axis=1) * 0.1 + x[:, ::-1] * jnp.arange(LENGTH, dtype=x.dtype)[:, None] / 9 + rows


def branched(x: jax.Array, own: Any) -> jax.Array:
    """Calls with bodies of their own, some of which look across positions."""
    x = jax.lax.cond(x.sum() > 1e9, lambda x: x, lambda x: x + jnp.roll(x, 1, axis=1), x)
    x = jax.nn.relu(x) + jax.checkpoint(lambda x: jnp.tanh(x) * jnp.arange(LENGTH, dtype=x.dtype)[:, None] / 9)(x)
    return x


@jax.custom_jvp
def numbered(x: jax.Array) -> jax.Array:
    return x * (1 + jnp.arange(LENGTH, dtype=x.dtype)[:, None] / 9)  # a sum would be lost in the next norm


numbered.defjvp(lambda primals, tangents: (numbered(*primals), 2 * tangents[0]))


@jax.custom_vjp
def credited(x: jax.Array) -> jax.Array:
    return x


credited.defvjp(lambda x: (x, None), lambda _, gradient: (jnp.cumsum(gradient, axis=1) + gradient,))


def by_hand(x: jax.Array, own: Any) -> jax.Array:
    """Of one nothing but its derivative looks at positions, of the other all but that."""
    return numbered(credited(x))


def looped(x: jax.Array, own: Any) -> jax.Array:
    """A loop over features, one of whose constants is a weight with positions."""
    table, carried = own("table", (LENGTH, WIDTH)), jnp.zeros(x.shape[:2], x.dtype)

    def turn(total: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
        return total + column * table.sum(-1), jnp.sin(column) * table[:, 0] + total

    total, columns = jax.lax.scan(turn, carried, jnp.moveaxis(x, -1, 0))
    return x + total[..., None] + jnp.moveaxis(columns, 0, -1)


MIXES: dict[str, Mix] = {
    mix.__name__: mix for mix in (shifted, cut, summed, mixed, ranked, branched, by_hand, looped)
}  # fmt: skip


class Layer(nn.Module):
    mix: Mix | None
    drops: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def own(name: str, shape: tuple[int, ...]) -> jax.Array:
            return self.param(name, nn.initializers.normal(0.3, x.dtype), shape)

        x = nn.Dropout(self.drops, deterministic=not self.drops)(x)
        y = nn.LayerNorm(param_dtype=x.dtype)(x)
        q, k, v = (nn.DenseGeneral((2, WIDTH // 2), param_dtype=x.dtype)(y) for _ in range(3))
        x = x + nn.Dense(WIDTH, param_dtype=x.dtype)(cjax.attention(q, k, v, causal=True).reshape(x.shape))
        return x if self.mix is None else self.mix(x, own)


class Model(nn.Module):
    """Tokens and a table of positions, layers, and logits."""

    mix: Mix | None = None
    drops: float = 0.0
    layers: int = 2

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        kind = jnp.ones(()).dtype
        x = nn.Embed(VOCAB, WIDTH, param_dtype=kind)(tokens)
        x = x + self.param("places", nn.initializers.normal(1.0, kind), (1, LENGTH, WIDTH))
        for _ in range(self.layers):
            x = Layer(self.mix, self.drops)(x)
        return nn.Dense(VOCAB, param_dtype=kind)(nn.LayerNorm(param_dtype=kind)(x))


def loss(model: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """Each position is asked for the next; the second half of them counts twice."""
    logits = model(batch["tokens"])
    each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["tokens"][:, 1:])
    return (each * (1 + (jnp.arange(LENGTH - 1) >= LENGTH // 2))).mean(), logits[:, 3].mean()


BATCH = {"tokens": np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH))}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Order | None]]:
    """The orders that are asked for, each kept whatever it costs."""
    made: list[Order | None] = []
    monkeypatch.setattr(orders.Priced, "made_anew", lambda *_: float("inf"))

    def kept(*args: Any) -> Order | None:
        made.append(order_of(*args))
        return made[-1]

    monkeypatch.setattr("cjax.sharding.place.model.order_of", kept)
    yield made


def assert_alike(model: nn.Module, plan: str, words: str = "") -> None:
    results = []
    with jax.enable_x64(True):
        for text in (f"data=1 {words}", f"{plan} {words}"):
            parsed = cjax.Plan.parse(text)
            devices = jax.devices()[: parsed.model_size * (parsed.data or 1)]
            program = cjax.parallelize(model, loss, optax.sgd(0.1), BATCH, text, devices=devices)
            results.append(jax.tree.map(np.asarray, program.value_and_grad(begin(program), BATCH)))
    for mine, theirs in zip(jax.tree.leaves(results[1]), jax.tree.leaves(results[0]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9 * max(1.0, float(np.abs(theirs).max())))


@pytest.mark.parametrize(
    ("name", "has_tail"),
    [
        *(pytest.param(name, True, marks=[] if name == "summed" else pytest.mark.full) for name in MIXES),
        *(pytest.param(name, False, marks=[] if name == "looped" else pytest.mark.full) for name in MIXES),
    ],
)
def test_whatever_looks_at_positions(
    name: str, has_tail: bool, found: list[Order | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much is turned for it."""
    if not has_tail:
        monkeypatch.setattr(orders, "behind", lambda *_: None)
    assert_alike(Model(MIXES[name]), f"data=1 sequence=ring:{RING}")
    assert any(order is not None and order.turns for order in found)


@pytest.mark.parametrize(
    ("layers", "drops", "plan", "words"),
    [
        (3, 0.3, "data=2 sequence=ring:2 zero=1", "microbatches=2"),  # masks by number, on each device's own rows
        pytest.param(2, 0.3, "data=1 sequence=ring:4", "", marks=pytest.mark.full),
        pytest.param(1, 0.0, "data=1 tensor=2 sequence=ring:4", "remat=block", marks=pytest.mark.full),
        pytest.param(4, 0.0, "data=2 sequence=ring:4 zero=3", "remat=dots", marks=pytest.mark.full),
    ],
)
def test_beside_other_words(layers: int, drops: float, plan: str, words: str) -> None:
    assert_alike(Model(MIXES["summed"] if not drops else None, drops, layers), plan, words)


def order_in(model: nn.Module, plan: str = f"data=1 sequence=ring:{RING}") -> Order | None:
    devices = jax.devices()[: cjax.Plan.parse(plan).model_size]
    composed = cjax.parallelize(model, loss, optax.sgd(0.1), BATCH, plan, devices=devices)._composed
    return order_of(composed.trace, composed.storage.layout)


def test_the_order_is_made_at_the_input() -> None:
    """Tokens are put in it, and a table of positions; what the last layer hands out is put back, or the logits."""
    order = order_in(Model(layers=3))
    assert order is not None
    shapes = [turned.atom.aval.shape for _, turned, _ in order.turns]
    assert set(shapes) == {(1, LENGTH, WIDTH), (ROWS, LENGTH), (ROWS, LENGTH, WIDTH)}
    assert shapes.count((ROWS, LENGTH, WIDTH)) == 1 and all(times == 1 for times, _, _ in order.turns)


def test_nothing_is_kept_where_that_would_move_more() -> None:
    assert order_in(Model(MIXES["shifted"])) is not None, "one look at neighbours moves less than four operands"
    assert order_in(Model(lambda x, own: cut(shifted(ranked(x, own), own), own))) is None
    assert order_in(Model(), f"data=1 tensor=2d:4 sequence=ring:{RING // 2}") is None


def test_a_derivative_by_hand_that_goes_by_element_keeps_the_order() -> None:
    kept, turned = (order_in(Model(mix)) for mix in (lambda x, own: nn.relu(x), lambda x, own: credited(x)))
    assert kept is not None and turned is not None and len(kept.turns) < len(turned.turns)


@pytest.mark.full
def test_a_loop_over_positions_keeps_nothing() -> None:
    def recurrent(x: jax.Array, own: Any) -> jax.Array:
        def turn(state: jax.Array, now: jax.Array) -> tuple[jax.Array, jax.Array]:
            state = jnp.tanh(state + now)
            return state, state

        return x + jnp.moveaxis(jax.lax.scan(turn, x[:, 0], jnp.moveaxis(x, 1, 0))[1], 0, 1)

    assert order_in(Model(recurrent)) is None
    assert_alike(Model(recurrent), "data=1 sequence=ring:2")


def test_which_position_comes_where() -> None:
    assert zigzag(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


def test_a_mask_is_looked_at_once_for_as_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks for rings of hundreds of sizes, in which larger ones have the same blocks."""
    x = jnp.ones((1, 128, 2, 4))
    jaxpr = simplify(make_jaxpr(functools.partial(jax.nn.dot_product_attention, is_causal=True))(x, x, x)).jaxpr
    (attention,), _ = find_attentions(jaxpr.eqns, jaxpr.outvars)
    asked: list[int] = []

    def counted(attention: Attention, queries: int, *rest: Any) -> np.ndarray:
        asked.append(queries)
        return bounds(attention, queries, *rest)

    monkeypatch.setattr(orders, "bounds", counted)
    for size in (2, 4, 64, 128, 2, 4):
        few = min(size, orders.MOST_BLOCKS)
        np.testing.assert_array_equal(orders.blocks_left(attention, size), np.tri(few, dtype=bool))
    assert asked == [2, 4, 32]
