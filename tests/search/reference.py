"""A model of a spec trained by its author: plain Flax, JAX and optax on one device. Nothing of cjax is read here.

What cjax promises of random numbers and micro-batches is written out again: step i has key `fold_in(key, i)`,
micro-batch j of several folds j into it (NNX: into the keys that the model carries, and counts of what was drawn move
once a step), and holds rows j, j+m, j+2m, ... What a model carries keeps its first dtype.
"""

import dataclasses
import functools
import re
import zlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util
from search.models import Spec, Total, batch_of, loss_of, model_of, parts_of, traits, wrt_of
from starts import drawn

from cjax.tree import PyTree

Flat = dict[str, Any]
NUM_STEPS = 3
SGD = optax.sgd(0.01, momentum=0.9)
TOO_LARGE = 1e6  # of a loss: training diverges, and rounding with it


@dataclasses.dataclass(frozen=True)
class Run:
    """Loss, aux and gradients of each step, and what the model has become."""

    steps: list[tuple[Any, PyTree, Flat]]
    params: Flat
    model_state: Flat


@dataclasses.dataclass(frozen=True)
class Author:
    """First values by path, and `apply(params, frozen, model_state, batch, key, part) -> (loss, aux, model_state)`;
    `streams` names what of the model state are random streams."""

    params: Flat
    frozen: Flat
    model_state: Flat
    apply: Callable[..., tuple[Any, PyTree, Flat]]
    streams: tuple[str, ...] = ()


def is_trained(spec: Spec) -> Callable[[str], bool]:
    pattern = wrt_of(spec)
    return lambda path: pattern is None or re.search(pattern, path) is not None


def with_aux(result: Any) -> tuple[Any, PyTree]:
    return result if isinstance(result, tuple) else (result, {})


def made(init: Callable[..., PyTree], is_own: bool, *args: Any) -> PyTree:
    """What `init` makes or, compiling nothing, other numbers in the same places."""
    if is_own:
        return jax.jit(init)(*args)
    params, rest = jax.eval_shape(init, *args)
    return drawn(params, 0), drawn(rest, 1, near=1.0)


def linen_author(spec: Spec, loss: Callable[..., Any], batch: PyTree, own_init: bool) -> Author:
    model, trained = model_of(spec), is_trained(spec)
    init = nn.init(lambda bound, batch: loss(bound, batch, True), model, mutable=True)

    def make(key: Any, batch: PyTree) -> tuple[Flat, Flat]:
        variables = dict(init({"params": key}, batch))
        params = variables.pop("params")
        return traverse_util.flatten_dict(params, sep="/"), traverse_util.flatten_dict(variables, sep="/")

    flat, model_state = made(make, own_init, jax.random.key(0), batch)

    def apply(params: Flat, frozen: Flat, model_state: Flat, batch: PyTree, key: Any, part: Any) -> Any:
        key = key if part is None else jax.random.fold_in(key, part)
        rngs = {"dropout": jax.random.fold_in(key, zlib.crc32(b"dropout"))}
        held = traverse_util.unflatten_dict(model_state, sep="/")
        run = nn.apply(lambda bound, batch: with_aux(loss(bound, batch, True)), model, mutable=list(held))
        trees = {"params": traverse_util.unflatten_dict(params | frozen, sep="/"), **held}
        (value, aux), updated = run(trees, batch, rngs=rngs)
        return value, aux, traverse_util.flatten_dict(dict(updated), sep="/")

    return Author(*(_among(flat, trained, yes) for yes in (True, False)), model_state, apply)


def _among(flat: Flat, trained: Callable[[str], bool], wanted: bool) -> Flat:
    return {path: leaf for path, leaf in flat.items() if trained(path) == wanted}


