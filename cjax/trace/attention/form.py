"""An attention as fused kernels take it: logits that are scaled scores, with a bias, masked."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from cjax.jax_compat.core import Atom, Equation, Literal
from cjax.trace.attention.find import Attention
from cjax.trace.attention.labels import MOVES, Labels, Node, is_form
from cjax.trace.jaxpr.evaluate import Step, demanded, evaluate
from cjax.trace.jaxpr.primitives import facts_of, name_of
from cjax.trace.jaxpr.view import literal_of

# float32 exp is 0 from -104 on, and no model has scores of thousands.
HIDDEN = -1e4  # a logit below it comes to nothing behind a softmax; authors write -1e9, -inf, finfo.min, ...
_ROWS = 256  # of a mask by positions that are looked at together: all of it is 4 GiB at 32,768 positions


@dataclass(frozen=True)
class KernelForm:
    """`softmax(scale * scores + sum of added, where all masks hold)`.

    Args:
      scale: a number.
      causal: whether query i sees keys up to i only; no mask of `masks` says so then.
      window: with `causal`, how many keys a query sees, its own included; None for all.
      added: nodes, each with the factor by which it is multiplied before it is added.
      masks: nodes that are 0 where a key is not seen, or anything else there if said to be inverted.
    """

    scale: float
    causal: bool
    window: int | None
    added: tuple[tuple[Node, float], ...]
    masks: tuple[tuple[Node, bool], ...]


class NoForm(Exception):
    """An attention that kernels don't compute, and why."""


def kernel_form(attention: Attention, changed: Collection[tuple[int, int]] = ()) -> KernelForm:
    """What an attention's region comes to.

    Args:
      attention: what `find_attentions` found.
      changed: literals (equation's id, operand) that differ by layer.

    Raises:
      NoForm: its logits are something else.

    >>> import jax, jax.numpy as jnp
    >>> from cjax.trace.attention.find import find_attentions
    >>> from cjax.trace.jaxpr.simplify import simplify
    >>> x = jnp.ones((2, 6, 3, 4))
    >>> causal = lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True)
    >>> trace = simplify(jax.make_jaxpr(causal)(x)).jaxpr
    >>> (found,), _ = find_attentions(trace.eqns, trace.outvars)
    >>> kernel_form(found)
    KernelForm(scale=0.5, causal=True, window=None, added=(), masks=())
    """
    return _FormReader(attention, changed).form()


