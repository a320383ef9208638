"""Attention in a trace: a matmul of queries and keys, a softmax over the keys, a matmul with values.

What stands between the scores and the softmax is not matched against any list of masks and biases. It is a *region*:
all equations that lead to the logits and see both positions. They can be evaluated again on any block of the score
matrix, from inputs that have one of the two positions, or none, or come from outside at full size and are sliced.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp

from cjax.jax_compat.core import Atom, Equation, Literal, Var
from cjax.jax_compat.jaxprs import name_stack
from cjax.trace.attention.labels import Labels, Node, incoming, is_form
from cjax.trace.attention.walk import Index, Miss, Other, Walk
from cjax.trace.jaxpr.groups import Group, make_group
from cjax.trace.jaxpr.primitives import facts_of, name_of

Steps = Mapping[Node, tuple[Equation, tuple[Node | None, ...]]]


@dataclass(frozen=True)
class Attention:
    """`out = rest(numerator(exp(logits - max)) / divisor(sum(terms(exp(logits - max))))) @ value`, in equations.

    Each field from `query` to `out` is a `Node`: a variable and which labels its dims are. A label is a dim of the
    scores; `sizes` and `roles` ("batch", "heads", "query" or "key") describe it.

    Args:
      query, key, value, out: the operands and the result.
      scores: the product of query and key.
      logits: what is exponentiated, the maximum aside; made of scores by the region.
      masked: what the maximum is taken of.
      maximum: of `masked`, and None where none is taken.
      shift: what is taken off the logits before they are exponentiated, made of `maximum`; None where nothing is.
      exps: the exponentials.
      terms: what is summed, linear in `exps`.
      total: the sums.
      divisor: what `numerator` is divided by (or, if `multiplies`, multiplied with); made of `total`, and where it is
        more than that of `maximum` and leaves as well.
      numerator: linear in `exps`.
      weights: the softmax.
      dropped: what is multiplied with `value`, linear in `weights`.
      leaves: the region's inputs.
      key_first: whether `scores_eqn` has keys on its left.
      steps: for each node that can be evaluated, the equation and the nodes it reads (None for a literal).
      sources: the same for integer leaves, as far as they are made in the trace: for bounds on them.
      group: the equations that this stands for; its inputs are all that `query`, `key`, `value` and `leaves` need.
    """

    query: Node
    key: Node
    value: Node
    out: Node
    scores: Node
    logits: Node
    masked: Node
    maximum: Node | None
    shift: Node | None
    exps: Node
    terms: Node
    total: Node
    divisor: Node
    multiplies: bool
    numerator: Node
    weights: Node
    dropped: Node
    leaves: tuple[Node, ...]
    steps: Steps
    sources: Steps
    sizes: Mapping[int, int]
    roles: Mapping[int, str]
    scores_eqn: Equation
    key_first: bool
    out_eqn: Equation
    group: Group[None]

    @property
    def eqns(self) -> tuple[Equation, ...]:
        """The equations that this stands for, in order."""
        return self.group.eqns

    @property
    def operands(self) -> tuple[Node, ...]:
        """All that it reads: query, key, value and the region's inputs. One variable may stand there more than once."""
        return (self.query, self.key, self.value, *self.leaves)

    @property
    def where(self) -> str:
        """The module it belongs to, as far as names say."""
        names = str(name_stack(self.scores_eqn)).split("/")
        return "/".join(name for name in names if "->" not in name)

    def origin(self, node: Node) -> Node:
        """What a node of the region is a mere form of."""
        return _origin(node, self.steps)

    @property
    def divides_by_sum(self) -> bool:
        """Whether weights are exponentials divided by their sum, and by no more."""
        return not self.multiplies and self.origin(self.divisor).var is self.total.var

    def label(self, role: str) -> int:
        """The one label of the query's or the key's position."""
        (found,) = (label for label, of in self.roles.items() if of == role)
        return found

    def dims_of(self, var: Var) -> tuple[str | None, ...]:
        """What each dim of an operand or the result is: batch, heads, query, key, depth, or None for neither."""
        nodes = (self.query, self.key, self.value, self.out)
        node = next(node for node in (*nodes, *self.leaves) if node.var is var)
        depth = "depth" if node in nodes else None
        shape = var.aval.shape
        found = zip(node.labels, shape, strict=True)
        return tuple(self.roles[label[0]] if label else (depth if size > 1 else None) for label, size in found)


