"""Random programs on the rows of a batch, whose results and equations must do what is said of them."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cjax.jax_compat.core import Equation, Literal
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.simplify import simplify

BATCH = 4
Pick = Callable[[Sequence[Any]], Any]
Step = Callable[..., Any]
Traced = tuple[Step, tuple[int, ...], str]  # a step, the places of what it reads among all values so far, its name


def leaves(seed: int, rows: int = BATCH) -> dict[str, np.ndarray]:
    """A batch: dim 0 of each is the rows, which are as many as other dims are long."""
    random = np.random.default_rng(seed)
    return {
        "x": random.normal(size=(rows, 3, 4)),
        "y": random.normal(size=(rows, 4)),
        "z": random.normal(size=(rows,)),
        "labels": random.integers(0, 3, (rows,)),
        "ids": random.integers(0, 4, (rows, 4)),
        "mask": random.integers(0, 2, (rows, 4)).astype(float),
    }


def fixed(seed: int) -> dict[str, np.ndarray]:
    """What is no part of the batch."""
    random = np.random.default_rng(seed + 1)
    return {"w": random.normal(size=(4, 4)), "v": random.normal(size=(4,)), "order": np.array([2, 0, 3, 1])}


def _axis(pick: Pick, x: Any) -> int:
    return pick(range(len(x.shape)))


def _along(axis: int, index: Any) -> tuple[Any, ...]:
    return (*[slice(None)] * axis, index)


def _counted(x: jax.Array, axis: int) -> jax.Array:
    return lax.broadcasted_iota(x.dtype, x.shape, axis)


def elementwise(pick: Pick, x: Any, others: Any) -> Step:
    run = pick([jnp.tanh, jnp.abs, jnp.square, jnp.negative, lambda x: x * 2 - 1, lambda x: jnp.where(x > 0, x, 0)])
    return lambda x: run(x)


def by_size(pick: Pick, x: Any, others: Any) -> Step:
    axis, run = _axis(pick, x), pick([jnp.divide, jnp.multiply, jnp.add])
    return lambda x: run(x, x.shape[axis])


def by_place(pick: Pick, x: Any, others: Any) -> Step:
    axis, run = _axis(pick, x), pick([jnp.multiply, jnp.add, lambda x, n: jnp.where(n < 2, x, 0)])
    return lambda x: run(x, _counted(x, axis))


def reduced(pick: Pick, x: Any, others: Any) -> Step:
    run = pick([jnp.sum, jnp.mean, jnp.max, jnp.min, jnp.prod, jnp.var, jax.nn.logsumexp])
    axis, keeps = pick([None, *range(len(x.shape))]), pick([False, True])
    return lambda x: run(x, axis=axis, keepdims=keeps)


def normalised(pick: Pick, x: Any, others: Any) -> Step:
    axis, run = (
        _axis(pick, x),
        pick([jax.nn.softmax, jax.nn.standardize, lambda x, axis: x / x.sum(axis, keepdims=True)]),
    )
    return lambda x: run(x, axis=axis)


def cumulated(pick: Pick, x: Any, others: Any) -> Step:
    axis, back = _axis(pick, x), pick([False, True])
    run = pick([lax.cumsum, lax.cummax, lax.cumlogsumexp])
    return lambda x: run(x, axis=axis, reverse=back)


def ordered(pick: Pick, x: Any, others: Any) -> Step:
    axis = _axis(pick, x)
    run = pick(
        [
            jnp.sort,
            lambda x, axis: jnp.argsort(x, axis) * 1.0,
            lambda x, axis: lax.top_k(jnp.moveaxis(x, axis, -1), 2)[0],
        ]
    )
    return lambda x: run(x, axis=axis)


def merged(pick: Pick, x: Any, others: Any) -> Step | None:
    if len(x.shape) < 2:
        return None
    at = pick(range(len(x.shape) - 1))
    return lambda x: x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])


def cut(pick: Pick, x: Any, others: Any) -> Step | None:
    axis, parts, first = _axis(pick, x), pick([2, 3, 4]), pick([True, False])
    if x.shape[axis] % parts:
        return None
    new = (parts, -1) if first else (-1, parts)
    return lambda x: x.reshape(*x.shape[:axis], *new, *x.shape[axis + 1 :])


def turned(pick: Pick, x: Any, others: Any) -> Step:
    a, b = _axis(pick, x), _axis(pick, x)
    return lambda x: jnp.moveaxis(x, a, b)


def widened(pick: Pick, x: Any, others: Any) -> Step:
    axis, times, of = pick(range(len(x.shape) + 1)), pick([1, 2, 4, None]), _axis(pick, x)
    return lambda x: jnp.repeat(jnp.expand_dims(x, axis), times or x.shape[of], axis)


def sliced(pick: Pick, x: Any, others: Any) -> Step:
    axis = _axis(pick, x)
    part = pick([slice(1, None), slice(None, -1), slice(None, 2), slice(None, None, 2), slice(1, None, 2), 0, -1])
    part = pick([part, slice(None, None, -1), slice(-2, None), [1, 0]])
    return lambda x: x[_along(axis, np.array(part) if isinstance(part, list) else part)]


def padded(pick: Pick, x: Any, others: Any) -> Step:
    axis, config, value = (
        _axis(pick, x),
        pick([(1, 0, 0), (1, -1, 0), (-1, 1, 0), (0, -1, 1), (0, 1, 0)]),
        pick([0.0, 1.0]),
    )
    return lambda x: lax.pad(
        x, jnp.asarray(value, x.dtype), [config if d == axis else (0, 0, 0) for d in range(x.ndim)]
    )


def shifted(pick: Pick, x: Any, others: Any) -> Step:
    axis, run = _axis(pick, x), pick([lambda x, a: jnp.roll(x, 1, a), jnp.flip, lambda x, a: jnp.diff(x, axis=a)])
    return lambda x: run(x, axis)


def repeated(pick: Pick, x: Any, others: Any) -> Step:
    axis = _axis(pick, x)
    run = pick(
        [
            lambda x: jnp.repeat(x, 2, axis),
            lambda x: jnp.concatenate([x, x], axis),
            lambda x: jnp.stack([x, 2 * x], axis),
        ]
    )
    return lambda x: run(x)


def written(pick: Pick, x: Any, others: Any) -> Step:
    axis, at = _axis(pick, x), pick([0, 1, np.array([0, 2]), slice(0, 2), slice(1, None)])
    onto = pick([lambda x: x, lambda x: x, jnp.zeros_like, jnp.ones_like])
    run = pick([lambda r: r.set(1.0), lambda r: r.add(0.5), lambda r: r.multiply(2.0), lambda r: r.max(0.3)])
    return lambda x: run(onto(x).at[_along(axis, at)])


def windowed(pick: Pick, x: Any, others: Any) -> Step:
    axis, size, step = _axis(pick, x), pick([1, 2]), pick([1, 2])
    around, wide = pick([(0, 0), (1, 0), (1, -1)]), pick([1, 1, 2])

    def run(x: jax.Array) -> jax.Array:
        def of(value: Any, other: Any) -> tuple[Any, ...]:
            return tuple(value if d == axis else other for d in range(x.ndim))

        zero = jnp.zeros((), x.dtype)
        return lax.reduce_window(x, zero, lax.add, of(size, 1), of(step, 1), of(around, (0, 0)), of(wide, 1))

    return run


def transformed(pick: Pick, x: Any, others: Any) -> Step:
    axis = _axis(pick, x)
    return lambda x: jnp.fft.fft(x, axis=axis).real


def scanned(pick: Pick, x: Any, others: Any) -> Step:
    axis, kind = _axis(pick, x), pick(["last", "all", "map"])

    def run(x: jax.Array) -> jax.Array:
        xs = jnp.moveaxis(x, axis, 0)
        if kind == "map":
            return lax.map(jnp.cumsum if xs.ndim == 2 else jnp.tanh, xs)
        last, each = lax.scan(lambda c, x: (jnp.tanh(c + x), c * x), jnp.zeros_like(xs[0]), xs)
        return last if kind == "last" else each

    return run


def conditioned(pick: Pick, x: Any, others: Any) -> Step:
    asked, by_row = pick([jnp.sum, jnp.max, lambda x: x.ravel()[0]]), pick([False, True])

    def run(x: jax.Array) -> jax.Array:
        one: Step = lambda x: lax.cond(asked(x) > 0, jnp.tanh, lambda x: x * 2, x)  # noqa: E731
        return jax.vmap(one)(x) if by_row and x.ndim else one(x)

    return run


def looped(pick: Pick, x: Any, others: Any) -> Step:
    until = pick([jnp.sum, jnp.max])
    return lambda x: lax.while_loop(lambda c: jnp.abs(until(c)) > 0.3, lambda c: c * 0.5, x)


def taken(pick: Pick, x: Any, others: Any) -> Step:
    axis, start = _axis(pick, x), pick([lambda x: jnp.argmax(x), lambda x: jnp.int32(1)])
    size = pick([1, 2, None])
    return lambda x: lax.dynamic_slice_in_dim(x, start(x), size or x.shape[axis], axis)


def put(pick: Pick, x: Any, others: Any) -> Step:
    axis, size = _axis(pick, x), pick([1, None])
    return lambda x: lax.dynamic_update_slice_in_dim(
        jnp.zeros_like(x), x if size is None else lax.slice_in_dim(x, 0, 1, axis=axis), 1, axis
    )


def solved(pick: Pick, x: Any, others: Any) -> Step | None:
    if len(x.shape) < 2:
        return None
    run = pick(
        [jnp.linalg.cholesky, jnp.linalg.inv, lambda a: jnp.linalg.slogdet(a)[1], lambda a: jnp.linalg.eigh(a)[0]]
    )

    def of(x: jax.Array) -> jax.Array:
        return run(x @ jnp.swapaxes(x, -1, -2) + 3 * jnp.eye(x.shape[-2]))

    return of


def convolved(pick: Pick, x: Any, others: Any) -> Step | None:
    if len(x.shape) != 3:
        return None
    order, kind = pick([(0, 1, 2), (1, 0, 2), (2, 1, 0)]), pick(["plain", "depthwise"])

    def run(x: jax.Array) -> jax.Array:
        x = jnp.transpose(x, order)
        groups = x.shape[1] if kind == "depthwise" else 1
        kernel = jnp.ones((x.shape[1], x.shape[1] // groups, 2), x.dtype)
        return lax.conv_general_dilated(x, kernel, (1,), "SAME", feature_group_count=groups)

    return run


UNARY: list[Callable[[Pick, Any, Any], Step | None]] = [
    elementwise, by_size, by_place, reduced, reduced, normalised, cumulated, ordered, merged, merged, cut, turned,
    widened, sliced, sliced, padded, shifted, repeated, written, written, windowed, transformed, scanned, conditioned,
    looped, taken, put, solved, convolved,
]  # fmt: skip


def _broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    try:
        np.broadcast_shapes(tuple(a), tuple(b))
    except ValueError:
        return False
    return True


def combined(pick: Pick, x: Any, y: Any) -> Step | None:
    if not _broadcasts(x.shape, y.shape):
        return None
    run = pick([jnp.add, jnp.multiply, jnp.subtract, lambda x, y: x / (1 + y * y), lambda x, y: jnp.where(x > 0, x, y)])
    run = pick([run, jnp.maximum, lambda x, y: x / y])
    return lambda x, y: run(x, y)


def crossed(pick: Pick, x: Any, y: Any) -> Step | None:
    """Each with each."""
    if not x.shape or not y.shape or not _broadcasts((x.shape[0], 1, *x.shape[1:]), (1, *y.shape)):
        return None
    run = pick([jnp.subtract, jnp.multiply])
    return lambda x, y: run(jnp.expand_dims(x, 1), jnp.expand_dims(y, 0))


def multiplied(pick: Pick, x: Any, y: Any) -> Step | None:
    pairs = [(i, j) for i, n in enumerate(x.shape) for j, m in enumerate(y.shape) if n == m]
    if not pairs:
        return None
    contracted = pick(pairs)
    batched = [(i, j) for i, j in pairs if i != contracted[0] and j != contracted[1]]
    batch = pick([[], *([pair] for pair in batched)])
    numbers = tuple(tuple(zip(*some, strict=True)) or ((), ()) for some in ([contracted], batch))
    return lambda x, y: lax.dot_general(x, y, numbers)


def joined(pick: Pick, x: Any, y: Any) -> Step | None:
    if len(x.shape) != len(y.shape) or not x.shape:
        return None
    axis = _axis(pick, x)
    if any(a != b for d, (a, b) in enumerate(zip(x.shape, y.shape, strict=True)) if d != axis):
        return None
    return lambda x, y: jnp.concatenate([x, y], axis)


BINARY = [combined, combined, crossed, multiplied, multiplied, joined]


def looked_up(pick: Pick, x: Any, ids: Any) -> Step | None:
    """Lookups by whole numbers of the batch, or by a fixed order."""
    if not x.shape:
        return None
    axis = _axis(pick, x)
    kind = pick(["take", "own", "beside", "sum", "set", "each"])
    if kind == "take":
        return lambda x, ids: jnp.take(x, ids, axis=axis, mode="clip")
    if kind == "own" and len(x.shape) > 1:  # each row's own element, as a loss looks up its labels
        beside = pick([lambda n, ids: ids.reshape(-1)[:n], lambda n, ids: jnp.arange(n)])
        return lambda x, ids: x[jnp.arange(len(x)), beside(len(x), ids) % x.shape[1]]
    if kind == "beside" and len(x.shape) == len(ids.shape):
        return lambda x, ids: jnp.take_along_axis(x, ids % x.shape[axis], axis)
    if kind == "sum" and ids.shape == x.shape[: len(ids.shape)]:
        return lambda x, ids: jnp.zeros((4, *x.shape[ids.ndim :]), x.dtype).at[ids].add(x)
    if kind == "set" and ids.shape == x.shape[: len(ids.shape)]:
        return lambda x, ids: jnp.ones((4, *x.shape[ids.ndim :]), x.dtype).at[ids].set(x)
    if kind == "each" and len(ids.shape) == 2:
        run = pick([lambda i, row: jnp.zeros(4).at[i].add(row), lambda i, row: jnp.take(row, i, mode="clip")])
        of = pick([0, None])
        if len(x.shape) == 2 or (len(x.shape) == 1 and of is None):
            return lambda x, ids: jax.vmap(run, (0, of))(ids, x)
    return None


def program(pick: Pick, num_steps: int, inputs: Sequence[Any], fewer: Sequence[Any]) -> list[Traced]:
    """Random steps that run on `inputs` and on `fewer` rows of them."""
    shapes = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given] for given in (inputs, fewer)]
    steps: list[Traced] = []
    while len(steps) < num_steps:
        numbers = [i for i, s in enumerate(shapes[0]) if s.dtype.kind == "f" and math.prod(s.shape) <= 200]
        whole = [i for i, s in enumerate(shapes[0]) if s.dtype.kind == "i"]
        make = pick([*UNARY, *BINARY * 3, *[looked_up] * 6])
        # The batch first, and then what was made last, so that programs are deep.
        first = pick([*numbers, *numbers[-3:], *numbers[-1:] * 6]) if steps else pick(numbers[:3])
        reads = first, pick(whole if make is looked_up else numbers)
        reads = reads[:1] if make in UNARY else reads
        x, *rest = (shapes[0][i] for i in reads)
        step = make(pick, x, rest[0] if rest else None) if x.shape else None
        if step is None:
            continue
        try:
            outs = [jax.eval_shape(step, *(given[i] for i in reads)) for given in shapes]
        except (TypeError, ValueError, IndexError):
            continue
        if math.prod(outs[0].shape) == 0:
            continue
        steps.append((step, reads, make.__name__))
        for given, out in zip(shapes, outs, strict=True):
            given.append(jax.ShapeDtypeStruct(out.shape, out.dtype))
    return steps


def run(steps: Sequence[Traced], values: Sequence[Any]) -> list[Any]:
    """The result of each step."""
    found = list(values)
    for step, reads, _ in steps:
        found.append(step(*(jnp.asarray(found[i]) for i in reads)))
    return found[len(values) :]


LARGEST = 3000  # elements of an operand: of more, a law is no truer and takes longer


def equations(seed: int) -> Iterator[tuple[Equation, list[jax.Array], list[jax.Array]]]:
    """Of a random program and of its derivative: each equation, what it reads and what comes of it."""
    given, pick = [*leaves(seed).values(), *fixed(seed).values()], random.Random(seed).choice
    fewer = [*(x[::2] for x in leaves(seed).values()), *fixed(seed).values()]
    steps = program(pick, 4, given, fewer)
    real = [i for i, x in enumerate(given) if x.dtype.kind == "f"]

    def results(*values: Any) -> list[Any]:
        return run(steps, values)

    def derivative(*values: Any) -> Any:
        def of(*some: Any) -> list[Any]:
            full = dict(enumerate(values)) | dict(zip(real, some, strict=True))
            return [y for y in results(*full.values()) if jnp.issubdtype(y.dtype, jnp.floating)]

        outs, pull = jax.vjp(of, *(values[i] for i in real))
        return pull([jnp.cos(y) for y in outs])

    for function in (results, derivative):
        try:
            closed = simplify(jax.make_jaxpr(function)(*given))
        except (NotImplementedError, ValueError):  # a derivative that JAX has not, of an unbounded loop among them
            continue
        env: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        env.update(zip(closed.jaxpr.invars, given, strict=True))
        for eqn in closed.jaxpr.eqns:
            ins = [jnp.asarray(v.val, v.aval.dtype) if isinstance(v, Literal) else env[v] for v in eqn.invars]
            ins = list(map(jnp.asarray, ins))
            outs = list(map(jnp.asarray, bind(eqn, ins)))
            env.update(zip(eqn.outvars, outs, strict=True))
            if all(x.size <= LARGEST for x in (*ins, *outs)):
                yield eqn, ins, outs