class _FormReader:
    """Reads an attention's region, from the logits back to the scores."""

    def __init__(self, attention: Attention, changed: Collection[tuple[int, int]]) -> None:
        self.attention, self.changed = attention, changed
        self.made = {**attention.sources, **attention.steps}
        self.added: list[tuple[Node, float]] = []
        self.masks: list[tuple[Node, bool]] = []
        # All layers of a loop call the kernel with one scale and one mask.
        for node, (eqn, _) in attention.steps.items():
            if any((id(eqn), place) in changed for place in range(len(eqn.invars))) and node.labels:
                raise NoForm(f"a number in its `{name_of(eqn)}` differs from layer to layer")

    def form(self) -> KernelForm:
        """The form, or `NoForm` at the first thing that has no place in it."""
        attention = self.attention
        # A kernel computes softmax(logits) @ values and offers no place for anything in between. Where something stands
        # there the author's equations are kept, which are right, only slower.
        moved = {
            "the maximum is taken of something else than the logits": (attention.masked, attention.logits),
            "what is summed are not its exponentials": (attention.terms, attention.exps),
            "what is divided are not its exponentials": (attention.numerator, attention.exps),
            "its weights change on their way to the values (dropout)": (attention.dropped, attention.weights),
            "the divisor is more than the sum": (attention.divisor, attention.total),
        }
        for why, (node, of) in moved.items():
            if self._source(node).var is not self._source(of).var:
                raise NoForm(why)
        if attention.multiplies:
            raise NoForm("it multiplies with something made of the sum")
        scale = self._peel(attention.logits)
        causal, window = self._by_positions()
        return KernelForm(scale, causal, window, tuple(self.added), tuple(self.masks))

    def _source(self, node: Node) -> Node:
        """What a node is a mere form of."""
        while node in self.attention.steps:
            eqn, read = self.attention.steps[node]
            if not is_form(eqn) or read[0] is None or node == self.attention.scores:
                break
            node = read[0]
        return node

    def _peel(self, node: Node) -> float:
        """Takes off what was done to the scores, last first; returns by what they were multiplied in all."""
        # Last first: what is added is multiplied by all that came after it, so 2 * (s + b) is 2 s and 2 b.
        factor, scores = 1.0, self.attention.scores
        while (node := self._source(node)) != scores:
            if node not in self.attention.steps:
                raise NoForm("its logits come from outside")
            eqn, read = self.attention.steps[node]
            name = name_of(eqn)
            inside = [place for place, below in enumerate(read) if below is not None and self._has_scores(below)]
            # Anything else (a tanh that caps scores, a clip) is no scale, bias or mask.
            if len(inside) != 1 or name not in ("mul", "div", "add", "select_n") or (name == "div" and inside != [0]):
                raise NoForm(f"its scores go through `{name}`")
            (at,) = inside
            if name == "select_n":
                self._mask(eqn, read, at)
            elif name == "add":
                self.added.append((self._other(read, at), factor))
            else:
                number = self._number(eqn, read, 1 - at)
                factor = factor * number if name == "mul" else factor / number
            below = read[at]
            assert below is not None
            node = below
        return factor

    def _other(self, read: tuple[Node | None, ...], at: int) -> Node:
        other = read[1 - at]
        if other is None:
            raise NoForm("a number is added to all of its scores")  # which changes nothing, and nobody does
        return other

    def _mask(self, eqn: Equation, read: tuple[Node | None, ...], at: int) -> None:
        """Notes a choice between scores and a large negative number as a mask."""
        which = read[0]
        if at == 0 or which is None or len(read) != 3 or eqn.invars[0].aval.dtype != bool:
            raise NoForm("its scores choose between numbers")
        # A mask hides. Where other numbers count, a kernel that hides would give another softmax.
        if self._number(eqn, read, 3 - at) > HIDDEN:
            raise NoForm("some of its scores are replaced by numbers that count")
        self._conjuncts(which, at == 1)  # case 1 is taken where it is False

    def _conjuncts(self, node: Node, inverted: bool) -> None:
        """Masks of which all hold where `node` is not 0, or where it is."""
        node = self._source(node)
        if node not in self.attention.steps:
            self.masks.append((node, inverted))
            return
        eqn, read = self.attention.steps[node]
        name, is_bool = name_of(eqn), node.var.aval.dtype == bool
        known = [below for below in read if below is not None]
        together = name == "mul" or (name == "and" and is_bool)  # of numbers: whatever is not 0
        # A conjunction is taken apart so that each part is judged by itself: "causal and not padding" is a flag of the
        # kernel and a mask of a row, neither of them as large as the scores. By De Morgan a disjunction is, where it is
        # inverted.
        if name in ("ne", "eq") and read[0] is not None and _is_zero(eqn.invars[1]):
            self._conjuncts(read[0], inverted == (name == "ne"))
        elif name == "convert_element_type" and is_bool and read[0] is not None:
            self._conjuncts(read[0], inverted)
        elif name == "not" and is_bool:
            self._conjuncts(known[0], not inverted)
        elif len(known) == 2 and (name == "or" and is_bool if inverted else together):
            for below in known:
                self._conjuncts(below, inverted)
        elif name in MOVES and isinstance(eqn.invars[0], Literal) and bool(literal_of(eqn, 0).val) != inverted:
            pass  # one number everywhere, that hides nothing
        else:
            self.masks.append((node, inverted))

    def _has_scores(self, node: Node) -> bool:
        if node == self.attention.scores:
            return True
        _, read = self.attention.steps.get(node, (None, ()))
        return any(below is not None and self._has_scores(below) for below in read)

    def _number(self, eqn: Equation, read: tuple[Node | None, ...], place: int) -> float:
        """The value of an operand that is one number everywhere."""
        below, atom = read[place], eqn.invars[place]
        while below is not None:
            if below not in self.attention.steps:
                raise NoForm(f"what its `{name_of(eqn)}` takes is not known before it runs")
            eqn, read = self.attention.steps[below]
            if name_of(eqn) not in MOVES:
                raise NoForm(f"what it takes comes from `{name_of(eqn)}`")
            below, atom, place = read[0], eqn.invars[0], 0
        is_changed = (id(eqn), place) in self.changed
        if not isinstance(atom, Literal) or np.ndim(atom.val) != 0 or is_changed:
            raise NoForm(f"what its `{name_of(eqn)}` takes is not one number")
        return float(atom.val)

    # --- masks that depend on nothing but positions ---

    def _by_positions(self) -> tuple[bool, int | None]:
        """Whether masks by positions are causal, and in what window; these are no longer in `masks` then."""
        query, key = self.attention.label("query"), self.attention.label("key")
        mine = [pair for pair in self.masks if self._positional(pair[0], {query, key})]
        if not mine:
            return False, None
        # Authors spell a causal mask in a dozen ways (tril, two iotas, a slice of a table). So it is not recognised but
        # evaluated, every element of it; one key more or less, and it is handed over as the mask it is.
        num_queries, num_keys = self.attention.sizes[query], self.attention.sizes[key]
        columns = np.arange(num_keys)
        last = self._rows(mine, num_queries - 1, num_queries)[0]
        window = int(last.sum())
        causal = True
        for first in range(0, num_queries, _ROWS):
            stop = min(first + _ROWS, num_queries)
            rows = np.arange(first, stop)[:, None]
            wanted = (columns <= rows) & (columns > rows - max(window, 1))
            causal = causal and bool((self._rows(mine, first, stop) == wanted).all())
        if causal:
            self.masks = [pair for pair in self.masks if pair not in mine]
        # The last query sees the most keys, so its number of them is the window, if there is one at all: all rows were
        # compared with it.
        return causal, window if causal and window < min(num_queries, num_keys) else None

    def _positional(self, node: Node, positions: set[int]) -> bool:
        """Whether it depends on nothing but `positions`, whatever else it was broadcast to."""
        if node not in self.made:
            return False
        eqn, read = self.made[node]
        if name_of(eqn) == "iota" and not positions.issuperset(node.labels[eqn.params["dimension"]]):
            return False
        # Random bits depend on their key too, which is not known before it runs.
        return name_of(eqn) != "random_bits" and all(
            below is None or self._positional(below, positions) for below in read
        )

    def _rows(self, masks: list[tuple[Node, bool]], first: int, stop: int) -> np.ndarray:
        """bool[stop - first, keys]: where all of the masks hold."""
        query, key = self.attention.label("query"), self.attention.label("key")
        seen = np.ones((stop - first, self.attention.sizes[key]), bool)
        for node, inverted in masks:
            value = _as_matrix(self._value(node, first, stop), node.labels, query, key)
            seen &= (value != 0) != inverted
        return seen

    def _value(self, node: Node, first: int, stop: int) -> np.ndarray:
        """Of a node that depends on positions alone, for queries from `first` on, and all keys."""
        query, key = self.attention.label("query"), self.attention.label("key")
        sizes = {query: stop - first, key: self.attention.sizes[key]}

        def apply(step: Step[Equation, Node], ins: list[np.ndarray]) -> list[np.ndarray]:
            eqn, (made,) = step.of, step.writes
            dims = zip(made.labels, made.var.aval.shape, strict=True)
            shape = tuple(sizes.get(label[0], 1) if label else size for label, size in dims)
            along = eqn.params["dimension"] if name_of(eqn) == "iota" else None
            start = first if along is not None and made.labels[along] == (query,) else 0
            return [_evaluated(eqn, ins, shape, start)]

        known: dict[Node, np.ndarray] = {}
        steps = demanded(node, self.made, known)
        evaluate(steps, known.__getitem__, known.update, lambda eqn, at: np.asarray(literal_of(eqn, at).val), apply)
        return known[node]