def find_attentions(
    eqns: Sequence[Equation], results: Sequence[Atom], before: Sequence[Equation] = (), weights: Sequence[Var] = ()
) -> tuple[list[Attention], list[str]]:
    """The attentions in a list of equations, and for what looks like one and is not, why.

    Args:
      eqns: a flat trace's equations, or those of one layer.
      results: variables read after the last of them.
      before: earlier equations whose results may be made again, block by block: of a mask that all layers share. For
        one layer of several that are rolled into a loop, those before the first layer and no others.
      weights: variables that are trained; a product with one is not a matrix of scores.

    >>> import jax, jax.numpy as jnp
    >>> from cjax.trace.jaxpr.simplify import simplify
    >>> x = jnp.ones((2, 6, 3, 4))
    >>> trace = simplify(jax.make_jaxpr(jax.nn.dot_product_attention)(x, x, x)).jaxpr
    >>> (found,), _ = find_attentions(trace.eqns, trace.outvars)
    >>> found.dims_of(found.query.var)
    ('batch', 'query', 'heads', None, 'depth')
    """
    trace = Index(eqns, results, before)
    known = set(weights)
    found: list[Attention] = []
    reasons: list[str] = []
    taken: set[int] = set()
    for eqn in eqns:
        # A product with a weight is a projection, and a softmax behind it one over classes: no position of keys to
        # split.
        if name_of(eqn) != "dot_general" or any(trace.origin(atom) in known for atom in eqn.invars):
            continue
        try:
            attention = _find(trace, eqn)
        # Most products never come near a softmax, and say nothing. One that gets as far as a softmax's weights and no
        # further (`Miss`) is told: under a sequence axis its positions stay whole, which somebody may have paid for.
        except Other:
            continue
        except Miss as miss:
            where = str(name_stack(eqn))
            reasons.append(f"the softmax{' in ' + where if where else ''} is no attention: {miss}")
            continue
        # An equation is evaluated by one attention, or it would be computed, and differentiated, in two places.
        if taken.isdisjoint(map(id, attention.eqns)):
            found.append(attention)
            taken.update(map(id, attention.eqns))
    return found, reasons


def _find(trace: Index, eqn: Equation) -> Attention:
    walk = Walk(trace, eqn)
    walk.walk()
    return _Builder(walk).attention()


