import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def make_mesh(*shape: int, axes: str = "ab") -> Mesh:
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), tuple(axes[: len(shape)]))


def make_state(seed: int = 0) -> dict:
    """What a run holds, in the containers that Flax and optax use, sharded over 4 x 2 devices."""
    mesh = make_mesh(4, 2)

    def place(shape: tuple[int, ...], *spec: str | None, dtype=jnp.float32) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), sum(shape))
        return jax.device_put(jax.random.normal(key, shape, dtype), NamedSharding(mesh, P(*spec)))

    params = nnx.state(nnx.Linear(8, 12, rngs=nnx.Rngs(seed)))
    params["kernel"].set_value(place((8, 12), "a", "b"))
    params["bias"].set_value(place((12,), dtype=jnp.bfloat16))
    return {
        "params": params,
        "opt_state": optax.chain(optax.clip(1.0), optax.adam(1e-3)).init(params),
        "carried": {"a.b": [place((16, 3), ("a", "b")), jnp.zeros((0, 4))], "count": np.int64(5)},
        "step": 7,
        "key": jax.device_put(jax.random.key(seed + 3), NamedSharding(mesh, P())),
    }


def plain(tree) -> list[np.ndarray]:
    """The values of every leaf, random keys as their bits."""

    def read(leaf) -> np.ndarray:
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return [read(leaf) for leaf in jax.tree.leaves(tree)]


def assert_same(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(plain(actual), plain(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), "a random key is one again, not its bits"


@pytest.fixture
def state() -> dict:
    return make_state()
