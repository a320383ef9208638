"""Which losses may wait with the reduction of their gradients, and random numbers drawn by global index."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import cjax
from cjax.mesh import build_mesh
from cjax.sharding.place.local import LocalRows, local_rows
from cjax.sharding.place.model import store_model
from cjax.trace.author.capture import capture
from cjax.trace.microbatches.mirror import Draw
from cjax.trace.microbatches.part import read_part
from cjax.trace.source import TraceSource

BATCH, IN, CLASSES, PARTS = 32, 6, 5, 2


class Net(nn.Module):
    rate: float = 0.0
    norm: bool = False
    counts: str = ""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(12)(x)
        x = nn.BatchNorm(use_running_average=False)(x) if self.norm else x
        x = nn.Dropout(self.rate, deterministic=False)(nn.relu(x))
        if self.counts:
            seen = self.variable("stats", "seen", lambda: jnp.float32(0))
            seen.value += {"calls": 1.0, "rows": float(x.shape[0]), "sum": x.sum()}[self.counts]
        return nn.Dense(CLASSES)(x)


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "x": rng.standard_normal((BATCH, IN), dtype=np.float32),
        "y": rng.integers(0, CLASSES, BATCH, dtype=np.int32),
        "mask": (rng.random(BATCH) < 0.6).astype(np.float32),
    }


def losses(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])


def mean(model: Any, batch: Any) -> jax.Array:
    return losses(model, batch).mean()


def masked(model: Any, batch: Any) -> jax.Array:
    return (losses(model, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1.0)


def by_index(model: Any, batch: Any) -> jax.Array:
    return -jax.nn.log_softmax(model(batch["x"]))[jnp.arange(batch["y"].shape[0]), batch["y"]].mean()


def per_row_noise(model: Any, batch: Any, key: Any) -> jax.Array:
    keys = jax.random.split(key, batch["x"].shape[0])
    noise = jax.vmap(lambda k: jax.random.normal(k, (IN,)))(keys)
    return losses(model, {**batch, "x": batch["x"] + noise}).mean()


def gamma_noise(model: Any, batch: Any, key: Any) -> jax.Array:
    """One key, split among all elements in order."""
    return losses(model, {**batch, "x": batch["x"] * jax.random.gamma(key, jnp.ones(batch["x"].shape))}).mean()


CASES: dict[str, tuple[Callable[..., Any], Net, str | None]] = {
    "a mean": (mean, Net(), None),
    "dropout": (mean, Net(rate=0.5), None),
    "a ratio": (masked, Net(rate=0.5), None),
    "a ratio and a mean": (
        lambda m, b: masked(m, b) + 1e-2 * jnp.square(m(b["x"])).mean(), Net(), None
    ),
    "labels by the number of the row": (by_index, Net(), None),
    "keys split among the rows": (per_row_noise, Net(), None),
    "one key for all gamma variates": (gamma_noise, Net(), r"random_gamma\) draws for each row in an order of its own"),
    "a Mean with the number of rows": (lambda m, b: cjax.Mean(losses(m, b).sum(), b["y"].shape[0]), Net(), None),
    "aux that averages": (lambda m, b: (mean(m, b), {"mask": b["mask"].mean()}), Net(), None),
    "aux that adds up": (lambda m, b: (mean(m, b), cjax.Mean(b["x"].sum(), b["mask"].sum())), Net(), None),
    "a count of calls": (mean, Net(counts="calls"), None),
    "BatchNorm": (mean, Net(norm=True), "BatchNorm_0 .*looks? at the whole micro-batch"),
    "a sum over a fixed number": (lambda m, b: losses(m, b).sum() / 64, Net(), "refused: .* is a sum"),
    "a Mean with a fixed weight": (
        lambda m, b: cjax.Mean(losses(m, b).sum(), 100.0), Net(), "refused: .* one is a sum"
    ),
    "weights by the number of the row": (
        lambda m, b: (losses(m, b) * jnp.arange(b["y"].shape[0])).mean(), Net(), "refused: .* looks at .*iota"
    ),
    "inputs scaled by the number of rows": (
        lambda m, b: losses(m, {**b, "x": b["x"] / b["x"].shape[0]}).mean(), Net(), "refused: .* how many there are"
    ),
    "aux that does not average": (lambda m, b: (mean(m, b), {"max": b["x"].max()}), Net(), "refused: Aux value 'max'"),
    "aux that is a sum": (lambda m, b: (mean(m, b), {"sum": b["x"].sum()}), Net(), None),
    "statistics of the rows": (mean, Net(counts="sum"), "carries depends on the examples"),
    "a count of rows": (mean, Net(counts="rows"), "number of rows"),
}  # fmt: skip


ONE_ROW = {"a ratio and a mean": "one row of a micro-batch"}


@pytest.mark.parametrize("num_devices", [8, 16])  # 16 leave one row a device
@pytest.mark.parametrize("name", CASES)
def test_waits_only_where_examples_meet_in_sums(name: str, num_devices: int) -> None:
    loss, net, reason = CASES[name]
    reason = ONE_ROW.get(name) if num_devices == 16 and reason is None else reason
    captured = capture(net, loss, batch())
    plan = cjax.Plan.parse(f"microbatches={PARTS}").resolve(num_devices)
    shape = jax.eval_shape(lambda: batch())
    source = TraceSource(captured, shape)
    if reason is not None and reason.startswith("refused: "):
        pytest.raises(ValueError, read_part, source, PARTS).match(reason.removeprefix("refused: "))
        return
    trace = read_part(source, PARTS)
    mesh = jax.sharding.AbstractMesh((num_devices, 1), ("data", "tensor"))
    storage = store_model(captured, trace, plan, mesh)  # type: ignore[arg-type]
    found = local_rows(source, trace, storage, plan, mesh)  # type: ignore[arg-type]
    if reason is None:
        assert isinstance(found, LocalRows), found
        rows = BATCH // PARTS // num_devices
        assert {leaf.shape[0] for leaf in found.trace.leaves if leaf.kind == "batch" and leaf.shape} == {rows}
    else:
        assert isinstance(found, str)
        pytest.raises(ValueError, _raise, found).match(reason)


def found_for(loss: Any, monkeypatch: pytest.MonkeyPatch | None = None) -> LocalRows | str:
    """Of two micro-batches on eight devices; with `monkeypatch`, reading a trace of a device's own rows fails."""
    captured, shape = capture(Net(), loss, batch()), jax.eval_shape(lambda: batch())
    plan, source = cjax.Plan.parse(f"microbatches={PARTS}").resolve(8), TraceSource(captured, shape)
    trace, mesh = read_part(source, PARTS), jax.sharding.AbstractMesh((8, 1), ("data", "tensor"))
    storage = store_model(captured, trace, plan, mesh)  # type: ignore[arg-type]
    if monkeypatch is not None:
        monkeypatch.setattr("cjax.trace.source.read", lambda *args: _raise("a fault of ours"))
    return local_rows(source, trace, storage, plan, mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [AssertionError(), ZeroDivisionError("by rows"), ValueError("rows\nand more")])
