"""What a plan computes against what the author's model computes on one device, number by number."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from cjax.tree import PyTree, leaf_names

# Of a leaf's norm, and of the norm of all leaves together, by the bytes of the narrowest numbers that a model computes
# in. The second is for leaves that are zero in exact arithmetic, such as the gradient of an attention key's bias.
# Rounding in another order stays below both in float32 up to 12 layers; what more it does is measured (see `NOISE`).
# float32 that matmuls round to TF32, 19 bits, counts as 3.
TF32 = 3
TOLERANCES = {8: (1e-9, 1e-12), 4: (1e-5, 1e-7), TF32: (1e-3, 1e-5), 2: (1e-2, 1e-4)}
# How much more than the measured effect of rounding is rounding's, too. The effect is measured once or twice, and small
# leaves may be lucky in that.
NOISE = 4.0
# Measured rounding excuses no more than this share of a leaf, so that a factor of 1.5 is found in any precision.
MOST = 0.3


@dataclass(frozen=True)
class Outcome:
    """Loss, aux, gradients and model state of one batch on the host, in the user's trees."""

    loss: float
    aux: PyTree
    grads: PyTree
    model_state: PyTree = None


@dataclass(frozen=True)
class Difference:
    """One number or array under the plan and on one device.

    Attributes:
      name: its path; `loss`, or `aux` and its path, beside the parameters' own.
      kind: loss, aux, gradient or model_state.
      off: the norm of the difference.
      norm: the norm of what one device gives.
      allowed: the norm of a difference that rounding may make.
      factor: by what the plan's is larger or smaller, if a number explains the difference.
    """

    name: str
    kind: str
    off: float
    norm: float
    allowed: float
    factor: float | None = None

    @property
    def error(self) -> float:
        """The difference as a share of what rounding allows."""
        if not np.isfinite(self.off):
            return float("inf")
        return self.off / max(self.allowed, np.finfo(float).tiny)

    def __str__(self) -> str:
        what = {"gradient": "gradient of ", "model_state": "state "}.get(self.kind, "") + self.name
        text = f"{what} is off by {self.off:.2g} where rounding allows {self.allowed:.2g} (norm {self.norm:.3g})"
        if self.factor is None or self.error <= 1:
            return text
        return text + (f", {self.factor:.4g} times as large" if abs(self.factor) > 1e-6 else ": it is zero")


