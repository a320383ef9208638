"""Gradients of a batch in parts: equal to one device's, reduced once, refused where parts say something else."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from starts import begin

import cjax
from cjax.audit import audit
from cjax.gradients import mean, reduction
from cjax.mesh import build_mesh, compile_lowered

BATCH, SEQ, DIM, VOCAB = 32, 3, 24, 11


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + nn.Dropout(0.3, deterministic=False)(nn.Dense(DIM)(nn.gelu(nn.Dense(48)(nn.LayerNorm()(x)))))


class Net(nn.Module):
    norm: bool = False

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, DIM)(tokens)
        for _ in range(2):
            x = Layer()(x)
        x = nn.BatchNorm(use_running_average=False)(x) if self.norm else x
        return nn.Dense(VOCAB)(x)


class NNXNet(nnx.Module):
    """Carries random state."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)
        self.out = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.out(self.drop(self.embed(tokens)))


def batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (2, BATCH, SEQ), dtype=np.int32)
    # No token counts in one row of five: micro-batches and devices differ in weight.
    return {"inputs": tokens[0], "targets": tokens[1], "mask": rng.random((BATCH, SEQ)) < rng.random((BATCH, 1))}


def losses(model: Any, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])


def average(model: Any, batch: Any) -> Any:
    return losses(model, batch).mean(), {"mask": batch["mask"].mean(), "sum": cjax.Mean(batch["mask"].sum(), 2.0)}


def ratio(model: Any, batch: Any) -> jax.Array:
    return (losses(model, batch) * batch["mask"]).sum() / jnp.maximum(batch["mask"].sum(), 1)


def counted(model: Any, batch: Any) -> Any:
    total = (losses(model, batch) * batch["mask"]).sum()
    return cjax.Mean(total, batch["mask"].sum()), {"rows": cjax.Mean(batch["mask"].sum(), batch["mask"].shape[0])}


MODELS: dict[str, tuple[Any, Any]] = {
    "linen average": (Net(), lambda model, batch: losses(model, batch).mean()),
    "linen ratio": (Net(), ratio),
    "linen Mean": (Net(), counted),
    "linen BatchNorm": (Net(norm=True), average),
    "nnx ratio": (lambda rngs: NNXNet(rngs), ratio),
}
ROWS = [
    pytest.param("linen average", "microbatches=2", marks=pytest.mark.full),
    ("linen ratio", "tensor=2 zero=1 microbatches=2"),
    pytest.param("linen ratio", "zero=3 microbatches=2", marks=pytest.mark.full),
    ("linen Mean", "zero=2/4 microbatches=4"),
    ("linen BatchNorm", "zero=2 microbatches=2"),
    pytest.param("nnx ratio", "tensor=2 microbatches=4", marks=pytest.mark.full),
]


def program_of(name: str, plan: str, devices: Any = None) -> cjax.Program:
    model, loss = MODELS[name]
    return cjax.parallelize(model, loss, optax.sgd(0.5), batch(), plan, devices=devices)


@pytest.mark.full("linen BatchNorm-zero=2 microbatches=2", "linen Mean-zero=2/4 microbatches=4")
@pytest.mark.parametrize(("name", "plan"), ROWS)
def test_equals_one_device_at_the_same_microbatches(name: str, plan: str) -> None:
    """Two steps, dropout on: loss, aux, parameters, and the state that the second step starts from."""
    alone = program_of(name, "data=1 " + plan.split()[-1], jax.devices()[:1])
    shared = program_of(name, plan)
    states = [begin(program) for program in (alone, shared)]
    for _ in range(2):
        states[0], wanted = alone.step(states[0], batch())
        states[1], given = shared.step(states[1], batch())
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7), given, wanted)
    params = [jax.device_get(p.params(s)) for p, s in zip((alone, shared), states, strict=True)]
    for a, b in zip(*map(jax.tree.leaves, params), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b) + 1e-6
    for leaf in jax.tree.leaves(states[1]._model_state):
        leaf = jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
        first, *others = [np.asarray(jax.device_get(shard.data)) for shard in leaf.addressable_shards]
        assert all(np.array_equal(first, other) for other in others)


def reductions(plan: str, name: str = "linen average") -> list[tuple[str, int, int]]:
    """Collectives over the batch axes of a compiled step that move more than a scalar, with how often they run."""
    program = program_of(name, plan)
    compiled = compile_lowered(program.lower(), list(program.mesh.devices.flat))
    return [
        (c.kind, c.count, int(c.bytes))
        for c in audit(compiled, program.mesh).collectives
        if "tensor" not in c.axes and c.bytes > 1000
    ]


