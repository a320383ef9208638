"""Linen and NNX models become pure functions over the user's own trees. This file and its neighbours know Flax."""

import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.core import DenyList
from flax.errors import InvalidRngError, ModifyScopeVariableError

from cjax.jax_compat.modules import forget_eager_sharding, sown_collections, without_eager_sharding
from cjax.jax_compat.tracers import quick_attribute_errors
from cjax.trace.author import linen as linen_parts
from cjax.trace.author import nnx as nnx_parts
from cjax.trace.author.loss import Loss, loss_caller
from cjax.trace.author.loss import Mean as Mean
from cjax.trace.author.replay import replayed, trace_live
from cjax.trace.author.trained import Wrt, check_trained, matcher
from cjax.tree import PyTree, kind_of, leaf_names, path_name

Key = jax.Array
Trees = tuple[PyTree, PyTree, PyTree]


@dataclass(frozen=True)
class Capture:
    """A user's model and loss as pure functions over the user's own trees.

    `params` is what the optimizer sees, `frozen` are parameters that are not trained, `model_state` is the rest of the
    model's state (running statistics, caches, NNX random streams).
    """

    kind: str  # "linen" | "nnx"
    init: Callable[[Key], Trees]
    # apply(params, frozen, model_state, batch, key, train) -> (scalar | Mean, aux, new_model_state); given
    # `call(model, batch, key, train) -> (value, aux)`, that instead of the user's loss. An NNX model's in training also
    # puts into a dict `rewritten` what parameters are behind it that are not the arrays they were.
    apply: Callable[..., tuple[PyTree, PyTree, PyTree]]
    rebuild: Callable[[PyTree, PyTree, PyTree], object]
    # Micro-batch i draws other random numbers than micro-batch j: `fold_model_state` folds its index into the keys that
    # the model carries, `unfold(new_model_state, model_state)` puts the unfolded keys back.
    fold_model_state: Callable[[PyTree, jax.Array], PyTree]
    unfold: Callable[[PyTree, PyTree], PyTree]
    params_shape: PyTree
    frozen_shape: PyTree
    model_state_shape: PyTree
    initial: Trees | None
    # Of each leaf of the model state, whether it is a random stream's: each micro-batch draws its own.
    random: tuple[bool, ...]
    dim_names: dict[str, tuple[str | None, ...]]
    name: str = "model"  # what the author calls it


def capture(model: object, loss: Callable[..., object], batch: PyTree, wrt: Wrt = None) -> Capture:
    """Takes a Flax model and a loss apart into pure functions and shapes, without allocating any parameter.

    Args:
        model: a `flax.linen.Module`, a `flax.nnx.Module` that holds its weights, or a builder
            `lambda rngs: Net(rngs=rngs)`.
        loss: `loss(model, batch[, key][, train])`, returning a scalar mean, a `Mean`, or `(either, aux)`.
        batch: pytree of arrays or `jax.ShapeDtypeStruct`s, global shapes. Values are read only by parameters whose
            initializers look at the data.
        wrt: what is trained: a regex searched in the leaf's path, `(path, leaf) -> bool`, or, for NNX, a filter such
            as `nnx.LoRAParam`. By default all of Linen's "params", all of `nnx.Param`.

    Raises:
        TypeError: `model` is not one of the three, or `loss` does not take (model, batch).
        ValueError: nothing is trained, or the initial values need a batch that is not there.

    >>> captured = capture(nn.Dense(3), lambda model, x: model(x).mean(), jax.ShapeDtypeStruct((2, 5), jnp.float32))
    >>> captured.params_shape["kernel"].shape
    (5, 3)
    """
    call = loss_caller(loss)
    _check_model(model)
    if isinstance(model, nn.Module):
        return _capture_linen(model, call, batch, wrt)
    return _capture_nnx(model, call, batch, wrt)


def _check_model(model: object) -> None:
    write = "Pass a flax.linen module, a flax.nnx module, or a builder such as `lambda rngs: Net(rngs=rngs)`"
    name = type(model).__name__
    if isinstance(model, nn.Module):
        if model.scope is not None:
            raise TypeError(f"This {name} is already bound to variables. Pass the unbound module: `model.unbind()[0]`.")
    elif isinstance(model, nnx.Module):
        pass
    elif isinstance(model, type):
        hint = f"`{model.__name__}(...)`"
        if issubclass(model, nnx.Module):
            hint = f"`lambda rngs: {model.__name__}(..., rngs=rngs)`"
        raise TypeError(f"`model` is the class {model.__name__}, not a model. Pass {hint}.")
    elif hasattr(model, "apply_fn") and hasattr(model, "params"):
        raise TypeError(
            f"`model` is a {name}: cjax makes and holds the state itself. Pass the module it was made from."
        )
    elif isinstance(model, nnx.Optimizer):
        raise TypeError(
            "`model` is an nnx.Optimizer: pass the nnx.Module, and the optax transformation as `optimizer`."
        )
    elif any(base.__module__.startswith("torch.") for base in type(model).__mro__):
        raise TypeError(f"`model` is a PyTorch module ({name}): cjax trains Flax models. {write}.")
    elif not callable(model):
        raise TypeError(f"`model` is {kind_of(model)}. {write}.")
    elif list(_parameters(model)) != ["rngs"]:
        wanted = ", ".join(_parameters(model))
        raise TypeError(f"`model` is a function of ({wanted}); a builder takes one argument, named rngs. {write}.")


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    """The parameters of `function` that a caller must give."""
    parameters = inspect.signature(function).parameters
    return {
        name: p
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }


def _read_back(model_state: PyTree, after: PyTree, known: tuple[str, ...] = ()) -> PyTree:
    """The values of `after` in the structure and the dtypes of `model_state`. Leaves named in `known` are passed
    over."""
    values = {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(after)[0]}
    for name in known:
        values.pop(name, None)
    leaves = []
    for name, old in zip(leaf_names(model_state), jax.tree.leaves(model_state), strict=True):
        if name not in values:
            raise ValueError(
                f"The loss removed {name} from the model state: a training step must keep its structure. Leave it "
                "in, or do not create it in the constructor."
            )
        new = jnp.asarray(values.pop(name))
        if new.shape != old.shape:
            raise ValueError(
                f"The loss changed the shape of {name} from {old.shape} to {new.shape}: "
                f"a training step must keep the shapes of the model state. Create it with the shape {new.shape}, or "
                "keep what grows outside of the model."
            )
        if new.dtype != old.dtype and _kind(new.dtype) != _kind(old.dtype):
            raise ValueError(
                f"The loss changed the dtype of {name} from {old.dtype} to {new.dtype}: a training step must keep what "
                f"the model state is made of. Create it with the dtype that it is given later, {new.dtype}."
            )
        # A statistic computed in another precision goes back to the state's own: each new dtype would be a compile.
        leaves.append(new if new.dtype == old.dtype else new.astype(old.dtype))
    if values:
        raise ValueError(
            f"The loss added {', '.join(values)} to the model state, which must keep its structure. "
            "Create them in the constructor, or take them out again inside the loss (NNX: `nnx.pop(model, ...)`)."
        )
    return jax.tree.unflatten(jax.tree.structure(model_state), leaves)


def _kind(dtype: np.dtype) -> object:
    """What numbers of any precision are: whole, real, complex, true or false, or keys of one kind."""
    kinds = (jnp.integer, jnp.floating, jnp.complexfloating)
    return next((kind for kind in kinds if jnp.issubdtype(dtype, kind)), dtype)


def _names(annotations: Mapping[str, Iterable[object]]) -> dict[str, tuple[str | None, ...]]:
    """The author's names for dims. A dim that was given several mesh axes has no name of its own."""
    return {
        leaf: tuple(name if isinstance(name, str) else None for name in names) for leaf, names in annotations.items()
    }


def _capture_linen(model: nn.Module, call: Loss, batch: PyTree, wrt: Wrt) -> Capture:
    matches = matcher(wrt)

    def make(key: Key, batch: PyTree) -> Trees:
        init = nn.init(lambda bound, batch: call(bound, batch, key, True), model, mutable=True)
        with sown_collections() as sown:
            try:
                variables = dict(init({"params": key}, batch))
            except KeyError as error:
                raise linen_parts.bridged(error) from error
        params = variables.pop("params", {})
        model_state = {name: tree for name, tree in variables.items() if name not in sown}
        trained = linen_parts.prune(params, lambda path, leaf: matches(path, leaf))
        return trained, linen_parts.prune(params, lambda path, leaf: not matches(path, leaf)), model_state

    init, (params_shape, frozen_shape, model_state_shape) = replayed(make, batch)
    check_trained(wrt, params_shape, frozen_shape)
    # Asked for before it is missed: most models know this stream only, and a model may look whether it is there.
    streams: dict[bool, list[str]] = {True: ["dropout"], False: []}

    def apply(
        params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: Key, train: bool, call: Loss = call
    ) -> tuple[PyTree, PyTree, PyTree]:
        variables = linen_parts.unbox({"params": linen_parts.join(params, frozen), **model_state})
        fixed = ["params"] if train else ["params", *model_state]
        run = nn.apply(lambda bound, batch: call(bound, batch, key, train), model, mutable=DenyList(fixed))
        while True:
            rngs = {name: jax.random.fold_in(key, zlib.crc32(name.encode())) for name in streams[train]}
            try:
                (value, aux), updated = run(variables, batch, rngs=rngs)
                break
            except InvalidRngError as error:
                # The aborted attempt leaves only dead equations in the trace, and happens once for each stream.
                streams[train].append(linen_parts.next_stream(error, streams[train], train))
            except ModifyScopeVariableError as error:
                if train:
                    raise
                what = "The loss updates the model's statistics during evaluation."
                raise ValueError(f"{what} {linen_parts.EVAL_HINT}") from error
        if not train:
            return value, aux, model_state
        kept = {name: updated.get(name, tree) for name, tree in variables.items() if name in model_state}
        return value, aux, _read_back(model_state, kept)

    def rebuild(params: PyTree, frozen: PyTree, model_state: PyTree) -> nn.Module:
        return model.bind(linen_parts.unbox({"params": linen_parts.join(params, frozen), **model_state}))

    return Capture(
        kind="linen", name=type(model).__name__, init=init, apply=apply, rebuild=rebuild,
        fold_model_state=lambda model_state, index: model_state, unfold=lambda new_model_state, model_state:
        new_model_state, params_shape=params_shape, frozen_shape=frozen_shape, model_state_shape=model_state_shape,
        initial=None, random=(False,) * len(jax.tree.leaves(model_state_shape)),
        dim_names=_names(linen_parts.box_names(params_shape) | linen_parts.box_names(frozen_shape)),
    )  # fmt: skip