@dataclass(frozen=True)
class Check:
    """How far a plan's loss, aux and gradients are from those of the author's own code on one device.

    Attributes:
      plan: the plan.
      loss: both losses, the plan's first.
      worst: the path of the leaf farthest off, or `loss`, or `aux/...`.
      error: its distance, as a share of what rounding allows.
      differences: all that was compared, worst first.
      reference: what it was compared with.
      notes: what could not be compared, and why.

    >>> differences = [Difference("out/kernel", "gradient", off=2e-7, norm=1.5, allowed=1e-5)]
    >>> check = Check("zero=3", (5.545, 5.545), "out/kernel", differences[0].error, differences)
    >>> print(check)
    zero=3: agrees with one device; loss 5.545 against 5.545; worst gradient out/kernel, at 0.02 of what rounding allows
    >>> check.ok, check.wrong
    (True, [])
    """

    plan: str
    loss: tuple[float, float]
    worst: str
    error: float
    differences: Sequence[Difference] = field(default=(), repr=False)
    reference: str = "one device"
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether everything agrees to rounding."""
        return self.error <= 1

    @property
    def is_close(self) -> bool:
        """The same as `ok`."""
        return self.ok

    @property
    def wrong(self) -> Sequence[Difference]:
        """What is farther off than rounding explains, worst first."""
        return [each for each in self.differences if each.error > 1]

    def __str__(self) -> str:
        losses = f"loss {self.loss[0]:.7g} against {self.loss[1]:.7g}"
        if self.ok:
            kind = self.differences[0].kind if self.differences else "gradient"
            what = f"gradient {self.worst}" if kind == "gradient" else self.worst
            worst = f"worst {what}, at {self.error:.2g} of what rounding allows"
            verdict = f"agrees with {self.reference}; {losses}; {worst}"
        else:
            first, others = self.wrong[0], len(self.wrong) - 1
            more = f"; {others} more of {len(self.differences)} differ" if others else ""
            verdict = f"DIFFERS from {self.reference}; {losses}; {first}{more}"
        return "; ".join([f"{self.plan}: {verdict}", *self.notes])


def compare(
    plan: str,
    mine: Outcome,
    theirs: Outcome,
    rounded: Sequence[Outcome],
    itemsize: int,
    scale: float = 0.0,
    reference: str = "one device",
) -> Check:
    """The plan's outcome against the author's.

    Args:
      plan: of `mine`.
      mine: under the plan.
      theirs: on one device. What is None in it is not compared.
      rounded: on one device, and rounded otherwise: how far these are from `theirs` shows what rounding does to this
        model.
      itemsize: bytes of the narrowest numbers that the author's code computes in.
      scale: how far the loss may move, were every parameter changed by its own size: a loss whose terms cancel is small
        beside what its rounding is measured by.
      reference: what `theirs` is, in words.
    """
    relative, of_all = TOLERANCES[itemsize]
    found = []
    for kind in ("gradient", "model_state", "aux", "loss"):
        rows = {"gradient": _grads, "model_state": _model_state, "aux": _aux, "loss": _loss}[kind]
        a, b, others = rows(mine), rows(theirs), [rows(other) for other in rounded]
        floor = 0.1 * relative * scale if kind == "loss" else 0.0
        if kind in ("gradient", "model_state"):
            floor = of_all * float(np.sqrt(sum(np.linalg.norm(x) ** 2 for x in b.values())))
        for name, wanted in b.items():
            found.append(_difference(name, kind, a[name], wanted, [c[name] for c in others], (relative, floor)))
    found.sort(key=lambda each: -each.error)
    return Check(plan, (mine.loss, theirs.loss), found[0].name, found[0].error, tuple(found), reference)


def _difference(
    name: str,
    kind: str,
    given: np.ndarray,
    wanted: np.ndarray,
    rounded: Sequence[np.ndarray],
    rule: tuple[float, float],
) -> Difference:
    (relative, floor), norm = rule, float(np.linalg.norm(wanted))
    same = np.array_equal(np.isfinite(given), np.isfinite(wanted))
    off = float(np.linalg.norm(given - wanted)) if same else float("inf")
    noise = NOISE * max([float(np.linalg.norm(other - wanted)) for other in rounded], default=0.0)
    if not np.isfinite(noise):
        noise = 0.0
    allowed = max(relative * norm + floor, min(noise, MOST * norm + 1e3 * floor))
    return Difference(name, kind, off, norm, allowed, _factor(given, wanted, off, norm))


def _factor(given: np.ndarray, wanted: np.ndarray, off: float, norm: float) -> float | None:
    """What `wanted` must be multiplied by to be `given`, if that is what is wrong with it."""
    if not norm or not np.isfinite(off):
        return None
    factor = float(np.real(np.vdot(wanted, given))) / norm**2
    return factor if np.linalg.norm(given - factor * wanted) <= 0.05 * off else None


def _grads(outcome: Outcome) -> dict[str, np.ndarray]:
    return on_host(outcome.grads)


def _model_state(outcome: Outcome) -> dict[str, np.ndarray]:
    return {} if outcome.model_state is None else on_host(outcome.model_state)


def _aux(outcome: Outcome) -> dict[str, np.ndarray]:
    return {f"aux/{name}".rstrip("/"): value for name, value in on_host(outcome.aux).items() if value.size}


def _loss(outcome: Outcome) -> dict[str, np.ndarray]:
    return {"loss": np.asarray([outcome.loss])}


def on_host(tree: PyTree) -> dict[str, np.ndarray]:
    """Leaves by name, in as many bits as there are, random keys as theirs."""
    found = {}
    for name, leaf in zip(leaf_names(tree), jax.tree.leaves(tree), strict=True):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        array = np.asarray(leaf)
        found[name] = array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)
    return found