def _is_zero(atom: Atom) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and atom.val == 0


def _as_matrix(value: np.ndarray, labels: Labels, query: int, key: int) -> np.ndarray:
    """[queries or 1, keys or 1] of a value with dims as `labels` says, all others of size 1."""
    at = {label[0]: dim for dim, label in enumerate(labels) if label}
    shape = [value.shape[at[one]] if one in at else 1 for one in (query, key)]
    if query in at and key in at and at[query] > at[key]:
        value = np.swapaxes(value, at[query], at[key])
    return value.reshape(shape)


def _evaluated(eqn: Equation, ins: list[np.ndarray], shape: tuple[int, ...], start: int) -> np.ndarray:
    """An equation's result on a block, without a device: this runs while programs are made."""
    name, dtype = name_of(eqn), eqn.outvars[0].aval.dtype
    if name == "iota":
        dim = eqn.params["dimension"]
        along = [1] * len(shape)
        along[dim] = -1
        return np.broadcast_to((np.arange(shape[dim]) + start).reshape(along), shape).astype(dtype)
    if name == "broadcast_in_dim":
        inner = [1] * len(shape)
        for dim, place in enumerate(eqn.params["broadcast_dimensions"]):
            inner[place] = ins[0].shape[dim]
        return np.broadcast_to(ins[0].reshape(inner), shape)
    if name == "transpose":
        return ins[0].transpose(eqn.params["permutation"])
    if name in MOVES:
        return ins[0].reshape(shape).astype(dtype)
    arithmetic = facts_of(eqn).numpy
    # Without a NumPy function of the same meaning nothing is evaluated, rather than with one that is nearly it.
    if arithmetic is None:
        raise NoForm(f"its mask is made by `{name}`")
    return np.asarray(arithmetic(*ins)).astype(dtype)