def test_what_the_author_raises_for_fewer_rows_is_a_reason(error: Exception) -> None:
    def loss(model: Any, batch: Any) -> jax.Array:
        if len(batch["x"]) < BATCH // PARTS:
            raise error
        return mean(model, batch)

    said = {AssertionError: "AssertionError", ZeroDivisionError: "by rows", ValueError: "rows"}[type(error)]
    assert found_for(loss) == f"the model can't be traced on 2 rows ({said})"


def test_what_we_raise_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="a fault of ours"):
        found_for(mean, monkeypatch)


def _raise(text: str) -> None:
    raise ValueError(text)


@pytest.mark.parametrize(
    ("shape", "dim", "draws"),
    [
        ((16, 5), 0, lambda key, shape: jax.random.bits(key, shape)),
        ((3, 16, 5), 1, lambda key, shape: jax.random.bits(key, shape, jnp.uint8)),
        ((16,), 0, lambda key, shape: jax.random.bits(key, shape, jnp.uint16)),
        ((16, 3), 0, lambda key, shape: jax.random.key_data(jax.random.split(key, shape))),
        ((16, 3), 0, lambda key, shape: jax.random.bits(jax.random.clone(key), shape)),
    ],
)
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_draws_are_those_of_the_global_index(shape: tuple[int, ...], dim: int, draws: Any, impl: str) -> None:
    mesh = build_mesh({"data": 4, "zero": 2, "tensor": 1}, jax.devices())
    key = jax.random.key(7, impl=impl)
    own = tuple(n // 8 if i == dim else n for i, n in enumerate(shape))
    jaxpr = jax.make_jaxpr(lambda: draws(key, own))()
    eqn = _first_draw(jaxpr.jaxpr)
    rows = LocalRows(None, None, ("data", "zero"), {id(eqn): Draw(shape, dim)})  # type: ignore[arg-type]

    def inside() -> jax.Array:
        (found,) = rows.draw(eqn, [key]) or [None]
        return jax.random.key_data(found) if jnp.issubdtype(found.dtype, jax.dtypes.prng_key) else found

    spec = PartitionSpec(*[("data", "zero") if i == dim else None for i in range(len(shape))])
    given = jax.jit(jax.shard_map(inside, mesh=mesh, in_specs=(), out_specs=spec, check_vma=False))()
    np.testing.assert_array_equal(given, draws(key, shape))
    assert rows.draw(jaxpr.eqns[0].replace(), [key]) is None  # any other equation is left alone


def _first_draw(jaxpr: Any) -> Any:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("random_bits", "random_split"):
            return eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            found = _first_draw(inner)
            if found is not None:
                return found
    return None


def test_a_device_draws_no_more_than_its_rows() -> None:
    """Nothing of the size of all rows is made, in the loop that threefry is on CPUs either."""
    mesh = build_mesh({"data": 8}, jax.devices())
    key = jax.random.key(7)
    eqn = _first_draw(jax.make_jaxpr(lambda: jax.random.bits(key, (16, 1000)))().jaxpr)
    rows = LocalRows(None, None, ("data",), {id(eqn): Draw((128, 1000), 0)})  # type: ignore[arg-type]
    inside = jax.shard_map(
        lambda: (rows.draw(eqn, [key]) or [lax.full((), 0)])[0],
        mesh=mesh, in_specs=(), out_specs=PartitionSpec("data"), check_vma=False,
    )  # fmt: skip
    assert jax.jit(inside).lower().compile().memory_analysis().temp_size_in_bytes < 4 * 128 * 1000
