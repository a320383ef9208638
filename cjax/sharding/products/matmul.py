"""Matmuls whose operands are all split: gather parts of both, multiply, scatter the result.

The three products of Agarwal et al. (3D, 1995), van de Geijn and Watts (SUMMA, 1997) and Wang et al. (Tesseract, 2021),
as Colossal-AI (Bian et al., 2021) uses them for layers. X [M, K] times W [K, N] is Y [M, N], and

    mode  X           W           Y           forward                           backward
    2d    (r, c)      (r, c)      (r, c)      gather X over c, W over r         again; scatter dX over c, dW over r
    2.5d  ((d,r), c)  (r, c)      ((d,r), c)  as 2d                             as 2d; sum dW over d
    3d    ((i,j), k)  ((k,i), j)  ((i,k), j)  gather X over j, W over i;        gather all three; scatter dX over j,
                                              scatter Y over k                  dW over i

Operands are gathered again in the backward pass: what a mode promises to save in memory depends on it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from cjax.sharding.products.region import in_region, raised_on_cpu
from cjax.sharding.storage.storage import axes_of_entry

Contraction = tuple[tuple[int, ...], tuple[int, ...]]  # dims of the left and of the right operand
Mode = Literal["2d", "2.5d", "3d"]

STEP_BYTES = 32 * 2**20  # of a gathered operand; pieces much smaller than that keep no link busy
MAX_STEPS = 4


@dataclass(frozen=True)
class Move:
    """A gather or a scatter of dim `dim` along mesh axis `axis`."""

    axis: str
    dim: int


@dataclass(frozen=True)
class Spread:
    """How a product of two tensors is spread over a mesh; its result has X's free dims, then W's.

    Args:
      contracted: dims of X and W that the product sums over.
      x, w, y: where operands and result live.
      gather_x, gather_w: what is gathered before; None for an operand that is whole where it is used.
      scatter_y: over which axis the partial results are summed, and which dim of the sum each device keeps.
    """

    contracted: Contraction
    x: PartitionSpec
    w: PartitionSpec
    y: PartitionSpec
    gather_x: Move | None
    gather_w: Move | None
    scatter_y: Move | None = None


def multiply(
    x: jax.Array,
    ws: Sequence[jax.Array],
    spreads: Sequence[Spread],
    mesh: Mesh,
    *,
    precision: Any = None,
    steps: int | None = None,
    keep: bool = False,
    leads: Sequence[PartitionSpec] = (),
    waits: bool = False,
) -> list[jax.Array]:
    """The products of `x` with each of `ws`; `x` is gathered once, and its gradients are summed before one scatter.

    Args:
      x: the operand that all products share.
      ws: the others.
      spreads: of each product; all with the same `x` and `gather_x`.
      mesh: the mesh; in a manual region, the region's own takes its place.
      precision: of the matmuls, as `jax.lax.dot_general` takes it.
      steps: into how many pieces a transfer is cut, so that one arrives while the last is multiplied; by size if None.
      keep: keep gathered operands for the backward pass, which then gathers nothing again.
      leads: of each of `ws` the placement of dims in front, on which each device has a copy of its own; none by
        default. Its gradient comes back on them, and is not summed.
      waits: whether nobody reads the gradient of `x` before those of `ws` are made, which are multiplied while it is
        scattered. Not with `keep`.
    """
    steps = _steps(x, ws, spreads, mesh) if steps is None else steps
    result = jnp.result_type(x, *ws)
    x, ws = raised_on_cpu(x, mesh), [raised_on_cpu(w, mesh) for w in ws]
    products = _Products(tuple(spreads), precision, steps)
    leads = leads or [PartitionSpec()] * len(ws)
    copies = [PartitionSpec(*lead, *s.w) for lead, s in zip(leads, spreads, strict=True)]
    in_specs, out_specs = [spreads[0].x, *copies], [s.y for s in spreads]
    sums = [products.beyond(s) for s in spreads]

    def own(copies: Sequence[jax.Array]) -> list[jax.Array]:
        return [w.reshape(w.shape[len(lead) :]) for w, lead in zip(copies, leads, strict=True)]

    if not keep:
        found = in_region(
            lambda x, *ws: products(x, own(ws)), (x, *ws), in_specs, out_specs, mesh, sums,
            differentiated=lambda x, *ws: products.differentiated(x, own(ws)), as_is=True,
            waits=waits,
        )  # fmt: skip
        return [y.astype(result) for y in found]
    assert not any(leads), "copies are not gathered"
    moves = [spreads[0].gather_x, *(s.gather_w for s in spreads)]
    axes = {a for spec in (*in_specs, *out_specs) for entry in spec for a in axes_of_entry(entry)}
    gathered = [_gathered(*each, axes, mesh) for each in zip((x, *ws), in_specs, moves, strict=True)]
    spreads = [replace(s, gather_x=None, gather_w=None) for s in spreads]
    rest = _Products(tuple(spreads), precision, 1)
    operands, specs = zip(*gathered, strict=True)
    found = in_region(
        lambda x, *ws: rest(x[0], [w[0] for w in ws]), operands, specs, out_specs, mesh, sums,
        differentiated=lambda x, *ws: rest.differentiated(x[0], [w[0] for w in ws]), as_is=True,
    )  # fmt: skip
    return [y.astype(result) for y in found]


def _gathered(
    operand: jax.Array, spec: PartitionSpec, move: Move | None, axes: set[str], mesh: Mesh
) -> tuple[jax.Array, PartitionSpec]:
    """An operand gathered once for both passes: a copy for each device, on a dim of its own, so that its gradient comes
    back device by device and is scattered before it is summed."""
    if move is None:
        return operand[None], PartitionSpec(None, *spec)
    kept = PartitionSpec(*(tuple(a for a in axes_of_entry(e) if a != move.axis) or None for e in spec))
    others = sorted(axes - {move.axis} - {a for entry in kept for a in axes_of_entry(entry)})
    copies = PartitionSpec((move.axis, *others), *kept)
    (found,) = in_region(lambda part: [_gather(part, move)[None]], (operand,), (spec,), (copies,), mesh)
    return found, copies


@dataclass(frozen=True)
class _Products:
    """What one device does: products of its part of X with its parts of the Ws."""

    spreads: tuple[Spread, ...]
    precision: Any
    steps: int
    is_differentiated: bool = False

    @property
    def differentiated(self) -> "_Products":
        return replace(self, is_differentiated=True)

    def beyond(self, spread: Spread) -> tuple[str, ...]:
        """Axes over which the product sums, its own scatter aside."""
        summed = [a for d in spread.contracted[0] for a in axes_of_entry(spread.x[d])]
        moved = {m.axis for m in (spread.gather_x, spread.scatter_y) if m is not None}
        return tuple(a for a in summed if a not in moved)

    def __call__(self, x: jax.Array, ws: Sequence[jax.Array]) -> list[jax.Array]:
        first = self.spreads[0]
        if all(_sums_pieces(s) for s in self.spreads):
            return self._in_sums(x, ws)
        if all(_joins_pieces(s, s.gather_x, 0) for s in self.spreads) and first.gather_x is not None:
            gathered = [_gather(w, s.gather_w) for w, s in zip(ws, self.spreads, strict=True)]
            wholes = [_gather(part, first.gather_x) for part in _pieces(x, first.gather_x.dim, self.steps)]
            pieces = [[self._one(x, w, s) for w, s in zip(gathered, self.spreads, strict=True)] for x in wholes]
            dims = [s.scatter_y.dim for s in self.spreads if s.scatter_y is not None]
            return [jnp.concatenate(ys, axis=d) for ys, d in zip(zip(*pieces, strict=True), dims, strict=True)]
        x = _gather(x, first.gather_x)
        return [self._one_w(x, w, s) for w, s in zip(ws, self.spreads, strict=True)]

    def _in_sums(self, x: jax.Array, ws: Sequence[jax.Array]) -> list[jax.Array]:
        """Piece after piece of the contracted dim, as SUMMA does: the next is on its way while one is multiplied."""
        first = self.spreads[0]
        assert first.gather_x is not None
        cut = [_pieces(w, s.gather_w.dim, self.steps) for w, s in zip(ws, self.spreads, strict=True) if s.gather_w]
        sums: list[Any] = [None] * len(ws)
        for index, part in enumerate(_pieces(x, first.gather_x.dim, self.steps)):
            gathered = _gather(part, first.gather_x)
            for n, spread in enumerate(self.spreads):
                y = self._dot(gathered, _gather(cut[n][index], spread.gather_w), spread)
                sums[n] = y if sums[n] is None else sums[n] + y
        return [
            _scatter(y.astype(jnp.result_type(x, w)), s.scatter_y)
            for y, w, s in zip(sums, ws, self.spreads, strict=True)
        ]

    def _one_w(self, x: jax.Array, w: jax.Array, spread: Spread) -> jax.Array:
        """With X gathered: piece after piece of W where the result can be put together from them."""
        if spread.gather_w is None or not _joins_pieces(spread, spread.gather_w, 1):
            return self._one(x, _gather(w, spread.gather_w), spread)
        parts = _pieces(w, spread.gather_w.dim, self.steps)
        assert spread.scatter_y is not None
        ys = [self._one(x, _gather(part, spread.gather_w), spread) for part in parts]
        return jnp.concatenate(ys, axis=spread.scatter_y.dim)

    def _one(self, x: jax.Array, w: jax.Array, spread: Spread) -> jax.Array:
        return _scatter(self._dot(x, w, spread).astype(jnp.result_type(x, w)), spread.scatter_y)

    def _dot(self, x: jax.Array, w: jax.Array, spread: Spread) -> jax.Array:
        """Sums of low precision are kept in float32 until they are complete."""
        if jnp.result_type(x, w) not in (jnp.bfloat16, jnp.float16):
            return lax.dot_general(x, w, (spread.contracted, ((), ())), precision=self.precision)
        product = _derived_low if self.is_differentiated else _summed_wide
        return product(spread.contracted, self.precision, x, w)


def _summed_wide(contracted: Contraction, precision: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    """A product of low precision whose sums are float32."""
    return lax.dot_general(x, w, (contracted, ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _derived_low_forward(contracted: Contraction, precision: Any, x: jax.Array, w: jax.Array) -> Any:
    return _summed_wide(contracted, precision, x, w), (x, w)


def _derived_low_backward(contracted: Contraction, precision: Any, kept: Any, grad: jax.Array) -> Any:
    x, w = kept
    of_x, of_w = contracted
    grad = grad.astype(jnp.result_type(x, w))
    free_x, free_w = ([d for d in range(a.ndim) if d not in dims] for a, dims in zip(kept, contracted, strict=True))
    in_grad = range(len(free_x)), range(len(free_x), grad.ndim)
    # What the products leave: for x its free dims, then those it sums over, in the order that w has them; and for w
    # those it sums over, as x has them, then its free dims.
    dx = lax.dot_general(grad, w, ((tuple(in_grad[1]), tuple(free_w)), ((), ())), precision=precision)
    dw = lax.dot_general(x, grad, ((tuple(free_x), tuple(in_grad[0])), ((), ())), precision=precision)
    left_x = [*free_x, *(of_x[of_w.index(d)] for d in sorted(of_w))]
    left_w = [*(of_w[of_x.index(d)] for d in sorted(of_x)), *free_w]
    return lax.transpose(dx, np.argsort(left_x)), lax.transpose(dw, np.argsort(left_w))


# The same, derived so that gradients are multiplied in low precision. JAX's own rule would have the gradient of a
# float32 result in float32, and multiply it so, at half the speed or less, although it was rounded before it came:
# whatever is scattered or handed on is of low precision.
_derived_low = jax.custom_vjp(_summed_wide, nondiff_argnums=(0, 1))
_derived_low.defvjp(_derived_low_forward, _derived_low_backward)


# -- what one device does with one operand ----------------------------------------------------------------------------
def _gather(part: jax.Array, move: Move | None) -> jax.Array:
    return part if move is None else lax.all_gather(part, move.axis, axis=move.dim, tiled=True)


def _scatter(partial: jax.Array, move: Move | None) -> jax.Array:
    if move is None:
        return partial
    return lax.psum_scatter(partial, move.axis, scatter_dimension=move.dim, tiled=True)


def _pieces(part: jax.Array, dim: int, steps: int) -> list[jax.Array]:
    count = math.gcd(part.shape[dim], steps)
    return jnp.split(part, count, axis=dim) if count > 1 else [part]


def _sums_pieces(spread: Spread) -> bool:
    """Whether both operands are gathered along the dim they are contracted over, so that pieces of it add up."""
    x, w = spread.gather_x, spread.gather_w
    return x is not None and w is not None and (x.dim, w.dim) in zip(*spread.contracted, strict=True)


def _joins_pieces(spread: Spread, move: Move | None, operand: int) -> bool:
    """Whether an operand is gathered along the very dim of the result that is scattered."""
    if move is None or spread.scatter_y is None or move.dim in spread.contracted[operand]:
        return False
    ranks = [len(spread.x) - len(spread.contracted[0]), len(spread.w) - len(spread.contracted[1])]
    free = [d for d in range(len(spread.x if operand == 0 else spread.w)) if d not in spread.contracted[operand]]
    return spread.scatter_y.dim == free.index(move.dim) + (ranks[0] if operand else 0)


def _steps(x: jax.Array, ws: Sequence[jax.Array], spreads: Sequence[Spread], mesh: Mesh) -> int:
    """Enough pieces that the first of them is waited for alone, none too small to be worth a transfer."""

    def gathered(operand: jax.Array, spec: PartitionSpec, move: Move | None) -> float:
        shards = math.prod(mesh.shape[a] for entry in spec for a in axes_of_entry(entry))
        return operand.nbytes / shards * mesh.shape[move.axis] if move is not None else 0.0

    largest = max(
        gathered(x, spreads[0].x, spreads[0].gather_x),
        *(gathered(w, s.w, s.gather_w) for w, s in zip(ws, spreads, strict=True)),
    )
    return max(1, min(MAX_STEPS, int(largest / STEP_BYTES)))