@pytest.mark.full
@pytest.mark.parametrize("plan", ["microbatches=4", "zero=1 microbatches=4", "zero=2 microbatches=4"])
def test_reduces_once(plan: str) -> None:
    found = reductions(plan)
    assert found and all(count == 1 for _, count, _ in found), found
    kinds = {kind for kind, _, _ in found}
    assert ("reduce-scatter" in kinds) == ("zero" in plan), found


@pytest.mark.full
def test_reduces_every_part_where_examples_meet() -> None:
    """What the note says is what happens; without this, counting could not tell the two apart."""
    assert max(count for _, count, _ in reductions("microbatches=4", "linen BatchNorm")) >= 4
    notes = program_of("linen BatchNorm", "microbatches=4")._composed.notes
    assert any("BatchNorm_0" in note and "reduced once per micro-batch" in note for note in notes)


def test_stage_2_says_what_waiting_costs() -> None:
    notes = program_of("linen average", "zero=2 microbatches=4")._composed.notes
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.eval_shape(lambda: Net().init(keys, batch()["inputs"]))
    params = sum(leaf.size * 4 for leaf in jax.tree.leaves(variables["params"]))
    assert any(f"{params / 2**20:,.1f} MiB a device" in note for note in notes), notes


def test_parts_of_a_ratio_give_the_ratio_of_the_whole() -> None:
    """The mean over what counts, not the mean of the parts' means, with nothing counted in some part."""
    given = batch()
    given["mask"][::4] = False  # all of micro-batch 0 of 4

    def loss(model: Any, batch: Any) -> jax.Array:
        return ratio(lambda tokens: model(tokens)[..., :VOCAB], batch)

    values = []
    for plan in ("data=1", "data=1 microbatches=4", "data=8 microbatches=4", "zero=3 microbatches=2"):
        devices = jax.devices()[: 1 if "data=1" in plan else 8]
        program = cjax.parallelize(nn.Embed(VOCAB, VOCAB), loss, optax.sgd(1.0), given, plan, devices=devices)
        values.append(program.value_and_grad(begin(program), given))
    for value, grads in values[1:]:
        np.testing.assert_allclose(value, values[0][0], rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-7), grads, values[0][1])


def contrastive(model: Any, batch: Any) -> jax.Array:
    x = model(batch["inputs"]).mean(1)
    return optax.softmax_cross_entropy_with_integer_labels(x @ x.T, jnp.arange(x.shape[0])).mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda model, batch: losses(model, batch).sum(), r"return cjax\.Mean\(total, weight\)"),
        (lambda model, batch: jnp.sqrt(losses(model, batch).mean()), r"return cjax\.Mean\(total, weight\)"),
        (contrastive, "meet each other .*microbatches=1"),
        (lambda model, batch: cjax.Mean(contrastive(model, batch), 1.0), "meet each other"),
    ],
)
def test_refuses_what_parts_would_change(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cjax.parallelize(Net(), loss, optax.sgd(0.5), batch(), "microbatches=2")
    cjax.parallelize(Net(), loss, optax.sgd(0.5), batch(), "data=8")


@pytest.mark.parametrize(
    ("shape", "summed", "placed", "dim", "scatter"),
    [
        ((6, 8), (None, None), (None, ("data", "zero")), 1, ("data", "zero")),
        ((6, 8), (None, None), ("zero", None), 0, ("zero",)),
        ((8, 5), ("tensor", None), (("tensor", "zero"), None), 0, ("zero",)),
        ((7, 5), (None, None), ("zero", None), 0, ()),  # does not divide: summed whole
        ((8, 5), ("tensor", None), ("tensor", None), 0, ()),
        ((4,), ("tensor",), (("data", "zero", "tensor"),), 0, ()),  # another order of the parts
    ],
)
def test_reductions(shape: Any, summed: Any, placed: Any, dim: int, scatter: Any) -> None:
    mesh = build_mesh({"data": 2, "zero": 2, "tensor": 2}, jax.devices())
    how = reduction(shape, PartitionSpec(*summed), PartitionSpec(*placed), ("data", "zero"), mesh)
    assert (how.dim, how.scatter) == (dim, scatter)
    assert how.placed == PartitionSpec(*(placed if scatter else summed))


def test_a_mean_of_nothing_is_zero() -> None:
    assert float(mean(jnp.float32(0), jnp.float32(0))) == 0
    assert float(mean(jnp.float32(6), jnp.float32(3))) == 2
    assert float(mean(jnp.float32(6), None)) == 6
