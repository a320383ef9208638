"""Losses of examples, what is said of them, and their numbers from those of micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from cjax.trace.examples.verdict import lift_mean
from cjax.trace.jaxpr.simplify import simplify
from cjax.trace.microbatches.combine import denominator

BATCH, SEQ, DIM, VOCAB, MICRO = 8, 6, 5, 7, 4
RANDOM = np.random.default_rng(0)
PARAMS = {"w": RANDOM.normal(size=(DIM, VOCAB)).astype(np.float32), "v": RANDOM.normal(size=(DIM,)).astype(np.float32)}
DATA = {
    "x": RANDOM.normal(size=(BATCH, SEQ, DIM)).astype(np.float32),
    "labels": RANDOM.integers(0, VOCAB, (BATCH, SEQ)),
    "mask": RANDOM.integers(0, 2, (BATCH, SEQ)).astype(np.float32),
    "target": RANDOM.normal(size=(BATCH,)).astype(np.float32),
    "step": np.float32(3.0),
}


def logits(p, b):
    return jnp.tanh(b["x"]) @ p["w"]


def cross_entropies(p, b):
    return optax.softmax_cross_entropy_with_integer_labels(logits(p, b), b["labels"])


def pooled(p, b):
    return b["x"].mean(1) @ p["v"]


def mse(p, b):
    return jnp.mean((pooled(p, b) - b["target"]) ** 2)


def half(data):
    """The batch's first half."""
    return {name: leaf[: len(leaf) // 2] if np.ndim(leaf) else leaf for name, leaf in data.items()}


def trace(loss, data=DATA, other=None):
    """A trace of the loss, and what two numbers of rows say of it."""
    traces = [simplify(jax.make_jaxpr(loss)(PARAMS, each)) for each in (data, half(data) if other is None else other)]
    count = len(jax.tree.leaves(PARAMS))
    return traces[0], lift_mean(*traces, set(range(count, count + len(data))), count)


def outputs(closed, atoms):
    """The values of `atoms` of a trace, as a function of its inputs."""
    return jaxpr_as_fun(ClosedJaxpr(closed.jaxpr.replace(outvars=atoms), closed.consts))


def combined(loss, data):
    """The loss of the batch from those of two micro-batches, as `Lifted` says."""
    pieces = []
    for first in range(2):
        micro = {name: leaf[first::2] if np.ndim(leaf) else leaf for name, leaf in data.items()}
        closed, lifted = trace(loss, micro, data)
        args = jax.tree.leaves((PARAMS, micro))
        value = jaxpr_as_fun(closed)(*args)[0]
        if lifted.kind == "mean":
            pieces.append((value, 1.0))
            continue
        (weight,) = outputs(closed, [lifted.weight.atom])(*args)
        if lifted.total is not None:
            pieces.append((outputs(closed, [lifted.total])(*args)[0], weight))
        else:
            pieces.append((value * denominator(lifted, weight), weight))
    total, weight = (sum(part) for part in zip(*pieces, strict=True))
    return total / (denominator(lifted, weight) if lifted.kind == "ratio" else weight)
