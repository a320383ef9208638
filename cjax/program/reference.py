"""The author's own model and loss on one device: plain JAX, with nothing of a plan in it.

No trace is read or emitted again here, no layer stacked and nothing placed, so that a fault in any of these shows. A
loss that is the same on a batch as over its micro-batches is taken of the whole batch. Where it can't be, since
micro-batches draw their own random numbers or see their own statistics, the batch is cut as the plan cuts it.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cjax.gradients import divisors
from cjax.jax_compat.core import Equation, Jaxpr, Literal, jaxpr_as_fun, jaxprs_in_params
from cjax.program.check import TF32, Outcome
from cjax.program.composed import Composed
from cjax.trace.author.capture import Mean
from cjax.trace.jaxpr.primitives import having, name_of
from cjax.trace.microbatches.combine import denominator
from cjax.trace.stages.counters import depends
from cjax.tree import PyTree

_PRODUCTS, _ROUNDED = having("product"), ("float32", "complex64")
Inputs = tuple[PyTree, PyTree, PyTree, PyTree, jax.Array]  # params, frozen, model_state, batch, key


@dataclass(frozen=True)
class Reference:
    """How to compute it for one program.

    Attributes:
      composed: of the program.
      num: micro-batches that the batch is cut into; 1: it is not.
      why: why it is cut, or nothing.
    """

    composed: Composed
    num: int
    why: str

    def compiled(self, inputs: Inputs) -> tuple[Callable[..., Any], int, int]:
        """The gradients of the batch, or of a micro-batch, compiled for where the inputs are.

        Returns:
          The function, the bytes of the narrowest numbers it computes in, and the bytes it needs on the device.
        """
        *trees, batch, key = inputs
        rows = batch if self.num == 1 else self._rows(batch, 0)
        graded = functools.partial(_graded, self.composed, self.num)
        traced = jax.jit(graded).trace(*trees, rows, key, jnp.int32(0), self._divisors(batch, key))
        device = self.composed.mesh.devices.flat[0]
        compiled = traced.lower().compile()
        memory = compiled.memory_analysis()
        size = 0
        if memory is not None:
            size = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
        # A `default_matmul_precision` around this call may not have been around the one that traced the plan's loss.
        jaxprs = traced.jaxpr.jaxpr, self.composed.trace.closed.jaxpr
        return compiled, min(narrowest(jaxpr, has_tf32(device)) for jaxpr in jaxprs), size

    def __call__(self, run: Callable[..., Any], inputs: Inputs) -> Outcome:
        """The outcome by `run`, as `compiled` gives it."""
        params, frozen, model_state, batch, key = inputs
        if self.num == 1:
            total, weight, aux, grads, new, _ = run(params, frozen, model_state, batch, key, jnp.int32(0), [])
            return _outcome(total, weight, aux, grads, new)
        outs, divide_by, counters, new = [], self._divisors(batch, key), self.composed.trace.counters, model_state
        for index in range(self.num):
            rows = self._rows(batch, index)
            leaves, treedef = jax.tree.flatten(new)
            old = jax.tree.leaves(model_state)
            before = treedef.unflatten([old[i] if i in counters else leaf for i, leaf in enumerate(leaves)])
            *out, new, share = run(params, frozen, before, rows, key, jnp.int32(index), divide_by)
            outs.append((*out, share))
        totals, weights, auxes, grads, shares = zip(*outs, strict=True)
        ratio = self.composed.trace.ratio
        if ratio is None:
            weight = sum(weights)
        else:
            # Each part is a mean already: as much of the whole as its own denominator is.
            weight = denominator(ratio, functools.reduce(jnp.add, shares))
        aux = jax.tree.map(_averaged, *auxes, is_leaf=lambda x: isinstance(x, Mean))
        leaves, treedef = jax.tree.flatten(aux, is_leaf=lambda x: isinstance(x, Mean))
        sums = self.composed.trace.aux_sums
        aux = treedef.unflatten([leaf * self.num if i in sums else leaf for i, leaf in enumerate(leaves)])
        return _outcome(sum(totals), weight, aux, jax.tree.map(lambda *g: sum(g), *grads), new)

    def is_the_same_again(self, inputs: Inputs) -> bool:
        """Whether the author's code, run again, asks for the same computation: not if it draws numbers on the host."""
        *trees, batch, key = inputs
        rows = batch if self.num == 1 else self._rows(batch, 0)
        given = (*trees, rows, key, jnp.int32(0), self._divisors(batch, key))
        first, second = (jax.make_jaxpr(functools.partial(_graded, self.composed, self.num))(*given) for _ in range(2))
        consts = zip(first.consts, second.consts, strict=False)
        return str(first) == str(second) and all(np.array_equal(one, other) for one, other in consts)

    def _divisors(self, batch: PyTree, key: jax.Array) -> list[jax.Array]:
        """What each micro-batch divides by, where that is of the whole batch."""
        shared = self.composed.trace.shared
        return [] if self.num == 1 or shared is None else divisors(shared, batch, key, self.num, self.num)

    def _rows(self, batch: PyTree, index: int) -> PyTree:
        return jax.tree.map(lambda x: x[index :: self.num] if np.ndim(x) else x, batch)


