"""Which leaves of an optimizer's trees are whose: rows of layers, and the outside."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cjax.jax_compat.core import Atom, ClosedJaxpr, Literal, Var
from cjax.sharding.storage.optimizer import TracedOptimizer
from cjax.sharding.storage.storage import Slot, Storage
from cjax.trace.dims.find import find_dims
from cjax.tree import PyTree, leaf_names
from cjax.walk.branches import both_branches
from cjax.walk.layer_slots import layer_slot, num_layers
from cjax.walk.owners import Owned, Owner, own
from cjax.walk.slices import Read
from cjax.walk.unstack import unstack


@dataclass(frozen=True)
class StackSlots:
    """What a stack has of one tree: slots, and how a layer's array of each is kept.

    `apart` are those of which one leaf of the user's tree holds all layers.
    """

    slots: tuple[int, ...]
    of_layer: tuple[Slot, ...]
    apart: tuple[bool, ...]


@dataclass(frozen=True)
class Laid:
    """One tree in rows: those of each stack, and the slots outside."""

    storage: Storage
    stacks: tuple[StackSlots, ...]
    outside: tuple[int, ...]

    @property
    def num_outside(self) -> int:
        """Leaves outside."""
        return sum(len(self.storage.slots[index].leaves) for index in self.outside)

    @property
    def leaves(self) -> list["LeafPlace"]:
        """Of each leaf of the user's tree, whose it is."""
        found: dict[int, LeafPlace] = {}
        for k, rows in enumerate(self.stacks):
            for place, index in enumerate(rows.slots):
                slot = self.storage.slots[index]
                for layer, leaf in enumerate(slot.leaves):
                    found[leaf] = LeafPlace(k, place, layer, num_layers(slot) if rows.apart[place] else 0)
        place = 0
        for index in self.outside:
            for leaf in self.storage.slots[index].leaves:
                found[leaf] = LeafPlace(None, place)
                place += 1
        return [found[leaf] for leaf in range(len(found))]


@dataclass(frozen=True)
class LeafPlace:
    """A leaf of the user's tree: its stack (None: outside), its place in a row, and its layer; or that it holds `num`
    layers."""

    stack: int | None
    place: int
    layer: int = 0
    num: int = 0

    def owner(self, layer: int) -> Owner | None:
        """Whose a part of it is."""
        return None if self.stack is None else (self.stack, layer if self.num else self.layer)


@dataclass(frozen=True)
class Ends:
    """The inputs and results of a trace, by owner; None is the outside. `more` are results that belong to no tree."""

    given: Mapping[Owner | None, Mapping[Var, Read]]
    outs: Mapping[Owner | None, tuple[Atom, ...]]
    more: tuple[Atom, ...]


def in_rows(storage: Storage, stacks: Sequence[Sequence[int]]) -> Laid:
    """A tree in rows, the slots of each stack given."""
    rows = tuple(
        StackSlots(
            tuple(slots),
            tuple(layer_slot(storage.slots[i]) for i in slots),
            tuple(not storage.slots[i].is_stack for i in slots),
        )
        for slots in stacks
    )
    taken = {i for slots in stacks for i in slots}
    return Laid(storage, rows, tuple(i for i in range(len(storage.slots)) if i not in taken))


