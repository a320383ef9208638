"""A model's first values row by row: those of the author's init, of which no more is made at a time than a row.

`init` is traced once, and each row is a slice of it. Rows of equal layers are one program: what they differ in, numbers
folded into a key or the keys themselves, are arguments. Of a leaf in which its author holds all layers, made by a loop
or a map over these (`nn.scan`, `nnx.vmap`), a row is one turn; where it is made in one piece (one draw for all layers,
say), each of its rows makes all of it and keeps its own part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from cjax.jax_compat.core import Atom, ClosedJaxpr, Var, make_jaxpr
from cjax.jax_compat.core import Literal as Number
from cjax.mesh import compiler_options
from cjax.sharding.place.model import ModelStorage
from cjax.sharding.storage.storage import Storage
from cjax.trace.author.capture import Capture
from cjax.trace.dims.refine import refine
from cjax.trace.dims.refine_rules import whole
from cjax.trace.jaxpr.groups import variables
from cjax.trace.jaxpr.simplify import simplify
from cjax.walk.ends import LeafPlace, in_rows
from cjax.walk.passes import SMALL
from cjax.walk.slices import Read, Slice, SliceProgram, cut, share
from cjax.walk.unstack import size_of, unstack
from cjax.walk.values import Values

Arrays = tuple[jax.Array, ...]
Tree = Literal["params", "frozen", "model_state"]
TREES: tuple[Tree, ...] = get_args(Tree)
Row = tuple[Tree, int, int]  # of a tree, a stack, a layer


@dataclass(frozen=True)
class _Planned:
    """Slices of an init for one kind of key.

    Attributes:
      rows: each row's, which reads the key and what it shares with others.
      shared: small values that several rows read, keys above all.
      names: what `shared` makes, by where it is in that.
      outside: all that is outside.
    """

    rows: Mapping[Row, Slice]
    programs: Mapping[Row, SliceProgram]
    shared: SliceProgram
    names: Mapping[Var, int]
    outside: SliceProgram
    consts: Mapping[Var, Any]


class RowBirth:
    """The author's init, row by row; the same values as all at once."""

    def __init__(
        self, captured: Capture, storage: ModelStorage, stacks: Mapping[Tree, Sequence[Sequence[int]]], mesh: Mesh
    ) -> None:
        """Nothing is traced before the first row is asked for, nor compiled.

        Args:
          captured: the user's model.
          storage: how its trees are kept.
          stacks: of each tree, for each stack the slots that have a row for each of its layers; a tree that is left
            out has none.
          mesh: the mesh.
        """
        self._captured, self._mesh = captured, mesh
        kept: Mapping[Tree, Storage] = {
            "params": storage.params, "frozen": storage.frozen, "model_state": storage.model_state,
        }  # fmt: skip
        self._trees: dict[Tree, Values] = {
            tree: Values(in_rows(kept[tree], stacks.get(tree, ())), mesh) for tree in TREES
        }
        self._planned: dict[Any, _Planned] = {}
        self._jitted: dict[object, Any] = {}
        self._last: tuple[jax.Array, list[jax.Array]] | None = None

    def init_row(self, tree: Tree, k: int, layer: int, key: jax.Array) -> Arrays:
        """The first values of a layer, as its slots keep them."""
        planned = self._plan(key)
        piece, program = planned.rows[tree, k, layer], planned.programs[tree, k, layer]

        def init(key: jax.Array, more: Mapping[str, Sequence[Any]], numbers: Sequence[Any]) -> Arrays:
            return self._trees[tree].row(k, program.run({"key": [key], **more}, numbers))

        run = self._jit((tree, k, id(program)), init, self._trees[tree].row_shardings(k))
        shared = self._shared(planned, key) if piece.reads_of("shared") else []
        more = {
            "shared": [shared[planned.names[var]] for var in piece.reads_of("shared")],
            "const": [planned.consts[var] for var in piece.reads_of("const")],
        }
        return run(key, more, program.numbers(piece))

    def init_outside(self, key: jax.Array) -> tuple[Arrays, Arrays, Arrays]:
        """The first values of (params, frozen, model_state) that no stack has."""
        planned = self._plan(key)

        def init(key: jax.Array, consts: Sequence[Any]) -> tuple[Arrays, ...]:
            values = iter(planned.outside.run({"key": [key], "const": consts}, ()))
            return tuple(
                self._trees[tree].outside([next(values) for _ in range(self._trees[tree].laid.num_outside)])
                for tree in TREES
            )

        shardings = tuple(self._trees[tree].outside_shardings() for tree in TREES)
        params, frozen, model_state = self._jit(("outside", id(planned)), init, shardings)(
            key, [planned.consts[var] for var in planned.outside.first.reads_of("const")]
        )
        return params, frozen, model_state

    def _shared(self, planned: _Planned, key: jax.Array) -> list[jax.Array]:
        if self._last is None or self._last[0] is not key:
            run = self._jit(
                ("shared", id(planned)),
                lambda key, consts: planned.shared.run({"key": [key], "const": consts}, ()),
                NamedSharding(self._mesh, PartitionSpec()),
            )
            self._last = key, run(key, [planned.consts[var] for var in planned.shared.first.reads_of("const")])
        return self._last[1]

    def _jit(self, name: object, function: Callable[..., Any], shardings: Any) -> Any:
        if name not in self._jitted:
            options = compiler_options(self._mesh)
            self._jitted[name] = jax.jit(function, out_shardings=shardings, compiler_options=options)
        return self._jitted[name]

    def _plan(self, key: jax.Array) -> _Planned:
        kind = key.shape, key.dtype
        if kind not in self._planned:
            closed = simplify(make_jaxpr(self._captured.init)(jax.ShapeDtypeStruct(*kind)))
            forms = [form for tree in TREES for form in self._trees[tree].laid.storage.forms]
            self._planned[kind] = _planned(refine(closed, [whole(key.shape)], forms), self._trees)
        return self._planned[kind]