def reference_of(composed: Composed) -> Reference:
    """What the results of this program are to be compared with."""
    num, trace = composed.plan.microbatches, composed.trace
    if num == 1:
        return Reference(composed, 1, "")
    loss = trace.closed.jaxpr.outvars[0]
    if composed.plan.loss == "microbatch":
        return Reference(composed, num, "loss=microbatch")
    if trace.results and trace.results[0].couplings:
        return Reference(composed, num, f"examples meet at {', '.join(sorted(map(str, trace.results[0].couplings)))}")
    if "index" in _kinds_of(composed, [loss]):
        return Reference(composed, num, "each draws its own random numbers")
    return Reference(composed, 1, "")


def _kinds_of(composed: Composed, wanted: Sequence[Any]) -> frozenset[str]:
    """Which kinds of inputs of the trace these results are made of."""
    jaxpr = composed.trace.closed.jaxpr
    on = {var: frozenset({leaf.kind}) for var, leaf in zip(jaxpr.invars, composed.trace.leaves, strict=True)}
    depends(jaxpr.eqns, on, lambda eqn, kinds: kinds)
    return frozenset().union(*(on.get(v, frozenset()) for v in wanted if not isinstance(v, Literal)))


def _graded(
    composed: Composed,
    num: int,
    params: PyTree,
    frozen: PyTree,
    model_state: PyTree,
    batch: PyTree,
    key: Any,
    index: Any,
    divide_by: list[jax.Array],
) -> Any:
    """Of one of `num` parts: total, weight, aux, gradients of the total, model state, and its share of a ratio."""
    capture, trace = composed.capture, composed.trace

    def scalar(params: PyTree) -> tuple[jax.Array, Any]:
        inner, inner_key = model_state, key
        if num > 1:
            inner, inner_key = capture.fold_model_state(model_state, index), jax.random.fold_in(key, index)
        value, aux, new = capture.apply(params, frozen, inner, batch, inner_key, True)
        new = capture.unfold(new, model_state) if num > 1 else new
        share = jnp.ones(())
        if divide_by:
            value = _traced(composed, params, frozen, model_state, [*jax.tree.leaves(batch), *divide_by], key, index)[0]
        if isinstance(value, Mean):
            total, weight = value.total, jax.lax.stop_gradient(value.weight)
        else:
            total, weight = value, jnp.ones_like(value)
            if num > 1 and trace.ratio is not None:
                share = _share(composed, params, frozen, model_state, batch, key, index)
                total = value * denominator(trace.ratio, share)
        return total, (weight, aux, new, share)

    (total, (weight, aux, new, share)), grads = jax.value_and_grad(scalar, has_aux=True)(params)
    return total, weight, aux, grads, new, share


