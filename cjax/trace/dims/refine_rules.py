"""How each primitive works on operands and results some of whose dims are taken apart.

A rule is `rule(eqn, ins, before, after)`: the operands in the forms `before`; it returns the results in the forms
`after`, or None where it can't.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax import lax

from cjax.jax_compat.core import Atom, Equation
from cjax.jax_compat.random import is_threefry
from cjax.trace.jaxpr.evaluate import bind_as_is
from cjax.trace.jaxpr.primitives import goes_by_element, having, name_of
from cjax.trace.jaxpr.view import is_by_rows

Form = tuple[int, ...]  # parts that each dim is made of: [embed, 3 * heads] in the form (1, 3) is [embed, 3, heads]
Forms = Sequence[Form]
Rule = Callable[[Equation, Sequence[jax.Array], Forms, Forms], list[jax.Array] | None]


def shape_of(atom: Atom) -> tuple[int, ...]:
    return tuple(getattr(atom.aval, "shape", ()))


def whole(shape: Sequence[int]) -> Form:
    """The form that takes no dim apart."""
    return (1,) * len(shape)


def expand(shape: Sequence[int], form: Form) -> tuple[int, ...]:
    """A shape with its dims taken apart."""
    pieces = [(num, n // num) if num > 1 else (n,) for n, num in zip(shape, form, strict=True)]
    return tuple(n for piece in pieces for n in piece)


def refined(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array]:
    """The results of one equation, operands and results in the forms given."""
    name = name_of(eqn)
    rule = RULES.get(name) or (_elementwise if goes_by_element(eqn) else None)
    outs = rule(eqn, ins, before, after) if rule else None
    if outs is None:
        merged = [_reshaped(x, shape_of(atom)) for x, atom in zip(ins, eqn.invars, strict=True)]
        outs = [_reshaped(y, _out_shape(eqn, after, i)) for i, y in enumerate(_bind(eqn, merged))]
    assert all(y.shape == _out_shape(eqn, after, i) for i, y in enumerate(outs)), (eqn, before, after)
    return outs


def _out_shape(eqn: Equation, after: Forms, index: int = 0) -> tuple[int, ...]:
    return expand(shape_of(eqn.outvars[index]), after[index])


def _bind(eqn: Equation, ins: Sequence[jax.Array], **changed: object) -> list[jax.Array]:
    return bind_as_is(eqn, ins, eqn.params | changed)


def _reshaped(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x if x.shape == tuple(shape) else lax.reshape(x, tuple(shape))


def _places(form: Form) -> list[list[int]]:
    """For each dim, where it is once dims are taken apart."""
    places, at = [], 0
    for num in form:
        places.append([at, at + 1] if num > 1 else [at])
        at += len(places[-1])
    return places


def _joined(places: Sequence[Sequence[int]], dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(place for dim in dims for place in places[dim])


def _elementwise(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    operands = []
    for x, atom, form in zip(ins, eqn.invars, before, strict=True):
        shape = shape_of(atom)
        if shape and len(form) != len(after[0]):
            return None
        if shape and form != after[0]:  # a size of 1 stands for every part
            if any(have != want and n > 1 for n, have, want in zip(shape, form, after[0], strict=True)):
                return None
            places = _places(after[0])
            x = lax.expand_dims(x, [p[0] for p, a, b in zip(places, form, after[0], strict=True) if a != b])
        operands.append(x)
    return _bind(eqn, operands)


def _broadcast_in_dim(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    places, dims = _places(after[0]), []
    sizes = zip(shape_of(eqn.invars[0]), before[0], eqn.params["broadcast_dimensions"], strict=True)
    for size, num, dim in sizes:
        if num != after[0][dim] and size != 1:
            return None
        dims += places[dim] if num == after[0][dim] else places[dim][-1:]
    return [lax.broadcast_in_dim(ins[0], _out_shape(eqn, after), dims)]


def _transpose(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    permutation = eqn.params["permutation"]
    if after[0] != tuple(before[0][dim] for dim in permutation):
        return None
    return _bind(eqn, ins, permutation=_joined(_places(before[0]), permutation))


def _reduction(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    axes = eqn.params["axes"]
    if after[0] != tuple(num for dim, num in enumerate(before[0]) if dim not in axes):
        return None
    return _bind(eqn, ins, axes=_joined(_places(before[0]), axes))


def _reshape(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    # Both forms list the same elements in the same order, so one reshape leads from the one to the other.
    return None if eqn.params.get("dimensions") is not None else [_reshaped(ins[0], _out_shape(eqn, after))]


def _slice(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    p, shape = eqn.params, shape_of(eqn.invars[0])
    strides = p["strides"] or (1,) * len(shape)
    starts, limits, steps = [], [], []
    bounds = zip(p["start_indices"], p["limit_indices"], strides, strict=True)
    for n, (start, limit, step), num, left in zip(shape, bounds, before[0], after[0], strict=True):
        rest = n // num
        if num == left == 1:
            bound = ([start], [limit], [step])
        elif num == left and (start, limit, step) == (0, n, 1):
            bound = ([0, 0], [num, rest], [1, 1])
        elif left == 1 and step == 1 and limit - start == rest and start % rest == 0:
            bound = ([start // rest, 0], [start // rest + 1, rest], [1, 1])
        else:
            return None
        starts += bound[0]
        limits += bound[1]
        steps += bound[2]
    return [_reshaped(lax.slice(ins[0], starts, limits, steps), _out_shape(eqn, after))]


def _split(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    axis, sizes, (form,) = eqn.params["axis"], eqn.params["sizes"], before
    place, num = _places(form)[axis][0], form[axis]
    kept = (*form[:axis], 1, *form[axis + 1 :])
    if any(other != kept for other in after):
        return None
    if num == 1:
        return _bind(eqn, ins, axis=place)
    if len(sizes) != num or len(set(sizes)) != 1:
        return None
    return [lax.index_in_dim(ins[0], i, place, keepdims=False) for i in range(num)]


def _dot_general(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    (lc, rc), (lb, rb) = eqn.params["dimension_numbers"]
    lhs, rhs = before
    if eqn.params.get("out_sharding") is not None:
        return None
    if any(lhs[a] != rhs[b] for a, b in zip((*lc, *lb), (*rc, *rb), strict=True)):
        return None
    out = [lhs[i] for i in lb]
    out += [num for i, num in enumerate(lhs) if i not in lc and i not in lb]
    out += [num for i, num in enumerate(rhs) if i not in rc and i not in rb]
    if tuple(out) != after[0]:
        return None
    x, y = _places(lhs), _places(rhs)
    numbers = ((_joined(x, lc), _joined(y, rc)), (_joined(x, lb), _joined(y, rb)))
    return _bind(eqn, ins, dimension_numbers=numbers)


def _ragged_dot_general(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    if not is_by_rows(eqn):
        return None
    numbers, (lhs, rhs, _) = eqn.params["ragged_dot_dimension_numbers"], before
    ((left, right), batched) = numbers.dot_dimension_numbers
    free = [num for i, num in enumerate(rhs) if i not in (0, *right)]
    if lhs[0] > 1 or rhs[0] > 1 or any(lhs[a] != rhs[b] for a, b in zip(left, right, strict=True)):
        return None
    if (*(num for i, num in enumerate(lhs) if i not in left), *free) != after[0]:
        return None
    both = (_joined(_places(lhs), left), _joined(_places(rhs), right))
    numbers = dataclasses.replace(numbers, dot_dimension_numbers=(both, batched))
    return _bind(eqn, ins, ragged_dot_dimension_numbers=numbers)


def _gather(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    """Of rows, each of them whole: the biases of whatever expert a row is of."""
    numbers, shape, sizes = eqn.params["dimension_numbers"], shape_of(eqn.invars[0]), eqn.params["slice_sizes"]
    (operand, indices), kept = before, [d for d in range(len(shape)) if d not in numbers.collapsed_slice_dims]
    apart = [d for d, num in enumerate(operand) if num > 1]
    offsets = [after[0][d] for d in numbers.offset_dims]
    if numbers.operand_batching_dims or max(indices) > 1 or offsets != [operand[d] for d in kept]:
        return None
    if any(d in numbers.start_index_map or d not in kept or sizes[d] != shape[d] for d in apart):
        return None
    if any(num > 1 for d, num in enumerate(after[0]) if d not in numbers.offset_dims):
        return None
    places, found = _places(operand), _places(after[0])
    numbers = numbers._replace(
        offset_dims=_joined(found, numbers.offset_dims),
        collapsed_slice_dims=_joined(places, numbers.collapsed_slice_dims),
        start_index_map=_joined(places, numbers.start_index_map),
    )
    return _bind(eqn, ins, dimension_numbers=numbers, slice_sizes=expand(sizes, operand))


def _random_bits(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    # Threefry numbers its bits in row-major order, whatever the shape; other generators promise nothing.
    key: Atom = eqn.invars[0]
    if key.aval.shape or not is_threefry(key.aval.dtype):
        return None
    return _bind(eqn, ins, shape=_out_shape(eqn, after))


def _iota(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
    if after[0][eqn.params["dimension"]] > 1 or eqn.params.get("sharding") is not None:
        return None
    place = _places(after[0])[eqn.params["dimension"]][0]
    return [lax.broadcasted_iota(eqn.params["dtype"], _out_shape(eqn, after), place)]


def _along(name: str) -> Rule:
    """For primitives that work along one dim, which must be whole."""

    def rule(eqn: Equation, ins: Sequence[jax.Array], before: Forms, after: Forms) -> list[jax.Array] | None:
        dim = eqn.params[name]
        if after[0][dim] > 1 or any(form != after[0] for form in before):
            return None
        return _bind(eqn, ins, **{name: _places(after[0])[dim][0]})

    return rule


RULES: dict[str, Rule] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "transpose": _transpose,
    "reshape": _reshape,
    "squeeze": lambda eqn, ins, before, after: [_reshaped(ins[0], _out_shape(eqn, after))],
    "slice": _slice,
    "split": _split,
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot_general,
    "gather": _gather,
    "random_bits": _random_bits,
    "iota": _iota,
    "concatenate": _along("dimension"),
    **dict.fromkeys(having("reduces") - having("tells_place"), _reduction),
    **dict.fromkeys(having("cumulates"), _along("axis")),
}
