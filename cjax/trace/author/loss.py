"""The user's loss: how it is called, and what it may return."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from cjax.tree import PyTree, kind_of, path_name

Key = jax.Array
# The user's loss, its optional arguments given by name: (model, batch, key, train) -> (scalar or `Mean`, aux).
Loss = Callable[[Any, PyTree, Key | None, bool], tuple[PyTree, PyTree]]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mean:
    """A weighted mean that has not been divided yet, so that it stays exact when the batch is cut into pieces.

    Args:
        total: scalar, the sum over all that counts (tokens, examples).
        weight: scalar, how much counted; a number to the derivative, so that it may not depend on what is trained.

    >>> def loss(model, batch):
    ...     losses = model(batch["x"])
    ...     return Mean((losses * batch["mask"]).sum(), batch["mask"].sum())
    """

    total: Any  # arrays or numbers as the user has them; arrays once they are checked
    weight: Any


def loss_caller(loss: Callable[..., object]) -> Loss:
    """`loss` with its optional arguments given by name and its result checked, as (scalar or Mean, aux)."""
    write = "Write `def loss(model, batch)`, adding `key` or `train` if you need them"
    if not callable(loss):
        raise TypeError(f"`loss` is {kind_of(loss)}, not a function. {write}.")
    parameters = inspect.signature(loss).parameters
    fixed = loss.keywords if isinstance(loss, functools.partial) else {}  # which stay as their author has fixed them
    extra = {name: None for name in ("key", "train") if name in parameters and name not in fixed}
    wants_key, wants_train = "key" in extra, "train" in extra
    try:
        inspect.signature(loss).bind(None, None, **extra)
    except TypeError as error:
        hint = ""
        if any(name in parameters for name in ("params", "variables", "state", "graphdef")):
            hint = " `model` has its parameters in it: call it as model(batch[...])."
        raise TypeError(f"`loss` takes {inspect.signature(loss)}. {write}.{hint}") from error

    def call(model: object, batch: PyTree, key: Key | None, train: bool) -> tuple[PyTree, PyTree]:
        given: dict[str, object] = {}
        if wants_key:
            if key is None:
                raise ValueError("The loss asks for `key`, but none was given: pass one, such as jax.random.key(0).")
            given["key"] = key
        if wants_train:
            given["train"] = train
        try:
            return _check_result(loss(model, batch, **given))
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise ValueError(
                f"The model or its loss asks for a named axis, as under pmap or shard_map: {error} Here each sees the "
                "whole batch, and its means and statistics are those of all devices: leave out "
                "BatchNorm(axis_name=...) and jax.lax.pmean."
            ) from error

    return call


def _check_result(result: object) -> tuple[PyTree, PyTree]:
    value, aux = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if isinstance(value, Mean):
        value = Mean(
            _check_scalar("The total of the loss", value.total), _check_scalar("The weight of the loss", value.weight)
        )
        total = value.total
    else:
        total = value = _check_scalar("The loss", value)
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise ValueError(
            f"The loss has dtype {total.dtype}, and only floating point numbers have gradients: return what is being "
            "minimised, and counts (of right answers, say) as aux."
        )
    leaves, treedef = jax.tree_util.tree_flatten_with_path(aux)
    aux = treedef.unflatten([_check_scalar(f"Aux value {path_name(path)!r}", leaf) for path, leaf in leaves])
    return value, aux


def _check_scalar(what: str, value: object) -> jax.Array:
    if not hasattr(value, "dtype") and not isinstance(value, (bool, int, float)):
        raise ValueError(f"{what} is {kind_of(value)}: return a scalar, or (scalar, aux).")
    value = jnp.asarray(value)
    if value.shape != ():
        raise ValueError(
            f"{what} has shape {value.shape}, not (): take jnp.mean(...), or return cjax.Mean(total, weight)."
        )
    return value