def state_in_rows(traced: TracedOptimizer, params: Laid, params_shape: PyTree) -> Laid:
    """The state of an optimizer in rows: what it keeps of each layer.

    Raises:
      ValueError: it keeps something of some layers and not of others, or has layers along another dim than the first.
    """
    names = leaf_names(params_shape)
    state_names = leaf_names(traced.storage.leaf_shapes())
    leaves = params.leaves
    shapes = {leaf: slot.shape for slot in params.storage.slots for leaf in slot.leaves}
    dims = None
    stacks: list[list[int]] = [[] for _ in params.stacks]
    for index, slot in enumerate(traced.storage.slots):
        belongs = traced.owners[slot.leaves[0]]
        leaf = None if belongs is None else leaves[belongs[1]]
        if belongs is None or leaf is None or leaf.stack is None:
            continue
        name, param = state_names[slot.leaves[0]], names[belongs[1]]
        if not leaf.num:
            if not slot.is_stack:
                raise ValueError(
                    f"The optimizer keeps {name} for {param}, and not the same for the other layers of its stack. With "
                    "budget= or offload=, layers are updated one by one, all in the same way: give all of them the "
                    "same optimizer (labels and masks by what a leaf is, not by the number of its layer; a rate for "
                    "each layer can be a factor on its updates; what is not trained at all is for `wrt`), or leave "
                    "budget= and offload= out."
                )
            stacks[leaf.stack].append(index)
            continue
        if slot.shape == shapes[belongs[1]]:
            stacks[leaf.stack].append(index)  # as the parameter, whether an update reads it or not
            continue
        dims = dims or find_dims(traced.update)
        layer_dim = dims.class_of(dims.inputs[belongs[1]][0])
        own_dims = [dims.class_of(d) for d in dims.inputs[len(names) + slot.leaves[0]]]
        along = [
            i for i, (d, n) in enumerate(zip(own_dims, slot.shape, strict=True)) if d == layer_dim and n == leaf.num
        ]
        if along and along[0] != 0:
            raise ValueError(
                f"The optimizer keeps {name} with the layers of {param} along dim {along[0]}. With budget= or "
                "offload=, layers are updated one by one: use an optimizer whose state is like the parameters, such as "
                "optax.adamw, or leave budget= and offload= out."
            )
        if along:
            stacks[leaf.stack].append(index)
    return in_rows(traced.storage, stacks)


Inputs = Sequence[tuple[str, Sequence[LeafPlace]]]


def find_owners(closed: ClosedJaxpr, ins: Inputs, outs: Sequence[Sequence[LeafPlace]]) -> tuple[Owned, Ends]:
    """Whose each value of a trace is.

    Args:
      closed: a flat trace.
      ins: its inputs, by kind.
      outs: its results, tree by tree; what comes behind them belongs to no tree.
    """
    flat_ins = [(kind, leaf) for kind, leaves in ins for leaf in leaves]
    flat_outs = [(tree, leaf) for tree, leaves in enumerate(outs) for leaf in leaves]
    layers: dict[int, int] = {}
    for _, leaf in flat_ins:
        if leaf.stack is not None:
            layers[leaf.stack] = max(layers.get(leaf.stack, 0), leaf.num, leaf.layer + 1)
    first = {k: sum(n for other, n in layers.items() if other < k) for k in layers}

    def bits(leaf: LeafPlace) -> int:
        if leaf.stack is None:
            return 0
        return ((1 << leaf.num) - 1 if leaf.num else 1 << leaf.layer) << first[leaf.stack]

    layers_of = {var: bits(leaf) for var, (_, leaf) in zip(closed.jaxpr.invars, flat_ins, strict=True)}
    apart = unstack(
        both_branches(closed, layers_of),
        {i: leaf.num for i, (_, leaf) in enumerate(flat_ins) if leaf.num},
        {i: leaf.num for i, (_, leaf) in enumerate(flat_outs) if leaf.num},
    )
    owner_of: dict[Var, Owner] = {}
    given: dict[Owner | None, dict[Var, Read]] = {None: {}}
    for (kind, leaf), parts in zip(flat_ins, apart.ins, strict=True):
        for layer, var in enumerate(parts):
            owner = leaf.owner(layer)
            given.setdefault(owner, {})[var] = Read(kind, leaf.place)
            if owner is not None:
                owner_of[var] = owner
    made: dict[Owner | None, list[tuple[tuple[int, int], Atom]]] = {owner: [] for owner in given}
    for (tree, leaf), parts in zip(flat_outs, apart.outs[: len(flat_outs)], strict=True):
        for layer, atom in enumerate(parts):
            made[leaf.owner(layer)].append(((tree, leaf.place), atom))
    results = {owner: tuple(atom for _, atom in sorted(of, key=lambda out: out[0])) for owner, of in made.items()}
    more = tuple(atom for (atom,) in apart.outs[len(flat_outs) :])
    owned = own(apart.closed, owner_of, (*results[None], *more))
    results[None], more = (
        tuple(owned.copies.get(a, a) if type(a) is not Literal else a for a in of) for of in (results[None], more)
    )
    return owned, Ends(given, results, more)