def _share(composed: Composed, *inputs: Any) -> jax.Array:
    """The weight that was found in a loss that is a ratio: how much of the whole a micro-batch is."""
    return jax.lax.stop_gradient(_traced(composed, *inputs)[1])


def _traced(composed: Composed, *inputs: Any) -> list[jax.Array]:
    """The results of the loss as it was lifted, by its equations as they stand."""
    shaped = [
        x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.reshape(x, leaf.shape)
        for x, leaf in zip(jax.tree.leaves(inputs), composed.trace.leaves, strict=True)
    ]
    return jaxpr_as_fun(composed.trace.closed)(*shaped)


def _averaged(*parts: Any) -> Any:
    if isinstance(parts[0], Mean):
        return Mean(sum(part.total for part in parts), sum(part.weight for part in parts))
    return sum(jnp.asarray(part, jnp.result_type(float)) for part in parts) / len(parts)


def _outcome(total: Any, weight: Any, aux: PyTree, grads: PyTree, model_state: PyTree) -> Outcome:
    def value(total: Any, weight: Any) -> np.ndarray:
        total, weight = np.asarray(total), np.asarray(weight)
        return np.zeros_like(total) if weight == 0 else total / weight

    def divided(leaf: jax.Array) -> np.ndarray:
        array, by = np.asarray(leaf), np.asarray(weight)
        return array if by == 1 else array / (1 if by == 0 else by)

    numbers = jax.tree.map(
        lambda x: value(x.total, x.weight) if isinstance(x, Mean) else np.asarray(x),
        aux,
        is_leaf=lambda x: isinstance(x, Mean),
    )
    return Outcome(float(value(total, weight)), numbers, jax.tree.map(divided, grads), model_state)


def perturbed(params: PyTree, itemsize: int) -> PyTree:
    """Parameters off by as much as numbers of so many bytes are rounded: what that does, rounding may do."""
    step = {8: 2.0**-52, 4: 2.0**-23, TF32: 2.0**-11, 2: 2.0**-8}[itemsize]
    rng = np.random.default_rng(0)

    def moved(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return leaf
        array = np.asarray(leaf)
        sign = rng.integers(0, 2, array.shape) * 2 - 1
        wide = np.complex128 if np.iscomplexobj(array) else np.float64
        return jax.device_put((array.astype(wide) * (1 + step * sign)).astype(array.dtype), leaf.sharding)

    return jax.tree.map(moved, params)


def has_tf32(device: Any) -> bool:
    """Whether float32 matmuls of default precision round what they multiply to TF32: cards from A100 on do."""
    chip = re.fullmatch(r"(\d+)\.\d+", str(getattr(device, "compute_capability", "")))  # others have names
    return device.platform == "gpu" and chip is not None and int(chip[1]) >= 8


def narrowest(jaxpr: Jaxpr, tf32: bool = False) -> int:
    """Bytes of the narrowest floating point numbers in a jaxpr, those of complex numbers being half their own.

    With `tf32`, products of float32 count as 3, TF32 having 19 bits, unless a higher precision is asked of them.
    """
    found = 8
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            found = min(found, narrowest(inner, tf32))
        if tf32 and name_of(eqn) in _PRODUCTS and str(eqn.invars[0].aval.dtype) in _ROUNDED and _is_default(eqn):
            found = min(found, TF32)
        for var in eqn.outvars:
            dtype = getattr(var.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.inexact):
                size = np.dtype(dtype).itemsize // (2 if jnp.issubdtype(dtype, jnp.complexfloating) else 1)
                found = min(found, size)
    return max(found, 2)


def _is_default(eqn: Equation) -> bool:
    asked = eqn.params.get("precision")
    return all(each in (None, jax.lax.Precision.DEFAULT) for each in (asked if isinstance(asked, tuple) else (asked,)))
