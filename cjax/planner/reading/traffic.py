"""What goes through memory beside products and attentions, as a compiler that fuses would have it.

Numbers that are moved, rounded or combined one by one are made where they are read. What stands in memory is what a
product, a lookup, a sort or a loop reads or makes, what a reduction makes, and what several of these read, unless to
make it again in each costs no more than to read it. Each such value is made by one kernel, which reads the values that
it is made of, once each, and writes it.
"""

import math
from collections.abc import Iterator

from cjax.planner.reading.naming import Naming
from cjax.planner.reading.stretches import Body, Operation, Spot
from cjax.planner.work import NamedTensor
from cjax.trace.jaxpr.primitives import FUSED, facts_of, name_of, named

# An update is written in the place of what it changes, so that the rest never moves. For memory that place counts, and
# `live` has it stand.
_FUSED = FUSED | named("dynamic_update_slice")
_SMALL = 4096  # elements: of what is smaller nobody counts the bytes, and it is as well read as made again


def touched(body: Body, naming: Naming) -> Iterator[NamedTensor]:
    """What the kernels of a body read and write in one pass over its stretch; single numbers are not worth counting."""
    for kernel in _Kernels(body).found():
        for node in kernel:
            if math.prod(getattr(node.var.aval, "shape", ())) > 1:
                yield value_of(node, body, naming)


def value_of(node: Spot, body: Body, naming: Naming) -> NamedTensor:
    """A value by the names of its dims."""
    aval = node.var.aval
    dims = naming.dims(naming.trace.dims.of(node.var, body.scopes[node.path]), aval.shape)
    itemsize = getattr(aval.dtype, "itemsize", 4)
    return NamedTensor(dims, itemsize, is_computed(node), body.times)


def is_computed(node: Spot) -> bool:
    """Whether a half precision halves a value: a float32 of the computation, and no index or mask."""
    return str(node.var.aval.dtype) == "float32"


class _Kernels:
    """Which values of a body stand in memory, and what makes them."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._maker = {node: step for step in body.steps for node in step.writes}
        self._forms = forms_of(body)
        self._made_of: dict[Spot, tuple[Spot, ...]] = {}
        self._stands: set[Spot] = {self._root(node) for node in body.results}
        for step in body.steps:
            if not _is_fused(step):
                self._stands.update(step.writes)
                if not _reduces(step):
                    self._stands.update(self._root(node) for node in step.reads if node is not None)

    def found(self) -> Iterator[list[Spot]]:
        """What each kernel reads and writes. Products, attentions and loops are none of these: what they read and
        write is counted with them."""
        together: set[tuple[tuple[Spot, ...], tuple[int, ...]]] = set()
        self._choose()
        for step in self._body.steps:
            read = self._make(step)
            if not _makes_kernel(step):
                continue
            written = [node for node in step.writes if node in self._stands and not self._is_form(node)]
            if not written or self._is_slice(step, read):
                continue
            if step.name == "gather":  # of a table it reads what it takes
                table = () if step.reads[0] is None else self._sources(step.reads[0])
                yield [*written, *written, *(node for node in read if node not in table)]
                continue
            # Reductions of one thing, a mean and a mean of squares, read it once.
            key = (read, tuple(getattr(written[0].var.aval, "shape", ())))
            known = _reduces(step) and key in together
            together.add(key)
            yield written if known else [*written, *read]

    def _root(self, node: Spot) -> Spot:
        return self._forms.get(node, node)

    def _is_form(self, node: Spot) -> bool:
        """Whether a value is another in another order: whoever reads it reads the other so."""
        return node in self._forms

    def _is_slice(self, step: Operation, read: tuple[Spot, ...]) -> bool:
        """Whether a step takes a part of what stands in memory: no more than that is read."""
        there = (node in self._stands or node not in self._maker for node in read)
        return step.eqn is not None and facts_of(step.eqn).takes and all(there)

    def _sources(self, node: Spot) -> tuple[Spot, ...]:
        """The values in memory that one is made of: itself, where it stands there or comes from outside."""
        node = self._root(node)
        if node in self._stands or node not in self._maker:
            return (node,)
        return self._made_of[node]

    def _make(self, step: Operation) -> tuple[Spot, ...]:
        """Notes what a step's results are made of, and says it."""
        each = (self._sources(node) for node in step.reads if node is not None)
        read = tuple(dict.fromkeys(node for nodes in each for node in nodes))
        self._made_of.update((node, (node,) if self._is_slice(step, read) else read) for node in step.writes)
        return read

    def _choose(self) -> None:
        """Adds to what stands in memory the values that several kernels read, where to make one again costs more than
        to read it. The last come first: what is made for one that stands is used there alone."""
        readers: dict[Spot, list[Operation]] = {}
        for step in self._body.steps:
            self._make(step)
            for node in dict.fromkeys(node for node in step.reads if node is not None):
                readers.setdefault(node, []).append(step)
        users: dict[Spot, frozenset[object]] = {}
        for step in reversed(self._body.steps):
            for node in step.writes:
                found: set[object] = {"outside"} if node in self._body.results else set()
                for reader in readers.get(node, ()):
                    if not _is_fused(reader):
                        found.add(id(reader))
                    else:
                        found |= {out for spot in reader.writes for out in users.get(spot, ())}
                again = sum(map(_bytes, self._made_of[node]))
                several = _is_fused(step) and len(found) > 1 and not self._is_form(node)
                if several and again > _bytes(node) >= _SMALL:
                    self._stands.add(node)
                users[node] = frozenset((node,)) if node in self._stands else frozenset(found)


def forms_of(body: Body) -> dict[Spot, Spot]:
    """Of values that are others in another shape, order or dtype, which these are."""
    forms: dict[Spot, Spot] = {}
    for step in body.steps:
        if step.eqn is None or not facts_of(step.eqn).view or not step.reads or step.reads[0] is None:
            continue
        (made,), read = step.writes, step.reads[0]
        if math.prod(made.var.aval.shape) == math.prod(read.var.aval.shape):  # and not repeated
            forms[made] = forms.get(read, read)
    return forms


def _is_fused(step: Operation) -> bool:
    return step.eqn is not None and name_of(step.eqn) in _FUSED


def _reduces(step: Operation) -> bool:
    """Whether a step reads what it is made of as it is made."""
    return step.eqn is not None and bool(facts_of(step.eqn).reduces)


def _makes_kernel(step: Operation) -> bool:
    if step.eqn is None:
        return False
    facts = facts_of(step.eqn)
    return not (facts.product or facts.loop or facts.branches)


def _bytes(node: Spot) -> int:
    aval = node.var.aval
    return math.prod(getattr(aval, "shape", ())) * getattr(getattr(aval, "dtype", None), "itemsize", 4)
