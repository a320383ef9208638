"""Averages of parameters over training, to score instead of the last ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from cjax.optim.masks import PyTree
from cjax.optim.trust import need_params


class ParamsEmaState(NamedTuple):
    """What `params_ema` keeps between steps; `find_ema` takes the average out of a whole optimizer's state.

    Attributes:
      count: int32[], updates so far.
      average: the parameters' tree, float32 at least.

    >>> state = params_ema(0.9).init({"w": jnp.zeros(2, jnp.bfloat16)})
    >>> int(state.count), state.average["w"].dtype
    (0, dtype('float32'))
    """

    count: jax.typing.ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]  # as optax names its own
    average: PyTree


def params_ema(decay: float = 0.999, warm_up: bool = False) -> optax.GradientTransformation:
    r"""Keeps an exponential moving average of the parameters; to be the last link of a chain, where updates are final.

    a <- d a + (1 - d) (w + u), where u is the update; a starts as w. d is `decay`, or with `warm_up` the lesser of
    `decay` and (1 + t) / (10 + t) after t updates, so that a short run is not the average of its first weights.

    Args:
      decay: at least 0 and below 1; about 1 / (1 - decay) steps count.
      warm_up: begin with shorter averages.

    Raises:
      ValueError: a decay outside of [0, 1).

    >>> import jax.numpy as jnp
    >>> tx = optax.chain(optax.sgd(1.0), params_ema(0.5))
    >>> w = {"w": jnp.array(2.0)}
    >>> updates, state = tx.update({"w": jnp.array(1.0)}, tx.init(w), w)
    >>> find_ema(state)
    {'w': Array(1.5, dtype=float32)}

    Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging", 1992; the warm-up is TensorFlow's.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay is {decay}; an average needs at least 0 and less than 1, such as 0.999")

    def init(params: PyTree) -> ParamsEmaState:
        wide = jax.tree.map(lambda w: jnp.array(w, jnp.promote_types(jnp.result_type(w), jnp.float32)), params)
        return ParamsEmaState(jnp.zeros((), jnp.int32), wide)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, ParamsEmaState]:
        params, count = need_params(params), jnp.asarray(state.count)
        weight = jnp.minimum(decay, (1 + count) / (10 + count)) if warm_up else decay

        def average(a: jax.Array, w: jax.Array, u: jax.Array) -> jax.Array:
            # The difference is small beside both: added to `a`, it loses less to rounding than two products do.
            return a + (1 - weight) * (w.astype(a.dtype) + u.astype(a.dtype) - a)

        averages = jax.tree.map(average, state.average, params, updates)
        return updates, ParamsEmaState(optax.safe_increment(count), averages)

    return optax.GradientTransformation(init, update)


def find_ema(state: Any) -> PyTree:
    """The average that `params_ema` keeps, as a tree like the parameters.

    Args:
      state: of a cjax program, of optax, or whatever has an `opt_state`, as Flax's TrainState and nnx.Optimizer do.

    Raises:
      ValueError: there is none, or several.

    >>> import jax.numpy as jnp
    >>> find_ema(optax.chain(optax.adam(1e-3), params_ema(0.99)).init({"w": jnp.array(2.0)}))
    {'w': Array(2., dtype=float32)}
    """
    if hasattr(state, "find_opt_states"):  # cjax's own, which loads no more than what is found
        found = state.find_opt_states(ParamsEmaState)
    else:
        nodes = jax.tree.leaves(getattr(state, "opt_state", state), is_leaf=_is_ema)
        found = [node for node in nodes if _is_ema(node)]
    if len(found) != 1:
        raise ValueError(
            f"this state holds {len(found) or 'no'} averages of parameters, and one is needed: train with "
            "optax.chain(your_optimizer, cjax.optim.params_ema(0.999))"
        )
    return found[0].average


def _is_ema(node: Any) -> bool:
    return isinstance(node, ParamsEmaState)
