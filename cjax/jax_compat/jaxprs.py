"""Variables, literals, places and primitives of equations, the operands of a loop, and equations that nothing needs."""

import sys
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

from jax.interpreters import partial_eval

from cjax.jax_compat.core import Aval, ClosedJaxpr, Equation, Jaxpr, Literal, Primitive, Var


class NameStack(Protocol):
    """Scopes around an equation, outermost first; `str` gives them with slashes."""

    def __add__(self, other: "NameStack", /) -> "NameStack": ...


def new_var(aval: Aval) -> Var:
    """A variable that no jaxpr has yet.

    Private: the constructor. `jax.extend.core` gives the class, and says nothing of how to make one.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1. Up to 0.10 it takes more by name.
    Public instead: a builder of jaxprs; `jax.make_jaxpr` traces anew, which is too slow for each equation of a model.

    >>> import jax
    >>> aval = jax.core.ShapedArray((2,), jax.numpy.float32)
    >>> new_var(aval) == new_var(aval), new_var(aval).aval is aval
    (False, True)
    """
    return Var(aval)


def new_literal(value: Any, aval: Aval) -> Literal:
    """A scalar as an operand of its own, which a jaxpr does not bind.

    Private: the constructor, as of `new_var`; and that a value is a NumPy scalar, or a Python one where it is weak.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a builder of jaxprs.

    >>> import jax, numpy as np
    >>> new_literal(np.float32(2), jax.core.ShapedArray((), np.float32)).val
    np.float32(2.0)
    """
    return Literal(value, aval)


def is_of_jax(primitive: Primitive) -> bool:
    """Whether JAX made a primitive. Anybody can make one and give it a name that JAX has too.

    Private: that JAX keeps each of its primitives under a name in the module that makes it. It takes milliseconds to
    look through them: ask once of each.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: `jax.extend.core.primitives` with all of them; forty are missing, `split` and `stack` among them.

    >>> import jax
    >>> is_of_jax(jax.lax.sort_p), is_of_jax(Primitive("sort"))
    (True, False)
    """
    modules = [module for name, module in list(sys.modules.items()) if name.partition(".")[0] == "jax"]
    return any(value is primitive for module in modules for value in list(getattr(module, "__dict__", {}).values()))


def scan_tree_counts(eqn: Equation) -> tuple[int, int]:
    """How many operands of a `scan` are constants and how many are carries, where it describes them as a tree.

    Private: the parameter and the class of its value.
    Tried: JAX 0.11.2, 0.12.0.1; up to 0.10 the counts are parameters (`num_consts`, `num_carry`).
    Public instead: counts among the parameters of the equation.
    """
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


def live(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, list[bool]]:
    """A jaxpr without the equations and inputs that its results do not need, and which inputs those are.

    Private: `dce_jaxpr`. It is within loops and branches too, so that a stream of random numbers which a loop carries
    and nobody reads is seen to be unused.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a pass over jaxprs in `jax.extend`; `jax.jit(keep_unused=False)` drops inputs, and tells nobody.

    >>> import jax
    >>> closed, used = live(jax.make_jaxpr(lambda x, y: (x + 1, y * 2)[0])(1.0, 2.0))
    >>> [eqn.primitive.name for eqn in closed.eqns], used
    (['add'], [True, False])
    """
    whole: Any = closed.jaxpr
    jaxpr, used = partial_eval.dce_jaxpr(whole, [True] * len(closed.jaxpr.outvars))
    return ClosedJaxpr(cast(Jaxpr, jaxpr), closed.consts), list(used)


def context_key(eqn: Equation) -> Hashable:
    """What equals that of another equation if both were traced in one context: of meshes, of flags for random bits.

    Private: `ctx`, and that JAX makes one object for all equal contexts.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1; each has more of them in it than the one before.
    Public instead: contexts that can be read off an equation.
    """
    return eqn.ctx


def in_context(eqn: Equation) -> AbstractContextManager[Any]:
    """The context that an equation was traced in, to evaluate it again.

    Private: `ctx.manager`.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: `jax.extend.core.jaxpr_as_fun` enters it, for whole jaxprs.
    """
    return eqn.ctx.manager


def place_of(eqn: Equation) -> dict[str, Any]:
    """What `replace` of another equation takes, so that it counts as written where this one was.

    Private: the two fields, and `replace`'s names for them.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a builder of jaxprs that takes a place.
    """
    return {"source_info": eqn.source_info, "ctx": eqn.ctx}


def called_from(eqn: Equation, names: NameStack, traceback: object | None) -> dict[str, Any]:
    """What `replace` takes of an equation within a call, to stand in place of it: the caller's names in front of its
    own, and this traceback.

    Private: `source_info`, its fields, and that names can be added.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a pass that inlines calls, which keeps both.
    """
    return {"source_info": eqn.source_info.replace(name_stack=names + eqn.source_info.name_stack, traceback=traceback)}


def name_stack(eqn: Equation) -> NameStack:
    """The scopes around an equation (`jax.named_scope`, Linen's modules): text for `str`, false where there are none.

    Private: `source_info`.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: names among what a jaxpr shows; they are in the compiled program's text only.

    >>> import jax
    >>> (eqn,) = jax.make_jaxpr(jax.named_scope("head")(lambda x: x + 1))(1.0).eqns
    >>> str(name_stack(eqn))
    'head'
    """
    return eqn.source_info.name_stack


def traceback_of(eqn: Equation) -> object | None:
    """Where an equation was traced, for `codes` and `frames`, or None.

    Private: `source_info`.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: a reader beside what `jax.extend.source_info_util` has, which makes such places and reads none.
    """
    return eqn.source_info.traceback


def codes(traceback: Any) -> list[Any]:
    """The code objects of a traceback, innermost first: whose they are is asked often, and their lines seldom.

    Private: the class, of XLA's bindings.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: `frames`, which looks up every line and so costs more.
    """
    return traceback.raw_frames()[0]


def frames(traceback: Any) -> list[Any]:
    """The frames of a traceback, innermost first: `file_name`, `function_name` (qualified) and `line_num`.

    Private: the class, of XLA's bindings.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: `as_python_traceback` gives one of Python's, if the class were JAX's own.
    """
    return list(traceback.frames)


def names_its_operands(eqn: Equation) -> bool:
    """Whether an equation reads or writes mutable operands (`jax.Ref`): its effects name variables of its own.

    Private: the kind of effect, told from others by the field that holds the operand.
    Tried: JAX 0.10.2, 0.11.2, 0.12.0.1, alike.
    Public instead: `jax.extend` has the class `Effect` alone, and none of its kinds.
    """
    return any(hasattr(effect, "input") for effect in eqn.effects)
