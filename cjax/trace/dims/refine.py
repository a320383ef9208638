"""A trace with some dims taken apart: [.., 3 * heads] becomes [.., 3, heads] wherever it is found.

A mesh axis can split a dim into blocks, but not the inner factor of a merged dim. So a dim that holds several tensors
side by side is made two, of parts and of what a part holds, in every tensor that has it; then the second can be split.
Equations that can work on the two do; before any other the dim is merged, and taken apart again behind it, which is
always right. The trace is changed by substitution: only equations that touch such a dim are traced anew, a kind once.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence

import jax
import jax.core
from jax import lax

from cjax.jax_compat.core import Aval, ClosedJaxpr, Equation, Jaxpr, Literal, Params, Var, make_jaxpr
from cjax.jax_compat.jaxprs import new_var, place_of
from cjax.trace.dims.classes import Dims, Scope
from cjax.trace.dims.find import find_dims
from cjax.trace.dims.refine_rules import Atom, Form, expand, refined, shape_of, whole
from cjax.trace.jaxpr.evaluate import put_in_place
from cjax.trace.jaxpr.identity import equation_key
from cjax.trace.jaxpr.primitives import facts_of
from cjax.trace.jaxpr.simplify import replaced
from cjax.trace.jaxpr.view import is_scan, scan_of

Env = dict[Var, Atom]


def refine(closed: ClosedJaxpr, ins: Sequence[Form], outs: Sequence[Form], dims: Dims | None = None) -> ClosedJaxpr:
    """The same computation on inputs and results of other shapes.

    Args:
      closed: a flat trace.
      ins: for each input, the number of parts that each of its dims is made of; see `Form`.
      outs: the same for each result.
      dims: of `closed`, if known: what is the same dim as one taken apart in an input or result is taken apart too.

    >>> import jax, jax.numpy as jnp
    >>> closed = jax.make_jaxpr(lambda x: x + 1)(jnp.arange(6))
    >>> refined = refine(closed, [(3,)], [(3,)])
    >>> jax.extend.core.jaxpr_as_fun(refined)(jnp.arange(6).reshape(3, 2))
    [Array([[1, 2],
           [3, 4],
           [5, 6]], dtype=int32)]
    """
    if not any(max(form, default=1) > 1 for form in (*ins, *outs)):
        return closed
    dims = dims or find_dims(closed)
    parts: dict[tuple[int, int], int] = {}
    for forms, atoms in ((ins, closed.jaxpr.invars), (outs, closed.jaxpr.outvars)):
        for form, atom in zip(forms, atoms, strict=True):
            # What is a constant has no dims: a weight that its init does not draw.
            if max(form, default=1) > 1 and type(atom) is not Literal and len(dims.of(atom)) == len(form):
                keys = zip(dims.of(atom), shape_of(atom), strict=True)
                parts |= {key: num for key, num in zip(keys, form, strict=True) if num > 1 and key not in parts}
    jaxpr = _Refiner(dims, parts).jaxpr(closed.jaxpr, dims.top, ins, outs)
    return ClosedJaxpr(jaxpr, closed.consts)


def _variable(like: Atom, form: Form) -> Var:
    """A new variable: `like` in this form."""
    aval = like.aval
    if max(form, default=1) > 1:
        aval = Aval(expand(aval.shape, form), aval.dtype, weak_type=aval.weak_type)
    return new_var(aval)


class _Refiner:
    def __init__(self, dims: Dims, parts: Mapping[tuple[int, int], int]) -> None:
        self._dims, self._parts = dims, parts
        self._traced: dict[Hashable, ClosedJaxpr] = {}

    def form(self, atom: Atom, scope: Scope) -> Form:
        """The form in which a variable is handed on."""
        shape = shape_of(atom)
        classes = () if type(atom) is Literal else self._dims.of(atom, scope)
        if len(classes) != len(shape):
            return whole(shape)
        return tuple(self._parts.get(key, 1) for key in zip(classes, shape, strict=True))

    def jaxpr(self, jaxpr: Jaxpr, scope: Scope, ins: Sequence[Form], outs: Sequence[Form]) -> Jaxpr:
        """`jaxpr` with its inputs and results in the forms given; itself if nothing in it changes."""
        env: Env = {}
        eqns: list[Equation] = []
        invars = []
        for var, form in zip(jaxpr.invars, ins, strict=True):
            given = _variable(var, form) if max(form, default=1) > 1 else var
            invars.append(given)
            env[var] = self.convert(eqns, given, var, form, self.form(var, scope), None)
        for eqn in jaxpr.eqns:
            if is_scan(eqn) and id(eqn) in scope.inner:
                self.scan(eqn, scope, env, eqns)
            elif facts_of(eqn).remat and id(eqn) in scope.inner:
                self.remat(eqn, scope, env, eqns)
            else:
                self.equation(eqn, scope, env, eqns)
        outvars = [
            self.convert(eqns, replaced(env, atom), atom, self.form(atom, scope), form, None)
            for atom, form in zip(jaxpr.outvars, outs, strict=True)
        ]
        same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns, strict=True))
        if same and invars == list(jaxpr.invars) and all(a is b for a, b in zip(outvars, jaxpr.outvars, strict=True)):
            return jaxpr
        return jaxpr.replace(invars=invars, outvars=outvars, eqns=eqns)

    def equation(self, eqn: Equation, scope: Scope, env: Env, eqns: list[Equation]) -> None:
        before = tuple(self.form(atom, scope) for atom in eqn.invars)
        after = tuple(self.form(var, scope) for var in eqn.outvars)
        atoms = [replaced(env, atom) for atom in eqn.invars]
        if all(max(form, default=1) == 1 for form in (*before, *after)):
            same = all(a is b for a, b in zip(atoms, eqn.invars, strict=True))
            eqns.append(eqn if same else eqn.replace(invars=atoms))
            return
        key = (equation_key(eqn), before, after)
        if key not in self._traced:
            self._traced[key] = _trace(lambda *args: refined(eqn, args, before, after), eqn.invars, before)
        results = _inline(self._traced[key], atoms, eqn, eqns)
        env.update(zip(eqn.outvars, results, strict=True))

    def convert(
        self, eqns: list[Equation], atom: Atom, like: Atom, have: Form, want: Form, near: Equation | None
    ) -> Atom:
        """`atom`, which holds `like` in the form `have`, in the form `want`."""
        if have == want:
            return atom
        shape = expand(shape_of(like), want)
        key = (like.aval, have, want)
        if key not in self._traced:
            self._traced[key] = _trace(lambda x: [lax.reshape(x, shape)], [like], [have])
        return _inline(self._traced[key], [atom], near, eqns)[0]

    def scan(self, eqn: Equation, scope: Scope, env: Env, eqns: list[Equation]) -> None:
        loop, inner = scan_of(eqn), scope.inner[id(eqn)]
        body = loop.closed
        ins = [self.form(var, inner) for var in body.jaxpr.invars]
        outs = [*loop.carries(ins), *(self.form(atom, inner) for atom in loop.ys(body.jaxpr.outvars))]
        new = self.jaxpr(body.jaxpr, inner, ins, outs)
        ins = [form if i < loop.first_x else (1, *form) for i, form in enumerate(ins)]
        outs = [form if i < loop.num_carry else (1, *form) for i, form in enumerate(outs)]
        params = eqn.params if new is body.jaxpr else eqn.params | {"jaxpr": ClosedJaxpr(new, body.consts)}
        self._nested(eqn, params, ins, outs, scope, env, eqns)

    def remat(self, eqn: Equation, scope: Scope, env: Env, eqns: list[Equation]) -> None:
        body, inner = eqn.params["jaxpr"], scope.inner[id(eqn)]
        ins = [self.form(var, inner) for var in body.invars]
        outs = [self.form(atom, inner) for atom in body.outvars]
        new = self.jaxpr(body, inner, ins, outs)
        params = eqn.params if new is body else eqn.params | {"jaxpr": new}
        self._nested(eqn, params, ins, outs, scope, env, eqns)

    def _nested(
        self,
        eqn: Equation,
        params: Params,
        ins: Sequence[Form],
        outs: Sequence[Form],
        scope: Scope,
        env: Env,
        eqns: list[Equation],
    ) -> None:
        """`eqn` around a changed body that takes and gives the forms `ins` and `outs`."""
        atoms = [
            self.convert(eqns, replaced(env, atom), atom, self.form(atom, scope), form, eqn)
            for atom, form in zip(eqn.invars, ins, strict=True)
        ]
        same = params is eqn.params and all(a is b for a, b in zip(atoms, eqn.invars, strict=True))
        if same:
            eqns.append(eqn)
            return
        results = [_variable(var, form) for var, form in zip(eqn.outvars, outs, strict=True)]
        eqns.append(eqn.replace(invars=atoms, outvars=results, params=params))
        for var, result, form in zip(eqn.outvars, results, outs, strict=True):
            env[var] = self.convert(eqns, result, var, form, self.form(var, scope), eqn)


def _trace(function: Callable[..., list[jax.Array]], atoms: Sequence[Atom], forms: Sequence[Form]) -> ClosedJaxpr:
    avals = [_variable(atom, form).aval for atom, form in zip(atoms, forms, strict=True)]
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]
    return make_jaxpr(function)(*shapes)


def _inline(closed: ClosedJaxpr, atoms: Sequence[Atom], near: Equation | None, eqns: list[Equation]) -> list[Atom]:
    """Append the equations of `closed` on `atoms`, as if the author had written them where `near` stands."""
    place = {} if near is None else place_of(near)
    return put_in_place(closed, atoms, eqns, lambda eqn: place)
