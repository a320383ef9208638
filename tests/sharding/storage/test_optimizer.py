"""Any optax transformation, on stacked, padded and split storage, does what it does on the user's own tree."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract import assert_close, bytes_on_a_device, on_host
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS

from cjax.mesh import build_mesh
from cjax.sharding.storage.optimizer import StoredOptimizer, store_optimizer
from cjax.sharding.storage.storage import StageRows, Storage, make_storage
from cjax.tree import PyTree

MESH = {"data": 2, "tensor": 4}
LAYERS = 3
LOSS = jnp.float32(2.5)  # that never falls
# Three layers on two stages: in order, the second without a layer; and each stage with two blocks.
STAGED = {"pipe": 2, "data": 2, "tensor": 2}
BEHIND, BETWEEN = (0, 1, 2, -1, -1, -1), (0, 2, 1, -1)
SHAPES = {"kernel": (24, 32), "bias": (32,), "cube": (4, 8, 24)}


def params() -> PyTree:
    """An embedding that the tensor axis pads, and three layers."""
    rng = np.random.default_rng(0)

    def draw(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    layers = {f"layer_{i}": {name: (i + 1) * draw(shape) for name, shape in SHAPES.items()} for i in range(LAYERS)}
    return {"embed": draw((101, 24)), "head": {"kernel": draw((24, 7))}, **layers}


def gradients(step: int) -> PyTree:
    rng = np.random.default_rng(step + 1)

    # Layers of very different size: what mixes their norms shows.
    def draw(x: np.ndarray) -> np.ndarray:
        return (rng.standard_normal(x.shape) * 10 ** rng.uniform(-3, 3)).astype(np.float32)

    return jax.tree.map(draw, params())


def placement(name: str, shape: tuple[int, ...], zero: bool) -> P:
    if name == "embed":
        return P("tensor", "data" if zero else None)
    if name.startswith("layer") and name.endswith("kernel"):
        return P("data" if zero else None, "tensor")
    return P(*[None] * len(shape))


def stored(zero: bool = True, order: tuple[int, ...] = ()) -> tuple[Storage, list[P]]:
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params())
    names = ["/".join(str(k.key) for k in path) for path, _ in jax.tree_util.tree_flatten_with_path(shape)[0]]
    leaves = jax.tree.leaves(shape)
    groups = [
        tuple(i for i, name in enumerate(names) if name.startswith("layer") and name.endswith(part)) for part in SHAPES
    ]
    specs = [placement(name, leaf.shape, zero) for name, leaf in zip(names, leaves, strict=True)]
    rows = {group[0]: StageRows("pipe", order) for group in groups if order}
    sizes = STAGED if order else MESH
    return make_storage(shape, groups, specs.__getitem__, sizes, lambda i: None, rows.get), specs


def prepare(
    optimizer: optax.GradientTransformation, order: tuple[int, ...] = ()
) -> tuple[StoredOptimizer, Storage, Any]:
    mesh = build_mesh(STAGED if order else MESH, jax.devices())
    storage, specs = stored(order=order)
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params())
    return store_optimizer(optimizer, shape, storage, specs.__getitem__, mesh), storage, mesh


# Those whose layers have norms, factors, labels, counts or products of their own are on stages; the others are not.
ON_STAGES = {
    "lamb": BEHIND, "adafactor": BETWEEN, "muon": BEHIND, "global clipping": BEHIND, "labelled by path": BETWEEN,
    "every second step": BEHIND, "prodigy": BETWEEN, "adaptive clipping": BETWEEN, "average of parameters": BEHIND,
}  # fmt: skip
PAIRS = [(name, ON_STAGES.get(name, ())) for name in OPTIMIZERS]
if os.environ.get("CJAX_TEST_ALL") == "1":
    PAIRS = [(name, order) for name in OPTIMIZERS for order in ((), BEHIND, BETWEEN)]


@pytest.mark.full(
    "adafactor-order12",
    "adaptive clipping-order19",
    "average of parameters-order8",
    "every second step-order24",
    "global clipping-order20",
    "labelled by path-order21",
    "lamb of optax-order14",
    "lamb, as DistributedLamb-order3",
    "lamb, as FusedLAMB-order4",
    "lamb, as Lamb-order2",
    "lamb, clipped, not debiased-order1",
    "lamb-order0",
    "lars of optax-order15",
    "lars, as Lars-order7",
    "lars, nesterov, all adapted-order6",
    "lars-order5",
    "muon-order13",
    "novograd-order16",
    "prodigy-order18",
    "trust ratio of momentum-order9",
)
@pytest.mark.parametrize(("name", "order"), PAIRS)
def test_does_as_on_the_users_tree(name: str, order: tuple[int, ...]) -> None:
    optimizer = OPTIMIZERS[name]()
    given, storage, mesh = prepare(optimizer, order)
    here = jax.jit(storage.store, out_shardings=storage.shardings(mesh))(params())
    opt = jax.jit(given.init, out_shardings=given.storage.shardings(mesh))(here)
    there, there_opt = params(), optimizer.init(params())

    @jax.jit
    def serial(grads: PyTree, state: PyTree, params: PyTree) -> tuple[PyTree, PyTree]:
        updates, state = optax.with_extra_args_support(optimizer).update(grads, state, params, value=LOSS)
        return optax.apply_updates(params, updates), state

    update = jax.jit(given.update, out_shardings=(storage.shardings(mesh), given.storage.shardings(mesh)))
    for step in range(3):
        grads = gradients(step)
        here, opt = update(storage.store(grads), opt, here, LOSS)
        there, there_opt = serial(grads, there_opt, there)
    assert_close(storage.load(on_host(here)), on_host(there), (1e-5, 1e-7), "parameter ")
    assert_nothing_between(storage, here, order)
    assert_nothing_between(given.storage, opt, order)
    state = given.storage.load(on_host(opt))
    assert jax.tree.structure(state) == jax.tree.structure(there_opt)
    assert_close(jax.tree.leaves(state), jax.tree.leaves(on_host(there_opt)), (1e-4, 1e-6), "state ")


def assert_nothing_between(storage: Storage, arrays: Any, order: tuple[int, ...]) -> None:
    """Rows without a layer hold zeros, or whoever adds up all of an array would see what is in them."""
    found = [array for slot, array in zip(storage.slots, on_host(arrays), strict=True) if slot.spread]
    assert bool(found) == bool(order) or not found
    for array in found:
        assert not np.asarray(array)[np.array(order) < 0].any()


def test_state_lies_where_its_parameter_does() -> None:
    given, storage, mesh = prepare(optax.adam(1e-3))
    embed = next(slot for slot in storage.slots if slot.shape == (101, 24))
    moments = [slot for slot in given.storage.slots if slot.shape == (101, 24)]
    assert [slot.spec for slot in moments] == [embed.spec] * 2 and moments[0].padded == (104, 24)
    stacks = [slot for slot in given.storage.slots if slot.shape == (24, 32)]
    assert [len(slot.leaves) for slot in stacks] == [LAYERS] * 2, "moments of layers are stacked as the layers are"
    assert {slot.spec for slot in stacks} == {P("data", "tensor")}


def test_state_is_held_in_parts() -> None:
    given, storage, mesh = prepare(optax.adam(1e-3))
    here = jax.jit(storage.store, out_shardings=storage.shardings(mesh))(params())
    opt = jax.jit(given.init, out_shardings=given.storage.shardings(mesh))(here)
    split = 104 * 24 + LAYERS * 24 * 32
    whole = 24 * 7 + LAYERS * (32 + 4 * 8 * 24)
    assert bytes_on_a_device(opt) == 2 * 4 * (split // 8 + whole) + 4


def test_factors_of_a_parameter_are_split_as_the_dims_they_share() -> None:
    """Adafactor keeps a row and a column of each matrix: each has one of its dims."""
    given, _, mesh = prepare(optax.adafactor(1e-3, min_dim_size_to_factor=8, momentum=None))
    found = {(slot.shape, len(slot.leaves)): slot.spec for slot in given.storage.slots}
    assert found[(101,), 1] == P("tensor")
    assert {found.get(((24,), 1)), found.get(((24,), LAYERS))} <= {P("data"), None}
    assert found[(32,), LAYERS] in (P("tensor"), P(None))


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="give an optax transformation"):
        prepare("adam")  # type: ignore[arg-type]


def test_state_that_grows_is_refused() -> None:
    """As of `optax.monitor`, which has no place for what it measures before it has measured."""
    with pytest.raises(ValueError, match=r"0 leaves from `init` and 1 after an update.*measurements/norm"):
        prepare(optax.chain(optax.monitor({"norm": optax.tree.norm}), optax.sgd(0.1)))


@pytest.mark.parametrize("takes_loss", [False, True])
def test_an_update_is_given_what_it_takes(takes_loss: bool) -> None:
    """Whatever its type says: one takes no loss where optax says so, the other reads it where optax does not."""
    if takes_loss:
        falling = optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
        optimizer = optax.MultiSteps(optax.chain(optax.sgd(0.1), falling), 2)
    else:
        optimizer = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.05))
    given, storage, mesh = prepare(optimizer)  # type: ignore[arg-type]
    assert given.reads_loss == takes_loss
    here = jax.jit(storage.store, out_shardings=storage.shardings(mesh))(params())
    kept = jax.jit(given.init, out_shardings=given.storage.shardings(mesh))(here)
    there, opt = params(), optimizer.init(params())
    more = {"value": LOSS} if takes_loss else {}
    update = jax.jit(given.update, out_shardings=(storage.shardings(mesh), given.storage.shardings(mesh)))
    serial = jax.jit(lambda g, s, p: optimizer.update(g, s, p, **more))
    for step in range(6):
        grads = gradients(step)
        here, kept = update(storage.store(grads), kept, here, LOSS)
        updates, opt = serial(grads, opt, there)
        there = optax.apply_updates(there, updates)
    assert_close(storage.load(on_host(here)), on_host(there), (1e-5, 1e-7), "parameter ")


def test_what_a_step_has_not_is_told() -> None:
    with pytest.raises(ValueError, match=r"asks for more than a step has.*value_fn.*linesearch=None"):
        prepare(optax.lbfgs(0.1))
    with pytest.raises(AttributeError) as raised:
        prepare(optax.lookahead(optax.sgd(0.1), 5, 0.5))
    assert "raised by the optimizer's update" in "".join(raised.value.__notes__)


@pytest.mark.parametrize("order", [(), BEHIND, BETWEEN])
def test_update_is_local_under_zero(order: tuple[int, ...]) -> None:
    """No gather inside the update: gradients come in parts, parameters are gathered behind it, if at all. Nor does a
    layer leave its stage, where stages have unlike numbers of them."""
    given, storage, mesh = prepare(optax.adamw(1e-3), order)

    def placed(storage: Storage) -> list[jax.ShapeDtypeStruct]:
        shapes = zip(storage.shape(), storage.shardings(mesh), strict=True)
        return [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding) for s, sharding in shapes]

    shardings = (storage.shardings(mesh), given.storage.shardings(mesh))
    compiled = jax.jit(given.update, out_shardings=shardings).lower(
        placed(storage), placed(given.storage), placed(storage), LOSS
    ).compile()  # fmt: skip
    text = compiled.as_text()
    assert not any(f" {kind}(" in text for kind in ("all-gather", "all-reduce", "all-to-all", "collective-permute"))
    assert isinstance(jax.tree.leaves(compiled.output_shardings)[0], NamedSharding)