def _unplaced(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type)


def _capture_nnx(model: object, call: Loss, batch: PyTree, wrt: Wrt) -> Capture:
    trained = nnx_parts.param_filter(wrt)
    graphdef: nnx.GraphDef[nnx.Module] | None = None
    name = ""

    def split(model: nnx.Module) -> Trees:
        nonlocal graphdef, name
        name = type(model).__name__
        # What was sown before is not state. `merge` makes new Variables, so the user's own model keeps it.
        model = nnx.merge(*nnx.split(model), copy=True)
        nnx.pop(model, nnx.Intermediate)
        graphdef, *states = nnx.split(model, trained, nnx.Param, ...)
        params, frozen, model_state = states
        return params, frozen, model_state

    def make(key: Key, batch: PyTree) -> Trees:
        assert callable(model), "a builder"
        with without_eager_sharding(), quick_attribute_errors(key):
            built = model(rngs=nnx.Rngs(key))
        if not isinstance(built, nnx.Module):
            raise TypeError(
                f"The builder returned {kind_of(built)}, not a flax.nnx module: return one, as "
                "`lambda rngs: Net(rngs=rngs)` does."
            )
        forget_eager_sharding(built)
        return split(built)

    initial = None
    if isinstance(model, nnx.Module):
        initial = split(model)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(initial)):
            raise TypeError("This model holds shapes, not weights. Pass the builder: `lambda rngs: Net(rngs=rngs)`.")
        held = initial
        # Without a placement: weights that were made under a mesh are typed by it, and are here on the program's.
        init, shapes = lambda key: held, jax.tree.map(_unplaced, jax.eval_shape(lambda trees: trees, initial))
    else:
        init, shapes = replayed(make, batch)
    params_shape, frozen_shape, model_state_shape = shapes
    definition = graphdef
    assert definition is not None
    check_trained(wrt, params_shape, frozen_shape)

    def apply(
        params: PyTree,
        frozen: PyTree,
        model_state: PyTree,
        batch: PyTree,
        key: Key,
        train: bool,
        call: Loss = call,
        rewritten: dict[str, jax.Array] | None = None,
    ) -> tuple[PyTree, PyTree, PyTree]:
        if not train:
            return *score(params, frozen, model_state, batch, key, call), model_state
        model = nnx.merge(definition, params, frozen, model_state, copy=True)
        nnx_parts.set_train(model)
        with quick_attribute_errors((model_state, batch)):
            value, aux = call(model, batch, key, True)
        state = nnx.state(model, nnx.Not(nnx.Intermediate))
        if rewritten is not None:
            rewritten |= nnx_parts.rewritten(model, state, (params, frozen))
        return value, aux, _read_back(model_state, state, known=leaf_names(params) + leaf_names(frozen))

    def score(
        params: PyTree, frozen: PyTree, model_state: PyTree, batch: PyTree, key: Key, call: Loss
    ) -> tuple[PyTree, PyTree]:
        leaves, treedef = jax.tree.flatten(model_state)

        def evaluate(*leaves: jax.Array) -> tuple[PyTree, PyTree]:
            model = nnx.merge(definition, params, frozen, treedef.unflatten(leaves), copy=True)
            nnx_parts.set_eval(model)
            return call(model, batch, key, False)

        replay = trace_live(evaluate, leaves)
        nnx_parts.check_not_random(replay.used, model_state)
        return replay(*leaves)

    return Capture(
        kind="nnx", name=name, init=init, apply=apply,
        rebuild=lambda *trees: nnx.merge(definition, *trees, copy=True),
        fold_model_state=nnx_parts.fold_keys, unfold=nnx_parts.restore_keys,
        params_shape=params_shape, frozen_shape=frozen_shape, model_state_shape=model_state_shape, initial=initial,
        random=tuple(nnx_parts.random_leaves(model_state_shape)),
        dim_names=_names(nnx_parts.metadata_names(params_shape) | nnx_parts.metadata_names(frozen_shape)),
    )  # fmt: skip