@dataclass
class _Builder:
    """An attention from a walk that got through."""

    walk: Walk
    steps: dict[Node, tuple[Equation, tuple[Node | None, ...]]] = field(default_factory=dict)
    sources: dict[Node, tuple[Equation, tuple[Node | None, ...]]] = field(default_factory=dict)
    leaves: dict[Node, None] = field(default_factory=dict)
    positions: tuple[int, int] = (-1, -1)

    def attention(self) -> Attention:
        """What was found, with all that it takes to evaluate it by blocks."""
        walk, by_name = self.walk, self.walk.by_name
        final = by_name["final"]
        query, key = self._products()
        value, out = self._output(final)
        self.positions = (by_name["query"], by_name["key"])
        names = ("logits", "exps", "terms", "total", "numerator", "weights", "dropped")
        variables = {name: by_name[name] for name in names} | {"scores": walk.start.outvars[0]}
        variables["masked"] = by_name.get("masked", by_name["logits"])
        nodes = {name: Node(var, walk.labels[var]) for name, var in variables.items()}
        division = by_name["division"]
        read = incoming(division, walk.labels[by_name["weights"]], walk.sizes)
        assert read is not None
        divisor = read[[walk.kinds[v] for v in division.invars].index("sum")]
        nodes["divisor"] = Node(by_name["divisor"], tuple(of if of != (by_name["key"],) else () for of in divisor))
        taken = [name for name in ("maximum", "shift") if name in by_name]
        row_nodes = {name: Node(by_name[name], walk.labels[by_name[name]]) for name in taken}
        # Four chains, each from one of these to the next: scores to logits, exponentials to what is summed and what is
        # divided, sums and maxima to their divisor, the weights to what is multiplied with values. Only the first may
        # be any function.
        stops = {nodes[name] for name in ("scores", "exps", "total", "weights")} | {row_nodes.get("maximum")}
        for name in ("logits", "masked", "terms", "numerator", "divisor", "dropped"):
            self._demand(nodes[name], stops)
        multiplies = name_of(division) == "mul"
        self._require_shift(nodes, row_nodes, stops, multiplies)
        leaves = tuple(self.leaves)
        return Attention(
            query=query, key=key, value=value, out=out, **nodes, maximum=row_nodes.get("maximum"),
            shift=row_nodes.get("shift"), leaves=leaves, steps=self.steps, sources=self.sources, sizes=walk.sizes,
            roles=self._roles(query), multiplies=multiplies,
            scores_eqn=walk.start, key_first=bool(by_name["key_side"] == 0), out_eqn=final,
            group=self._group([query, key, value, *leaves]),
        )  # fmt: skip

    def _products(self) -> tuple[Node, Node]:
        """Queries and keys. Of the dims that only queries have, one is their position."""
        walk, by_name = self.walk, self.walk.by_name
        (contract, batch) = walk.start.params["dimension_numbers"]
        shapes = [atom.aval.shape for atom in walk.start.invars]
        labels: list[list[tuple[int, ...]]] = [[()] * len(shape) for shape in shapes]
        free: list[list[int]] = []
        # Labels are dims of the scores, in the order in which dot_general puts them: batch dims, those of the left
        # operand alone, those of the right.
        label = len(batch[0])
        for side, shape in enumerate(shapes):
            for place, dim in enumerate(batch[side]):
                labels[side][dim] = (place,) if shape[dim] > 1 else ()
            mine = [dim for dim in range(len(shape)) if dim not in (*contract[side], *batch[side])]
            for dim in mine:
                labels[side][dim] = (label,) if shape[dim] > 1 else ()
                label += 1
            free.append([labels[side][dim][0] for dim in mine if shape[dim] > 1])
        key = by_name["key"]
        if key not in free[0] + free[1]:
            raise Miss("it is no softmax over a dim that only one operand has")
        side = by_name["key_side"] = 0 if key in free[0] else 1
        # Two dims of keys alone would be summed over as one, and no block of the first is a block of the scores.
        if free[side] != [key]:
            raise Miss("keys have heads that queries do not have")
        (_, batched) = by_name["final"].params["dimension_numbers"]
        place = 0 if by_name["final"].invars[0] is by_name["dropped"] else 1
        shared = {label for dim in batched[place] for label in walk.labels[by_name["dropped"]][dim]}
        # A dim that values share is heads in groups, whose queries read different values; what is left can be cut into
        # blocks of queries that all read the same.
        candidates = [label for label in free[1 - side] if label not in shared]
        if not candidates:
            raise Miss("each query has values of its own")
        sizes = walk.sizes
        # Positions and grouped heads are told apart by size: as many queries as keys, or else more than groups.
        by_name["query"] = max(candidates, key=lambda one: (sizes[one] == sizes[key], sizes[one]))
        pairs = zip(walk.start.invars, labels, strict=True)
        nodes = [Node(atom, tuple(of)) for atom, of in pairs if not isinstance(atom, Literal)]
        if len(nodes) != 2:
            raise Other
        return nodes[1 - side], nodes[side]

    def _output(self, final: Equation) -> tuple[Node, Node]:
        """Values, and what the attention comes to."""
        walk, by_name = self.walk, self.walk.by_name
        (contract, batch) = final.params["dimension_numbers"]
        side = 0 if final.invars[0] is by_name["dropped"] else 1
        known = walk.labels[by_name["dropped"]]
        # By blocks of keys the result is a sum of the blocks' results. With another dim in that sum it would be counted
        # once a block.
        if [known[dim] for dim in contract[side] if known[dim]] != [(by_name["key"],)]:
            raise Miss("its weights are summed over more than keys")
        value = final.invars[1 - side]
        if isinstance(value, Literal) or value in walk.kinds:
            raise Miss("its values are weights or depend on scores")
        labels: list[tuple[int, ...]] = [()] * len(value.aval.shape)
        pairs = [*zip(contract[side], contract[1 - side], strict=True), *zip(batch[side], batch[1 - side], strict=True)]
        for mine, other in pairs:
            labels[other] = known[mine]
        free = [
            [of[dim] for dim in range(len(of)) if dim not in (*contract[place], *batch[place])]
            for place, of in ((0, known if side == 0 else labels), (1, labels if side == 0 else known))
        ]
        made = tuple([known[dim] for dim in batch[side]] + free[0] + free[1])
        return Node(value, tuple(labels)), Node(final.outvars[0], made)

    def _demand(self, node: Node, stops: set[Node | None]) -> None:
        """Remember how to evaluate a node on a block, down to `stops` and leaves."""
        if node in stops or node in self.steps or node in self.leaves:
            return
        eqn = self.walk.trace.writer.get(node.var)
        on_spine = node.var in self.walk.kinds
        seen = {one for label in node.labels for one in label}
        # A block of positions is no slice of a dim that holds them merged with heads.
        if any(len(label) > 1 and not set(label).isdisjoint(self.positions) for label in node.labels):
            raise Miss("positions are merged with another dim")
        below = None
        # What sees both positions is made again block by block, since at full size it is as large as the scores. What
        # sees one or none is small: it is made where the author made it, and sliced.
        if eqn is not None and len(eqn.outvars) == 1 and (on_spine or seen.issuperset(self.positions)):
            below = incoming(eqn, node.labels, self.walk.sizes)
        if eqn is None or below is None:
            # What depends on scores exists on a block alone, so it can't be read from outside; what does not is an
            # input.
            if on_spine:
                raise Miss(f"`{name_of(eqn) if eqn else 'its input'}` can't be evaluated on a block of it")
            self.leaves[node] = None
            self._trace_back(node)
            return
        self.steps[node] = (eqn, _reads(eqn, below))
        for each in self.steps[node][1]:
            if each is not None:
                self._demand(each, stops)

    def _require_shift(
        self, nodes: Mapping[str, Node], rows: Mapping[str, Node], stops: set[Node | None], multiplies: bool
    ) -> None:
        """Whether exponentials may be taken relative to another number than the author's, a maximum of some keys."""
        divisor = _origin(nodes["divisor"], self.steps)
        is_sum = not multiplies and divisor.var is nodes["total"].var
        if "shift" not in rows:
            if "maximum" in rows and not is_sum:
                raise Miss("its divisor reads a maximum that was not taken off its exponents")
            return
        # What is taken off cancels between numerator and sum, and so do its gradients, if both have them or none.
        of_sum, of_numerator = (self._leads(nodes[name], {nodes["exps"]}) for name in ("terms", "numerator"))
        if is_sum and of_sum == of_numerator:
            return
        shift, maximum = rows["shift"], rows["maximum"]
        self._demand(shift, stops)
        # Blocks take off what has no gradient. If what the author takes off has one, it must be nothing in all.
        ends = set[Node]() if self.walk.stops_masked else {maximum}
        if not self._leads(shift, ends | set(self.leaves)) and not self._leads(nodes["divisor"], ends):
            return
        by: Node | None = divisor
        if multiplies:  # with a reciprocal, or nothing cancels
            eqn, read = self.steps.get(divisor, (self.walk.start, ()))
            by = read[1] if name_of(eqn) == "div" and read[0] is None else None
        cancels = by is not None and self._cancels(by, nodes["total"], _origin(shift, self.steps), maximum)
        if not (of_sum and of_numerator and cancels):
            raise Miss(
                "its divisor is not the sum of its exponentials alone, gradient and all, and the maximum that was "
                "taken off has a gradient, which jax.lax.stop_gradient around it would stop"
            )

    def _leads(self, node: Node, ends: set[Node]) -> bool:
        """Whether a node hands a gradient back to one of `ends`."""
        if not jnp.issubdtype(node.var.aval.dtype, jnp.inexact):
            return False
        if node in ends or node not in self.steps:
            return node in ends
        eqn, read = self.steps[node]
        return not facts_of(eqn).stops and any(self._leads(below, ends) for below in read if below is not None)

    def _cancels(self, node: Node, total: Node, shift: Node, maximum: Node) -> bool:
        """Whether a divisor is the sum, and other exponentials from which the same was taken off: any number may be."""
        node = _origin(node, self.steps)
        if node not in self.steps:
            return node.var is total.var
        eqn, read = self.steps[node]
        name, below = name_of(eqn), [one for one in read if one is not None]
        if name == "add" and len(below) == 2:
            return all(self._cancels(one, total, shift, maximum) for one in below)
        if name != "exp":
            return False
        eqn, read = self.steps.get(_origin(below[0], self.steps), (eqn, ()))
        off = read[-1] if name_of(eqn) in ("sub", "neg") else None
        others = [one for one in read[:-1] if one is not None]
        is_fixed = not any(self._leads(one, {shift, maximum}) for one in others)
        return off is not None and _origin(off, self.steps) == shift and is_fixed

    def _trace_back(self, node: Node) -> None:
        """Remember where an integer or boolean leaf comes from."""
        eqn = self.walk.trace.writer.get(node.var)
        # Positions and masks are integers and booleans. Of these bounds can tell which blocks are empty, even where
        # they are made outside; of floats they can't.
        whole = getattr(node.var.aval.dtype, "kind", "key") in "iub"  # keys have dtypes of their own
        if node in self.sources or eqn is None or len(eqn.outvars) != 1 or not whole:
            return
        below = incoming(eqn, node.labels, self.walk.sizes)
        if below is None:
            return
        self.sources[node] = (eqn, _reads(eqn, below))
        for each in self.sources[node][1]:
            if each is not None:
                self._trace_back(each)

    def _roles(self, query: Node) -> dict[int, str]:
        """Dims before the queries' position are batch, but the last of several; groups and those after it are heads."""
        position, key = self.positions
        # Roles say which mesh axes may split a dim. An attention does the same for every element of batch and heads, so
        # that taking one for the other costs transfers alone.
        roles = {position: "query", key: "key"}
        order = [label[0] for label in query.labels if label]
        at = order.index(position)
        (_, (batch, _)) = self.walk.start.params["dimension_numbers"]
        grouped = [one for one in order if one >= len(batch) and one != position]
        ahead = [one for one in order[:at] if one not in grouped]
        heads = set(order[at + 1 :]) | set(grouped)
        if not order[at + 1 :] and len(ahead) > 1:
            heads.add(ahead[-1])
        for one in order:
            roles.setdefault(one, "heads" if one in heads else "batch")
        return roles

    def _group(self, operands: Sequence[Node]) -> Group[None]:
        """The equations that nobody else needs, with the operands as inputs."""
        trace = self.walk.trace
        members = {id(eqn): eqn for eqn in (self.walk.start, *self.walk.spine)}
        inside = {id(eqn): eqn for eqn, _ in self.steps.values() if id(eqn) in trace.place}
        kept = trace.results | {node.var for node in operands}
        # A mask that someone else reads as well stays where it is and is made again here; one that only this attention
        # reads never exists at full size. Last first, so that what feeds it alone goes with it.
        for eqn in sorted(inside.values(), key=lambda eqn: -trace.place[id(eqn)]):
            (var,) = eqn.outvars
            if var not in kept and all(id(reader) in members for reader in trace.readers[var]):
                members[id(eqn)] = eqn
        group = make_group(list(members.values()), trace.eqns, list(trace.results), None)
        if group is None:
            raise Miss("something beside it depends on it and is read by it")
        (out,) = self.walk.by_name["final"].outvars
        # The scores of a block are gone once it is done; whoever wants them all has to compute them whole.
        if group.outs != (out,):
            raise Miss("its scores or weights are read elsewhere as well (sown, or returned)")
        ins = tuple(dict.fromkeys(node.var for node in operands))
        return Group(group.eqns, ins, group.outs, None)


def _origin(node: Node, steps: Steps) -> Node:
    while node in steps and is_form(steps[node][0]):
        (below,) = steps[node][1]
        assert below is not None
        node = below
    return node


def _reads(eqn: Equation, labels: Sequence[Labels]) -> tuple[Node | None, ...]:
    pairs = zip(eqn.invars, labels, strict=True)
    return tuple(None if isinstance(atom, Literal) else Node(atom, of) for atom, of in pairs)