def _planned(closed: ClosedJaxpr, trees: Mapping[Tree, Values]) -> _Planned:
    leaves: list[tuple[Tree, LeafPlace]] = [(tree, leaf) for tree in TREES for leaf in trees[tree].laid.leaves]
    apart = unstack(closed, {}, {i: leaf.num for i, (_, leaf) in enumerate(leaves) if leaf.num})
    rows: dict[Row, list[tuple[int, Atom]]] = {}
    outside: dict[Tree, list[tuple[int, Atom]]] = {tree: [] for tree in TREES}
    for (tree, leaf), parts in zip(leaves, apart.outs, strict=True):
        for layer, atom in enumerate(parts):
            owner = leaf.owner(layer)
            of = outside[tree] if owner is None else rows.setdefault((tree, owner[0], owner[1]), [])
            of.append((leaf.place, atom))
    outs = {row: [atom for _, atom in sorted(of, key=lambda out: out[0])] for row, of in rows.items()}
    rest = [atom for tree in TREES for _, atom in sorted(outside[tree], key=lambda out: out[0])]

    jaxpr = apart.closed.jaxpr
    made = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    consts = dict(zip(jaxpr.constvars, apart.closed.consts, strict=True))
    many = _read_by_several(apart.closed, list(outs.values()))
    taken: dict[Var, None] = {}

    def alone(var: Var) -> Read | None:
        if var in consts:
            return Read("const")
        return None if var in made else Read("key", 0)

    def with_shared(var: Var) -> Read | None:
        # A value that is larger than what it is made of, as drawn numbers are, is made anew rather than kept.
        if var in made and var in many and size_of(var) <= min(SMALL, sum(map(size_of, variables(made[var])))):
            taken[var] = None
            return Read("shared")
        return alone(var)

    slices = {row: cut(atoms, made, with_shared) for row, atoms in outs.items()}
    shared = SliceProgram([cut(list(taken), made, alone)])
    names = {var: place for place, var in enumerate(taken)}
    return _Planned(slices, share(slices), shared, names, SliceProgram([cut(rest, made, alone)]), consts)


def _read_by_several(closed: ClosedJaxpr, rows: Sequence[Sequence[Atom]]) -> set[Var]:
    """The variables that several rows are made of."""
    bits: dict[Var, int] = {}
    for n, atoms in enumerate(rows):
        for atom in atoms:
            if type(atom) is not Number:
                bits[atom] = bits.get(atom, 0) | 1 << n
    for eqn in reversed(closed.eqns):
        of = 0
        for var in eqn.outvars:
            of |= bits.get(var, 0)
        for var in variables(eqn):
            bits[var] = bits.get(var, 0) | of
    return {var for var, of in bits.items() if of & (of - 1)}