def by_path(state: Any) -> Flat:
    return {"/".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def nnx_author(spec: Spec, loss: Callable[..., Any], batch: PyTree, own_init: bool) -> Author:
    split: Any = None

    def make(key: Any) -> tuple[Flat, Flat]:
        nonlocal split
        model = model_of(spec)(nnx.Rngs(key))
        params, rest = nnx.state(model, nnx.Param), nnx.state(model, nnx.Not(nnx.Param))
        split = nnx.split(model)
        return by_path(params), by_path(rest)

    flat, model_state = made(make, own_init, jax.random.key(0))
    definition, state = split
    streams = {
        "/".join(map(str, path)): isinstance(variable, nnx.RngKey)
        for path, variable in nnx.to_flat_state(state)
        if isinstance(variable, nnx.RngState)
    }
    keys = [path for path, holds_key in streams.items() if holds_key]

    def apply(params: Flat, frozen: Flat, model_state: Flat, batch: PyTree, key: Any, part: Any) -> Any:
        values = params | frozen | model_state
        if part is not None:
            values |= {path: _folded(values[path], part) for path in keys}
        flat = nnx.to_flat_state(state)
        leaves = [(path, variable.replace(values["/".join(map(str, path))])) for path, variable in flat]
        model = nnx.merge(definition, nnx.from_flat_state(leaves))
        value, aux = with_aux(loss(model, batch))
        new = by_path(nnx.state(model, nnx.Not(nnx.Param)))
        return value, aux, new | {path: model_state[path] for path in keys}

    trained = is_trained(spec)
    return Author(*(_among(flat, trained, yes) for yes in (True, False)), model_state, apply, tuple(streams))


def _folded(keys: Any, part: Any) -> Any:
    return jax.vmap(lambda key: jax.random.fold_in(key, part))(keys.reshape(-1)).reshape(keys.shape)


class Diverged(Exception):
    """The author's own training does not go well, so that there is nothing to compare with."""


class Reference:
    """All that plans of one model are compared with; runs are made when they are asked for, once. They begin with what
    the author's own init makes, or with other numbers, which need no program."""

    def __init__(self, spec: Spec, steps: int = NUM_STEPS, own_init: bool = True) -> None:
        self.spec, self.num_steps = spec, steps
        self.batches = batch_of(spec, 0), batch_of(spec, 1)
        make = {"linen": linen_author, "nnx": nnx_author}[spec["flavour"]]
        # A ratio is taken apart as cjax promises to: its two sums, each over all micro-batches.
        loss = loss_of(spec | {"loss": "total"} if spec["loss"] == "masked" else spec)
        self.author = make(spec, loss, self.batches[0], own_init)

    def parts_of(self, microbatches: int) -> int:
        """In how many parts the reference must be computed: in one where their number must not matter."""
        kinds = traits(self.spec)
        return microbatches if any(kind.couples or kind.random or kind.state for kind in kinds) else 1

    def run(self, microbatches: int, is_shaken: bool = False) -> Run:
        """Args:
        microbatches: of the plan that is compared with it.
        is_shaken: whether it begins with the next larger numbers, to see what becomes of rounding.
        """
        return self._run(self.parts_of(microbatches), is_shaken)

    @functools.cache  # noqa: B019
    def _run(self, parts: int, is_shaken: bool) -> Run:
        author, key = self.author, jax.random.key(0)
        params, model_state = author.params, author.model_state
        if is_shaken:
            params = {
                name: np.nextafter(leaf, np.inf) if leaf.dtype in (np.float32, np.float64) else leaf
                for name, leaf in on_host(params).items()
            }
        # Momentum, zero at first: its own init would compile a program for each shape.
        state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(SGD.init, params))
        step = functools.partial(self._step, parts)
        step = step if self._is_rounded_twice() else jax.jit(step)
        steps = []
        for index in range(self.num_steps):
            batch = self.batches[index % 2]
            loss, aux, grads, params, model_state, state = step(
                params, model_state, state, batch, jax.random.fold_in(key, index)
            )
            steps.append(on_host((loss, aux, grads)))
            if not abs(float(loss)) < TOO_LARGE:
                raise Diverged(f"loss {float(loss)} in step {index}")
        return Run(steps, on_host(params), on_host(model_state))

    def _is_rounded_twice(self) -> bool:
        """Whether XLA gets the author's own derivative wrong: JAX's of a scattered extreme asks what equals the result,
        and XLA makes both sides of the question apart. One operation at a time they are what they are."""
        return any(part["config"].get("how") in ("max", "min", "segment_max") for part in parts_of(self.spec))

    def _step(self, parts: int, params: Flat, model_state: Flat, state: PyTree, batch: PyTree, key: Any) -> Any:
        outs, first = [], model_state
        for part in range(parts):
            model_state = model_state | {path: first[path] for path in self.author.streams}
            rows = jax.tree.map(lambda x, part=part: x[part::parts], batch)

            def total(params: Flat, rows: PyTree = rows, part: int = part, model_state: Flat = model_state) -> Any:
                value, aux, new = self.author.apply(
                    params, self.author.frozen, model_state, rows, key, part if parts > 1 else None
                )
                value = value if isinstance(value, Total) else Total(value, jnp.ones_like(value))
                return value.total, (value.weight, aux, new)

            (value, (weight, aux, new)), grads = jax.value_and_grad(total, has_aux=True)(params)
            model_state = {path: leaf if is_key(leaf) else leaf.astype(first[path].dtype) for path, leaf in new.items()}
            outs.append((value, weight, aux, grads))
        values, weights, auxes, grads = zip(*outs, strict=True)
        weight = sum(weights)
        grads = jax.tree.map(lambda *g: sum(g) / weight, *grads)
        aux = jax.tree.map(lambda *a: sum(a) / parts, *auxes)
        updates, state = SGD.update(grads, state, params)
        return sum(values) / weight, aux, grads, optax.apply_updates(params, updates), model_state, state


def is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def on_host(tree: PyTree) -> PyTree:
    """The leaves as NumPy arrays, random keys as their bits."""
    return jax.tree.map(lambda leaf: np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)
