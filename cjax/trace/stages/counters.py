"""Counters: model state that moves on whatever the examples are, such as how often random numbers were drawn.

Layers of an NNX model count that themselves, in the midst of everything else. A pipeline runs many micro-batches at
once, so it needs each one's counts before the layers run; their equations are picked out of the trace here, out of
loops too.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.evaluate import Step, equation, evaluate
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.view import is_scan, literal_of, scan_of

Kinds = frozenset[str]


def depends(eqns: Sequence[Equation], on: dict[Var, Kinds], mark: Callable[[Equation, Kinds], Kinds]) -> None:
    """Adds to `on` what the result of each equation depends on, for loops result by result.

    Args:
      eqns: equations of a flat trace, in order.
      on: what inputs depend on; what is not in it depends on nothing.
      mark: (equation, what its result depends on) -> what to note.
    """
    for eqn in eqns:
        ins = [on.get(v, frozenset()) if not isinstance(v, Literal) else frozenset() for v in eqn.invars]
        # Result by result: a loop over layers carries activations and counts of random numbers side by side, and taken
        # as one all of it would depend on the examples.
        if is_scan(eqn):
            outs = _of_scan(eqn, ins)
        else:
            outs = [frozenset().union(*ins)] * len(eqn.outvars)
        on.update((var, mark(eqn, kinds)) for var, kinds in zip(eqn.outvars, outs, strict=True))


def _of_scan(eqn: Equation, ins: Sequence[Kinds]) -> list[Kinds]:
    loop, ins = scan_of(eqn), list(ins)
    while True:
        on = dict(zip(loop.body.invars, ins, strict=True))
        depends(loop.body.eqns, on, lambda eqn, kinds: kinds)
        outs = [on.get(v, frozenset()) if not isinstance(v, Literal) else frozenset() for v in loop.body.outvars]
        carries = [before | after for before, after in zip(loop.carries(ins), loop.last(outs), strict=True)]
        new = [*loop.consts(ins), *carries, *loop.xs(ins)]
        # What a turn hands to the next may depend on more than it did at first; sets only grow, so this ends.
        if new == ins:
            return [*carries, *loop.ys(outs)]
        ins = new


@dataclass(frozen=True)
class _Loop:
    """Of a scan, what some of its results need."""

    eqn: Equation
    carries: tuple[int, ...]
    xs: tuple[int, ...]
    outs: tuple[int, ...]
    eqns: "tuple[Item, ...]"

    @property
    def reads(self) -> list[Atom]:
        loop, inner = scan_of(self.eqn), _read_by(self.eqns)
        # What only the rest of the loop reads is not to be asked for: it may be activations, which are not there yet.
        pairs = zip(loop.consts(self.eqn.invars), loop.consts(loop.body.invars), strict=True)
        carries, xs = loop.carries(self.eqn.invars), loop.xs(self.eqn.invars)
        return [*(a for a, v in pairs if v in inner), *(carries[i] for i in self.carries), *(xs[i] for i in self.xs)]

    @property
    def writes(self) -> tuple[Var, ...]:
        last, ys = (of(self.eqn.outvars) for of in (scan_of(self.eqn).last, scan_of(self.eqn).ys))
        return (*(last[i] for i in self.carries), *(ys[i] for i in self.outs))

    def results(self, read: Callable[[Var], jax.Array]) -> list[jax.Array]:
        """The values of `writes`."""
        eqn, loop = self.eqn, scan_of(self.eqn)
        body, inner = loop.body, _read_by(self.eqns)

        def value(atom: Atom) -> jax.Array:
            return atom.val if isinstance(atom, Literal) else read(atom)

        known = dict(zip(body.constvars, loop.closed.consts, strict=True))
        pairs = zip(loop.consts(body.invars), loop.consts(eqn.invars), strict=True)
        known |= {v: value(atom) for v, atom in pairs if v in inner}

        def turn(carry: list[jax.Array], x: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
            carries, slices = loop.carries(body.invars), loop.xs(body.invars)
            env = known | dict(zip([carries[i] for i in self.carries], carry, strict=True))
            env |= dict(zip([slices[i] for i in self.xs], x, strict=True))
            run(self.eqns, env.__getitem__, env.update)

            def result(i: int) -> jax.Array:
                # A result that is a number may stand there without the dtype that a carry has to keep.
                v = body.outvars[i]
                return jnp.asarray(v.val, eqn.outvars[i].aval.dtype) if isinstance(v, Literal) else env[v]

            return [result(i) for i in self.carries], [result(loop.num_carry + i) for i in self.outs]

        initial = [value(loop.carries(eqn.invars)[i]) for i in self.carries]
        xs = [value(loop.xs(eqn.invars)[i]) for i in self.xs]
        final, outs = lax.scan(turn, initial, xs, length=loop.length, reverse=loop.reverse)
        return [*final, *outs]


Item = Equation | _Loop


def narrowed(eqns: Sequence[Equation], targets: Sequence[Atom]) -> list[Item]:
    """The equations that `targets` need, of loops only what they need of them."""
    live = {v for v in targets if not isinstance(v, Literal)}
    found: list[Item] = []
    for eqn in reversed(eqns):
        if not live & set(eqn.outvars):
            continue
        # A loop over layers is one equation, that draws keys and computes activations: kept whole for the keys' sake,
        # it would run the model in front of the pipeline that is to run it.
        item = _narrow(eqn, live) if is_scan(eqn) else eqn
        found.append(item)
        live = (live - set(eqn.outvars)) | _read_by([item])
    return found[::-1]


def _narrow(eqn: Equation, live: set[Var]) -> _Loop:
    """Of a scan, the carries, slices and equations that its results in `live` need."""
    loop = scan_of(eqn)
    last, ys = loop.last(loop.body.outvars), loop.ys(loop.body.outvars)
    carries = {i for i, var in enumerate(loop.last(eqn.outvars)) if var in live}
    outs = [i for i, var in enumerate(loop.ys(eqn.outvars)) if var in live]
    while True:
        wanted = [last[i] for i in sorted(carries)] + [ys[i] for i in outs]
        needed = narrowed(loop.body.eqns, wanted)
        read = {v for v in wanted if not isinstance(v, Literal)} | _read_by(needed)
        more = {i for i, var in enumerate(loop.carries(loop.body.invars)) if var in read}
        # A carry that a wanted result reads is needed in every turn, and with it what that one reads.
        if more <= carries:
            xs = tuple(i for i, var in enumerate(loop.xs(loop.body.invars)) if var in read)
            return _Loop(eqn, tuple(sorted(carries)), xs, tuple(outs), tuple(needed))
        carries |= more


def _read_by(items: Sequence[Item]) -> set[Var]:
    atoms = [v for item in items for v in (item.reads if isinstance(item, _Loop) else variables(item))]
    return {v for v in atoms if not isinstance(v, Literal)}


def run(
    items: Sequence[Item],
    read: Callable[[Var], jax.Array],
    write: Callable[[Iterable[tuple[Var, jax.Array]]], object],
) -> None:
    """Runs what `narrowed` found.

    Args:
      items: equations and parts of loops.
      read: the value of a variable.
      write: keeps variables with their values.
    """

    def apply(step: Step[Item, Var], ins: list[jax.Array]) -> list[jax.Array]:
        return step.of.results(read) if isinstance(step.of, _Loop) else bind(step.of, ins)

    def number(item: Item, place: int) -> jax.Array:
        assert not isinstance(item, _Loop), "a loop reads what it needs itself"
        return literal_of(item, place).val

    evaluate(map(_step, items), read, write, number, apply)


def _step(item: Item) -> Step[Item, Var]:
    return Step(item, (), item.writes) if isinstance(item, _Loop) else Step(item, *equation(item)[1:])
