"""What a user's `with` around a call of cjax means to it."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from cjax.tree import path_name

P = ParamSpec("P")
R = TypeVar("R")


def own_context(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, apart from contexts of JAX that are about the lines around it.

    `jax.transfer_guard("disallow")` is for transfers that nobody meant; what cjax is given, a batch of NumPy arrays or
    a seed, it is given to be placed. A mesh of `jax.set_mesh` is not the program's own: arrays that are made under it
    are typed by it, and fit no other. Without `jit` there is no program over many devices at all; the loss is traced
    once in any case. And `jax_debug_nans` runs what gave a NaN again, one operation at a time, which programs over many
    devices can't do; `not_nan` tells instead.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        is_set = not jax.sharding.get_abstract_mesh().empty
        mesh = jax.set_mesh(None) if is_set else contextlib.nullcontext()
        with mesh, jax.transfer_guard("allow"), jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
            return function(*args, **kwargs)

    return run


def not_nan(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, which raises FloatingPointError for a loss that is NaN where `jax_debug_nans` asks for it."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        result = function(*args, **kwargs)
        if any(_debugs(kind) for kind in ("nan", "inf")):
            _refuse_nan(function.__name__, result)
        return result

    return run


def _debugs(kind: str) -> bool:
    return getattr(jax.config, f"jax_debug_{kind}s")


def _refuse_nan(name: str, result: Any) -> None:
    loss = result[-1] if name == "step" else result[0] if name == "value_and_grad" else result
    for path, leaf in jax.tree_util.tree_flatten_with_path(loss["loss"] if name == "step" else loss)[0]:
        value = np.asarray(jax.device_get(leaf))
        if value.dtype.kind not in "fc":
            continue
        wrong = [kind for kind, is_wrong in (("nan", np.isnan), ("inf", np.isinf)) if is_wrong(value).any()]
        flags = [f"jax_debug_{kind}s" for kind in wrong if _debugs(kind)]
        if flags:
            where = path_name(path) or "the loss"
            raise FloatingPointError(
                f"{flags[0]} is set, and program.{name} gave {wrong[0]} ({where}). To see which operation it comes "
                "from, call the loss under the same flag without cjax: loss(program.model(state), batch), with the "
                "state before this one and the batch on one device."
            )
