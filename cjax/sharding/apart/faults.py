"""What XLA's partitioner gets wrong, as data: operations that cjax does not leave to it where they could be split.

Each entry has been seen in the versions of JAX that it names, by `python tests/search/operations.py`, and has an
example in `tests/search/test_operations.py` that tells when XLA has mended it. An operation without facts is not left
to it either: nobody knows along which of its dims it may be split.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.core

from cjax.jax_compat.core import Equation
from cjax.trace.jaxpr.primitives import having, name_of, named, without_facts
from cjax.trace.jaxpr.view import open_bodies


@dataclass(frozen=True)
class Fault:
    """One of them: which equations, what XLA makes of them, in which versions of JAX, and what cjax does instead."""

    name: str
    primitives: frozenset[str]
    what: str
    versions: tuple[str, ...]
    instead: str
    concerns: Callable[[Equation], bool] = lambda eqn: True


WINDOWED = having("window")
FAULTS = (
    Fault(
        "convolutions",
        named("conv_general_dilated"),
        "The gradient of the kernel, with groups or where positions or the window are split also the result, is as "
        "many times too large as an axis has devices along which nothing of the convolution is split.",
        ("0.10.2", "0.12.0.1"),
        "computed on each device's own rows and channels, in a region that is manual over every axis",
    ),
    Fault(
        "Fourier transforms",
        named("fft"),
        "Where dims are split, transformed ones or others, XLA's compiler ends with a RET_CHECK or stops the process.",
        ("0.10.2", "0.12.0.1"),
        "computed on each device's own rows, the transformed dims whole",
    ),
    Fault(
        "windows",
        WINDOWED,
        "Where the dim that windows move along is split, gradients of sums lack what other devices have of a window, "
        "or XLA's verifier refuses the program.",
        ("0.10.2", "0.12.0.1"),
        "computed on each device's own slice of the other dims",
    ),
    Fault(
        "sorting",
        named("sort"),
        "XLA stops the process at the gather of its gradient where two axes split other dims.",
        ("0.10.2", "0.12.0.1"),
        "computed on each device's own slice of the other dims",
    ),
    Fault(
        "scattered extremes",
        having("extreme") & having("scatter"),
        "Where an axis that does not divide the updates splits them, the result is of a row too many.",
        ("0.10.2", "0.12.0.1"),
        "computed on each device's own slice of the dims that are not looked up",
    ),
    Fault(
        "padding between elements",
        named("pad"),
        "XLA's verifier refuses the program where the padded dim is split.",
        ("0.10.2", "0.12.0.1"),
        "computed on each device's own slice of the other dims",
        lambda eqn: any(interior for _, _, interior in eqn.params["padding_config"]),
    ),
)
KNOWN = ("0.10.2", "0.12.0.1")  # versions of JAX whose XLA has been searched


def fault_of(eqn: Equation) -> Fault | None:
    """The entry that an equation falls under."""
    name = name_of(eqn)
    return next((each for each in FAULTS if name in each.primitives and each.concerns(eqn)), None)


def is_apart(eqn: Equation) -> bool:
    """Whether an equation is not left to XLA's partitioner: it falls under an entry, or nobody knows what it does.

    What works on mutable arrays, or has effects, stays where it is: a region would not have them.
    """
    if fault_of(eqn) is not None:
        return True
    arrays = all(isinstance(v.aval, jax.core.ShapedArray) for v in (*eqn.invars, *eqn.outvars))
    return without_facts(eqn) and arrays and not eqn.effects


def holds(eqn: Equation, concerns: Callable[[Equation], bool]) -> bool:
    """Whether a jaxpr inside an equation has one of these operations."""
    if name_of(eqn) == "shard_map":  # whose author has said what each device does
        return False
    return any(concerns(inner) or holds(inner, concerns) for body in open_bodies(eqn) for inner in body.eqns)


def holds_apart(eqn: Equation) -> bool:
    """Whether a jaxpr inside an equation has an operation that is not left to XLA's partitioner."""
    return holds(eqn, is_apart)
