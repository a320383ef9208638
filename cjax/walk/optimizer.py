"""An optax transformation row by row, in passes, though it sees the user's own tree.

Its `update` is traced once on that tree, the norm of all gradients beside it. What the trace does with one layer's
gradients, state and parameters is that layer's; what it does with several layers' is done behind a pass over all layers
that makes the numbers it reads, which must be few. Equal layers are one program.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from cjax.jax_compat.core import Literal
from cjax.sharding.storage.optimizer import TracedOptimizer, trace_optimizer
from cjax.sharding.storage.storage import Storage
from cjax.tree import PyTree, leaf_names
from cjax.walk.ends import Laid, LeafPlace, find_owners, in_rows, state_in_rows
from cjax.walk.jitted import Jitted
from cjax.walk.owners import Owned, Owner
from cjax.walk.passes import SMALL, Refused, plan_init, plan_passes
from cjax.walk.slices import Slice, SliceProgram, share
from cjax.walk.values import Values

MOST_ROUNDS = 8  # more would be one for each layer, of a walk that has each once
Arrays = tuple[jax.Array, ...]
Joint = Mapping[str, jax.Array]
More = Mapping[str, Sequence[Any]]  # what a slice reads besides, by kind
Numbers = Sequence[ArrayLike]
Role = tuple[str, int | None]  # what a program does, and for which stack


class RowOptimizer:
    """An optimizer whose parameters and state are rows, one for each layer, and what is outside of all layers.

    A step is `join(0, {}, ...)`; then for each round from 1 to `num_rounds` `export` of every layer and `join`; then
    `update_row` of every layer, and `update_outside`, in any order. A row is a tuple of arrays as their slots keep one
    layer's: padded, in parts over the mesh.

    Attributes:
      storage: of the state, as that of `StoredOptimizer`.
      slots: for each stack, the slots of `storage` that have a row for each layer, in a row's order.
      outside: the other slots.
      outside_params: the slots of the parameters that no stack has.
      num_rounds: passes over all layers before the last.
      reads_loss: whether an update depends on the loss.
    """

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        params_shape: PyTree,
        params: Storage,
        stacks: Sequence[Sequence[int]],
        spec_of: Callable[[int], PartitionSpec],
        mesh: Mesh,
    ) -> None:
        """Trace an optimizer and cut its update into slices; nothing is compiled yet.

        Args:
          optimizer: any optax transformation.
          params_shape: the user's tree of parameters, as ShapeDtypeStructs.
          params: how they are stored.
          stacks: for each stack, the slots of `params` that have a row for each of its layers. Of a slot that is one
            leaf, layers are along dim 0.
          spec_of: placement of the optimizer's part of a parameter, by its index.
          mesh: the mesh.

        Raises:
          TypeError: `optimizer` is something else.
          ValueError: what it does with several layers can't be done in passes.
        """
        norm = lambda grads: (optax.tree.norm(grads),)  # noqa: E731
        traced = trace_optimizer(optimizer, params_shape, params, spec_of, mesh, norm, across_labels=True)
        _check_pure(traced)
        self._update = traced.update
        params_laid = in_rows(params, stacks)
        opt_laid = state_in_rows(traced, params_laid, params_shape)
        self.storage, self.reads_loss = traced.storage, traced.reads_loss
        self.slots = tuple(rows.slots for rows in opt_laid.stacks)
        self.outside, self.outside_params = opt_laid.outside, params_laid.outside
        self._mesh, self._whole = mesh, NamedSharding(mesh, PartitionSpec())
        self._params, self._opt = Values(params_laid, mesh, traced.local), Values(opt_laid, mesh)
        of_params, of_opt = params_laid.leaves, opt_laid.leaves

        ins = [("grads", of_params), ("opt", of_opt), ("params", of_params), ("loss", [LeafPlace(None, 0)])]
        self._owned, ends = find_owners(traced.update, ins, [of_params, of_opt])
        self._init_owned, init_ends = find_owners(traced.init, [("params", of_params)], [of_opt])
        try:
            self._passes = plan_passes(self._owned, ends)
            self._inits = plan_init(self._init_owned, init_ends)
        except Refused as refused:
            raise ValueError(_why(refused, params_laid, params_shape)) from None
        if self._owned.num_rounds > MOST_ROUNDS:
            raise ValueError(
                f"The optimizer needs {self._owned.num_rounds} passes over all layers for one update, each behind the "
                "one before: it goes from layer to layer. Let it put together what it needs of layers in one sum "
                "(sum(...) of a list, as optax.tree.norm does), or leave budget= and offload= out."
            )
        (norm,) = ends.more
        assert type(norm) is not Literal, "of no gradients"
        self._norm, self.num_rounds = norm, self._owned.num_rounds
        self._init_programs = share(self._inits)
        self._join_programs = [SliceProgram([piece]) for piece in self._passes.joins]
        self._outside_program = SliceProgram([self._passes.outside])
        known = [var for of_round in self._passes.known for var in of_round]
        self._names = {var: f"value {n}" for n, var in enumerate(known)}
        self._jitted: dict[object, Any] = {}

    def reads(self, number: int, k: int, layer: int) -> frozenset[str]:
        """Which of "grads", "opt" and "params" a layer's export of a round reads; `export` takes () for the others."""
        piece = self._passes.exports.get((number, (k, layer)))
        found = {given.kind for _, given in piece.reads} if piece else set()
        return frozenset(found & {"grads", "opt", "params"})

    def is_early(self, k: int, layer: int) -> bool:
        """Whether a layer's export of the first round reads its gradients alone, and so can be made as they are."""
        piece = self._passes.exports.get((1, (k, layer)))
        return piece is None or (self.reads(1, k, layer) <= {"grads"} and not piece.reads_of("joint"))

    def is_alone(self, k: int) -> bool:
        """Whether the layers of a stack are updated each by itself, so that it can be done when its gradients are
        there: it needs neither the loss, nor another's gradients, nor a pass before."""
        first = self._passes.joins[0]
        mine = [piece for (stack, _), piece in self._passes.updates.items() if stack == k]
        layers = [layer for stack, layer in self._passes.updates if stack == k]
        rounds = {self._owned.round_of[var] for piece in mine for var in piece.reads_of("joint")}
        return (
            self.num_rounds <= 1
            and rounds <= {0}
            and not any(piece.reads_of("loss") for piece in mine)
            and not first.reads_of("grads")
            and not first.reads_of("loss")
            and all(self.is_early(k, layer) for layer in layers)
        )

    @functools.cached_property
    def joint(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What `join` gives behind the last round, by name, as placed."""

        def struct(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=self._whole)

        found = {name: struct(var.aval.shape, var.aval.dtype) for var, name in self._names.items()}
        return {**found, "norm": struct((), self._norm.aval.dtype), "finite": struct((), jnp.bool_)}

    @functools.cached_property
    def digest(self) -> bytes:
        """What tells an update from others: of another optimizer, another learning rate, or another version of JAX."""
        closed = self._update
        text = re.sub(r" at 0x[0-9a-f]+", "", str(closed.jaxpr))  # functions are named by where they are in memory
        found = hashlib.sha256(text.encode())
        for const in closed.consts:
            found.update(np.asarray(const).tobytes())
        return found.digest()

    def before(self, opt: Arrays, params: Arrays) -> dict[str, jax.Array]:
        """What the update of layers that are alone (`is_alone`) reads of the outside, before there are gradients: of a
        step that is taken to be finite."""
        piece, program = self._passes.joins[0], self._join_programs[0]
        names = [self._names[var] for var in self._passes.known[0]]

        def run_before(opt: Arrays, params: Arrays, more: More) -> dict[str, jax.Array]:
            values = {"opt": self._opt.of_outside(opt), "params": self._params.of_outside(params), **more}
            return dict(zip(names, program.run(values, ()), strict=True))

        # Of the program's results `finite` is none, so that it is the very one that `join` has for round 0: in another
        # one a power of a scalar may have another last bit.
        run = self._jit(("before", None), program, run_before, self._whole)
        finite = jax.device_put(np.bool_(True), self._whole)
        return {**(run(opt, params, self._more(self._owned, piece, {})) if names else {}), "finite": finite}

    def init_row(self, k: int, layer: int, params: Arrays) -> Arrays:
        """A layer's first state, from its parameters."""
        piece, program = self._inits[k, layer], self._init_programs[k, layer]

        def init(params: Arrays, more: More, numbers: Numbers) -> Arrays:
            values = {"params": self._params.of_row(k, params), **more}
            return self._opt.row(k, program.run(values, numbers))

        run = self._jit(("init", k), program, init, self._opt.row_shardings(k))
        return run(params, self._more(self._init_owned, piece, {}), program.numbers(piece))

    def init_outside(self, params: Arrays) -> Arrays:
        """The first state of what is outside, from its parameters."""
        piece, program = self._inits[None], self._init_programs[None]

        def init(params: Arrays, more: More) -> Arrays:
            return self._opt.outside(program.run({"params": self._params.of_outside(params), **more}, ()))

        run = self._jit(("init outside", None), program, init, self._opt.outside_shardings())
        return run(params, self._more(self._init_owned, piece, {}))

    def export(
        self, number: int, k: int, layer: int, grads: Arrays, opt: Arrays, params: Arrays, joint: Joint
    ) -> Arrays:
        """What a layer gives to a round: numbers, the same on all devices."""
        piece = self._passes.exports.get((number, (k, layer)))
        if piece is None:
            return ()
        program = self._passes.programs["export", number, (k, layer)]
        reads = self.reads(number, k, layer)

        def export(rows: Mapping[str, Arrays], more: More, numbers: Numbers) -> Arrays:
            return tuple(program.run({**self._of_rows(k, rows), **more}, numbers))

        rows = {"grads": grads, "opt": opt, "params": params}
        run = self._jit(("export", k), program, export, self._whole)
        given = {kind: arrays for kind, arrays in rows.items() if kind in reads}
        return run(given, self._more(self._owned, piece, joint), program.numbers(piece))

    def join(
        self,
        number: int,
        exports: Mapping[Owner, Arrays],
        grads: Arrays,
        opt: Arrays,
        params: Arrays,
        loss: jax.Array,
        joint: Joint,
    ) -> dict[str, jax.Array]:
        """What is known of all layers behind a round: what the rounds before gave (`joint`), and more.

        Args:
          number: of the round, from 0, which is before all passes.
          exports: of each layer, what it exported in this round.
          grads, opt, params: of the outside.
          loss: of the step.
          joint: of the round before; {} at first. Behind round 1 it has "norm", of all gradients, and "finite", whether
            that and the loss are.
        """
        piece, owned = self._passes.joins[number], self._owned
        program = self._join_programs[number]
        names = [self._names[var] for var in self._passes.known[number]]
        at = {var: (owner, i) for owner, read in owned.exports.get(number, {}).items() for i, var in enumerate(read)}

        def run_join(
            given: Sequence[jax.Array], grads: Arrays, opt: Arrays, params: Arrays, loss: jax.Array, more: More
        ) -> dict[str, jax.Array]:
            values = self._of_outside(grads, opt, params, loss) | {"export": given, **more}
            made = dict(zip(names, program.run(values, ()), strict=True))
            if self._names[self._norm] in made:
                norm = made[self._names[self._norm]]
                made |= {"norm": norm, "finite": jnp.isfinite(loss) & jnp.isfinite(norm)}
            return made

        if not names:
            return dict(joint)
        given = [exports[owner][i] for owner, i in (at[var] for var in piece.reads_of("export"))]
        run = self._jit(("join", None), program, run_join, self._whole)
        return {**joint, **run(given, grads, opt, params, loss, self._more(owned, piece, joint))}

    def update_row(
        self, k: int, layer: int, grads: Arrays, opt: Arrays, params: Arrays, joint: Joint
    ) -> tuple[Arrays, Arrays]:
        """A layer's new (parameters, state); as they were, if the step is not finite. Gives up its operands."""
        run, args = self._update_of(k, layer, grads, opt, params, joint)
        return _given_up(grads, run(*args))

    def compile_update(self, k: int, layer: int, grads: Arrays, opt: Arrays, params: Arrays, joint: Joint) -> Jitted:
        """The program of `update_row`, compiled ahead for rows and joint numbers as structs."""
        run, args = self._update_of(k, layer, grads, opt, params, joint)
        run.compile(*args)
        return run

    def _update_of(
        self, k: int, layer: int, grads: Arrays, opt: Arrays, params: Arrays, joint: Joint
    ) -> tuple[Jitted, tuple[Any, ...]]:
        piece, program = self._passes.updates[k, layer], self._passes.programs["update", (k, layer)]
        num = len(params)

        def update(
            grads: Arrays, opt: Arrays, params: Arrays, finite: jax.Array, more: More, numbers: Numbers
        ) -> tuple[Arrays, Arrays]:
            def new() -> tuple[Arrays, Arrays]:
                rows = self._of_rows(k, {"grads": grads, "opt": opt, "params": params})
                outs = program.run({**rows, **more}, numbers)
                return self._params.row(k, outs[:num]), self._opt.row(k, outs[num:])

            return self._if_finite(finite, new, (params, opt))

        shardings = (self._params.row_shardings(k), self._opt.row_shardings(k))
        run = self._jit(("update", k), program, update, shardings, donate=("opt", "params"))
        more = self._more(self._owned, piece, joint)
        return run, (grads, opt, params, joint["finite"], more, program.numbers(piece))

    def update_outside(
        self, grads: Arrays, opt: Arrays, params: Arrays, loss: jax.Array, joint: Joint
    ) -> tuple[Arrays, Arrays]:
        """The new (parameters, state) outside; as they were, if the step is not finite. Gives up its operands."""
        piece, program = self._passes.outside, self._outside_program
        num = self._params.laid.num_outside

        def update(
            grads: Arrays, opt: Arrays, params: Arrays, loss: jax.Array, finite: jax.Array, more: More
        ) -> tuple[Arrays, Arrays]:
            def new() -> tuple[Arrays, Arrays]:
                outs = program.run(self._of_outside(grads, opt, params, loss) | dict(more), ())
                return self._params.outside(outs[:num]), self._opt.outside(outs[num:])

            return self._if_finite(finite, new, (params, opt))

        shardings = (self._params.outside_shardings(), self._opt.outside_shardings())
        run = self._jit(("update outside", None), program, update, shardings, donate=("opt", "params"))
        made = run(grads, opt, params, loss, joint["finite"], self._more(self._owned, piece, joint))
        return _given_up(grads, made)

    def _jit(
        self, role: Role, program: SliceProgram, function: Callable[..., Any], placed: Any, donate: Sequence[str] = ()
    ) -> Jitted:
        """Jitted once for each program of a stack."""
        key = role, id(program)
        if key not in self._jitted:
            self._jitted[key] = Jitted(function, self._mesh, donate, placed)
        return self._jitted[key]

    def _more(self, owned: Owned, piece: Slice, joint: Joint) -> More:
        """What a slice reads besides: of the outside, and of what the trace closes over."""
        return {
            "joint": [joint[self._names[var]] for var in piece.reads_of("joint")],
            "const": [owned.consts[var] for var in piece.reads_of("const")],
        }

    def _of_rows(self, k: int, rows: Mapping[str, Arrays]) -> dict[str, list[jax.Array]]:
        kept = {"grads": self._params, "opt": self._opt, "params": self._params}
        return {kind: kept[kind].of_row(k, row) for kind, row in rows.items()}

    def _of_outside(self, grads: Arrays, opt: Arrays, params: Arrays, loss: jax.Array) -> dict[str, Sequence[Any]]:
        return {
            "grads": self._params.of_outside(grads), "opt": self._opt.of_outside(opt),
            "params": self._params.of_outside(params), "loss": [loss.astype(jnp.float32)],
        }  # fmt: skip

    def _if_finite(self, finite: jax.Array, new: Callable[[], PyTree], old: PyTree) -> PyTree:
        """A step that is not finite changes nothing. GPUs select, which the update is fused with; a CPU's compiler
        would repeat a part of the update for each select."""
        if self._mesh.devices.flat[0].platform == "cpu":
            return lax.cond(finite, new, lambda: old)
        return jax.tree.map(lambda n, o: o if n is o else jnp.where(finite, n, o), new(), old)


def _given_up(grads: Arrays, made: tuple[Arrays, Arrays]) -> tuple[Arrays, Arrays]:
    """Gradients are not donated, since no result takes their place: JAX would warn of it."""
    for array in grads:
        array.delete()
    return made


def _check_pure(traced: TracedOptimizer) -> None:
    effects = {str(effect) for effect in (*traced.update.effects, *traced.init.effects)}
    if effects:
        raise ValueError(
            f"The optimizer does something besides its update ({', '.join(sorted(effects))}), as jax.debug.print does. "
            "With budget= or offload= its update is cut into passes, in which that would run at other times: take it "
            "out, or leave budget= and offload= out."
        )


def _why(refused: Refused, params: Laid, params_shape: PyTree) -> str:
    shape = getattr(refused.var.aval, "shape", ())
    what = f"{refused.var.aval.dtype}{list(shape)}"
    names = leaf_names(params_shape)
    k, layer = refused.owner or (0, 0)
    rows = params.stacks[k]
    of = ", ".join(names[params.storage.slots[i].layer_leaves[0]] for i in rows.slots[:3])
    apart = " Or write the layers unrolled, so that each has leaves of its own." if any(rows.apart) else ""
    return (
        f"The optimizer puts together what belongs to several layers: {what} of layer {layer} of the stack of {of}. "
        "With budget= or offload=, layers are updated one by one, and of what an update does with several of them at "
        f"once only sums, norms and the like can be had ({SMALL // 1024} KiB a layer). Use an optimizer that looks at "
        "each leaf by itself, such as optax.adamw or cjax.optim.lamb, or leave budget= and offload= out." + apart
    )
