"""What a model carries from one micro-batch to the next without looking at examples: how often it drew random numbers.

Layers of an NNX model count that themselves, in the midst of everything else. A pipeline runs many micro-batches at
once, so it needs each one's counts before the layers run; they are sliced out of the trace here, out of loops too.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core as jex

from cjax.trace.emit.emit import bind
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.simplify import scan_counts

Kinds = frozenset[str]


def depends(eqns: Sequence[Any], on: dict[Any, Kinds], mark: Callable[[Any, Kinds], Kinds]) -> None:
    """Adds to `on` what the result of each equation depends on, for loops result by result.

    Args:
      eqns: equations of a flat trace, in order.
      on: what inputs depend on; what is not in it depends on nothing.
      mark: (equation, what its result depends on) -> what to note.
    """
    for eqn in eqns:
        ins = [on.get(v, frozenset()) if not isinstance(v, jex.Literal) else frozenset() for v in eqn.invars]
        if eqn.primitive.name == "scan":
            outs = _of_scan(eqn, ins)
        else:
            outs = [frozenset().union(*ins)] * len(eqn.outvars)
        on.update((var, mark(eqn, kinds)) for var, kinds in zip(eqn.outvars, outs, strict=True))


def _of_scan(eqn: Any, ins: Sequence[Kinds]) -> list[Kinds]:
    body, (num_consts, num_carry) = eqn.params["jaxpr"].jaxpr, scan_counts(eqn)
    ins = list(ins)
    while True:
        on = dict(zip(body.invars, ins, strict=True))
        depends(body.eqns, on, lambda eqn, kinds: kinds)
        outs = [on.get(v, frozenset()) if not isinstance(v, jex.Literal) else frozenset() for v in body.outvars]
        new = list(ins)
        for i in range(num_carry):
            new[num_consts + i] = ins[num_consts + i] | outs[i]
        if new == ins:
            return [*new[num_consts : num_consts + num_carry], *outs[num_carry:]]
        ins = new


@dataclass(frozen=True)
class _Loop:
    """Of a scan, what some of its results need."""

    eqn: Any
    carries: tuple[int, ...]
    xs: tuple[int, ...]
    outs: tuple[int, ...]
    eqns: tuple[Any, ...]

    @property
    def reads(self) -> list[Any]:
        num_consts, num_carry = scan_counts(self.eqn)
        body, inner = self.eqn.params["jaxpr"].jaxpr, _read_by(self.eqns)
        consts = [a for a, v in zip(self.eqn.invars[:num_consts], body.invars[:num_consts], strict=True) if v in inner]
        carries = [self.eqn.invars[num_consts + i] for i in self.carries]
        return [*consts, *carries, *(self.eqn.invars[num_consts + num_carry + i] for i in self.xs)]

    def run(self, read: Callable[[Any], Any]) -> dict[Any, Any]:
        eqn, (num_consts, num_carry) = self.eqn, scan_counts(self.eqn)
        closed = eqn.params["jaxpr"]
        body, first_x = closed.jaxpr, num_consts + num_carry
        known = dict(zip(body.constvars, closed.consts, strict=True))
        inner = _read_by(self.eqns)
        pairs = zip(body.invars[:num_consts], eqn.invars[:num_consts], strict=True)
        known |= {v: read(atom) for v, atom in pairs if v in inner}

        def turn(carry: Any, x: Any) -> Any:
            env = known | dict(zip([body.invars[num_consts + i] for i in self.carries], carry, strict=True))
            env |= dict(zip([body.invars[first_x + i] for i in self.xs], x, strict=True))
            evaluate(self.eqns, lambda v: v.val if isinstance(v, jex.Literal) else env[v], env.update)

            def result(i: int) -> Any:
                v = body.outvars[i]
                return jnp.asarray(v.val, eqn.outvars[i].aval.dtype) if isinstance(v, jex.Literal) else env[v]

            return [result(i) for i in self.carries], [result(num_carry + i) for i in self.outs]

        initial = [read(eqn.invars[num_consts + i]) for i in self.carries]
        xs = [read(eqn.invars[first_x + i]) for i in self.xs]
        final, outs = lax.scan(turn, initial, xs, length=eqn.params["length"], reverse=eqn.params["reverse"])
        found = {eqn.outvars[i]: value for i, value in zip(self.carries, final, strict=True)}
        return found | {eqn.outvars[num_carry + i]: value for i, value in zip(self.outs, outs, strict=True)}


def narrowed(eqns: Sequence[Any], targets: Sequence[Any]) -> list[Any]:
    """The equations that `targets` need, of loops only what they need of them."""
    live = {v for v in targets if not isinstance(v, jex.Literal)}
    found: list[Any] = []
    for eqn in reversed(eqns):
        if not live & set(eqn.outvars):
            continue
        item = _narrow(eqn, live) if eqn.primitive.name == "scan" else eqn
        found.append(item)
        live = (live - set(eqn.outvars)) | _read_by([item])
    return found[::-1]


def _narrow(eqn: Any, live: set[Any]) -> _Loop:
    body, (num_consts, num_carry) = eqn.params["jaxpr"].jaxpr, scan_counts(eqn)
    carries = {i for i in range(num_carry) if eqn.outvars[i] in live}
    outs = [i for i, var in enumerate(eqn.outvars[num_carry:]) if var in live]
    first_x = num_consts + num_carry
    while True:
        wanted = [body.outvars[i] for i in sorted(carries)] + [body.outvars[num_carry + i] for i in outs]
        needed = narrowed(body.eqns, wanted)
        read = {v for v in wanted if not isinstance(v, jex.Literal)} | _read_by(needed)
        more = {i for i in range(num_carry) if body.invars[num_consts + i] in read}
        if more <= carries:
            xs = tuple(i for i, var in enumerate(body.invars[first_x:]) if var in read)
            return _Loop(eqn, tuple(sorted(carries)), xs, tuple(outs), tuple(needed))
        carries |= more


def _read_by(items: Sequence[Any]) -> set[Any]:
    atoms = [v for item in items for v in (item.reads if isinstance(item, _Loop) else variables(item))]
    return {v for v in atoms if not isinstance(v, jex.Literal)}


def evaluate(
    items: Sequence[Any], read: Callable[[Any], Any], write: Callable[[Mapping[Any, Any]], Any]
) -> None:
    """Runs what `narrowed` found."""
    for item in items:
        if isinstance(item, _Loop):
            write(item.run(read))
        else:
            write(dict(zip(item.outvars, bind(item, [read(v) for v in item.invars]), strict=True)))
