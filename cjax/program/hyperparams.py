"""Numbers that an optimizer keeps in its state (`optax.inject_hyperparams`), where a checkpoint has others.

Whoever goes on with `learning_rate=1e-4` after a run with 1e-3 trains with 1e-3: it is in the state, which is restored.
"""

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from cjax.tree import PyTree

_logger = logging.getLogger(__name__)


def warn_of_others(optimizer: optax.GradientTransformation, params: PyTree, opt_state: PyTree) -> None:
    """Says which numbers of a restored state are not those that the optimizer was made with, and how to have these.

    Args:
      optimizer: as it was given.
      params: shapes of what it was given for.
      opt_state: its state, restored.
    """
    restored = dict(_numbers(opt_state))
    if not restored or jax.process_index() != 0:
        return

    def begun() -> dict[str, Any]:
        """The numbers depend on no parameter, so that XLA makes none."""
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
        return dict(_numbers(optimizer.init(zeros)))

    for where, given in jax.jit(begun)().items():
        if not np.allclose(value := restored[where], given, rtol=1e-6, atol=0):
            _logger.warning(
                "cjax: the restored state goes on with %s = %.6g, as it was saved, and the optimizer here was made "
                "with %.6g. To train with that: arrays = program.to_arrays(state); arrays['opt_state']%s = %.6g; "
                "state = program.from_arrays(arrays)",
                where.split("'")[-2], value, given, where, given,
            )  # fmt: skip


def _numbers(opt_state: PyTree) -> Iterator[tuple[str, Any]]:
    """The numbers that no schedule makes anew at each update, each with the way there."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(opt_state, is_leaf=_keeps_numbers)
    for path, node in nodes:
        if not _keeps_numbers(node):
            continue
        where = jax.tree_util.keystr(path)
        for name, value in node.hyperparams.items():
            if name not in node.hyperparams_states and np.ndim(value) == 0:
                yield f"{where}.hyperparams[{name!r}]", value
        for further, value in _numbers(node.inner_state):
            yield f"{where}.inner_state{further}", value


def _keeps_numbers(node: Any) -> bool:
    return hasattr(node, "hyperparams") and hasattr(node, "hyperparams_states")
